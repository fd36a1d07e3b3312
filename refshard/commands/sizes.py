"""Numbers of GPUs on the command line."""

from refshard.quantities import parse_counts
from refshard.specs.cluster import ClusterSpec
from refshard.specs.reading import read_as


def sized(gpus: str | None, cluster: ClusterSpec) -> list[ClusterSpec]:
    """The cluster with each number of GPUs, ascending: ``"8,16,32"``, or ``"64..2048"``, doubling.

    Raises:
        SpecError: it is neither, or a number fills the last node in part.
    """
    if gpus is None:
        return [cluster]
    return [cluster.of_world_size(count) for count in sorted(read_as(parse_counts, "gpus", gpus))]
