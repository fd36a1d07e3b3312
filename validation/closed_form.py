"""Published runs as configurations and claims as ratios, beside what the closed forms predict."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import msgspec

from refshard.errors import SpecError
from refshard.plan.estimate import estimate
from refshard.plan.space import Candidates
from refshard.quantities import GIB
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.hardware import LOW_BYTES
from refshard.specs.job import Implementation, Job
from refshard.specs.layers import POLICY
from refshard.specs.model import ModelSpec
from refshard.specs.reading import convert
from validation.schema import HALVES, Claim, Figure, Half, Run, Source, load_sources, model_of

_STRATEGIES = {
    "fsdp1": "fsdp1", "fsdp1, SHARD_GRAD_OP": "fsdp1-grad-op", "fsdp2": "fsdp2", "zero0": "ddp", "zero1": "megatron",
    "fsdp2, asynchronous tensor parallelism": "fsdp2", "yafsdp": "refshard-yafsdp",
    "fsdp2, ends in units": "fsdp2-tuned", "simplefsdp, by block": "simplefsdp-by-block",
}  # fmt: skip
_BY_RUN = ("seq_len", "strategy", "checkpointing", "precision", "interleave")
"""Assumptions about fields that a run may state itself; the others hold for all runs of a source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published run as a configuration of a model on a cluster; ``seconds`` is its step time."""

    table: str
    run: Run
    model: ModelSpec
    cluster: ClusterSpec
    job: Job
    seconds: float
    half: Half = "held out"

    @property
    def setting(self) -> tuple[object, ...]:
        """What runs share that differ only in their number of GPUs, their release, their file, or in how operands of 8
        bits are scaled.
        """
        r, precision = self.run, "fp8" if self.run.precision == "mxfp8" else self.run.precision
        return (
            self.table, r.hardware, r.model, r.layers, precision, self.job.seq_len, r.tp, r.pp, r.interleave,
            r.cp, r.ep, None if r.dp_shard == r.gpus else r.dp_shard, r.microbatch, r.checkpointing, r.compiled,
            r.strategy,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A published run and its prediction: step time in seconds, peak of allocated memory in GiB.

    Errors are fractions of the published figure, above 0 if the prediction is larger; None without a figure.
    """

    published: Published
    seconds: float
    allocated_gib: float

    @property
    def error(self) -> float:
        """Error of the step time."""
        return self.seconds / self.published.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Error of the allocated memory."""
        printed = self.published.run.allocated_gib
        return self.allocated_gib / printed - 1 if printed else None

    @property
    def source_error(self) -> float | None:
        """Error of the source's own prediction of the step time."""
        own = self.published.run.predicted_seconds
        return own / self.published.seconds - 1 if own else None

    def figure(self, name: Figure) -> float:
        """Tokens per second and GPU, seconds, or GiB."""
        one = self.published
        if name == "throughput":
            return one.job.global_batch * one.job.seq_len / self.seconds / one.run.gpus
        return self.seconds if name == "step time" else self.allocated_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedClaim:
    """A claim of a source, and its runs; None where the source lacks them."""

    table: str
    source: str
    claim: Claim
    claimed: Predicted | None = None
    baseline: Predicted | None = None

    @property
    def ratio(self) -> float | None:
        """The predicted figure of the claimed run over that of the baseline."""
        if self.claimed is None or self.baseline is None:
            return None
        return self.claimed.figure(self.claim.figure) / self.baseline.figure(self.claim.figure)


def published_of(name: str, source: Source, run: Run) -> Published | str:
    """The run as a configuration, or why it is none: what its source does not say."""
    assumed, cluster_name = source.assumed, source.cluster_of(run)
    seq_len = run.seq_len or assumed.get("seq_len")
    if cluster_name is None:
        return f"no cluster profile for {run.hardware}"
    if not isinstance(seq_len, int):
        return "the sequence length is not stated"
    policy = run.checkpointing or assumed.get("checkpointing")
    if not POLICY.fullmatch(str(policy)):
        return f"checkpointing: {policy or 'not stated'}"
    precision = run.precision or assumed.get("precision")
    if precision not in ("bf16", *LOW_BYTES):
        return f"precision: {precision or 'not stated'}"
    strategy = _STRATEGIES.get(run.strategy) if run.strategy else assumed.get("strategy")
    if strategy is None:
        return f"no closed form of {run.strategy or 'a strategy that is not stated'}"
    try:
        model = model_of(source, run)
    except SpecError as error:
        return str(error)
    data = run.gpus // run.model_parallel
    shard = data if strategy in ("ddp", "megatron") else run.dp_shard or data
    if data % shard:
        return f"{shard} shards do not divide {data} data-parallel ranks"
    batch = _batch(run, data)
    if batch is None:
        return "the batch is not stated"
    microbatch, microbatches = batch
    if run.regression:
        return f"the source calls it a regression: {run.regression}"
    rate = run.tokens_per_s or (run.tokens_per_s_gpu or 0) * run.gpus
    if not run.seconds and not rate:
        return "no speed in tokens or seconds"
    interleave = run.interleave or (1 if run.pp == 1 else assumed.get("interleave"))
    if not isinstance(interleave, int):
        return "the pipeline's interleaving is not stated"
    own = {key: value for key, value in assumed.items() if key in Implementation.__struct_fields__}
    own |= {"compiled": bool(run.compiled)} if run.compiled is not None else {}
    stated = (
        "fp8_attention", "fp8_head", "fused_experts", "graphs", "dispatch", "recomputes", "expert_tp", "stages",
        "attention",
    )  # fmt: skip
    own |= {field: value for field in stated if (value := getattr(run, field))}
    own |= {"overlap_tensor": True} if "asynchronous" in run.strategy else {}
    fields = {
        "strategy": strategy, "model": run.model, "cluster": cluster_name, "gpus": run.gpus, "seq_len": seq_len,
        "dp_replicate": data // shard, "tp": run.tp, "cp": run.cp, "pp": run.pp, "ep": run.ep,
        "interleave": interleave, "schedule": "interleaved" if interleave > 1 else "1f1b",
        "global_batch": data * microbatch * microbatches, "microbatches": microbatches,
        "checkpointing": str(policy), "precision": precision, "offload": bool(assumed.get("offload")),
        "implementation": own,
    }  # fmt: skip
    job = convert(fields, Job, where=f"published {name}")
    return Published(
        table=name, run=run, model=model, cluster=_filled(cluster_name, run.gpus), job=job,
        seconds=run.seconds or job.global_batch * seq_len / rate,
    )  # fmt: skip


