"""Who waits for whom: of durations alone, so that the clocks of the ranks do not matter."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.exposure import Entered, Waits, rank_waits
from refshard.analysis.figures import CollectiveFigures, RankWait, TraceFigures
from tests.report import traces


def ran(
    op: str, duration: int, *, group: str | None = "world [0, 1, 2]", size: int | None = 3, start: int = 0,
    step: int | None = None, nbytes: int | None = None, dtype: str | None = None, sequence: int | None = None,
) -> CollectiveFigures:  # fmt: skip
    return CollectiveFigures(
        op=op, unit=None, step=step, group=group, group_size=size, dtype=dtype, lane="stream 20", start_ns=start,
        duration_ns=duration, exposed_ns=0, exposed_any_ns=0, queued_ns=None, bytes=nbytes, algorithm_bandwidth=None,
        bus_bandwidth=None, gap_ns=None, gap_blocking=None, sequence=sequence,
    )  # fmt: skip


BASE = traces.figures(traces.gpu(layers=1, steps=1))


def trace(
    rank: int | None, *collectives: CollectiveFigures, world_size: int = 3, steps: Sequence[int] = ()
) -> TraceFigures:
    return msgspec.structs.replace(
        BASE, rank=rank, world_size=world_size, collectives=collectives,
        steps=tuple(msgspec.structs.replace(BASE.steps[0], step=step) for step in steps),
    )  # fmt: skip


def told(found: Waits) -> tuple[tuple[tuple[RankWait, ...], ...], list[tuple[str, int | None]]]:
    """Who waits for whom, and the doubts."""
    return found.waits_for, [(warning.code, warning.count) for warning in found.warnings]


def wait(rank: int, ns: int, collectives: int = 1) -> RankWait:
    return RankWait(rank=rank, waited_ns=ns, collectives=collectives)


def entered(*times: int, after: int = 0) -> list[TraceFigures]:
    """Ranks that enter one all-reduce at these times and leave it together, each by a clock of its own."""
    left = max(times) + 5
    return [trace(rank, ran("all_reduce", left - at, start=after + at + 1000 * rank)) for rank, at in enumerate(times)]


def test_the_last_to_enter_is_waited_for() -> None:
    found = rank_waits(entered(10, 40, 25))
    assert told(found) == (((wait(1, 30),), (), (wait(1, 15),)), [])
    assert found.entered == tuple(
        {0: Entered(waited_ns=ns, rank=1 if ns else None, shortest_ns=5, is_complete=True)} for ns in (30, 0, 15)
    )
    assert [own[0].is_complete for own in rank_waits(entered(10, 40, 25)[:2]).entered] == [False, False]


def test_waits_that_run_at_once_count_once() -> None:
    """Rank 0 waits over [0, 30) on one stream and over [10, 50) on another."""
    first = trace(0, ran("all_reduce", 35, start=0), ran("all_reduce", 45, start=10))
    late = trace(1, ran("all_reduce", 5, start=30), ran("all_reduce", 5, start=50))
    assert rank_waits([first, late]).waits_for[0] == (wait(1, 50, collectives=2),)


@given(st.lists(st.tuples(*[st.integers(0, 50)] * 3), max_size=8))
def test_waits_are_those_of_the_true_entry_times(arrivals: list[tuple[int, int, int]]) -> None:
    ranks = [
        trace(
            r, *(one[r].collectives[0] for one in (entered(*times, after=100 * k) for k, times in enumerate(arrivals)))
        )
        for r in range(3)
    ]
    for rank, waits in enumerate(rank_waits(ranks).waits_for):
        true: dict[int, list[int]] = {}
        for times in arrivals:
            if times[rank] < max(times):
                true.setdefault(times.index(max(times)), []).append(max(times) - times[rank])
        expected = [wait(last, sum(ns), len(ns)) for last, ns in true.items()]
        assert list(waits) == sorted(expected, key=lambda w: (-w.waited_ns, w.rank))


def test_ranks_may_come_in_any_order_and_be_missing() -> None:
    second, _, first = reversed(entered(10, 40, 25))
    assert rank_waits([second, first]).waits_for == ((), (wait(2, 15),))


LAYERS = [("all_gather", 4096), ("all_gather", 1024), ("all_reduce", 64)]


def step_of(step: int, *durations: int) -> list[CollectiveFigures]:
    """One step's collectives, of which each has a size of its own."""
    return [
        ran(op, ns, step=step, nbytes=size, start=100 * i) for i, ((op, size), ns) in enumerate(zip(LAYERS, durations))
    ]


