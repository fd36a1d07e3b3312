"""The kit for ten minutes on a GPU: its cases, and the page that sets predictions beside what an H200 measured."""

import json
from pathlib import Path
from statistics import median

import pytest

from tests.gpu.quick.cases import Case, compare, in_turns, read_cases
from validation.dry_runs import RecordedCase, recorded_cases

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "profiles" / "recorded" / "h200"
PAGE = ROOT / "docs" / "explanation" / "gpu-validation.md"
RUNS = {1: "predicted-first", 2: "predicted-hgx-h200", 3: "predicted-hgx-h200"}


def table(run: int) -> list[str]:
    return list(compare(RECORDED / f"{RUNS[run]}.jsonl", RECORDED / f"cases-{run}.jsonl"))


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


@pytest.mark.parametrize("run", RUNS)
def test_the_page_has_each_launch_beside_its_prediction(run: int) -> None:
    assert "\n".join(table(run)) in PAGE.read_text()


def test_the_page_counts_launches_as_the_records_have_them() -> None:
    def counts(*runs: int) -> tuple[int, int, int]:
        reserved = [row.split(" | ")[4] for run in runs for row in table(run)[2:]]
        known = [0.0 if cell == "equal" else float(cell.split()[0]) for cell in reserved if cell != "refused"]
        return len(known), known.count(0.0), sum(abs(error) < 0.2 for error in known)

    rows = zip(
        ("launches with a prediction", "peak of reserved memory equal to the byte", "within 0.2 %"),
        counts(1),
        counts(2, 3),
    )
    for name, first, later in rows:
        assert f"| {name} | {first} | {later} |" in PAGE.read_text()


def errors(figure: str, half: str = "", *, narrow: bool = True) -> list[float]:
    found = [one for one in recorded_cases() if one.figure == figure and half in ("", one.half)]
    return [abs(one.error) for one in found if narrow or not one.name.startswith("narrow")]


def spread(values: list[float], digits: int) -> str:
    return f"{median(values):.{digits}%} in the median, {max(values):.{digits}%} at worst".replace("%", " %")


def test_the_page_sums_up_the_cases_as_predicted_now() -> None:
    memory, page = errors("reserved"), PAGE.read_text()
    assert f"| {len(memory)} cases | equal to the byte {memory.count(0.0)} |" in page
    for name, narrow in (("all", True), ("without `narrow-`", False)):
        fit, held = (spread(errors("step time", half, narrow=narrow), 1) for half in ("fit", "held out"))
        assert f"| step time, {name} | {fit} | {held} |" in page


def test_the_page_has_each_case_as_predicted_now() -> None:
    lines = []
    by_name: dict[str, dict[str, RecordedCase]] = {}
    for one in recorded_cases():
        by_name.setdefault(one.name, {})[one.figure] = one
    for name, figures in by_name.items():
        memory, time = figures["reserved"], figures["step time"]
        told = "equal" if memory.predicted == memory.measured else f"{100 * memory.error:+.3f} %"
        lines.append(
            f"| {name} | {memory.measured:.3f} | {told} | {1e3 * time.measured:.1f} | {100 * time.error:+.0f} % | "
            f"{time.half} |"
        )
    assert "\n".join(lines) in PAGE.read_text()
