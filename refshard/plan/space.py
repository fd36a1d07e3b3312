"""Jobs as columns, and those among which a search looks: every way to divide the ranks and the batch that can run.

Rules that keep a job out: an axis does not divide what it splits; a group that talks within a layer would
span nodes (tensor parallelism); a stage has no layer; an interleaved schedule's microbatches do not divide among its
ranks; a strategy has no code for an axis.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.plan.cost_models import COST_MODELS, find_cost_model
from refshard.specs.cluster import ClusterSpec
from refshard.specs.counted import AnyModel, CountedModel
from refshard.specs.job import (
    REFERENCE_STRATEGY,
    WHOLE_MATRICES,
    Implementation,
    Job,
    Optimizer,
    Precision,
    Schedule,
    Tuning,
)
from refshard.specs.layers import listed_stages
from refshard.specs.tuning import ALL_LINEAR, Lora

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
FIELDS = {
    field.name: field.type
    for kind in (Job, Implementation)
    for field in msgspec.structs.fields(kind)
    if field.name != "implementation"
}
"""Columns of candidates, and the types of their values."""
LEAST_TOKENS = 1024
"""Fewest tokens of a sequence that context parallelism leaves each rank."""
MOST_CONTEXT, MOST_STRETCHES, MOST_MICROBATCH, MOST_SAMPLES = 64, 12, 32, 1024
"""Largest values of an axis; a microbatch of samples, which have no tokens, may be larger than one of sequences."""
_N_DIMENSIONAL = ("ddp", "fsdp2", "megatron")
"""Strategies that compose with pipelines and context parallelism, here or in the tool of their name."""
_TENSOR = ("fsdp2", "megatron", *(name for name in COST_MODELS if name.startswith("refshard-")))
_EXPERT = (*_TENSOR, "fsdp2-tuned")
"""Strategies with code for expert parallelism, here or in the tool of their name."""
_ZERO_BUBBLE = ("fsdp2",)
"""Zero-bubble schedules of torch split each backward, which neither DDP's hooks nor checkpointing can follow.
Megatron-LM has none."""
OWN_KERNELS = ("megatron",)
"""Strategies with layers that have their own fused kernels, so that nothing is left to compile."""
_COMPILES = ("simplefsdp",)
"""Strategies that are torch.compile's: there is no eager form."""
ALL = (0,)
"""For an axis: every size that can run."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Jobs, one a row, so that thousands are estimated at once.

    Columns are int64: all fields of a job, and ``microbatch``. Numbers and flags are stored as they are, strings as
    their index in ``labels``.
    """

    columns: Mapping[str, Integers]
    labels: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Self:
        """These jobs, in their order."""
        rows = [{**msgspec.structs.asdict(one), **msgspec.structs.asdict(one.implementation)} for one in jobs]
        return cls.of_columns({name: [row[name] for row in rows] for name in FIELDS}, len(jobs))

    @classmethod
    def of_columns(cls, given: Mapping[str, Sequence[object]], count: int) -> Self:
        """``count`` rows of values by field; a field of one value has it in all rows."""
        columns: dict[str, Integers] = {}
        labels: dict[str, tuple[str, ...]] = {}
        for name, values in given.items():
            if values and isinstance(values[0], str):
                labels[name] = tuple(dict.fromkeys(map(str, values)))
                places = {label: place for place, label in enumerate(labels[name])}
                values = [places[str(value)] for value in values]
            columns[name] = np.broadcast_to(np.array(values, np.int64), count)
        parts = columns["tp"] * columns["cp"] * columns["pp"]
        columns["microbatch"] = columns["global_batch"] * parts // (columns["gpus"] * columns["microbatches"])
        return cls(columns, labels)

    def __len__(self) -> int:
        return len(self.columns["gpus"])

    def __getitem__(self, field: str) -> Integers:
        return self.columns[field]

    def flag(self, field: str) -> Mask:
        """A field that is true or false."""
        return self.columns[field].astype(np.bool_)

    def where(self, field: str, *chosen: str) -> Mask:
        """Which rows have one of these labels."""
        return np.isin(self.columns[field], [place for place, one in enumerate(self.labels[field]) if one in chosen])

    def mapped(self, field: str, number: Callable[[str], float]) -> Floats:
        """A number for each row's label."""
        return np.array([number(label) for label in self.labels[field]], np.float64)[self.columns[field]]

    def cost(self, field: str) -> Floats:
        """A field of each row's cost model, as a number."""
        return self.mapped("strategy", lambda strategy: float(getattr(find_cost_model(strategy), field)))

    def take(self, rows: Integers | Mask) -> "Candidates":
        """Some of the rows."""
        return Candidates({name: column[rows] for name, column in self.columns.items()}, self.labels)

    def job(self, row: int) -> Job:
        """One row as a value."""
        found: dict[str, Any] = {name: int(column[row]) for name, column in self.columns.items()}
        found |= {name: self.labels[name][found[name]] for name in self.labels}
        del found["microbatch"]
        found |= {name: bool(found[name]) for name, kind in FIELDS.items() if kind is bool}
        own = {name: found.pop(name) for name in Implementation.__struct_fields__}
        return Job(**found, implementation=Implementation(**own))

    @property
    def data_ranks(self) -> Integers:
        """Ranks that divide the batch."""
        return self["gpus"] // (self["tp"] * self["cp"] * self["pp"])

    @property
    def replicas(self) -> Integers:
        """Data-parallel ranks that hold the same parameters: all, under a strategy that shards nothing."""
        return np.where(self.cost("shards_optimizer") > 0, self["dp_replicate"], self.data_ranks)

    @property
    def shards(self) -> Integers:
        """Ranks that a strategy which shards divides parameters over."""
        return self.data_ranks // self.replicas * self["cp"]

    @property
    def expert_shards(self) -> Integers:
        """The same for experts, of which each rank has some: ``ep`` ranks have different ones, and are also taken from
        tensor-parallel ranks.
        """
        found: Integers = np.maximum(1, self.shards * self["tp"] // (self["ep"] * self.expert_split))
        return found

    @property
    def expert_split(self) -> Integers:
        """Ranks that split each expert (:func:`~refshard.plan.kernels.expert_split`)."""
        given = self["expert_tp"]
        return np.where(given > 0, given, np.where(self["ep"] == 1, self["tp"], 1))


def by_distinct(columns: Sequence[npt.NDArray[np.generic]], value: Callable[..., tuple[float, ...]]) -> Floats:
    """``value`` of each distinct row of the columns, computed once and spread over all rows: (values, rows)."""
    rows = list(zip(*(column.tolist() for column in columns)))
    known: dict[Hashable, tuple[float, ...]] = {}
    for row in rows:
        if row not in known:
            known[row] = value(*row)
    return np.array([known[row] for row in rows], np.float64).reshape(len(rows), -1).T


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What a search may choose, each a list of values; :data:`ALL` for every one that can run.

    ``global_batch`` and ``microbatch`` are in sequences. Fields that are not tuples hold for all jobs.
    """

    strategies: tuple[str, ...]
    gpus: int
    global_batch: int
    seq_len: int
    model: str = ""
    cluster: str = ""
    offload: bool = False
    tuning: Tuning = "full"
    lora_rank: int = Lora().rank
    lora_targets: str = ALL_LINEAR
    frozen: str = ""
    optimizer: Optimizer = "adamw"
    implementation: Implementation = field(default_factory=Implementation)
    tp: tuple[int, ...] = (1,)
    pp: tuple[int, ...] = (1,)
    interleave: tuple[int, ...] = (1,)
    schedules: tuple[Schedule, ...] = ("1f1b", "interleaved")
    cp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    dp_replicate: tuple[int, ...] = (1,)
    microbatch: tuple[int, ...] = (1,)
    checkpointing: tuple[str, ...] = ("none",)
    precisions: tuple[Precision, ...] = ("bf16",)
    compiled: tuple[bool, ...] = (False,)


_FIXED = (
    "gpus", "global_batch", "seq_len", "model", "cluster", "offload", "tuning", "lora_rank", "lora_targets",
    "frozen", "optimizer",
)  # fmt: skip
_VARYING = (
    "strategy", "tp", "cp", "pp", "interleave", "schedule", "ep", "dp_replicate", "microbatches", "reduce_each",
    "precision", "compiled", "checkpointing",
)  # fmt: skip


def candidates(space: Space, model: AnyModel, cluster: ClusterSpec) -> Candidates:
    """All jobs of the space that can run on the cluster, as columns; checkpointing is the innermost axis."""
    rows: list[tuple[object, ...]] = []
    fixed, free = list(product(space.precisions, (True,))), list(product(space.precisions, space.compiled))
    kernels = {name: fixed if name in (*OWN_KERNELS, *_COMPILES) else free for name in space.strategies}
    for meshed in _meshes(space, model, cluster):
        policies = space.checkpointing if meshed[_VARYING.index("schedule")] != "zero-bubble" else ("none",)
        rows += [(*meshed, *chosen, policy) for chosen in kernels[str(meshed[0])] for policy in policies]
    varying = dict(zip(_VARYING, zip(*rows))) if rows else dict.fromkeys(_VARYING, ())
    same = {field.name: field.default for field in msgspec.structs.fields(Job)}
    same |= {name: getattr(space, name) for name in _FIXED}
    same |= msgspec.structs.asdict(space.implementation)
    found = Candidates.of_columns({name: varying.get(name, (same[name],)) for name in FIELDS}, len(rows))
    own = found.where("strategy", *OWN_KERNELS) if rows else np.zeros(0, np.bool_)
    if not own.any():
        return found
    # Megatron's layers are Transformer Engine's: fused kernels, cuDNN's attention, and products that overlap tensor
    # parallelism's collectives.
    attention = tuple(dict.fromkeys((*found.labels["attention"], "cudnn")))
    chosen_attention = np.where(own, attention.index("cudnn"), found["attention"])
    overlaps = np.where(own, 1, found["overlap_tensor"])
    columns = {**found.columns, "overlap_tensor": overlaps, "attention": chosen_attention}
    return Candidates(columns, {**found.labels, "attention": attention})


def wrong_axis(space: Space, model: AnyModel, cluster: ClusterSpec) -> str:
    """The rule that the smallest size of an axis breaks, for a space without candidates; empty if it is another."""
    tp, cp, pp, ep = (min(sizes) or 1 for sizes in (space.tp, space.cp, space.pp, space.ep))  # 0 is any size
    if ep > 1 and not model.experts:
        return f"ep splits experts, and {space.model} has none, got {ep}; leave --ep out"
    if model.experts and model.experts.count % ep:
        return f"ep must divide the {model.experts.count} experts of {space.model}, got {ep}; change --ep"
    if tp > cluster.ranks_per_node:
        return f"tp must be <= {cluster.ranks_per_node}, the GPUs of a node, got {tp}; change --tp"
    for name, width in _widths(model).items():
        if width % tp:
            return f"tp must divide the {name} of {space.model}, {width:,}, got {tp}; change --tp"
    if space.gpus % (tp * cp * pp):
        return f"tp x cp x pp must divide {space.gpus:,} ranks, got {tp} x {cp} x {pp}; change an axis or --gpus"
    return ""


def _widths(model: AnyModel) -> dict[str, int]:
    """What tensor parallelism splits, by name; of a factory's module nothing is known."""
    if isinstance(model, CountedModel):
        return {}
    widths = {"heads": model.n_heads, "key/value heads": model.n_kv_heads, "feed-forward width": model.ffn_dim}
    return widths | ({"experts' feed-forward width": model.experts.ffn_dim} if model.experts else {})


def _meshes(space: Space, model: AnyModel, cluster: ClusterSpec) -> Iterator[tuple[object, ...]]:
    world, seq_len = space.gpus, space.seq_len
    for tp in _sizes(space.tp, min(world, cluster.ranks_per_node), tuple(_widths(model).values())):
        for cp in _sizes(space.cp, min(world // tp, MOST_CONTEXT), (seq_len,)):
            if world % (tp * cp) or (cp > 1 and seq_len // cp < LEAST_TOKENS):
                continue
            for pp in _sizes(space.pp, min(model.n_layers, world), (world // tp // cp,)):
                data = world // tp // cp // pp
                if space.global_batch % data:
                    continue
                for interleave, schedule in _schedules(space, model.n_layers, pp):
                    yield from _batches(space, model, data, tp, cp, pp, interleave, schedule)


def _batches(
    space: Space, model: AnyModel, data: int, tp: int, cp: int, pp: int, interleave: int, schedule: str
) -> Iterator[tuple[object, ...]]:
    local = space.global_batch // data
    experts = (model.experts.count, data * cp * tp) if model.experts else (1,)
    most = MOST_SAMPLES if space.seq_len == 1 else MOST_MICROBATCH
    for microbatch in _sizes(space.microbatch, min(local, most), (local,)):
        microbatches = local // microbatch
        if pp > 1 and (microbatches < pp or (interleave > 1 and microbatches % pp)):
            continue
        for ep in _sizes(space.ep, data * cp * tp, experts):
            for strategy in space.strategies:
                alone = strategy == REFERENCE_STRATEGY and space.gpus > 1
                alone |= tp > 1 and space.optimizer in WHOLE_MATRICES
                alone |= tp * cp * pp > 1 and bool(space.frozen)
                if alone or not _composes(strategy, tp, cp, pp, schedule) or (ep > 1 and strategy not in _EXPERT):
                    continue
                for dp_replicate in _replicas(space, strategy, data):
                    head = (strategy, tp, cp, pp, interleave, schedule, ep, dp_replicate)
                    yield (*head, microbatches, True)
                    if microbatches > 1 and pp == 1 and find_cost_model(strategy).by_unit:
                        yield (*head, microbatches, False)


def _sizes(given: tuple[int, ...], most: int, divides: Sequence[int]) -> list[int]:
    """The given sizes, or all up to ``most``, that divide each of the numbers."""
    chosen = range(1, most + 1) if given == ALL else [size for size in given if size <= most]
    return [size for size in chosen if all(number % size == 0 for number in divides)]


def _schedules(space: Space, n_layers: int, pp: int) -> Iterator[tuple[int, Schedule]]:
    """Stretches of layers on each rank, and the schedule; unless their stages are listed, stretches must be even, with
    the ends counted as layers or not.
    """
    listed = len(listed_stages(space.implementation.stages)) if space.implementation.stages else 0
    if pp == 1:
        if not listed:
            yield 1, "1f1b"
        return
    given = space.interleave if space.interleave != ALL else tuple(range(1, MOST_STRETCHES + 1))
    even = [n for n in given if n_layers % (pp * n) == 0 or (n_layers + 2) % (pp * n) == 0]
    if listed:
        even = [listed // pp] if listed % pp == 0 else []
        given = tuple(even)
    for schedule in space.schedules:
        if schedule == "1f1b" and 1 in given:
            yield 1, schedule
        if schedule == "zero-bubble":
            yield from ((stretches, schedule) for stretches in (1, 2) if stretches in even)
        if schedule == "interleaved":
            yield from ((stretches, schedule) for stretches in even if stretches > 1)


def _composes(strategy: str, tp: int, cp: int, pp: int, schedule: str) -> bool:
    if schedule == "zero-bubble" and strategy not in _ZERO_BUBBLE:
        return False
    if tp > 1 and strategy not in _TENSOR:
        return False
    return pp * cp == 1 or strategy in _N_DIMENSIONAL


def _replicas(space: Space, strategy: str, data: int) -> list[int]:
    """Sizes of the replicate axis: more than 1 only if parameters are sharded, unit by unit."""
    if not find_cost_model(strategy).by_unit:
        return [1]
    powers = [size for size in (2**i for i in range(20)) if data % size == 0 and data // size > 1]
    if space.dp_replicate == ALL:
        return powers or [1]
    return [size for size in space.dp_replicate if data % size == 0 and (size == 1 or data // size > 1)]
