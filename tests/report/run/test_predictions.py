"""Predictions compared with the measured cases of one run."""

import msgspec
import pytest

from refshard.analysis.evidence import Evidence, gather
from refshard.analysis.validation import Validated, as_objects, errors, in_order, scaled, validated
from refshard.quantities import MIB
from refshard.records import Run
from refshard.report.blocks import Notes, Table
from refshard.report.run.page import page
from refshard.report.run.predictions import dry_runs, dry_runs_of, findings, validation_answer
from refshard.specs.case import Fidelity
from tests.report.printed import as_csv, rows, tables, verdict
from tests.report.runs import CLUSTER, joined, later, quicker, run, with_record, with_spec


def pairs(times: dict[str, float], memory: float = 1.0, fidelity: Fidelity = "simulated") -> tuple[Validated, ...]:
    """A measured run and predictions of some strategies, their step times and peak memories relative to it."""
    return validated(gather(both(times, memory, fidelity)))


def both(times: dict[str, float], memory: float = 1.0, fidelity: Fidelity = "simulated") -> Run:
    predicted = with_spec(run(failed=False), fidelity=fidelity, cluster="lab")
    kept = []
    for record in predicted.launches:
        if (factor := times.get(record.case.job.strategy)) is not None:
            peak, time = record.metrics["peak_memory_bytes"] or 0, record.metrics["step_time_s"] or 0
            metrics = {**record.metrics, "step_time_s": time * factor, "peak_memory_bytes": memory * peak or None}
            samples = tuple(tuple(step * factor for step in rank) for rank in record.step_times_s)
            kept.append(msgspec.structs.replace(record, fidelity=fidelity, step_times_s=samples, metrics=metrics))
    return joined(run(failed=False), msgspec.structs.replace(predicted, launches=tuple(kept)))


def test_errors_are_relative_and_signed_and_need_a_measurement() -> None:
    made = both({"ddp": 1.1, "fsdp2": 0.8})
    alone = tuple(record for record in made.launches if record.fidelity == "simulated")
    assert validated(gather(msgspec.structs.replace(made, launches=alone))) == ()
    found = validated(gather(made))
    assert [pair.error("step_time_s") for pair in found] == pytest.approx([0.1, -0.2])
    assert errors(found, "step_time_s") == pytest.approx([0.1, 0.2])
    assert errors(found, "peak_memory_bytes") == [0, 0]
    (row, _) = as_objects(found)
    assert (row["strategy"], row["fidelity"], row["cluster"]) == ("ddp", "simulated", "lab")
    assert row["predicted_step_time_s"] == pytest.approx(1.1 * row["measured_step_time_s"])


def test_a_prediction_without_memory_has_no_error_of_it() -> None:
    found = pairs({"ddp": 1.0}, memory=0)
    assert found[0].error("peak_memory_bytes") is None
    assert "peak memory" not in findings(found)[0]


@pytest.mark.parametrize(("factor", "agreed"), [(1.0, 1), (0.1, 0)])
def test_only_pairs_with_a_measured_difference_count_for_the_order(factor: float, agreed: int) -> None:
    """Measured, yafsdp is faster than fsdp2 beyond doubt."""
    assert in_order(pairs({"fsdp2": factor, "refshard-yafsdp": 1.0})) == (agreed, 1)


def test_the_findings_have_median_and_maximum_of_each_fidelity() -> None:
    found = pairs({"ddp": 1.1, "fsdp2": 0.8, "refshard-yafsdp": 1.0}, memory=1.02, fidelity="emulated")
    (sentence,) = findings(found)
    assert sentence.startswith(
        "Emulated: median error of the step time 10.0 % (of each case's quickest launch 10.0 %), at most 20.0 %;"
    )
    assert sentence.endswith("; peak memory: at most 2.0 %.")
    answer = validation_answer(found)
    assert [row["error"] for row in rows(tables(answer)[0])] == ["+10.0 %", "-20.0 %", "+0.0 %"]
    assert verdict(answer) == [sentence]
    assert [row["strategy"] for row in as_csv(answer)] == [pair.measured.strategy for pair in found]


