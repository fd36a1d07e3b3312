"""The order of work between lanes: where compute runs, where gathers run, where reductions run.

On CUDA a lane is a stream, and what one lane leaves for another is ordered by events; the host never waits. On a CPU
there is one lane in host order, collectives excepted, which their own handles order.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from refshard.engine.collectives import Pending

Lane = Literal["compute", "gather", "reduce"]


class Lanes(ABC):
    """Lanes of one device. An event marks a point in a lane; its type is the implementation's own."""

    @abstractmethod
    def use(self, lane: Lane) -> AbstractContextManager[object]:
        """What is launched (and allocated) within goes to ``lane``."""

    @abstractmethod
    def record(self, lane: Lane) -> object:
        """An event after everything that ``lane`` was given so far."""

    @abstractmethod
    def wait(self, lane: Lane, event: object) -> None:
        """Let ``lane`` go on only after ``event``."""

    @abstractmethod
    def issued(self, lane: Lane, pending: Pending) -> Pending:
        """Order the end of a collective that ``lane`` issued; awaiting the result lets *compute* go on after it."""


class HostLanes(Lanes):
    """A CPU: everything runs in the order of the host's calls."""

    def use(self, lane: Lane) -> AbstractContextManager[object]:
        """See :meth:`Lanes.use`."""
        return nullcontext()

    def record(self, lane: Lane) -> object:
        """See :meth:`Lanes.record`."""
        return None

    def wait(self, lane: Lane, event: object) -> None:
        """See :meth:`Lanes.wait`."""

    def issued(self, lane: Lane, pending: Pending) -> Pending:
        """See :meth:`Lanes.issued`."""
        return pending


class CudaLanes(Lanes):
    """CUDA: compute is the caller's current stream; communication has one high-priority stream, or one per kind.

    High priority, since a collective's few blocks should not queue behind a product's thousands.
    """

    def __init__(self, device: torch.device, streams: int) -> None:
        self._device = device
        gather = torch.cuda.Stream(device, priority=-1)
        reduce = torch.cuda.Stream(device, priority=-1) if streams > 1 else gather
        self._streams: dict[Lane, torch.cuda.Stream] = {"gather": gather, "reduce": reduce}

    def use(self, lane: Lane) -> AbstractContextManager[object]:
        """See :meth:`Lanes.use`."""
        return torch.cuda.stream(self._stream(lane))

    def record(self, lane: Lane) -> torch.cuda.Event:
        """See :meth:`Lanes.record`."""
        event: torch.cuda.Event = self._stream(lane).record_event()
        return event

    def wait(self, lane: Lane, event: object) -> None:
        """See :meth:`Lanes.wait`."""
        assert isinstance(event, torch.cuda.Event)
        self._stream(lane).wait_event(event)

    def issued(self, lane: Lane, pending: Pending) -> Pending:
        """See :meth:`Lanes.issued`."""
        with self.use(lane):
            pending.wait()
        return _Event(self, self.record(lane))

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if lane == "compute" else self._streams[lane]


class _Event(Pending):
    """The end of a collective, as compute awaits it."""

    def __init__(self, lanes: Lanes, event: object) -> None:
        self._lanes, self._event = lanes, event

    def wait(self) -> None:
        self._lanes.wait("compute", self._event)


def lanes_of(device: torch.device, streams: int) -> Lanes:
    """The lanes of ``device``, with ``streams`` (1 or 2) for communication."""
    return CudaLanes(device, streams) if device.type == "cuda" else HostLanes()
