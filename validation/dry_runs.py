"""Published runs as dry runs of plain scripts, and the recorded cases of real GPUs beside their dry runs.

The scripts in ``script/`` do what the published runs' code did; nothing of refshard is in them. They run on the
installed torch: ``docs/explanation/validation.md`` names what an older torch did differently.
"""

import datetime
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np

from refshard import resources
from refshard.commands.printing import tell
from refshard.dryrun.analyse import analyse
from refshard.dryrun.recording import Kind
from refshard.dryrun.request import Request
from refshard.dryrun.run import DryRun, dry_run
from refshard.dryrun.steps import steps_of
from refshard.quantities import GIB
from refshard.specs.cluster import ClusterSpec, load_cluster
from validation.schema import Adapter, Half, Scripted, model_of

Figure = Literal["reserved, step 1", "reserved", "active", "allocated", "tokens/s/GPU"]
SCRIPTS = Path(__file__).parent / "script"
BALANCED = partial(dry_run, also_at_worst=False)  # no published figure is of the worst routing
FUSED_NORM = datetime.date(2025, 8, 1)
"""From about this day torch's RMSNorm on CUDA is one kernel (pytorch pull request 153666)."""
FSDP2_OF_TODAY = datetime.date(2024, 10, 17)
"""The day of torch 2.5.0, the first with an FSDP2 that keeps a reduce-scatter's input, on the main stream."""
_AT_ONCE = min(4, os.cpu_count() or 1)
"""Dry runs at a time: each takes one core and about half a GiB of memory."""
_UNITS = {
    "each block; embedding, norm and output in the root": "blocks",
    "each block; the embedding; norm and output together, not resharded": "parts",
    "each block, its experts apart over the ranks that expert parallelism leaves; the embedding; norm and output "
    "together, not resharded": "parts",
}
_MARCH_2024 = ("ab5d91823f835e8688f381e3ff24706d7ae50cff", "83c879f18763611bda68586c45f0082fd568d646")
_TWICE_AS_LONG = ("1ea476e9f24be439eda358aa864f45c1c37a8a88", "40f8fd007957914bc2dced0bc5c018ec9f3ff30f")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_DEBUG_MODEL = {"layers": 2, "dim": 256, "heads": 16, "kv-heads": 16, "hidden": 768, "vocab": 32000, "head-dim": 16}
"""Sizes of torchtitan's debugmodel of March 2024, which has no preset."""
_DEEPSEEK = {
    "layers": 27, "dim": 2048, "heads": 16, "kv-heads": 16, "hidden": 10944, "vocab": 102400, "head-dim": 128,
    "experts": 64, "active": 6, "expert-hidden": 1408, "shared-experts": 2, "dense": 1, "latent": 512, "rotated": 64,
}  # fmt: skip
"""Sizes of torchtitan's DeepSeek-V3 16B."""
_EXPERTS_AS_ON = {
    "8a749c61877471e2ca6f9d3aa4966d45462c2c15": "2025-08-20", "f738a03bf45e1c063aaffa6f7e4df2cfcb47de42": "2025-08-20",
    "ea4989e0dfc15d214e69c9569b358da322087f46": "2025-08-31", "c4e2291155a4785bbef1d87dc64561a5ad54c121": "2025-09-06",
    "99fee810b7e253273ed8d1e10eb6c5f60ba69eff": "2025-10-02",
}  # fmt: skip
"""Which of the script's versions of a mixture of experts a commit has."""
_CHECKPOINTED_IN_PARTS = ("99fee810b7e253273ed8d1e10eb6c5f60ba69eff",)
"""Commits whose selective checkpointing wraps attention and feed-forward each for itself, where attention is flex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of one run. Memory is in GiB. ``expandable`` is the allocator's mode; ``other_mode`` is the figure in
    the other one, if the source does not state the mode.
    """

    figure: Figure
    published: float
    predicted: float
    expandable: bool = False
    other_mode: float | None = None

    @property
    def counts(self) -> bool:
        """Whether the prediction can be right or wrong: reserved memory is not known where the mode is not stated."""
        return self.other_mode is None or not self.figure.startswith("reserved")

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
    """Why no script stands for the run; empty where one does."""
    run, script = one.run, one.script
    if run.pp > 1 or run.cp > 1:
        return "pipeline and context parallelism are not in the script"
    wrapped = {
        "train": run.strategy != "single" and script.units in _UNITS,
        "finetune": run.strategy in ("single", "fsdp1"),
        "tune": run.gpus == 1,
    }
    if not wrapped[script.program]:
        return f"the script does not wrap a model this way: {script.units or run.strategy}"
    computed = ("bf16", "fp8", "fp8-rowwise") if script.program == "train" else ("bf16",)
    return "" if run.precision in computed else f"the script computes in bf16, not in {run.precision}"


