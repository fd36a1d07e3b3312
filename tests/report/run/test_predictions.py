"""Predictions beside the measured cases of one run."""

import msgspec
import pytest

from refshard.analysis.evidence import Evidence, gather
from refshard.analysis.validation import as_objects, errors, in_order, scaled, validated
from refshard.quantities import MIB
from refshard.records import LaunchRecord, Run
from refshard.report.blocks import Notes, Table
from refshard.report.run.page import page
from refshard.report.run.predictions import dry_runs, dry_runs_of, findings, validation_answer
from refshard.specs.case import Fidelity
from tests.report.printed import as_csv, rows, tables, verdict
from tests.report.runs import CLUSTER, run


def predicted(record: LaunchRecord, fidelity: Fidelity, times: float, memory: float | None = 1.0) -> LaunchRecord:
    """The same case as predicted, its figures so many times the measured ones."""
    replace = msgspec.structs.replace
    peak = record.metrics["peak_memory_bytes"]
    metrics = {
        **record.metrics,
        "step_time_s": (record.metrics["step_time_s"] or 0) * times,
        "peak_memory_bytes": None if memory is None or peak is None else peak * memory,
    }
    samples = tuple(tuple(step * times for step in rank) for rank in record.step_times_s)
    case = record.case.changed(fidelity=fidelity, cluster="lab")
    return replace(record, case=case, spec_hash=case.hash, fidelity=fidelity, step_times_s=samples, metrics=metrics)


def both(times: dict[str, float], memory: float | None = 1.0, fidelity: Fidelity = "simulated") -> Run:
    """A measured run, and predictions of the strategies named."""
    measured = run(failed=False)
    more = [
        predicted(record, fidelity, times[record.case.job.strategy], memory)
        for record in measured.launches
        if record.case.job.strategy in times
    ]
    return msgspec.structs.replace(measured, launches=(*measured.launches, *more))


def test_errors_are_relative_and_signed_and_what_was_not_measured_is_left_out() -> None:
    made = both({"ddp": 1.1, "fsdp2": 0.8})
    alone = msgspec.structs.replace(made, launches=tuple(c for c in made.launches if c.fidelity == "simulated"))
    assert validated(gather(alone)) == ()
    pairs = validated(gather(made))
    assert {pair.measured.strategy: round(pair.step_time_error or 0, 6) for pair in pairs} == {
        "ddp": 0.1,
        "fsdp2": -0.2,
    }
    assert [pair.error("peak_memory_bytes") for pair in pairs] == [0.0, 0.0]
    assert errors(pairs, "simulated", "step_time_s") == [pytest.approx(0.1), pytest.approx(0.2)]
    assert errors(pairs, "emulated", "step_time_s") == []


def test_a_prediction_that_knows_no_memory_has_no_error_of_it() -> None:
    pairs = validated(gather(both({"ddp": 1.0}, memory=None)))
    assert pairs[0].error("peak_memory_bytes") is None
    assert "peak memory" not in findings(pairs)[0]


def test_only_pairs_that_measurement_tells_apart_count_for_the_order() -> None:
    # Measured, yafsdp is faster than fsdp2 beyond doubt; predicted the other way round, no pair agrees.
    right = validated(gather(both({"fsdp2": 1.0, "refshard-yafsdp": 1.0})))
    wrong = validated(gather(both({"fsdp2": 0.1, "refshard-yafsdp": 1.0})))
    assert in_order(right, "simulated") == (1, 1)
    assert in_order(wrong, "simulated") == (0, 1)
    assert in_order(right, "emulated") == (0, 0)


