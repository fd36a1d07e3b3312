"""Measure this machine and make a cluster's profile of it."""

import shlex
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
import torch

from refshard.errors import LaunchError, SpecError
from refshard.harness.calibration.profile import build_profile
from refshard.harness.calibration.samples import CALIBRATION_FILE, Calibration, RankSamples, samples_file
from refshard.harness.environment import available_cores, cpu_name
from refshard.harness.launchers.base import Job, Launcher, LaunchOutcome
from refshard.specs.case import Device
from refshard.specs.cluster import ClusterSpec
from refshard.specs.suite import NetworkSpec

_SWEEP_LIMIT_S = 600.0
_MOST_SWEEPS = 99


def plan_calibration(
    *,
    ranks: int | None,
    threads: int,
    network: NetworkSpec | None,
    device: Device,
    quick: bool,
    sweeps: int | None = None,
) -> Calibration:
    """What to measure here: on a CPU as many ranks as its cores bear if not told, on GPUs one each; in three sweeps,
    or a quick one.

    Raises:
        SpecError: the device is not there, or the ranks cannot be spread over the hosts.
    """
    chosen = _device(device, network)
    if threads < 1:
        raise SpecError(f"threads must be >= 1, got {threads}")
    if sweeps is not None and not 1 <= sweeps <= _MOST_SWEEPS:
        raise SpecError(f"sweeps must be from 1 to {_MOST_SWEEPS}, got {sweeps}")
    cores = available_cores()
    there = torch.cuda.device_count() if chosen == "cuda" else max(cores // threads, 1)
    hosts = network.hosts if network is not None else 1
    asked = ranks if ranks is not None else max(there // hosts, 1) * hosts
    if asked < 1:
        raise SpecError(f"ranks must be >= 1, got {asked}")
    if chosen == "cuda" and asked > there:
        raise SpecError(f"ranks: {asked} ranks need as many GPUs, here are {there}; lower it")
    if asked % hosts:
        raise SpecError(f"ranks must be a multiple of the network's {hosts} hosts, got {asked}; change either")
    return Calibration(
        ranks=asked,
        threads=threads,
        nodes=hosts,
        device=chosen,
        quick=quick,
        sweeps=sweeps or (1 if quick else 3),
        cpu_clock=chosen == "cpu" and threads == 1 and asked <= cores,
    )


def calibrate(calibration: Calibration, launcher: Launcher, on_progress: Callable[[str], None]) -> ClusterSpec:
    """Measure with ``launcher``, which joins the ranks, and return the profile.

    Raises:
        LaunchError: a rank failed, or they took too long.
        KeyboardInterrupt: it was cut short.
    """
    with tempfile.TemporaryDirectory(prefix="refshard-calibration-") as name:
        folder = Path(name)
        (folder / CALIBRATION_FILE).write_bytes(msgspec.json.encode(calibration))
        job = Job(program="calibration", processes=calibration.ranks, time_limit_s=_limit_s(calibration))
        launch = launcher.launch(job, folder, on_progress)
        found = [samples_file(folder, rank) for rank in range(calibration.ranks)]
        if launch.timed_out or launch.error or not all(path.exists() for path in found):
            raise LaunchError(_failure(launch, _limit_s(calibration)))
        ranks = [msgspec.json.decode(path.read_bytes(), type=RankSamples) for path in found]
    machine = ranks[0].device if calibration.device == "cuda" else cpu_name()
    command = shlex.join(["refshard", *sys.argv[1:]])
    when = f"on {machine}, {datetime.now(UTC).date().isoformat()}, torch {torch.__version__}: {command}"
    return build_profile(calibration, ranks, machine, when)


def _limit_s(calibration: Calibration) -> float:
    return _SWEEP_LIMIT_S * (1 + calibration.sweeps)


def _failure(launch: LaunchOutcome, limit_s: float) -> str:
    if launch.timed_out:
        stood = f" ({launch.error})" if launch.error else ""
        told = f"the ranks did not end within {limit_s:g} s and were ended{stood}"
        return f"calibrate: {told}; try fewer --sweeps, or --quick"
    last = next((line.strip() for line in reversed(launch.log_tail) if line.strip()), "it wrote nothing")
    return f"calibrate: {launch.error or 'a rank left no result'} ({last}); correct that, or lower --ranks"


def _device(wanted: Device, network: NetworkSpec | None) -> Literal["cpu", "cuda"]:
    gpus = torch.cuda.device_count()
    if wanted == "cuda" and not gpus:
        raise SpecError("device: 'cuda' asked for, but torch sees no GPU; ask for 'cpu' or 'auto'")
    if network is not None:
        if wanted == "cuda":
            raise SpecError("device must be 'cpu' over a network of this machine: NCCL would go around it, got 'cuda'")
        return "cpu"
    return "cuda" if wanted == "cuda" or (wanted == "auto" and gpus) else "cpu"
