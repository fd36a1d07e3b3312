"""Charts hold the views' numbers, can be told apart without colour, and come with a sentence each."""

import json
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from refshard.analysis.cases import BREAKDOWN
from refshard.analysis.evidence import Setting, gather
from refshard.records import Run
from refshard.report.draw.charts import Chart
from refshard.report.draw.palette import OKABE_ITO
from refshard.report.run import charts
from refshard.report.run.charts import losses, memory_over_step
from refshard.report.run.predictions import dry_runs_of
from tests.report.run.test_predictions import dry, measured
from tests.report.runs import CASES, HOSTILE, run, with_record

SETTING = gather(run()).settings[0]
COMPETING = ["ddp", "fsdp2", "refshard-fsdp", "refshard-yafsdp"]


def drawn(setting: Setting) -> go.Figure:
    figure = charts.breakdown_chart(setting, "s").figure
    return go.Figure(data=figure["data"], layout=figure["layout"])


def curves(made: Run) -> Chart:
    found = losses(gather(made).trainings[0], "t")
    assert found is not None
    return found.chart


def test_bars_are_under_the_heading_of_their_world_size_if_there_are_several() -> None:
    axis = drawn(SETTING).layout.yaxis
    rows = [text for _, text in sorted(zip(axis.tickvals, axis.ticktext))]
    assert rows == ["<b>1 rank</b>", "single", "<b>2 ranks</b>", *COMPETING]
    one = drawn(gather(run(CASES[1:], failed=False)).settings[0])
    assert list(one.layout.yaxis.ticktext) == COMPETING


def test_colour_is_never_the_only_difference_and_is_the_same_in_every_chart() -> None:
    parts = [bar.marker for bar in drawn(SETTING).data]
    assert len({(marker.color, marker.pattern.shape) for marker in parts}) == len(parts)
    lines = {curve["name"]: curve for curve in curves(run()).figure["data"]}
    assert len({curve["marker"]["symbol"] for curve in lines.values()}) == len(lines)
    colours = [charts.colour(SETTING, name) for name in COMPETING]
    assert [lines[f"{name}, 2 ranks"]["line"]["color"] for name in COMPETING] == colours
    assert set(colours) <= set(OKABE_ITO)


def test_parts_of_a_step_are_stacked() -> None:
    figure = drawn(SETTING)
    assert [trace.name for trace in figure.data] == list(BREAKDOWN)
    assert figure.layout.barmode == "stack"
    assert [trace.x[1] for trace in figure.data] == pytest.approx([29, 11, 9, 2])


def test_names_cannot_smuggle_markup_into_a_chart() -> None:
    """Plotly draws a subset of HTML, links included, in every label."""
    made = run([replace(CASES[1], strategy=f'<a href="x">{HOSTILE}</a>')], rounds=1, failed=False)
    for chart in (charts.breakdown_chart(gather(made).settings[0], "s"), curves(made)):
        text = json.dumps(chart.figure)
        assert "&lt;a href" in text
        assert "<a" not in text
        assert "<script" not in text


def test_nothing_to_draw_draws_nothing() -> None:
    made = with_record(run(CASES[1:2], rounds=1, failed=False), 0, state="failed", metrics={}, losses=())
    setting = gather(made).settings[0]
    assert charts.breakdown_chart(setting, "s").alternative == "No case with communication has a traced step."
    assert losses(setting, "s") is None


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ((2.0, 1.0), (2.0, 1.5), "2 loss curves go from 2 to 1 to 1.5 in 2 steps. The largest difference between two "
         "curves is 50.0 % (single, 1 rank and ddp, 2 ranks, step 2)."),
        ((2.0,), (2.0, 1.5), "2 loss curves go from 2 to 1.5 in 2 steps. No two curves differ at any step."),
        ((2.0, 1.0), None, "The loss goes from 2 to 1 in 2 steps."),
        ((float("nan"), 1.0), None, "The loss goes from 1 to 1 in 2 steps."),
        ((float("nan"),), None, "The loss goes from nan to nan in 1 steps."),
    ],
)  # fmt: skip
def test_losses_in_a_sentence(a: tuple[float, ...], b: tuple[float, ...] | None, text: str) -> None:
    made = with_record(run(CASES[: 1 + bool(b)], rounds=1, failed=False), 0, losses=a)
    assert curves(with_record(made, 1, losses=b) if b else made).alternative == text


def test_of_many_curves_those_furthest_from_the_reference_are_drawn() -> None:
    made = run([replace(CASES[2 * (n > 0)], strategy=f"s{n}" if n else "single") for n in range(10)], failed=False)
    for place in range(10):
        made = with_record(made, place, losses=(1.0 + (0.1 * place if place else 0),))
    found = curves(made)
    assert [curve["name"].partition(",")[0] for curve in found.figure["data"]] == [
        "single", *(f"s{n}" for n in range(9, 2, -1)),
    ]  # fmt: skip
    assert found.alternative.endswith("The chart shows single, 1 rank and the 7 curves furthest from it.")


def test_each_case_has_its_recorded_course_in_its_colour() -> None:
    found = memory_over_step(gather(run(CASES[1:], rounds=1, failed=False)).settings[0], "s", {})
    assert found is not None
    lines = found.figure["data"]
    assert [curve["name"] for curve in lines] == [case.strategy for case in CASES[1:]]
    for curve, case in zip(lines, CASES[1:]):
        assert (curve["x"], max(curve["y"])) == ([0, 50, 100], case.peak_mib)
        assert (curve["line"]["dash"], curve["showlegend"]) == ("solid", True)
    assert len({curve["line"]["color"] for curve in lines}) == len(lines)
    assert found.alternative == (
        "Rank 0 of 2 ranks: ddp peaks at 440 MiB; fsdp2 peaks at 300 MiB; refshard-fsdp peaks at 280 MiB; "
        "refshard-yafsdp peaks at 240 MiB."
    )


@pytest.mark.parametrize("on_gpus", [False, True])
def test_the_dry_run_of_a_measured_case_is_dotted(on_gpus: bool) -> None:
    """If the measurement has no course, as on a GPU, only the prediction is drawn."""
    made = measured()
    for place in range(len(made.launches) if on_gpus else 0):
        made = with_record(made, place, memory_course_bytes=())
    evidence = gather(dry(), made)
    setting = next(setting for setting in evidence.settings if setting.cases[0].fidelity == "measured")
    found = memory_over_step(setting, "s", dry_runs_of(evidence))
    assert found is not None
    shown = [curve for curve in found.figure["data"] if curve["name"] == "fsdp2"]
    assert [curve["line"]["dash"] for curve in shown] == (["dot"] if on_gpus else ["solid", "dot"])
    assert [curve["showlegend"] for curve in shown] == ([True] if on_gpus else [True, False])
    assert "fsdp2, dry run" in shown[-1]["hovertemplate"]
    assert f"fsdp2 peaks at {'' if on_gpus else '300 MiB, '}300 MiB in its dry run" in found.alternative
    assert found.alternative.endswith("Dotted: dry runs.")


def test_without_a_recorded_course_there_is_no_chart() -> None:
    made = with_record(run(CASES[1:2], rounds=1, failed=False), 0, memory_course_bytes=())
    assert memory_over_step(gather(made).settings[0], "s", {}) is None
