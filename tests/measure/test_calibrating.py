"""Calibrations that run: on this machine's cores, on fake GPUs, cut short, and under torchrun and Slurm."""

import os
import signal
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, Popen

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from refshard.measure.calibration.collectives import Agreement
from refshard.measure.calibration.profile import measure, read_profile
from refshard.measure.calibration.rank import Measurement, Ordered, OutOfStepError
from refshard.measure.calibration.samples import Operations, RankSamples, Sample, samples_file
from refshard.measure.launchers.local import LocalLauncher
from refshard.quantities import MIB
from refshard.report.calibration import profile_answer
from refshard.specs.cluster import COLLECTIVES, load_cluster
from tests.fakecuda.fresh import needs_device
from tests.measure.calibrations import calibration
from tests.measure.commandline import processes_of, refshard, start, wait_for
from tests.measure.fake_gpus import FakeGpus
from tests.measure.launchers.slurm import obstacle, running_slurm
from tests.measure.launchers.test_torchrun import two_nodes
from tests.report.printed import text

pytestmark = pytest.mark.processes


def samples(folder: Path, rank: int) -> RankSamples:
    return msgspec.json.decode(samples_file(folder, rank).read_bytes(), type=RankSamples)


def has_measured(folder: Path, piece: str) -> bool:
    return all((path := samples_file(folder, rank)).exists() and piece in path.read_text() for rank in range(2))


@pytest.mark.full
def test_what_has_no_room_on_a_gpu_is_named_and_all_else_is_measured(tmp_path: Path) -> None:
    """44 MiB hold what products in bf16 rotate over, not those in fp32; and attention of short sequences."""
    needs_device()
    assert measure(calibration(device="cuda"), FakeGpus(44 * MIB), tmp_path, print) is None
    profile = read_profile(tmp_path)
    hardware = profile.accelerator
    assert (hardware.device, hardware.device_name, hardware.capability) == ("cuda", "NVIDIA H100 80GB HBM3", (9, 0))
    assert profile.library == "nccl"
    assert hardware.matmul.keys() == hardware.matmul_burst.keys() == {"bf16", "fp32"}
    assert {point.seq_len for point in hardware.attention_points} == {32}
    kinds = [f"{kind}{pace}" for kind in ("attention", "products") for pace in (" in bursts", "")]
    assert set(profile.not_measured) == {f"{d} {k}" for d in ("bf16", "fp32") for k in kinds} - {
        "bf16 products", "bf16 products in bursts"
    }  # fmt: skip
    for kind, reason in (
        ("products", "only 3 measured; 64 tokens, 128 x 128: OutOfMemoryError: CUDA out of memory."),
        ("attention", "only 1 measured; 1024 tokens, head dimension 16: OutOfMemoryError: CUDA out of memory."),
    ):
        assert profile.not_measured[f"fp32 {kind}"].startswith(reason)
    (sweep,) = samples(tmp_path, 1).sweeps
    assert len(sweep["bf16 products"].samples) == 6
    assert hardware.optimizer_bytes_per_s > 0, "measured after attention failed: its memory was given back"
    assert {m.op for m in profile.measured} == set(COLLECTIVES) - {"exchange"}
    assert "Not measured:" in text(profile_answer(profile, ""))


