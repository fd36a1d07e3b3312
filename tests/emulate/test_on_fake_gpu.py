"""Emulated cases end to end on the fake GPU: NVRTC compiles the kernels, and a fake driver runs them on the host.

What a real GPU adds is time: kernels that spin, copies beside compute.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from refshard.analysis.kineto import read_timeline
from refshard.events.timeline import Timeline
from refshard.measure.run import run_suite
from refshard.quantities import GIB
from refshard.records import CollectiveCount, LaunchRecord
from refshard.specs.model import load_model, parameter_count
from refshard.specs.suite import find_suite, load_suite
from tests.emulate import make_cluster, write_cluster
from tests.emulate.nvrtc import fake_driver
from tests.fakecuda.fresh import needs_device
from tests.measure.fake_gpus import FakeGpus
from tests.measure.fakes import ENVIRONMENT, Silent, make_suite

pytestmark = pytest.mark.processes

MODEL, RANKS, STEPS = "llama-tiny", 8, 2
HELD = 16
"""Multiprocessors of the cluster's 100: compute goes at 0.84 of its rate beside a collective."""
NODE = msgspec.structs.replace(ENVIRONMENT, gpus=("NVIDIA H100 80GB HBM3",), gpu_memory_bytes=(80 * GIB,))
STRATEGIES = sorted({case.job.strategy for case in load_suite(find_suite("emulated_gpu")).cases()})
QUICK = "refshard-yafsdp"


@dataclass(frozen=True)
class Found:
    """What one case left: its record, rank 0's trace, and the kernels that the driver was given."""

    record: LaunchRecord
    timeline: Timeline
    launches: tuple[str, ...]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file in which the fake driver, which all processes find from now on, writes down launches."""
    needs_device()
    with pytest.MonkeyPatch.context() as changing:
        variables = fake_driver(tmp_path_factory.mktemp("driver"))
        for name, value in variables.items():
            changing.setenv(name, value)
        yield Path(variables["FAKE_DRIVER_LOG"])


@pytest.fixture(
    scope="module", params=[pytest.param(one, marks=() if one == QUICK else pytest.mark.full) for one in STRATEGIES]
)
def found(request: pytest.FixtureRequest, driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("emulated")
    cluster = write_cluster(folder / "lab.toml", make_cluster(compute_beside_communication=0.84))
    case = {
        "model": MODEL, "gpus": RANKS, "batch_per_rank": 1, "seq_len": 32, "device": "cuda", "precision": "bf16",
        "measured_steps": STEPS, "traced_steps": 1, "time_limit_s": 300, "fidelity": "emulated",
        "cluster": str(cluster),
    }  # fmt: skip
    suite = make_suite(matrix={"strategy": [request.param]}, case=case)
    driver.write_text("")
    (record,) = run_suite(suite, folder / "run", FakeGpus(), Silent(), NODE).launches
    assert (record.state, record.error) == ("ok", None)
    return Found(record, read_timeline(folder / "run" / record.traces[0]), tuple(driver.read_text().splitlines()))


def test_a_case_proves_its_collectives_and_is_held_against_no_losses(found: Found) -> None:
    record = found.record
    assert (record.fidelity, record.device, record.backend) == ("emulated", "NVIDIA H100 80GB HBM3", "emulated")
    assert record.warnings == ()
    proof = record.proof
    assert proof is not None
    assert proof.announced == proof.traced != ()
    assert proof.failures == ()
    assert (proof.loss_parity, proof.bit_identical_to_ddp) == (None, None)
    assert len(set(record.losses)) > 1, "the weights must move"


def test_it_computes_and_gathers_in_bf16_and_reduces_in_fp32(found: Found) -> None:
    parameters = parameter_count(load_model(MODEL))
    proof = found.record.proof
    assert proof is not None
    sent = {one.op: one for one in proof.announced}
    reduced = sent["all_reduce" if found.record.case.job.strategy == "ddp" else "reduce_scatter"]
    # Flat parameters of the engine are padded, by less than a percent here.
    assert 4 * parameters <= reduced.bytes < 4.04 * parameters
    dtypes = {one.op: one.dtype for one in found.timeline.collectives if one.start is not None}
    assert dtypes.pop(reduced.op) == "float"
    if found.record.case.job.strategy.startswith("refshard"):
        assert dtypes.pop("all_reduce") == "unsigned char", "which parameters were used"
    assert set(dtypes.values()) <= {"c10::BFloat16"}
    assert ("all_gather" in dtypes) == (found.record.case.job.strategy != "ddp")
    assert found.record.peak_flops_per_s == pytest.approx(989e12, rel=2e-3), "the peak in bf16"


def test_each_collective_is_a_start_and_a_hold_on_one_stream(found: Found) -> None:
    starts, holds = found.launches[::2], found.launches[1::2]
    assert {line.rpartition(" ")[0] for line in starts} == {"start 1 1"}
    assert {line.rpartition(" ")[0] for line in holds} == {f"hold {HELD} 512"}
    assert [line.split()[-1] for line in starts] == [line.split()[-1] for line in holds]
    case, proof = found.record.case, found.record.proof
    assert proof is not None
    assert len(starts) >= case.protocol.total_steps * _count(proof.announced)


def _count(announced: tuple[CollectiveCount, ...]) -> int:
    return sum(one.count for one in announced)


@pytest.mark.full
def test_tests_of_emulation_on_a_gpu_pass_on_the_fake_one(driver: Path) -> None:
    command = [sys.executable, "-m", "tests.fakecuda.under", "host", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "tests/gpu/test_emulation.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "6 passed, 2 skipped" in done.stdout, "the skipped ones ask for time and for real kernels"
