"""Modes as rows of data: where each kind of state lives, and how unsharded storage is kept.

The engine reads these values and never asks for a mode by name.
"""

from typing import Literal

import msgspec

from refshard.errors import SpecError, nearest

Placement = Literal["replicate", "shard"]
Storage = Literal["transient", "ring"]
"""Unsharded storage: freed after each use, or a ring of pre-allocated slots that the units take in turn."""


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """One way of sharding.

    ``prefetch`` is how many units ahead a gather is issued. ``gradient_slots`` bounds how many units' unsharded
    gradients live at once: the unit that computes, and those whose reduce-scatter is under way. ``ring_slots`` is
    the number of parameter slots of a ring (and unused otherwise); a ring needs one slot more than it prefetches.
    """

    name: str
    parameters: Placement
    gradients: Placement
    optimizer: Placement
    storage: Storage
    prefetch: int
    gradient_slots: int
    ring_slots: int = 0


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(name="fsdp", parameters="shard", gradients="shard", optimizer="shard",
             storage="transient", prefetch=1, gradient_slots=2),
        Mode(name="yafsdp", parameters="shard", gradients="shard", optimizer="shard",
             storage="ring", prefetch=1, gradient_slots=2, ring_slots=2),
    )
}  # fmt: skip


def find_mode(name: str) -> Mode:
    """Return the mode called ``name``.

    Raises:
        SpecError: there is none.
    """
    if name not in MODES:
        raise SpecError(f"mode: no mode '{name}'; {nearest(name, list(MODES))}")
    return MODES[name]
