"""Marks of units that a strategy does not make itself: forward, backward and recomputation in a trace."""

from pathlib import Path

import pytest
import torch

from refshard.analysis.kineto import read_timeline
from refshard.analysis.recording import WARMUP_STEPS, capture_steps
from refshard.engine.grouping import group_units
from refshard.events.timeline import Meaning, Timeline
from refshard.measure.trainer import mark_units
from refshard.models.activation import checkpoint_layers
from refshard.models.llama import Llama, initialise, next_token_loss
from refshard.specs.layers import checkpointing_of
from tests.events.spans import listed
from tests.models import small_spec

BLOCKS = tuple(f"model.layers.{i}" for i in range(3))
OUTSIDE = ("model.embed_tokens", "model.norm+lm_head")


def traced(path: Path, checkpointing: str, *, marked: bool) -> Timeline:
    model = Llama(small_spec())
    initialise(model, 0)
    checkpoint_layers(model, checkpointing_of(checkpointing, len(model.model.layers)))
    if marked:
        mark_units([(group.name, group.modules) for group in group_units(model, None)])
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(32).view(2, 16)
    with capture_steps(path, 1) as profiler:
        for _ in range(WARMUP_STEPS + 1):
            next_token_loss(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    return read_timeline(path)


def products(timeline: Timeline) -> dict[tuple[str | None, str], int]:
    """How many matrix products each unit has in each phase."""
    found: dict[tuple[str | None, str], int] = {}
    spans = timeline.spans
    for span, unit, under in zip(listed(spans), spans.units.tolist(), spans.under.tolist()):
        if span.name in ("aten::mm", "aten::linear"):
            phase = "backward" if under & Meaning.BACKWARD else "forward" if under & Meaning.FORWARD else ""
            key = spans.unit_names[unit] if unit >= 0 else None, phase
            found[key] = found.get(key, 0) + 1
    return found


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compute_belongs_to_the_unit_that_is_marked(tmp_path: Path, checkpointing: str) -> None:
    found = products(traced(tmp_path / "trace.json", checkpointing, marked=True))
    # Seven linears a block, each two products backward; recomputation repeats the former.
    again = 7 if checkpointing == "full" else 0
    for block in BLOCKS:
        assert found[block, "forward"] == 7
        assert found[block, "backward"] == 14 + again
    assert found["model.norm+lm_head", "forward"] == 1
    assert found["model.norm+lm_head", "backward"] == 2
    assert {unit for unit, _ in found} <= {*BLOCKS, *OUTSIDE}


def test_without_marks_nothing_belongs_to_a_unit(tmp_path: Path) -> None:
    assert {unit for unit, _ in products(traced(tmp_path / "trace.json", "none", marked=False))} == {None}
