"""Modes as rows of data: where each kind of state lives, and how unsharded storage is kept.

The engine reads these values and never asks for a mode by name.
"""

from typing import Literal

import msgspec

from refshard.errors import SpecError, nearest

Placement = Literal["replicate", "shard"]
"""Over the ranks of the shard axis: everything on each, or a part on each."""
Storage = Literal["persistent", "transient", "ring"]
"""Unsharded storage: kept for good; freed after each use; or planned ahead in allocations that units share, where the
blocks' parameters take turns in a ring of slots.
"""
Accumulation = Literal["shard", "unsharded"]
"""Where the gradients of several microbatches add up: in the shard, after a reduction each; or unsharded, reduced once
with the last of them.
"""


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """One way of sharding.

    Parameters that are *replicated* stay unsharded from step to step, and are gathered again only after the optimizer
    changed its shards of them; *sharded* ones are given up at the end of each pass at the latest, and with storage
    other than persistent after each use. Gradients that are *replicated* add up unsharded over microbatches and are
    reduced with the last; *sharded* ones are reduced every time. With a replicated optimizer nothing is sharded, and
    every axis of the mesh is a replicate axis.

    ``prefetch`` is how many units ahead a gather is issued. ``gradient_slots`` bounds how many units' gradients are
    under reduction at once, unless unsharded gradients are persistent. ``ring_slots`` is the number of parameter slots
    of a ring; a ring needs one slot more than it prefetches. Storage that is planned ahead is freed when it is unused.
    With ``keep`` it is not, and the last units in a ring stay gathered from forward to backward.
    """

    name: str
    parameters: Placement
    gradients: Placement
    optimizer: Placement
    storage: Storage
    gradient_storage: Storage
    prefetch: int = 1
    gradient_slots: int = 1
    ring_slots: int = 2
    keep: bool = False

    def __post_init__(self) -> None:
        if self.optimizer == "replicate" and self.parameters == "shard":
            raise ValueError("parameters must be replicated where the optimizer is, which updates all of them")
        if self.parameters == "replicate" and self.storage != "persistent":
            raise ValueError(f"storage must be persistent for replicated parameters, got {self.storage}")
        if self.gradients == "replicate" and self.gradient_storage != "persistent":
            raise ValueError(
                f"gradient_storage must be persistent for replicated gradients, got {self.gradient_storage}"
            )
        if self.storage == "ring" and self.ring_slots <= self.prefetch:
            raise ValueError(f"ring_slots must be > prefetch = {self.prefetch}, got {self.ring_slots}")


def _mode(name: str, parameters: Placement, gradients: Placement, optimizer: Placement,
          storage: Storage, gradient_storage: Storage) -> Mode:  # fmt: skip
    return Mode(name=name, parameters=parameters, gradients=gradients, optimizer=optimizer,
                storage=storage, gradient_storage=gradient_storage)  # fmt: skip


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        #     name         parameters   gradients    optimizer    storage       gradient storage
        _mode("replicate", "replicate", "replicate", "replicate", "persistent", "persistent"),
        _mode("zero1",     "replicate", "replicate", "shard",     "persistent", "persistent"),
        _mode("zero2",     "shard",     "shard",     "shard",     "persistent", "transient"),
        _mode("fsdp",      "shard",     "shard",     "shard",     "transient",  "transient"),
        _mode("yafsdp",    "shard",     "shard",     "shard",     "ring",       "ring"),
    )
}  # fmt: skip


def find_mode(name: str, accumulation: Accumulation | None = None) -> Mode:
    """Return the mode called ``name``, with gradients that add up as ``accumulation`` says (by default the mode's own).

    Raises:
        SpecError: unknown, or it cannot accumulate that way.
    """
    if name not in MODES:
        raise SpecError(f"mode: no mode '{name}'; {nearest(name, list(MODES))}")
    mode = MODES[name]
    if accumulation is None:
        return mode
    if accumulation == "shard":
        storage = "transient" if mode.gradients == "replicate" else mode.gradient_storage
        return msgspec.structs.replace(mode, gradients="shard", gradient_storage=storage)
    if accumulation != "unsharded":
        raise SpecError(f"accumulation: must be 'shard' or 'unsharded', got {accumulation!r}")
    if mode.gradient_storage == "ring":
        raise SpecError(
            f"accumulation: mode '{name}' reuses its gradient buffers within a backward; reduce every "
            "microbatch (accumulation='shard'), or shard with mode='fsdp'"
        )
    return msgspec.structs.replace(mode, gradients="replicate", gradient_storage="persistent")
