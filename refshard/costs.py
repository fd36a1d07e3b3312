"""How long a kernel and a collective take on given hardware.

Collectives follow Hockney's model, per algorithm: a number of hops, each of which costs its link's latency, and a
number of bytes that the slowest link carries (Thakur, Rabenseifner, Gropp: "Optimization of collective communication
operations in MPICH", 2005; NCCL's own tuning model counts alike). S is the size of the unsharded tensor in bytes, n the
ranks, m the nodes they are on, k = n / m.

- *ring*: one ring through all ranks, k side by side, one through each adapter; n - 1 hops, m - 1 of them between
  nodes; S (n-1)/n bytes over the slower of the links. An all-reduce goes round twice.
- *tree* (all-reduce): up and down; 2 log2(m) hops between nodes and 2 (k-1) within.
- *hierarchical*: all-gather between nodes, each rank with its like, then within the nodes (a reduce-scatter the other
  way round); few hops, but what the links carry adds up.
- an all-to-all, and the engine's exchange, go straight to each other rank: S/n bytes to each, one hop.

A library chooses what takes least, of its algorithms and its protocols. Where the cluster's profile holds measurements,
these go first.
"""

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from refshard.specs.cluster import Algorithm, ClusterSpec, CollectiveOp, LinkSpec, MeasuredCollective
from refshard.specs.hardware import AttentionKernel, Dtype, HardwareSpec, ProductDtype

Link = Literal["within", "between"]
_ROUNDS: dict[CollectiveOp, int] = {
    "all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "exchange": 1
}  # fmt: skip
"""How often each byte goes round the ring, times (n-1)/n."""
_LAYERED = ("all_gather", "reduce_scatter", "all_reduce")
_STRAIGHT = ("all_to_all", "exchange")
ADAMW_BYTES = 28
"""Bytes that fused AdamW reads and writes for each fp32 parameter: four numbers read, three written."""
BACKWARD_PRODUCTS = 2.5
"""Products of attention's backward per product of its forward: it computes the scores again (FlashAttention)."""
RATED_WIDTH = 128
"""The head dimension at which profiles have attention's rate."""
SCORE_WIDTHS = (75, 44)
"""In cuDNN's kernels, a score's exponential takes as long as so many elements of a narrower head's products, forward
and backward: 4,096 tokens, head dimensions 64 and 128, one H200 (``attention_points`` of its profile). Slower kernels
hide it: FlashAttention-2's rates at both dimensions differ little (arXiv 2307.08691, figure 4)."""
_H200_PEAK, _TWICE_THE_EXPONENTIALS = 989e12 / 132, (10, 3)
"""FLOP/s of one multiprocessor. The faster its products are, the more an exponential weighs, of which each has as many
a cycle but Blackwell Ultra's, which have twice as many (``attention`` in the sources of gb300's profile)."""


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
    algorithm: Algorithm | Literal["straight", "measured", "none"]

    @property
    def seconds(self) -> float:
        """From its start to its end, alone on its link."""
        return self.transfer_s + self.latency_s


def product_seconds(hardware: HardwareSpec, dtype: ProductDtype, flops: float, nbytes: float) -> float:
    """Seconds of a matrix product; operands and result are ``nbytes`` in all."""
    rate = hardware.matmul[dtype]
    brought_in = nbytes / rate.bytes_per_s if rate.bytes_per_s else 0.0
    longer = max(flops / rate.flops_per_s, nbytes / hardware.memory_bytes_per_s)
    return hardware.kernel_s + rate.overhead_s + brought_in + longer


def attention_seconds(
    hardware: HardwareSpec, dtype: Dtype, *, heads: float, seq_len: int, head_dim: int, backward: bool = False,
    kernel: AttentionKernel = "flash", fp8: bool = False,
) -> float:  # fmt: skip
    """What causal attention takes, forward or backward; ``heads`` are query heads, of all sequences together. With
    ``fp8`` products, exponentials stay as they are.
    """
    scores = heads * seq_len**2 / 2
    rate = hardware.attention[dtype]
    flops_per_s = rate.flops_per_s * hardware.attention_kernels.get(kernel, 1.0)
    extra = _exponential_width(hardware, backward=backward)
    narrow = RATED_WIDTH * (head_dim + extra) / (RATED_WIDTH + extra) if kernel == "cudnn" else 0.0
    flops = 4 * max(head_dim, narrow) * (BACKWARD_PRODUCTS if backward else 1)
    measured = _score_seconds(hardware, dtype, kernel, seq_len, head_dim, backward=backward)
    each = (measured or flops / flops_per_s) * ((head_dim / 2 + extra) / (head_dim + extra) if fp8 else 1.0)
    return hardware.kernel_s + rate.overhead_s + scores * each


