"""The common recipe of fine-tuning by adapters (QLoRA's, and peft's examples')."""

import msgspec

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a Llama's block."""
ALL_LINEAR = "all-linear"
"""Adapters on each of :data:`PROJECTIONS`, as peft calls it."""


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters of ``rank`` on these ``projections`` of each block, scaled by ``alpha / rank`` = 2, behind
    ``dropout``.
    """

    rank: int = 8
    projections: tuple[str, ...] = PROJECTIONS
    dropout: float = 0.05

    @property
    def alpha(self) -> int:
        """What the adapters' outputs are multiplied by, times the rank."""
        return 2 * self.rank


def projections_of(targets: str) -> tuple[str, ...]:
    """The linear layers that ``targets`` names, separated by commas, in the order of :data:`PROJECTIONS`.

    Raises:
        ValueError: a name is not among them, or there is none.
    """
    if targets == ALL_LINEAR:
        return PROJECTIONS
    names = {name.strip() for name in targets.split(",")}
    if unknown := sorted(names - {*PROJECTIONS}):
        raise ValueError(
            f"lora_targets must be {ALL_LINEAR}, or some of {', '.join(PROJECTIONS)}, got {unknown[0]!r}; choose these"
        )
    return tuple(name for name in PROJECTIONS if name in names)
