"""The guided tour through the engine shows what the schedule does, and leads to what exists."""

import importlib
import re
from pathlib import Path

from refshard.plan.placement import find_mode
from refshard.plan.schedule import Op, OpKind, UnitFacts, assign_slots, build, chain_markers

TOUR = (Path(__file__).parents[1] / "docs" / "explanation" / "engine.md").read_text()
NAMES = ["embed", "b1", "b2", "b3", "b4", "head"]


def ring_over_time() -> str:
    """What each slot of the rings holds as each unit's computation ends: a column a computation, a row a slot.

    ``*`` is computed with, ``+`` is being gathered or reduced.
    """
    mode = find_mode("yafsdp")
    facts = [UnitFacts("embed", read_in_backward=False), *[UnitFacts("block")] * 4, UnitFacts("head")]
    markers = chain_markers(len(facts))
    slots = assign_slots(markers, facts, mode)
    rows: dict[tuple[str, int], list[str]] = {(role, i): [] for role in ("parameters", "gradients") for i in (0, 1)}
    held: dict[tuple[str, int], str] = {}
    columns = []
    for op in build(markers, slots, mode, facts):
        if op.kind is OpKind.END:
            columns.append(NAMES[op.unit])
        if op.unit in slots.parameters:
            parameters = ("parameters", slots.parameters[op.unit][1])
            gradients = ("gradients", slots.gradients[op.unit][1])
            _change(held, op, parameters, gradients)
        if op.kind is OpKind.END:
            for key, row in rows.items():
                mine = held.get(key, "")
                computing = mine == NAMES[op.unit] and (key[0] == "parameters" or op.phase == "backward")
                row.append(mine + "*" * computing)
    half = len(NAMES)
    labelled = [("computes", columns), *((f"{role} {place}", row) for (role, place), row in rows.items())]
    return "\n".join(
        f"{label:<13}{''.join(f'{c:<6}' for c in cells[:half])}| {''.join(f'{c:<6}' for c in cells[half:])}".rstrip()
        for label, cells in labelled
    )


def _change(held: dict[tuple[str, int], str], op: Op, parameters: tuple[str, int], gradients: tuple[str, int]) -> None:
    match op.kind:
        case OpKind.GATHER:
            held[parameters] = f"{NAMES[op.unit]}+"
        case OpKind.WAIT:
            held[parameters] = NAMES[op.unit]
        case OpKind.RELEASE:
            del held[parameters]
        case OpKind.BEGIN if op.phase == "backward":
            held[gradients] = NAMES[op.unit]
        case OpKind.REDUCE:
            held[gradients] = f"{NAMES[op.unit]}+"
        case OpKind.FINISH:
            del held[gradients]


def test_the_diagram_of_the_ring_is_the_schedules() -> None:
    diagram = ring_over_time()
    assert diagram in TOUR, f"docs/explanation/engine.md should show:\n{diagram}"


def test_every_function_that_the_tour_names_exists() -> None:
    named = re.findall(r"`(\w+)\.py`, `([\w.]+)`", TOUR)
    assert len(named) > 10
    for module, path in named:
        room = "plan" if module in ("placement", "layout", "schedule") else "engine"
        found: object = importlib.import_module(f"refshard.{room}.{module}")
        for part in path.split("."):
            found = getattr(found, part)


def test_every_trap_names_a_test_that_exists() -> None:
    traps = re.findall(r"\]\((?:\.\./)+(tests/[\w/]+\.py)\) `(test_\w+)` \|", TOUR)
    assert len(traps) == 14
    for path, name in traps:
        assert f"def {name}(" in (Path(__file__).parents[1] / path).read_text(), f"{path} has no {name}"
