"""Timing calls on a device: medians over repeats, in which nothing waits for anything but the device."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from statistics import median

import torch

from refshard.measure.calibration.samples import Pace

Call = Callable[[int], object]
"""What is timed. It is given the number of the call, to take other operands each time: in training none is in cache."""
Timing = Callable[[Call], float]
"""Returns the seconds of one call: a stopwatch's ``burst`` or ``sustained``."""
_LEAST_REPEATS, _MOST_REPEATS = 3, 40
_AGREEING, _SETTLED = 3, 0.01


def pace(device: str, *, quick: bool) -> Pace:
    """How long to time each kernel on a device of this type."""
    if device == "cuda":
        # A GPU's power is regulated within some 0.1 s, its temperature takes seconds.
        return Pace(rest_s=0.2, burst_s=0.02, window_s=0.05 if quick else 0.25, most_s=0.5 if quick else 3.0)
    return Pace(
        rest_s=0.0, burst_s=0.01 if quick else 0.03, window_s=0.01 if quick else 0.03, most_s=0.03 if quick else 0.15
    )


def settled(windows: Sequence[float]) -> bool:
    """Whether the last three windows agree within 1 %: then the clocks move no more."""
    last = windows[-_AGREEING:]
    return len(last) == _AGREEING and max(last) <= (1 + _SETTLED) * min(last)


class Stopwatch(ABC):
    """Times calls on one device, in bursts and sustained, as its ``pace`` says."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def burst(self, call: Call) -> float:
        """Median seconds of one call of a few, made after a rest."""
        time.sleep(self._pace.rest_s)
        first_s = self._batch(call, 0, 1)
        together = self._together(first_s)
        affordable = int(self._pace.burst_s / max(first_s * together, 1e-9))
        repeats = min(max(affordable, _LEAST_REPEATS), _MOST_REPEATS)
        return median(self._batch(call, 1 + index * together, together) for index in range(repeats)) / together

    def sustained(self, call: Call) -> float:
        """Median seconds of one call, made without a pause until three windows in a row agree, or time is up."""
        together, number, passed_s = self._together(self._batch(call, 0, 1)), 1, 0.0
        windows: list[float] = []
        while not settled(windows) and passed_s < self._pace.most_s:
            batches: list[float] = []
            while sum(batches) < self._pace.window_s:
                batches.append(max(self._batch(call, number, together), 1e-9))
                number += together
            passed_s += sum(batches)
            windows.append(median(batches) / together)
        return median(windows[-_AGREEING:])

    def seconds_after(self, prepare: Call, call: Call, repeats: int) -> float:
        """Median seconds of one call, each after ``prepare``, which takes no part in it."""
        taken: list[float] = []
        for index in range(repeats):
            prepare(index)
            taken.append(self._batch(call, index, 1))
        return median(taken)

    @abstractmethod
    def _together(self, call_s: float) -> int:
        """How many calls it takes for their time to stand out from that of the measurement."""

    @abstractmethod
    def _batch(self, call: Call, first: int, count: int) -> float:
        """Seconds of ``count`` calls one after the other."""


class CpuStopwatch(Stopwatch):
    """On a CPU: by the clock on the wall, or by the time that this thread ran."""

    def __init__(self, pace: Pace, *, cpu_clock: bool) -> None:
        super().__init__(pace)
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
    """On a GPU: by its own clock, behind a wait that lets the host run ahead.

    The wait is some 30 us for each call: while calls of 1 ms or more are sustained, which draw the most power, the GPU
    is busy 97 % of the time.
    """

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
