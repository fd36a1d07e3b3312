"""The guided tour through the engine shows what the schedule does, and leads to what exists."""

import importlib
import re
from pathlib import Path

from refshard.engine.arena import plan_arena
from refshard.engine.placement import find_mode
from refshard.engine.schedule import OpKind, UnitFacts, assign_rings, build, chain_markers

TOUR = (Path(__file__).parents[1] / "docs" / "explanation" / "engine.md").read_text()
KIB = 1024
NAMES = ["embed", "b1", "b2", "b3", "b4", "head"]


def columns_over_time() -> str:
    """What each column holds while each unit computes, before anything is awaited: a row a column.

    ``*`` is computed with, ``+`` is being gathered or reduced; gradients have a ``d`` before the unit's name.
    """
    mode = find_mode("yafsdp")
    embed, block, head = (
        UnitFacts(mode, name, read_in_backward=name != "embed") for name in ("embed", "block", "head")
    )
    facts = [embed, *[block] * 4, head]
    markers = chain_markers(len(facts))
    rings = assign_rings(markers, facts)
    stream = build(markers, rings, facts)
    sizes = dict(enumerate([3 * KIB, *[2 * KIB] * 4, 3 * KIB]))
    arena = plan_arena([stream], rings, sizes, sizes, mixed=True)
    place = {("parameters", unit): i for i, column in enumerate(arena.columns) for unit in column.parameters}
    place |= {("gradients", unit): i for i, column in enumerate(arena.columns) for unit in column.gradients}
    held: dict[int, str] = {}
    rows: list[list[str]] = [[] for _ in arena.columns]
    computes = []
    computing = ""
    for op in stream:
        name = NAMES[op.unit]
        if op.kind is OpKind.BEGIN:
            computing = name
        elif computing and op.kind in (OpKind.FINISH, OpKind.END):
            computes.append(computing)
            for index, row in enumerate(rows):
                row.append(held.get(index, "") + "*" * (held.get(index) == computing))
            computing = ""
        match op.kind:
            case OpKind.GATHER:
                held[place["parameters", op.unit]] = f"{name}+"
            case OpKind.WAIT:
                held[place["parameters", op.unit]] = name
            case OpKind.RELEASE:
                del held[place["parameters", op.unit]]
            case OpKind.REDUCE:
                held[place["gradients", op.unit]] = f"d{name}+"
            case OpKind.FINISH:
                del held[place["gradients", op.unit]]
    half = len(NAMES)
    labelled = [("computes", computes), *((f"column {i}", row) for i, row in enumerate(rows))]
    return "\n".join(
        f"{label:<10}{''.join(f'{c:<7}' for c in cells[:half])}| {''.join(f'{c:<7}' for c in cells[half:])}".rstrip()
        for label, cells in labelled
    )


def test_the_diagram_of_the_columns_is_the_plans() -> None:
    diagram = columns_over_time()
    assert diagram in TOUR, f"docs/explanation/engine.md should show:\n{diagram}"


def test_every_function_that_the_tour_names_exists() -> None:
    named = re.findall(r"`(\w+)\.py`, `([\w.]+)`", TOUR)
    assert len(named) > 10
    for module, path in named:
        found: object = importlib.import_module(f"refshard.engine.{module}")
        for part in path.split("."):
            found = getattr(found, part)


def test_every_trap_names_a_test_that_exists() -> None:
    traps = re.findall(r"\]\((?:\.\./)+(tests/[\w/]+\.py)\) `(test_\w+)` \|", TOUR)
    assert len(traps) == 14
    for path, name in traps:
        assert f"def {name}(" in (Path(__file__).parents[1] / path).read_text(), f"{path} has no {name}"
