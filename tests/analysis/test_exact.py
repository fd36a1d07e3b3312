"""Exact metrics: what one launch says, and what counts as a change."""

from pathlib import Path

import msgspec
import pytest

from refshard.analysis.exact import Exact, changes, exact_metrics, portable
from refshard.measure.run import run_suite
from refshard.records import LaunchRecord
from refshard.specs.gate import RULES, GateSpec, MetricRule
from tests.measure.fakes import ENVIRONMENT, FakeLauncher, Silent, make_suite


@pytest.fixture
def record(tmp_path: Path) -> LaunchRecord:
    found = run_suite(make_suite(), tmp_path / "run", FakeLauncher(), Silent(), ENVIRONMENT)
    return next(record for record in found.launches if record.case.job.strategy == "ddp")


def test_exact_metrics_of_a_launch(record: LaunchRecord) -> None:
    found = exact_metrics(record)
    assert found["all_reduce count"] == 1
    assert found["all_reduce bytes"] == 400
    assert found["FLOPs per token"] == record.flops_per_token
    assert found["last loss"] == record.losses[-1]
    assert found["parameters"] == "same"
    assert found["peak memory"] == 2000
    assert (found["operators"], found["operator order"]) == (10, "0123456789abcdef")
    assert (found["allocations"], found["allocated memory"]) == (4, 640)
    assert found.keys() - portable(found).keys() == {"last loss", "losses", "parameters", "peak memory"}
    other = msgspec.structs.replace(record, losses=(*record.losses[:3], 1.0, *record.losses[4:]))
    assert [change.metric for change in changes({"a": found}, {"a": exact_metrics(other)}, RULES)] == ["losses"]
    with pytest.raises(ValueError, match="nothing of it is exact; it must end ok"):
        exact_metrics(msgspec.structs.replace(record, state="failed", proof=None))


def dry(record: LaunchRecord, **changed: object) -> LaunchRecord:
    """As a dry run would leave it: nothing of it is measured."""
    case = record.case.changed(fidelity="dryrun", cluster="dgx-h100", device="auto")
    assert record.census is not None
    peaks = {"peak_memory_bytes": 2000.0, "peak_active_bytes": 2100.0, "peak_reserved_bytes": 4096.0}
    return msgspec.structs.replace(
        record, case=case, fidelity="dryrun", metrics={**record.metrics, **peaks, **changed.pop("peaks", {})},  # type: ignore[dict-item]
        census=msgspec.structs.replace(record.census, stream_waits=changed.pop("stream_waits", 7)),
        host_waits=changed.pop("host_waits", {"item": 1}),
    )  # fmt: skip


def test_a_dry_run_is_exact_in_memory_waits_and_synchronisations_on_any_machine(record: LaunchRecord) -> None:
    found = exact_metrics(dry(record))
    assert (found["peak allocated"], found["peak active"], found["peak reserved"]) == (2000, 2100, 4096)
    assert (found["stream waits"], found["host synchronisations"]) == (7, 1)
    assert portable(found) == found
    assert not {"losses", "last loss", "parameters", "peak memory"} & found.keys()


@pytest.mark.parametrize(
    ("change", "metric", "verdict"),
    [
        ({"host_waits": {"item": 2}}, "host synchronisations", "regressed"),
        ({"host_waits": {}}, "host synchronisations", "improved"),
        ({"peaks": {"peak_reserved_bytes": 4096.0 + 2**31}}, "peak reserved", "regressed"),
        ({"peaks": {"peak_memory_bytes": 1999.0}}, "peak allocated", "improved"),
        ({"stream_waits": 8}, "stream waits", "regressed"),
    ],
)
def test_what_a_change_does_on_a_gpu_fails_a_gate_that_has_none(
    record: LaunchRecord, change: dict[str, object], metric: str, verdict: str
) -> None:
    before, after = {"a": exact_metrics(dry(record))}, {"a": exact_metrics(dry(record, **change))}
    assert [(found.metric, found.verdict) for found in changes(before, after, RULES)] == [(metric, verdict)]


@pytest.mark.parametrize(
    ("metric", "before", "after", "verdict"),
    [
        ("all_gather count", 4, 5, "regressed"),
        ("all_gather bytes", 400, 300, "improved"),
        ("FLOPs per token", 10.0, 9.0, "regressed"),
        ("losses", "abc", "abd", "regressed"),
        ("peak memory", 1000, 1051, "regressed"),
        ("peak memory", 1000, 949, "improved"),
        ("peak memory", 1000, 1049, None),
        ("last loss", 5.0, 5.0, None),
        ("operators", 10, 11, "regressed"),
        ("operators", 10, 9, "improved"),
        ("operator order", "abc", "abd", "regressed"),
        ("fits", "no", "yes", "improved"),
        ("fits", "yes", "no", "regressed"),
        ("planned peak", 900, None, "removed"),
        ("allocated memory", None, 640, "new"),
    ],
)
def test_what_is_a_change_and_which(metric: str, before: object, after: object, verdict: str | None) -> None:
    one: dict[str, Exact] = {"case": {metric: before}}  # type: ignore[dict-item]
    other: dict[str, Exact] = {"case": {metric: after}}  # type: ignore[dict-item]
    assert [change.verdict for change in changes(one, other, RULES)] == ([verdict] if verdict else [])


def test_an_extra_collective_is_a_regression_and_a_lost_one_an_improvement() -> None:
    plain: dict[str, Exact] = {"case": {"all_gather count": 4}}
    more: dict[str, Exact] = {"case": {"all_gather count": 4, "broadcast count": 1}}
    assert [(c.metric, c.before, c.after, c.verdict) for c in changes(plain, more, RULES)] == [
        ("broadcast count", None, 1, "regressed")
    ]
    assert [c.verdict for c in changes(more, plain, RULES)] == ["improved"]


def test_other_operators_have_another_order() -> None:
    one: dict[str, Exact] = {"case": {"operators": 10, "operator order": "abc"}}
    other: dict[str, Exact] = {"case": {"operators": 11, "operator order": "abd"}}
    assert [change.metric for change in changes(one, other, RULES)] == ["operators"]


def test_a_metric_that_does_not_gate_is_told_and_fails_nothing() -> None:
    rules = {**RULES, "losses": MetricRule(gates=False)}
    (found,) = changes({"case": {"losses": "abc"}}, {"case": {"losses": "abd"}}, rules)
    assert (found.metric, found.verdict) == ("losses", "pass")


def test_cases_that_come_and_go() -> None:
    both: dict[str, Exact] = {"a": {"x": 1}, "b": {"x": 1}}
    one: dict[str, Exact] = {"a": {"x": 1}}
    assert [(c.case, c.verdict) for c in changes(both, one, RULES)] == [("b", "removed")]
    assert [(c.case, c.verdict) for c in changes(one, both, RULES)] == [("b", "new")]


def test_a_suite_may_have_rules_of_its_own() -> None:
    spec = GateSpec(metrics={"peak memory": MetricRule(better="lower", tolerance=0.1)})
    one: dict[str, Exact] = {"case": {"peak memory": 100}}
    other: dict[str, Exact] = {"case": {"peak memory": 109}}
    assert changes(one, other, RULES)
    assert not changes(one, other, spec.rules)
    with pytest.raises(ValueError, match="tolerance must be at least 0 and below 1, got 2"):
        MetricRule(tolerance=2)
