"""Charts hold the views' numbers, can be told apart without colour, and come with a sentence each."""

import json
from dataclasses import replace

import msgspec
import pytest

from refshard.analysis.cases import BREAKDOWN
from refshard.analysis.evidence import gather
from refshard.report.draw.palette import OKABE_ITO
from refshard.report.run import alternatives, charts, views
from refshard.report.run.losses import draw, losses
from tests.report.runs import CASES, HOSTILE, run, with_record

SETTING = gather(run()).settings[0]
TRAINING = gather(run()).trainings[0]
COMPETING = ["ddp", "fsdp2", "refshard-fsdp", "refshard-yafsdp"]


def test_step_times_are_bars_with_their_intervals() -> None:
    *bars, text = charts.step_time(SETTING).data
    assert [bar.x[0] for bar in bars] == pytest.approx([80, 50, 60, 48, 40], rel=1e-4)
    assert all(0 < bar.error_x.array[0] < 0.1 * bar.x[0] and bar.error_x.visible for bar in bars)
    assert [label.strip() for label in text.text] == ["80.0 ms", "50.0 ms", "60.0 ms", "48.0 ms", "40.0 ms"]


def test_two_launches_have_no_error_bars() -> None:
    setting = gather(run(rounds=2, failed=False)).settings[0]
    *bars, _ = charts.step_time(setting).data
    assert [(bar.error_x.array[0], bar.error_x.arrayminus[0]) for bar in bars] == [(0, 0)] * 5


def test_bars_stand_under_the_heading_of_their_world_size() -> None:
    axis = charts.step_time(SETTING).layout.yaxis
    rows = [text for _, text in sorted(zip(axis.tickvals, axis.ticktext))]
    assert rows == ["<b>1 rank</b>", "single", "<b>2 ranks</b>", *COMPETING]


def test_memory_is_drawn_in_the_unit_of_the_largest() -> None:
    figure = charts.peak_memory(SETTING)
    assert [bar.x[0] for bar in figure.data[:-1]] == [420, 440, 300, 280, 240]
    assert figure.layout.xaxis.title.text == "MiB per rank (lower is better)"


def test_a_step_without_interval_has_no_error_bar() -> None:
    made = with_record(run(CASES[1:2], rounds=1, failed=False), 0, step_times_s=((0.5,),))
    bar, _ = charts.step_time(gather(made).settings[0]).data
    assert not bar.error_x.visible


def test_colour_is_never_the_only_difference() -> None:
    markers = [bar.marker for bar in charts.throughput(SETTING).data[1:-1]]
    assert len({marker.color for marker in markers}) == len(markers)
    assert len({marker.pattern.shape for marker in markers}) == len(markers)
    curves = draw(TRAINING, views.losses(TRAINING)).data
    assert len({curve.marker.symbol for curve in curves}) == len(curves)
    assert {marker.color for marker in markers} <= set(OKABE_ITO)


def test_a_strategy_keeps_its_colour_in_every_chart() -> None:
    bars = charts.throughput(SETTING).data[:-1]
    curves = {curve.name: curve.line.color for curve in draw(TRAINING, views.losses(TRAINING)).data}
    assert [curves[f"{name}, 2 ranks"] for name in COMPETING] == [bar.marker.color for bar in bars[1:]]


def test_parts_of_a_step_are_stacked() -> None:
    figure = charts.breakdown(SETTING)
    assert [trace.name for trace in figure.data] == list(BREAKDOWN)
    assert figure.layout.barmode == "stack"
    assert [trace.x[1] for trace in figure.data] == pytest.approx([29, 11, 9, 2])


def test_names_cannot_smuggle_markup_into_a_chart() -> None:
    """Plotly draws a subset of HTML, links included, in every label."""
    made = run([replace(CASES[1], strategy=f'<a href="x">{HOSTILE}</a>')], rounds=1, failed=False)
    setting, training = gather(made).settings[0], gather(made).trainings[0]
    drawn = [*charts.bar_charts(setting, "s").values(), charts.breakdown_chart(setting, "s")]
    curves = losses(training, "t")
    assert curves is not None
    for chart in [*drawn, curves.chart]:
        text = json.dumps(chart.figure)
        assert "&lt;a href" in text
        assert "<a" not in text
        assert "<script" not in text


def test_backgrounds_are_transparent() -> None:
    layout = charts.step_time(SETTING).layout
    assert layout.template.layout.paper_bgcolor == layout.template.layout.plot_bgcolor == "rgba(0,0,0,0)"


def test_nothing_to_draw_draws_nothing() -> None:
    setting = gather(
        with_record(run(CASES[1:2], rounds=1, failed=False), 0, state="failed", metrics={}, losses=())
    ).settings[0]
    for chart in charts.bar_charts(setting, "s").values():
        assert "No case has" in chart.alternative
    assert charts.breakdown_chart(setting, "s").alternative == "No case with communication has a traced step."
    assert losses(setting, "s") is None


@pytest.mark.parametrize(
    ("metric", "sentence"),
    [
        (
            "step_time_s",
            "Step time. On 1 rank: 80.0 ms (single). On 2 ranks: from 40.0 ms (refshard-yafsdp) to 60.0 ms (fsdp2).",
        ),
        (
            "tokens_per_s_gpu",
            "Tokens/s/GPU. On 1 rank: 25,600 (single). On 2 ranks: from 25,600 (refshard-yafsdp) to 17,067 (fsdp2).",
        ),
    ],
)
def test_bars_in_a_sentence(metric: str, sentence: str) -> None:
    assert alternatives.bars(SETTING, metric) == sentence


def test_equal_bars_in_a_sentence() -> None:
    made = run([replace(case, peak_mib=300) for case in CASES[1:3]], rounds=1, failed=False)
    told = alternatives.bars(gather(made).settings[0], "peak_memory_bytes")
    assert told == "Peak memory. On 2 ranks: 300 MiB for every strategy."


def test_the_breakdown_in_a_sentence() -> None:
    assert alternatives.breakdown(SETTING) == (
        "Exposed communication takes from 2.4 % of a traced step (refshard-yafsdp, 2 ranks) to 25.8 % (fsdp2, 2 ranks)."
    )


def test_curves_in_a_sentence() -> None:
    assert alternatives.curves(TRAINING) == (
        "6 loss curves go from 6.93 to 5.108 in 30 steps. Over the steps of the proof they differ from those of one "
        "unsharded rank by at most 3.1e-07 of their value (fsdp2, 2 ranks)."
    )


def test_one_curve_in_a_sentence() -> None:
    (training,) = gather(run(CASES[:1], rounds=1, failed=False)).trainings
    assert alternatives.curves(training) == (
        "The loss goes from 6.93 to 5.108 in 30 steps. All equal those of one unsharded rank exactly."
    )


def test_an_unfinished_run_can_be_drawn() -> None:
    assert gather(msgspec.structs.replace(run(), launches=())).settings == ()
