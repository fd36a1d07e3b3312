"""Published training runs and claims: what was measured, and the settings that the source states.

``published/`` has one file per source. Figures stand as printed. A field that the source does not give is absent,
unless other fields imply it: the source's ``settings`` then say so. A run that a dry run can repeat has a ``script``,
written down before any dry run of it, from the source and from the repository's code at that commit.
"""

import datetime
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal

import msgspec

from refshard import resources
from refshard.errors import SpecError, nearest
from refshard.specs.hardware import AttentionKernel
from refshard.specs.model import Experts, LatentAttention, ModelSpec, load_model, parameter_count
from refshard.specs.reading import convert, finite, read_toml, within

Half = Literal["fit", "held out"]
HALVES: tuple[Half, ...] = ("fit", "held out")
Figure = Literal["throughput", "step time", "memory"]
_PUBLISHED = Path(__file__).parent / "published"
_COUNTS = (
    "gpus", "seq_len", "layers", "dp_shard", "dp_replicate", "tp", "pp", "cp", "ep", "interleave",
    "microbatch", "microbatches", "global_batch",
)  # fmt: skip
_FIGURES = (
    "seconds", "tokens_per_s", "tokens_per_s_gpu", "tflops_per_gpu", "mfu", "reserved_gib", "reserved_first_step_gib",
    "allocated_gib", "active_gib",
)  # fmt: skip
_NOT_OF_MEMORY = {"hardware", "cluster", "entry", "date"}
"""Fields that do not decide memory, so that a source need not state them."""
_RELEASE = re.compile(r"(?:^|\s)(2\d)\.(\d\d)(?!\d)")
_AGREEMENT = 0.02
"""Relative difference up to which printed figures agree: sources round, and average steps differently."""


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dimensions of a model without a preset; the fields are those of :class:`~refshard.specs.model.ModelSpec`.

    A model with ``learned_positions`` has as many as a sequence of its run has tokens.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab: int
    tied: bool = False
    gated: bool = True
    biased: bool = False
    norm_biases: bool = False
    query_norm: bool = False
    learned_positions: bool = False
    head_dim: int = 0
    yarn: bool = False
    window: int = 0
    global_every: int = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    predictions: int = 0


class Adapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is trained instead of the model: LoRA matrices of ``rank`` in the linear layers ``targets`` ("dora": with
    magnitudes), or the norms among the targets ("norms").
    """

    method: Literal["lora", "dora", "norms"]
    targets: tuple[str, ...]
    rank: int | None = None
    alpha: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for field in ("rank", "alpha"):
            if (self.method == "norms") != ((value := getattr(self, field)) is None):
                raise ValueError(f"{field} must be given for LoRA and DoRA alone, got {value} for {self.method}")


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The code that ran, and its settings that decide memory: options of the script that stands for it.

    - ``repository`` at ``commit``, started by ``entry``; ``torch`` is the version as far as it is known.
    - ``program`` names the script of ``script/``: "train" does what torchtitan did, "finetune" what a loop around
      transformers and PEFT does, "tune" what torchtune did.
    - ``reshard_after_forward`` applies to the blocks ("but last": all but the last); ``units`` says what else is
      wrapped.
    - Parameters, gradients and optimizer state are stored in ``parameter_dtype``. ``logits_fp32`` is where logits are
      cast, ``logits_kept`` whether a reference to them lives through backward.
    - ``attention`` is the kernel that those settings choose on that GPU and torch. ``norm`` is made of "operators",
      torch's "rms_norm" or a "triton" kernel.
    - ``allocator_setting`` is the variable as the launcher sets it; ``expandable_segments`` is its effect, None if the
      source does not tell. ``record_streams``: collectives hold memory by ``record_stream``.
    - ``depends_on_data``: memory or time depends on the tokens.
    - ``also_saved`` are operators that selective checkpointing keeps besides those of ``script/train.py``;
      ``checkpoint_reentrant``: by torch's reentrant checkpoint.
    - ``float8`` are torchao's options: weights gathered in float8, and cast again in backward.
    - ``autocast``: the forward runs in torch's autocast to bf16. ``clipped``: gradients are clipped.
    - ``optimizer_implementation`` is that of torch's AdamW.
    """

    repository: str
    commit: str
    entry: str
    program: Literal["train", "finetune", "tune"] = "train"
    torch: str = ""
    reshard_after_forward: Literal["all", "but last", "none", ""] = ""
    units: str = ""
    loss_parallel: bool = False
    parameter_dtype: Literal["fp32", "bf16"] = "fp32"
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    optimizer_implementation: Literal["foreach", "fused"]
    optimizer: Literal["AdamW", "torchao AdamW8bit"] = "AdamW"
    optimizer_in_backward: bool = False
    clipped: bool = True
    loss: Literal["cross entropy", "chunked cross entropy", "cross entropy of a shifted copy"] = "cross entropy"
    logits_fp32: Literal["in the model", "in the loss"]
    logits_kept: bool
    attention: Literal["flash", "efficient", "cudnn", "flex"]
    norm: Literal["operators", "rms_norm", "triton"]
    expandable_segments: bool | None
    allocator_setting: str = ""
    record_streams: bool = False
    depends_on_data: bool = False
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    also_saved: tuple[str, ...] = ()
    checkpoint_reentrant: bool = False
    activations_offloaded: bool = False
    float8: tuple[Literal["gathered", "weight recomputed"], ...] = ()
    autocast: bool = False
    adapter: Adapter | None = None
    quantised: Literal["", "bitsandbytes nf4", "torchao nf4"] = ""

    def __post_init__(self) -> None:
        for field in ("repository", "commit", "entry"):
            if not getattr(self, field).strip():
                raise ValueError(f"{field} must say something, got nothing")


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run: hardware, model, layout, batch, and what was measured.

    - ``hardware`` is a profile's name, or what a profile would be called; ``cluster`` is a cluster's profile, instead
      of the source's for that hardware. ``capacity_gib`` is the GPU's memory as torch logged it.
    - ``layers`` is the depth where the model was cut. ``dp_shard`` is the number of ranks that parameters are sharded
      over, 1 if the source names only data parallelism (with a distributed optimizer or without). ``ep`` is the
      number of ranks that experts are divided over.
    - ``microbatch`` is in sequences per data-parallel rank, ``global_batch`` in sequences.
    - ``checkpointing`` is "none", "full", "selective" (by operator), "every-2" (each second layer), a number of layers,
      or as the source describes it. ``compiled`` may name the parts that torch.compile compiles, each for itself.
      ``fp8_attention``, ``fp8_head``, ``fused_experts``, ``graphs``, ``dispatch``, ``recomputes``, ``expert_tp`` and
      ``stages`` are those of
      :class:`~refshard.specs.job.Implementation`, from a recipe of the run's day. ``attention`` is the kernel, if it is
      not the source's.
      ``precision`` is "fp8-rowwise" only if a source has runs with scales by row beside others.
    - ``seconds`` is the step time, ``tokens_per_s`` the rate of all GPUs, ``mfu`` a fraction by the source's
      convention, memory a peak of torch's allocator on one rank (``reserved_first_step_gib`` apart if it is given).
      ``predicted_*`` are the source's own predictions.
    - ``regression``: the source calls the figure one of a defect, and says where that is reported.
    - ``where`` tells runs of one source apart; ``name`` is unique among runs with a script. ``assumed`` names fields
      that the source does not state, filled in by the repository's defaults at that commit. ``seen_before``: a
      prototype had been run on it, so it is no blind test.
    """

    name: str = ""
    where: str = ""
    date: datetime.date | None = None
    hardware: str
    cluster: str = ""
    gpus: int
    capacity_gib: float | None = None
    model: str
    layers: int | None = None
    seq_len: int | None = None
    dp_shard: int | None = None
    dp_replicate: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    interleave: int | None = None
    microbatch: int | None = None
    microbatches: int | None = None
    global_batch: int | None = None
    schedule: str = ""
    strategy: str = ""
    precision: Literal["bf16", "fp8", "fp8-rowwise", "mxfp8", "nvfp4"] | None = None
    checkpointing: str | None = None
    compiled: bool | tuple[Literal["attention", "loss", "blocks", "model"], ...] | None = None
    fp8_attention: bool = False
    fp8_head: bool = False
    fused_experts: bool = False
    graphs: str = ""
    recomputes: str = ""
    dispatch: str = ""
    expert_tp: int = 0
    stages: str = ""
    attention: AttentionKernel | None = None
    seconds: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_gpu: float | None = None
    tokens_per_s_gpu_spread: float = 0.0
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    allocated_gib: float | None = None
    active_gib: float | None = None
    reserved_gib: float | None = None
    reserved_first_step_gib: float | None = None
    predicted_seconds: float | None = None
    predicted_allocated_gib: float | None = None
    script: Script | None = None
    assumed: tuple[str, ...] = ()
    seen_before: bool = False
    regression: str = ""
    notes: str = ""

    def __post_init__(self) -> None:
        for field in _COUNTS:
            if (count := getattr(self, field)) is not None:
                within(field, count, 1)
        figures = {field: getattr(self, field) for field in _FIGURES if getattr(self, field) is not None}
        if not figures:
            raise ValueError(f"a run must have a figure, one of {', '.join(_FIGURES)}, got none; leave the run out")
        for field, figure in figures.items():
            finite(field, figure, above=0)
        finite("tokens_per_s_gpu_spread", self.tokens_per_s_gpu_spread)
        if self.capacity_gib is not None:
            finite("capacity_gib", self.capacity_gib, above=max(self.reserved_gib or 0, self.active_gib or 0))
        if self.gpus % self.model_parallel:
            raise ValueError(
                f"tp x pp x cp must divide the {self.gpus} GPUs, got {self.model_parallel}; correct the layout"
            )
        self._check_figures()
        if self.script is not None:
            self._check_script(self.script)

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one replica of the model together."""
        return self.tp * self.pp * self.cp

    @property
    def half_year(self) -> str:
        """When it ran, as "2025 H2": by its date, or by a release of NVIDIA's containers, which is YY.MM; empty if not
        known.
        """
        if self.date is not None:
            year, month = self.date.year, self.date.month
        elif release := _RELEASE.search(self.where):
            year, month = 2000 + int(release[1]), int(release[2])
        else:
            return ""
        return f"{year} H{1 if month <= 6 else 2}"

    def printed(self, figure: Figure) -> float | None:
        """A figure as the source printed it: tokens per second and GPU, seconds, or GiB."""
        if figure == "throughput":
            return self.tokens_per_s_gpu
        return self.seconds if figure == "step time" else self.reserved_gib or self.allocated_gib

    @property
    def states_all(self) -> bool:
        """Whether the source states all that decides memory, in words or by a command at a commit."""
        told = self.script is None or not (self.script.depends_on_data or self.script.expandable_segments is None)
        return told and not set(self.assumed) - _NOT_OF_MEMORY

    def _check_figures(self) -> None:
        """Printed figures of one step must agree with each other."""
        if self.tokens_per_s is not None and self.tokens_per_s_gpu is not None:
            _agree("tokens_per_s", self.tokens_per_s, self.tokens_per_s_gpu * self.gpus)
        if self.seconds is not None and self.global_batch is not None and self.seq_len is not None:
            rate = self.global_batch * self.seq_len / self.seconds
            _agree("tokens_per_s", self.tokens_per_s, rate)
            _agree("tokens_per_s_gpu", self.tokens_per_s_gpu, rate / self.gpus)

    def _check_script(self, script: Script) -> None:
        for field in ("name", "date", "seq_len", "microbatch", "strategy", "precision", "checkpointing"):
            if not getattr(self, field):
                raise ValueError(f"{field} must be given for a run with a script, got nothing; add it")
        layout = {axis: getattr(self, axis) or 1 for axis in ("dp_shard", "dp_replicate", "tp", "pp", "cp")}
        if prod(layout.values()) != self.gpus:
            raise ValueError(f"gpus must be the product of {', '.join(layout)}, got {self.gpus} and {layout}")
        if layout["dp_shard"] % self.ep:
            raise ValueError(f"ep must divide dp_shard = {self.dp_shard}, got {self.ep}")
        if self.strategy != "single" and not script.reshard_after_forward:
            raise ValueError(f"reshard_after_forward must be given for {self.strategy}, got nothing; add it")
        known = [*self.__struct_fields__, *script.__struct_fields__]
        if unknown := next((field for field in self.assumed if field not in known), None):
            raise ValueError(f"assumed has the unknown field '{unknown}'; {nearest(unknown, known)}")


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way of training against another: ``ratio`` is the ``claimed`` run's figure over that of the ``baseline``.

    Throughput is per GPU, memory the peak that the source printed. Without runs, ``missing`` says why there are none,
    and ``setting`` what the source says about them. ``cause`` says why the prediction differs; empty if it does not.
    """

    name: str
    figure: Figure
    ratio: float
    claimed: Run | None = None
    baseline: Run | None = None
    missing: str = ""
    setting: str = ""
    cause: str = ""

    def __post_init__(self) -> None:
        finite("ratio", self.ratio, above=0)
        given = [side for side in (self.claimed, self.baseline) if side is not None]
        if len(given) == 1 or bool(given) == bool(self.missing.strip()):
            raise ValueError(
                "a claim must have a claimed and a baseline run, or say what is missing, got "
                f"{len(given)} of 2 runs and {self.missing!r}; complete the runs, or leave them out and say why"
            )
        if given and self.setting:
            raise ValueError(f"setting must be empty where runs are given, got {self.setting!r}; leave it out")
        printed = [side.printed(self.figure) for side in given]
        if None in printed:
            raise ValueError(
                f"both runs must have the claim's figure, {self.figure}, got {printed}; add what is printed"
            )
        if given and abs((ratio := (printed[0] or 0) / (printed[1] or 1)) / self.ratio - 1) > _AGREEMENT:
            raise ValueError(
                f"ratio must be what the runs' figures give, {ratio:.4g}, got {self.ratio:.4g}; check the source"
            )


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs and claims of one source (repository, path and commit, or paper and table), and what holds for all of them.

    - ``link`` is the page, ``written`` the day on which its settings were written down.
    - ``flops_convention`` says how the source counts TFLOPS and MFU. ``not_stated`` lists settings that the source does
      not give, ``caution`` where it contradicts itself.
    - ``shapes`` are the dimensions of models without a preset. ``clusters`` names the cluster profile that stands for
      each hardware. ``assumed`` are fields of a configuration for runs that do not say: from ``settings``, or what the
      tool does by default.

    A file may also hold ``defaults``: fields of its runs, of which a run gives only what differs.
    """

    title: str
    source: str
    link: str = ""
    written: datetime.date | None = None
    settings: str = ""
    flops_convention: str = ""
    not_stated: tuple[str, ...] = ()
    caution: str = ""
    shapes: dict[str, Shape] = {}
    clusters: dict[str, str] = {}
    assumed: dict[str, str | int | bool] = {}
    runs: tuple[Run, ...] = ()
    claims: tuple[Claim, ...] = ()

    def __post_init__(self) -> None:
        if not self.runs and not self.claims:
            raise ValueError("runs or claims must hold at least one, got none; leave the file out")
        scripted = [run for run in self.runs if run.script is not None]
        if (scripted or self.link) and not self.link.startswith("https://"):
            raise ValueError(f"link must begin with https://, got {self.link!r}")
        for run in scripted:
            if self.written is None or run.date is None or run.date > self.written:
                raise ValueError(f"written must not be before the date of a run, {run.date}, got {self.written}")

    def cluster_of(self, run: Run) -> str | None:
        """The name of the cluster profile that stands for the run's machine; None if there is none."""
        return run.cluster or self.clusters.get(run.hardware)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    """A run with a script, its source, and whether constants of step times may be fitted to it."""

    source: Source
    run: Run
    cluster: str
    half: Half

    @property
    def script(self) -> Script:
        """The run's."""
        assert self.run.script is not None
        return self.run.script


