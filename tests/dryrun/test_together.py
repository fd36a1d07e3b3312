"""Several ranks replayed together: who waits for whom, against times worked by hand."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from refshard.dryrun.device import Rates
from refshard.dryrun.price import RECEIVING, SENDING, WITHIN, price
from refshard.dryrun.recording import Kind
from refshard.dryrun.replay import NEVER, NS, meetings, replay, replay_together
from refshard.specs.cluster import load_cluster
from tests.dryrun.made import Made, prices, sharded_step

LINKS = {"send": SENDING, "recv": RECEIVING}


def times(ranks: Sequence[Made], seconds: Sequence[Mapping[int, float]]) -> list[dict[int, tuple[float, float]]]:
    """Per rank, start and end in seconds of each row that runs on a stream; collectives take a second."""
    recordings = [made.recording() for made in ranks]
    priced = []
    for recording, given in zip(recordings, seconds):
        rows = np.flatnonzero(recording.kinds == Kind.COLLECTIVE).tolist()
        names = {row: recording.name_table[recording.names[row]] for row in rows}
        links = {row: LINKS.get(name, WITHIN) for row, name in names.items()}
        priced.append(prices(recording, {**dict.fromkeys(rows, 1.0), **given}, links=links))
    found = replay_together(recordings, priced, Rates())
    return [
        {row: (one.starts[row] / NS, one.ends[row] / NS) for row in np.flatnonzero(one.starts != NEVER).tolist()}
        for one in found
    ]


def test_a_collective_begins_when_the_last_rank_is_ready() -> None:
    ranks = [Made(rank=rank, world_size=3) for rank in range(3)]
    seconds = []
    for made, ns in zip(ranks, (1.0, 5.0, 3.0)):
        group = made.group(range(3))
        seconds.append({made.launch(): ns})
        made.wait(9, made.record(0))
        made.collective("all_reduce", group, nbytes=8, stream=9)
        made.wait(0, made.record(9))
        seconds[-1][made.launch()] = 2.0
    found = times(ranks, seconds)
    assert [sorted(one.values()) for one in found] == [
        [(0, 1), (5, 6), (6, 8)], [(0, 5), (5, 6), (6, 8)], [(0, 3), (5, 6), (6, 8)]
    ]  # fmt: skip


def test_who_opens_a_gate_goes_on_with_what_it_runs() -> None:
    ranks = [Made(rank=rank, world_size=2) for rank in range(2)]
    seconds: list[dict[int, float]] = []
    for made, first in zip(ranks, (1.0, 3.0)):
        group = made.group(range(2))
        seconds.append({made.launch(): first})
        made.wait(9, made.record(0))
        seconds[-1][made.launch()] = 5.0  # starts as the gate opens, or runs when it does
        made.collective("all_reduce", group, nbytes=8, stream=9)
    found = times(ranks, seconds)
    assert [sorted(one.values()) for one in found] == [[(0, 1), (1, 6), (3, 4)], [(0, 3), (3, 4), (3, 8)]]


def test_what_its_peers_are_late_for_queues_behind_what_was_ready_before() -> None:
    one, peer = Made(rank=0, world_size=8), Made(rank=1, world_size=8)
    both, own = one.group([0, 1]), one.group([0, 5])
    assert peer.group([0, 1]) == both
    holds = one.collective("all_gather", own, nbytes=8, stream=7)
    late = one.collective("all_reduce", both, nbytes=8, stream=8)
    kernel = one.launch()
    one.wait(9, one.record(0))
    ready = one.collective("all_gather", one.group([0, 5]), nbytes=8, stream=9)
    slow = peer.launch()
    peer.wait(8, peer.record(0))
    peer.collective("all_reduce", both, nbytes=8, stream=8)
    found = times([one, peer], [{holds: 5.0, kernel: 2.0}, {slow: 3.0}])[0]
    assert (found[holds], found[ready], found[late]) == ((0, 5), (5, 6), (6, 7))


def test_a_host_waits_for_what_its_peers_are_late_for() -> None:
    ranks = [Made(rank=rank, world_size=2) for rank in range(2)]
    seconds = []
    for made, ns in zip(ranks, (1.0, 4.0)):
        group = made.group(range(2))
        seconds.append({made.launch(): ns})
        made.collective("all_reduce", group, nbytes=8, stream=0)
        made.synchronise(stream=0)
        seconds[-1][made.launch(stream=0)] = 1.0
    assert [max(one.values()) for one in times(ranks, seconds)] == [(5, 6), (5, 6)]


def test_what_is_received_was_sent_before_and_sending_waits_for_nobody() -> None:
    first, second = Made(rank=0, world_size=2), Made(rank=1, world_size=2)
    pair = first.group([0, 1])
    assert second.group([0, 1]) == pair
    work = first.launch()
    send = first.collective("send", pair, nbytes=8, stream=0, peer=1)
    back = first.collective("recv", pair, nbytes=8, stream=0, peer=1)
    receive = second.collective("recv", pair, nbytes=8, stream=0, peer=0)
    own = second.launch()
    answer = second.collective("send", pair, nbytes=8, stream=0, peer=0)
    one, other = times([first, second], [{work: 3.0}, {own: 2.0}])
    assert (one[work], one[send], one[back]) == ((0, 3), (3, 4), (6, 7))
    assert (other[receive], other[own], other[answer]) == ((3, 4), (4, 6), (6, 7))


def test_two_ranks_that_send_to_each_other_first_do_not_wait_forever() -> None:
    ranks = [Made(rank=rank, world_size=2) for rank in range(2)]
    for rank, made in enumerate(ranks):
        pair = made.group([0, 1])
        made.collective("send", pair, nbytes=8, stream=9, peer=1 - rank)
        made.collective("recv", pair, nbytes=8, stream=9, peer=1 - rank)
    assert [list(one.values()) for one in times(ranks, [{}, {}])] == [[(0, 1), (1, 2)]] * 2


def test_a_pipeline_has_its_bubbles() -> None:
    """Two stages, three microbatches, forward only, a message of one second: the last stage starts after the first."""
    first, last = Made(rank=0, world_size=2), Made(rank=1, world_size=2)
    for made in (first, last):
        made.group([0, 1])
    rows: list[dict[int, float]] = [{}, {}]
    for _ in range(3):
        rows[0][first.launch()] = 4.0
        first.wait(8, first.record(0))
        first.collective("send", 1, nbytes=8, stream=8, peer=1)
        last.collective("recv", 1, nbytes=8, stream=8, peer=0)
        last.wait(0, last.record(8))
        rows[1][last.launch()] = 4.0
    found = times([first, last], rows)
    assert [found[0][row] for row in rows[0]] == [(0, 4), (4, 8), (8, 12)]
    assert [found[1][row] for row in rows[1]] == [(5, 9), (9, 13), (13, 17)]


def test_who_meets_whom() -> None:
    """Groups are known by their ranks, not by their ids; those who are not here are not waited for."""
    ranks = [Made(rank=rank, world_size=8) for rank in (0, 1, 4)]
    for made in ranks:
        made.group([made.rank])
        low = made.group([0, 1, 2, 3]) if made.rank < 4 else 0
        again = made.group([0, 1, 2, 3]) if made.rank < 4 else 0
        world = made.group(range(8))
        if low:
            made.collective("all_gather", low if made.rank else again, nbytes=8, stream=9)
        made.collective("all_reduce", world, nbytes=8, stream=9)
        made.collective("all_reduce", 1, nbytes=8, stream=9)
    found = meetings([made.recording() for made in ranks])
    # Ranks 0 and 1 gather in different groups of the same ranks; all three reduce in the world.
    assert [[(member.rank, member.row) for member in members] for members in found] == [[(0, 1), (1, 1), (2, 0)]]
    assert meetings([ranks[0].recording()]) == []


@pytest.mark.parametrize("count", [2, 5])
def test_equal_ranks_take_what_one_takes_alone(count: int) -> None:
    on = load_cluster("dgx-h100")
    recordings = []
    for rank in range(count):
        made = Made(rank=rank)
        group = made.group(range(8))
        for _ in range(2):
            sharded_step(made, group)
        recordings.append(made.recording())
    priced = [price(recording, on) for recording in recordings]
    alone = replay(recordings[0], priced[0], Rates.of(on))
    for together in replay_together(recordings, priced, Rates.of(on)):
        assert np.array_equal(together.starts, alone.starts)
        assert np.array_equal(together.ends, alone.ends)
        assert np.array_equal(together.host_ends, alone.host_ends)