def caveats(one: Scripted) -> tuple[str, ...]:
    """What the dry run does not know of the run's memory, and what its torch did that the installed one does not."""
    run, found = one.run, []
    if run.ep > 1 or "experts" in _model_options(one):
        found.append("memory depends on how its router spread the tokens; the dry run assumes a spread")
    elif one.script.depends_on_data:
        found.append(f"memory depends on its longest batch; the dry run has the most that it may be, {run.seq_len:,}")
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
    script = str(SCRIPTS / f"{one.script.program}.py")
    return Request(
        command=(script, *_options(one)), cluster=one.cluster, world_size=one.run.gpus,
        local_ranks=cluster.ranks_per_node, environment={"PYTORCH_ALLOC_CONF": f"expandable_segments:{mode}"},
    )  # fmt: skip


def _options(one: Scripted) -> list[str]:
    """Of the script that stands for the run."""
    run, script = one.run, one.script
    chosen = {"train": _pretraining, "finetune": _finetuning, "tune": _tuning}[script.program](one)
    parts = run.compiled if isinstance(run.compiled, tuple) else ()
    listed = {"also-saved": script.also_saved, "target": script.adapter.targets if script.adapter else ()}
    if script.program != "finetune":
        listed["compile"] = tuple(part for part in parts if script.program == "tune" or part != "attention")
    given = (_model_options(one) | chosen).items()
    return [
        *(f"--{name}" if value is True else f"--{name}={value}" for name, value in given if value is not False),
        *(f"--{name}={value}" for name, values in listed.items() for value in values),
    ]


def _pretraining(one: Scripted) -> dict[str, object]:
    run, script = one.run, one.script
    seq_len, fused = run.seq_len or 0, run.date is not None and run.date >= FUSED_NORM
    # The table of rotations: 65,536 long in March 2024, then twice the sequence, since late 2024 the sequence.
    positions = 65536 if script.commit in _MARCH_2024 else seq_len * (2 if script.commit in _TWICE_AS_LONG else 1)
    # Torch's own norm was made of operators at first. A Triton kernel keeps what torch's fused kernel keeps.
    norm = {"operators": "operators", "triton": "fused", "rms_norm": "fused" if fused else "composite"}[script.norm]
    checkpointing = run.checkpointing or "none"
    selective = "parts" if script.commit in _CHECKPOINTED_IN_PARTS else "op"
    chosen: dict[str, object] = {
        "seq-len": seq_len, "batch": run.microbatch, "positions": positions, "strategy": run.strategy,
        "units": _UNITS[script.units], "reshard": script.reshard_after_forward.replace(" ", "-"),
        "dp-shard": run.dp_shard or 1, "dp-replicate": run.dp_replicate, "tp": run.tp,
        "checkpoint": selective if checkpointing == "selective" else checkpointing.removeprefix("every-"), "norm": norm,
        "attention": script.attention, "loss": script.loss.removesuffix("cross entropy").strip() or "whole",
        "logits-fp32": script.logits_fp32.removeprefix("in the "), "optimizer": script.optimizer_implementation,
        "parameter-dtype": _DTYPES[script.parameter_dtype], "compute-dtype": "bfloat16",
        "reduce-dtype": _DTYPES[script.reduce_dtype], "keep-logits": script.logits_kept,
        "loss-parallel": script.loss_parallel,
    }  # fmt: skip
    if script.commit in _MARCH_2024:
        chosen |= {"fold": True, "log-every": 1}
    if run.precision != "bf16":
        chosen |= {
            "float8": "row" if run.precision == "fp8-rowwise" else "tensor",
            "float8-gathered": "gathered" in script.float8, "float8-recomputed": "weight recomputed" in script.float8,
        }  # fmt: skip
    if run.ep > 1:
        chosen |= {
            "ep": run.ep, "code": _EXPERTS_AS_ON[script.commit],
            "experts-by": "loop" if run.hardware.startswith("a100") else "grouped",
        }  # fmt: skip
    if script.compile_backend != "inductor":
        chosen["compile-backend"] = script.compile_backend
    return chosen


