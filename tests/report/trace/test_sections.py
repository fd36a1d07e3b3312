"""Sections: when there is none, and tables that only a page shows; ``scenarios`` shows the others."""

from collections.abc import Callable

import msgspec
import pytest

from refshard.analysis.figures import GiveWay, TraceFigures
from refshard.report.blocks import Section
from refshard.report.trace import sections
from refshard.report.trace.answer import trace_answer
from tests.report import traces
from tests.report.printed import rows, tables
from tests.report.traces import MS, made


@pytest.mark.parametrize("make", sections.SECTIONS)
def test_a_trace_that_cannot_tell_has_no_section(make: Callable[[TraceFigures], Section | None]) -> None:
    assert make(made()) is None


def job_rows(*figures: TraceFigures) -> list[dict[str, str]]:
    return rows(tables(trace_answer([traces.analysis(one) for one in figures]))[0])


def test_a_ranks_row_holds_means_and_no_column_that_says_nothing() -> None:
    figures = made(host=None, dependency=None, rank=None, world_size=None, giveway=GiveWay(reason="too few samples"))
    (row,) = job_rows(figures)
    assert (row["per step"], row["exposed"], row["overlap"]) == ("100 ms", "20.0 ms (20 %)", "60.0 %")
    assert row["rank"] == "-"
    assert not {"late reductions (give-way)", "device", "idle, host late"} & set(row)
    assert [row["steps"] for row in job_rows(made(steps=()), figures)] == ["-", "2"]
    devices = [row["device"] for row in job_rows(made(file="a"), made(file="b", device="B200"))]
    assert devices == ["NVIDIA H100 80GB HBM3", "B200"]
    alike = msgspec.structs.replace(figures.whole, exposed_any_ns=figures.whole.exposed_ns)
    assert ["exposed to all" in job_rows(one)[0] for one in (figures, made(steps=(), whole=alike))] == [True, False]


def test_sizes_that_round_alike_are_exact() -> None:
    one = made().collectives[0]
    sizes = (1_048_576, 1_049_600, 2_097_152)
    of = tuple(msgspec.structs.replace(one, bytes=size, group=None) for size in sizes)
    found = sections.collectives(made(collectives=of))
    assert [row["bytes"] for row in found] == ["1,048,576 B", "1,049,600 B", "2.00 MiB"]
    assert {(row["group"], row["count"]) for row in found} == {("unknown (8 ranks)", "0.5")}


def test_each_gap_is_counted_once_by_its_length() -> None:
    first = made().collectives[0]
    gaps = (7, 1000, 1999, 2000, None)
    of = tuple(msgspec.structs.replace(first, gap_ns=gap, gap_blocking=False) for gap in gaps)
    *found, everything, middle = sections.gaps(made(collectives=of), traces.SMALL)
    head = "between collectives, other"
    assert [(row["from"], row[head]) for row in found if row[head]] == [
        ("5 ns", "1 (7 ns)"), ("1.00 us", "2 (3.00 us)"), ("2.00 us", "1 (2.00 us)"),
    ]  # fmt: skip
    assert (everything[head], middle[head]) == ("4 (5.01 us)", "1.50 us, 2.00 us")


def test_units_and_waits_are_per_step() -> None:
    figures = made()
    assert sections.per_step(figures) == "per step, mean of 2"
    assert sections.per_step(made(steps=())) == "over the whole trace"
    assert sections.units_of(figures)[0]["compute"].value == figures.units[0].compute_ns / 2  # type: ignore[union-attr]
    (waits,) = [figures.waits_for for figures in [traces.figures(traces.SMALL)]]
    (first, *_) = sections.waits([made(waits_for=waits)])
    assert (first["waited"].value, first["collectives"]) == (2.1 * MS, "8.5")  # type: ignore[union-attr]
