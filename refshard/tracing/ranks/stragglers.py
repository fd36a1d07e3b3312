"""Which rank the others wait for.

Clocks of hosts cannot be compared to the microsecond, durations can: a collective in which every rank needs every other
ends for all of them at once, so the last to enter is in it for the shortest time, and each other rank stood in it
for its own duration less that.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from refshard.events.timeline import Intervals
from refshard.tracing.figures import CollectiveFigures, RankWait, TraceFigures, TraceWarning
from refshard.tracing.ranks.partners import Match, match

_POINT_TO_POINT = frozenset(("send", "recv", "send_recv", "peer_copy"))
_ONE_SIDED = frozenset(("broadcast", "reduce", "gather", "scatter"))
"""In these a rank may leave before another has entered, so that durations tell of no wait."""

Key = tuple[str, str]
"""A group, and within an unnamed one the operation."""

Pair = tuple[int, int]
"""The trace that waited, and the one that it waited for."""

Wait = tuple[int, int]
"""From when to when, in nanoseconds of the waiting trace."""


class Entered(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks that are here tell of one collective of a trace.

    It ``waited_ns`` at its beginning for ``rank`` (None if it was the last itself), which was in it for
    ``shortest_ns``. Where not ``is_complete``, ranks of the group are missing, so that it may have waited longer.
    """

    waited_ns: int
    rank: int | None
    shortest_ns: int
    is_complete: bool


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """For each of the traces given, in their order, whom its rank waited for, the longest first; and the doubts.

    ``entered`` tells the same of each trace's matched collectives, by their number in it.
    """

    waits_for: tuple[tuple[RankWait, ...], ...]
    warnings: tuple[TraceWarning, ...]
    entered: tuple[dict[int, Entered], ...] = ()


def rank_waits(figures: Sequence[TraceFigures]) -> Waits:
    """How long each rank of one job stood in collectives that another was the last to enter.

    Collectives are matched by :func:`match` within a group; where groups are unnamed, within
    an operation over the whole job. Of ranks that entered last together the lowest is named. A rank waits at the
    beginning of a collective, and waits that run at once, in collectives of several streams or threads, count once. A
    wait of nothing is no wait. In traces with steps, only waits in collectives of the steps count.
    """
    steps = {place: frozenset(step.step for step in one.steps) for place, one in enumerate(figures)}
    entered: list[dict[int, Entered]] = [{} for _ in figures]
    waits: dict[Pair, list[Wait]] = defaultdict(list)
    warnings, lonely, every = [], 0, 0
    for key, of_trace in _by_group(figures).items():
        if len(of_trace) < 2:
            continue
        if (warning := _ambiguity(key, of_trace)) is not None:
            warnings.append(warning)
            continue
        matches = match(of_trace, steps)
        every += sum(map(len, of_trace.values()))
        lonely += sum(map(len, of_trace.values())) - sum(map(len, matches))
        for one in matches:
            _enter(figures, one, entered)
    for place, own in enumerate(entered):
        _add_waits(figures, place, own, waits)
    return Waits(
        waits_for=tuple(_waits_of(figures, waits, i) for i in range(len(figures))),
        warnings=(*warnings, *([_unmatched(lonely, every)] if lonely else [])),
        entered=tuple(entered),
    )


def _by_group(figures: Sequence[TraceFigures]) -> dict[Key, dict[int, list[tuple[int, CollectiveFigures]]]]:
    """The collectives of each group whose partners can be told, by trace, the lowest rank first."""
    present = [i for i, trace in enumerate(figures) if trace.rank is not None]
    found: dict[Key, dict[int, list[tuple[int, CollectiveFigures]]]] = defaultdict(lambda: defaultdict(list))
    for i in sorted(present, key=lambda i: (figures[i].rank, i)):
        for number, collective in enumerate(figures[i].collectives):
            if collective.op not in _POINT_TO_POINT and _is_matchable(collective, figures[i].world_size):
                found[_key(collective)][i].append((number, collective))
    return found


def _key(collective: CollectiveFigures) -> Key:
    return ("", collective.op) if collective.group is None else (collective.group, "")


def _is_matchable(collective: CollectiveFigures, world_size: int | None) -> bool:
    """Whether a collective's partners can be told: one of an unnamed subgroup may have any."""
    named, size = collective.group is not None, collective.group_size
    return named or size is None or world_size is None or size == world_size


def _ambiguity(key: Key, of_trace: dict[int, list[tuple[int, CollectiveFigures]]]) -> TraceWarning | None:
    """Several groups that bear one name cannot be told apart."""
    sizes = [c.group_size for sequence in of_trace.values() for _, c in sequence if c.group_size is not None]
    if not sizes or len(of_trace) <= min(sizes):
        return None
    return TraceWarning(
        code="groups_alike",
        message=f"{_group(key)} is of {min(sizes)} ranks but appears on {len(of_trace)}: several groups share the "
        "name, so waits in them are not attributed to ranks",
        count=sum(map(len, of_trace.values())),
    )


def _group(key: Key) -> str:
    return f"group {key[0]}" if key[0] else f"the unnamed group of {key[1]}"


def _unmatched(lonely: int, every: int) -> TraceWarning:
    return TraceWarning(
        code="collectives_differ",
        message=f"{lonely} of {every} collectives could not be matched with those of the other ranks here, so waits in "
        "them are unknown: they lie outside the steps or in steps that only some ranks have, or the ranks' sequences "
        "of operation and size differ there. Check that the traces are of the same steps",
        count=lonely,
    )


def _enter(figures: Sequence[TraceFigures], one: Match, entered: list[dict[int, Entered]]) -> None:
    """Note who entered one collective last."""
    ran = {place: figures[place].collectives[number] for place, number in one.items()}
    first = next(iter(ran.values()))
    if first.op in _ONE_SIDED:
        return
    last = min(ran, key=lambda place: (ran[place].duration_ns, figures[place].rank))
    size = first.group_size or figures[last].world_size
    for place, number in one.items():
        waited = ran[place].duration_ns - ran[last].duration_ns
        entered[place][number] = Entered(
            waited_ns=waited,
            rank=figures[last].rank if waited else None,
            shortest_ns=ran[last].duration_ns,
            is_complete=size is not None and len(one) >= size,
        )


def _add_waits(
    figures: Sequence[TraceFigures], place: int, own: dict[int, Entered], waits: dict[Pair, list[Wait]]
) -> None:
    """Add the waits of one trace."""
    trace = figures[place]
    place_of = {one.rank: other for other, one in enumerate(figures)}
    in_steps = any(step.step is not None for step in trace.steps)
    for number, one in own.items():
        collective = trace.collectives[number]
        if one.waited_ns and (collective.step is not None or not in_steps):
            wait = (collective.start_ns, collective.start_ns + one.waited_ns)
            waits[place, place_of[one.rank]].append(wait)


def _waits_of(figures: Sequence[TraceFigures], waits: dict[Pair, list[Wait]], waiter: int) -> tuple[RankWait, ...]:
    found = []
    for place, trace in enumerate(figures):
        own = waits.get((waiter, place))
        if own and trace.rank is not None:
            found.append(RankWait(rank=trace.rank, waited_ns=Intervals.of(own).length, collectives=len(own)))
    return tuple(sorted(found, key=lambda wait: (-wait.waited_ns, wait.rank)))
