"""The memory model as it stands, against every peak that was recorded; and which cases it knows."""

from pathlib import Path
from statistics import median

import msgspec
import pytest

from refshard.errors import SpecError
from refshard.harness.simulated import configuration_of
from refshard.harness.store import read_run
from refshard.memory.of_case import memory_of
from refshard.quantities import MIB
from refshard.records import LaunchRecord
from refshard.specs.case import CaseSpec
from refshard.specs.configuration import Configuration

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "profiles" / "recorded"
RUNS = ("epyc-2-cores/memory", "epyc-2-cores/validation", "xeon-2-cores/validation_network")


def error_of(record: LaunchRecord) -> float:
    """Relative, of the peak as it is predicted now; above 0 where the prediction is larger."""
    planned, measured = memory_of(record.case, "cpu"), record.metrics["peak_memory_bytes"]
    assert planned
    assert measured
    return planned.peak / measured - 1


def test_recorded_peaks_are_predicted_within_3_percent_and_as_the_page_says() -> None:
    """The page's figures are those of the records and of the model as it stands."""
    found = {}
    for run in RUNS:
        for record in read_run(RECORDED / run).launches:
            if record.fidelity == "measured" and record.case.strategy != "single":
                found[run, record.case.name, record.round] = error_of(record)
    worst = max(found, key=lambda key: abs(found[key]))
    assert len(found) > 90
    assert max(map(abs, found.values())) <= 0.03, worst
    assert median(map(abs, found.values())) <= 0.01


def test_planned_peaks_in_bf16_are_those_of_recorded_dry_runs() -> None:
    """But for cuBLAS's workspaces of 32 MiB for forward and as much for backward, which closed forms leave out."""
    found = {}
    for record in read_run(ROOT / "profiles" / "recorded" / "dryrun" / "llama3_8b_h100").launches:
        planned, peak = memory_of(record.case, "cuda"), record.metrics.get("peak_memory_bytes")
        if record.case.strategy == "ddp":  # recorded before dry runs counted DDP's first bucket
            continue
        if planned is not None and peak is not None:
            found[record.case.name] = (planned.peak + 64 * MIB) / peak - 1
    worst = max(found, key=lambda name: abs(found[name]))
    assert len(found) > 40
    assert abs(found[worst]) < 0.001, worst


def test_planned_peaks_in_bf16_are_of_gpus_only() -> None:
    case = CaseSpec(strategy="ddp", world_size=2, model="llama-tiny", global_batch=2, precision="bf16")
    assert memory_of(case, "cpu") is None


def test_simulated_cases_compute_in_their_precision_and_on_their_mesh() -> None:
    case = CaseSpec(
        strategy="fsdp2", world_size=32, model="llama3.2-1b", global_batch=8, fidelity="simulated", microbatches=2,
        cluster="dgx-h100x4", replicas=2, tensor_parallel=2, pipeline_parallel=2, context_parallel=2,
        checkpointing=(0, 3),
    )  # fmt: skip
    assert configuration_of(case) == Configuration(
        strategy="fsdp2", replicate=2, shard=2, tensor=2, pipeline=2, context=2, microbatches=2, microbatch=1,
        checkpointing="2", precision="fp32",
    )  # fmt: skip
    assert configuration_of(msgspec.structs.replace(case, precision="bf16")).precision == "bf16"
    replicated = msgspec.structs.replace(case, strategy="ddp", replicas=1, checkpointing="full")
    found = configuration_of(replicated)
    assert (found.replicate, found.shard, found.checkpointing) == (4, 1, "full")


def test_what_is_not_simulated_is_refused_with_the_remedy() -> None:
    case = CaseSpec(
        strategy="fsdp2", world_size=8, model="llama3.2-1b", global_batch=8, fidelity="simulated", cluster="dgx-h100",
        optimizer="muon",
    )  # fmt: skip
    with pytest.raises(SpecError, match="optimizer is not simulated, got 'muon'; use fidelity 'dryrun', or measure"):
        configuration_of(case)
