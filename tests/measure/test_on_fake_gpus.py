"""Measured suites end to end on eight ranks with a fake H100 each: what a first run on real ones does, but NCCL."""

import msgspec
import pytest

from refshard.analysis.recording import WARMUP_STEPS
from refshard.measure.run import run_suite
from refshard.quantities import MIB
from refshard.records import LaunchRecord
from refshard.specs.hardware import load_hardware
from tests.measure.fake_gpus import FakeGpus
from tests.measure.fakes import ENVIRONMENT, Silent, make_suite

pytestmark = [pytest.mark.processes, pytest.mark.full]

RANKS = 8
NODE = msgspec.structs.replace(
    ENVIRONMENT, gpus=("NVIDIA H100 80GB HBM3",) * RANKS, gpu_memory_bytes=(100 * MIB,) * RANKS
)
"""With so little memory that one GPU cannot hold what all do."""
STRATEGIES = ("ddp", "fsdp2", "refshard-yafsdp")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LaunchRecord]:
    case = {"global_batch": 8, "seq_len": 32, "measured_steps": 2, "traced_steps": 1, "device": "cuda"}
    matrix = {"strategy": list(STRATEGIES), "gpus": [RANKS], "model": ["llama-mini"]}
    suite = make_suite(matrix=matrix, case={**case, "precision": "bf16", "checkpointing": "full"})
    run = run_suite(suite, tmp_path_factory.mktemp("node") / "run", FakeGpus(), Silent(), NODE)
    return {record.case.job.strategy: record for record in run.launches}


def test_no_rank_holds_the_reference(found: dict[str, LaunchRecord]) -> None:
    assert found.keys() == set(STRATEGIES)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_case_ends_ok_and_is_proved_by_its_reduced_model(found: dict[str, LaunchRecord], strategy: str) -> None:
    record = found[strategy]
    assert (record.state, record.error) == ("ok", None)
    assert (record.device, record.backend) == ("NVIDIA H100 80GB HBM3", "nccl")
    assert record.proof is not None
    assert record.proof.parity_of.startswith("the same case reduced to 2 layers")
    parity = record.metrics["loss_parity"]
    assert parity is not None
    assert parity < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mfu_is_held_against_the_gpus_dense_bf16_peak(found: dict[str, LaunchRecord], strategy: str) -> None:
    record = found[strategy]
    assert record.peak_flops_per_s == pytest.approx(989e12, rel=2e-3)
    assert record.metrics["mfu"] is not None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_are_held_against_steps_that_nothing_waits_for(found: dict[str, LaunchRecord], strategy: str) -> None:
    record = found[strategy]
    assert (ratio := record.metrics["synchronisation"]) is not None
    assert ratio > 0
    assert len(record.losses) == record.case.protocol.total_steps + 2 + WARMUP_STEPS + record.case.protocol.traced_steps


def test_ranks_of_what_shards_hold_a_part(found: dict[str, LaunchRecord]) -> None:
    """Of 30M parameters, which take 16 bytes each with their gradients and AdamW's state."""
    peaks = {name: found[name].metrics["peak_memory_bytes"] for name in STRATEGIES}
    assert peaks["ddp"] is not None
    assert peaks["ddp"] > 16 * 30e6
    for name in STRATEGIES[1:]:
        assert (peak := peaks[name]) is not None
        assert peak < peaks["ddp"] / 2, name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_tells_its_gpus_memory_by_kind(found: dict[str, LaunchRecord], strategy: str) -> None:
    record = found[strategy]
    assert len(record.gpu_memory) == RANKS
    for one in record.gpu_memory:
        assert 0 < one.requested_bytes <= one.allocated_bytes <= one.active_bytes <= one.reserved_bytes
        assert one.reserved_bytes <= one.used_bytes < one.total_bytes == load_hardware("h100-sxm-80gb").memory_bytes
        assert (one.outside_bytes, one.retries, one.ooms) == (0, 0, 0)
    assert record.metrics["peak_memory_bytes"] == max(one.allocated_bytes for one in record.gpu_memory)
    assert record.metrics["peak_reserved_bytes"] == max(one.reserved_bytes for one in record.gpu_memory)
