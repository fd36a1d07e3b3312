"""Dry runs beside the cases that were measured after them: pairs over two machines, errors by hand, states."""

import msgspec
import pytest

from refshard.analysis.evidence import Evidence, gather
from refshard.analysis.validation import validated
from refshard.quantities import MIB
from refshard.records import LaunchRecord, Run
from refshard.report.blocks import Notes, Table
from refshard.report.run.page import page
from refshard.report.run.predictions import dry_runs, dry_runs_of, validation_answer
from tests.report.printed import rows, tables, verdict
from tests.report.runs import CLUSTER, run

H100 = "NVIDIA H100 80GB HBM3"
MEASURED_S, RESERVED = {"ddp": 0.050, "fsdp2": 0.060, "refshard-fsdp": 0.048, "refshard-yafsdp": 0.040}, 2000 * MIB
REASON = "dry run on dgx-h100: out of memory: needs at least 97.4 GiB"


def measured(device: str = H100) -> Run:
    """Each case on two GPUs, but DDP, which was skipped."""
    made = run(rounds=1, failed=False)
    environment = msgspec.structs.replace(made.header.environment, gpus=(device,) * 2)
    header = msgspec.structs.replace(made.header, environment=environment, started_at="2026-03-01T11:00:00Z")
    launches = tuple(
        skipped(record) if record.case.strategy == "ddp" else on_gpu(record, device) for record in made.launches
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
    launches = tuple(as_dry_run(record) for record in made.launches if record.case.strategy != "single")
    header = msgspec.structs.replace(made.header, run_id="made-dryrun", environment=environment)
    return msgspec.structs.replace(made, header=header, launches=launches)


def as_dry_run(record: LaunchRecord) -> LaunchRecord:
    case = record.case.as_dry_run(CLUSTER)
    fits, step_time_s = case.strategy != "ddp", 1.1 * MEASURED_S[case.strategy]
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
