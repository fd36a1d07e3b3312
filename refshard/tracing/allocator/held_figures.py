"""What an allocator holds at its peak, as data: nothing here needs numpy."""

from typing import Literal

import msgspec

Category = Literal[
    "before, kept", "before, freed later", "kept", "activations", "forward", "gradients", "backward", "optimizer state",
    "optimizer", "all-gather", "reduction", "collective", "other",
]  # fmt: skip
"""What a block is for: ``docs/explanation/metrics.md`` has the definitions."""
Phase = Literal["forward", "backward", "optimizer"]


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """``bytes`` in ``blocks`` blocks, for one purpose and unit, made by one operator.

    ``unit`` is the unit of the labels, else the innermost annotation of the user's; ``operator`` the outermost operator
    of the host around the allocation. Both are None where the trace does not tell, ``blocks`` too.
    """

    category: Category
    unit: str | None
    operator: str | None
    bytes: int
    blocks: int | None


class MemoryPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The moment at which an allocator held most, in bytes.

    ``ns`` is the host's time, in ``step`` and ``phase`` and under ``operator``, for ``unit``. ``risen_bytes`` is
    ``allocated_bytes`` less what was allocated when the trace began. ``reserved_bytes`` is what the allocator had taken
    from the device at this moment, so that the difference is cache and fragmentation; ``most_reserved_bytes`` the most
    over the trace. What a trace does not tell is None: 2021's tell no totals, a CPU has nothing reserved. ``holders``
    add up to ``allocated_bytes``, the largest first; empty without addresses. ``unmatched`` counts blocks that were
    handed out again though the trace does not show that they were taken back.
    """

    device: str
    ns: int
    step: int | None
    phase: Phase
    operator: str | None
    unit: str | None
    allocated_bytes: int | None
    risen_bytes: int
    reserved_bytes: int | None
    most_reserved_bytes: int | None
    holders: tuple[Holder, ...] = ()
    unmatched: int = 0
