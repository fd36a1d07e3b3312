"""Published runs as dry runs: the settings of each become options of one plain script, and its figures are compared.

The script, ``profiles/published_runs/train.py``, does what the published runs' code did; nothing of refshard is in it.
It runs on the installed torch: ``docs/explanation/dryrun-validation.md`` names what an older torch did
differently.
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, Protocol

import msgspec
import numpy as np

from refshard import resources
from refshard.dryrun.analyse import analyse
from refshard.dryrun.overheads import overheads
from refshard.dryrun.recording import Kind, Recording
from refshard.dryrun.request import Request
from refshard.dryrun.run import DryRun, dry_run
from refshard.dryrun.steps import steps_of
from refshard.quantities import GIB
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.model import load_model
from refshard.specs.published_run import PublishedRun

Figure = Literal["reserved, step 1", "reserved", "active", "tokens/s/GPU"]
FUSED_NORM = datetime.date(2025, 8, 1)
"""From about this day torch's RMSNorm on CUDA is one kernel (pytorch pull request 153666)."""
FSDP2_OF_TODAY = datetime.date(2024, 10, 17)
"""The day of torch 2.5.0, the first with an FSDP2 that keeps a reduce-scatter's input, on the main stream."""
_UNITS = {
    "each block; embedding, norm and output in the root": "blocks",
    "each block; the embedding; norm and output together, not resharded": "parts",
}
_KERNELS = ("flash", "efficient", "cudnn")
_MARCH_2024 = ("ab5d91823f835e8688f381e3ff24706d7ae50cff", "83c879f18763611bda68586c45f0082fd568d646")
_TWICE_AS_LONG = ("1ea476e9f24be439eda358aa864f45c1c37a8a88", "40f8fd007957914bc2dced0bc5c018ec9f3ff30f")


class Dimensions(msgspec.Struct, frozen=True, kw_only=True):
    """What the script needs to know of a model; ``head_dim`` is 0 where it is ``dim / heads``."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    head_dim: int = 0
    qwen: bool = False


_OTHER_MODELS = {
    "qwen3-32b": Dimensions(
        layers=64, dim=5120, heads=64, kv_heads=8, head_dim=128, hidden=25600, vocab=151936, qwen=True
    ),
    "torchtitan's debugmodel of March 2024": Dimensions(
        layers=2, dim=256, heads=16, kv_heads=16, hidden=768, vocab=32000
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of one run. Memory is in GiB. ``other_mode`` is what the allocator's other mode comes to, where the
    source does not tell the mode.
    """

    figure: Figure
    published: float
    predicted: float
    other_mode: float | None = None

    @property
    def error(self) -> float:
        """Of the prediction, as a fraction of what was published."""
        return self.predicted / self.published - 1

    @property
    def is_memory(self) -> bool:
        """Whether it is bytes and not speed."""
        return self.figure != "tokens/s/GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A published run and its dry run. ``refused`` says why there is none; ``retries`` counts how often the allocator
    emptied its cache; ``doubt`` says why its memory is an upper bound, if it is.
    """

    name: str
    run: PublishedRun
    refused: str = ""
    request: Request | None = None
    compared: tuple[Compared, ...] = ()
    retries: int = 0
    doubt: str = ""

    @property
    def caveats(self) -> tuple[str, ...]:
        """How it differs from the run, and what is doubtful of its memory."""
        if not any(figure.is_memory for figure in self.compared):
            return ()
        bound = (f"memory kept by record_stream() is an upper bound: {self.doubt}",) if self.doubt else ()
        return (*caveats(self.run), *bound)


class HasError(Protocol):
    """A prediction beside what it predicted."""

    @property
    def error(self) -> float:
        """Of the prediction, as a fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Absolute errors over some figures, as fractions: how many, the median and the worst."""

    count: int
    median: float
    worst: float


def script() -> Path:
    """The script that stands for the published runs' code."""
    return resources.root() / "profiles" / "published_runs" / "train.py"