@cache
def _filled(name: str, gpus: int) -> ClusterSpec:
    """As many nodes as the run fills; if a node's GPUs do not divide the run, as many of each as do (64 of 72).

    It holds its accelerator: predictions ask for it thousands of times, and would read its profile as often.
    """
    cluster = load_cluster(name)
    used = min(gpus, cluster.ranks_per_node)
    while gpus % used:
        used -= 1
    return msgspec.structs.replace(cluster, ranks_per_node=used, nodes=gpus // used, hardware=cluster.accelerator)


def _batch(run: Run, data: int) -> tuple[int, int] | None:
    """Sequences of a microbatch, and microbatches; under torchtitan's pipelines the printed batch is of single ones."""
    if run.strategy.startswith("fsdp") and run.pp > 1:
        return (1, run.microbatch * (run.microbatches or 1)) if run.microbatch else None
    if run.microbatch and run.microbatches:
        return run.microbatch, run.microbatches
    if run.microbatch and run.global_batch:
        count, rest = divmod(run.global_batch, data * run.microbatch)
        return (run.microbatch, count) if count and not rest else None
    return (run.microbatch, 1) if run.microbatch and run.tokens_per_s_gpu else None


def load_runs(sources: Mapping[str, Source] | None = None) -> tuple[list[Published], Counter[tuple[str, str]]]:
    """The runs of ``sources`` (by default of all) that are configurations, and how many are none, by table and reason.

    Runs with a script are left to dry runs. For each source of this checkout and each accelerator in it, every other
    setting is marked "fit", in the order of the file; those in NVFP4 came later and are counted
    apart. No constant was fitted to other sources.

    Raises:
        SpecError: a source breaks its schema.
    """
    found: list[Published] = []
    left: Counter[tuple[str, str]] = Counter()
    known = load_sources()
    for name, source in (known if sources is None else sources).items():
        halves: dict[tuple[object, ...], Half] = {}
        counts: Counter[tuple[str, bool]] = Counter()
        for run in source.runs:
            if run.script is not None:
                continue
            one = published_of(name, source, run)
            if isinstance(one, str):
                left[name, one] += 1
                continue
            if known.get(name) == source and one.setting not in halves:
                kind = run.hardware, run.precision == "nvfp4"
                halves[one.setting] = HALVES[counts[kind] % 2]
                counts[kind] += 1
            found.append(replace(one, half=halves.get(one.setting, "held out")))
    return found, left


def predicted(runs: Sequence[Published]) -> list[Predicted]:
    """The prediction of each run."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, run in enumerate(runs):
        groups[id(run.cluster), run.model, run.job.seq_len].append(place)
    found: dict[int, Predicted] = {}
    for places in groups.values():
        first = runs[places[0]]
        rows = Candidates.of([runs[place].job for place in places])
        estimates = estimate(first.model, first.cluster, first.job.seq_len, rows)
        for place, seconds, peak in zip(places, estimates.step_s.tolist(), estimates.memory.peak.tolist()):
            found[place] = Predicted(published=runs[place], seconds=seconds, allocated_gib=peak / GIB)
    return [found[place] for place in range(len(runs))]


def predicted_claims(sources: Mapping[str, Source] | None = None) -> list[PredictedClaim]:
    """The claims of ``sources``, by default of all, in their order.

    Raises:
        SpecError: a source breaks its schema, or a run that is given cannot be predicted.
    """
    found = []
    for name, source in (load_sources() if sources is None else sources).items():
        for claim in source.claims:
            made: list[Published] = []
            for side, run in (("claimed", claim.claimed), ("baseline", claim.baseline)):
                one = published_of(name, source, run) if run else None
                if isinstance(one, str):
                    raise SpecError(
                        f"claims {name}: '{claim.name}': the {side} run cannot be predicted: {one}; complete it"
                    )
                made += [one] if one else []
            claimed, baseline = predicted(made) or (None, None)
            found.append(
                PredictedClaim(table=name, source=source.source, claim=claim, claimed=claimed, baseline=baseline)
            )
    return found
