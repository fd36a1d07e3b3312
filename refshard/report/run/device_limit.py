"""The memory that a rank of a comparison can use, where that is known."""

from collections.abc import Sequence
from dataclasses import dataclass

from refshard.analysis.cases import CaseResult
from refshard.analysis.gpu_memory import gpu_memory_of
from refshard.dryrun.overheads import overheads
from refshard.errors import SpecError
from refshard.plan.memory import usable
from refshard.quantities import GIB, format_bytes
from refshard.specs.cluster import load_cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Bytes that a rank can use, and their name."""

    bytes: float
    name: str

    @property
    def text(self) -> str:
        """Both in words.

        >>> Limit(bytes=80 * 2**30, name="usable").text
        '80.0 GiB usable'
        """
        return f"{format_bytes(self.bytes)} {self.name}"


def device_limit(cases: Sequence[CaseResult]) -> Limit | None:
    """The smallest limit of these cases; None on CPUs, unless the suite sets a limit."""
    return min((limit for case in cases if (limit := _limit(case))), key=lambda limit: limit.bytes, default=None)


def _limit(case: CaseResult) -> Limit | None:
    if case.spec.memory_limit_gib is not None:
        return Limit(bytes=case.spec.memory_limit_gib * GIB, name="limit per rank")
    if gpu := gpu_memory_of(case):
        return Limit(bytes=gpu.total_bytes, name="on the GPU")
    if not case.spec.cluster:
        return None
    try:
        hardware = load_cluster(case.spec.cluster).accelerator
    except SpecError:  # a profile of the user's own that is no longer there
        return None
    if not hardware.asynchronous:
        return None
    if case.fidelity == "dryrun":
        outside = sum(one.bytes for one in overheads(case.spec.world_size))
        return Limit(bytes=hardware.memory_bytes - outside, name="usable")
    return Limit(bytes=usable(hardware), name="usable")
