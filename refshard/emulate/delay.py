"""How a collective takes its time: on a CPU in a thread that moves its bytes and then sleeps to its end."""

import ctypes
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from refshard.costs import CollectiveCost
from refshard.emulate.links import Communicator, Links, Window

_PR_SET_TIMERSLACK = 29
SPAN = "emulated:"
"""What the run of a collective is called in a trace, before its operation's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective that was issued: what it costs, what it does to memory (``move``), and what it is for a trace.

    ``tensors`` are all that it reads and writes, what is not sharded first; ``results`` are what its future holds.
    ``asynchronous`` is false where the caller goes on only after it.
    """

    op: str
    cost: CollectiveCost
    move: Callable[[], None]
    tensors: Sequence[torch.Tensor]
    results: list[torch.Tensor]
    asynchronous: bool = True


@dataclass(frozen=True, slots=True)
class Tally:
    """How many collectives that move bytes ended, how many of them later than modelled, and by how much together.

    One is late where its bytes took longer to move in this machine's memory than the profile gives the wire.
    """

    collectives: int = 0
    late: int = 0
    late_ns: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.collectives + other.collectives, self.late + other.late, self.late_ns + other.late_ns)


class Delay(ABC):
    """How the collectives of one group take their time on one device."""

    @abstractmethod
    def run(self, call: Call) -> dist.Work:
        """Start a collective; those of one group start in the order of the calls."""

    @property
    @abstractmethod
    def tally(self) -> Tally:
        """What has ended so far."""

    @abstractmethod
    def close(self) -> None:
        """End what was started, without its time if need be, and release what is held. May be called again."""


class Clock(ABC):
    """Time on the host, in nanoseconds."""

    @abstractmethod
    def now_ns(self) -> int:
        """Now, since any moment."""

    @abstractmethod
    def sleep_until(self, moment_ns: int, waking: threading.Event) -> None:
        """Return at that moment, at once if it has passed, or as soon as ``waking`` is set."""

    def hold_until(self, moment_ns: int, waking: threading.Event) -> None:
        """As :meth:`sleep_until`, for the thread that runs a collective until then."""
        self.sleep_until(moment_ns, waking)


class HostClock(Clock):
    """The kernel's monotonic clock."""

    def now_ns(self) -> int:
        """See :meth:`Clock.now_ns`."""
        return time.monotonic_ns()

    def sleep_until(self, moment_ns: int, waking: threading.Event) -> None:
        """See :meth:`Clock.sleep_until`."""
        while (left := moment_ns - time.monotonic_ns()) > 0 and not waking.wait(left * 1e-9):
            pass


class HostDelay(Delay):
    """A CPU: one thread for each collective that the library runs at a time, as gloo has two.

    They are started with the first collective and end with :meth:`close`.
    """

    def __init__(self, links: Links, clock: Clock, *, at_once: int) -> None:
        self._links, self._clock = links, clock
        self._tally, self._counting = Tally(), threading.Lock()
        self._communicator, self._at_once = Communicator(at_once), at_once
        self._queue: queue.SimpleQueue[tuple[Call, Window, HostWork] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closing, self._issuing = threading.Event(), threading.Lock()

    def run(self, call: Call) -> dist.Work:
        """See :meth:`Delay.run`."""
        if self._closing.is_set():
            raise RuntimeError("the emulated process group was destroyed; make a new one")
        work = HostWork(call.results)
        with self._issuing:  # what has its link first is to run first
            if not self._threads:
                self._start()
            self._queue.put((call, self._links.place(call.cost, self._communicator, self._clock.now_ns()), work))
        return work

    def _start(self) -> None:
        names = (f"emulated {number}" for number in range(self._at_once))
        self._threads = [threading.Thread(target=self._serve, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    @property
    def tally(self) -> Tally:
        """See :meth:`Delay.tally`."""
        return self._tally

    def close(self) -> None:
        """See :meth:`Delay.close`."""
        self._closing.set()
        threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            if thread is not threading.current_thread():  # which may hold the last reference to the world
                thread.join()

    def _serve(self) -> None:
        _sleep_precisely()
        while (taken := self._queue.get()) is not None:
            self._serve_one(*taken)
            del taken  # what the collective held may be freed while the next one is awaited

    def _serve_one(self, call: Call, window: Window, work: "HostWork") -> None:
        self._clock.sleep_until(window.start_ns, self._closing)
        error = None
        with recorded(f"{SPAN}{call.op}", *call.tensors[:2]):
            try:
                with torch.no_grad():
                    call.move()
            except BaseException as raised:
                error = raised
            late_ns = max(self._clock.now_ns() - window.end_ns, 0)
            self._clock.hold_until(window.end_ns, self._closing)
        if call.tensors:  # a barrier's end is late by as much as this thread and the other processes are
            with self._counting:
                self._tally += Tally(1, int(late_ns > 0), late_ns)
        work.end(error)


class HostWork(dist.Work):
    """A collective under way on a CPU. What went wrong in its thread is raised where it is awaited."""

    def __init__(self, results: list[torch.Tensor]) -> None:
        super().__init__()
        self._results = results
        self._error: BaseException | None = None
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._settled: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def end(self, error: BaseException | None) -> None:
        """Say that it has ended, and what went wrong."""
        with self._lock:
            self._error = error
            self._ended.set()
            settled = self._settled
        if settled is not None:
            settled.set_result(None)

    def get_future(self) -> "torch.futures.Future[Any]":
        """A future of its output."""
        with self._lock:
            if self._future is None:
                self._settled = torch.futures.Future()
                # C++ takes a future's error from a callback that raises, and from nowhere else.
                self._future = self._settled.then(self._settle)
                if self._ended.is_set():
                    self._settled.set_result(None)
            return self._future

    def _settle(self, _: object) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when it has ended; a ``timeout`` of 0 never expires.

        Raises:
            RuntimeError: it did not end in time, or failed.
        """
        if not self._ended.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError(f"an emulated collective did not end within {timeout.total_seconds():g} s")
        if self._error is not None:
            raise RuntimeError(f"an emulated collective failed: {self._error}") from self._error
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Its output, once it has ended."""
        self.wait()
        return self._results


@contextmanager
def recorded(name: str, *tensors: object) -> Iterator[None]:
    """Show what runs inside as a span of this name, with the tensors' shapes, where a trace is recorded."""
    if not torch.autograd.profiler._is_profiler_enabled:
        yield
        return
    handle = torch.autograd._record_function_with_args_enter(name, *tensors)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._record_function_with_args_exit(handle)  # type: ignore[attr-defined]


def _sleep_precisely() -> None:
    """Let this thread's sleeps end on time: by default Linux may add 50 us (prctl(2), PR_SET_TIMERSLACK)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
