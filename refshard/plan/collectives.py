"""Collectives of data parallelism: where the groups of ranks lie, what their collectives take, and what they add to a
step; one entry a row.

Ranks are numbered with tensor parallelism innermost, then context, shard and replicate, and the pipeline outermost, as
Megatron and torchtitan do; so groups that communicate most lie within a node.

A strategy that shards parameters gathers each unit before its forward and its backward, and reduces its gradients after
that, while its neighbours compute; before the first and after the last unit nothing computes. Others reduce once a
step, during the last microbatch's backward, and gather what the optimizer changed during the next forward.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from refshard.costs import GroupShape, collective_cost
from refshard.plan.cost_models import MASTER_BYTES
from refshard.plan.layers import hidden
from refshard.plan.space import Candidates, Floats, Integers, Mask, by_distinct
from refshard.specs.cluster import ClusterSpec, CollectiveOp

SKEW = 0.87
"""The part of a collective's latency that compute waits for although both overlap: all ranks must reach a unit's
collectives before any goes on, and the more ranks, the later the last one."""


Axis = Literal["shards", "experts", "replicas", "all"]
"""Data-parallel ranks: ranks that divide parameters, or experts, ranks that hold the same part, and all."""


def group_of(cluster: ClusterSpec, size: int, stride: int) -> GroupShape:
    """The shape of a group of ``size`` ranks, each ``stride`` after the other.

    If the end of a node cuts it unevenly, it counts as lying on as many nodes as it takes with equal parts on each.
    """
    on_node = max(1, min(size, cluster.ranks_per_node // stride)) if stride < cluster.ranks_per_node else 1
    while size % on_node:
        on_node -= 1
    return GroupShape(ranks=size, nodes=size // on_node)


class Groups:
    """Collectives of the data-parallel axes of many configurations; all arguments and results have one entry a row."""

    def __init__(self, cluster: ClusterSpec, candidates: Candidates) -> None:
        self._cluster = cluster
        inner, shards, replicas = candidates["tp"], candidates.shards, candidates.replicas
        apart = candidates["ep"] * candidates.expert_split
        self._axes: dict[Axis, tuple[Integers, Integers]] = {
            "shards": (shards, inner), "experts": (candidates.expert_shards, apart),
            "replicas": (replicas, inner * shards), "all": (replicas * shards, inner),
        }  # fmt: skip

    def seconds(self, over: Axis, op: CollectiveOp, nbytes: Floats) -> Floats:
        """Seconds of a collective over the ranks that shard parameters, that hold the same shard, or all of them."""
        found: Floats = self._costs(over, op, nbytes)[0]
        return found

    def latency(self, over: Axis, op: CollectiveOp, nbytes: Floats) -> Floats:
        """The latency in :meth:`seconds`."""
        found: Floats = self._costs(over, op, nbytes)[1]
        return found

    def _costs(self, over: Axis, op: CollectiveOp, nbytes: Floats) -> Floats:
        def cost(count: int, ranks: int, step: int) -> tuple[float, float]:
            found = collective_cost(self._cluster, op, count, group_of(self._cluster, ranks, step))
            return found.seconds, found.latency_s

        return by_distinct([np.rint(nbytes).astype(np.int64), *self._axes[over]], cost)


@dataclass(frozen=True, slots=True, eq=False)
class Elements:
    """Elements on one rank, those of experts apart, since other ranks share them."""

    rest: Floats
    experts: Floats

    @property
    def all(self) -> Floats:
        """Both."""
        return self.rest + self.experts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """What data parallelism adds, in seconds.

    - ``layer_forward_s``, ``layer_backward_s``: to one layer's passes of one microbatch.
    - ``layer_skew_s``: waiting in these two for ranks that are late.
    - ``step_s``: to a step, outside its layers.
    """

    layer_forward_s: Floats
    layer_backward_s: Floats
    layer_skew_s: Floats
    step_s: Floats


class Exchanges:
    """Data parallelism's share of the time of many configurations on one cluster. ``trained`` is the part of the
    gathered elements that have gradients: less than 1 if adapters are trained.
    """

    def __init__(
        self, cluster: ClusterSpec, candidates: Candidates, reduction: Floats, trained: Floats | float = 1.0
    ) -> None:
        self._cluster, self._candidates, self._reduction, self._trained = cluster, candidates, reduction, trained
        # Adapters are kept in the dtype of the computation, others in fp32.
        self._casts = candidates.where("tuning", "full")
        self._groups = Groups(cluster, candidates)
        self._element = np.where(candidates.where("precision", "fp32"), MASTER_BYTES, 2)
        # A pipeline's stage keeps its parameters gathered.
        self._by_unit = self._is("shards_parameters") & (candidates["pp"] == 1)
        self._reshards = candidates.flag("reshard") & ~self._is("keeps")
        self._several = candidates["microbatches"] > 1
        self._reduces_each = candidates.flag("reduce_each") | ~self._several

    def _is(self, field: str) -> Mask:
        return self._candidates.cost(field) > 0

    def of(
        self, unit: Elements, ends: Floats, parameters: Elements, forward_s: Floats, backward_s: Floats, layers: Floats
    ) -> Exchange:
        """The seconds for layers of ``unit`` elements; ``ends`` are the embedding's and the head's, ``parameters`` all
        of the rank's. ``forward_s`` and ``backward_s`` are a layer's.
        """
        each = self._unit_by_unit(unit, ends, forward_s, backward_s, layers)
        once = self._once_a_step(unit, parameters, layers * forward_s, layers * backward_s)
        forward, backward, step = (np.where(self._by_unit, a, b) for a, b in zip(each, once))
        gathered = (1 + self._reshards) * self._latency("all_gather", self._element, unit)
        reduced = self._latency("reduce_scatter", self._reduction, unit)
        skew = SKEW * gathered + np.where(self._reduces_each, SKEW * reduced, 0)
        return Exchange(
            layer_forward_s=forward, layer_backward_s=backward, layer_skew_s=np.where(self._by_unit, skew, 0),
            step_s=step,
        )  # fmt: skip

    def _latency(self, op: CollectiveOp, element: Floats | int, unit: Elements) -> Floats:
        experts = self._groups.latency("experts", op, element * unit.experts)
        return self._groups.latency("shards", op, element * unit.rest) + np.where(unit.experts > 0, experts, 0)

    def _unit_by_unit(
        self, unit: Elements, ends: Floats, forward_s: Floats, backward_s: Floats, layers: Floats
    ) -> tuple[Floats, Floats, Floats]:
        gather, reduce, each, reshards = self._gather(unit), self._reduce(unit), self._reduces_each, self._reshards
        out = np.where(self._is("copies_out"), self._move(2 * self._element * unit.all), 0)
        reduced = self._trained * unit.all
        into = np.where(self._is("copies_in"), self._move((self._element + self._reduction) * reduced), 0)
        divided = np.where(self._is("divides"), self._move((self._element + 3 * self._reduction) * reduced), 0)
        own = unit.rest / self._candidates.shards + unit.experts / self._candidates.expert_shards
        cast = np.where(self._casts, self._move((MASTER_BYTES + self._element) * own), 0)
        forward = out + cast + hidden(self._cluster, forward_s, gather)
        backward = np.where(reshards, out + cast, 0) + np.where(each, into + divided, 0)
        overlapped = np.where(reshards, gather, 0) + np.where(each, reduce, 0)
        backward = backward + hidden(self._cluster, backward_s, overlapped)
        backward = backward + np.where(each, 0, self.adding(unit.all))
        around = Elements(ends, np.zeros_like(ends))
        alone = self._gather(around) + self._gather(unit) + self._reduce(around)
        late = np.where(each, 0, layers * (into + divided + hidden(self._cluster, backward_s, reduce)))
        return forward, backward, alone * np.where(each, self._candidates["microbatches"], 1) + late

    def _once_a_step(
        self, unit: Elements, parameters: Elements, forward_s: Floats, backward_s: Floats
    ) -> tuple[Floats, Floats, Floats]:
        changed = Elements(self._trained * parameters.rest, self._trained * parameters.experts)
        reduce, gather = self._reduce(parameters), self._gather(changed)
        first, last = np.minimum(self._gather(unit), gather), np.minimum(self._reduce(unit), reduce)
        reduced = last + hidden(self._cluster, backward_s, reduce - last)
        gathered = first + hidden(self._cluster, forward_s, gather - first)
        # FSDP2 reduces a pipeline's stage once its last backward is over.
        reduced = np.where(self._is("shards_parameters"), reduce, reduced)
        overlaps = self._candidates.flag("overlap_reduction")
        return np.zeros_like(unit.all), self.adding(unit.all), np.where(overlaps, reduced + gathered, reduce + gather)

    def first_gathers(self, unit: Elements, forward_s: Floats, layers: Floats) -> Floats:
        """Seconds that a stage's first forward waits for its parameters, which FSDP2 gathers as the first microbatch
        arrives. A schedule of several stages a rank has them gathered before.
        """
        gather, candidates = self._gather(unit), self._candidates
        exposed = gather + hidden(self._cluster, layers * forward_s, np.maximum(0, layers - 1) * gather)
        late = self._is("shards_parameters") & (candidates["pp"] > 1) & candidates.where("schedule", "1f1b")
        return np.where(late, exposed, 0)

    def adding(self, numel: Floats) -> Floats:
        """Seconds to add a microbatch's gradients to those of the microbatches before it, unsharded, in fp32."""
        whole = ~self._by_unit | ~self._candidates.flag("reduce_each")
        added = self._is("adds") & whole & self._several
        return np.where(added, self._move((self._element + 2 * MASTER_BYTES) * self._trained * numel), 0)

    def _gather(self, elements: Elements) -> Floats:
        gathered = self._over_shards("all_gather", self._element * elements.rest, self._is("exchanges_gathers"))
        experts = self._groups.seconds("experts", "all_gather", self._element * elements.experts)
        gathered = gathered + np.where(elements.experts > 0, experts, 0)
        return np.where(self._is("shards_optimizer"), gathered, 0)

    def _reduce(self, elements: Elements) -> Floats:
        """Over shards and then over replicas; if nothing is sharded, over all at once, in the masters' dtype."""
        elements = Elements(self._trained * elements.rest, self._trained * elements.experts)
        exchanges, shards, numel = self._is("exchanges_reductions"), self._candidates.shards, elements.rest
        scattered = self._over_shards("reduce_scatter", self._reduction * numel, exchanges)
        if self._cluster.library == "gloo":
            others = (shards - 1) / shards
            summing = self._move(3 * self._reduction * numel * others)
            scattered = scattered + np.where(exchanges & (others > 0), summing, 0)
        experts = self._groups.seconds("experts", "reduce_scatter", self._reduction * elements.experts)
        scattered = scattered + np.where(elements.experts > 0, experts, 0)
        own = numel / shards + elements.experts / self._candidates.expert_shards
        summed = self._groups.seconds("replicas", "all_reduce", self._reduction * own)
        whole = self._groups.seconds("all", "all_reduce", MASTER_BYTES * elements.all)
        return np.where(self._is("shards_optimizer"), scattered + summed, whole)

    def _over_shards(self, op: CollectiveOp, nbytes: Floats, exchanges: Mask) -> Floats:
        """Seconds of a collective over the shards; over gloo, of an exchange instead for rows that ``exchanges``."""
        plain = self._groups.seconds("shards", op, nbytes)
        if self._cluster.library != "gloo":
            return plain
        return np.where(exchanges, self._groups.seconds("shards", "exchange", nbytes), plain)

    def _move(self, nbytes: Floats) -> Floats:
        hardware = self._cluster.accelerator
        return hardware.kernel_s + nbytes / hardware.memory_bytes_per_s
