"""Configurations as columns, and those among which a search looks: every way to divide the ranks and the batch that can
run.

Rules that keep a configuration out: an axis does not divide what it splits; a group that talks within a layer would
span nodes (tensor parallelism); a stage has no layer; an interleaved schedule's microbatches do not divide among its
ranks; a strategy has no code for an axis.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.plan.cost_models import COST_MODELS, find_cost_model
from refshard.specs.cluster import ClusterSpec
from refshard.specs.configuration import Configuration, Precision, Schedule
from refshard.specs.hardware import AttentionKernel
from refshard.specs.model import ModelSpec

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
FIELDS = tuple(field.name for field in msgspec.structs.fields(Configuration))


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Configurations, one a row. Columns are int64: numbers and flags as they are, words by their place in
    ``words``.
    """

    columns: Mapping[str, Integers]
    words: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, configurations: Sequence[Configuration]) -> Self:
        """These configurations, in their order."""
        columns: dict[str, Integers] = {}
        words: dict[str, tuple[str, ...]] = {}
        for name in FIELDS:
            given = [getattr(one, name) for one in configurations]
            if given and isinstance(given[0], str):
                words[name] = tuple(dict.fromkeys(given))
                places = {word: place for place, word in enumerate(words[name])}
                given = [places[word] for word in given]
            columns[name] = np.array(given, np.int64)
        return cls(columns, words)

    def __len__(self) -> int:
        return len(self.columns["shard"])

    def __getitem__(self, field: str) -> Integers:
        return self.columns[field]

    def flag(self, field: str) -> Mask:
        """A field that is true or false."""
        return self.columns[field].astype(np.bool_)

    def where(self, field: str, *chosen: str) -> Mask:
        """Which rows have one of these words."""
        places = [place for place, word in enumerate(self.words[field]) if word in chosen]
        return np.isin(self.columns[field], places)

    def mapped(self, field: str, number: Callable[[str], float]) -> Floats:
        """A number for each row's word."""
        return np.array([number(word) for word in self.words[field]], np.float64)[self.columns[field]]

    def take(self, rows: Integers | Mask) -> "Candidates":
        """Some of the rows."""
        return Candidates({name: column[rows] for name, column in self.columns.items()}, self.words)

    def configuration(self, row: int) -> Configuration:
        """One row as a value."""
        found = {name: int(column[row]) for name, column in self.columns.items()}
        texts = {name: self.words[name][found[name]] for name in self.words}
        flags = {f.name: bool(found[f.name]) for f in msgspec.structs.fields(Configuration) if f.type is bool}
        return Configuration(**{**found, **texts, **flags})  # type: ignore[arg-type]

    @property
    def data_ranks(self) -> Integers:
        """Ranks that divide the batch."""
        return self["shard"] * self["replicate"]

    @property
    def shards(self) -> Integers:
        """Ranks that a strategy which shards divides parameters over."""
        return self["shard"] * self["context"]

    @property
    def world_size(self) -> Integers:
        """Ranks in all."""
        return self.data_ranks * self["context"] * self["tensor"] * self["pipeline"]


def by_distinct(columns: Sequence[npt.NDArray[np.generic]], value: Callable[..., tuple[float, ...]]) -> Floats:
    """``value`` of each distinct row of the columns, computed once and spread over all rows: (values, rows)."""
    rows = list(zip(*(column.tolist() for column in columns)))
    known: dict[Hashable, tuple[float, ...]] = {}
    for row in rows:
        if row not in known:
            known[row] = value(*row)
    return np.array([known[row] for row in rows], np.float64).reshape(len(rows), -1).T


