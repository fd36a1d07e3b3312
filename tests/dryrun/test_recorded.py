"""Cases measured on real GPUs, and what their dry runs predict."""

import json
from pathlib import Path

import pytest

from refshard import resources
from refshard.dryrun.recorded import recorded_cases
from refshard.report.dryrun.validation import dryrun_validation_answer


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two launches of one case, of which one failed, and a case without a prediction."""
    folder = tmp_path / "profiles" / "recorded" / "gpu"
    folder.mkdir(parents=True)
    gib = 2**30
    rows = [
        {"name": "a", "peak": {"reserved": 4 * gib}, "step_s": 0.1},
        {"name": "a", "peak": {"reserved": 4 * gib}, "step_s": 0.3},
        {"name": "a", "error": "exit 1"},
        {"name": "b", "peak": {"reserved": gib}, "step_s": 0.1},
    ]
    predicted = [
        {"name": "a", "half": "held out", "peak": {"reserved": 5 * gib}, "step_s": 0.1},
        {"name": "b", "half": "fit", "peak": {"reserved": 0}, "step_s": None},
    ]
    for name, lines in (("cases-1", rows), ("predicted", predicted)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(resources, "root", lambda: tmp_path)
    return folder


@pytest.mark.usefixtures("machine")
def test_a_case_is_the_median_of_its_launches_beside_its_prediction() -> None:
    found = recorded_cases()
    assert [(one.machine, one.name, one.half, one.figure) for one in found] == [
        ("gpu", "a", "held out", "reserved"), ("gpu", "a", "held out", "step time"),
    ]  # fmt: skip
    assert [(one.measured, one.predicted) for one in found] == [(4.0, 5.0), (pytest.approx(0.2), 0.1)]
    assert [one.error for one in found] == pytest.approx([0.25, -0.5])


@pytest.mark.usefixtures("machine")
def test_they_are_a_kind_of_their_own() -> None:
    data = dryrun_validation_answer([], recorded_cases()).data
    assert data["verdict"] == [
        "measured on gpu, reserved memory: 1 figures, median error 25.00%, worst 25.00%",
        "measured on gpu, step time, held out: 1 figures, median error 50.00%, worst 50.00%",
    ]
    assert [(row["name"], row["figure"]) for row in data["recorded"]] == [("a", "reserved"), ("a", "step time")]
