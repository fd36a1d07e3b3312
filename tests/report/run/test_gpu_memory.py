"""Memory of cases on GPUs: what is reserved of the device first, the other kinds in a table of their own."""

from typing import Any

import pytest

from refshard.analysis.evidence import Evidence, gather
from refshard.analysis.gpu_memory import gpu_memory_of
from refshard.analysis.rankings import rankings
from refshard.quantities import GIB
from refshard.records import GpuMemory, Run
from refshard.report.run.answer import run_answer
from refshard.report.run.charts import device_limit, tradeoff
from refshard.report.run.page import page
from refshard.report.run.rows import as_json
from refshard.report.run.tables import case_table, gpu_memory_table
from tests.report import printed
from tests.report.runs import CASES, run, with_record

RESERVED = 71.2


def memory(reserved_gib: float, **changes: Any) -> GpuMemory:
    fields = {
        "allocated_bytes": 60 * GIB, "active_bytes": 61 * GIB, "reserved_bytes": int(reserved_gib * GIB),
        "requested_bytes": 59 * GIB, "retries": 0, "ooms": 0, "used_bytes": int((reserved_gib + 2) * GIB),
        "outside_bytes": 2 * GIB, "total_bytes": int(79.2 * GIB),
    }  # fmt: skip
    return GpuMemory(**{**fields, **changes})


def on_gpus(made: Run, ranks: tuple[GpuMemory, ...]) -> Run:
    """The run, had all its cases run on GPUs with this memory."""
    for place, record in enumerate(made.launches):
        metrics = {**record.metrics, "peak_reserved_bytes": float(max(one.reserved_bytes for one in ranks))}
        made = with_record(made, place, gpu_memory=ranks, metrics=metrics)
    return made


@pytest.fixture
def evidence() -> Evidence:
    return gather(on_gpus(run(CASES, rounds=3, failed=False), (memory(30.0), memory(RESERVED, retries=2))))


def test_a_gpus_memory_is_what_is_reserved_of_the_device(evidence: Evidence) -> None:
    (shown,) = printed.tables(run_answer(evidence))
    assert {row["peak reserved"] for row in printed.rows(shown)} == {"71.2 of 79.2 GiB"}
    assert "peak memory" not in printed.rows(shown)[0]
    place = [column.head for column in shown.columns].index("peak reserved")
    assert place <= 4, "one of the first columns, which narrow terminals show"
    (ranking,) = rankings(evidence)
    limit = device_limit(ranking.cases)
    assert limit is not None
    assert limit.text == "79.2 GiB on the GPU"
    drawn = tradeoff(ranking, limit, "t")
    assert drawn is not None
    assert "limit: 79.2 GiB on the GPU" in [note["text"] for note in drawn.figure["layout"]["annotations"]]


def test_the_other_kinds_have_a_table_on_the_page(evidence: Evidence) -> None:
    table = gpu_memory_table(evidence.settings[0].cases)
    assert printed.rows(table)[1] == {
        "case": "ddp, 2 ranks", "reserved": "71.2 of 79.2 GiB reserved", "active": "61.0 GiB", "allocated": "60.0 GiB",
        "requested": "59.0 GiB", "used on the device": "73.2 of 79.2 GiB", "outside the allocator": "2.00 GiB",
        "retries": "6",
    }  # fmt: skip
    text = "".join(page(evidence))
    assert "71.2 of 79.2 GiB reserved" in text
    assert "Memory of the fullest GPU" in text


def test_programs_read_it_too(evidence: Evidence) -> None:
    row = as_json(evidence)[1]
    assert row["peak_requested_bytes"] == 59 * GIB
    assert row["gpu_used_bytes"] - row["gpu_outside_bytes"] == pytest.approx(71.2 * GIB, abs=1)
    assert (row["gpu_total_bytes"], row["allocation_retries"]) == (int(79.2 * GIB), 6)


def test_several_launches_have_the_median_of_their_fullest_rank() -> None:
    made = on_gpus(run(CASES[:1], rounds=3, failed=False), (memory(50.0), memory(40.0)))
    made = with_record(made, 1, gpu_memory=(memory(10.0), memory(70.0, total_bytes=70 * GIB)))
    found = gpu_memory_of(gather(made).cases[0])
    assert found is not None
    assert (found.reserved_bytes, found.total_bytes) == (50 * GIB, int(79.2 * GIB))


def test_memory_of_a_case_on_a_cpu_is_shown_as_before() -> None:
    evidence = gather(run(CASES, rounds=1, failed=False))
    table = printed.rows(case_table(evidence.settings[0].cases, title=""))
    assert "440 MiB" in {row["peak memory"] for row in table}
    assert "peak reserved" not in table[0]
    assert gpu_memory_table(evidence.cases).rows == []
    assert "Memory of the fullest GPU" not in "".join(page(evidence))
    assert as_json(evidence)[1]["gpu_total_bytes"] is None


def test_where_one_case_lacks_it_both_columns_stand() -> None:
    """Of runs of an older refshard, shown together with one of this."""
    made = on_gpus(run(CASES, rounds=1, failed=False), (memory(RESERVED),))
    old = made.launches[1]
    made = with_record(made, 1, gpu_memory=(), metrics={**old.metrics, "peak_reserved_bytes": None})
    table = printed.rows(case_table(gather(made).settings[0].cases, title=""))
    assert [row["peak memory"] for row in table][1:3] == ["440 MiB", "300 MiB"]
    assert [row["peak reserved"] for row in table][1:3] == ["-", "71.2 of 79.2 GiB"]
