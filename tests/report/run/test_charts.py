"""Charts hold the views' numbers, can be told apart without colour, and come with a sentence each."""

import json
from dataclasses import replace

import msgspec
import plotly.graph_objects as go
import pytest

from refshard.analysis.cases import BREAKDOWN
from refshard.analysis.evidence import Setting, gather
from refshard.report.draw.palette import OKABE_ITO
from refshard.report.run import charts
from refshard.report.run.charts import difference, draw_losses, losses, losses_of, memory_over_step
from refshard.report.run.predictions import dry_runs_of
from tests.report.run.test_predictions import dry, measured
from tests.report.runs import CASES, HOSTILE, run, with_record

SETTING = gather(run()).settings[0]
TRAINING = gather(run()).trainings[0]
COMPETING = ["ddp", "fsdp2", "refshard-fsdp", "refshard-yafsdp"]


def drawn(setting: Setting) -> go.Figure:
    return charts.step_parts(
        {case: parts for case in setting.cases if case.ok and (parts := case.breakdown)}, BREAKDOWN
    )


def sentence(training: Setting) -> str:
    found = losses(training, "t")
    assert found is not None
    return found.chart.alternative


def test_bars_stand_under_the_heading_of_their_world_size() -> None:
    axis = drawn(SETTING).layout.yaxis
    rows = [text for _, text in sorted(zip(axis.tickvals, axis.ticktext))]
    assert rows == ["<b>1 rank</b>", "single", "<b>2 ranks</b>", *COMPETING]


def test_one_world_size_needs_no_heading() -> None:
    setting = gather(run(CASES[1:], failed=False)).settings[0]
    assert list(drawn(setting).layout.yaxis.ticktext) == COMPETING


def test_colour_is_never_the_only_difference() -> None:
    parts = [bar.marker for bar in drawn(SETTING).data]
    assert len({(marker.color, marker.pattern.shape) for marker in parts}) == len(parts)
    curves = draw_losses(TRAINING, losses_of(TRAINING)).data
    assert len({curve.marker.symbol for curve in curves}) == len(curves)


def test_a_strategy_keeps_its_colour_in_every_chart() -> None:
    curves = {curve.name: curve.line.color for curve in draw_losses(TRAINING, losses_of(TRAINING)).data}
    assert [curves[f"{name}, 2 ranks"] for name in COMPETING] == [charts.colour(SETTING, name) for name in COMPETING]
    assert {charts.colour(SETTING, name) for name in COMPETING} <= set(OKABE_ITO)


def test_parts_of_a_step_are_stacked() -> None:
    figure = drawn(SETTING)
    assert [trace.name for trace in figure.data] == list(BREAKDOWN)
    assert figure.layout.barmode == "stack"
    assert [trace.x[1] for trace in figure.data] == pytest.approx([29, 11, 9, 2])


def test_names_cannot_smuggle_markup_into_a_chart() -> None:
    """Plotly draws a subset of HTML, links included, in every label."""
    made = run([replace(CASES[1], strategy=f'<a href="x">{HOSTILE}</a>')], rounds=1, failed=False)
    setting, training = gather(made).settings[0], gather(made).trainings[0]
    curves = losses(training, "t")
    assert curves is not None
    for chart in (charts.breakdown_chart(setting, "s"), curves.chart):
        text = json.dumps(chart.figure)
        assert "&lt;a href" in text
        assert "<a" not in text
        assert "<script" not in text


def test_backgrounds_are_transparent() -> None:
    layout = drawn(SETTING).layout
    assert layout.template.layout.paper_bgcolor == layout.template.layout.plot_bgcolor == "rgba(0,0,0,0)"


def test_nothing_to_draw_draws_nothing() -> None:
    setting = gather(
        with_record(run(CASES[1:2], rounds=1, failed=False), 0, state="failed", metrics={}, losses=())
    ).settings[0]
    assert charts.breakdown_chart(setting, "s").alternative == "No case with communication has a traced step."
    assert losses(setting, "s") is None


def test_one_curve_in_a_sentence() -> None:
    (training,) = gather(run(CASES[:1], rounds=1, failed=False)).trainings
    assert sentence(training) == "The loss goes from 6.93 to 5.108 in 30 steps. All equal those of one unsharded rank. "


def test_the_largest_difference_of_two_curves() -> None:
    a, b = gather(run()).cases[:2]
    assert difference({a: [2.0, 1.0], b: [2.0, 1.5]}) == (
        "The largest difference between two curves is 50.0 % (single, 1 rank and ddp, 2 ranks, step 2)."
    )
    assert difference({a: [2.0], b: [2.0, 1.5]}) == "No two curves differ at any step."
    assert difference({a: [2.0]}) == ""


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