def test_a_collective_left_over_at_one_ranks_start_shifts_nothing() -> None:
    """By order over the whole trace the first gather of rank 0, 900 long, would be that of rank 1, and so on."""
    late = ran("all_gather", 900, nbytes=4096)
    first = trace(0, late, *step_of(3, 10, 20, 30), *step_of(4, 10, 20, 30), steps=(3, 4))
    second = trace(1, *step_of(3, 10, 20, 30), *step_of(4, 10, 20, 37), steps=(3, 4))
    assert told(rank_waits([first, second])) == (((), (wait(0, 7),)), [("collectives_differ", 1)])


def test_steps_that_one_rank_has_alone_are_not_compared() -> None:
    first = trace(0, *step_of(3, 90, 90, 90), *step_of(4, 10, 20, 30), steps=(3, 4))
    second = trace(1, *step_of(4, 10, 22, 30), *step_of(5, 1, 1, 1), steps=(4, 5))
    assert told(rank_waits([first, second])) == (((), (wait(0, 2),)), [("collectives_differ", 6)])


def test_one_dropped_in_the_middle_leaves_the_others_matched() -> None:
    whole, (gather, _, reduce) = step_of(1, 10, 500, 30), step_of(1, 14, 0, 31)
    found = rank_waits([trace(0, *whole, steps=(1,)), trace(1, gather, reduce, steps=(1,))])
    assert told(found) == (((), (wait(0, 5, collectives=2),)), [("collectives_differ", 1)])


def test_what_could_be_matched_in_several_ways_is_not_matched() -> None:
    """Of three alike on one rank and two on the other, any may be missing; the reduction after them is certain."""
    alike = [ran("all_gather", 10, nbytes=8) for _ in range(3)]
    found = rank_waits([trace(0, *alike, ran("all_reduce", 9)), trace(1, *alike[:2], ran("all_reduce", 5))])
    assert told(found) == (((wait(1, 4),), ()), [("collectives_differ", 5)])


def test_sequence_numbers_match_across_steps_and_what_lies_outside_of_them() -> None:
    numbered = [ran("all_gather", 10 * k, nbytes=8, step=k, sequence=k, start=100 * k) for k in (1, 2, 3)]
    outside = ran("all_gather", 500, nbytes=8, sequence=0)
    first = trace(0, outside, *numbered, steps=(1, 2, 3))
    slower = (ran("all_gather", 11 * k, nbytes=8, step=k, sequence=k, start=100 * k) for k in (2, 3))
    second = trace(1, *slower, steps=(2, 3))
    assert told(rank_waits([first, second])) == (((), (wait(0, 5, collectives=2),)), [("collectives_differ", 2)])


def test_coalesced_collectives_share_a_number_and_keep_their_order() -> None:
    ranks = [
        [ran(op, ns, sequence=7, start=9 * ns) for op, ns in zip(("all_gather", "all_gather", "reduce_scatter"), times)]
        for times in ((10, 20, 30), (10, 25, 31))
    ]
    assert told(rank_waits([trace(r, *own) for r, own in enumerate(ranks)])) == (((), (wait(0, 6, 2),)), [])


def test_ranks_may_send_each_other_different_numbers_of_bytes() -> None:
    first, second = (
        [ran("all_to_all", ns, nbytes=size, dtype="int"), ran("all_reduce", 5)] for ns, size in ((10, 100), (13, 80))
    )
    assert told(rank_waits([trace(0, *first), trace(1, *second)])) == (((), (wait(0, 3),)), [])
    # Where one is missing besides, sizes must agree: nothing else tells which it was.
    assert told(rank_waits([trace(0, *first), trace(1, *second[:1])])) == (((), ()), [("collectives_differ", 3)])


