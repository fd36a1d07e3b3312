"""Cases over several runs: a curve each beside its first run."""

import msgspec

from refshard.analysis.evidence import gather
from refshard.analysis.history import series_of
from refshard.records import Run
from refshard.report.run.charts import Drawn
from refshard.report.run.curves import trend
from tests.analysis.test_evidence import later, quicker
from tests.report.printed import rows
from tests.report.runs import CASES, run


def runs(*factors: float) -> list[Run]:
    """A run an hour, whose steps and metrics took these factors of the first's."""
    made = []
    for hour, factor in enumerate(factors):
        one = later(quicker(run(CASES[:3], rounds=1, failed=False), factor), f"run{hour}", 10 + hour)
        records = [
            msgspec.structs.replace(r, metrics={**r.metrics, "step_time_s": (r.metrics["step_time_s"] or 0) * factor})
            for r in one.launches
        ]
        made.append(msgspec.structs.replace(one, launches=tuple(records)))
    return made


def of(found: list[Run]) -> Drawn | None:
    return trend(found, gather(*found))


def test_each_case_is_drawn_beside_its_first_run() -> None:
    found = of(runs(1.0, 1.1, 0.9))
    assert found is not None
    assert [trace["y"] for trace in found.chart.figure["data"]] == [[1, 1.1, 0.9]] * 3
    assert found.chart.figure["data"][0]["x"] == [0, 1, 2]
    assert found.chart.figure["layout"]["xaxis"]["ticktext"] == ["run0", "run1", "run2"]
    assert "0.900 times" in found.chart.alternative
    assert [case.strategy for case in found.cases] == ["single", "ddp", "fsdp2"]
    assert {row["launches per run"] for row in rows(found.table)} == {"1"}


def test_one_run_or_other_machines_have_no_history() -> None:
    first, second = runs(1.0, 1.1)
    assert of([first]) is None
    assert of([first, later(second, "there", id="bbbbbbbbbbbb")]) is None


def test_a_gap_in_the_runs_stays_one() -> None:
    first, second, third = runs(1.0, 1.1, 1.2)
    found = of([first, msgspec.structs.replace(second, launches=second.launches[:1]), third])
    assert found is not None
    assert [trace["x"] for trace in found.chart.figure["data"]] == [[0, 1, 2], [0, 2], [0, 2]]


def test_specs_of_one_name_are_series_of_their_own() -> None:
    """A name leaves out the seed."""
    first = runs(1.0)[0]
    seeded = [
        msgspec.structs.replace(record, case=msgspec.structs.replace(record.case, seed=1)) for record in first.launches
    ]
    both = msgspec.structs.replace(first, launches=(*first.launches, *seeded))
    found = series_of([both], "step_time_s")
    assert len(found) == 6
    assert found[0].case == f"{found[0].spec.name} ({found[0].spec.hash})"
    assert len({one.case for one in found}) == 6
