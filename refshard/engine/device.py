"""The order of work between lanes: one each for compute, gathers, reductions, and the second legs of reductions.

On CUDA, a lane is a stream, and events order lanes; the host never waits, except for data in its own memory. On a CPU
there is one lane, in host order; collectives are ordered by their own handles.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol

import torch

from refshard.engine.collectives import Pending

Lane = Literal["compute", "gather", "reduce", "combine"]
_NOTHING = nullcontext()


class Lanes(ABC):
    """Lanes of one device. An event marks a point in a lane; its type is the implementation's own."""

    @abstractmethod
    def use(self, lane: Lane) -> AbstractContextManager[object]:
        """What is launched (and allocated) within goes to ``lane``."""

    @abstractmethod
    def computes(self) -> None:
        """Compute may have gone to another stream, as autograd does with what a model runs on a side stream: from here
        on the current one is part of the compute lane too.
        """

    @abstractmethod
    def join(self) -> None:
        """Let compute go on, on the current stream, only after all that it does on others."""

    @abstractmethod
    def fork(self) -> None:
        """Let compute go on, on its other streams, only after all that it does on the current one."""

    @abstractmethod
    def alone(self) -> None:
        """A pass begins: compute is on the current stream only, as far as is known."""

    @abstractmethod
    def record(self, lane: Lane, reuse: object = None) -> object:
        """An event after everything that ``lane`` was given so far, on all its streams.

        ``reuse`` is an event that may be moved there instead of making one; who waited for it before is not affected.
        """

    @abstractmethod
    def wait(self, lane: Lane, event: object) -> None:
        """Let ``lane`` go on only after ``event``."""

    @abstractmethod
    def issued(self, lane: Lane, pending: Pending) -> Pending:
        """Order the end of a collective that was issued within ``use(lane)``, where this is called too.

        Awaiting the result, at most once, lets *compute* go on after the collective.
        """

    @abstractmethod
    def follow(self, lane: Lane, pending: Pending) -> None:
        """Let ``lane`` too go on only after a collective that :meth:`issued` returned and nobody has awaited yet."""

    @abstractmethod
    def synchronise(self, event: object) -> None:
        """Let the host go on only after ``event``."""


class HostLanes(Lanes):
    """A CPU: everything runs in the order of the host's calls."""

    def use(self, lane: Lane) -> AbstractContextManager[object]:
        return _NOTHING

    def computes(self) -> None:
        """See :meth:`Lanes.computes`."""

    def join(self) -> None:
        """See :meth:`Lanes.join`."""

    def fork(self) -> None:
        """See :meth:`Lanes.fork`."""

    def alone(self) -> None:
        """See :meth:`Lanes.alone`."""

    def record(self, lane: Lane, reuse: object = None) -> object:
        return None

    def wait(self, lane: Lane, event: object) -> None:
        """See :meth:`Lanes.wait`."""

    def issued(self, lane: Lane, pending: Pending) -> Pending:
        return pending

    def follow(self, lane: Lane, pending: Pending) -> None:
        """See :meth:`Lanes.follow`."""

    def synchronise(self, event: object) -> None:
        """See :meth:`Lanes.synchronise`."""


class Stream(Protocol):
    """What the engine asks of a stream; its events can ``synchronize()`` the host."""

    def record_event(self, event: Any = None) -> Any:
        """An event after all that the stream was given so far: a new one, or ``event``."""

    def wait_event(self, event: Any) -> None:
        """Let all later work wait for ``event``."""


class StreamLanes(Lanes):
    """Lanes that are streams: compute is whichever is current, the others have the streams that they are given.

    The current stream is looked up at each use: autograd runs backward in threads of its own, on the streams that
    forward ran on. Where that were several, compute is all of them: what awaits compute awaits each, and each awaits
    what compute awaits. ``number`` tells streams apart at less cost than ``current``.

    Storage that several lanes use is never ``record_stream``-ed, which would keep the allocator from handing it out
    again until an event had passed: it goes back at once to the lane that it was allocated on, and the engine's waits
    order what that lane does next after whoever used it last.
    """

    def __init__(
        self,
        streams: Mapping[Lane, Stream],
        *,
        current: Callable[[], Stream],
        use: Callable[[Any], AbstractContextManager[object]],
        number: Callable[[], object] | None = None,
    ) -> None:
        self._streams = dict(streams)
        self._current, self._use = current, use
        self._number = number or current
        self._computing: dict[object, Stream] = {}
        self._awaited: list[_Done] = []

    def use(self, lane: Lane) -> AbstractContextManager[object]:
        return self._use(self._stream(lane))

    def computes(self) -> None:
        number = self._number()
        if number not in self._computing:
            stream = self._current()
            self._await_others(stream)  # which have awaited what this one must await
            self._computing[number] = stream

    def join(self) -> None:
        self.computes()
        if len(self._computing) > 1:
            self._await_others(self._current())

    def fork(self) -> None:
        if len(self._computing) > 1:
            current = self._current()
            event = current.record_event()
            for stream in self._computing.values():
                if stream != current:
                    stream.wait_event(event)

    def alone(self) -> None:
        self._computing.clear()

    def record(self, lane: Lane, reuse: object = None) -> object:
        if lane == "compute":
            self.join()
        event: object = self._stream(lane).record_event(reuse)
        return event

    def wait(self, lane: Lane, event: object) -> None:
        if lane == "compute":
            self.computes()
        for stream in self._computing.values() if lane == "compute" else (self._streams[lane],):
            stream.wait_event(event)

    def issued(self, lane: Lane, pending: Pending) -> Pending:
        pending.wait()
        done = self._awaited.pop() if self._awaited else _Done(self, self._awaited)
        done.event = self.record(lane, done.event)
        return done

    def follow(self, lane: Lane, pending: Pending) -> None:
        assert isinstance(pending, _Done)
        self.wait(lane, pending.event)

    def synchronise(self, event: Any) -> None:
        event.synchronize()

    def _await_others(self, stream: Stream) -> None:
        for other in self._computing.values():
            if other != stream:
                stream.wait_event(other.record_event())

    def _stream(self, lane: Lane) -> Stream:
        return self._current() if lane == "compute" else self._streams[lane]


class _Done(Pending):
    """The end of a collective, as compute awaits it. Once awaited, it and its event serve another collective."""

    __slots__ = ("_awaited", "_lanes", "event")

    def __init__(self, lanes: Lanes, awaited: "list[_Done]") -> None:
        self._lanes, self._awaited = lanes, awaited
        self.event: object = None

    def wait(self) -> None:
        self._lanes.wait("compute", self.event)
        self._awaited.append(self)


def lanes_of(device: torch.device, streams: int) -> Lanes:
    """The lanes of ``device``: with ``streams`` of 1, all that communicates shares one; with 2, each kind has its own.

    On CUDA these have high priority, since a collective's few blocks should not queue behind a product's thousands.
    """
    if device.type != "cuda":
        return HostLanes()
    first = torch.cuda.Stream(device, priority=-1)
    own: dict[Lane, Stream] = {"gather": first, "reduce": first, "combine": first}
    if streams > 1:
        own["reduce"] = torch.cuda.Stream(device, priority=-1)
        own["combine"] = torch.cuda.Stream(device, priority=-1)
    index = torch.cuda.current_device() if device.index is None else device.index
    return StreamLanes(
        own,
        current=partial(torch.cuda.current_stream, index),
        use=torch.cuda.stream,
        number=partial(torch._C._cuda_getCurrentRawStream, index),
    )
