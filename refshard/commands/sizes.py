"""Numbers on the command line: of GPUs, and lists of them."""

import re

from refshard.errors import SpecError
from refshard.specs.cluster import ClusterSpec


def sized(gpus: str | None, cluster: ClusterSpec) -> list[ClusterSpec]:
    """The cluster with each number of GPUs, ascending: ``"8,16,32"``, or ``"64..2048"``, doubling.

    Raises:
        SpecError: it is neither, or a number fills the last node in part.
    """
    if gpus is None:
        return [cluster]
    if doubled := re.fullmatch(r"(\d{1,7})\.\.(\d{1,7})", gpus.strip()):
        count, most = int(doubled[1]), int(doubled[2])
        if not 1 <= count <= most:
            raise SpecError(f"gpus must ascend from 1 or more, got {gpus!r}; write, for example, 64..2048")
        counts = []
        while count <= most:
            counts.append(count)
            count *= 2
    else:
        counts = sorted(set(numbers("gpus", gpus)))
    return [cluster.of_world_size(count) for count in counts]


def numbers(name: str, given: str) -> list[int]:
    """``"1,2,4"`` as numbers.

    Raises:
        SpecError: it is no such list.
    """
    numbers = [number.strip() for number in given.split(",") if number.strip()]
    if not numbers or any(not re.fullmatch(r"[1-9]\d{0,6}", number) for number in numbers):
        raise SpecError(f"{name} must be numbers from 1, separated by commas, got {given!r}; write, for example, 1,2,4")
    return [int(number) for number in numbers]
