"""Published training runs with their layout: data, tensor, pipeline and context parallelism.

One file per source in ``profiles/published_parallel/``. Figures stand as printed. A field that the source does not give
is absent, unless other fields imply it: the table's ``settings`` then say so.
"""

from pathlib import Path
from typing import Literal

import msgspec

from refshard import resources
from refshard.errors import SpecError
from refshard.specs.model import ModelSpec, load_model, parameter_count
from refshard.specs.reading import convert, finite, read_toml, within

Precision = Literal["bf16", "fp8", "fp8-rowwise", "nvfp4"]
_AGREEMENT = 0.02
"""Relative difference up to which two printed figures of a run agree: sources round, and average steps differently."""


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dimensions of a model that has no preset; a ``gated`` feed-forward has three products, another two.

    ``biased``, ``norm_biases`` and ``query_norm`` are those of :class:`~refshard.specs.model.ModelSpec`. A model with
    ``learned_positions`` has as many as a sequence of its run has tokens.
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


class ParallelRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run: the ranks of each mesh axis, the batch, and what was measured.

    ``fsdp`` is the number of ranks that parameters are sharded over, 1 where only data parallelism (with a distributed
    optimizer or without) is named. ``layers`` is the depth where the model was cut. ``microbatch`` is in sequences per
    data-parallel rank, ``global_batch`` in sequences. ``checkpointing`` is none, full, selective (by operator), every-2
    (each second layer), or as the source describes it. ``precision`` is fp8-rowwise only where a source has runs with
    scales by row beside others. ``seconds`` is the step time, ``tokens_per_s`` of all GPUs, ``mfu`` a fraction by the
    table's convention, memory that of torch's allocator. ``predicted_*`` are the source's own predictions.
    ``hardware`` is a profile's name, or what a profile would be called. ``where`` tells apart runs of one table.
    """

    model: str
    gpus: int
    hardware: str
    precision: Precision | None = None
    seq_len: int | None = None
    layers: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    interleave: int | None = None
    context: int | None = None
    fsdp: int | None = None
    microbatch: int | None = None
    microbatches: int | None = None
    global_batch: int | None = None
    checkpointing: str | None = None
    compiled: bool | None = None
    schedule: str = ""
    strategy: str = ""
    seconds: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    predicted_seconds: float | None = None
    predicted_allocated_gib: float | None = None
    where: str = ""

    def __post_init__(self) -> None:
        for field in ("gpus", "seq_len", "layers", *_AXES, "interleave", "microbatch", "microbatches", "global_batch"):
            if getattr(self, field) is not None:
                within(field, getattr(self, field), 1)
        figures = [(name, getattr(self, name)) for name in _FIGURES if getattr(self, name) is not None]
        if not figures:
            raise ValueError(f"a run must have a figure, one of {', '.join(_FIGURES)}, got none; leave the run out")
        for name, value in figures:
            finite(name, value, above=0)
        if self.gpus % self.model_parallel:
            raise ValueError(
                f"tensor x pipeline x context must divide the {self.gpus} GPUs, got {self.model_parallel}; correct the "
                "layout"
            )
        self._check_figures()

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one replica of the model together, where the source names the axes."""
        return (self.tensor or 1) * (self.pipeline or 1) * (self.context or 1)

    def _check_figures(self) -> None:
        """Printed figures of one step must agree with each other."""
        if self.tokens_per_s is not None and self.tokens_per_s_gpu is not None:
            _agree("tokens_per_s", self.tokens_per_s, self.tokens_per_s_gpu * self.gpus)
        if self.seconds is None or self.global_batch is None or self.seq_len is None:
            return
        tokens = self.global_batch * self.seq_len
        if self.tokens_per_s is not None:
            _agree("tokens_per_s", self.tokens_per_s, tokens / self.seconds)
        if self.tokens_per_s_gpu is not None:
            _agree("tokens_per_s_gpu", self.tokens_per_s_gpu, tokens / self.seconds / self.gpus)


_AXES = ("tensor", "pipeline", "context", "fsdp")
_FIGURES = ("seconds", "tokens_per_s", "tokens_per_s_gpu", "tflops_per_gpu", "mfu")


class ParallelTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs of one source (repository, path and commit, or paper and table), and what holds for all of them.

    ``flops_convention`` says how TFLOPS and MFU were counted there. ``not_stated`` lists settings that the source does
    not give, ``caution`` where it contradicts itself. ``shapes`` are the dimensions of models without a preset.
    ``clusters`` names the cluster profile that stands for each hardware. ``assumed`` are fields of a configuration, for
    runs that do not say: from ``settings``, or what the tool does by default.
    """

    title: str
    source: str
    settings: str = ""
    flops_convention: str = ""
    not_stated: tuple[str, ...] = ()
    caution: str = ""
    shapes: dict[str, Shape] = {}
    clusters: dict[str, str] = {}
    assumed: dict[str, str | int | bool] = {}
    runs: tuple[ParallelRun, ...]

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs must hold at least one, got none; leave the file out")


def load_parallel() -> dict[str, ParallelTable]:
    """Every table, by name.

    Raises:
        SpecError: a file breaks the schema, or figures of one run contradict each other.
    """
    return {name: read_parallel(path) for name, path in resources.published_parallel().items()}


def read_parallel(path: Path) -> ParallelTable:
    """One table.

    Raises:
        SpecError: it breaks the schema, or figures of one run contradict each other.
    """
    return convert(read_toml(path), ParallelTable, where=f"published {path.stem}")


def model_of(table: ParallelTable, run: ParallelRun) -> ModelSpec:
    """The dimensions of a run's model: of the table's shapes, or a preset; as deep as the run's ``layers`` say.

    Raises:
        SpecError: the model is neither, or its learned positions are as many as the sequence's tokens, which the run
            does not give.
    """
    shape, presets = table.shapes.get(run.model), resources.model_profiles()
    if shape is not None:
        model = _of_shape(shape, run, table.source)
    elif run.model in presets:
        model = load_model(run.model)
    else:
        fields = ", ".join(field.name for field in msgspec.structs.fields(Shape) if field.required)
        raise SpecError(
            f"model '{run.model}' of '{table.title}' must have a preset or a shape, got neither: its {fields} are "
            f"missing; add [shapes.{run.model!r}] to the table"
        )
    n_layers = model.n_layers if run.layers is None else run.layers
    if n_layers == model.n_layers:
        return model
    cut = msgspec.structs.replace(model, n_layers=n_layers, source=f"{n_layers} layers of: {model.source}")
    return msgspec.structs.replace(cut, params=parameter_count(cut))


def _of_shape(shape: Shape, run: ParallelRun, source: str) -> ModelSpec:
    if shape.learned_positions and run.seq_len is None:
        raise SpecError(
            f"model '{run.model}': seq_len must be given where positions are learned, got none; add it to the run"
        )
    fields = {name: getattr(shape, name) for name in shape.__struct_fields__ if name != "learned_positions"}
    # No count reads the last two.
    made = ModelSpec(
        **fields, positions=(run.seq_len or 0) if shape.learned_positions else 0, params=1, source=source,
        norm_eps=1e-5, rope_theta=0.0 if shape.learned_positions else 10000.0,
    )  # fmt: skip
    return msgspec.structs.replace(made, params=parameter_count(made))


def _agree(name: str, printed: float, computed: float) -> None:
    if abs(printed / computed - 1) > _AGREEMENT:
        raise ValueError(
            f"{name} must be what the run's other figures give, {computed:.6g}, got {printed:.6g}; check the source"
        )