def why_not(run: PublishedRun) -> str:
    """Why the script does not stand for the run; empty where it does."""
    if "attention" in run.compiled or run.attention not in _KERNELS:
        return "attention is a Triton kernel that torch.compile makes (FlexAttention)"
    if run.expert > 1 or run.depends_on_data:
        return "mixture of experts: memory and time depend on routing, which a dry run does not compute"
    if run.compiled:
        return f"torch.compile of {', '.join(run.compiled)}: kernels that only its backend knows"
    if run.pipeline > 1 or run.context > 1:
        return "pipeline and context parallelism are not in the script"
    if run.strategy == "single" or run.units not in _UNITS:
        return f"the script does not wrap a model this way: {run.units or run.strategy}"
    return ""


def caveats(run: PublishedRun) -> tuple[str, ...]:
    """What the run's torch did with memory that the installed one does not do."""
    found = []
    if run.record_streams and (run.strategy == "fsdp2" or run.tensor > 1):
        found.append("its torch kept collective buffers alive with record_stream; the installed one does not")
    if run.record_streams and run.strategy == "fsdp1":
        found.append(
            "FSDP1 frees record_stream memory when the GPU is done with it; the dry run takes that time from its "
            "replay, so memory depends on modelled times"
        )
    if run.strategy == "fsdp2" and run.run_date < FSDP2_OF_TODAY:
        found.append("its FSDP2 is that of torch 2.4 or older, which allocates reduce-scatter inputs on another stream")
    return tuple(found)


def request_of(run: PublishedRun, *, expandable: bool | None = None) -> Request:
    """The dry run that stands for the run; ``expandable`` in place of the run's own mode of the allocator."""
    cluster = load_cluster(run.cluster).of_world_size(run.gpus)
    mode = bool(run.expandable_segments) if expandable is None else expandable
    return Request(
        command=(str(script()), *_options(run)), cluster=run.cluster, world_size=run.gpus,
        local_ranks=cluster.ranks_per_node, environment={"PYTORCH_ALLOC_CONF": f"expandable_segments:{mode}"},
        unusable_bytes=sum(one.bytes for one in overheads(run.gpus)),
    )  # fmt: skip


def _options(run: PublishedRun) -> list[str]:
    chosen = {
        "seq-len": run.seq_len, "batch": run.local_batch, "positions": _positions(run),
        "strategy": run.strategy, "units": _UNITS[run.units], "reshard": run.reshard_after_forward.replace(" ", "-"),
        "shard": run.shard, "replicate": run.replicate, "tensor": run.tensor,
        "checkpoint": run.checkpointing.removeprefix("every "), "norm": _norm(run), "attention": run.attention,
        "loss": run.loss.removesuffix("cross entropy").strip() or "whole",
        "logits-fp32": run.logits_fp32.removeprefix("in the "), "optimizer": run.optimizer_implementation,
        "parameter-dtype": _DTYPES[run.parameter_dtype], "compute-dtype": _DTYPES[run.compute_dtype],
        "reduce-dtype": _DTYPES[run.reduce_dtype],
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in chosen.items()]
    words += ["--keep-logits"] * run.logits_kept + ["--loss-parallel"] * run.loss_parallel
    words += ["--fold", "--log-every=1"] * (run.commit in _MARCH_2024)
    return _model_options(run.model) + words


_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def _model_options(name: str) -> list[str]:
    one = _OTHER_MODELS.get(name) or _preset(name)
    sizes = {
        "layers": one.layers, "dim": one.dim, "heads": one.heads, "kv-heads": one.kv_heads, "hidden": one.hidden,
        "vocab": one.vocab, "head-dim": one.head_dim or one.dim // one.heads,
    }  # fmt: skip
    return [f"--{key}={value}" for key, value in sizes.items()] + ["--query-norm", "--rotary=halves"] * one.qwen


def _preset(name: str) -> Dimensions:
    model = load_model(name)
    return Dimensions(
        layers=model.n_layers, dim=model.dim, heads=model.n_heads, kv_heads=model.n_kv_heads, hidden=model.ffn_dim,
        vocab=model.vocab,
    )  # fmt: skip


