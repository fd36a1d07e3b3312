"""Where the groups of a configuration's ranks lie, and what their collectives take.

Ranks are numbered with tensor parallelism innermost, then context, shard and replicate, and the pipeline outermost, as
Megatron and torchtitan do; so groups that communicate most lie within a node.
"""

import numpy as np

from refshard.costs import GroupShape, collective_cost
from refshard.plan.candidates import Candidates, Floats, Integers, by_distinct
from refshard.specs.cluster import ClusterSpec, CollectiveOp


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
