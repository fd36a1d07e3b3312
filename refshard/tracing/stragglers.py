"""Which rank the others wait for.

Clocks of hosts cannot be compared to the microsecond, durations can: a collective in which every rank needs every other
ends for all of them at once, so the last to enter is in it for the shortest time, and each other rank stood in it
for its own duration less that.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from refshard.timeline import Intervals
from refshard.tracing.figures import CollectiveFigures, RankWait, TraceFigures, TraceWarning

_POINT_TO_POINT = frozenset(("send", "recv", "send_recv"))
_ONE_SIDED = frozenset(("broadcast", "reduce", "gather", "scatter"))
"""In these a rank may leave before another has entered, so that durations tell of no wait."""

Key = tuple[str, str]
"""A group, and within an unnamed one the operation."""

Pair = tuple[int, int]
"""The trace that waited, and the one that it waited for."""

Wait = tuple[int, int]
"""From when to when, in nanoseconds of the waiting trace."""


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """For each of the traces given, in their order, whom its rank waited for, the longest first; and the doubts."""

    waits_for: tuple[tuple[RankWait, ...], ...]
    warnings: tuple[TraceWarning, ...]


def rank_waits(figures: Sequence[TraceFigures]) -> Waits:
    """How long each rank of one job stood in collectives that another was the last to enter.

    The k-th collective of a group on one rank is the k-th of that group on another; where groups are unnamed, the k-th
    of an operation over the whole job. Where the ranks' sequences differ, only what they begin with in common is
    matched. Of ranks that entered last together the lowest is named. A rank waits at the beginning of a collective, and
    waits that run at once, in collectives of several streams or threads, count once. A wait of nothing is no wait.
    """
    present = [i for i, trace in enumerate(figures) if trace.rank is not None]
    sequences: dict[Key, dict[int, list[CollectiveFigures]]] = defaultdict(lambda: defaultdict(list))
    for i in sorted(present, key=lambda i: (figures[i].rank, i)):
        for collective in figures[i].collectives:
            if collective.op not in _POINT_TO_POINT and _is_matchable(collective, figures[i].world_size):
                sequences[_key(collective)][i].append(collective)
    waits: dict[Pair, list[Wait]] = defaultdict(list)
    warnings = []
    for key, of_rank in sequences.items():
        if len(of_rank) < 2:
            continue
        if (warning := _ambiguity(key, of_rank)) is not None:
            warnings.append(warning)
            continue
        matched, warning = _common(key, of_rank)
        warnings += [warning] if warning else []
        _add_waits(of_rank, matched, waits)
    return Waits(
        waits_for=tuple(_waits_of(figures, waits, i) for i in range(len(figures))),
        warnings=tuple(warnings),
    )


def _key(collective: CollectiveFigures) -> Key:
    return ("", collective.op) if collective.group is None else (collective.group, "")


def _is_matchable(collective: CollectiveFigures, world_size: int | None) -> bool:
    """Whether a collective's partners can be told: one of an unnamed subgroup may have any."""
    named, size = collective.group is not None, collective.group_size
    return named or size is None or world_size is None or size == world_size


def _ambiguity(key: Key, of_rank: dict[int, list[CollectiveFigures]]) -> TraceWarning | None:
    """Several groups that bear one name cannot be told apart."""
    sizes = [c.group_size for sequence in of_rank.values() for c in sequence if c.group_size is not None]
    if not sizes or len(of_rank) <= min(sizes):
        return None
    return TraceWarning(
        code="groups_alike",
        message=f"{_group(key)} is of {min(sizes)} ranks but appears on {len(of_rank)}: several groups share the name, "
        "so waits in them are not attributed to ranks",
        count=sum(map(len, of_rank.values())),
    )


def _common(key: Key, of_rank: dict[int, list[CollectiveFigures]]) -> tuple[int, TraceWarning | None]:
    """How many collectives all ranks begin with in common, and a warning where that is not all of them."""
    ops = [[c.op for c in sequence] for sequence in of_rank.values()]
    shortest, longest = min(map(len, ops)), max(map(len, ops))
    common = next((k for k in range(shortest) if len({sequence[k] for sequence in ops}) > 1), shortest)
    if common == longest:
        return common, None
    return common, TraceWarning(
        code="collectives_differ",
        message=f"the ranks' collectives in {_group(key)} differ from number {common} on; waits are counted up to "
        "there. Check that the traces are of the same steps",
        count=longest - common,
    )


def _group(key: Key) -> str:
    return f"group {key[0]}" if key[0] else f"the unnamed group of {key[1]}"


def _add_waits(of_rank: dict[int, list[CollectiveFigures]], matched: int, waits: dict[Pair, list[Wait]]) -> None:
    """Add the waits in the first ``matched`` collectives of one group."""
    for k in range(matched):
        entered = {trace: sequence[k] for trace, sequence in of_rank.items()}
        if next(iter(entered.values())).op in _ONE_SIDED:
            continue
        last = min(entered, key=lambda trace: entered[trace].duration_ns)
        for trace, one in entered.items():
            if (waited := one.duration_ns - entered[last].duration_ns) > 0:
                waits[trace, last].append((one.start_ns, one.start_ns + waited))


def _waits_of(figures: Sequence[TraceFigures], waits: dict[Pair, list[Wait]], waiter: int) -> tuple[RankWait, ...]:
    found = []
    for place, trace in enumerate(figures):
        own = waits.get((waiter, place))
        if own and trace.rank is not None:
            found.append(RankWait(rank=trace.rank, waited_ns=Intervals.of(own).length, collectives=len(own)))
    return tuple(sorted(found, key=lambda wait: (-wait.waited_ns, wait.rank)))
