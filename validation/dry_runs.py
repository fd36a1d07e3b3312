"""Published runs as dry runs of one plain script, and the recorded cases of real GPUs beside their dry runs.

``script/train.py`` does what the published runs' code did; nothing of refshard is in it. It runs on the installed
torch: ``docs/explanation/dryrun-validation.md`` names what an older torch did differently.
"""

import datetime
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np

from refshard import resources
from refshard.commands.printing import tell
from refshard.dryrun.analyse import analyse
from refshard.dryrun.overheads import overheads
from refshard.dryrun.recording import Kind
from refshard.dryrun.request import Request
from refshard.dryrun.run import DryRun, dry_run
from refshard.dryrun.steps import steps_of
from refshard.quantities import GIB
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.model import load_model
from validation.schema import Half, Scripted

Figure = Literal["reserved, step 1", "reserved", "active", "tokens/s/GPU"]
SCRIPT = Path(__file__).parent / "script" / "train.py"
FUSED_NORM = datetime.date(2025, 8, 1)
"""From about this day torch's RMSNorm on CUDA is one kernel (pytorch pull request 153666)."""
FSDP2_OF_TODAY = datetime.date(2024, 10, 17)
"""The day of torch 2.5.0, the first with an FSDP2 that keeps a reduce-scatter's input, on the main stream."""
_AT_ONCE = min(4, os.cpu_count() or 1)
"""Dry runs at a time: each takes one core and about half a GiB of memory."""
_UNITS = {
    "each block; embedding, norm and output in the root": "blocks",
    "each block; the embedding; norm and output together, not resharded": "parts",
}
_MARCH_2024 = ("ab5d91823f835e8688f381e3ff24706d7ae50cff", "83c879f18763611bda68586c45f0082fd568d646")
_TWICE_AS_LONG = ("1ea476e9f24be439eda358aa864f45c1c37a8a88", "40f8fd007957914bc2dced0bc5c018ec9f3ff30f")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_DEBUG_MODEL = {"layers": 2, "dim": 256, "heads": 16, "kv-heads": 16, "hidden": 768, "vocab": 32000, "head-dim": 16}
"""Sizes of torchtitan's debugmodel of March 2024, which has no preset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of one run. Memory is in GiB. ``other_mode`` is the figure in the allocator's other mode, if the
    source does not tell the mode.
    """

    figure: Figure
    published: float
    predicted: float
    other_mode: float | None = None

    @property
    def error(self) -> float:
        """Error of the prediction, as a fraction of the published figure."""
        return self.predicted / self.published - 1

    @property
    def is_memory(self) -> bool:
        """Whether it is bytes and not speed."""
        return self.figure != "tokens/s/GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A published run and its dry run. ``refused`` says why there is none; ``doubt`` why its memory is an upper bound,
    if it is.
    """

    published: Scripted
    refused: str = ""
    request: Request | None = None
    compared: tuple[Compared, ...] = ()
    doubt: str = ""

    @property
    def caveats(self) -> tuple[str, ...]:
        """How its memory differs from the run's, and why it is uncertain."""
        if not any(figure.is_memory for figure in self.compared):
            return ()
        bound = (f"memory kept by record_stream() is an upper bound: {self.doubt}",) if self.doubt else ()
        return (*caveats(self.published), *bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCase:
    """One figure of a case that a real GPU measured: medians over its launches, in GiB or in seconds.

    Constants of step times were fitted to the half ``fit``; nothing of memory was.
    """

    machine: str
    name: str
    half: Half
    figure: Literal["reserved", "step time"]
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Error of the prediction, as a fraction of the measured figure."""
        return self.predicted / self.measured - 1


def why_not(one: Scripted) -> str:
    """Why the script does not stand for the run; empty where it does."""
    run, script = one.run, one.script
    if script.attention == "flex":
        return "attention is a Triton kernel that torch.compile makes (FlexAttention)"
    if run.ep > 1 or script.depends_on_data:
        return "mixture of experts: memory and time depend on routing, which a dry run does not compute"
    if run.compiled:
        parts = ", ".join(run.compiled) if isinstance(run.compiled, tuple) else "the model"
        return f"torch.compile of {parts}: kernels that only its backend knows"
    if run.pp > 1 or run.cp > 1:
        return "pipeline and context parallelism are not in the script"
    if run.strategy == "single" or script.units not in _UNITS:
        return f"the script does not wrap a model this way: {script.units or run.strategy}"
    return "" if run.precision == "bf16" else f"the script computes in bf16, not in {run.precision}"


def caveats(one: Scripted) -> tuple[str, ...]:
    """What the run's torch did with memory that the installed one does not do."""
    run, found = one.run, []
    if one.script.record_streams and (run.strategy == "fsdp2" or run.tp > 1):
        found.append("its torch kept collective buffers alive with record_stream; the installed one does not")
    if one.script.record_streams and run.strategy == "fsdp1":
        found.append(
            "FSDP1 frees record_stream memory when the GPU is done with it; the dry run takes that time from its "
            "replay, so memory depends on modelled times"
        )
    if run.strategy == "fsdp2" and run.date is not None and run.date < FSDP2_OF_TODAY:
        found.append("its FSDP2 is that of torch 2.4 or older, which allocates reduce-scatter inputs on another stream")
    return tuple(found)


def request_of(one: Scripted, *, expandable: bool | None = None) -> Request:
    """The dry run that stands for the run; ``expandable`` in place of the run's own mode of the allocator."""
    cluster = load_cluster(one.cluster).of_world_size(one.run.gpus)
    mode = bool(one.script.expandable_segments) if expandable is None else expandable
    return Request(
        command=(str(SCRIPT), *_options(one)), cluster=one.cluster, world_size=one.run.gpus,
        local_ranks=cluster.ranks_per_node, environment={"PYTORCH_ALLOC_CONF": f"expandable_segments:{mode}"},
        unusable_bytes=sum(overhead.bytes for overhead in overheads(one.run.gpus)),
    )  # fmt: skip


def _options(one: Scripted) -> list[str]:
    run, script = one.run, one.script
    seq_len, fused = run.seq_len or 0, run.date is not None and run.date >= FUSED_NORM
    # The table of rotations: 65,536 long in March 2024, then twice the sequence, since late 2024 the sequence.
    positions = 65536 if script.commit in _MARCH_2024 else seq_len * (2 if script.commit in _TWICE_AS_LONG else 1)
    # Torch's own norm was made of operators at first. A Triton kernel keeps what torch's fused kernel keeps.
    norm = {"operators": "operators", "triton": "fused", "rms_norm": "fused" if fused else "composite"}[script.norm]
    checkpointing = run.checkpointing or "none"
    chosen = {
        "seq-len": seq_len, "batch": run.microbatch, "positions": positions, "strategy": run.strategy,
        "units": _UNITS[script.units], "reshard": script.reshard_after_forward.replace(" ", "-"),
        "dp-shard": run.dp_shard or 1, "dp-replicate": run.dp_replicate, "tp": run.tp,
        "checkpoint": "op" if checkpointing == "selective" else checkpointing.removeprefix("every-"), "norm": norm,
        "attention": script.attention, "loss": script.loss.removesuffix("cross entropy").strip() or "whole",
        "logits-fp32": script.logits_fp32.removeprefix("in the "), "optimizer": script.optimizer_implementation,
        "parameter-dtype": _DTYPES[script.parameter_dtype], "compute-dtype": "bfloat16",
        "reduce-dtype": _DTYPES[script.reduce_dtype],
    }  # fmt: skip
    return [
        *_model_options(run.model),
        *(f"--{name}={value}" for name, value in chosen.items()),
        *["--keep-logits"] * script.logits_kept,
        *["--loss-parallel"] * script.loss_parallel,
        *["--fold", "--log-every=1"] * (script.commit in _MARCH_2024),
    ]


def _model_options(name: str) -> list[str]:
    if name.startswith("torchtitan's debugmodel"):
        return [f"--{option}={value}" for option, value in _DEBUG_MODEL.items()]
    model = load_model(name)
    sizes = {
        "layers": model.n_layers, "dim": model.dim, "heads": model.n_heads, "kv-heads": model.n_kv_heads,
        "hidden": model.ffn_dim, "vocab": model.vocab, "head-dim": model.head_dim,
    }  # fmt: skip
    return [f"--{option}={value}" for option, value in sizes.items()] + (
        ["--query-norm", "--rotary=halves"] if model.query_norm else []
    )


def predict(one: Scripted, *, launch: Callable[[Request], DryRun] = dry_run) -> Prediction:
    """Dry-run the published run, and once more in the allocator's other mode if the source does not tell the mode.

    Raises:
        RefshardError: the fake device cannot be made, or the script's process ended without a word.
    """
    if reason := why_not(one):
        return Prediction(published=one, refused=reason)
    run, request = one.run, request_of(one)
    found = launch(request)
    if found.answer.outcome != "stepped":
        reason = f"the dry run did not take its steps ({found.answer.outcome}): {found.answer.error}"
        return Prediction(published=one, refused=reason, request=request)
    predicted, other = _memory(found), {}
    if run.tokens_per_s_gpu is not None:
        predicted["tokens/s/GPU"] = speed_of(one, found, load_cluster(one.cluster))
    unstated = "expandable_segments" in run.assumed or one.script.expandable_segments is None
    if unstated and (run.reserved_gib or run.reserved_first_step_gib or run.active_gib):
        again = launch(request_of(one, expandable=not one.script.expandable_segments))
        other = _memory(again) if again.answer.outcome == "stepped" else {}
    published: dict[Figure, float | None] = {
        "reserved, step 1": run.reserved_first_step_gib, "reserved": run.reserved_gib, "active": run.active_gib,
        "tokens/s/GPU": run.tokens_per_s_gpu,
    }  # fmt: skip
    compared = tuple(
        Compared(figure=figure, published=value, predicted=predicted[figure], other_mode=other.get(figure))
        for figure, value in published.items()
        if value is not None
    )
    return Prediction(published=one, request=request, compared=compared, doubt=found.answer.doubt)


def _memory(found: DryRun) -> dict[Figure, float]:
    """Peaks in GiB: reserved in the first step and after it, and active."""
    recording = found.recording
    reserved = np.cumsum(np.where(recording.kinds == Kind.SEGMENT, recording.sizes, 0)) / GIB
    steps = steps_of(recording, "step")
    return {
        "reserved, step 1": float(reserved[: steps[0].end].max()),
        "reserved": float(reserved[steps[1].first :].max()),
        "active": found.answer.peak.active / GIB,
    }


def speed_of(one: Scripted, found: DryRun, cluster: ClusterSpec) -> float:
    """Tokens per second and GPU on nodes like the cluster's; ranks that share a sequence count it once."""
    tokens = (one.run.microbatch or 0) * (one.run.seq_len or 0) * one.run.gpus // one.run.tp
    analysis = analyse(found, cluster.of_world_size(one.run.gpus), global_tokens=tokens)
    assert analysis.tokens_per_s is not None
    return analysis.tokens_per_s


def predict_all(chosen: Sequence[Scripted]) -> list[Prediction]:
    """Dry-run several at a time: each is a process of its own.

    Raises:
        RefshardError: the fake device cannot be made.
    """

    def predicted(place: int, one: Scripted) -> Prediction:
        tell(f"refshard: {place} of {len(chosen)}: {one.run.name}")
        return predict(one)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(predicted, range(1, len(chosen) + 1), chosen))


def recorded_cases() -> list[RecordedCase]:
    """What ``profiles/recorded`` has of ``make gpu-quick``, by machine and name."""
    files = sorted((resources.root() / "profiles" / "recorded").glob("*/predicted.jsonl"))
    return [case for file in files for case in _of_machine(file.parent)]


def _of_machine(folder: Path) -> Iterator[RecordedCase]:
    launches = defaultdict(list)
    for file in sorted(folder.glob("cases-*.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            if "peak" in row:
                launches[row["name"]].append((row["peak"]["reserved"] / GIB, row["step_s"]))
    for row in map(json.loads, (folder / "predicted.jsonl").read_text().splitlines()):
        if row["step_s"] is None or row["name"] not in launches:
            continue
        reserved, step_s = (median(values) for values in zip(*launches[row["name"]]))
        for figure, measured, predicted in (
            ("reserved", reserved, row["peak"]["reserved"] / GIB), ("step time", step_s, row["step_s"]),
        ):  # fmt: skip
            yield RecordedCase(
                machine=folder.name, name=row["name"], half=row["half"], figure=figure,  # type: ignore[arg-type]
                measured=measured, predicted=predicted,
            )  # fmt: skip
