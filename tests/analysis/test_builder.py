"""The reader against the builder: of a file whose every event is known, it makes the timeline that was written."""

from pathlib import Path
from typing import Any

import pytest

from refshard.analysis.analyse import analyse
from refshard.analysis.kineto import read_timeline
from refshard.events.timeline import UNKNOWN, Meaning, Spans
from tests.analysis.builder import BASE_NS, Training

PLANS = [Training(), Training(layers=1, steps=2, stretch=1), Training(layers=7, world_size=8, stretch=2, rs_wait=3)]


def rows(spans: Spans) -> list[tuple[Any, ...]]:
    """Every column by its meaning: codes are each side's own affair."""
    units = [None if unit == UNKNOWN else spans.unit_names[unit] for unit in spans.units]
    return [
        (
            spans.starts[i] - BASE_NS, spans.ends[i] - BASE_NS, spans.kinds[i], spans.lane_names[spans.lanes[i]],
            spans.name_table[spans.names[i]], spans.name_table[spans.operators[i]], spans.launches[i] - BASE_NS,
            spans.steps[i], units[i], Meaning(int(spans.under[i])),
        )
        for i in range(len(spans))
    ]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_the_reader_finds_all_that_was_written(tmp_path: Path, plan: Training) -> None:
    written = plan.trace(rank=1)
    expected, found = written.timeline(), read_timeline(written.write(tmp_path / "t.json"))
    assert found.rank == 1
    assert found.on_device
    wanted = [(*row[:8], row[8] if row[4] != "adam_kernel" else None, row[9]) for row in rows(expected.spans)]
    assert rows(found.spans) == wanted
    one_signature_each = {(a, b) for a, b in zip(expected.spans.signatures, found.spans.signatures)}
    assert len(one_signature_each) == len(set(expected.spans.signatures))
    assert sorted(found.labels, key=lambda x: x.start) == sorted(expected.labels, key=lambda x: x.start)
    size = f"0 [0-{plan.world_size - 1}]"
    assert [(c.op, c.bytes, c.step, c.unit, c.launched, c.start, c.end, c.lane, c.rows) for c in found.collectives] == [
        (c.op, c.bytes, c.step, c.unit, c.launched and c.launched - 1, c.start, c.end, c.lane, c.rows)
        for c in sorted(expected.collectives, key=lambda c: c.launched or 0)
    ]
    assert {(c.group, c.group_size, c.dtype, c.announced) for c in found.collectives} == {
        (size, plan.world_size, "Float", True)
    }


@pytest.mark.parametrize("plan", PLANS)
def test_figures_from_the_file_are_those_of_the_plan(tmp_path: Path, plan: Training) -> None:
    """The whole way: file, spans, classes, steps, figures. The effect planted is found with its size."""
    figures = analyse(plan.trace().write(tmp_path / "t.json")).figures
    assert figures.warnings == ()
    assert [step.step for step in figures.steps] == list(range(plan.steps))
    for number, step in enumerate(figures.steps):
        found = step.breakdown
        # The first step begins with its first kernel, the others where the one before ended.
        assert found.span_ns == plan.step_ns - (plan.delay + plan.tail if number == 0 else 0)
        assert found.idle_ns == plan.stall + (plan.delay + plan.tail if number else 0)
        assert found.idle_back_to_back_ns == plan.stall
        assert found.comm_ns == plan.layers * (plan.gather + plan.reduce)
        assert found.compute_ns == plan.layers * (plan.forward + plan.backward) + plan.optimizer
        assert found.exposed_ns == plan.gather + plan.reduce
        assert found.copy_ns == plan.layers * plan.copy
        assert found.prep_ns == 2 * plan.prep * (1 + plan.stretch * (plan.layers - 1))
        assert step.copies.copy_out_ns == plan.layers * plan.copy
        assert step.reduce_wait.count == 1
        assert step.reduce_wait.host_ns == plan.rs_wait
    lost = plan.steps * 2 * plan.prep * (plan.stretch - 1) * (plan.layers - 1)
    if plan.steps < 5:
        assert figures.giveway.index is None
        assert "ran undisturbed" in str(figures.giveway.reason)
    else:
        assert figures.giveway.lost_ns == lost
        assert figures.giveway.index == pytest.approx(lost / figures.whole.span_ns)
