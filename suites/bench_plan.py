"""What plans cost: where the parameters of a 405B model lie on 16,384 ranks, and the op stream of a step over it.

Both are pure arithmetic, done once by each rank before its first step; eight times as many layers show how they grow.

    pytest suites/bench_plan.py --benchmark-json=plan.json
"""

from collections import Counter
from typing import Any

import msgspec
import pytest

from refshard.engine.layout import UnitLayout, lay_out
from refshard.engine.placement import MODES
from refshard.engine.schedule import Op, OpKind, assign_rings, build, chain_markers
from refshard.estimate.units import ModelUnit, model_units
from refshard.specs.model import load_model

MODEL = load_model("llama3.1-405b")
RANKS = 16_384
LAYERS = (MODEL.n_layers, 8 * MODEL.n_layers)


def laid_out(units: tuple[ModelUnit, ...]) -> list[tuple[UnitLayout, list[tuple[int, int]]]]:
    """Each unit's layout, and what the last rank keeps of its parameters."""
    layouts = [lay_out(unit.name, unit.parameters, RANKS) for unit in units]
    return [(layout, [layout.local_range(p, RANKS - 1) for p in layout.parameters]) for layout in layouts]


@pytest.mark.parametrize("layers", LAYERS)
def test_layout(benchmark: Any, layers: int) -> None:
    """Offsets, padding and one rank's part of every unit; ``extra_info`` has the share of padding."""
    units = model_units(msgspec.structs.replace(MODEL, n_layers=layers), "ends")
    found = benchmark(laid_out, units)
    numel, padded = sum(unit.numel for unit in units), sum(layout.numel for layout, _ in found)
    benchmark.extra_info.update(units=len(units), ranks=RANKS, parameters=numel, padding=padded / numel - 1)
    assert len(found) == layers + 2
    if layers == MODEL.n_layers:
        assert numel == MODEL.params
    assert numel <= padded < 1.001 * numel


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("mode", MODES)
def test_schedule(benchmark: Any, mode: str, layers: int) -> None:
    """The op stream of one step; ``extra_info`` counts its ops by kind."""
    units = model_units(msgspec.structs.replace(MODEL, n_layers=layers), "ends")
    facts = [unit.facts for unit in units]

    def scheduled() -> tuple[Op, ...]:
        markers = chain_markers(len(units))
        return build(markers, assign_rings(markers, facts, MODES[mode]), MODES[mode], facts)

    ops = benchmark(scheduled)
    counts = Counter(op.kind for op in ops)
    benchmark.extra_info.update(units=len(units), ops={str(kind): count for kind, count in counts.items()})
    assert counts[OpKind.REDUCE] == counts[OpKind.FINISH] == len(units)
    assert counts[OpKind.GATHER] == counts[OpKind.WAIT] >= len(units)
