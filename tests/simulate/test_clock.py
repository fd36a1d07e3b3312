"""The clock: order within lanes, waits, links, and what slows what, against times worked by hand."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.costs import CollectiveCost
from refshard.simulate.clock import NS, Rates, schedule
from refshard.simulate.pricing import Call
from refshard.simulate.program import Item
from refshard.timeline import Kind


def item(lane: Any, seconds: float, *after: int, kind: Kind = Kind.COMPUTE) -> Item:
    return Item(lane=lane, kind=kind, name="x", unit="u", stage="forward", seconds=seconds, after=after)


def comm(lane: Any, seconds: float, *after: int, link: Any = "between", latency: float = 0.0) -> Item:
    call = Call("all_gather", 8, "fp32", 2, CollectiveCost(link, seconds, latency, "ring"))
    return Item(lane=lane, kind=Kind.COMM, name="c", unit="u", stage="forward", seconds=seconds, after=after, call=call)


def times(*items: Item, **rates: float) -> list[tuple[float, float]]:
    found = schedule(items, Rates(**rates))
    return [(start / NS, end / NS) for start, end in zip(found.starts.tolist(), found.ends.tolist())]


def test_a_lane_runs_its_items_in_order_and_lanes_run_beside_each_other() -> None:
    assert times(item("compute", 2), item("compute", 3), comm("reduce", 4)) == [(0, 2), (2, 5), (0, 4)]


def test_an_item_waits_for_all_that_it_names() -> None:
    assert times(item("compute", 2), comm("reduce", 5), item("compute", 1, 1)) == [(0, 2), (0, 5), (5, 6)]


def test_a_link_is_occupied_by_one_collective_at_a_time_in_the_order_in_which_they_were_ready() -> None:
    found = times(item("compute", 2), comm("gather", 3, 0), comm("reduce", 4), comm("combine", 1, link="within"))
    assert found == [(0, 2), (4, 7), (0, 4), (0, 1)]


def test_latency_occupies_the_lane_but_not_the_link() -> None:
    found = times(comm("gather", 2, latency=3), comm("gather", 2, latency=3), comm("reduce", 2, latency=3))
    assert found == [(0, 5), (5, 10), (2, 7)]


def test_compute_and_a_collective_slow_each_other_only_while_both_run() -> None:
    # For 4 s both run at half their rate; then the product's other 2 s at the full rate.
    assert times(item("compute", 4), comm("gather", 2), compute=0.5, communication=0.5) == [(0, 6), (0, 4)]
    # A collective that has left its link, and only its result is still on its way, slows nothing.
    assert times(item("compute", 4), comm("gather", 1, latency=9), compute=0.5)[0] == (0, 4.5)


def test_kernels_that_prepare_a_reduction_share_the_device_with_compute() -> None:
    # For 8 s they get a quarter and do 2 s of work, compute does 6 s; the last second of theirs runs alone.
    found = times(item("compute", 6), item("reduce", 3, kind=Kind.PREP), preparation=0.25)
    assert found == [(0, 8), (0, 9)]
    assert times(item("reduce", 3, kind=Kind.PREP), preparation=0.25) == [(0, 3)]


def test_nothing_runs_in_no_time() -> None:
    assert schedule(()).length == 0
    assert times(item("compute", 0), item("compute", 1, 0)) == [(0, 0), (0, 1)]


def test_an_item_that_waits_for_what_never_ends_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="never ends"):
        schedule([item("compute", 1, 1), item("compute", 1)])


@given(
    st.lists(
        st.tuples(st.sampled_from(["compute", "gather", "reduce"]), st.integers(0, 9), st.booleans()),
        min_size=1, max_size=12,
    ),
    st.sampled_from([0.25, 0.5, 1.0]),
)  # fmt: skip
def test_no_schedule_beats_its_lanes_and_links_and_none_idles_without_cause(
    rows: list[tuple[str, int, bool]], rate: float
) -> None:
    items = [
        comm(lane, float(work)) if lane != "compute" else item(lane, float(work), *([n - 1] if wait and n else []))
        for n, (lane, work, wait) in enumerate(rows)
    ]
    found = times(*items, compute=rate)
    for lane in {one.lane for one in items}:
        mine = [pair for pair, one in zip(found, items) if one.lane == lane]
        assert all(before[1] <= after[0] for before, after in pairwise(mine))
    carried = sorted(pair for pair, one in zip(found, items) if one.call is not None)
    assert all(before[1] <= after[0] for before, after in pairwise(carried))
    assert all(end - start >= one.seconds - 1e-9 for (start, end), one in zip(found, items))
    longest = max(sum(one.seconds for one in items if one.lane == lane) for lane in {one.lane for one in items})
    assert longest - 1e-9 <= max(end for _, end in found) <= sum(one.seconds for one in items) / rate + 1e-9
