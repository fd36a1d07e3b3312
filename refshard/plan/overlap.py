"""What communication costs that runs beside compute.

While both run, compute goes at the cluster's ``compute_beside_communication`` of its rate, and the collective at its
``communication_beside_compute``. All functions take numbers or arrays alike.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from refshard.specs.cluster import ClusterSpec

Seconds = TypeVar("Seconds", float, npt.NDArray[np.float64])


def hidden(cluster: ClusterSpec, compute_s: Seconds, comm_s: Seconds) -> Seconds:
    """Seconds that ``comm_s`` of communication, begun at once, adds to ``compute_s`` of compute."""
    slowed, slower = cluster.compute_beside_communication, cluster.communication_beside_compute
    beside = comm_s / slower
    enough = compute_s >= slowed * beside
    rest = compute_s * (1 / slowed - 1) + comm_s - slower * compute_s / slowed
    return np.where(enough, (1 - slowed) * beside, rest)  # type: ignore[return-value]