def test_a_rank_that_fails_in_a_collective_says_why_before_it_ends(tmp_path: Path) -> None:
    """Else it goes on: the others do not wait for it in a kernel."""

    def fails(_: Measurement) -> Iterator[Sample]:
        yield Operations(kernel_s=1e-6, host_s=1e-6)
        raise torch.OutOfMemoryError("CUDA out of memory")

    store, alone = HashStore(), calibration(ranks=1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        measurement = Measurement(alone, tmp_path, 0, 1, torch.device("cpu"), Agreement(store, 1))
        measurement.begin_sweep()
        measurement.measure("operations", Ordered(fails))
        with pytest.raises(OutOfStepError):
            measurement.measure("all_gather", Ordered(fails, collective=True))
    finally:
        dist.destroy_process_group()
    (sweep,) = samples(tmp_path, 0).sweeps
    assert {name: piece.failure for name, piece in sweep.items()} == dict.fromkeys(
        ("operations", "all_gather"), "OutOfMemoryError: CUDA out of memory"
    )
    assert len(sweep["operations"].samples) == 1, "what came before the failure"


def test_a_rank_that_is_killed_leaves_what_was_measured(tmp_path: Path) -> None:
    def kill_in_fp32(phase: str) -> None:
        if "fp32 products" in phase:
            for process in processes_of(tmp_path, "refshard.measure.worker"):
                if process.environ()["RANK"] == "1":
                    process.kill()

    ended = measure(calibration(), LocalLauncher(), tmp_path, kill_in_fp32)
    assert ended is not None
    assert ended.startswith("rank 1 ended with signal 9 (SIGKILL)")
    profile = read_profile(tmp_path, ended)
    assert profile.accelerator.matmul.keys() == {"bf16"}
    assert profile.accelerator.optimizer_bytes_per_s > 0
    assert profile.not_measured["all_gather of 2 ranks on 1 node"] == ended
    assert not processes_of(tmp_path)


@pytest.mark.full
def test_calibrate_measures_this_machine_and_writes_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "mine.toml"
    done = refshard("calibrate", "--quick", "--gpus", "2", "--device", "cpu", "--out", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(f"profile: {path}")
    assert "busbw" in done.stdout
    made = load_cluster(str(path))
    assert (made.ranks_per_node, made.nodes, made.library, made.not_measured) == (2, 1, "gloo", {})
    hardware = made.accelerator
    for rates in (hardware.matmul, hardware.matmul_burst):
        assert list(rates) == ["bf16", "fp32"]
        assert 1e9 < rates["fp32"].flops_per_s < 1e13
    assert 1e8 < hardware.memory_bytes_per_s < 1e12
    assert 1e-7 < hardware.kernel_s < 1e-2
    assert {m.op for m in made.measured} == set(COLLECTIVES)
    assert "--quick" in tomllib.loads(path.read_text())["sources"]["measured"]
    assert [entry.name for entry in path.parent.iterdir()] == ["mine.toml"]
    assert not processes_of(tmp_path)


@pytest.mark.full
def test_an_interrupted_calibration_keeps_its_samples_for_a_profile(tmp_path: Path) -> None:
    path, folder = tmp_path / "mine.toml", tmp_path / "mine.toml.samples"
    process = start("calibrate", "--quick", "--gpus", "2", "--device", "cpu", "--out", path)
    wait_for(lambda: has_measured(folder, "optimizer"), 240)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=1800)
    assert process.returncode == 130, err
    assert f"samples: {folder}\n" in err
    assert err.endswith("samples are saved. Make a profile of them with: refshard calibrate --from FOLDER\n")
    assert not processes_of(tmp_path)
    assert not path.exists()
    done = refshard("calibrate", "--from", folder)
    assert done.returncode == 0, done.stderr
    assert "bf16" in load_cluster(str(path)).accelerator.matmul
    assert "the calibration ended before" in " ".join(done.stdout.split())


@pytest.mark.full
def test_torchrun_on_two_nodes_tells_links_within_and_between_apart(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    options = [option.replace("per-node=1", "per-node=2") for option in two_nodes()]
    asked = ["calibrate", "--launcher", "torchrun", "--quick", "--device", "cpu", "--out", str(path)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--no-python", sys.executable, "-m", "refshard"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ExitStack() as ended:
        agents = [
            ended.enter_context(Popen([*command, *asked], stdout=PIPE, stderr=PIPE, text=True, env=environment))
            for _ in range(2)
        ]
        for agent in agents:
            ended.callback(agent.kill)
        said = [agent.communicate(timeout=1800) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sorted(out.count("profile: ") for out, _ in said) == [0, 1], "rank 0 prints, and no other"
    made = load_cluster(str(path))
    assert (made.ranks_per_node, made.nodes, made.not_measured) == (2, 2, {})
    assert made.between is not None
    sizes: dict[tuple[int, int], set[int]] = {}
    for point in made.measured:
        sizes.setdefault((point.ranks, point.nodes), set()).add(point.bytes)
    assert sizes.keys() == {(4, 2), (2, 1), (2, 2)}, "all; within a node; and one rank of each node"
    assert all(len(found) == 3 for found in sizes.values())
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.toml"]
    assert not processes_of(tmp_path)


@pytest.mark.full
@pytest.mark.slurm
def test_slurm_runs_a_calibration_as_a_job(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    if found := obstacle():
        pytest.skip(found)
    path = tmp_path / "mine.toml"
    asked = ("calibrate", "--quick", "--launcher", "slurm", "--gpus", "2", "--device", "cpu", "--out", path)
    with running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        process = start(*asked, "--sbatch", "--partition=main", env=cluster.environment)
        out, err = process.communicate(timeout=1800)
        assert process.returncode == 0, err + out
        assert not cluster.jobs()
        assert cluster.ask("scontrol", "show", "jobs").count("JobState=COMPLETED") == 1
    made = load_cluster(str(path))
    assert (made.ranks_per_node, made.nodes, made.not_measured) == (2, 1, {})
    assert "--launcher slurm" in made.sources["measured"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.toml"]