def test_the_findings_name_median_and_worst_of_each_fidelity() -> None:
    pairs = validated(
        gather(both({"ddp": 1.1, "fsdp2": 0.8, "refshard-yafsdp": 1.0}, memory=1.02, fidelity="emulated"))
    )
    (told,) = findings(pairs)
    assert told.startswith(
        "Emulated: median error of the step time 10.0 % (of each case's quickest launch 10.0 %), at most 20.0 %;"
    )
    assert told.endswith("; peak memory: at most 2.0 %.")
    found = validation_answer(pairs)
    (table,) = tables(found)
    errors = {row["case"]: row["error"] for row in rows(table)}
    assert (errors["ddp, 2 ranks"], errors["fsdp2, 2 ranks"]) == ("+10.0 %", "-20.0 %")
    assert verdict(found) == [told]
    assert [row["strategy"] for row in as_csv(found)] == [pair.measured.strategy for pair in pairs]


def test_json_holds_both_sides_in_plain_units() -> None:
    (row,) = as_objects(validated(gather(both({"ddp": 1.1}))))
    assert row["strategy"] == "ddp"
    assert row["fidelity"] == "simulated"
    assert row["cluster"] == "lab"
    assert row["predicted_step_time_s"] == pytest.approx(1.1 * row["measured_step_time_s"])


def test_of_several_launches_the_quickest_is_named_beside_the_median() -> None:
    made = both({"ddp": 1.1})

    def slowed(record: LaunchRecord) -> LaunchRecord:
        if record.fidelity != "measured" or record.round:
            return record
        time = 1.5 * (record.metrics["step_time_s"] or 0)
        return msgspec.structs.replace(record, metrics={**record.metrics, "step_time_s": time})

    (pair,) = validated(gather(msgspec.structs.replace(made, launches=tuple(map(slowed, made.launches)))))
    assert len(pair.measured.launches) > 1
    assert pair.quickest_error == pytest.approx(0.1, rel=1e-3)
    assert "(of each case's quickest launch 10.0 %)" in findings([pair])[0]
    one = msgspec.structs.replace(made, launches=tuple(record for record in made.launches if not record.round))
    assert "quickest" not in findings(validated(gather(one)))[0]


def test_one_factor_on_all_is_told_from_what_is_wrong_with_each() -> None:
    """All 20 % too quick, one of them by 10 % more than that."""
    pairs = validated(gather(both({"ddp": 0.8, "fsdp2": 0.8, "refshard-yafsdp": 0.72})))
    factor, left = scaled(pairs, "simulated")
    assert factor == pytest.approx(1.25, rel=1e-3)
    assert sorted(left) == pytest.approx([0, 0, 0.1], abs=1e-3)
    assert "; after scaling all by 1.25: 0.0 %, at most 10.0 %;" in findings(pairs)[0]


H100 = "NVIDIA H100 80GB HBM3"
MEASURED_S, RESERVED = {"ddp": 0.050, "fsdp2": 0.060, "refshard-fsdp": 0.048, "refshard-yafsdp": 0.040}, 2000 * MIB
REASON = "dry run on dgx-h100: out of memory: needs at least 97.4 GiB"


def measured(device: str = H100) -> Run:
    """Each case on two GPUs, but DDP, which was skipped."""
    made = run(rounds=1, failed=False)
    environment = msgspec.structs.replace(made.header.environment, gpus=(device,) * 2)
    header = msgspec.structs.replace(made.header, environment=environment, started_at="2026-03-01T11:00:00Z")
    launches = tuple(
        skipped(record) if record.case.job.strategy == "ddp" else on_gpu(record, device) for record in made.launches
    )
    return msgspec.structs.replace(made, header=header, launches=launches)


def skipped(record: LaunchRecord) -> LaunchRecord:
    return msgspec.structs.replace(record, state="skipped", error=REASON, metrics={}, step_times_s=())


def on_gpu(record: LaunchRecord, device: str) -> LaunchRecord:
    metrics = {**record.metrics, "peak_reserved_bytes": float(RESERVED)}
    return msgspec.structs.replace(record, device=device, metrics=metrics)


