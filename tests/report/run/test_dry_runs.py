"""How dry runs are told apart from measurements, and what they say that measurements do not."""

import msgspec
import pytest

from refshard.analysis.evidence import Evidence, gather
from refshard.quantities import MIB
from refshard.records import Run
from refshard.report.run.answer import run_answer
from refshard.report.run.curves import scalings
from refshard.report.run.page import page
from refshard.report.run.rows import values
from refshard.report.run.tables import case_table
from refshard.report.run.trust import trust
from refshard.report.run.verdict import findings, modelled, unranked
from tests.report.printed import rows, text
from tests.report.runs import CASES, CLUSTER, both, run

RESERVED = {"ddp": 700, "fsdp2": 400, "refshard-fsdp": 410, "refshard-yafsdp": 300}
"""MiB; ``refshard-yafsdp`` needs the least by this too, fsdp2 second to least."""


def dry(*, out_of_memory: str = "") -> Run:
    """One step each, with reserved memory; ``out_of_memory`` names a strategy that has no room."""
    made = run(CASES, rounds=1, failed=False, fidelity="dryrun")
    cases = []
    for record in made.launches:
        reserved = RESERVED.get(record.case.job.strategy)
        metrics = {**record.metrics, "peak_reserved_bytes": None if reserved is None else float(reserved * MIB)}
        changed = msgspec.structs.replace(record, metrics=metrics, step_times_s=((record.step_times_s[0][0],),))
        if record.case.job.strategy == out_of_memory:
            needs = {**dict.fromkeys(metrics), "peak_memory_bytes": 900.0 * MIB, "peak_reserved_bytes": 950.0 * MIB}
            changed = msgspec.structs.replace(changed, state="oom", error="needs", metrics=needs, step_times_s=())
        cases.append(changed)
    return msgspec.structs.replace(made, launches=tuple(cases))


@pytest.fixture
def evidence() -> Evidence:
    return gather(dry())


def test_dry_runs_never_share_a_setting_with_measurements() -> None:
    found = gather(both("dryrun"))
    assert [setting.fidelity for setting in found.settings] == ["measured", "dryrun"]
    assert "dry run on dgx-h100" in found.settings[1].label
    assert all(setting.label.endswith(", measured") for setting in found.settings[:1])


def test_a_dry_run_says_what_it_is(evidence: Evidence) -> None:
    assert modelled(evidence) == (
        f"Not measured, but dry-run on {CLUSTER}: the strategy's own code on fake GPUs; all times are modelled.",
    )
    facts = {fact.label: fact for fact in trust(evidence)}
    assert facts["Fidelity"].value == "dry run"
    assert (facts["Noise"].value, facts["Noise"].style) == ("none", "plain")
    assert values(evidence.cases[0])["fidelity"] == "dryrun"


def test_a_time_that_is_calculated_has_no_interval(evidence: Evidence) -> None:
    assert "95 %" not in text(run_answer(evidence), verbose=True)
    assert not any(
        "under-sampled" in warning or "n = 1" in warning for case in evidence.cases for warning in case.warnings
    )
    (told,) = {finding.margin for finding in findings(evidence)}
    assert "95 % interval" not in told


def test_the_least_memory_goes_by_what_is_reserved(evidence: Evidence) -> None:
    (finding,) = findings(evidence)
    assert finding.memory.startswith("refshard-yafsdp needs the least memory: 300 MiB per rank (reserved).")
    assert "Next: fsdp2 with 400 MiB" in finding.memory
    assert rows(case_table(evidence.settings[0].cases, title=""))[-1]["peak reserved"] == "300 MiB"


def test_measured_cases_have_no_column_of_reserved_memory() -> None:
    assert "peak reserved" not in rows(case_table(gather(run()).settings[0].cases, title=""))[0]


def test_out_of_memory_shows_what_it_would_take_and_competes_with_nobody() -> None:
    evidence = gather(dry(out_of_memory="ddp"))
    (row,) = [row for row in rows(case_table(evidence.cases, title="")) if row["strategy"] == "ddp"]
    assert (row["state"], row["peak memory"], row["peak reserved"]) == ("oom", "900 MiB", "950 MiB")
    assert row["tokens/s/GPU"] == "-"
    assert all("ddp" not in (*finding.fastest, *finding.lowest_memory) for finding in findings(evidence))
    assert any("out of memory (needs)" in sentence for sentence in unranked(evidence))


def test_each_fidelity_is_a_comparison_of_its_own() -> None:
    titles = [finding.title for finding in findings(gather(both("dryrun")))]
    assert len(set(titles)) == 2


def test_the_page_names_dry_runs() -> None:
    text = "".join(page(gather(both("dryrun"))))
    assert f"2 ranks, dry run on {CLUSTER}" in text
    assert "dryrun on" not in text


def test_a_curve_says_where_it_was_run_dry() -> None:
    made = dry()
    larger = tuple(
        msgspec.structs.replace(record, case=record.case.changed(gpus=4))
        for record in made.launches
        if record.case.job.strategy != "single"
    )
    (scaling,) = scalings(gather(msgspec.structs.replace(made, launches=(*made.launches, *larger))))
    hover = [str(curve["hovertemplate"]) for curve in scaling.chart.figure["data"] if "hovertemplate" in curve]
    assert any(text.startswith(f"fsdp2, dry run on {CLUSTER}") for text in hover)
    assert "dry run" not in scaling.table.caption
