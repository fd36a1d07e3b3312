"""Collectives of data parallelism: where the groups of ranks lie, what their collectives take, and what they add to a
step; one entry a row. And all that one rank issues in a step.

Ranks are numbered with tensor parallelism innermost, then context, shard and replicate, and the pipeline outermost, as
Megatron and torchtitan do; so groups that communicate most lie within a node.

A strategy that shards parameters gathers each unit before its forward and its backward, and reduces its gradients after
that, while its neighbours compute; before the first and after the last unit nothing computes. Others reduce once a
step, during the last microbatch's backward, and gather what the optimizer changed during the next forward.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from refshard.costs import GroupShape, collective_cost
from refshard.plan.cost_models import MASTER_BYTES, CostModel, fact, find_cost_model
from refshard.plan.kernels import Share, hidden_bytes, sizes_of
from refshard.plan.layers import (
    Issued,
    around_attention,
    around_embedding,
    around_head,
    around_products,
    hidden,
    norm_gradients,
)
from refshard.plan.space import Candidates, Floats, Integers, Mask, by_distinct
from refshard.specs.cluster import ClusterSpec, CollectiveOp
from refshard.specs.configuration import Configuration
from refshard.specs.layers import layers_of_stages, stages_of_rank
from refshard.specs.model import ModelSpec

SKEW = 0.87
"""The part of a collective's latency that compute waits for although both overlap: all ranks must reach a unit's
collectives before any goes on, and the more ranks, the later the last one."""


def group_of(cluster: ClusterSpec, size: int, stride: int) -> GroupShape:
    """The shape of a group of ``size`` ranks, each ``stride`` after the other.

    Where a node's end cuts it unevenly, it counts as lying on as many nodes as it takes with the same number on each.
    """
    on_node = max(1, min(size, cluster.ranks_per_node // stride)) if stride < cluster.ranks_per_node else 1
    while size % on_node:
        on_node -= 1
    return GroupShape(ranks=size, nodes=size // on_node)


class Groups:
    """Collectives of the data-parallel axes of many configurations; all arguments and results have one entry a row."""

    def __init__(self, cluster: ClusterSpec, candidates: Candidates) -> None:
        self._cluster, self._inner = cluster, candidates["tensor"]
        self._shards, self._replicas = candidates.shards, candidates["replicate"]

    def over_shards(self, op: CollectiveOp, nbytes: Floats) -> Floats:
        """Seconds of a collective over the ranks that parameters are sharded over."""
        return self._seconds(op, nbytes, self._shards, self._inner)

    def over_replicas(self, op: CollectiveOp, nbytes: Floats) -> Floats:
        """... over those that hold the same part."""
        return self._seconds(op, nbytes, self._replicas, self._inner * self._shards)

    def latency_over_shards(self, op: CollectiveOp, nbytes: Floats) -> Floats:
        """The latency in the seconds of :meth:`over_shards`."""
        latency: Floats = self._costs(op, nbytes, self._shards, self._inner)[1]
        return latency

    def over_all(self, op: CollectiveOp, nbytes: Floats) -> Floats:
        """... over all that hold the same layers."""
        return self._seconds(op, nbytes, self._replicas * self._shards, self._inner)

    def _seconds(self, op: CollectiveOp, nbytes: Floats, size: Integers, stride: Integers) -> Floats:
        seconds: Floats = self._costs(op, nbytes, size, stride)[0]
        return seconds

    def _costs(self, op: CollectiveOp, nbytes: Floats, size: Integers, stride: Integers) -> Floats:
        """Seconds, and the latency in them."""

        def cost(count: int, ranks: int, step: int) -> tuple[float, float]:
            found = collective_cost(self._cluster, op, count, group_of(self._cluster, ranks, step))
            return found.seconds, found.latency_s

        found: Floats = by_distinct([np.rint(nbytes).astype(np.int64), size, stride], cost)
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """Seconds that one microbatch's forward and backward of one layer take longer, ``layer_forward_s`` and
    ``layer_backward_s``, that both wait for ranks that are late, ``layer_skew_s``, and that a step does beside its
    layers, ``step_s``.
    """

    layer_forward_s: Floats
    layer_backward_s: Floats
    layer_skew_s: Floats
    step_s: Floats


class Exchanges:
    """Data parallelism's share of the time of many configurations on one cluster."""

    def __init__(self, cluster: ClusterSpec, candidates: Candidates, reduction: Floats) -> None:
        self._cluster, self._candidates, self._reduction = cluster, candidates, reduction
        self._groups = Groups(cluster, candidates)
        self._element = np.where(candidates.where("precision", "fp32"), MASTER_BYTES, 2)
        facts = (
            "shards_parameters", "shards_optimizer", "keeps", "copies_out", "copies_in", "divides", "adds",
            "exchanges_gathers", "exchanges_reductions",
        )  # fmt: skip
        self._way = {name: candidates.mapped("strategy", partial(fact, name=name)) > 0 for name in facts}

    @property
    def by_unit(self) -> Mask:
        """Rows that gather and reduce each unit in each microbatch; a pipeline's stage keeps its parameters."""
        found: Mask = self._way["shards_parameters"] & (self._candidates["pipeline"] == 1)
        return found

    def of(
        self, unit: Floats, ends: Floats, parameters: Floats, forward_s: Floats, backward_s: Floats, layers: Floats
    ) -> Exchange:
        """What it adds to layers of ``unit`` elements; ``ends`` are the embedding's and the head's, ``parameters`` all
        of the rank's. ``forward_s`` and ``backward_s`` are a layer's.
        """
        each = self._by_unit(unit, ends, forward_s, backward_s, layers)
        once = self._by_step(unit, parameters, layers * forward_s, layers * backward_s)
        forward, backward, step = (np.where(self.by_unit, a, b) for a, b in zip(each, once))
        skew = np.where(self.by_unit, self._unit_skew(unit), 0)
        return Exchange(layer_forward_s=forward, layer_backward_s=backward, layer_skew_s=skew, step_s=step)

    def _by_unit(
        self, unit: Floats, ends: Floats, forward_s: Floats, backward_s: Floats, layers: Floats
    ) -> tuple[Floats, Floats, Floats]:
        candidates = self._candidates
        gather, reduce = self._gather(unit), self._reduce(unit)
        reshards = candidates.flag("reshard") & ~self._way["keeps"]
        out = np.where(self._way["copies_out"], self._move(2 * self._element * unit), 0)
        into = np.where(self._way["copies_in"], self._move((self._element + self._reduction) * unit), 0)
        divided = np.where(self._way["divides"], self._move((self._element + 3 * self._reduction) * unit), 0)
        cast = self._move((MASTER_BYTES + self._element) * unit / candidates.shards)
        each = candidates.flag("reduce_each") | (candidates["microbatches"] == 1)
        forward = out + cast + hidden(self._cluster, forward_s, gather)
        backward = np.where(reshards, out + cast, 0) + np.where(each, into + divided, 0)
        backward = backward + hidden(
            self._cluster, backward_s, np.where(reshards, gather, 0) + np.where(each, reduce, 0)
        )
        backward = backward + np.where(each, 0, self.adding(unit))
        alone = self._gather(ends) + self._gather(unit) + self._reduce(ends)
        late = np.where(each, 0, layers * (into + divided + hidden(self._cluster, backward_s, reduce)))
        return forward, backward, alone * np.where(each, candidates["microbatches"], 1) + late

    def _unit_skew(self, unit: Floats) -> Floats:
        """Of a unit's gathers and reductions in one microbatch."""
        candidates = self._candidates
        gathers = 1 + (candidates.flag("reshard") & ~self._way["keeps"])
        reduces = candidates.flag("reduce_each") | (candidates["microbatches"] == 1)
        gathered = gathers * self._skew("all_gather", self._element * unit)
        return gathered + np.where(reduces, self._skew("reduce_scatter", self._reduction * unit), 0)

    def first_gathers(self, unit: Floats, forward_s: Floats, layers: Floats) -> Floats:
        """Seconds that a stage's first forward waits for its parameters, which FSDP2 gathers as the first microbatch
        arrives. A schedule of several stages a rank has them gathered before.
        """
        candidates = self._candidates
        gather = self._gather(unit)
        exposed = gather + hidden(self._cluster, layers * forward_s, np.maximum(0, layers - 1) * gather)
        late = self._way["shards_parameters"] & (candidates["pipeline"] > 1) & candidates.where("schedule", "1f1b")
        return np.where(late, exposed, 0)

    def _skew(self, op: CollectiveOp, nbytes: Floats) -> Floats:
        return SKEW * self._groups.latency_over_shards(op, nbytes)

    def adding(self, numel: Floats) -> Floats:
        """Seconds to add a microbatch's gradients to those of the microbatches before it, unsharded, in fp32."""
        candidates = self._candidates
        whole = ~self.by_unit | ~candidates.flag("reduce_each")
        added = self._way["adds"] & whole & (candidates["microbatches"] > 1)
        return np.where(added, self._move((self._element + 2 * MASTER_BYTES) * numel), 0)

    def _by_step(
        self, unit: Floats, parameters: Floats, forward_s: Floats, backward_s: Floats
    ) -> tuple[Floats, Floats, Floats]:
        reduce, gather = self._reduce(parameters), self._gather(parameters)
        overlaps = self._candidates.flag("overlap_reduction")
        first, last = self._gather(unit), self._reduce(unit)
        beside = np.minimum(last, reduce) + hidden(self._cluster, backward_s, reduce - np.minimum(last, reduce))
        before = np.minimum(first, gather) + hidden(self._cluster, forward_s, gather - np.minimum(first, gather))
        # FSDP2 reduces a pipeline's stage once its last backward is over.
        beside = np.where(self._way["shards_parameters"], reduce, beside)
        return np.zeros_like(unit), self.adding(unit), np.where(overlaps, beside + before, reduce + gather)

    def _gather(self, numel: Floats) -> Floats:
        sharded = self._way["shards_optimizer"]
        gathered = self._over_shards("all_gather", self._element * numel, self._way["exchanges_gathers"])
        return np.where(sharded, gathered, 0)

    def _reduce(self, numel: Floats) -> Floats:
        """Over shards and then over replicas; where nothing is sharded, over all at once, in the masters' dtype."""
        exchanges = self._way["exchanges_reductions"]
        scattered = self._over_shards("reduce_scatter", self._reduction * numel, exchanges)
        if self._cluster.library == "gloo":
            others = (self._candidates.shards - 1) / self._candidates.shards
            scattered = scattered + np.where(
                exchanges & (others > 0), self._move(3 * self._reduction * numel * others), 0
            )
        summed = self._groups.over_replicas("all_reduce", self._reduction * numel / self._candidates.shards)
        whole = self._groups.over_all("all_reduce", MASTER_BYTES * numel)
        return np.where(self._way["shards_optimizer"], scattered + summed, whole)

    def _over_shards(self, op: CollectiveOp, nbytes: Floats, exchanges: Mask) -> Floats:
        """Seconds of a collective over the shards; of an exchange instead, over gloo, where ``exchanges``."""
        plain = self._groups.over_shards(op, nbytes)
        if self._cluster.library != "gloo":
            return plain
        return np.where(exchanges, self._groups.over_shards("exchange", nbytes), plain)

    def _move(self, nbytes: Floats) -> Floats:
        hardware = self._cluster.accelerator
        return hardware.kernel_s + nbytes / hardware.memory_bytes_per_s


