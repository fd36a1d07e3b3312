"""Which rank the others wait for.

Clocks of hosts cannot be compared to the microsecond, durations can: a collective in which every rank needs every other
ends for all of them at once, so the last to enter is in it for the shortest time, and each other rank stood in it
for its own duration less that.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import count

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.analysis.figures import CollectiveFigures, RankWait, TraceFigures, TraceWarning
from refshard.events.timeline import Intervals

_MOST_CELLS = 4_000_000
"""Of the tables that align two sequences; longer ones that differ are not matched."""
_UNEVEN = "all_to_all"
"""Ranks may each move another number of bytes in it."""

Place = int
"""Of a trace among those given."""
Sequences = Mapping[Place, Sequence[tuple[int, CollectiveFigures]]]
"""The collectives of one group by trace, each with its number in that trace, in order."""
Match = dict[Place, int]
"""One collective: its number in each of the traces that has it."""


def match(of_trace: Sequences, steps: Mapping[Place, frozenset[int | None]]) -> list[Match]:
    """The collectives that at least two traces have. ``steps`` are those that each trace tells apart, if any.

    With sequence numbers in all traces, collectives of one number and operation are one, coalesced ones in their order.
    Else steps of one number are compared, and what lies outside of the steps is not; traces without steps are compared
    as a whole. See :func:`_align`.
    """
    if all(one.sequence is not None for own in of_trace.values() for _, one in own):
        return _by_sequence(of_trace)
    known = {place: steps[place] - {None} for place in of_trace}
    if not all(known.values()):
        return _align(of_trace)
    found = []
    for step in sorted(set[int | None]().union(*known.values())):  # type: ignore[type-var]
        inside = {
            place: [(number, one) for number, one in own if one.step == step]
            for place, own in of_trace.items()
            if step in known[place]
        }
        if len(inside) > 1:
            found += _align(inside)
    return found


def _by_sequence(of_trace: Sequences) -> list[Match]:
    found: dict[tuple[int | None, str, int], Match] = defaultdict(dict)
    for place, own in of_trace.items():
        seen: dict[tuple[int | None, str], count[int]] = defaultdict(count)
        for number, one in own:
            found[one.sequence, one.op, next(seen[one.sequence, one.op])][place] = number
    return [one for one in found.values() if len(one) > 1]


def _align(of_trace: Sequences) -> list[Match]:
    """Match by order.

    Traces whose sequences of operation, size and dtype are equal are matched one by one; the sizes of an all-to-all may
    differ there. Any other is held against the sequence that most traces have (of several, the first trace's): matched
    is what every longest common subsequence of the two pairs alike. What could be matched in several ways is not.
    """
    plain = {place: tuple(_signature(one, even=False) for _, one in own) for place, own in of_trace.items()}
    common = Counter(plain.values())
    reference = max(common, key=lambda one: common[one]) if len(common) < len(plain) else next(iter(plain.values()))
    chosen = next(place for place, one in plain.items() if one == reference)
    exact = {place: [_signature(one, even=True) for _, one in own] for place, own in of_trace.items()}
    found: list[Match] = [{} for _ in reference]
    for place, own in of_trace.items():
        if plain[place] == reference:
            pairs = [(k, k) for k in range(len(reference))]
        else:
            pairs = certain_pairs(exact[chosen], exact[place])
        for k, theirs in pairs:
            found[k][place] = own[theirs][0]
    return [one for one in found if len(one) > 1]


def _signature(one: CollectiveFigures, *, even: bool) -> tuple[str, int | None, str | None]:
    return one.op, one.bytes if even or one.op != _UNEVEN else None, one.dtype


def certain_pairs(a: Sequence[object], b: Sequence[object]) -> list[tuple[int, int]]:
    """The places in ``a`` and ``b`` that every longest common subsequence of them pairs with each other.

    >>> certain_pairs("xabc", "abc"), certain_pairs("aab", "ab")
    ([(1, 0), (2, 1), (3, 2)], [(2, 1)])
    """
    if not a or not b or len(a) * len(b) > _MOST_CELLS:
        return []
    codes: dict[object, int] = {}
    first, second = (np.array([codes.setdefault(x, len(codes)) for x in one]) for one in (a, b))
    ahead = _common_lengths(first, second)
    behind = _common_lengths(first[::-1], second[::-1])[::-1, ::-1]
    on_longest = (first[:, None] == second) & (ahead[:-1, :-1] + 1 + behind[1:, 1:] == ahead[-1, -1])
    rows, columns = np.nonzero(on_longest)
    # The k-th pair of each longest subsequence has k common places before it: certain is the only one with as many.
    levels = ahead[rows, columns]
    _, place, times = np.unique(levels, return_index=True, return_counts=True)
    alone = place[times == 1]
    return list(zip(rows[alone].tolist(), columns[alone].tolist()))


def _common_lengths(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """At ``[i, j]`` the length of the longest common subsequence of the first i of ``a`` and the first j of ``b``."""
    found = np.zeros((len(a) + 1, len(b) + 1), np.int32)
    for i, one in enumerate(a):
        extended = np.maximum(found[i, 1:], found[i, :-1] + (b == one))
        found[i + 1, 1:] = np.maximum.accumulate(extended)
    return found


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
    if lonely:
        warnings.append(
            TraceWarning(
                code="collectives_differ",
                message=f"{lonely} of {every} collectives could not be matched with those of the other ranks here, so "
                "waits in them are unknown: they lie outside the steps or in steps that only some ranks have, or the "
                "ranks' sequences of operation and size differ there. Check that the traces are of the same steps",
                count=lonely,
            )
        )
    for place, own in enumerate(entered):
        _add_waits(figures, place, own, waits)
    return Waits(
        waits_for=tuple(_waits_of(figures, waits, i) for i in range(len(figures))),
        warnings=tuple(warnings),
        entered=tuple(entered),
    )


def _by_group(figures: Sequence[TraceFigures]) -> dict[Key, dict[int, list[tuple[int, CollectiveFigures]]]]:
    """The collectives of each group whose partners are known, by trace, the lowest rank first."""
    present = [i for i, trace in enumerate(figures) if trace.rank is not None]
    found: dict[Key, dict[int, list[tuple[int, CollectiveFigures]]]] = defaultdict(lambda: defaultdict(list))
    for i in sorted(present, key=lambda i: (figures[i].rank, i)):
        for number, collective in enumerate(figures[i].collectives):
            size, world_size = collective.group_size, figures[i].world_size
            # One of an unnamed subgroup may have any partners.
            is_known = collective.group is not None or size is None or world_size is None or size == world_size
            if collective.op not in _POINT_TO_POINT and is_known:
                key = ("", collective.op) if collective.group is None else (collective.group, "")
                found[key][i].append((number, collective))
    return found


def _ambiguity(key: Key, of_trace: dict[int, list[tuple[int, CollectiveFigures]]]) -> TraceWarning | None:
    """Several groups that bear one name cannot be told apart."""
    sizes = [c.group_size for sequence in of_trace.values() for _, c in sequence if c.group_size is not None]
    if not sizes or len(of_trace) <= min(sizes):
        return None
    name = f"group {key[0]}" if key[0] else f"the unnamed group of {key[1]}"
    return TraceWarning(
        code="groups_alike",
        message=f"{name} is of {min(sizes)} ranks but appears on {len(of_trace)}: several groups share the "
        "name, so waits in them are not attributed to ranks",
        count=sum(map(len, of_trace.values())),
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
