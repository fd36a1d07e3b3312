"""Curves over world sizes, tokens and runs: known answers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from refshard.analysis.evidence import gather
from refshard.analysis.history import series_of
from refshard.records import Run
from refshard.report.run.charts import Drawn, crossovers, scalings, trend
from refshard.specs.case import Fidelity
from refshard.specs.suite import NetworkSpec
from tests.report.printed import rows
from tests.report.runs import CASES, CLUSTER, joined, later, on_hosts, quicker, run, spec, with_record, with_spec

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
        "ddp": ([2, 4], [100, 90]), "fsdp2": ([2, 4, 8], [80, 76, 60]), "ideal": ([2, 8], [100, 100]),
    }  # fmt: skip
    assert found.chart.alternative == (
        "Scaling efficiency: best ddp 90.0 % (2 to 4 ranks), worst fsdp2 75.0 % (2 to 8 ranks)."
    )
    efficiency = [row["scaling efficiency"] for row in rows(found.table)]
    assert efficiency == ["100.0 %", "90.0 %", "100.0 %", "95.0 %", "75.0 %"]
    assert [case.spec.job.gpus for case in found.cases] == [2, 4, 2, 4, 8]


def test_each_fidelity_has_its_own_ideal_dash_and_marker() -> None:
    (found,) = scalings(gather(joined(scaled(RATES), scaled({"ddp": {2: 500.0, 8: 400.0}}, "simulated"))))
    assert curves(found)["ideal"] == ([2, 8], [100, 100])
    assert curves(found)[f"ideal, simulated on {CLUSTER}"] == ([2, 8], [500, 500])
    traces = {trace["name"]: trace for trace in found.chart.figure["data"]}
    measured, simulated = traces["ddp"], traces[f"ddp, simulated on {CLUSTER}"]
    assert measured["line"]["dash"] != simulated["line"]["dash"]
    assert measured["marker"]["symbol"] != simulated["marker"]["symbol"]
    assert measured["line"]["color"] == simulated["line"]["color"]


@pytest.mark.parametrize("mixed", [False, True])
def test_the_caption_leaves_out_the_fidelity(mixed: bool) -> None:
    other = scaled({"ddp": {2: 500.0, 8: 400.0}}, "emulated")
    (found,) = scalings(gather(joined(scaled(RATES), other) if mixed else other))
    assert found.table.caption == "Throughput over world sizes: llama-mini, global batch of 8 sequences of 256 tokens"


def test_one_world_size_or_a_case_that_failed_makes_no_curve() -> None:
    assert scalings(gather(scaled({"ddp": {2: 100.0}, "fsdp2": {4: 80.0}}))) == ()
    (found,) = scalings(gather(with_record(scaled(RATES), 1, state="oom")))
    assert "ddp" not in curves(found)


def test_the_bound_is_drawn_if_the_wire_has_a_rate() -> None:
    """Cases at 69.5 and 83.4 % of their bound: see ``test_efficiency.py``."""
    made = run((CASES[0], *CASES[1:3]), failed=False)
    wider = with_spec(made, {"ddp": 4, "fsdp2": 4})
    kept = tuple(record for record in wider.launches if record.case.job.gpus == 4)
    both = on_hosts(joined(made, msgspec.structs.replace(wider, launches=kept)), NetworkSpec(hosts=2, rate="8gbit"))
    (found,) = scalings(gather(both))
    sizes, rates = curves(found)["bound by compute and network"]
    assert sizes == [2, 4]
    bounds = [
        (case.metrics["tokens_per_s_gpu"] or 0) / (case.metrics["overlap_efficiency"] or 1)
        for case in found.cases
        if case.spec.job.gpus == 2
    ]
    assert rates[0] == pytest.approx(max(bounds), rel=1e-4)
    assert "-" not in {row["of the physical bound"] for row in rows(found.table)}


def made(times: dict[int, dict[str, float]]) -> Run:
    """A run of DDP and others with these step times, s, by sequence length and strategy; its batch is 8."""
    every = []
    for seq_len, seconds in times.items():
        timed = [replace(case, step_time=seconds[case.strategy]) for case in CASES if case.strategy in seconds]
        every.append(with_spec(run(timed, failed=False), seq_len=seq_len))
    return joined(*every)


def test_ratios_over_the_tokens_of_a_rank() -> None:
    times = {64: {"ddp": 0.1, "fsdp2": 0.2, "refshard-yafsdp": 0.12}, 256: {"ddp": 0.3, "fsdp2": 0.36}}
    (found,) = crossovers(gather(made({**times, 512: {"ddp": 0.6, "fsdp2": 0.45}})))
    drawn = curves(found)
    assert drawn.keys() == {"fsdp2", "ddp"}, "one number of tokens makes no curve"
    assert drawn["fsdp2"][0] == [256, 1024, 2048]
    assert drawn["fsdp2"][1] == pytest.approx([2, 1.2, 0.75], rel=1e-3)
    assert drawn["ddp"] == ([256, 2048], [1, 1])
    assert found.chart.alternative == (
        "Step time relative to ddp: fsdp2 2.00 at 256 tokens per rank, 0.75 at 2,048 tokens per rank (faster at 2,048)."
    )
    assert [row["tokens per rank"] for row in rows(found.table)] == ["256", "1,024", "2,048"]
    assert [row["peak memory / ddp"] for row in rows(found.table)] == ["0.68"] * 3
    assert crossovers(gather(run())) == ()
    assert crossovers(gather(made({64: {"fsdp2": 0.2}, 256: {"fsdp2": 0.3}}))) == ()


def runs(*factors: float) -> list[Run]:
    """A run an hour, whose steps and metrics took these factors of the first's."""
    found = []
    for hour, factor in enumerate(factors):
        one = later(quicker(run(CASES[:3], rounds=1, failed=False), factor), f"run{hour}", 10 + hour)
        for place, record in enumerate(one.launches):
            time = (record.metrics["step_time_s"] or 0) * factor
            one = with_record(one, place, metrics={**record.metrics, "step_time_s": time})
        found.append(one)
    return found


def test_each_case_is_drawn_relative_to_its_first_run() -> None:
    found = trend(every := runs(1.0, 1.1, 0.9), gather(*every))
    assert found is not None
    assert [trace["y"] for trace in found.chart.figure["data"]] == [[1, 1.1, 0.9]] * 3
    assert found.chart.figure["layout"]["xaxis"]["ticktext"] == ["run0", "run1", "run2"]
    assert "0.900 times" in found.chart.alternative
    assert [case.strategy for case in found.cases] == ["single", "ddp", "fsdp2"]
    gap = [every[0], msgspec.structs.replace(every[1], launches=every[1].launches[:1]), every[2]]
    found = trend(gap, gather(*gap))
    assert found is not None
    assert [trace["x"] for trace in found.chart.figure["data"]] == [[0, 1, 2], [0, 2], [0, 2]]


def test_one_run_or_other_machines_have_no_trend() -> None:
    first, second = runs(1.0, 1.1)
    for every in ([first], [first, later(second, "there", id="bbbbbbbbbbbb")]):
        assert trend(every, gather(*every)) is None


def test_specs_of_one_name_are_series_of_their_own() -> None:
    """A name leaves out the seed."""
    first = runs(1.0)[0]
    found = series_of([joined(first, with_spec(first, seed=1))], "step_time_s")
    assert found[0].case == f"{found[0].spec.name} ({found[0].spec.hash})"
    assert len({one.case for one in found}) == 6
