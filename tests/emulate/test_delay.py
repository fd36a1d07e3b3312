"""A CPU's collectives: their order and their ends by a clock that a test sets, and their ways of ending."""

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch

from refshard.costs import CollectiveCost
from refshard.emulate.delay import Call, HostClock, HostDelay, Tally
from refshard.emulate.links import Links
from tests.emulate import FakeClock

US = 1000
HOUR = CollectiveCost("within", 3600.0, 0.0, "ring")


def call(move: Callable[[], None], cost: CollectiveCost | None = None) -> Call:
    tensor = torch.ones(1)
    cost = cost or CollectiveCost("within", 10e-6, 2e-6, "ring")
    return Call(op="all_reduce", cost=cost, move=move, tensors=[tensor], results=[tensor])


def waiting_for(event: threading.Event) -> Callable[[], None]:
    def move() -> None:
        assert event.wait(10)

    return move


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def delay(clock: FakeClock) -> Iterator[HostDelay]:
    made = HostDelay(Links(), clock, at_once=1)
    yield made
    made.close()


def test_each_begins_when_it_has_its_link_and_ends_when_it_would(clock: FakeClock, delay: HostDelay) -> None:
    issued, moved = threading.Event(), list[int]()

    def move() -> None:
        assert issued.wait(10)
        moved.append(clock.now)

    works = [delay.run(call(move)) for _ in range(3)]
    assert not works[0].is_completed()
    issued.set()
    assert all(work.wait() for work in works)
    assert clock.slept == [0, 12 * US, 12 * US, 24 * US, 24 * US, 36 * US]
    assert moved == [0, 12 * US, 24 * US]
    assert delay.tally == Tally(collectives=3)


def test_bytes_that_take_longer_than_the_wire_are_counted_and_end_it_when_they_have_moved(
    clock: FakeClock, delay: HostDelay
) -> None:
    def move() -> None:
        clock.now += 40 * US

    delay.run(call(move)).wait()
    assert clock.now == 40 * US
    assert delay.tally == Tally(collectives=1, late=1, late_ns=28 * US)


def test_a_barrier_that_ends_late_is_not_said_to_have_moved_bytes(clock: FakeClock, delay: HostDelay) -> None:
    def meet() -> None:
        clock.now += 40 * US

    delay.run(dataclasses.replace(call(meet), tensors=[], results=[])).wait()
    assert delay.tally == Tally()


def test_a_collective_that_fails_says_so_wherever_it_is_awaited_and_the_next_one_runs(delay: HostDelay) -> None:
    def move() -> None:
        raise ValueError("no such tensor")

    work = delay.run(call(move))
    future = work.get_future()
    with pytest.raises(RuntimeError, match="no such tensor"):
        work.wait()
    with pytest.raises(RuntimeError, match="no such tensor"):
        future.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), ValueError)
    assert delay.run(call(lambda: None)).wait()


def test_a_future_holds_the_output_whether_it_is_asked_for_before_or_after(delay: HostDelay) -> None:
    release = threading.Event()
    early, late = delay.run(call(waiting_for(release))), delay.run(call(lambda: None))
    future = early.get_future()
    assert not future.done()
    release.set()
    late.wait()
    for found in (future.wait(), late.get_future().wait(), early.result(), late.result()):
        assert [t.tolist() for t in found] == [[1.0]]
    assert early.get_future() is future


def test_waiting_gives_up_at_its_time_limit(delay: HostDelay) -> None:
    release = threading.Event()
    work = delay.run(call(waiting_for(release)))
    with pytest.raises(RuntimeError, match=r"did not end within 0\.001 s"):
        work.wait(timedelta(milliseconds=1))
    release.set()
    work.wait()


def test_closing_ends_what_was_issued_without_its_time_and_every_thread() -> None:
    delay = HostDelay(Links(), HostClock(), at_once=2)
    moved = list[int]()
    works = [delay.run(call(lambda: moved.append(1), HOUR)) for _ in range(3)]
    threads = list(delay._threads)
    delay.close()
    delay.close()
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)
    assert all(work.is_success() for work in works)
    assert len(moved) == 3
    with pytest.raises(RuntimeError, match="was destroyed; make a new one"):
        delay.run(call(lambda: None))


LEFT_BEHIND = """
import torch, torch.distributed as dist
from refshard.costs import CollectiveCost
from refshard.emulate import process_group
from refshard.emulate.world import EmulatedWorld
from refshard.specs.cluster import LinkSpec
from tests.emulate import make_cluster
within, between = LinkSpec(bytes_per_s=1e15, latency_s=0.0), LinkSpec(bytes_per_s=1.0, latency_s=0.0)
world = EmulatedWorld(make_cluster(within=within, between=between), rank=0, world_size=8)
dist.init_process_group("emulated", store=dist.HashStore(), rank=0, world_size=8, pg_options=world)
node, others, big = dist.new_group([0, 1]), dist.new_group([0, 5]), torch.ones(20_000_000)
slow = [dist.all_reduce(torch.ones(10_000), async_op=True, group=g) for g in (None, others) for _ in range(3)]
quick = [dist.all_reduce(big, async_op=True, group=node) for _ in range(3)]
print("under way", [work.is_completed() for work in slow].count(False), flush=True)
raise SystemExit(3)
"""


@pytest.mark.processes
def test_a_process_that_ends_with_collectives_under_way_ends() -> None:
    """Some would take hours, others are moving bytes, and nobody destroyed their groups."""
    done = subprocess.run([sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, timeout=1800)
    assert (done.returncode, done.stdout) == (3, "under way 6\n"), done.stderr
