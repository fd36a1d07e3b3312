"""How long a collective takes: latency and bandwidth of the algorithms that a library chooses from.

The model is Hockney's, per algorithm: a number of hops, each of which costs its link's latency, and a number of bytes
that the slowest link carries (Thakur, Rabenseifner, Gropp: "Optimization of collective communication operations in
MPICH", 2005). S is the size of the unsharded tensor in bytes, n the ranks, m the nodes they are on, k = n / m.

- *ring*: one ring through all ranks, k side by side, one through each adapter; n - 1 hops, m - 1 of them between
  nodes; S (n-1)/n bytes over the slower of the links. An all-reduce goes round twice.
- *tree* (all-reduce): up and down; 2 log2(m) hops between nodes and 2 (k-1) within.
- *hierarchical*: all-gather between nodes, each rank with its like, then within the nodes (a reduce-scatter the other
  way round); few hops, but what the links carry adds up.

A library chooses what takes least. Where the cluster's profile holds measurements, these go first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from refshard.specs.cluster import Algorithm, ClusterSpec, CollectiveOp, LinkSpec, MeasuredCollective

Link = Literal["within", "between"]
_ROUNDS: dict[CollectiveOp, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
"""How often each byte goes round the ring, times (n-1)/n."""
_LAYERED = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How the ranks of a process group lie: on ``nodes`` nodes, ``ranks / nodes`` on each."""

    ranks: int
    nodes: int

    @property
    def per_node(self) -> int:
        """Ranks of the group on one node."""
        return self.ranks // self.nodes


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """What one collective takes: its ``link`` is occupied for ``transfer_s``; its result comes ``latency_s`` later."""

    link: Link
    transfer_s: float
    latency_s: float
    algorithm: Algorithm | Literal["measured", "none"]

    @property
    def seconds(self) -> float:
        """From its start to its end, alone on its link."""
        return self.transfer_s + self.latency_s