LEAST_TOKENS = 1024
"""Tokens that context parallelism leaves each rank of a sequence at least."""
MOST_CONTEXT = 64
MOST_STRETCHES = 12
_N_DIMENSIONAL = ("ddp", "fsdp2", "megatron")
"""Strategies whose code here, or in the tool of their name, composes with pipelines and context parallelism."""
_TENSOR = ("fsdp2", "megatron", *(name for name in COST_MODELS if name.startswith("refshard-")))
_ZERO_BUBBLE = ("fsdp2",)
"""Zero-bubble schedules of torch split each backward, which neither DDP's hooks nor checkpointing can follow.
Megatron-LM has none."""
OWN_KERNELS = ("megatron",)
"""Strategies whose layers have fused kernels of their own, so that nothing is left to compile."""
_COMPILES = ("simplefsdp",)
"""Strategies that are torch.compile's: there is no eager form."""
ALL = (0,)
"""For an axis: every size that can run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What a search may choose, each a list of values; :data:`ALL` for every one that can run.

    ``global_batch`` is in sequences. Fields below it are as in a configuration, and hold for all.
    """

    strategies: tuple[str, ...]
    world_sizes: tuple[int, ...]
    global_batch: int
    tensor: tuple[int, ...] = (1,)
    pipeline: tuple[int, ...] = (1,)
    interleave: tuple[int, ...] = (1,)
    schedules: tuple[Schedule, ...] = ("1f1b", "interleaved")
    context: tuple[int, ...] = (1,)
    expert: tuple[int, ...] = (1,)
    replicas: tuple[int, ...] = (1,)
    microbatch: tuple[int, ...] = (1,)
    checkpointing: tuple[str, ...] = ("none",)
    precisions: tuple[Precision, ...] = ("bf16",)
    compiled: tuple[bool, ...] = (False,)
    reduction: str = "fp32"
    attention: AttentionKernel = "flash"
    offload: bool = False


def configurations(space: Space, model: ModelSpec, cluster: ClusterSpec, seq_len: int) -> Candidates:
    """All configurations of the space that can run, as columns; checkpointing is the innermost axis."""
    rows: list[tuple[object, ...]] = []
    kernels = {strategy: _kernels(space, strategy) for strategy in space.strategies}
    for world in space.world_sizes:
        for meshed in _meshes(space, model, cluster, seq_len, world):
            policies = space.checkpointing if meshed[_SCHEDULE] != "zero-bubble" else ("none",)
            rows += [(*meshed, *chosen, policy) for chosen in kernels[str(meshed[0])] for policy in policies]
    return _columns(space, rows)


_VARYING = (
    "strategy", "tensor", "context", "pipeline", "interleave", "schedule", "expert", "shard", "replicate", "microbatch",
    "microbatches", "reduce_each", "precision", "compiled", "checkpointing",
)  # fmt: skip
_SCHEDULE = _VARYING.index("schedule")


