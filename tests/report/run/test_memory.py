"""Predicted memory beside what was measured."""

from dataclasses import replace

import pytest

from refshard.analysis.evidence import Setting, gather
from refshard.quantities import GIB, MIB
from refshard.report.run.memory import Memory, forecast, memory
from tests.report.runs import CASES, run, spec, with_record


def of(setting: Setting) -> Memory:
    found = memory(setting, "s")
    assert found is not None
    return found


def test_every_case_that_the_model_knows_has_its_parts_and_its_mark() -> None:
    found = of(gather(run(failed=False)).settings[0])
    *parts, measured = found.parts.figure["data"]
    assert [part["name"] for part in parts][:3] == ["parameters", "optimizer", "gradients"]
    assert measured["x"] == pytest.approx([peak / 1024 for peak in (420, 440, 300, 280, 240)], rel=1e-4)
    assert measured["y"] == parts[0]["y"] == [1, 3, 4, 5, 6], "under the headings of their world sizes"
    ddp = forecast(spec("ddp"), "cpu")
    assert ddp is not None
    assert sum(part["x"][1] for part in parts) == pytest.approx(ddp.peak / GIB, rel=1e-4)
    assert found.table.iloc[1]["predicted / measured"] == f"{ddp.peak / 440 / MIB:.3f}"


def test_the_sentence_names_the_furthest_and_the_largest_part() -> None:
    told = of(gather(run(failed=False)).settings[0]).parts.alternative
    assert "most at the highest predicted peak (single)" in told
    assert "Predictions differ from the measurement by at most " in told


def test_simulated_cases_have_no_measured_mark() -> None:
    found = of(gather(run(CASES[1:3], rounds=1, failed=False, fidelity="simulated")).settings[0])
    assert found.parts.figure["data"][-1]["x"] == []
    assert "measured" not in found.parts.alternative
    assert not [column for column in found.table.columns if "/" in column], "a prediction over another is no proof"


def test_the_curves_over_a_step_reach_the_predicted_peak() -> None:
    found = of(gather(run(failed=False)).settings[0])
    curves = found.steps.figure["data"]
    assert [curve["name"] for curve in curves] == [case.strategy for case in CASES[1:]]
    for curve, case in zip(curves, CASES[1:]):
        told = forecast(spec(case.strategy), "cpu")
        assert told is not None
        assert max(curve["y"]) == pytest.approx(told.peak / MIB, rel=1e-4)
        assert (curve["x"][0], curve["x"][-1]) == (0, 100)


def test_a_measured_course_is_dotted_beside_the_predicted_one() -> None:
    made = with_record(run(rounds=1, failed=False), 1, memory_course_bytes=(100 * MIB, 400 * MIB, 200 * MIB))
    found = of(gather(made).settings[0])
    predicted, measured = found.steps.figure["data"][:2]
    assert ("ddp, predicted" in predicted["hovertemplate"], "ddp, measured" in measured["hovertemplate"]) == (
        True,
        True,
    )
    assert not measured["showlegend"]
    assert (measured["x"], measured["y"]) == ([0, 50, 100], [100, 400, 200])
    assert (predicted["line"]["dash"], measured["line"]["dash"]) == ("solid", "dot")
    assert predicted["line"]["color"] == measured["line"]["color"]
    assert found.steps.alternative.endswith(" Dotted: rank 0, measured (1 of 4).")


def test_what_the_model_does_not_know_is_left_out() -> None:
    strange = [replace(CASES[1], strategy="a-strategy-of-tomorrow")]
    assert memory(gather(run(strange, rounds=1, failed=False)).settings[0], "s") is None
