"""Which traces of two jobs to compare with which, and what makes the comparison doubtful."""

from collections.abc import Sequence
from dataclasses import dataclass

from refshard.errors import TraceError
from refshard.tracing.analysis import Analysis
from refshard.tracing.difference.alike import Unlike, unlike
from refshard.tracing.difference.diff import IDLE, Attribution

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Traces of A and of B; with ``ranks``, trace by trace of these ranks.

    ``unlike`` says in what the two jobs are not like for like; ``doubts`` are sentences for people.
    """

    a: tuple[Analysis, ...]
    b: tuple[Analysis, ...]
    ranks: tuple[int, ...] = ()
    doubts: tuple[str, ...] = ()
    unlike: tuple[Unlike, ...] = ()


def pair(before: Sequence[Analysis], after: Sequence[Analysis]) -> Pairing:
    """Match the ranks of two jobs by number; one file a side is compared whatever rank it is of.

    Jobs of different world sizes are compared by their mean ranks.

    Raises:
        TraceError: a side holds several jobs, names a rank twice, or has no rank in common with the other.
    """
    sides = (tuple(before), tuple(after))
    if len(before) == len(after) == 1:
        return Pairing(a=sides[0], b=sides[1], doubts=_unrecorded(sides), unlike=_unlike(sides))
    _check_one_job(sides)
    sizes = [{one.figures.world_size for one in side} - {None} for side in sides]
    if sizes[0] and sizes[1] and sizes[0] != sizes[1]:
        counts = " and of ".join(f"{len(side)} of {name}'s ranks" for name, side in zip("AB", sides))
        mean = f"The world sizes differ, so ranks are not matched: the means of {counts} are compared."
        return Pairing(a=sides[0], b=sides[1], doubts=(mean, *_unrecorded(sides)), unlike=_unlike(sides))
    of_a, of_b = ({one.figures.rank: one for one in side if one.figures.rank is not None} for side in sides)
    common = sorted(of_a.keys() & of_b.keys())
    if not common:
        raise TraceError("--against compares ranks of two jobs, but they have none in common; name one file of each")
    chosen = (tuple(of_a[rank] for rank in common), tuple(of_b[rank] for rank in common))
    return Pairing(
        a=chosen[0],
        b=chosen[1],
        ranks=tuple(common),
        doubts=(*_alone("A", of_a.keys() - of_b.keys()), *_alone("B", of_b.keys() - of_a.keys()), *_unrecorded(chosen)),
        unlike=_unlike(chosen),
    )


def _check_one_job(sides: Sequence[Sequence[Analysis]]) -> None:
    for name, side in zip("AB", sides):
        first_of = {one.figures.job: one.path.name for one in reversed(side)}
        if len(first_of) > 1:
            raise TraceError(
                f"--against compares two jobs, but {name} holds {len(first_of)}, with {', '.join(first_of.values())}; "
                "name one file of each"
            )


def _alone(name: str, ranks: set[int]) -> tuple[str, ...]:
    if not ranks:
        return ()
    named = ", ".join(map(str, sorted(ranks)[:_MOST_NAMED])) + (", ..." if len(ranks) > _MOST_NAMED else "")
    return (f"Left out: rank{'s' if len(ranks) > 1 else ''} {named}, only in {name}.",)


def _unlike(sides: Sequence[Sequence[Analysis]]) -> tuple[Unlike, ...]:
    a, b = ([one.figures for one in side] for side in sides)
    return unlike((a, b), _attributions(sides))


def _unrecorded(sides: Sequence[Sequence[Analysis]]) -> tuple[str, ...]:
    """What one of the sides does not record."""
    found = [
        f"{name} has no device events: what it did on the device is unknown."
        for name, side in zip("AB", sides)
        if any(one.figures.host_only for one in side)
    ]
    return (*found, *unrecorded(*_attributions(sides)))


def _attributions(sides: Sequence[Sequence[Analysis]]) -> tuple[list[Attribution], list[Attribution]]:
    a, b = ([one.attribution for one in side if one.attribution is not None] for side in sides)
    return a, b


def unrecorded(a: Sequence[Attribution], b: Sequence[Attribution]) -> tuple[str, ...]:
    """What one side or both do not record, so that works are matched by less."""
    found = []
    for what, told, instead in (
        ("input shapes (record_shapes=True)", "dims", "operators are matched by name and order"),
        ("units", "unit", "those of the other are not told apart"),
        ("phases", "phase", "forward and backward are not told apart"),
    ):
        lacking = [
            name
            for name, side in zip("AB", (a, b))
            if not any(getattr(owner.work, told) for one in side for owner in one.owners if owner.work.kind != IDLE)
        ]
        if len(lacking) == 1 or (lacking and what.startswith("input")):
            verb = "record" if len(lacking) > 1 else "records"
            found.append(f"{' and '.join(lacking)} {verb} no {what}: {instead}.")
    return tuple(found)
