"""A calibration from the options to the profile: what to measure, launched, and read back."""

import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
import torch

from refshard.errors import LaunchError, SpecError
from refshard.measure.calibration.collectives import traffic
from refshard.measure.calibration.kernels import pace, shapes
from refshard.measure.calibration.profile import TooLittleError, build_profile
from refshard.measure.calibration.samples import CALIBRATION_FILE, Calibration, RankSamples, samples_file
from refshard.measure.launchers.base import Job, Launcher
from refshard.measure.launchers.torchrun import Place
from refshard.measure.load import available_cores
from refshard.specs.case import Device
from refshard.specs.cluster import ClusterSpec
from refshard.specs.suite import NetworkSpec

_SWEEP_LIMIT_S = 1200.0
_MOST_SWEEPS = 99


def plan_calibration(
    *,
    ranks: int | None,
    threads: int,
    network: NetworkSpec | None,
    device: Device,
    quick: bool,
    sweeps: int | None = None,
    place: Place | None = None,
    elsewhere: bool = False,
) -> Calibration:
    """What to measure: in three sweeps, or a quick one.

    ``place`` is this process's among the ranks that torchrun started, all of which take part if not told. Ranks that
    run ``elsewhere`` are unknown here: their number and their device must be given. Else there are as many as GPUs, or
    as the cores bear.

    Raises:
        SpecError: the device is not there, or the ranks cannot be spread over the hosts.
    """
    if threads < 1:
        raise SpecError(f"threads must be >= 1, got {threads}")
    if sweeps is not None and not 1 <= sweeps <= _MOST_SWEEPS:
        raise SpecError(f"sweeps must be from 1 to {_MOST_SWEEPS}, got {sweeps}")
    if ranks is not None and ranks < 1:
        raise SpecError(f"ranks must be >= 1, got {ranks}")
    if elsewhere and (ranks is None or device == "auto"):
        raise SpecError(
            "launcher 'slurm' starts ranks on nodes that are unknown here; give --gpus, and --device cpu or cuda"
        )
    chosen = device if elsewhere and device != "auto" else _device(device, network)
    hosts = network.hosts if network is not None else 1
    gpus = torch.cuda.device_count()
    here = gpus if chosen == "cuda" else max(available_cores() // threads, 1)
    asked = ranks or (place.world_size if place else max(here // hosts, 1) * hosts)
    if place and asked > place.world_size:
        raise SpecError(f"ranks: {asked} asked for, torchrun started {place.world_size}; lower it, or start more")
    on_host = min(asked, place.local_world_size) if place else asked
    if chosen == "cuda" and on_host > gpus and not elsewhere:
        raise SpecError(f"ranks: {on_host} ranks need {on_host} GPUs, found {gpus}; lower it")
    if asked % hosts:
        raise SpecError(f"ranks must be a multiple of the network's {hosts} hosts, got {asked}; change either")
    return Calibration(
        ranks=asked,
        threads=threads,
        device=chosen,
        sweeps=sweeps or (1 if quick else 3),
        cpu_clock=chosen == "cpu" and threads == 1 and (elsewhere or on_host <= available_cores()),
        nodes_here=hosts,
        shapes=shapes(chosen, quick=quick),
        traffic=traffic(chosen, quick=quick),
        pace=pace(chosen, quick=quick),
        command=shlex.join(["refshard", *sys.argv[1:]]),
        when=datetime.now(UTC).date().isoformat(),
    )


def measure(
    calibration: Calibration, launcher: Launcher, folder: Path, on_progress: Callable[[str], None]
) -> str | None:
    """Have ranks that ``launcher`` joins leave their samples in ``folder``; why they did not come to the end, if so.

    Raises:
        KeyboardInterrupt: it was cut short; the samples until then are there.
    """
    (folder / CALIBRATION_FILE).write_bytes(msgspec.json.encode(calibration))
    limit_s = _SWEEP_LIMIT_S * (1 + calibration.sweeps)
    job = Job(program="calibration", processes=calibration.ranks, time_limit_s=limit_s)
    try:
        launch = launcher.launch(job, folder, on_progress)
    except LaunchError as error:
        return str(error)
    if launch.timed_out:
        stood = f" ({launch.error})" if launch.error else ""
        return f"the ranks did not finish within {limit_s:g} s and were killed{stood}"
    last = next((line.strip() for line in reversed(launch.log_tail) if line.strip()), "it wrote nothing")
    return f"{launch.error} ({last})" if launch.error else None


def is_begun(folder: Path) -> bool:
    """Whether the ranks left any samples there."""
    return any(folder.glob(samples_file(folder, 0).name.replace("0", "*")))


def read_profile(folder: Path, ended: str | None = None) -> ClusterSpec:
    """The profile of what the ranks measured in ``folder``; ``ended`` says why they did not come to the end, if so.

    Raises:
        SpecError: there is no calibration in the folder.
        LaunchError: what was measured is too little for a profile.
    """
    try:
        calibration = msgspec.json.decode((folder / CALIBRATION_FILE).read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError) as error:
        raise SpecError(f"from: {folder} has no calibration ({error}); name a NAME.toml.samples folder") from None
    paths = [samples_file(folder, rank) for rank in range(calibration.ranks)]
    if lost := [rank for rank, path in enumerate(paths) if not path.exists()]:
        ranks = f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost[:8]))}"
        raise LaunchError(f"calibrate: {ended or 'it ended early'}; {ranks} measured nothing; correct that")
    try:
        samples = [msgspec.json.decode(path.read_bytes(), type=RankSamples) for path in paths]
        return build_profile(calibration, samples, ended or "")
    except TooLittleError as error:
        raise LaunchError(
            f"calibrate: {f'{ended}; ' if ended else ''}{error}; correct that, and measure again"
        ) from None


def _device(wanted: Device, network: NetworkSpec | None) -> Literal["cpu", "cuda"]:
    gpus = torch.cuda.device_count()
    if wanted == "cuda" and not gpus:
        raise SpecError("device: 'cuda' asked for, but torch sees no GPU; ask for 'cpu' or 'auto'")
    if network is not None:
        if wanted == "cuda":
            raise SpecError("device must be 'cpu' with --network, got 'cuda': NCCL would bypass it; use --device cpu")
        return "cpu"
    return "cuda" if wanted == "cuda" or (wanted == "auto" and gpus) else "cpu"