def _positions(run: PublishedRun) -> int:
    """Length of the table of rotations: 65,536 in March 2024, then twice the sequence, since late 2024 the sequence."""
    if run.commit in _MARCH_2024:
        return 65536
    return run.seq_len * (2 if run.commit in _TWICE_AS_LONG else 1)


def _norm(run: PublishedRun) -> str:
    """Torch's own norm was made of operators at first. A Triton kernel keeps what torch's fused kernel keeps."""
    if run.norm == "rms_norm":
        return "composite" if run.run_date < FUSED_NORM else "fused"
    return {"operators": "operators", "triton": "fused"}[run.norm]


def predict(name: str, run: PublishedRun, *, launch: Callable[[Request], DryRun] = dry_run) -> Prediction:
    """Run the published run dry, and once more in the allocator's other mode where the source does not tell the mode.

    Raises:
        RefshardError: the fake device cannot be made, or the script's process ended without a word.
    """
    if reason := why_not(run):
        return Prediction(name=name, run=run, refused=reason)
    request = request_of(run)
    found = launch(request)
    if found.answer.outcome != "stepped":
        reason = f"the dry run did not take its steps ({found.answer.outcome}): {found.answer.error}"
        return Prediction(name=name, run=run, refused=reason, request=request)
    predicted = _memory(found.recording, found.answer.peak.active)
    if run.tokens_per_s_gpu is not None:
        predicted["tokens/s/GPU"] = speed_of(run, found, load_cluster(run.cluster))
    other = _in_other_mode(run, launch) if _in_doubt(run) else {}
    return Prediction(
        name=name, run=run, request=request, compared=_compared(run, predicted, other), retries=found.answer.retries,
        doubt=found.answer.doubt,
    )  # fmt: skip


def _in_doubt(run: PublishedRun) -> bool:
    has_memory = run.reserved_gib or run.reserved_first_step_gib or run.active_gib
    return bool(has_memory) and ("expandable_segments" in run.assumed or run.expandable_segments is None)


def _in_other_mode(run: PublishedRun, launch: Callable[[Request], DryRun]) -> dict[Figure, float]:
    found = launch(request_of(run, expandable=not run.expandable_segments))
    return _memory(found.recording, found.answer.peak.active) if found.answer.outcome == "stepped" else {}


def _memory(recording: Recording, active_bytes: int) -> dict[Figure, float]:
    """GiB: what is reserved at most in the first step and after it, and what is active at most."""
    reserved = np.cumsum(np.where(recording.kinds == Kind.SEGMENT, recording.sizes, 0)) / GIB
    steps = steps_of(recording, "step")
    return {
        "reserved, step 1": float(reserved[: steps[0].end].max()),
        "reserved": float(reserved[steps[1].first :].max()),
        "active": active_bytes / GIB,
    }


def speed_of(run: PublishedRun, found: DryRun, cluster: ClusterSpec) -> float:
    """Tokens a second of one GPU on nodes like the cluster's; ranks that share a sequence count it once."""
    tokens = run.local_batch * run.seq_len * run.gpus // run.tensor
    analysis = analyse(found, cluster.of_world_size(run.gpus), global_tokens=tokens)
    assert analysis.tokens_per_s is not None
    return analysis.tokens_per_s


def _compared(run: PublishedRun, predicted: dict[Figure, float], other: dict[Figure, float]) -> tuple[Compared, ...]:
    published: dict[Figure, float | None] = {
        "reserved, step 1": run.reserved_first_step_gib, "reserved": run.reserved_gib, "active": run.active_gib,
        "tokens/s/GPU": run.tokens_per_s_gpu,
    }  # fmt: skip
    return tuple(
        Compared(figure=figure, published=value, predicted=predicted[figure], other_mode=other.get(figure))
        for figure, value in published.items()
        if value is not None
    )


def errors_of(found: Sequence[HasError]) -> Errors | None:
    """None of nothing."""
    errors = [abs(one.error) for one in found]
    return Errors(count=len(errors), median=median(errors), worst=max(errors)) if errors else None
