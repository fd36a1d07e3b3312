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
def test_a_case_ends_ok_with_all_figures_and_is_proved_by_its_reduced_model(
    found: dict[str, LaunchRecord], strategy: str
) -> None:
    record = found[strategy]
    assert (record.state, record.error) == ("ok", None)
    assert (record.device, record.backend) == ("NVIDIA H100 80GB HBM3", "nccl")
    assert record.proof is not None
    assert record.proof.parity_of.startswith("the same case reduced to 2 layers")
    metrics = {name: value for name, value in record.metrics.items() if value is not None}
    assert metrics["loss_parity"] < 1e-5
    assert record.peak_flops_per_s == pytest.approx(989e12, rel=2e-3)
    assert metrics["mfu"] > 0
    assert metrics["synchronisation"] > 0
    assert len(record.losses) == record.case.protocol.total_steps + 2 + WARMUP_STEPS + record.case.protocol.traced_steps
    assert len(record.gpu_memory) == RANKS
    for one in record.gpu_memory:
        assert 0 < one.requested_bytes <= one.allocated_bytes <= one.active_bytes <= one.reserved_bytes
        assert one.reserved_bytes <= one.used_bytes < one.total_bytes == load_hardware("h100-sxm-80gb").memory_bytes
        assert (one.outside_bytes, one.retries, one.ooms) == (0, 0, 0)
    assert record.metrics["peak_memory_bytes"] == max(one.allocated_bytes for one in record.gpu_memory)
    assert record.metrics["peak_reserved_bytes"] == max(one.reserved_bytes for one in record.gpu_memory)


def test_ranks_of_what_shards_hold_a_part(found: dict[str, LaunchRecord]) -> None:
    """Of 30M parameters, which take 16 bytes each with their gradients and AdamW's state."""
    peaks = {name: found[name].metrics["peak_memory_bytes"] for name in STRATEGIES}
    assert peaks["ddp"] is not None
    assert peaks["ddp"] > 16 * 30e6
    for name in STRATEGIES[1:]:
        assert (peak := peaks[name]) is not None
        assert peak < peaks["ddp"] / 2, name
