"""Which rank the others wait for.

Clocks of hosts cannot be compared to the microsecond, durations can: a collective in which every rank needs every other
ends for all of them at once, so the last to enter is in it for the shortest time, and each other rank stood in it
for its own duration less that.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.tracing.figures import CollectiveFigures, RankWait, TraceFigures, TraceWarning

_POINT_TO_POINT = frozenset(("send", "recv"))
_ONE_SIDED = frozenset(("broadcast", "reduce", "gather", "scatter"))
"""In these a rank may leave before another has entered, so that durations tell of no wait."""

Key = tuple[str, str]
"""A group, and within an unnamed one the operation."""


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """For each of the traces given, in their order, whom its rank waited for, the longest first; and the doubts."""

    waits_for: tuple[tuple[RankWait, ...], ...]
    warnings: tuple[TraceWarning, ...]


def rank_waits(figures: Sequence[TraceFigures]) -> Waits:
    """How long each rank of one job stood in collectives that another was the last to enter.

    The k-th collective of a group on one rank is the k-th of that group on another; where groups are unnamed, the k-th
    of an operation over the whole job. Where the ranks' sequences differ, only what they begin with in common is
    matched. Of ranks that entered last together the lowest is named. A wait of nothing is no wait.
    """
    present = [i for i, trace in enumerate(figures) if trace.rank is not None]
    sequences: dict[Key, dict[int, list[CollectiveFigures]]] = defaultdict(lambda: defaultdict(list))
    for i in sorted(present, key=lambda i: (figures[i].rank, i)):
        for collective in figures[i].collectives:
            if collective.op not in _POINT_TO_POINT and _is_matchable(collective, figures[i].world_size):
                sequences[_key(collective)][i].append(collective)
    waited = np.zeros((len(figures), len(figures)), np.int64)
    times = np.zeros_like(waited)
    warnings = []
    for key, of_rank in sequences.items():
        if len(of_rank) < 2:
            continue
        if (warning := _ambiguity(key, of_rank)) is not None:
            warnings.append(warning)
            continue
        matched, warning = _common(key, of_rank)
        warnings += [warning] if warning else []
        _add_waits(of_rank, matched, waited, times)
    return Waits(
        waits_for=tuple(_waits_of(figures, waited[i].tolist(), times[i].tolist()) for i in range(len(figures))),
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
        "so nobody's waits in them are told",
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
        message=f"the ranks' collectives in {_group(key)} differ from number {common} on: are the traces of the same "
        "steps? Waits are told of those before",
        count=longest - common,
    )


def _group(key: Key) -> str:
    return f"group {key[0]}" if key[0] else f"the unnamed group of {key[1]}"


def _add_waits(
    of_rank: dict[int, list[CollectiveFigures]],
    matched: int,
    waited: npt.NDArray[np.int64],
    times: npt.NDArray[np.int64],
) -> None:
    """Add the waits in the first ``matched`` collectives of one group; row: who waited, column: for whom."""
    traces = np.array(list(of_rank))
    telling = [k for k in range(matched) if next(iter(of_rank.values()))[k].op not in _ONE_SIDED]
    durations = np.array([[sequence[k].duration_ns for k in telling] for sequence in of_rank.values()], np.int64)
    if not telling:
        return
    last = traces[np.argmin(durations, axis=0)]
    waits = durations - durations.min(axis=0)
    for row, trace in enumerate(traces):
        np.add.at(waited[trace], last, waits[row])
        np.add.at(times[trace], last, (waits[row] > 0).astype(np.int64))


def _waits_of(figures: Sequence[TraceFigures], waited: list[int], times: list[int]) -> tuple[RankWait, ...]:
    found = [
        RankWait(rank=trace.rank, waited_ns=ns, collectives=count)
        for trace, ns, count in zip(figures, waited, times)
        if trace.rank is not None and ns
    ]
    return tuple(sorted(found, key=lambda wait: (-wait.waited_ns, wait.rank)))