def test_waits_outside_of_the_steps_are_not_counted_in_them() -> None:
    outside = [ran("all_reduce", ns, sequence=1) for ns in (10, 900)]
    inside = [ran("all_reduce", ns, sequence=2, step=4) for ns in (10, 12)]
    ranks = [trace(r, outside[r], inside[r], steps=(4,)) for r in (0, 1)]
    assert told(rank_waits(ranks)) == (((), (wait(0, 2),)), [])


@given(*[st.lists(st.sampled_from([8, 16, 24]), max_size=7)] * 2)
def test_what_is_matched_by_order_is_what_every_longest_common_subsequence_pairs(a: list[int], b: list[int]) -> None:
    ranks = [trace(r, *(ran("all_reduce", 5, nbytes=size) for size in sizes)) for r, sizes in enumerate((a, b))]
    first, second = rank_waits(ranks).entered or ({}, {})
    pairs = set(zip(sorted(first), sorted(second)))
    assert pairs == set.intersection(*(set(one) for one in _longest(a, b)))


def _longest(a: list[int], b: list[int]) -> list[frozenset[tuple[int, int]]]:
    """All longest common subsequences, as pairs of places, by trying."""

    def of(i: int, j: int) -> list[frozenset[tuple[int, int]]]:
        if i == len(a) or j == len(b):
            return [frozenset()]
        found = of(i + 1, j) + of(i, j + 1)
        if a[i] == b[j]:
            found += [one | {(i, j)} for one in of(i + 1, j + 1)]
        longest = max(map(len, found))
        return list({one for one in found if len(one) == longest})

    return of(0, 0)


def test_subgroups_are_matched_by_their_own_name_only() -> None:
    """Ranks 0 and 1 share one tensor-parallel group, 2 and 3 another; all four share the world."""

    def rank(number: int, pair: int, whole: int) -> TraceFigures:
        group = "tp [0, 1]" if number < 2 else "tp [2, 3]"
        return trace(number, ran("all_reduce", pair, group=group, size=2), ran("all_gather", whole, group="w", size=4))

    found = rank_waits([rank(0, 5, 1), rank(1, 2, 9), rank(2, 90, 9), rank(3, 80, 9)])
    assert found.waits_for == ((wait(1, 3),), (wait(0, 8),), (wait(3, 10), wait(0, 8)), (wait(0, 8),))
    assert found.warnings == ()


def test_groups_named_alike_are_not_taken_for_one() -> None:
    found = rank_waits([trace(rank, ran("all_reduce", 10 * rank, group="tp", size=2)) for rank in range(3)])
    assert found.waits_for == ((), (), ())
    assert [w.code for w in found.warnings] == ["groups_alike"]


@pytest.mark.parametrize("size", [None, 3])
def test_unnamed_groups_are_matched_by_operation(size: int | None) -> None:
    """The order of different operations does not matter, for they may be on different streams."""
    gather, reduce = ran("all_gather", 10, group=None, size=size), ran("reduce_scatter", 40, group=None, size=size)
    later = ran("all_gather", 17, group=None, size=size)
    found = rank_waits([trace(0, gather, reduce), trace(1, reduce, later)])
    assert told(found) == (((), (wait(0, 7),)), [])


def test_what_tells_of_no_wait_is_left_out() -> None:
    subgroup = [trace(rank, ran("all_reduce", 10 + rank, group=None, size=2)) for rank in (0, 1)]
    assert rank_waits(subgroup).waits_for == ((), ()), "an unnamed subgroup may be any"
    for op in ("broadcast", "reduce", "send"):
        assert rank_waits([trace(rank, ran(op, 10 + rank)) for rank in (0, 1)]).waits_for == ((), ()), op
    pipeline = [trace(0, ran("send", 1), ran("all_reduce", 4)), trace(1, ran("recv", 9), ran("all_reduce", 5))]
    assert told(rank_waits(pipeline)) == (((), (wait(0, 1),)), [])


def test_a_rank_alone_or_without_a_number_waits_for_nobody() -> None:
    assert rank_waits([trace(0, ran("all_reduce", 10))]).waits_for == ((),)
    assert rank_waits([trace(0, ran("all_reduce", 10)), trace(None, ran("all_reduce", 1))]).waits_for == ((), ())
    assert rank_waits([]) == Waits(waits_for=(), warnings=())
