"""Timing calls on a device: medians over repeats, in which nothing waits for anything but the device."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from statistics import median

import torch

Call = Callable[[int], object]
"""What is timed. It is given the number of the call, to take other operands each time: in training none is in cache."""


class Stopwatch(ABC):
    """Times calls on one device. ``budget_s`` is about how long one measurement may take."""

    def __init__(self, budget_s: float, least_repeats: int) -> None:
        self._budget_s, self._least_repeats = budget_s, least_repeats

    def seconds(self, call: Call) -> float:
        """Median seconds of one call, the first ones aside."""
        together, repeats = self._plan(self._batch(call, 0, 1))
        taken = [self._batch(call, 1 + index * together, together) for index in range(repeats)]
        return median(taken) / together

    def seconds_after(self, prepare: Call, call: Call, repeats: int) -> float:
        """Median seconds of one call, each after ``prepare``, which takes no part in it."""
        taken: list[float] = []
        for index in range(repeats):
            prepare(index)
            taken.append(self._batch(call, index, 1))
        return median(taken)

    def _plan(self, first_s: float) -> tuple[int, int]:
        """How many calls to time together, and how often, from what the very first call took."""
        together = self._together(first_s)
        affordable = int(self._budget_s / max(first_s * together, 1e-9))
        return together, min(max(affordable, self._least_repeats), 40)

    @abstractmethod
    def _together(self, call_s: float) -> int:
        """How many calls it takes for their time to stand out from that of the measurement."""

    @abstractmethod
    def _batch(self, call: Call, first: int, count: int) -> float:
        """Seconds of ``count`` calls one after the other."""


class CpuStopwatch(Stopwatch):
    """On a CPU: by the clock on the wall, or by the time that this thread ran."""

    def __init__(self, budget_s: float, least_repeats: int, *, cpu_clock: bool) -> None:
        super().__init__(budget_s, least_repeats)
        self._cpu_clock = cpu_clock
        self._ran_s = self._passed_s = 0.0

    @property
    def busy(self) -> float:
        """The part of all the time taken that this thread ran: less than 1 where something else had its core."""
        return min(self._ran_s / self._passed_s, 1.0) if self._passed_s else 1.0

    def _together(self, call_s: float) -> int:
        return max(1, min(1000, round(2e-4 / max(call_s, 1e-7))))

    def _batch(self, call: Call, first: int, count: int) -> float:
        passed_s, ran_s = time.perf_counter(), time.thread_time()
        for index in range(first, first + count):
            call(index)
        passed_s, ran_s = time.perf_counter() - passed_s, time.thread_time() - ran_s
        self._passed_s += passed_s
        self._ran_s += ran_s
        return ran_s if self._cpu_clock else passed_s


class CudaStopwatch(Stopwatch):
    """On a GPU: by its own clock, behind a wait that lets the host run ahead."""

    def _together(self, call_s: float) -> int:
        return max(4, min(200, round(2e-3 / max(call_s, 1e-7))))

    def _batch(self, call: Call, first: int, count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(50_000 * count)  # cycles: some 30 us for each call to be launched
        begin.record()
        for index in range(first, first + count):
            call(index)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
