"""Which of a model's layers compute their activations again in backward, and which a stage of a pipeline holds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from refshard.errors import SpecError

POLICY = re.compile(r"none|full|selective|(?:every|first)-[1-9]\d{0,5}")
"""How a policy is written that does not list layers."""
POLICIES = "'none', 'full', 'selective', 'every-K', 'first-N' or a list of layers"


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """The ``layers`` (from 0) that recompute. With ``by_op`` they keep attention's output and every second matrix
    product's besides their input, as torchtitan's selective checkpointing by operator does.
    """

    layers: frozenset[int] = frozenset()
    by_op: bool = False


def checkpointing_of(policy: str | Sequence[int], n_layers: int) -> Checkpointing:
    """What a policy means for ``n_layers``: ``"none"``, ``"full"``, ``"selective"``, ``"every-K"``, ``"first-N"``, or
    the layers' indices.

    ``"every-K"`` takes each K-th layer, counted from 1: layers K-1, 2K-1, ... (torchtitan's selective layer
    checkpointing counts so too).

    Raises:
        SpecError: the policy is unknown, or names a layer that the model does not have.
    """
    if policy == "none":
        return Checkpointing()
    if policy in ("full", "selective"):
        return Checkpointing(frozenset(range(n_layers)), by_op=policy == "selective")
    if isinstance(policy, str):
        if not POLICY.fullmatch(policy):
            raise SpecError(f"checkpointing must be {POLICIES}, got {policy!r}; correct it")
        which, _, digits = policy.partition("-")
        number = int(digits)
        if number > n_layers:
            raise SpecError(
                f"checkpointing: its number must be at most the {n_layers} layers, got {policy!r}; lower it"
            )
        return Checkpointing(frozenset(range(number) if which == "first" else range(number - 1, n_layers, number)))
    if outside := [index for index in policy if not 0 <= index < n_layers]:
        raise SpecError(
            f"checkpointing: layers must lie in 0..{n_layers - 1}, got {outside[0]}; name layers that the model has"
        )
    return Checkpointing(frozenset(policy))


STAGES = re.compile(r"\d{1,4}(\*[1-9]\d{0,3})?(,\d{1,4}(\*[1-9]\d{0,3})?)*")
"""How the layers of each stage are written, in order: ``4*15,2`` is 15 stages of 4 layers, and one of 2."""


def listed_stages(given: str) -> tuple[int, ...]:
    """The layers of each stage, from how :data:`STAGES` are written.

    >>> listed_stages("2*3,1")
    (2, 2, 2, 1)

    Raises:
        SpecError: it is not written so.
    """
    if not STAGES.fullmatch(given):
        raise SpecError(f"stages must list the layers of each stage, as '4*15,2', got {given!r}; correct it")
    parts = [part.partition("*") for part in given.split(",")]
    return tuple(int(size) for size, _, times in parts for _ in range(int(times or 1)))


def sizes_of_stages(given: str, n_layers: int, stages: int) -> tuple[int, ...]:
    """How many layers each stage has; ``given`` is written as in :data:`STAGES`.

    Raises:
        SpecError: it is not written so, or does not give every layer to a stage.
    """
    sizes = listed_stages(given)
    if len(sizes) != stages or sum(sizes) != n_layers:
        raise SpecError(
            f"stages must give {n_layers} layers to {stages} stages (pp * interleave), got {sum(sizes)} in {given!r}, "
            f"which are {len(sizes)}; correct it"
        )
    return sizes


def layers_of_stages(n_layers: int, stages: int, given: str = "") -> tuple[range, ...]:
    """Divide layers over stages as ``given`` (:data:`STAGES`) or as evenly as can be; where that is uneven, the ends,
    which also embed and predict, have one fewer.

    >>> layers_of_stages(10, 4)
    (range(0, 2), range(2, 5), range(5, 8), range(8, 10))

    Raises:
        SpecError: see :func:`sizes_of_stages`.
    """
    fewest, over = divmod(n_layers, stages)
    larger = [*range(1, stages - 1), 0, stages - 1][:over]
    sizes = [fewest + (stage in larger) for stage in range(stages)]
    sizes = [*sizes_of_stages(given, n_layers, stages)] if given else sizes
    return tuple(range(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(stages))


def stages_of_rank(rank: int, ranks: int, interleave: int) -> tuple[int, ...]:
    """The stages that a rank of a pipeline holds: every ``ranks``-th one.

    >>> stages_of_rank(1, 4, 2)
    (1, 5)
    """
    return tuple(rank + turn * ranks for turn in range(interleave))
