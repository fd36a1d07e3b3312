"""Configurations of a plan as dry runs of the real code: cut in depth, and extrapolated.

Layers are alike, so a few of them tell what each costs. A *proxy* has the configuration's tensor, context and data
parallelism, microbatch and schedule on the same kind of nodes, but at most 4 pipeline ranks, 2 stages on each, twice as
many microbatches as ranks, and few layers. Step time is linear in the number of layers and of checkpointed layers, so
two or three proxies give it at full depth. In a dry run no rank is late, so the time that ranks wait for late ones is
added in closed form. That also says how a full pipeline with all microbatches relates to the proxy's. Memory is that of
the closed form, and as much more as the largest proxy's dry run needs more than the closed form says of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from refshard.errors import SpecError, UnsupportedError
from refshard.measure.dry.rank import DryResult
from refshard.plan.estimate import checkpointed_layers, estimate
from refshard.plan.space import Candidates
from refshard.specs.case import Case, Protocol
from refshard.specs.cluster import ClusterSpec
from refshard.specs.job import Implementation, Job
from refshard.specs.layers import layers_of_stages
from refshard.specs.model import ModelSpec, parameter_count
from refshard.specs.writing import to_toml
from refshard.strategies import check_case
from refshard.strategies.table import ROWS, not_dry_run

MOST_RANKS, MOST_STAGES, MOST_MICROBATCHES = 4, 2, 2
"""A proxy's pipeline ranks, stages on each, and microbatches without a pipeline, at most."""
FEW, MORE = 2, 4
"""Layers of the proxies without a pipeline; with one, 1 and 2 on each stage."""
_SEQUENCE_PARALLEL = ("fsdp2", "ddp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the names of model and cluster of all jobs stand for."""

    model: ModelSpec
    cluster: ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxies:
    """The proxies of one configuration: ``small``, and cases by how many layers, and how many of them checkpointed."""

    full: Job
    small: Job
    cases: Mapping[tuple[int, int], Case]


class Closed(NamedTuple):
    """What a closed form says: seconds of a step, those in them in which ranks wait for late ones, and bytes."""

    step_s: float
    late_s: float
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Extrapolated:
    """What the proxies of one configuration come to: seconds of a step, and bytes that the caching allocator hands out
    and reserves on the rank that needs most, with no limit. Near the limit, an allocator gives back what it does not
    use, so that less is reserved. ``beyond_bytes`` of what is allocated are more than in closed form.
    """

    step_s: float
    allocated_bytes: int
    reserved_bytes: int
    beyond_bytes: int


def proxies_of(job: Job, setting: Setting, folder: Path) -> Proxies | str:
    """The job's proxies, with their models written to ``folder``; or why it has none."""
    if job.strategy not in ROWS:
        return f"refshard does not run {job.strategy}"
    if job.frozen:
        return "frozen parts are not dry-run at fewer layers"
    if job.precision not in ("bf16", "fp32") or job.offload:
        return "fp8, mxfp8, nvfp4 and offload are not dry-run"
    if job.implementation.compiled:
        return "proxies are of eager blocks"
    if job.ep > 1 or setting.model.experts:
        return "mixtures of experts are not dry-run"
    if not job.implementation.reduce_each:
        return "refshard's sharded strategies reduce gradients after each microbatch; this row reduces once a step"
    small = _small(job)
    try:
        cases = {point: _case(small, setting, folder, *point) for point in _points(job, small)}
        for case in cases.values():
            check_case(case, cuda=True)
            if reason := not_dry_run(case):
                return reason
    except (SpecError, UnsupportedError) as error:
        return str(error)
    return Proxies(full=job, small=small, cases=cases)


def extrapolate(
    proxies: Proxies, setting: Setting, results: Mapping[tuple[int, int], Sequence[DryResult]]
) -> Extrapolated | str:
    """What the dry runs of the proxies come to at full size; or why they come to nothing."""
    figures = {}
    for point, ranks in results.items():
        failed = next((one for one in ranks if one.state != "ok"), None)
        if failed is not None or not ranks or not ranks[-1].steps:
            return (failed.error or failed.state) if failed is not None else "the dry run did not end"
        figures[point] = _figures(ranks)
    layers, checkpointed = _full_depth(proxies, setting)
    step_s = _linear({point: found[0] for point, found in figures.items()}, layers, checkpointed)
    full = closed(proxies.full, setting, setting.model.n_layers)
    small = closed(proxies.small, setting, round(layers))
    largest = max(figures)
    known = msgspec.structs.replace(proxies.small, checkpointing=_policy(proxies.small, largest[1]))
    known_bytes = closed(known, setting, largest[0]).peak_bytes
    _, allocated, reserved = figures[largest]
    return Extrapolated(
        step_s=(step_s + small.late_s) * full.step_s / small.step_s,
        allocated_bytes=round(full.peak_bytes + allocated - known_bytes),
        reserved_bytes=round(full.peak_bytes + reserved - known_bytes), beyond_bytes=round(allocated - known_bytes),
    )  # fmt: skip


def closed(job: Job, setting: Setting, layers: int) -> Closed:
    """The closed form of ``layers`` layers."""
    model = msgspec.structs.replace(setting.model, n_layers=layers)
    cluster = setting.cluster.of_world_size(job.gpus)
    one = estimate(model, cluster, job.seq_len, Candidates.of([job]))
    return Closed(float(one.step_s[0]), float(one.straggling_s[0]), float(one.memory.peak[0]))


def _small(one: Job) -> Job:
    """The configuration with a short pipeline and few microbatches."""
    pp, interleave = min(one.pp, MOST_RANKS), min(one.interleave, MOST_STAGES)
    microbatches = min(one.microbatches, 2 * pp if pp > 1 else MOST_MICROBATCHES)
    return msgspec.structs.replace(
        one, gpus=one.gpus // one.pp * pp, pp=pp, interleave=interleave, microbatches=microbatches,
        global_batch=one.global_batch // one.microbatches * microbatches,
    )  # fmt: skip


def _points(full: Job, small: Job) -> list[tuple[int, int]]:
    """Numbers of layers, and of checkpointed ones: enough to separate the effects that matter."""
    few, more = (FEW, MORE) if small.pp == 1 else (1, 2)
    stages = small.pp * small.interleave if small.pp > 1 else 1
    few, more = few * stages, more * stages
    if full.checkpointing in ("none", "selective"):
        return [(few, 0), (more, 0)]
    if full.checkpointing == "full":
        return [(few, few), (more, more)]
    return [(few, 0), (more, 0), (more, more)]


def _case(small: Job, setting: Setting, folder: Path, layers: int, checkpointed: int) -> Case:
    job = msgspec.structs.replace(
        small, model=_model_file(setting.model, layers, folder), checkpointing=_policy(small, checkpointed),
        sequence_parallel=small.tp > 1 and small.strategy in _SEQUENCE_PARALLEL, implementation=Implementation(),
    )  # fmt: skip
    return Case(job=job, protocol=Protocol(fidelity="dryrun"))


def _policy(small: Job, checkpointed: int) -> str:
    """A proxy's checkpointing: of all of its layers or of none."""
    if small.checkpointing == "selective":
        return "selective"
    return "full" if checkpointed else "none"


def _model_file(model: ModelSpec, layers: int, folder: Path) -> str:
    path = folder / f"layers-{layers}.toml"
    if not path.exists():
        cut = msgspec.structs.replace(model, n_layers=layers, source=f"{layers} layers of: {model.source}")
        path.write_text(to_toml(msgspec.structs.replace(cut, params=parameter_count(cut))))
    return str(path)


def _figures(ranks: Sequence[DryResult]) -> tuple[float, float, float]:
    """Seconds of the last step, and the most bytes that were handed out on any rank, and reserved."""
    peaks = [step.peak for step in ranks[-1].steps if step.peak] or [rank.peak for rank in ranks]
    return (
        max(step.step_s for step in ranks[-1].steps),
        float(max(peak.allocated for peak in peaks)),
        float(max(peak.reserved for peak in peaks)),
    )


def _full_depth(proxies: Proxies, setting: Setting) -> tuple[float, float]:
    """How many layers the small pipeline would have with as many on each rank as the full one, and how many of them
    checkpointed.
    """
    full, small = proxies.full, proxies.small
    per_rank = max(map(len, layers_of_stages(setting.model.n_layers, full.pp)))
    layers = float(per_rank * small.pp) if full.pp > 1 else float(setting.model.n_layers)
    if full.checkpointing in ("none", "selective"):
        return layers, 0.0
    share = checkpointed_layers(full.checkpointing, per_rank) / per_rank
    return layers, share * layers


def _linear(figures: Mapping[tuple[int, int], float], layers: float, checkpointed: float) -> float:
    """The figure at full depth: a constant, and so much for each layer and each checkpointed one."""
    points = sorted(figures)
    (few, first), (more, second) = points[0], points[1]
    each = (figures[points[1]] - figures[points[0]]) / (more - few)
    found = figures[points[0]] + each * (layers - few)
    if len(points) > 2:
        extra = (figures[points[2]] - figures[points[1]]) / (points[2][1] - second)
        found += extra * (checkpointed - first)
    return found