def group_shape(cluster: ClusterSpec, ranks: Sequence[int]) -> GroupShape:
    """The shape of a group of these ranks of the whole cluster; nodes hold consecutive ranks.

    A group that lies unevenly on its nodes is taken to have as many ranks on each as on the fullest.
    """
    nodes = [rank // cluster.ranks_per_node for rank in ranks]
    fullest = max(nodes.count(node) for node in set(nodes))
    return GroupShape(ranks=fullest * len(set(nodes)), nodes=len(set(nodes)))


def bus_bandwidth(op: CollectiveOp, nbytes: int, ranks: int, seconds: float) -> float:
    """Bytes per second over each link as nccl-tests counts them; ``nbytes`` is the size of the unsharded tensor.

    Source: nccl-tests' PERFORMANCE.md. A group of one rank moves nothing: 0.
    """
    factor = _ROUNDS.get(op, 0) * (ranks - 1) / ranks if op in _ROUNDS else min(1, ranks - 1)
    return factor * nbytes / seconds if seconds > 0 else 0.0


def collective_cost(cluster: ClusterSpec, op: CollectiveOp, nbytes: int, shape: GroupShape) -> CollectiveCost:
    """What ``op`` of ``nbytes`` (of the unsharded tensor) takes in a group of this shape.

    All groups of this shape are taken to communicate at once, as they do in training, and to share what joins nodes.
    """
    if shape.ranks == 1:
        return CollectiveCost("within", 0.0, 0.0, "none")
    link: Link = "between" if shape.nodes > 1 else "within"
    points = [m for m in cluster.measured if (m.op, m.ranks, m.nodes) == (op, shape.ranks, shape.nodes)]
    if points:
        return _measured(points, nbytes, link)
    return min((_modelled(cluster, a, op, nbytes, shape, link) for a in _applicable(cluster, op, shape)), key=_seconds)


def _seconds(cost: CollectiveCost) -> float:
    return cost.seconds


def _measured(points: list[MeasuredCollective], nbytes: int, link: Link) -> CollectiveCost:
    """Between two measured sizes in proportion; beyond them on the line from the fastest to the slowest end."""
    points = sorted(points, key=lambda p: p.bytes)
    latency = min(p.seconds for p in points)
    sizes, seconds = [p.bytes for p in points], [p.seconds for p in points]
    if nbytes >= sizes[-1]:
        total = seconds[-1] * nbytes / sizes[-1]
    elif nbytes <= sizes[0]:
        total = seconds[0]
    else:
        place = next(i for i, size in enumerate(sizes) if size > nbytes)
        part = (nbytes - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        total = seconds[place - 1] + part * (seconds[place] - seconds[place - 1])
    return CollectiveCost(link, max(total - latency, 0.0), min(latency, total), "measured")


def _applicable(cluster: ClusterSpec, op: CollectiveOp, shape: GroupShape) -> list[Algorithm]:
    found: list[Algorithm] = ["ring"]
    if "tree" in cluster.algorithms and op == "all_reduce":
        found.append("tree")
    if "hierarchical" in cluster.algorithms and shape.nodes > 1 and shape.per_node > 1 and op in _LAYERED:
        found.append("hierarchical")
    return found


def _modelled(
    cluster: ClusterSpec, algorithm: Algorithm, op: CollectiveOp, nbytes: int, shape: GroupShape, link: Link
) -> CollectiveCost:
    n, m, k = shape.ranks, shape.nodes, shape.per_node
    inner, outer = cluster.within, _between(cluster, shape)
    if op == "all_to_all":
        hops = cluster.launch_s + (outer.latency_s if m > 1 else inner.latency_s)
        apart = nbytes / n * max((n - k) * k / outer.bytes_per_s if m > 1 else 0.0, (k - 1) / inner.bytes_per_s)
        return CollectiveCost(link, apart, hops, algorithm)
    if algorithm == "hierarchical":
        return _hierarchical(cluster, op, nbytes, shape, outer)
    slowest = min(outer.bytes_per_s, inner.bytes_per_s if k > 1 else math.inf) if m > 1 else inner.bytes_per_s
    if algorithm == "tree":
        hops = 2 * math.log2(m) * outer.latency_s + 2 * (k - 1) * inner.latency_s
        return CollectiveCost(link, 2 * nbytes / slowest, cluster.launch_s + hops, algorithm)
    hops = (m - 1) * outer.latency_s + (n - m) * inner.latency_s
    if op == "broadcast":
        return CollectiveCost(link, nbytes / slowest, cluster.launch_s + hops, algorithm)
    rounds = _ROUNDS[op]
    return CollectiveCost(link, rounds * nbytes * (n - 1) / n / slowest, cluster.launch_s + rounds * hops, algorithm)


def _hierarchical(
    cluster: ClusterSpec, op: CollectiveOp, nbytes: int, shape: GroupShape, outer: LinkSpec
) -> CollectiveCost:
    m, k = shape.nodes, shape.per_node
    rounds, inner = _ROUNDS[op], cluster.within
    hops = (m - 1) * outer.latency_s + (k - 1) * inner.latency_s
    # The k ranks of a node gather a k-th each, side by side: together the node's adapters carry (m-1)/m of it all.
    between = nbytes * (m - 1) / m / outer.bytes_per_s
    within_node = nbytes * (k - 1) / k / inner.bytes_per_s
    return CollectiveCost("between", rounds * (between + within_node), cluster.launch_s + rounds * hops, "hierarchical")


def _between(cluster: ClusterSpec, shape: GroupShape) -> LinkSpec:
    """What joins the nodes of one group: its share, by its ranks on a node, of what joins the whole node."""
    if cluster.between is None:
        assert shape.nodes == 1
        return cluster.within
    share = shape.per_node / cluster.ranks_per_node
    return LinkSpec(bytes_per_s=cluster.between.bytes_per_s * share, latency_s=cluster.between.latency_s)