@cache
def load_sources() -> dict[str, Source]:
    """Every source of this checkout by name.

    Raises:
        SpecError: a file breaks the schema, or figures of one run contradict each other.
    """
    return {path.stem: read_source(path) for path in sorted(_PUBLISHED.glob("*.toml"))}


def read_source(path: Path) -> Source:
    """One source. ``assumed`` fields of a run follow those of ``defaults``.

    Raises:
        SpecError: the file breaks the schema, or figures of one run contradict each other.
    """
    table = read_toml(path)
    if defaults := table.pop("defaults", None):
        table["runs"] = [_completed(run, defaults) for run in table.get("runs", [])]
    return convert(table, Source, where=f"published {path.stem}")


def _completed(run: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **defaults, **run, "assumed": [*defaults.get("assumed", []), *run.get("assumed", [])],
        "script": {**defaults.get("script", {}), **run.get("script", {})} or None,
    }  # fmt: skip


def scripted_runs(sources: Mapping[str, Source] | None = None) -> dict[str, Scripted]:
    """The runs with a script by name, of ``sources`` or of all.

    Their halves follow a rule that was fixed before any of them was run. Runs that a prototype had seen are "fit". Runs
    without a published speed are "held out", since nothing is fitted to them. The rest is split by source, so that runs
    that differ little stay together: the links of one accelerator, written down on one day, are sorted and alternate,
    "held out" first. Runs that are added later therefore leave earlier ones where they are.

    Raises:
        SpecError: a file breaks the schema, two runs have one name, or a run has no cluster.
    """
    found: dict[str, tuple[Source, Run]] = {}
    links: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for key, source in (load_sources() if sources is None else sources).items():
        for run in source.runs:
            if run.script is None:
                continue
            if run.name in found:
                raise SpecError(f"published {key}: the name '{run.name}' is taken by another run; give it another")
            found[run.name] = source, run
            if not run.seen_before and run.tokens_per_s_gpu is not None:
                links[run.hardware, source.written].add(source.link)

    def half(source: Source, run: Run) -> Half:
        if run.seen_before or run.tokens_per_s_gpu is None:
            return "fit" if run.seen_before else "held out"
        return "fit" if sorted(links[run.hardware, source.written]).index(source.link) % 2 else "held out"

    made: dict[str, Scripted] = {}
    for name, (source, run) in found.items():
        if (cluster := source.cluster_of(run)) is None:
            raise SpecError(f"run '{name}': clusters must name a profile for {run.hardware}, got none; add it")
        made[name] = Scripted(source=source, run=run, cluster=cluster, half=half(source, run))
    return made


