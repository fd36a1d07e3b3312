"""Fine-tuning of a part: the common recipe of adapters (QLoRA's, and peft's examples'), and frozen parts."""

import re

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


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """What is not trained: the ``embedding``, the ``head``, and the first ``layers`` layers."""

    embedding: bool = False
    head: bool = False
    layers: int = 0


def frozen_of(parts: str) -> Frozen:
    """The parts that ``parts`` names: ``embedding``, ``head`` and ``first-N``, separated by commas.

    The first N layers are frozen with the embedding: otherwise backward would compute their gradients for it.

    Raises:
        ValueError: a name is not among these.
    """
    names = {name.strip() for name in parts.split(",")} - {""}
    layers = [int(name.removeprefix("first-")) for name in names if re.fullmatch(r"first-[1-9]\d*", name)]
    known = {"embedding", "head", *(f"first-{count}" for count in layers[:1])}
    if unknown := sorted(names - known):
        raise ValueError(
            f"frozen must be some of embedding, head and one first-N, with commas between, got {unknown[0]!r}; choose "
            "these"
        )
    return Frozen(embedding=bool(layers) or "embedding" in names, head="head" in names, layers=max(layers, default=0))
