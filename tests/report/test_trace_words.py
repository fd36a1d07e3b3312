"""What is said of traces, in sentences, tables and charts: by figures whose answer is known."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from refshard.report import trace_charts, trace_tables, trace_words
from refshard.tracing.figures import GiveWay, MemoryPoint, RankWait, TraceFigures, TraceWarning
from tests.report import traces

MS = 1_000_000
GPU = traces.gpu(layers=4)


def made(
    *, span: int = 100, compute: int = 60, comm: int = 50, exposed: int = 20, host: int | None = 5,
    dependency: int | None = 10, lost: int = 1, **others: Any,
) -> TraceFigures:  # fmt: skip
    """Two equal steps, times in ms; 5 ms of other work beside compute, communication and 15 ms of idle."""
    base = traces.figures(GPU)
    part = msgspec.structs.replace(
        base.whole, span_ns=span * MS, busy_ns=(span - 15) * MS, compute_ns=compute * MS, comm_ns=comm * MS,
        exposed_ns=exposed * MS, idle_ns=15 * MS, idle_host_ns=None if host is None else host * MS,
        idle_dependency_ns=None if dependency is None else dependency * MS,
    )  # fmt: skip
    step = msgspec.structs.replace(
        base.steps[0], breakdown=part, giveway=msgspec.structs.replace(base.giveway, lost_ns=lost * MS)
    )
    return msgspec.structs.replace(base, steps=(step, step), whole=part, **others)


def lead(figures: Sequence[TraceFigures]) -> str:
    (finding,) = trace_words.findings(figures)
    return finding.lead


@pytest.mark.parametrize(
    ("figures", "loss"),
    [
        (made(), "exposed communication: 20.0 %"),
        (made(exposed=3, dependency=10, host=5), "idle time that waits for dependencies: 10.0 %"),
        (made(exposed=3, dependency=5, host=10), "idle time that waits for the host: 10.0 %"),
        (made(exposed=3, dependency=None, host=None), "idle time of unknown cause: 15.0 %"),
        (made(exposed=3, lost=30), "give-way of preparatory kernels: 30.0 %"),
    ],
)
def test_the_largest_loss_leads(figures: TraceFigures, loss: str) -> None:
    assert lead([figures]) == f"The largest loss is {loss} of a step of 100 ms."


def test_no_small_loss_is_called_the_largest() -> None:
    small = made(span=10_000, exposed=3, host=5, dependency=10, lost=1)
    assert lead([small]) == "No loss reaches 1 % of a step of 10.0 s."


def test_a_job_is_told_with_its_extremes_and_its_late_rank() -> None:
    ranks = [
        made(exposed=20 + 10 * n, rank=n, waits_for=(RankWait(rank=7, waited_ns=MS, collectives=1),)) for n in (0, 1)
    ]
    (finding,) = trace_words.findings(ranks)
    assert "25.0 % of a step of 100 ms (from 20.0 % on rank 0 to 30.0 % on rank 1)" in finding.lead
    assert finding.more[-1].startswith("Rank 7 is the last to enter most: the others stood 2.00 ms for it, 100 %")


def test_equal_ranks_are_told_as_such() -> None:
    assert lead([made(rank=0), made(rank=1)]).endswith("20.0 % of a step of 100 ms on every rank.")


def test_each_job_has_its_finding() -> None:
    found = trace_words.findings([made(job=1), made(job=0), made(job=1)])
    assert [finding.title.partition(":")[0] for finding in found] == ["Job 0", "Job 1"]


def test_a_warning_of_many_traces_is_told_once() -> None:
    few, lost = TraceWarning(code="few", message="Few steps.", count=3), TraceWarning(code="x", message="Lost.", ns=MS)
    given = [made(file=f"r{n}", warnings=(few, lost) if n == 1 else (few,)) for n in range(9)]
    assert [(doubt.sentence, doubt.where) for doubt in trace_words.doubts(given)] == [
        ("Few steps. (3 events)", "all 9 traces"),
        ("Lost. (1.00 ms)", "r1"),
    ]


def test_the_summary_holds_means_and_says_what_is_not_known() -> None:
    figures = made(host=None, dependency=None, rank=None, world_size=None, giveway=GiveWay(reason="too few samples"))
    (row,) = trace_tables.summary([figures]).to_dict("records")
    assert row["step span"] == "100 ms"
    assert row["exposed"] == "20.0 ms"
    assert row["overlap ratio"] == "60.0 %"
    assert row["of it host / dependency"] == "-"
    assert row["rank"] == "- of ?"
    assert row["give-way index"] == "-"


def test_collectives_are_told_by_operation_size_and_group() -> None:
    table = trace_tables.collectives(traces.figures(GPU)).set_index("collective")
    assert dict(table["count"]) == {"all_gather": "21", "reduce_scatter": "12"}
    assert table.loc["all_gather", "bytes"] == "416 MiB"
    assert table.loc["all_gather", "group"] == "default_pg (8 ranks)"
    assert table.loc["all_gather", "median duration"] == "770 us"


@pytest.mark.parametrize("figures", [made(), made(host=None, dependency=None)])
def test_the_parts_of_a_step_add_up_to_it(figures: TraceFigures) -> None:
    parts = trace_charts.split(figures.steps[0].breakdown)
    assert sum(parts.values()) == 100 * MS
    assert parts["compute alone"] == 30 * MS
    assert parts["compute over communication"] == 30 * MS
    assert parts["other"] == 5 * MS


@pytest.mark.parametrize("timeline", [traces.gpu(), traces.cpu()])
def test_the_parts_of_a_made_step_add_up_and_none_is_negative(timeline: Any) -> None:
    for step in traces.figures(timeline).steps:
        parts = trace_charts.split(step.breakdown)
        assert sum(parts.values()) == step.breakdown.span_ns
        assert min(parts.values()) >= 0


def test_the_bars_hold_the_parts() -> None:
    bars = trace_charts.step_bars(made())
    assert {bar.name: list(bar.x) for bar in bars.data}["exposed communication"] == [20, 20]
    assert sum(bar.x[0] for bar in bars.data) == pytest.approx(100)


def test_each_gap_is_in_the_histogram_once() -> None:
    figures = traces.figures(GPU)
    between, blocking, idle = trace_charts.gaps(figures, GPU)
    histogram = trace_charts.gap_histogram(between, blocking, idle)
    assert sum(sum(bar.y) for bar in histogram.data) == len(between) + len(idle)
    assert len(between) == sum(1 for one in figures.collectives if one.gap_ns)
    assert sum(idle) == figures.whole.idle_ns


def test_a_long_memory_timeline_is_thinned_but_keeps_its_peak() -> None:
    points = [MemoryPoint(device="cuda:0", ns=n, bytes=1000 + n % 7) for n in range(100_000)]
    points[61_803] = MemoryPoint(device="cuda:0", ns=61_803, bytes=5000)
    kept = trace_charts.thinned(points)
    assert len(kept) <= trace_charts.MOST_POINTS
    assert max(point.bytes for point in kept) == 5000
    assert [point.ns for point in kept] == sorted(point.ns for point in kept)
    assert "peak of 4.88 KiB" in trace_words.memory_sentence(points)


def test_without_memory_points_there_is_no_memory_chart() -> None:
    with_memory = {chart.title for chart in trace_charts.charts_of(made(), GPU, "t")}
    without = {chart.title for chart in trace_charts.charts_of(made(memory=()), GPU, "t")}
    assert with_memory - without == {"Memory"}


def test_a_trace_without_collectives_or_gaps_is_still_told() -> None:
    bare = replace(GPU, collectives=())
    figures = msgspec.structs.replace(made(), collectives=(), units=(), waits_for=(), memory=(), steps=())
    assert trace_tables.collectives(figures).empty
    assert lead([figures]).endswith("of a trace of 100 ms.")
    assert trace_charts.charts_of(figures, bare, "t")
