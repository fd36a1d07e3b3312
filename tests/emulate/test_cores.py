"""What compute and collectives take from each other on a CPU: by cores that a test moves on, and by real ones."""

import threading
import time

import pytest
import torch

from refshard.emulate.cores import Cores, HostCores, SharedClock

US, MS = 1000, 1_000_000
NEVER = threading.Event()


class FakeCores(Cores):
    """The rank computes for ``busy`` of all time that passes; time passes by waiting and by working."""

    def __init__(self, busy: float = 0.0) -> None:
        self.busy, self.now, self.computed, self.worked = busy, 0, 0.0, 0

    def pass_(self, ns: int) -> None:
        self.now += ns
        self.computed += self.busy * ns

    def now_ns(self) -> int:
        return self.now

    def join(self) -> None:
        """Nothing else runs here."""

    def computed_ns(self) -> int:
        return round(self.computed)

    def worked_ns(self) -> int:
        return self.worked

    def work(self) -> None:
        self.worked += 10 * US
        self.pass_(10 * US)

    def wait(self, duration_ns: int, waking: threading.Event) -> None:
        self.pass_(duration_ns)


def test_time_passes_as_it_does_while_nothing_is_computed() -> None:
    cores = FakeCores()
    clock = SharedClock(0.7, 0.5, cores)
    clock.sleep_until(10 * MS, NEVER)
    clock.hold_until(30 * MS, NEVER)
    assert cores.now == pytest.approx(30 * MS, abs=50 * US)
    assert cores.worked == 0, "there is nobody to take a core from"


@pytest.mark.parametrize("busy", [1.0, 0.6])
def test_beside_compute_a_collective_takes_longer_and_works(busy: float) -> None:
    """At half the rate, and for three tenths of the time; the rank may have its core for a part of the time only."""
    cores = FakeCores(busy)
    clock = SharedClock(0.7, 0.5, cores)
    clock.hold_until(20 * MS, NEVER)
    assert cores.now == pytest.approx(40 * MS, rel=0.05)
    assert cores.worked == pytest.approx(0.3 * 40 * MS, rel=0.1)


def test_the_rate_changes_when_the_rank_begins_to_wait() -> None:
    cores = FakeCores(busy=1.0)
    clock = SharedClock(1.0, 0.25, cores)
    clock.sleep_until(2 * MS, NEVER)
    assert cores.now == pytest.approx(8 * MS, rel=0.05)
    cores.busy = 0.0
    clock.sleep_until(12 * MS, NEVER)
    assert cores.now == pytest.approx(18 * MS, rel=0.05)
    assert cores.worked == 0, "compute loses nothing here"


def test_bytes_that_were_moved_count_as_work() -> None:
    cores = FakeCores(busy=1.0)
    clock = SharedClock(0.5, 1.0, cores)
    clock.sleep_until(0, NEVER)
    for _ in range(200):  # 2 ms
        cores.work()
    clock.now_ns()
    clock.hold_until(clock.now_ns() + 4 * MS, NEVER)
    assert cores.worked == pytest.approx(2 * MS + 0.1 * MS, rel=0.1), "half of four milliseconds was done before"


def test_time_never_goes_back() -> None:
    cores = FakeCores()
    clock, seen = SharedClock(0.5, 0.1, cores), list[int]()
    for busy in (0.0, 1.0, 0.0, 1.0) * 50:
        cores.busy = busy
        cores.pass_(7 * US)
        seen.append(clock.now_ns())
    assert seen == sorted(seen)


def test_waking_ends_a_sleep_that_would_last() -> None:
    waking = threading.Event()
    waking.set()
    clock = SharedClock(0.5, 0.5)
    clock.sleep_until(3_600_000 * MS, waking)
    clock.hold_until(3_600_000 * MS, waking)


@pytest.mark.slow
def test_real_cores_tell_a_librarys_thread_from_compute() -> None:
    cores = HostCores()
    stop, ran = threading.Event(), list[int]()

    def library() -> None:
        cores.join()
        while not stop.is_set():
            cores.work()
        ran.append(cores.worked_ns())

    thread = threading.Thread(target=library)
    thread.start()
    time.sleep(0.05)
    before, at = cores.computed_ns(), time.monotonic_ns()
    time.sleep(0.2)
    idle = (cores.computed_ns() - before) / (time.monotonic_ns() - at)
    product, at = torch.randn(256, 256), time.thread_time_ns()
    before = cores.computed_ns()
    while time.thread_time_ns() - at < 100 * MS:
        torch.mm(product, product)
    computed = cores.computed_ns() - before
    stop.set()
    thread.join()
    cores.computed_ns()  # of a thread that has ended
    assert ran[0] > 20 * MS
    assert idle < 0.1
    assert computed > 80 * MS
