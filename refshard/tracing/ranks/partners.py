"""Which collectives of several ranks are one.

By the sequence number that torch records, else by order within a step, where operation, size and dtype agree.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import count

import numpy as np
import numpy.typing as npt

from refshard.tracing.figures import CollectiveFigures

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
    told = {place: steps[place] - {None} for place in of_trace}
    if not all(told.values()):
        return _align(of_trace)
    found = []
    for step in sorted(set[int | None]().union(*told.values())):  # type: ignore[type-var]
        inside = {
            place: [(number, one) for number, one in own if one.step == step]
            for place, own in of_trace.items()
            if step in told[place]
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
