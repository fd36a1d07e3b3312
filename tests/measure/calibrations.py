"""Calibrations so small that they take seconds on fake devices and busy machines."""

from typing import Any

from refshard.measure.calibration.samples import Calibration, Pace, Shapes, Traffic
from refshard.quantities import KIB

SHAPES = Shapes(
    products=((16, 64, 64), (64, 128, 128)),
    attention=((16, 32), (16, 1024)),
    heads=8,
    moved_bytes=(16 * KIB,),
    optimizer_numel=4000,
    operation_repeats=3,
)


def calibration(**changes: Any) -> Calibration:
    fields: dict[str, Any] = {
        "ranks": 2, "threads": 1, "device": "cpu", "sweeps": 1, "cpu_clock": True, "shapes": SHAPES,
        "traffic": Traffic(sizes=(KIB, 64 * KIB), budget_s=0.01, beside_width=64, beside_bytes=64 * KIB),
        "pace": Pace(rest_s=0.0, burst_s=0.001, window_s=0.002, most_s=0.01),
        "command": "refshard calibrate", "when": "today",
    }  # fmt: skip
    return Calibration(**fields | changes)
