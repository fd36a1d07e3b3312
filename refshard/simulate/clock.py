"""When each item of a program starts and ends: lanes in order, links first come first served, and what disturbs what.

Between two events every running item progresses at a constant rate, so the result is exact for the model: compute slows
down while a collective occupies a link, the collective while compute runs, and kernels that prepare a reduction while
compute runs beside them (YaFSDP's give-way effect).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refshard.costs import Link
from refshard.simulate.program import Item, Lane
from refshard.timeline import Kind, Nanoseconds

NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """At which part of its rate something progresses beside something else.

    ``compute`` and ``communication`` are those of each beside the other. Kernels outside of compute's lane (copies,
    divisions) and compute share the device: ``preparation`` is the part of it that the former get.
    """

    compute: float = 1.0
    communication: float = 1.0
    preparation: float = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Start and end of each item, int64 nanoseconds from the start of the step."""

    starts: Nanoseconds
    ends: Nanoseconds

    @property
    def length(self) -> int:
        """Nanoseconds from the first start to the last end."""
        return int(self.ends.max()) if len(self.ends) else 0


def schedule(items: Sequence[Item], rates: Rates = Rates()) -> Schedule:
    """Run the program."""
    run = _Run(items, rates)
    while run.unfinished:
        run.start_what_can()
        run.advance()
    return Schedule(np.rint(run.starts * NS).astype(np.int64), np.rint(run.ends * NS).astype(np.int64))


class _Run:
    def __init__(self, items: Sequence[Item], rates: Rates) -> None:
        self._items, self._rates = items, rates
        self.starts = np.zeros(len(items))
        self.ends = np.full(len(items), np.inf)
        self.unfinished = len(items)
        self._now = 0.0
        self._lanes: dict[Lane, deque[int]] = {}
        for index, item in enumerate(items):
            self._lanes.setdefault(item.lane, deque()).append(index)
        self._queues: dict[Link, deque[int]] = {"within": deque(), "between": deque()}
        self._occupied: dict[Link, int] = {}
        self._queued: set[int] = set()
        self._working: dict[int, float] = {}
        self._ending: dict[int, float] = {}

    def start_what_can(self) -> None:
        """Start the head of each lane that waits for nothing any more, and let the next collective onto each link."""
        for lane in self._lanes.values():
            if not lane:
                continue
            index = lane[0]
            busy = index in self._working or index in self._ending or index in self._queued
            if busy or any(self.ends[other] > self._now for other in self._items[index].after):
                continue
            call = self._items[index].call
            if call is None:
                self._begin(index)
            else:
                self._queued.add(index)
                self._queues[call.cost.link].append(index)
        for link, queue in self._queues.items():
            if queue and link not in self._occupied:
                index = queue.popleft()
                self._queued.discard(index)
                self._occupied[link] = index
                self._begin(index)

    def advance(self) -> None:
        """Go to the next event: the end of some item's work, or of a collective's latency."""
        speeds = {index: self._speed(index) for index in self._working}
        waits = [left / speeds[index] for index, left in self._working.items()] + list(self._ending.values())
        assert waits, "an item waits for what never ends"
        passed = min(waits)
        self._now += passed
        for index, left in list(self._ending.items()):
            self._ending[index] = left - passed
            if left <= passed:
                del self._ending[index]
                self._end(index)
        for index, left in list(self._working.items()):
            if left / speeds[index] <= passed:
                self._worked(index)
            else:
                self._working[index] = left - passed * speeds[index]

    def _begin(self, index: int) -> None:
        self.starts[index] = self._now
        self._working[index] = self._items[index].seconds

    def _speed(self, index: int) -> float:
        item = self._items[index]
        computing = any(self._items[other].lane == "compute" for other in self._working if other != index)
        if item.kind is Kind.COMM:
            return self._rates.communication if computing else 1.0
        if item.lane == "compute":
            shared = self._rates.preparation if any(self._prepares(other) for other in self._working) else 0.0
            return (1.0 - shared) * (self._rates.compute if self._occupied else 1.0)
        return self._rates.preparation if computing else 1.0  # neither in compute's lane nor a collective

    def _prepares(self, index: int) -> bool:
        return self._items[index].call is None and self._items[index].lane != "compute"

    def _worked(self, index: int) -> None:
        """The item's work is done; of a collective, the link is free and its result on its way."""
        del self._working[index]
        call = self._items[index].call
        if call is not None:
            del self._occupied[call.cost.link]
        if call is not None and call.cost.latency_s > 0:
            self._ending[index] = call.cost.latency_s
        else:
            self._end(index)

    def _end(self, index: int) -> None:
        self.ends[index] = self._now
        self.unfinished -= 1
        self._lanes[self._items[index].lane].popleft()