def dry() -> Run:
    """The same cases on another machine, an hour before: 10 % too slow and 1 % too large; DDP runs out of memory."""
    made = run(rounds=1, failed=False)
    environment = msgspec.structs.replace(made.header.environment, id="laptop", hostname="laptop")
    launches = tuple(as_dry_run(record) for record in made.launches if record.case.job.strategy != "single")
    header = msgspec.structs.replace(made.header, run_id="made-dryrun", environment=environment)
    return msgspec.structs.replace(made, header=header, launches=launches)


def as_dry_run(record: LaunchRecord) -> LaunchRecord:
    case = record.case.as_dry_run(CLUSTER)
    fits, step_time_s = case.job.strategy != "ddp", 1.1 * MEASURED_S[case.job.strategy]
    metrics = {
        **record.metrics,
        "step_time_s": step_time_s,
        "peak_reserved_bytes": 1.01 * RESERVED if fits else 99e9,
        "loss_parity": None,
    }
    return msgspec.structs.replace(
        record, case=case, spec_hash=case.hash, fidelity="dryrun", device=H100, metrics=metrics,
        state="ok" if fits else "oom", error=None if fits else "out of memory", step_times_s=((step_time_s,),),
    )  # fmt: skip


def evidence(device: str = H100) -> Evidence:
    return gather(dry(), measured(device))


def test_each_dry_run_stands_beside_its_case_with_errors_and_states() -> None:
    found = dry_runs(evidence())
    assert found is not None
    notes, table = found.blocks
    assert isinstance(notes, Notes)
    assert isinstance(table, Table)
    by_case = {row["case"].partition(",")[0]: row for row in rows(table)}
    assert by_case.keys() == MEASURED_S.keys()
    ddp, fsdp2 = by_case["ddp"], by_case["fsdp2"]
    assert (ddp["measured"], ddp["prediction"], ddp["error"]) == ("skipped", "oom", "-")
    assert ddp["peak reserved predicted"] == "92.2 GiB"
    assert (fsdp2["measured"], fsdp2["prediction"], fsdp2["on"]) == ("ok", "ok", CLUSTER)
    assert (fsdp2["step time measured"], fsdp2["step time predicted"], fsdp2["error"]) == (
        "60.0 ms",
        "66.0 ms",
        "+10.0 %",
    )
    assert (fsdp2["peak reserved measured"], fsdp2["error of reserved"]) == ("1.95 GiB", "+1.0 %")
    assert len(notes.sentences) == 1
    assert notes.sentences[0].startswith("Dry run: median error of the step time 10.0 %, at most 10.0 %")


def test_validate_prints_those_of_which_both_ended_ok() -> None:
    pairs = validated(evidence())
    found = validation_answer(pairs)
    assert [pair.measured.strategy for pair in pairs] == ["fsdp2", "refshard-fsdp", "refshard-yafsdp"]
    assert {row["predicted"] for row in rows(tables(found)[0])} == {"dry run"}
    assert verdict(found)[0].startswith("Dry run: median error of the step time 10.0 %")


def test_the_chart_has_those_of_which_both_ended_ok() -> None:
    found = dry_runs_of(evidence())
    assert [case.strategy for case in found] == ["fsdp2", "refshard-fsdp", "refshard-yafsdp"]
    assert {case.fidelity for case in found.values()} == {"dryrun"}
    assert "dry run (hollow)" in "".join(page(evidence()))


def test_a_dry_run_of_another_gpu_is_no_prediction() -> None:
    assert dry_runs(evidence("NVIDIA A100-SXM4-80GB")) is None


def test_a_run_without_dry_runs_says_nothing() -> None:
    assert dry_runs(gather(measured())) is None


@pytest.mark.parametrize("shown", [True, False])
def test_the_page_shows_them_where_there_are_any(shown: bool) -> None:
    html = "".join(page(evidence() if shown else gather(measured())))
    assert ("Dry run and measurement" in html) is shown
    assert ('href="#dry-runs"' in html) is shown
    assert REASON in html
