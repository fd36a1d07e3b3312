"""Memory of the GPUs of a case over its ranks and launches."""

import statistics
from collections.abc import Callable, Iterable

from refshard.analysis.cases import CaseResult
from refshard.records import GpuMemory


def gpu_memory_of(case: CaseResult) -> GpuMemory | None:
    """The most of any rank, and the median of it over launches; retries and failures are all of all launches.

    ``total_bytes`` is that of the smallest GPU. None where no launch that ended ok has a GPU's memory.
    """
    launches = [launch.gpu_memory for launch in case.launches if launch.state == "ok" and launch.gpu_memory]
    if not launches:
        return None

    def middle(field: str, of: Callable[[Iterable[int]], int] = max) -> int:
        return int(statistics.median(of(getattr(rank, field) for rank in ranks) for ranks in launches))

    return GpuMemory(
        allocated_bytes=middle("allocated_bytes"),
        active_bytes=middle("active_bytes"),
        reserved_bytes=middle("reserved_bytes"),
        requested_bytes=middle("requested_bytes"),
        retries=sum(rank.retries for ranks in launches for rank in ranks),
        ooms=sum(rank.ooms for ranks in launches for rank in ranks),
        used_bytes=middle("used_bytes"),
        outside_bytes=middle("outside_bytes"),
        total_bytes=middle("total_bytes", min),
    )