def _meshes(
    space: Space, model: ModelSpec, cluster: ClusterSpec, seq_len: int, world: int
) -> Iterator[tuple[object, ...]]:
    inner = [
        (tensor, context)
        for tensor in _sizes(space.tensor, min(world, cluster.ranks_per_node), _splits(model))
        for context in _sizes(space.context, min(world // tensor, MOST_CONTEXT), (seq_len,))
        if context == 1 or seq_len // context >= LEAST_TOKENS
    ]
    for tensor, context in inner:
        if world % (tensor * context):
            continue
        for pipeline in _sizes(space.pipeline, min(model.n_layers, world), (world // tensor // context,)):
            data = world // tensor // context // pipeline
            if space.global_batch % data:
                continue
            for interleave, schedule in _schedules(space, model.n_layers, pipeline):
                yield from _batches(space, model, data, tensor, context, pipeline, interleave, schedule)


def _batches(
    space: Space, model: ModelSpec, data: int, tensor: int, context: int, pipeline: int, interleave: int, schedule: str
) -> Iterator[tuple[object, ...]]:
    local = space.global_batch // data
    for microbatch in _sizes(space.microbatch, min(local, 32), (local,)):
        microbatches = local // microbatch
        if pipeline > 1 and (microbatches < pipeline or (interleave > 1 and microbatches % pipeline)):
            continue
        for expert in _sizes(space.expert, data * context, _experts(model, data * context)):
            for strategy in space.strategies:
                if not _composes(strategy, tensor, context, pipeline, schedule):
                    continue
                for replicate in _replicas(space, strategy, data):
                    shard = data // replicate
                    head = (strategy, tensor, context, pipeline, interleave, schedule, expert, shard, replicate)
                    yield (*head, microbatch, microbatches, True)
                    if microbatches > 1 and pipeline == 1 and find_cost_model(strategy).by_unit:
                        yield (*head, microbatch, microbatches, False)


def _kernels(space: Space, strategy: str) -> list[tuple[Precision, bool]]:
    """Precisions, and whether blocks are compiled, that a strategy can have."""
    compiled = (True,) if strategy in (*OWN_KERNELS, *_COMPILES) else space.compiled
    return list(product(space.precisions, compiled))


def _columns(space: Space, rows: Sequence[tuple[object, ...]]) -> Candidates:
    plain = Configuration(
        strategy=space.strategies[0], reduction=space.reduction,  # type: ignore[arg-type]
        attention=space.attention, offload=space.offload,
    )  # fmt: skip
    columns: dict[str, Integers] = {}
    words: dict[str, tuple[str, ...]] = {}
    of_rows: dict[str, Sequence[object]]
    of_rows = dict(zip(_VARYING, zip(*rows))) if rows else dict.fromkeys(_VARYING, ())
    for field in FIELDS:
        values, fixed = of_rows.get(field), getattr(plain, field)
        if isinstance(fixed, str):
            words[field] = (fixed,) if values is None else tuple(dict.fromkeys(map(str, values)))
            places = {word: place for place, word in enumerate(words[field])}
            values = None if values is None else [places[str(word)] for word in values]
            fixed = 0
        columns[field] = np.full(len(rows), int(fixed), np.int64) if values is None else np.array(values, np.int64)
    found = Candidates(columns, words)
    return _with_own_kernels(found) if {*OWN_KERNELS} & {*found.words["strategy"]} else found


def _with_own_kernels(rows: Candidates) -> Candidates:
    """Megatron's layers are Transformer Engine's: fused kernels, cuDNN's attention, and products that overlap tensor
    parallelism's collectives.
    """
    own = rows.where("strategy", *OWN_KERNELS)
    kernels = tuple(dict.fromkeys((*rows.words["attention"], "cudnn")))
    columns = {
        **rows.columns,
        "overlap_tensor": np.where(own, 1, rows["overlap_tensor"]),
        "attention": np.where(own, kernels.index("cudnn"), rows["attention"]),
    }
    return Candidates(columns, {**rows.words, "attention": kernels})


def _sizes(asked: tuple[int, ...], most: int, divides: Sequence[int]) -> list[int]:
    """The sizes asked for, or all up to ``most``, that divide each of the numbers."""
    chosen = range(1, most + 1) if asked == ALL else [size for size in asked if size <= most]
    return [size for size in chosen if all(number % size == 0 for number in divides)]


def _splits(model: ModelSpec) -> tuple[int, ...]:
    widths = (model.n_heads, model.n_kv_heads, model.ffn_dim)
    return (*widths, model.experts.ffn_dim) if model.experts else widths


def _experts(model: ModelSpec, ranks: int) -> tuple[int, ...]:
    return (model.experts.count, ranks) if model.experts else (1,)


def _schedules(space: Space, n_layers: int, pipeline: int) -> Iterator[tuple[int, Schedule]]:
    if pipeline == 1:
        yield 1, "1f1b"
        return
    for schedule in space.schedules:
        if schedule == "1f1b" and (space.interleave == ALL or 1 in space.interleave):
            yield 1, "1f1b"
        asked = space.interleave if space.interleave != ALL else tuple(range(1, MOST_STRETCHES + 1))
        if schedule == "zero-bubble":
            yield from (
                (stretches, schedule)
                for stretches in (1, 2)
                if stretches in asked and _even(n_layers, pipeline * stretches)
            )
        if schedule == "interleaved":
            yield from (
                (stretches, schedule) for stretches in asked if stretches > 1 and _even(n_layers, pipeline * stretches)
            )


def _even(n_layers: int, stretches: int) -> bool:
    """Whether layers can be dealt evenly, the ends counted as layers or not."""
    return n_layers % stretches == 0 or (n_layers + 2) % stretches == 0


def _composes(strategy: str, tensor: int, context: int, pipeline: int, schedule: str) -> bool:
    if schedule == "zero-bubble" and strategy not in _ZERO_BUBBLE:
        return False
    if tensor > 1 and strategy not in _TENSOR:
        return False
    return pipeline * context == 1 or strategy in _N_DIMENSIONAL


def _replicas(space: Space, strategy: str, data: int) -> list[int]:
    """Replicate axes: all of it for what shards nothing; for hybrid sharding only with parameters sharded."""
    way = find_cost_model(strategy)
    if not way.shards_optimizer:
        return [data]
    if not way.by_unit:
        return [1]
    powers = [size for size in (2**i for i in range(20)) if data % size == 0 and data // size > 1]
    chosen = powers if space.replicas == ALL else [size for size in space.replicas if data % size == 0]
    return chosen or [1]
