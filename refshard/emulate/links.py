"""When a collective has its link: first come, first served, on every link and in every communicator."""

import threading
from dataclasses import dataclass

from refshard.costs import CollectiveCost, Link

NS_PER_S = 10**9


@dataclass(frozen=True, slots=True)
class Window:
    """A collective on its link, in nanoseconds: when it has it, and when its result is there."""

    start_ns: int
    end_ns: int


class Communicator:
    """What runs the collectives of one group, ``at_once`` of them at a time."""

    def __init__(self, at_once: int) -> None:
        self.free_ns = [0] * at_once


class Links:
    """The links of one rank, which all its groups share.

    A collective begins when it is issued, its communicator can take it and its link is free. It has the link to itself
    for as long as its bytes take; its latency, in which the next one's bytes may already move, follows.
    """

    def __init__(self) -> None:
        self._free_ns: dict[Link, int] = {"within": 0, "between": 0}
        self._lock = threading.Lock()

    def place(self, cost: CollectiveCost, communicator: Communicator, now_ns: int) -> Window:
        """Give a collective that is issued now the link of its cost."""
        with self._lock:
            lane = communicator.free_ns.index(min(communicator.free_ns))
            start = max(now_ns, communicator.free_ns[lane], self._free_ns[cost.link])
            sent = start + round(cost.transfer_s * NS_PER_S)
            end = sent + round(cost.latency_s * NS_PER_S)
            self._free_ns[cost.link], communicator.free_ns[lane] = sent, end
        return Window(start, end)
