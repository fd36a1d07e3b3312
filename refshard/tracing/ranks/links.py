"""What a process group's link reaches, according to the cluster profile that has the trace's device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import msgspec

from refshard.costs import GroupShape, bus_bandwidth, collective_cost, group_shape
from refshard.errors import SpecError
from refshard.specs.cluster import COLLECTIVES, ClusterSpec, CollectiveOp, cluster_of_device, load_cluster

_LARGE = 2**36
"""Bytes of a message whose latency does not matter."""
_MOST_IN_A_HOST = 16
"""Accelerators of one host; a profile with more on a node joins several hosts by what usually joins one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """How the ranks of a trace are joined.

    ``profile`` names the cluster profile of the device, None if no profile has it. ``ranks_per_node`` is how many
    consecutive ranks share a node, None if that is unknown.
    """

    profile: str | None = None
    cluster: ClusterSpec | None = None
    ranks_per_node: int | None = None

    def nodes(self, ranks: Sequence[int]) -> int | None:
        """How many nodes these ranks lie on; None where the trace does not list them, or not the devices of a node."""
        if not ranks or self.ranks_per_node is None:
            return None
        return len({rank // self.ranks_per_node for rank in ranks})

    def bandwidth(self, op: str, ranks: Sequence[int]) -> float | None:
        """Bus bandwidth that large messages reach in this group, bytes per second."""
        cluster, shape = self._shape(op, ranks)
        if cluster is None or shape is None:
            return None
        known = cast(CollectiveOp, op)
        return bus_bandwidth(known, _LARGE, shape.ranks, collective_cost(cluster, known, _LARGE, shape).transfer_s)

    def latency_s(self, op: str, nbytes: int, ranks: Sequence[int]) -> float | None:
        """What ``op`` takes in this group however little it moves, seconds, by the way that is best for ``nbytes``."""
        cluster, shape = self._shape(op, ranks)
        if cluster is None or shape is None:
            return None
        return collective_cost(cluster, cast(CollectiveOp, op), nbytes, shape).latency_s

    def _shape(self, op: str, ranks: Sequence[int]) -> tuple[ClusterSpec | None, GroupShape | None]:
        if self.cluster is None or len(ranks) < 2 or op not in COLLECTIVES or self.ranks_per_node is None:
            return None, None
        cluster = msgspec.structs.replace(self.cluster, ranks_per_node=self.ranks_per_node)
        shape = group_shape(cluster, ranks)
        return (None, None) if shape.nodes > 1 and cluster.between is None else (cluster, shape)


@lru_cache(maxsize=64)
def links_of(device: str, devices: int | None) -> Links:
    """The links of a trace of ``device`` by a process that sees ``devices`` of them, None if the trace lists none.

    A process that sees one device only may have been shown no more: then the ranks of a node are unknown.
    """
    try:
        profile = cluster_of_device(device)
    except SpecError:
        return Links(ranks_per_node=devices if devices and devices > 1 else None)
    cluster = load_cluster(profile)
    seen = devices if devices and devices > 1 else None
    joined = cluster.ranks_per_node if cluster.ranks_per_node > _MOST_IN_A_HOST else seen
    return Links(profile=profile, cluster=cluster, ranks_per_node=joined)
