"""The kit for ten minutes on a GPU: its cases, and predictions beside what was measured."""

import json
from pathlib import Path

from tests.gpu.quick.cases import Case, compare, in_turns, read_cases


def test_cases_have_names_of_their_own_and_known_worlds() -> None:
    cases = read_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert {case.world_size for case in cases} == {1, 8, 16, 64}


def test_a_rehearsal_keeps_all_but_size_length_and_compilation() -> None:
    arguments = ("--size", "8b", "--mode", "fsdp2", "--world", "8", "--seq-len", "8192", "--compile", "--steps", "6")
    smaller = Case(name="", launches=1, allocator="", arguments=arguments).smaller()
    expected = "--seq-len 64 --size tiny --mode fsdp2 --world 8 --seq-len 64 --steps 4"
    assert " ".join(smaller.arguments) == expected


def test_second_launches_follow_all_first_ones() -> None:
    once, twice = (Case(name=n, launches=len(n), allocator="", arguments=()) for n in ("x", "xx"))
    assert [(number, case.name) for number, case in in_turns([twice, once])] == [(0, "xx"), (0, "x"), (1, "xx")]


def test_a_comparison_tells_equal_near_refused_and_failed(tmp_path: Path) -> None:
    measured = [
        {"name": "a", "peak": {"allocated": 2**30, "reserved": 2**31}, "step_s": 0.1},
        {"name": "b", "peak": {"allocated": 2**30, "reserved": 2**31}, "step_s": 0.1},
        {"name": "c", "error": "exit 1"},
    ]
    predicted = [
        {"name": "a", "peak": {"allocated": 2**30, "reserved": 2**30}, "step_s": 0.12},
        {"name": "b", "peak": {"allocated": 0, "reserved": 0}, "step_s": None},
    ]
    for name, rows in (("measured", measured), ("predicted", predicted)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(compare(tmp_path / "predicted", tmp_path / "measured"))[2:] == [
        "| a | 1.000 | equal | 2.000 | -50.000 % | 100.0 | +20 % |",
        "| b | 1.000 | refused | 2.000 | refused | 100.0 | refused |",
        "| c | exit 1 | | | | | |",
    ]
