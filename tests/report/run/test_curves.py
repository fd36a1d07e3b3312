"""Throughput over world sizes: known answers."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from refshard.analysis.evidence import gather
from refshard.records import Run
from refshard.report.run.charts import Drawn
from refshard.report.run.curves import scalings
from refshard.specs.case import Fidelity
from refshard.specs.suite import NetworkSpec
from tests.report.printed import rows
from tests.report.runs import CASES, CLUSTER, on_hosts, run, spec

RATES = {"ddp": {2: 100.0, 4: 90.0}, "fsdp2": {2: 80.0, 4: 76.0, 8: 60.0}}


def scaled(rates: Mapping[str, Mapping[int, float]], fidelity: Fidelity = "measured") -> Run:
    """A run in which ranks of these strategies gave so many tokens/s, by world size."""
    base = run(CASES[1:2], rounds=1, failed=False, fidelity=fidelity)
    records = []
    for strategy, by_size in rates.items():
        for size, rate in by_size.items():
            case = spec(strategy, size, fidelity)
            metrics = {**base.launches[0].metrics, "tokens_per_s_gpu": rate}
            records.append(msgspec.structs.replace(base.launches[0], case=case, spec_hash=case.hash, metrics=metrics))
    return msgspec.structs.replace(base, launches=tuple(records))


def curves(found: Drawn) -> dict[str, Any]:
    return {trace["name"]: (trace["x"], trace["y"]) for trace in found.chart.figure["data"]}


def test_a_curve_for_each_strategy_and_a_level_for_the_best() -> None:
    (found,) = scalings(gather(scaled(RATES)))
    assert curves(found) == {
        "ddp": ([2, 4], [100, 90]),
        "fsdp2": ([2, 4, 8], [80, 76, 60]),
        "ideal": ([2, 8], [100, 100]),
    }
    assert found.chart.alternative == (
        "Scaling efficiency: best ddp 90.0 % (2 to 4 ranks), worst fsdp2 75.0 % (2 to 8 ranks)."
    )
    assert [row["scaling efficiency"] for row in rows(found.table)] == [
        "100.0 %",
        "90.0 %",
        "100.0 %",
        "95.0 %",
        "75.0 %",
    ]
    assert [case.spec.world_size for case in found.cases] == [2, 4, 2, 4, 8]


def test_each_fidelity_has_its_own_ideal() -> None:
    both = scaled(RATES)
    other = scaled({"ddp": {2: 500.0, 8: 400.0}}, "simulated")
    (found,) = scalings(gather(msgspec.structs.replace(both, launches=(*both.launches, *other.launches))))
    drawn = curves(found)
    assert drawn["ideal"] == ([2, 8], [100, 100])
    assert drawn[f"ideal, simulated on {CLUSTER}"] == ([2, 8], [500, 500])
    traces = {trace["name"]: trace for trace in found.chart.figure["data"]}
    measured, simulated = traces["ddp"], traces[f"ddp, simulated on {CLUSTER}"]
    assert measured["line"]["dash"] != simulated["line"]["dash"]
    assert measured["marker"]["symbol"] != simulated["marker"]["symbol"]
    assert measured["line"]["color"] == simulated["line"]["color"]


def test_its_heading_names_what_all_of_its_curves_share() -> None:
    other = scaled({"ddp": {2: 500.0, 8: 400.0}}, "emulated")
    both = msgspec.structs.replace(other, launches=(*scaled(RATES).launches, *other.launches))
    for made in (other, both, scaled(RATES, "simulated")):
        (found,) = scalings(gather(made))
        assert (
            found.table.caption.removeprefix("Throughput over world sizes: ")
            == "llama-mini, global batch of 8 sequences of 256 tokens"
        )


def test_one_world_size_is_no_curve() -> None:
    assert scalings(gather(scaled({"ddp": {2: 100.0}, "fsdp2": {4: 80.0}}))) == ()


def test_a_case_that_did_not_end_ok_is_on_no_curve() -> None:
    made = scaled(RATES)
    bad = msgspec.structs.replace(made.launches[1], state="oom")
    (found,) = scalings(gather(msgspec.structs.replace(made, launches=(made.launches[0], bad, *made.launches[2:]))))
    assert "ddp" not in curves(found)


def test_the_bound_is_drawn_where_the_wire_has_a_rate() -> None:
    """Cases at 69.5 and 83.4 % of their bound: see ``test_efficiency.py``."""
    network = NetworkSpec(hosts=2, rate="8gbit")
    made = on_hosts(run((CASES[0], *CASES[1:3]), failed=False), network)
    wider = []
    for record in made.launches[1:3]:
        case = spec(record.case.strategy, 4)
        wider.append(msgspec.structs.replace(record, case=case, spec_hash=case.hash))
    (found,) = scalings(gather(msgspec.structs.replace(made, launches=(*made.launches, *wider))))
    sizes, rates = curves(found)["bound by compute and network"]
    assert sizes == [2, 4]
    best = max(
        (case.metrics["tokens_per_s_gpu"] or 0) / (case.metrics["overlap_efficiency"] or 1)
        for case in found.cases
        if case.spec.world_size == 2
    )
    assert rates[0] == pytest.approx(best, rel=1e-4)
    assert "-" not in {row["of the physical bound"] for row in rows(found.table)}