def _exponential_width(hardware: HardwareSpec, *, backward: bool) -> float:
    """As many elements of a head's products take as long as a score's exponential."""
    if not hardware.multiprocessors:
        return 0.0
    products = hardware.matmul["bf16"].peak / hardware.multiprocessors / _H200_PEAK
    return SCORE_WIDTHS[backward] * products / (2 if hardware.capability == _TWICE_THE_EXPONENTIALS else 1)


def _score_seconds(
    hardware: HardwareSpec, dtype: Dtype, kernel: AttentionKernel, seq_len: int, head_dim: int, *, backward: bool
) -> float:
    """Seconds per score between the measured lengths and head dimensions, 0 where none was measured.

    Between two lengths by their logarithm, between two head dimensions in proportion; beyond the lengths as at the
    nearest, beyond the head dimensions in proportion to them. Points of the kernel go before those of no kernel.
    """
    points = [p for p in hardware.attention_points if p.dtype == dtype and p.kernel in (kernel, None)]
    points = [p for p in points if p.kernel] or points
    by_width: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        seconds = point.backward_s if backward else point.forward_s
        by_width.setdefault(point.head_dim, []).append((math.log(point.seq_len), seconds))
    curve = [(float(width), _between_points(sorted(c), math.log(seq_len))) for width, c in sorted(by_width.items())]
    if not curve:
        return 0.0
    nearest = min(max(float(head_dim), curve[0][0]), curve[-1][0])
    return _between_points(curve, nearest) * head_dim / nearest