def test_the_quickest_launch_is_named_if_there_are_several() -> None:
    made = both({"ddp": 1.1})
    place = next(n for n, record in enumerate(made.launches) if record.case.job.strategy == "ddp")
    slow = {**made.launches[place].metrics, "step_time_s": 1.5 * 0.05}
    (pair,) = validated(gather(with_record(made, place, metrics=slow)))
    assert pair.quickest_error == pytest.approx(0.1, rel=1e-3)
    assert "(of each case's quickest launch 10.0 %)" in findings([pair])[0]
    one = msgspec.structs.replace(made, launches=tuple(record for record in made.launches if not record.round))
    assert "quickest" not in findings(validated(gather(one)))[0]


def test_one_factor_for_all_leaves_the_error_of_each() -> None:
    """All 20 % too quick, one of them by 10 % more than that."""
    found = pairs({"ddp": 0.8, "fsdp2": 0.8, "refshard-yafsdp": 0.72})
    factor, left = scaled(found)
    assert factor == pytest.approx(1.25, rel=1e-3)
    assert sorted(left) == pytest.approx([0, 0, 0.1], abs=1e-3)
    assert "; after scaling all by 1.25: 0.0 %, at most 10.0 %;" in findings(found)[0]


H100 = "NVIDIA H100 80GB HBM3"
RESERVED = 2000 * MIB
REASON = "dry run on dgx-h100: out of memory: needs at least 97.4 GiB"


def measured(device: str = H100) -> Run:
    """Each case on two GPUs, but DDP, which was skipped."""
    made = later(run(rounds=1, failed=False), "made", 11, gpus=(device,) * 2)
    for place, record in enumerate(made.launches):
        metrics = {**record.metrics, "peak_reserved_bytes": float(RESERVED)}
        if record.case.job.strategy == "ddp":
            made = with_record(made, place, state="skipped", error=REASON, metrics={}, step_times_s=())
        else:
            made = with_record(made, place, device=device, metrics=metrics)
    return made


def dry() -> Run:
    """The same cases on another machine, an hour before: 10 % too slow and 1 % too large; DDP runs out of memory."""
    made = quicker(run(rounds=1, failed=False), 1.1)
    made = later(made, "made-dryrun", 10, id="laptop", hostname="laptop")
    made = msgspec.structs.replace(made, launches=made.launches[1:])
    for place, record in enumerate(made.launches):
        case, fits = record.case.as_dry_run(CLUSTER), record.case.job.strategy != "ddp"
        reserved = 1.01 * RESERVED if fits else 99e9
        metrics = {**record.metrics, "peak_reserved_bytes": reserved, "loss_parity": None}
        made = with_record(
            made, place, case=case, spec_hash=case.hash, fidelity="dryrun", device=H100, metrics=metrics,
            state="ok" if fits else "oom", error=None if fits else "out of memory",
        )  # fmt: skip
    return made


def evidence(device: str = H100) -> Evidence:
    return gather(dry(), measured(device))


def test_dry_runs_have_a_row_each_with_errors_and_states() -> None:
    found = dry_runs(evidence())
    assert found is not None
    notes, table = found.blocks
    assert isinstance(notes, Notes)
    assert isinstance(table, Table)
    ddp, fsdp2 = rows(table)[:2]
    assert (ddp["measured"], ddp["prediction"], ddp["error"]) == ("skipped", "oom", "-")
    assert ddp["peak reserved predicted"] == "92.2 GiB"
    assert (fsdp2["measured"], fsdp2["prediction"], fsdp2["on"], fsdp2["error"]) == ("ok", "ok", CLUSTER, "+10.0 %")
    assert (fsdp2["peak reserved measured"], fsdp2["error of reserved"]) == ("1.95 GiB", "+1.0 %")
    (sentence,) = notes.sentences
    assert sentence.startswith("Dry run: median error of the step time 10.0 %, at most 10.0 %")


def test_the_chart_and_the_page_have_dry_runs_if_both_ended_ok() -> None:
    found = dry_runs_of(evidence())
    assert [case.strategy for case in found] == ["fsdp2", "refshard-fsdp", "refshard-yafsdp"]
    assert {case.fidelity for case in found.values()} == {"dryrun"}
    for shown, made in ((True, evidence()), (False, gather(measured()))):
        html = "".join(page(made)).replace("\N{NO-BREAK SPACE}", " ")
        for text in ("dry run (hollow)", "Dry run and measurement", 'href="#dry-runs"'):
            assert (text in html) is shown
        assert REASON in html


def test_a_dry_run_of_another_gpu_is_no_prediction() -> None:
    assert dry_runs(evidence("NVIDIA A100-SXM4-80GB")) is None
