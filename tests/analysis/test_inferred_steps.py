"""Steps that no ``ProfilerStep`` announces: traces made by hand, and a GPU's whose announcements are taken away."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refshard.analysis.analyse import analyse
from refshard.analysis.windows import inferred_steps, repeats_after
from refshard.events.reader import read_events
from tests.analysis.handmade import note, step, write
from tests.analysis.inference import kernel

US = 1000


def trained(steps: int, *, kernels: int = 10, first: int = 0, notes: bool = True) -> list[dict[str, Any]]:
    """Steps of 100 us: a kernel every 5 us from its start, two optimizers from 80 us on; the ``first`` kernels lack."""
    made: list[dict[str, Any]] = []
    for number in range(steps):
        start = 100.0 * number
        for place in range(first if number == 0 else 0, kernels):
            at = start + 5 * place
            made += kernel(len(made) + 1, at, at + 2, at + 5, f"layer{place}")
        if notes:
            made += [note("Optimizer.step#Muon.step", start + 80, 5), note("Optimizer.step#AdamW.step", start + 86, 5)]
        made += kernel(len(made) + 1, start + 87, start + 89, start + 93, "adam")
    return made


def steps_of(path: Path) -> list[tuple[int | None, int]]:
    return [(one.step, one.breakdown.span_ns // US) for one in analyse(path).figures.steps]


def test_steps_end_with_the_last_optimizer_of_each(tmp_path: Path) -> None:
    """The device's steps follow each other; each ends with its optimizer's kernel, 93 us after its start."""
    path = write(tmp_path / "t.json", trained(3))
    assert steps_of(path) == [(0, 91), (1, 100), (2, 100)]
    found = {one.code: one.message for one in analyse(path).figures.warnings}
    assert "no_steps" not in found
    assert "3 steps were found" in found["steps_inferred"]
    assert "each ends with Optimizer.step#Muon.step and Optimizer.step#AdamW.step" in found["steps_inferred"]


def test_a_step_that_began_before_the_trace_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", trained(3, first=6))
    assert steps_of(path) == [(0, 91), (1, 100)]
    assert "outside_steps" in {one.code for one in analyse(path).figures.warnings}


def test_announced_steps_come_first(tmp_path: Path) -> None:
    made = [*trained(2), step(7, 0, 200)]
    assert [number for number, _ in steps_of(write(tmp_path / "t.json", made))] == [7]


def test_zero_grad_begins_a_step(tmp_path: Path) -> None:
    made = trained(3, notes=False) + [note("Optimizer.zero_grad#SGD.zero_grad", 100 * n - 2, 1) for n in (1, 2)]
    path = write(tmp_path / "t.json", made)
    assert [number for number, _ in steps_of(path)] == [0, 1, 2]
    (told,) = [one.message for one in analyse(path).figures.warnings if one.code == "steps_inferred"]
    assert "each begins with Optimizer.zero_grad#SGD.zero_grad" in told


def test_kernels_that_repeat_are_steps(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", trained(3, kernels=14, notes=False))
    assert steps_of(path) == [(None, 291)]  # too short a sequence
    long = [one for n in range(3) for one in trained(1, kernels=120, notes=False)]
    for place, one in enumerate(long):
        one["args"]["correlation"] = place // 2 + 1
        one["ts"] = f"x+{5 * (place // 2) + (0 if one['cat'] == 'cuda_runtime' else 2)}"
        one["dur"] = 1 if one["cat"] == "cuda_runtime" else 3
    assert [number for number, _ in steps_of(write(path, long))] == [0, 1, 2]
    (told,) = [one.message for one in analyse(path).figures.warnings if one.code == "steps_inferred"]
    assert "a sequence of 121 kernels repeats on one stream" in told


@pytest.mark.parametrize(
    ("sequence", "period"),
    [
        ([*range(150)] * 3, 150),
        ([*range(150)] * 2, 150),
        ([*range(150)] * 3 + [*range(70)], 150),  # cut off
        ([7] * 1000, 0),
        ([*range(150)], 0),
        ([*[*range(120)] * 8, *[*range(200, 320)] * 8], 0),  # forward and backward of eight layers
        ([*[*range(120)] * 8, *[*range(200, 320)] * 8] * 3, 8 * 240),
    ],
)
def test_layers_are_no_steps(sequence: list[int], period: int) -> None:
    assert repeats_after(np.array(sequence, np.int32)) == period


def test_a_recorded_trace_keeps_its_steps_without_its_announcements() -> None:
    """DDP on an H200, and an emulated rank: cut to one step, in which nothing repeats."""
    for name in ("ddp", "emulated_fsdp2"):
        trace = read_events(Path(__file__).parent / "h200" / f"{name}.json.gz")
        hidden = replace(trace, names=tuple(name.replace("ProfilerStep", "step") for name in trace.names))
        assert inferred_steps(trace) is None
        assert inferred_steps(hidden) is None


def test_the_layers_of_one_forward_pass_are_no_steps() -> None:
    """36 layers of 14 kernels, as one prefill of SGLang has them in AMD-AGI/TraceLens, were taken as steps of 126."""
    names = [*range(100, 110), *(36 * list(range(14))), *range(110, 120)]
    assert repeats_after(np.array(names, np.int32)) == 0
    step = [*range(100, 110), *(9 * list(range(14))), *range(110, 120)]
    assert repeats_after(np.array(4 * step, np.int32)) == len(step)
