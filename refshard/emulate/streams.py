"""On CUDA a collective is work on a stream: it takes its link, moves its bytes, and spins until its end.

The links are kept on the device, since only there it shows when a collective's turn has come: the host runs ahead.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from refshard.costs import Link
from refshard.emulate.delay import SPAN, Call, Delay, Tally, recorded
from refshard.emulate.kernels import TICK_NS, Kernels
from refshard.errors import RefshardError

_LINKS: tuple[Link, ...] = ("within", "between")
_MOST_TICKS = 2**31 - 1
"""The kernels take durations as C's ``int``."""


class Device(ABC):
    """What :class:`StreamDelay` asks of a device. Streams and events are the implementation's own."""

    @abstractmethod
    def current(self) -> Any:
        """The current stream."""

    @abstractmethod
    def stream(self) -> Any:
        """A new stream."""

    @abstractmethod
    def use(self, stream: Any) -> AbstractContextManager[object]:
        """What is launched within goes to ``stream``."""

    @abstractmethod
    def slot(self) -> Any:
        """Room for the end of one collective at a time."""

    @abstractmethod
    def start(self, slot: Any, link: Link, transfer_s: float, latency_s: float) -> None:
        """Launch, on the current stream, what takes the link when it is free and writes the end to ``slot``."""

    @abstractmethod
    def hold(self, slot: Any) -> None:
        """Launch, on the current stream, what holds multiprocessors until the end in ``slot``."""

    @abstractmethod
    def future(self) -> "torch.futures.Future[Any]":
        """A future that makes waiters' streams wait for what the current stream holds at completion."""

    @abstractmethod
    def tally(self) -> Tally:
        """What has ended, once all that was launched has."""


class CudaDevice(Device):
    """One NVIDIA GPU; a collective holds ``multiprocessors`` of it while it runs."""

    def __init__(self, device: torch.device, multiprocessors: int) -> None:
        self._device, self._multiprocessors, self._kernels = device, multiprocessors, Kernels(device)
        self._free_at = torch.zeros(len(_LINKS), dtype=torch.int64, device=device)
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)  # what was zeroed is read on other streams

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def use(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def slot(self) -> Any:
        return torch.zeros(1, dtype=torch.int64, device=self._device)

    def start(self, slot: Any, link: Link, transfer_s: float, latency_s: float) -> None:
        transfer, latency = _ticks(transfer_s), _ticks(latency_s)
        self._kernels.start(self._free_at, slot, _LINKS.index(link), transfer, latency)

    def hold(self, slot: Any) -> None:
        self._kernels.hold(slot, self._counts, self._multiprocessors)

    def future(self) -> "torch.futures.Future[Any]":
        return torch.futures.Future(devices=[self._device])

    def tally(self) -> Tally:
        torch.cuda.synchronize(self._device)
        return Tally(*self._counts.tolist())


def _ticks(seconds: float) -> int:
    ticks = round(seconds * 1e9 / TICK_NS)
    if ticks > _MOST_TICKS:
        raise RefshardError(
            f"an emulated collective on a GPU takes at most {_MOST_TICKS * TICK_NS * 1e-9:.0f} s, got {seconds:.3g} s; "
            "take a smaller model or a faster cluster"
        )
    return ticks


class StreamDelay(Delay):
    """Collectives of one group on one device; a group's communicator runs one at a time, on any stream.

    One that is asynchronous runs on the group's own stream, any other on the current stream, as NCCL's do.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._slot = device, device.slot()
        self._own: Any = None
        self._last: Any = None

    def run(self, call: Call) -> dist.Work:
        current = self._device.current()
        stream = current
        if call.asynchronous:
            stream = self._own = self._own or self._device.stream()
            stream.wait_event(current.record_event())
        if self._last is not None:
            stream.wait_event(self._last)
        with self._device.use(stream), recorded(f"{SPAN}{call.op}", *call.tensors[:2]), torch.no_grad():
            self._device.start(self._slot, call.cost.link, call.cost.transfer_s, call.cost.latency_s)
            call.move()
            self._device.hold(self._slot)
            future = self._device.future()
            future.set_result(call.results)
        if stream is not current:
            for tensor in call.tensors:
                tensor.record_stream(stream)
        self._last = stream.record_event()
        return StreamWork(future, self._last)

    @property
    def tally(self) -> Tally:
        """See :meth:`Delay.tally`: nothing of its own, since all groups count on the device."""
        return Tally()

    def close(self) -> None:
        """See :meth:`Delay.close`: the streams end what they were given by themselves."""


class StreamWork(dist.Work):
    """A collective on a stream: awaiting it makes the current stream wait, not the host."""

    def __init__(self, future: "torch.futures.Future[Any]", event: Any) -> None:
        super().__init__()
        self._future, self._event = future, event

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let the current stream go on only after it."""
        self._future.wait()
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the device has ended it."""
        return bool(self._event.query())

    def is_success(self) -> bool:
        """Whether the device has ended it: nothing can fail."""
        return self.is_completed()

    def exception(self) -> None:
        """Nothing can go wrong."""

    def result(self) -> list[torch.Tensor]:
        """Its output, usable by the current stream."""
        found: list[torch.Tensor] = self._future.wait()
        return found

    def get_future(self) -> "torch.futures.Future[Any]":
        """A future of its output."""
        return self._future
