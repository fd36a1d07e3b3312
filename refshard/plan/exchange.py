"""What data parallelism adds to a step: gathers, reductions, and the copies around them; one entry a row.

A strategy that shards parameters gathers each unit before its forward and its backward, and reduces its gradients after
that, beside the compute of its neighbours; what comes before the first and after the last unit has nothing beside it.
Others reduce once a step, beside the last microbatch's backward, and gather what the optimizer changed beside the next
forward.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from refshard.plan.candidates import Candidates, Floats, Mask
from refshard.plan.groups import Groups
from refshard.plan.overlap import hidden
from refshard.plan.ways import MASTER_BYTES, fact
from refshard.specs.cluster import ClusterSpec, CollectiveOp

SKEW = 0.87
"""Of a collective's latency, what compute waits for though it runs beside it: all ranks must reach each unit's
collectives before it goes on, and the more there are, the later the last of them does."""


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
