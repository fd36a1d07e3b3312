"""Time to compute the parameter layout of a 405B model on 16,384 ranks, and the op stream of one of its steps.

Each rank computes both once, before its first step. A model with eight times the layers shows how they grow.

    pytest suites/bench_layout.py --benchmark-json=layout.json
"""

import math
from collections import Counter
from functools import cache
from typing import Any

import msgspec
import pytest
import torch

from refshard.engine.grouping import group_units
from refshard.engine.layout import UnitLayout, lay_out
from refshard.engine.placement import MODES
from refshard.engine.schedule import Op, OpKind, UnitFacts, assign_rings, build, chain_markers
from refshard.models.llama import Llama
from refshard.specs.model import load_model

MODEL = load_model("llama3.1-405b")
RANKS = 16_384
LAYERS = (MODEL.n_layers, 8 * MODEL.n_layers)


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of a unit's parameters."""


@cache
def units(layers: int) -> list[Shapes]:
    """The units of the model with so many layers: all blocks are like the first one."""
    with torch.device("meta"):
        groups = group_units(Llama(msgspec.structs.replace(MODEL, n_layers=1)), None)
    embedding, block, head = (
        tuple((member.name, tuple(member.parameter.shape)) for member in group.parameters) for group in groups
    )
    return [embedding, *[block] * layers, head]


def laid_out(found: list[Shapes]) -> list[tuple[UnitLayout, list[tuple[int, int]]]]:
    """Each unit's layout, and what the last rank keeps of its parameters."""
    layouts = [lay_out(parameters, RANKS) for parameters in found]
    return [(layout, [layout.local_range(p, RANKS - 1) for p in layout.parameters]) for layout in layouts]


@pytest.mark.parametrize("layers", LAYERS)
def test_layout(benchmark: Any, layers: int) -> None:
    """Offsets, padding and one rank's part of every unit; ``extra_info`` has the share of padding."""
    found = benchmark(laid_out, units(layers))
    numel = sum(math.prod(shape) for unit in units(layers) for _, shape in unit)
    padded = sum(layout.numel for layout, _ in found)
    benchmark.extra_info.update(units=len(found), ranks=RANKS, parameters=numel, padding=padded / numel - 1)
    assert len(found) == layers + 2
    if layers == MODEL.n_layers:
        assert numel == MODEL.params
    assert numel <= padded < 1.001 * numel


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("mode", MODES)
def test_schedule(benchmark: Any, mode: str, layers: int) -> None:
    """The op stream of one step; ``extra_info`` counts its ops by kind."""
    facts = [
        UnitFacts(mode=MODES[mode], size_class=tuple(shape for _, shape in unit), read_in_backward=place > 0)
        for place, unit in enumerate(units(layers))
    ]

    def scheduled() -> tuple[Op, ...]:
        markers = chain_markers(len(facts))
        return build(markers, assign_rings(markers, facts), facts)

    ops = benchmark(scheduled)
    counts = Counter(op.kind for op in ops)
    benchmark.extra_info.update(units=len(facts), ops={str(kind): count for kind, count in counts.items()})
    assert counts[OpKind.REDUCE] == counts[OpKind.FINISH] == len(facts)
    assert counts[OpKind.GATHER] == counts[OpKind.WAIT] >= len(facts)
