"""What a gate's report says, in all its forms, and the exit status that it comes to."""

from xml.etree import ElementTree

import pytest

from refshard.analysis.exact import Change
from refshard.analysis.gate import Effect, TimeVerdict, Verdict
from refshard.report import forms
from refshard.report.gate.formats import GateCase, GateReport, annotations, as_object, gate_answer, junit
from tests.report.printed import as_csv, tables, text


def timed(verdict: Verdict, ratio: float = 1.0) -> TimeVerdict:
    low, high = ratio - 0.01, ratio + 0.01
    effect = Effect(ratio=ratio, low=low, high=high, p_slower=0.5, p_faster=0.5, spread=0.02, rounds=16)
    return TimeVerdict(verdict=verdict, effect=effect, smallest_visible=0.035, suspect=verdict == "regressed")


def case(name: str, verdict: Verdict = "pass", **changes: object) -> GateCase:
    return GateCase(name=name, time=timed(verdict), **changes)  # type: ignore[arg-type]


def changed(verdict: Verdict) -> GateCase:
    change = Change(case="c", metric="all_gather count", before=4, after=5, verdict=verdict)
    return GateCase(name="c", changes=(change,), time=timed("pass"))


def report(*cases: GateCase, **changes: object) -> GateReport:
    return GateReport(baseline="v1", candidate=".", cases=cases, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "outcome", "status"),
    [
        (report(case("a"), case("b")), "pass", 0),
        (report(case("a"), case("b", "improved")), "pass", 0),
        (report(case("a"), case("b", "regressed")), "regression", 1),
        (report(changed("regressed")), "regression", 1),
        (report(changed("improved")), "pass", 0),
        (report(changed("improved"), must_accept=True), "changed", 1),
        (report(case("a", trouble="the candidate ended failed: no")), "regression", 1),
        (report(case("a"), case("b", "inconclusive")), "inconclusive", 3),
        (report(case("a", "regressed"), case("b", "inconclusive")), "regression", 1),
        (report(case("a"), case("b", trouble="the baseline failed", trouble_is="not comparable")), "not comparable", 3),
        (report(case("a"), case("b", trouble="only 3 of 16 rounds", trouble_is="inconclusive")), "inconclusive", 3),
        (report(), "harness error", 3),
        (report(mismatch="no baseline for this machine"), "not comparable", 3),
        (report(case("a"), error="the disk is full"), "harness error", 3),
    ],
)
def test_the_exit_status(found: GateReport, outcome: str, status: int) -> None:
    assert as_object(found)["status"] == gate_answer(found).status == found.status == status
    assert text(gate_answer(found)).splitlines()[-1].startswith(f"{outcome.upper()}: ")


def test_csv_has_a_row_for_each_case() -> None:
    first, second = as_csv(gate_answer(report(case("ddp-w2", "regressed"), changed("regressed"))))
    assert (first["case"], first["time_ratio"], first["exact_changes"], second["exact_changes"]) == (
        "ddp-w2", "1.0", "0", "1",
    )  # fmt: skip


def test_columns_that_say_nothing_of_any_case_are_left_out() -> None:
    (cases,) = tables(gate_answer(report(GateCase(name="a"), GateCase(name="b"))))
    assert [column.head for column in cases.columns] == ["case", "verdict", "exact changes"]


def test_a_pull_request_gets_the_verdict_and_tables_of_its_own_kind() -> None:
    found = forms.as_markdown(gate_answer(report(case("ddp-w2"), changed("regressed"))), "gate")
    assert found.startswith("## refshard gate\n\n- **REGRESSION: 1 regressed, 1 pass of 2 cases**\n")
    assert "| ddp-w2 " in found


def test_junit_counts_failures_and_names_reasons() -> None:
    root = ElementTree.fromstring(junit(report(case("a"), changed("regressed"), case("b", "inconclusive"))))
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("3", "1", "0")
    failure = root.find("testcase/failure")
    assert failure is not None
    assert failure.get("message") == "all_gather count: 4 -> 5 (regressed)"
    assert len(root.findall("testcase/skipped")) == 1
    for amiss in (report(error="the disk is full"), report(mismatch="no baseline"), report()):
        broken = ElementTree.fromstring(junit(amiss))
        assert (broken.get("tests"), broken.get("errors")) == ("1", "1")
        assert broken.find("testcase/error") is not None
    unaccepted = ElementTree.fromstring(junit(report(changed("improved"), must_accept=True)))
    assert unaccepted.get("failures") == "1", "what the status says"


def test_annotations_are_one_line_each_whatever_a_name_holds() -> None:
    bad = GateCase(name="50%\nx", time=timed("regressed", 1.1))
    (line,) = annotations(report(bad, case("a")))
    assert line.startswith("::error title=refshard gate::50%25")
    assert "\n" not in line
    assert "1.100 times the baseline's (1.090 to 1.110)" in line
    assert annotations(report(changed("improved"), must_accept=True))[0].startswith("::error ")
    assert not annotations(report(changed("improved")))
    assert annotations(report(case("a", "inconclusive")))[0].startswith("::warning ")
    assert annotations(report(mismatch="no baseline")) == ["::error title=refshard gate::no baseline"]
