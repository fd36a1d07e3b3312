"""A GPU's collectives, on a device that writes down what it is asked for: there is none here to run the kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from refshard.costs import CollectiveCost, Link
from refshard.emulate.delay import Call, Tally
from refshard.emulate.streams import Device, StreamDelay


class FakeStream:
    """A stream and its events, by name."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log, self._recorded = name, log, 0

    def record_event(self) -> str:
        self._recorded += 1
        return f"{self.name}.{self._recorded}"

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.name} waits {event}")


class FakeDevice(Device):
    """Launches nothing."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.main = FakeStream("main", self.log)
        self.now = self.main
        self._streams = self._slots = 0

    def current(self) -> Any:
        return self.now

    def stream(self) -> Any:
        self._streams += 1
        return FakeStream(f"own{self._streams}", self.log)

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def slot(self) -> Any:
        self._slots += 1
        return f"slot{self._slots}"

    def start(self, slot: Any, link: Link, transfer_s: float, latency_s: float) -> None:
        self.log.append(f"{self.now.name}: {slot} takes {link} {transfer_s:g} {latency_s:g}")

    def hold(self, slot: Any) -> None:
        self.log.append(f"{self.now.name}: hold {slot}")

    def future(self) -> "torch.futures.Future[Any]":
        return torch.futures.Future()

    def tally(self) -> Tally:
        return Tally()


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def call(device: FakeDevice, *, asynchronous: bool) -> Call:
    def move() -> None:
        device.log.append(f"{device.now.name}: move")

    cost = CollectiveCost("between", 2.0, 0.5, "ring")
    return Call(op="all_gather", cost=cost, move=move, tensors=[], results=[], asynchronous=asynchronous)


def test_one_that_is_synchronous_runs_on_the_current_stream(device: FakeDevice) -> None:
    work = StreamDelay(device).run(call(device, asynchronous=False))
    assert device.log == ["main: slot1 takes between 2 0.5", "main: move", "main: hold slot1"]
    assert work.wait()
    assert work.result() == []


def test_one_that_is_asynchronous_runs_on_the_groups_stream_after_what_was_launched(device: FakeDevice) -> None:
    StreamDelay(device).run(call(device, asynchronous=True))
    assert device.log == [
        "own1 waits main.1", "own1: slot1 takes between 2 0.5", "own1: move", "own1: hold slot1",
    ]  # fmt: skip


def test_a_communicator_runs_one_at_a_time_on_whatever_stream(device: FakeDevice) -> None:
    delay = StreamDelay(device)
    delay.run(call(device, asynchronous=True))
    device.log.clear()
    with device.use(FakeStream("reduce", device.log)):
        delay.run(call(device, asynchronous=False))
    assert device.log[0] == "reduce waits own1.1"
    delay.run(call(device, asynchronous=True))
    assert [line for line in device.log if "waits" in line][1:] == ["own1 waits main.2", "own1 waits reduce.1"]


def test_groups_have_streams_and_ends_of_their_own(device: FakeDevice) -> None:
    for delay in (StreamDelay(device), StreamDelay(device)):
        delay.run(call(device, asynchronous=True))
    assert not [line for line in device.log if line == "own2 waits own1.1"]
    assert [line for line in device.log if "hold" in line] == ["own1: hold slot1", "own2: hold slot2"]
