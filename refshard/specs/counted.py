"""What a module that has no dimensions computes and keeps, counted operator by operator, for closed forms.

Counts are of a microbatch. They are made of two sizes of it; all others lie on the line through these
(:meth:`CountedModel.of`), as each tensor either grows with the sequences or does not.
"""

from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec

from refshard.specs.hardware import AttentionKernel, Dtype
from refshard.specs.model import ModelSpec


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel. ``nbytes`` are those that it moves, those of a move times as long as its kernel takes.

    ``strided`` elements, of a move, have their addresses computed one by one. Attention has as many scores as
    ``heads`` causal heads over ``length`` tokens.
    """

    kind: Literal["product", "attention", "move"]
    dtype: Dtype
    nbytes: float
    flops: float = 0.0
    strided: float = 0.0
    heads: float = 0.0
    length: int = 0
    head_dim: int = 0
    kernel: AttentionKernel = "flash"
    backward: bool = False


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels of a pass, and what the host needs for it, in kernels of a small decoder layer (``host_s`` each)."""

    operators: tuple[Operator, ...]
    host: float


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """An operator of backward: ``nbytes`` in addition to what forward has kept, once its results are there, and
    elements of gradients that have come.
    """

    nbytes: float
    gradients: float


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """``number`` blocks that run the same kernels; ``again`` are those that checkpointing runs again. ``moments`` are
    those of their backward, which leaves ``left`` bytes.
    """

    number: int
    forward: Pass
    again: Pass
    backward: Pass
    moments: tuple[Moment, ...]
    left: float


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels, and bytes of one pass forward and backward.

    - ``blocks`` by kind; ``before`` and ``after``: the kernels of both passes outside of the blocks, those of backward
      with the forward that they belong to.
    - ``kept``: what a block keeps for backward, on average, with its output; ``given``: its input.
    - ``entered``: what is kept when the first block begins.
    - ``loss``, ``passed``: moments of backward before the last block's, and when it has passed the first; ``ending``:
      those of forward after the last block.
    """

    blocks: tuple[Block, ...]
    before: Pass
    after: Pass
    kept: float
    given: float
    entered: float
    ending: tuple[Moment, ...]
    loss: tuple[Moment, ...]
    passed: tuple[Moment, ...]


class CountedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A module by what it runs.

    Elements: ``params`` in all, ``largest`` of its largest block, ``embedding`` of what is used before its blocks,
    ``head`` of the rest outside of them, ``casts`` of weights that autocast casts.

    ``counts`` are those of :data:`COUNTED` sequences, by precision, for autocast with "autocast" before it.
    """

    name: str
    n_layers: int
    params: int
    largest: int
    embedding: int
    head: int
    casts: int
    flops_per_token: float
    counts: dict[str, tuple[Counts, Counts]]
    experts: None = None
    predictions: int = 0
    expert_layers: int = 0

    @property
    def block(self) -> float:
        """Elements of a block, on average."""
        return (self.params - self.embedding - self.head) / self.n_layers

    def of(self, sequences: int, precision: str, *, casts: bool) -> Counts:
        """The counts of a microbatch."""
        first, second = self.counts[f"autocast {precision}" if casts else precision]
        return cast(Counts, _between(first, second, (sequences - COUNTED[0]) / (COUNTED[1] - COUNTED[0])))


AnyModel = ModelSpec | CountedModel
"""A model of closed forms, by its dimensions or by its operators."""
COUNTED = (2, 3)
"""Sequences of the microbatches that are counted: of one, torch may see dimensions that are none."""


def _between(a: Any, b: Any, part: float) -> Any:
    """Each float on the line through those of two values that are otherwise equal."""
    if isinstance(a, float):
        return a + (b - a) * part
    if isinstance(a, tuple):
        return tuple(_between(x, y, part) for x, y in zip(a, b, strict=True))
    if isinstance(a, msgspec.Struct):
        return type(a)(**{name: _between(getattr(a, name), getattr(b, name), part) for name in a.__struct_fields__})
    return a


def alike(first: Counts, second: Counts) -> bool:
    """Whether two counts are of the same kernels."""

    def kinds(counts: Counts) -> Sequence[object]:
        passes = [counts.before, counts.after, *(p for b in counts.blocks for p in (b.forward, b.again, b.backward))]
        return [[one.kind for one in found.operators] for found in passes]

    return kinds(first) == kinds(second)