def issued_by_rank(model: ModelSpec, one: Configuration, seq_len: int, rank: int = 0) -> dict[str, tuple[float, float]]:
    """How many of each kind the pipeline's ``rank`` issues in a step, and their bytes together.

    DDP counts as reducing once a step, whatever its buckets. The mean loss, which a pipeline's last rank tells the
    others, is left out.
    """
    share = Share(
        sequences=one.microbatch, seq_len=seq_len, tensor=one.tensor, context=one.context, precision=one.precision
    )
    stages = layers_of_stages(model.n_layers, one.pipeline * one.interleave)
    found: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    hidden = hidden_bytes(model, share, casts=find_cost_model(one.strategy).casts)
    for stage in stages_of_rank(rank, one.pipeline, one.interleave):
        first, last = stage == 0, stage == len(stages) - 1
        for issued in _of_stage(model, one, share, len(stages[stage]), first=first, last=last):
            found[issued.op] += issued.count  # type: ignore[assignment]
            sizes[issued.op] += issued.count * issued.nbytes  # type: ignore[assignment]
        # Hidden states go on and their gradients back, so that a stage gets as many as it sends.
        neighbours = one.microbatches * ((not first) + (not last))
        for message in ("send", "recv"):
            found[message] += neighbours
            sizes[message] += neighbours * hidden  # type: ignore[assignment]
    return {op: (count, sizes[op]) for op, count in found.items() if count}


