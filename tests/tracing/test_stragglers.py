"""Who waits for whom: of durations alone, so that the clocks of the ranks do not matter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.tracing.figures import (
    Breakdown,
    CollectiveFigures,
    CopyOverhead,
    GiveWay,
    RankWait,
    ReduceWait,
    TraceFigures,
)
from refshard.tracing.stragglers import Waits, rank_waits


def ran(
    op: str, duration: int, *, group: str | None = "world [0, 1, 2]", size: int | None = 3, start: int = 0
) -> CollectiveFigures:
    return CollectiveFigures(
        op=op, unit=None, step=None, group=group, group_size=size, dtype=None, lane="stream 20", start_ns=start,
        duration_ns=duration, exposed_ns=0, exposed_any_ns=0, queued_ns=None, bytes=None, algorithm_bandwidth=None,
        bus_bandwidth=None, gap_ns=None, gap_blocking=None,
    )  # fmt: skip


def trace(rank: int | None, *collectives: CollectiveFigures, world_size: int = 3) -> TraceFigures:
    nothing = Breakdown(span_ns=0, busy_ns=0, compute_ns=0, comm_ns=0, prep_ns=0, copy_ns=0, unclassified_ns=0,
                        exposed_ns=0, exposed_any_ns=0, overlap_ratio=None, idle_ns=0, idle_launch_ns=None,
                        idle_call_ns=None, idle_back_to_back_ns=None,
                        idle_dependency_ns=None, idle_unknown_ns=0)  # fmt: skip
    return TraceFigures(
        file=f"rank{rank}.json", job=0, rank=rank, world_size=world_size, backend="nccl", device="cuda", events=0,
        whole=nothing, giveway=GiveWay(), copies=CopyOverhead(copy_in_ns=0, copy_out_ns=0, exposed_ns=0, hidden_ns=0),
        reduce_wait=ReduceWait(count=0, host_ns=0, device_ns=None), steps=(), units=(), collectives=collectives,
    )  # fmt: skip


def wait(rank: int, ns: int, collectives: int = 1) -> RankWait:
    return RankWait(rank=rank, waited_ns=ns, collectives=collectives)


def entered(*times: int, after: int = 0) -> list[TraceFigures]:
    """Ranks that enter one all-reduce at these times and leave it together, each by a clock of its own."""
    left = max(times) + 5
    return [trace(rank, ran("all_reduce", left - at, start=after + at + 1000 * rank)) for rank, at in enumerate(times)]


def test_the_last_to_enter_is_waited_for() -> None:
    found = rank_waits(entered(10, 40, 25))
    assert found == Waits(waits_for=((wait(1, 30),), (), (wait(1, 15),)), warnings=())


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


def test_only_what_sequences_begin_with_in_common_is_matched() -> None:
    gather, reduce = ran("all_gather", 10), ran("reduce_scatter", 10)
    found = rank_waits(
        [trace(0, ran("all_gather", 30), reduce, gather), trace(1, gather, ran("all_gather", 1), reduce)]
    )
    assert found.waits_for == ((wait(1, 20),), ())
    (warning,) = found.warnings
    assert (warning.code, warning.count) == ("collectives_differ", 2)
    assert "world [0, 1, 2] differ from number 1 on" in warning.message
    shorter = rank_waits([trace(0, ran("all_gather", 30), reduce), trace(1, gather)])
    assert shorter.waits_for == ((wait(1, 20),), ())
    assert [(w.code, w.count) for w in shorter.warnings] == [("collectives_differ", 1)]


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
    assert found == Waits(waits_for=((), (wait(0, 7),)), warnings=())


def test_what_tells_of_no_wait_is_left_out() -> None:
    subgroup = [trace(rank, ran("all_reduce", 10 + rank, group=None, size=2)) for rank in (0, 1)]
    assert rank_waits(subgroup).waits_for == ((), ()), "an unnamed subgroup may be any"
    for op in ("broadcast", "reduce", "send"):
        assert rank_waits([trace(rank, ran(op, 10 + rank)) for rank in (0, 1)]).waits_for == ((), ()), op
    pipeline = [trace(0, ran("send", 1), ran("all_reduce", 4)), trace(1, ran("recv", 9), ran("all_reduce", 5))]
    assert rank_waits(pipeline) == Waits(waits_for=((), (wait(0, 1),)), warnings=())


def test_a_rank_alone_or_without_a_number_waits_for_nobody() -> None:
    assert rank_waits([trace(0, ran("all_reduce", 10))]).waits_for == ((),)
    assert rank_waits([trace(0, ran("all_reduce", 10)), trace(None, ran("all_reduce", 1))]).waits_for == ((), ())
    assert rank_waits([]) == Waits(waits_for=(), warnings=())
