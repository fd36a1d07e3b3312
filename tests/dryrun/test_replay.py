"""The replay: order in streams, events, the host, links, and what slows what, against times worked by hand."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.dryrun.device import Rates
from refshard.dryrun.price import BETWEEN, RECEIVING, SENDING, WITHIN
from refshard.dryrun.recording import NO_STREAM, Flag, Kind, Recording
from refshard.dryrun.replay import NEVER, NS, Replayed, main_stream, replay
from tests.dryrun.made import Made, prices

ALONE = Rates(compute=1.0, communication=1.0, preparation=0.5)


def times(made: Made, seconds: dict[int, float], rates: Rates = ALONE, **about: Any) -> dict[int, tuple[float, float]]:
    """Start and end in seconds of each row that runs on a stream."""
    recording = made.recording()
    found = replay(recording, prices(recording, seconds, **about), rates)
    rows = np.flatnonzero(found.starts != NEVER).tolist()
    return {row: (found.starts[row] / NS, found.ends[row] / NS) for row in rows}


def test_a_stream_runs_in_order_and_streams_run_at_the_same_time() -> None:
    made = Made()
    rows = [
        made.launch(stream=0),
        made.launch(stream=0),
        made.collective("all_gather", made.group([0, 1]), nbytes=1, stream=9),
    ]
    assert times(made, dict(zip(rows, (2, 3, 4))), links={rows[2]: WITHIN}) == {0: (0, 2), 1: (2, 5), 2: (0, 4)}


def test_a_stream_waits_for_what_was_recorded_and_for_nothing_after_it() -> None:
    made = Made()
    early = made.launch(stream=0)
    event = made.record(stream=0)
    late = made.launch(stream=0)
    made.wait(stream=9, event=event)
    waits = made.launch("aten::copy_", stream=9, flags=Flag.HOST_TO_DEVICE)
    assert times(made, {early: 2, late: 5, waits: 1}) == {early: (0, 2), late: (2, 7), waits: (2, 3)}


def test_an_event_that_is_recorded_again_means_its_latest_record() -> None:
    made = Made()
    event = made.record(stream=0)
    first = made.launch(stream=0)
    made.record(stream=0, event=event)
    second = made.launch(stream=0)
    made.wait(stream=9, event=event)
    waits = made.launch("aten::copy_", stream=9, flags=Flag.HOST_TO_DEVICE)
    made.wait(stream=9, event=12345)  # never recorded: nothing to wait for
    after = made.launch("aten::copy_", stream=9, flags=Flag.HOST_TO_DEVICE)
    found = times(made, {first: 2, second: 9, waits: 1, after: 1})
    assert (found[waits], found[after]) == ((2, 3), (3, 4))


def test_a_record_comes_after_the_waits_of_its_own_stream() -> None:
    made = Made()
    slow = made.launch(stream=0)
    made.wait(stream=9, event=made.record(stream=0))
    made.wait(stream=8, event=made.record(stream=9))  # stream 9 has no work, but waits for stream 0
    last = made.launch("aten::copy_", stream=8, flags=Flag.HOST_TO_DEVICE)
    assert times(made, {slow: 3, last: 1})[last] == (3, 4)


def test_a_kernel_waits_for_its_launch() -> None:
    made = Made()
    rows = [made.launch(stream=0) for _ in range(3)]
    # Launched at 2, 4 and 6 s; the second has to wait for the first one, the third for the host.
    assert times(made, dict(zip(rows, (3, 1, 1))), host_s=2.0) == {0: (2, 5), 1: (5, 6), 2: (6, 7)}


def test_what_takes_no_stream_takes_the_hosts_time_only() -> None:
    made = Made()
    only = made.launch("aten::record_stream", flags=Flag.HOST_ONLY)
    block = made.allocate(512)
    made.free(block)
    kernel = made.launch()
    recording = made.recording()
    found = replay(recording, prices(recording, {only: 5, kernel: 1}, host_s=2.0), ALONE)
    assert found.starts.tolist() == [NEVER, NEVER, NEVER, 4e9]
    assert found.host_starts.tolist() == [0, 2e9, 2e9, 2e9]
    assert found.host_ends.tolist() == [2e9, 2e9, 2e9, 4e9]
    assert found.ends.max() == 5e9


@pytest.mark.parametrize(("awaited", "host_goes_on"), [("event", 2), ("stream", 7), ("device", 9)])
def test_the_host_waits_for_an_event_a_stream_or_the_device(awaited: str, host_goes_on: float) -> None:
    made = Made()
    rows = {made.launch(stream=0): 2.0}
    event = made.record(stream=0)
    rows[made.launch(stream=0)] = 5.0
    rows[made.launch("aten::copy_", stream=9, flags=Flag.HOST_TO_DEVICE)] = 9.0
    made.synchronise(event=event if awaited == "event" else 0, stream=0 if awaited == "stream" else NO_STREAM)
    late = made.launch("aten::copy_", stream=8, flags=Flag.HOST_TO_DEVICE)
    assert times(made, {**rows, late: 1})[late] == (host_goes_on, host_goes_on + 1)


def test_a_wait_of_the_host_for_what_is_done_costs_no_more_than_the_call() -> None:
    made = Made()
    first = made.launch(stream=0)
    made.launch(stream=9)
    made.synchronise(stream=0)
    made.synchronise(event=77)  # never recorded
    made.synchronise(stream=42)  # never used
    last = made.launch(stream=0)
    assert times(made, {first: 1, last: 1}, host_s=4.0, event_s=0.5)[last] == (13.5, 14.5)


def test_giving_memory_back_waits_for_the_device_and_taking_it_does_not() -> None:
    made = Made()
    first = made.launch(stream=0)
    made.segment(2**21)
    second = made.launch("aten::copy_", stream=8, flags=Flag.HOST_TO_DEVICE)
    made.segment(-(2**21))
    third = made.launch("aten::copy_", stream=7, flags=Flag.HOST_TO_DEVICE)
    assert times(made, {first: 4, second: 1, third: 1}) == {first: (0, 4), second: (0, 1), third: (4, 5)}


def test_compute_and_a_collective_slow_each_other_only_while_both_run() -> None:
    made = Made()
    product = made.launch(stream=0)
    gather = made.collective("all_gather", made.group([0, 1]), nbytes=1, stream=9)
    rates = Rates(compute=0.5, communication=0.5)
    # For 4 s both run at half their rate; then the product's other 2 s at the full rate.
    assert times(made, {product: 4, gather: 2}, rates, links={gather: WITHIN}) == {product: (0, 6), gather: (0, 4)}
    # A collective that has left its link, and only its result is still on its way, slows nothing.
    found = times(made, {product: 4, gather: 1}, Rates(compute=0.5), links={gather: WITHIN}, latencies={gather: 9})
    assert found == {product: (0, 4.5), gather: (0, 10)}


def test_a_kernel_of_another_stream_shares_the_device_with_compute() -> None:
    made = Made()
    product = made.launch(stream=0)
    cast = made.launch(stream=9)
    # For 8 s the cast gets a quarter and does 2 s of work, compute does 6 s; its last second runs alone.
    assert times(made, {product: 6, cast: 3}, Rates(preparation=0.25)) == {product: (0, 8), cast: (0, 9)}


def test_copies_to_and_from_the_host_disturb_nothing() -> None:
    made = Made()
    product = made.launch(stream=0)
    copy = made.launch("aten::copy_", stream=9, flags=Flag.DEVICE_TO_HOST)
    assert times(made, {product: 4, copy: 9}, Rates(preparation=0.25)) == {product: (0, 4), copy: (0, 9)}


def test_a_link_serves_one_collective_at_a_time_in_the_order_in_which_they_were_ready() -> None:
    made = Made()
    product = made.launch(stream=0)
    made.wait(stream=7, event=made.record(stream=0))
    first = made.collective("all_gather", made.group(range(4)), nbytes=1, stream=7)
    second = made.collective("reduce_scatter", made.group(range(4)), nbytes=1, stream=8)
    other = made.collective("all_reduce", made.group(range(4)), nbytes=1, stream=9)
    found = times(
        made, {product: 2, first: 3, second: 4, other: 1}, links={first: BETWEEN, second: BETWEEN, other: WITHIN}
    )
    assert found == {product: (0, 2), first: (4, 7), second: (0, 4), other: (0, 1)}


def test_a_communicator_runs_its_collectives_in_the_order_of_the_hosts_calls_and_two_do_not_wait() -> None:
    """A reduction waits for 4 s of compute. The gather that comes after it, on another stream, waits too in the same
    group: NCCL orders it behind the reduction. A group of its own lets it pass.
    """

    def found(*, separate: bool) -> list[tuple[float, float]]:
        made = Made()
        shards, reducing = made.group([0, 1]), made.group([0, 1])
        rows = [made.launch(stream=0)]
        made.wait(stream=8, event=made.record(stream=0))
        rows.append(made.collective("reduce_scatter", reducing if separate else shards, nbytes=1, stream=8))
        rows.append(made.collective("all_gather", shards, nbytes=1, stream=9))
        # Latency holds the communicator as it holds the stream.
        spans = times(made, dict(zip(rows, (4, 2, 1))), links=dict.fromkeys(rows[1:], WITHIN), latencies={rows[1]: 1.0})
        return [spans[row] for row in rows]

    assert found(separate=False) == [(0, 4), (4, 7), (7, 8)]
    assert found(separate=True) == [(0, 4), (4, 7), (0, 1)]


def test_messages_to_different_peers_do_not_wait_for_each_other() -> None:
    made = Made()
    group = made.group([0, 1, 2])
    product = made.launch(stream=0)
    made.wait(stream=8, event=made.record(stream=0))
    send = made.collective("send", group, nbytes=1, stream=8, peer=1)
    receive = made.collective("recv", group, nbytes=1, stream=9, peer=1)
    found = times(made, {product: 3, send: 1, receive: 1}, links={send: SENDING, receive: RECEIVING})
    assert (found[send], found[receive]) == ((3, 4), (0, 1))


def test_latency_holds_the_stream_but_not_the_link() -> None:
    made = Made()
    one, other = made.group(range(4)), made.group(range(4))
    rows = [made.collective("all_gather", group, nbytes=1, stream=on) for group, on in ((one, 7), (one, 7), (other, 8))]
    found = times(made, dict.fromkeys(rows, 2.0), links=dict.fromkeys(rows, WITHIN), latencies=dict.fromkeys(rows, 3.0))
    assert list(found.values()) == [(0, 5), (5, 10), (2, 7)]


def test_messages_go_both_ways_at_once_and_a_group_of_one_waits_for_no_link() -> None:
    made = Made()
    pair, own = made.group([0, 1]), made.group([0])
    send = made.collective("send", pair, nbytes=1, stream=7, peer=1)
    receive = made.collective("recv", pair, nbytes=1, stream=8, peer=1)
    gather = made.collective("all_gather", pair, nbytes=1, stream=9)
    alone = made.collective("all_gather", own, nbytes=1, stream=6)
    found = times(made, {send: 2, receive: 2, gather: 2}, links={send: SENDING, receive: RECEIVING, gather: WITHIN})
    assert found == {send: (0, 2), receive: (0, 2), gather: (0, 2), alone: (0, 0)}


def test_the_main_stream_is_the_one_that_computes_most() -> None:
    made = Made()
    rows = {made.launch(stream=0): 1.0, made.launch(stream=5): 2.0}
    rows[made.launch("aten::copy_", stream=6, flags=Flag.HOST_TO_DEVICE)] = 9.0
    rows[made.collective("all_gather", made.group([0, 1]), nbytes=1, stream=7)] = 9.0
    recording = made.recording()
    assert main_stream(recording, prices(recording, rows)) == 5
    assert main_stream(Made().recording(), prices(Made().recording(), {})) == 0


def test_nothing_takes_no_time() -> None:
    recording = Made().recording()
    found = replay(recording, prices(recording, {}), ALONE)
    assert len(found.ends) == len(found.host_ends) == 0


steps = st.lists(
    st.tuples(
        st.sampled_from(["launch", "launch", "launch", "record", "wait", "event", "stream", "device"]),
        st.integers(0, 3),
        st.integers(0, 9),
    ),
    max_size=40,
)


@given(steps, st.sampled_from([0.0, 1.0, 2.5]))
def test_without_contention_it_is_what_the_textbook_says(rows: list[tuple[str, int, int]], host_s: float) -> None:
    """Against a loop that keeps one time per stream, which is exact where nothing slows anything."""
    made, expected, seconds = Made(), dict[int, tuple[float, float]](), dict[int, float]()
    free, events, host = dict[int, float](), dict[int, float](), 0.0
    for what, stream, number in rows:
        if what == "launch":
            row = made.launch("aten::copy_", stream=stream, flags=Flag.HOST_TO_DEVICE)
            host += host_s
            start = max(host, free.get(stream, 0.0))
            free[stream], seconds[row] = start + number, float(number)
            expected[row] = (start, start + number)
        elif what == "record":
            made.record(stream, event=number + 1)
            free[stream] = events[number + 1] = max(host, free.get(stream, 0.0))
        elif what == "wait":
            made.wait(stream, number + 1)
            free[stream] = max(host, free.get(stream, 0.0), events.get(number + 1, 0.0))
        elif what == "event":
            made.synchronise(event=number + 1)
            host = max(host, events.get(number + 1, 0.0))
        elif what == "stream":
            made.synchronise(stream=stream)
            host = max(host, free.get(stream, 0.0))
        else:
            made.synchronise()
            host = max(host, *free.values(), 0.0)
    assert times(made, seconds, host_s=host_s) == expected


@given(steps, st.sampled_from([0.3, 0.7]))
def test_no_stream_runs_two_things_at_once_and_none_faster_than_alone(
    rows: list[tuple[str, int, int]], rate: float
) -> None:
    made, seconds = Made(), dict[int, float]()
    for what, stream, number in rows:
        if what == "launch":
            seconds[made.launch(stream=stream)] = float(number)
        elif what in ("stream", "device"):
            made.synchronise(stream=stream if what == "stream" else NO_STREAM)
    found = times(made, seconds, Rates(preparation=rate), host_s=0.5)
    streams = made.recording().streams.tolist()
    for stream in set(streams):
        mine = [pair for row, pair in sorted(found.items()) if streams[row] == stream]
        assert all(before[1] <= after[0] for before, after in pairwise(mine))
    assert all(end - start >= seconds[row] - 1e-9 for row, (start, end) in found.items())


def test_a_replay_is_the_same_each_time() -> None:
    made = Made()
    group = made.group(range(8))
    seconds, links = dict[int, float](), dict[int, int]()
    for number in range(200):
        seconds[made.launch(stream=0)] = 0.1 + number / 7
        event = made.record(0)
        made.wait(11 + number % 3, event)
        row = made.collective("all_gather", group, nbytes=1, stream=11 + number % 3)
        seconds[row], links[row] = number / 11, WITHIN
    recording: Recording = made.recording()

    def once() -> Replayed:
        return replay(recording, prices(recording, seconds, links=links, host_s=0.01), Rates(compute=0.8))

    one, other = once(), once()
    assert np.array_equal(one.starts, other.starts)
    assert np.array_equal(one.ends, other.ends)
    assert (recording.kinds == Kind.COLLECTIVE).sum() == 200