def _finetuning(one: Scripted) -> dict[str, object]:
    run, script = one.run, one.script
    chosen: dict[str, object] = {
        "tied": model_of(one.source, run).tied, "seq-len": run.seq_len, "batch": run.microbatch,
        "attention": script.attention, "masked": script.attention == "efficient", "checkpoint": run.checkpointing,
        "reentrant": script.checkpoint_reentrant, "loss": "copied" if "shifted" in script.loss else "whole",
        "keep-logits": script.logits_kept, "autocast": script.autocast, "optimizer": script.optimizer_implementation,
        "parameter-dtype": _DTYPES[script.parameter_dtype], "nf4": script.quantised == "bitsandbytes nf4",
    }  # fmt: skip
    if run.gpus > 1:
        chosen["dp-shard"] = run.dp_shard
    if script.adapter is not None:
        chosen |= {"adapter": script.adapter.method, "dropout": script.adapter.dropout} | _rank(script.adapter)
    return chosen


def _tuning(one: Scripted) -> dict[str, object]:
    run, script = one.run, one.script
    return {
        "seq-len": run.seq_len, "batch": run.microbatch, "checkpoint": run.checkpointing,
        "offload": script.activations_offloaded, "in-backward": script.optimizer_in_backward,
        "loss": script.loss.removesuffix("cross entropy").strip() or "whole",
        "optimizer": "8bit" if script.optimizer == "torchao AdamW8bit" else script.optimizer_implementation,
        "nf4": script.quantised == "torchao nf4", **(_rank(script.adapter) if script.adapter else {}),
    }  # fmt: skip


def _rank(adapter: Adapter) -> dict[str, object]:
    return {} if adapter.rank is None else {"rank": adapter.rank, "alpha": adapter.alpha}


def _model_options(one: Scripted) -> dict[str, object]:
    for beginning, sizes in (("torchtitan's debugmodel", _DEBUG_MODEL), ("torchtitan's DeepSeek", _DEEPSEEK)):
        if one.run.model.startswith(beginning):
            return dict(sizes)
    model = model_of(one.source, one.run)
    found: dict[str, object] = {
        "layers": model.n_layers, "dim": model.dim, "heads": model.n_heads, "kv-heads": model.n_kv_heads,
        "hidden": model.ffn_dim, "vocab": model.vocab, "head-dim": model.head_dim,
    }  # fmt: skip
    if model.experts is not None:
        found |= {"hidden": model.experts.ffn_dim, "experts": model.experts.count, "active": model.experts.active}
    return found | ({"query-norm": True, "rotary": "halves"} if model.query_norm else {})


def predict(one: Scripted, *, launch: Callable[[Request], DryRun] = BALANCED) -> Prediction:
    """Dry-run the published run, and once more in the allocator's other mode if the source does not state the mode.

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
        "allocated": run.allocated_gib, "tokens/s/GPU": run.tokens_per_s_gpu,
    }  # fmt: skip
    compared = tuple(
        Compared(
            figure=figure, published=value, predicted=predicted[figure], other_mode=other.get(figure),
            expandable=bool(one.script.expandable_segments),
        )
        for figure, value in published.items()
        if value is not None
    )  # fmt: skip
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
        "allocated": found.answer.peak.allocated / GIB,
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
