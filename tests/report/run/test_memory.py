"""Memory over a step, with dry runs beside what was measured."""

import msgspec
import pytest

from refshard.analysis.evidence import gather
from refshard.report.run.charts import memory_over_step
from refshard.report.run.predictions import dry_runs_of
from tests.report.run.test_dry_runs_beside import dry, measured
from tests.report.runs import CASES, run, with_record


def test_each_case_has_its_recorded_course_in_its_colour() -> None:
    found = memory_over_step(gather(run(CASES[1:], rounds=1, failed=False)).settings[0], "s", {})
    assert found is not None
    curves = found.figure["data"]
    assert [curve["name"] for curve in curves] == [case.strategy for case in CASES[1:]]
    for curve, case in zip(curves, CASES[1:]):
        assert (curve["x"], max(curve["y"])) == ([0, 50, 100], case.peak_mib)
        assert (curve["line"]["dash"], curve["showlegend"]) == ("solid", True)
    assert len({curve["line"]["color"] for curve in curves}) == len(curves)
    assert found.alternative == (
        "Rank 0 of 2 ranks: ddp peaks at 440 MiB; fsdp2 peaks at 300 MiB; refshard-fsdp peaks at 280 MiB; "
        "refshard-yafsdp peaks at 240 MiB."
    )


@pytest.mark.parametrize("on_gpus", [False, True])
def test_the_dry_run_of_a_measured_case_is_dotted_beside_it(on_gpus: bool) -> None:
    """Where the measurement has no course, as on a GPU, the prediction stands alone."""
    predicted, made = dry(), measured()
    if on_gpus:
        bare = tuple(msgspec.structs.replace(record, memory_course_bytes=()) for record in made.launches)
        made = msgspec.structs.replace(made, launches=bare)
    evidence = gather(predicted, made)
    setting = next(setting for setting in evidence.settings if setting.cases[0].fidelity == "measured")
    found = memory_over_step(setting, "s", dry_runs_of(evidence))
    assert found is not None
    curves = [curve for curve in found.figure["data"] if curve["name"] == "fsdp2"]
    assert [curve["line"]["dash"] for curve in curves] == (["dot"] if on_gpus else ["solid", "dot"])
    assert [curve["showlegend"] for curve in curves] == ([True] if on_gpus else [True, False])
    assert "fsdp2, dry run" in curves[-1]["hovertemplate"]
    own = "" if on_gpus else "300 MiB, "
    assert f"fsdp2 peaks at {own}300 MiB in its dry run" in found.alternative
    assert found.alternative.endswith("Dotted: dry runs.")


def test_without_a_recorded_course_there_is_no_chart() -> None:
    made = with_record(run(CASES[1:2], rounds=1, failed=False), 0, memory_course_bytes=())
    assert memory_over_step(gather(made).settings[0], "s", {}) is None
