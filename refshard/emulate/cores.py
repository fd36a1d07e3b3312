"""What a collective and compute take from each other on a CPU, where both need its cores.

A library that moves bytes by threads takes part of the cores' time, and gets less of it while the rank computes. The
profile says both: the part of its rate that compute reaches during a collective, and a collective during compute.
"""

import threading
import time
from abc import ABC, abstractmethod

import torch

from refshard.emulate.delay import Clock
from refshard.quantities import KIB

_TICK_NS = 1_000_000
"""How long a thread that holds a link goes on before it looks again whether the rank computes."""
_RESOLUTION_NS = 20_000
_COMPUTING = 0.25
"""A rank computes if its threads run for more than this part of the time: others may have its core meanwhile."""
_CHUNK_BYTES = 64 * KIB


class Cores(ABC):
    """The cores of this machine, as this process sees them. Times are in nanoseconds."""

    @abstractmethod
    def now_ns(self) -> int:
        """Now, since any moment."""

    @abstractmethod
    def join(self) -> None:
        """Mark the calling thread as part of the library: its work does not count as the rank's compute."""

    @abstractmethod
    def computed_ns(self) -> int:
        """How long all other threads of this process ran, together."""

    @abstractmethod
    def worked_ns(self) -> int:
        """How long the calling thread ran."""

    @abstractmethod
    def work(self) -> None:
        """Let the calling thread do a little of what a library's thread does."""

    @abstractmethod
    def wait(self, duration_ns: int, waking: threading.Event) -> None:
        """Return after that time, or as soon as ``waking`` is set."""


class HostCores(Cores):
    """The kernel's clocks; work is copying memory, as a socket's is."""

    def __init__(self) -> None:
        self._from, self._to = (torch.ones(_CHUNK_BYTES, dtype=torch.uint8) for _ in range(2))
        self._ours: dict[int, int] = {}

    def now_ns(self) -> int:
        """See :meth:`Cores.now_ns`."""
        return time.monotonic_ns()

    def join(self) -> None:
        """See :meth:`Cores.join`."""
        thread = threading.get_ident()
        if thread not in self._ours:
            self._ours[thread] = time.pthread_getcpuclockid(thread)

    def computed_ns(self) -> int:
        """See :meth:`Cores.computed_ns`."""
        ran = time.process_time_ns()
        for thread, clock in list(self._ours.items()):
            try:
                ran -= time.clock_gettime_ns(clock)
            except OSError:  # it has ended
                self._ours.pop(thread, None)
        return ran

    def worked_ns(self) -> int:
        """See :meth:`Cores.worked_ns`."""
        return time.thread_time_ns()

    def work(self) -> None:
        """See :meth:`Cores.work`."""
        self._to.copy_(self._from)

    def wait(self, duration_ns: int, waking: threading.Event) -> None:
        """See :meth:`Cores.wait`."""
        waking.wait(duration_ns * 1e-9)


class SharedClock(Clock):
    """Time as it passes for links that share the cores with compute.

    While this rank computes, it passes at the rate ``communication``, and a thread that holds a link works for the part
    ``1 - compute`` of it.
    """

    def __init__(self, compute: float, communication: float, cores: Cores | None = None) -> None:
        self._taken, self._rate = 1.0 - compute, communication
        self._cores = cores or HostCores()
        self._lock = threading.Lock()
        self._now_ns, self._computing = 0.0, False
        self._looked_ns, self._computed_ns = self._cores.now_ns(), self._cores.computed_ns()
        self._woke_ns: dict[int, int] = {}

    def now_ns(self) -> int:
        """See :meth:`Clock.now_ns`."""
        with self._lock:
            passed = self._cores.now_ns() - self._looked_ns
            if passed >= _RESOLUTION_NS:
                computed = self._cores.computed_ns()
                self._computing = computed - self._computed_ns > _COMPUTING * passed
                self._now_ns += passed * (self._rate if self._computing else 1.0)
                self._looked_ns, self._computed_ns = self._looked_ns + passed, computed
            return round(self._now_ns)

    def sleep_until(self, moment_ns: int, waking: threading.Event) -> None:
        """See :meth:`Clock.sleep_until`."""
        self._cores.join()
        while (left := moment_ns - self.now_ns()) > 0 and not waking.is_set():
            self._cores.wait(max(left, _RESOLUTION_NS), waking)
        self._woke_ns[threading.get_ident()] = self._cores.worked_ns()

    def hold_until(self, moment_ns: int, waking: threading.Event) -> None:
        """See :meth:`Clock.hold_until`. What the thread did since it last woke, such as moving bytes, is work too."""
        ahead: float = self._cores.worked_ns() - self._woke_ns.pop(threading.get_ident(), self._cores.worked_ns())
        while (left := moment_ns - self.now_ns()) > 0 and not waking.is_set():
            begun, worked = self._cores.now_ns(), self._cores.worked_ns()
            tick = min(max(left, _RESOLUTION_NS), _TICK_NS)
            owed = self._taken * tick if self._computing else 0.0
            while self._cores.worked_ns() - worked + ahead < owed:
                self._cores.work()
            ahead = max(ahead - owed, 0.0)
            self._cores.wait(max(tick - (self._cores.now_ns() - begun), 0), waking)