def _between_points(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at ``x`` on the line through the points on either side of it, or that of the nearest one."""
    place = bisect.bisect_left(points, (x, -math.inf))
    if place == 0 or place == len(points):
        return points[min(place, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return y0 + (x - x0) / (x1 - x0) * (y1 - y0)


def move_seconds(hardware: HardwareSpec, nbytes: float, transcendentals: float = 0.0) -> float:
    """Seconds of an elementwise kernel that moves ``nbytes`` and evaluates ``transcendentals``."""
    evaluated = transcendentals / hardware.transcendental_per_s if hardware.transcendental_per_s else 0.0
    return hardware.kernel_s + max(nbytes / hardware.memory_bytes_per_s, evaluated)


STRIDED_PER_MULTIPROCESSOR = 1.9e9
"""Elements a second of a kernel that computes addresses, each multiprocessor's share."""


def strided_seconds(hardware: HardwareSpec, elements: float) -> float:
    """The least that a pointwise kernel takes if it computes the addresses of so many elements; 0 if not known."""
    return elements / (STRIDED_PER_MULTIPROCESSOR * hardware.multiprocessors) if hardware.multiprocessors else 0.0


def first_touch_seconds(hardware: HardwareSpec, nbytes: float) -> float:
    """What it adds that a tensor is written to memory that the system has to provide first."""
    return nbytes / hardware.first_touch_bytes_per_s if hardware.first_touch_bytes_per_s else 0.0


def group_shape(cluster: ClusterSpec, ranks: Sequence[int]) -> GroupShape:
    """The shape of a group of these ranks of the whole cluster; nodes hold consecutive ranks.

    A group that lies unevenly on its nodes is taken to have as many ranks on each as on the fullest.
    """
    on_node = Counter(rank // cluster.ranks_per_node for rank in ranks)
    return GroupShape(ranks=max(on_node.values()) * len(on_node), nodes=len(on_node))


def bus_bandwidth(op: CollectiveOp, nbytes: int, ranks: int, seconds: float) -> float:
    """Bytes per second over each link as nccl-tests counts them; ``nbytes`` is the size of the unsharded tensor.

    Source: nccl-tests' PERFORMANCE.md. A group of one rank moves nothing: 0.
    """
    factor = _ROUNDS[op] * (ranks - 1) / ranks if op in _ROUNDS else min(1, ranks - 1)
    return factor * nbytes / seconds if seconds > 0 else 0.0


def collective_cost(cluster: ClusterSpec, op: CollectiveOp, nbytes: int, shape: GroupShape) -> CollectiveCost:
    """What ``op`` of ``nbytes`` (of the unsharded tensor) takes in a group of this shape.

    All groups of this shape are taken to communicate at once, as they do in training, and to share what joins nodes.
    """
    if shape.ranks == 1:
        return CollectiveCost("within", 0.0, 0.0, "none")
    points = [m for m in cluster.measured if (m.op, m.ranks, m.nodes) == (op, shape.ranks, shape.nodes)]
    if points:
        return _measured(points, nbytes, "between" if shape.nodes > 1 else "within")
    if cluster.library == "gloo" and op == "reduce_scatter":
        op = "all_reduce"  # what gloo makes of it
    ways = [_Way.plain(cluster, shape)]
    if cluster.quick is not None and op not in _STRAIGHT:
        ways.append(_Way.quick(cluster, shape))
    costs = (way.cost(a, op, nbytes) for way in ways for a in _applicable(cluster, op, shape))
    return min(costs, key=lambda cost: cost.seconds)


def _measured(points: list[MeasuredCollective], nbytes: int, link: Link) -> CollectiveCost:
    """Between two measured sizes in proportion, below the smallest as that, beyond the largest at its bandwidth.

    What the smallest takes is all latency, which does not grow with the size. Noise only ever adds, so no size takes
    longer than a larger one did.
    """
    fastest = math.inf
    curve: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: p.bytes, reverse=True):
        fastest = min(fastest, point.seconds)
        curve.insert(0, (float(point.bytes), fastest))
    latency = curve[0][1]
    transfer = (_between_points(curve, float(nbytes)) - latency) * max(1.0, nbytes / curve[-1][0])
    return CollectiveCost(link, transfer, latency, "measured")


def _applicable(cluster: ClusterSpec, op: CollectiveOp, shape: GroupShape) -> list[Algorithm]:
    found: list[Algorithm] = ["ring"]
    if "tree" in cluster.algorithms and op == "all_reduce":
        found.append("tree")
    if "hierarchical" in cluster.algorithms and shape.nodes > 1 and shape.per_node > 1 and op in _LAYERED:
        found.append("hierarchical")
    return found


@dataclass(frozen=True, slots=True)
class _Way:
    """A group's links in one protocol: ``inner`` within a node, ``outer`` its share of what joins nodes, if it uses it.

    ``launch_s`` is what any collective takes in this protocol.
    """

    shape: GroupShape
    inner: LinkSpec
    outer: LinkSpec
    launch_s: float

    @classmethod
    def plain(cls, cluster: ClusterSpec, shape: GroupShape) -> "_Way":
        return cls(shape, cluster.within, _between(cluster, shape), cluster.launch_s)

    @classmethod
    def quick(cls, cluster: ClusterSpec, shape: GroupShape) -> "_Way":
        protocol, plain = cluster.quick, cls.plain(cluster, shape)
        assert protocol is not None
        return cls(
            shape,
            LinkSpec(bytes_per_s=plain.inner.bytes_per_s * protocol.part, latency_s=protocol.within_latency_s),
            LinkSpec(bytes_per_s=plain.outer.bytes_per_s * protocol.part, latency_s=protocol.between_latency_s),
            protocol.launch_s,
        )

    def cost(self, algorithm: Algorithm, op: CollectiveOp, nbytes: int) -> CollectiveCost:
        if op in _STRAIGHT:
            return self._straight(nbytes)
        if algorithm == "hierarchical":
            return self._hierarchical(op, nbytes)
        n, m, k = self.shape.ranks, self.shape.nodes, self.shape.per_node
        rates = [self.inner.bytes_per_s] * (k > 1) + [self.outer.bytes_per_s] * (m > 1)
        if algorithm == "tree":
            hops = 2 * math.log2(m) * self.outer.latency_s + 2 * (k - 1) * self.inner.latency_s
            return self._taking(2 * nbytes / min(rates), hops, algorithm)
        hops = (m - 1) * self.outer.latency_s + (n - m) * self.inner.latency_s
        if op == "broadcast":
            return self._taking(nbytes / min(rates), hops, algorithm)
        rounds = _ROUNDS[op]
        return self._taking(rounds * nbytes * (n - 1) / n / min(rates), rounds * hops, algorithm)

    def _straight(self, nbytes: int) -> CollectiveCost:
        n, m, k = self.shape.ranks, self.shape.nodes, self.shape.per_node
        inside = (k - 1) / self.inner.bytes_per_s
        outside = (n - k) * k / self.outer.bytes_per_s
        hop = self.outer.latency_s if m > 1 else self.inner.latency_s
        return self._taking(nbytes / n * max(inside, outside), hop, "straight")

    def _hierarchical(self, op: CollectiveOp, nbytes: int) -> CollectiveCost:
        m, k = self.shape.nodes, self.shape.per_node
        rounds = _ROUNDS[op]
        hops = (m - 1) * self.outer.latency_s + (k - 1) * self.inner.latency_s
        # The k ranks of a node gather a k-th each, side by side: together its adapters carry (m-1)/m of it all.
        between = nbytes * (m - 1) / m / self.outer.bytes_per_s
        within_node = nbytes * (k - 1) / k / self.inner.bytes_per_s
        return self._taking(rounds * (between + within_node), rounds * hops, "hierarchical")

    def _taking(self, transfer_s: float, hops_s: float, how: Algorithm | Literal["straight"]) -> CollectiveCost:
        link: Link = "between" if self.shape.nodes > 1 else "within"
        return CollectiveCost(link, transfer_s, self.launch_s + hops_s, how)


def _between(cluster: ClusterSpec, shape: GroupShape) -> LinkSpec:
    """What joins the nodes of one group: its share, by its ranks on a node, of what joins the whole node."""
    if cluster.between is None:
        assert shape.nodes == 1
        return cluster.within
    share = shape.per_node / cluster.ranks_per_node
    return LinkSpec(bytes_per_s=cluster.between.bytes_per_s * share, latency_s=cluster.between.latency_s)
