"""Which read of an uncomputed value is blamed for a script's error; reads are made by hand."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import cast

import pytest

from refshard.dryrun.unknown_values import UnknownValues


class Device:
    """Stands for the device: it calls ``told`` where a script reads a value, from C++."""

    PLACEHOLDER = 0.8125

    def __init__(self) -> None:
        self.steps = 0
        self.told: Callable[[float | None], None]
        self.values = UnknownValues(cast(ModuleType, self), lambda: self.steps)
        self.values.install()

    def set_unknown_value_callback(self, told: Callable[[float | None], None]) -> None:
        self.told = told


def blamed(device: Device, script: Callable[[Device], object]) -> str:
    """The line that is blamed."""
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        script(device)
    return device.values.blamed(raised.value)


def asserts(device: Device) -> None:
    device.told(loss := 0.8125)
    assert 1 < loss < 2


def checks_elsewhere(device: Device) -> None:
    device.told(loss := 0.25)
    device.told(0.25)  # as printing the tensor does
    raises_if_low({"loss": loss, "step": 3})


def raises_if_low(values: dict[str, float]) -> None:
    if values["loss"] < 0.5:
        raise RuntimeError("diverged")


def computes(device: Device) -> None:
    device.told(loss := 0.8125)
    math.log(loss - 1)


def exits(device: Device) -> None:
    device.told(0.8125)
    raise SystemExit(1)


def reads_then_fails_in_torch(device: Device) -> None:
    device.told(0.8125)
    len(3)  # type: ignore[arg-type]  # raised by code that is not Python's, as torch's are


def reads_then_loads(device: Device) -> None:
    device.told(0.8125)
    load("sample")


def load(name: str) -> None:
    raise ValueError(f"bad {name}")


def read_two_steps_ago(device: Device) -> None:
    device.told(0.8125)
    device.steps += 2
    raise ValueError("no more data")


@pytest.mark.parametrize("script", [asserts, checks_elsewhere, computes, exits])
def test_the_line_that_read_the_value_is_blamed(script: Callable[[Device], None]) -> None:
    first = script.__code__.co_firstlineno + 1
    assert blamed(Device(), script).endswith(f"test_unknown_values.py:{first}")


@pytest.mark.parametrize("script", [reads_then_fails_in_torch, reads_then_loads, read_two_steps_ago])
def test_errors_that_do_not_follow_from_a_value_blame_none(script: Callable[[Device], None]) -> None:
    assert blamed(Device(), script) == ""


def test_the_first_read_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    device = Device()
    device.told(0.8125)
    device.told(0.3)
    told = capsys.readouterr().err
    assert told.count("refshard: ") == 1
    assert "test_unknown_values.py:" in told
    assert "gets a placeholder (0.8125, or what follows from it)" in told