def _of_stage(
    model: ModelSpec, one: Configuration, share: Share, layers: int, *, first: bool, last: bool
) -> Iterator[Issued]:
    way, several = find_cost_model(one.strategy), one.microbatches
    inside: list[Issued] = []
    for which in ("forward", "backward", "again"):
        again = layers if one.checkpointing == "full" else 0
        computed = again if which == "again" else layers
        products = layers if which == "again" and one.checkpointing == "selective" else computed
        inside += [found.times(products) for found in around_products(model, share, which)]
        inside += [found.times(computed) for found in around_attention(model, share, which)]
        if which != "again":
            inside += around_embedding(model, share, which) if first else ()
            inside += around_head(model, share, which) if last else ()
    norms = 2 * layers + last
    if one.pipeline == 1:
        inside += norm_gradients(model, share, share.element, norms)
    else:
        yield from norm_gradients(model, share, MASTER_BYTES, norms)
    yield from (found.times(several) for found in inside)
    yield from _over_data(model, one, share, way, layers, first=first, last=last)


def _over_data(
    model: ModelSpec, one: Configuration, share: Share, way: CostModel, layers: int, *, first: bool, last: bool
) -> Iterator[Issued]:
    """Gathers and reductions of the units of a stage: each layer, and what lies around them."""
    sizes, shards = sizes_of(model, one.tensor, 1), one.shard * one.context
    around = (sizes.embedding if first else 0.0) + (sizes.head if last else 0.0)
    if not way.shards_optimizer:
        if one.replicate * shards > 1:
            yield Issued("all_reduce", MASTER_BYTES * (layers * sizes.dense + around))
        return
    staged = one.pipeline > 1
    passes = 1 if staged or way.keeps or not one.reshard else 2
    times = 1 if staged or not way.shards_parameters else one.microbatches
    reduction = MASTER_BYTES if one.reduction == "fp32" else 2
    for numel, units, gathers in ((sizes.dense, layers, passes), (around, int(around > 0), 1)):
        if shards > 1:
            yield Issued("all_gather", share.element * numel, units * gathers * times)
            yield Issued("reduce_scatter", reduction * numel, units * times)
        if one.replicate > 1:
            yield Issued("all_reduce", reduction * numel / shards, units * times)