def model_of(source: Source, run: Run) -> ModelSpec:
    """The dimensions of a run's model: of the source's shapes, or a preset; as deep as the run's ``layers`` say.

    Raises:
        SpecError: the model is neither, or its learned positions are as many as the sequence's tokens, which the run
            does not give.
    """
    shape = source.shapes.get(run.model)
    if shape is None and run.model not in resources.model_profiles():
        fields = ", ".join(field.name for field in msgspec.structs.fields(Shape) if field.required)
        raise SpecError(
            f"model '{run.model}' of '{source.title}' must have a preset or a shape, got neither: its {fields} are "
            f"missing; add [shapes.{run.model!r}] to the table"
        )
    model = load_model(run.model) if shape is None else _of_shape(shape, run, source.source)
    if run.layers in (None, model.n_layers):
        return model
    cut = msgspec.structs.replace(model, n_layers=run.layers, source=f"{run.layers} layers of: {model.source}")
    return msgspec.structs.replace(cut, params=parameter_count(cut))


def _of_shape(shape: Shape, run: Run, source: str) -> ModelSpec:
    if shape.learned_positions and run.seq_len is None:
        raise SpecError(
            f"model '{run.model}': seq_len must be given where positions are learned, got none; add it to the run"
        )
    fields = msgspec.structs.asdict(shape)
    learned = fields.pop("learned_positions")
    # No count reads norm_eps and rope_theta.
    made = ModelSpec(
        **fields, positions=(run.seq_len or 0) if learned else 0, params=1, source=source, norm_eps=1e-5,
        rope_theta=0.0 if learned else 10000.0,
    )  # fmt: skip
    return msgspec.structs.replace(made, params=parameter_count(made))


def _agree(name: str, printed: float | None, computed: float) -> None:
    if printed is not None and abs(printed / computed - 1) > _AGREEMENT:
        raise ValueError(
            f"{name} must be what the run's other figures give, {computed:.6g}, got {printed:.6g}; check the source"
        )
