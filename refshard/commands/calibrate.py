"""``refshard calibrate``: measure this machine, or several together, and write a cluster's profile."""

import os
import re
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import cast, get_args

from refshard.commands.launching import check_launcher, make_launcher
from refshard.commands.printing import tell
from refshard.errors import SpecError
from refshard.folders import STDOUT, replace_file
from refshard.measure.calibration.profile import is_begun, measure, plan_calibration, read_profile
from refshard.measure.launchers.torchrun import TorchrunLauncher, place_of
from refshard.report.blocks import Answer
from refshard.report.calibration import changed_profile_answer, profile_answer
from refshard.specs.case import Device
from refshard.specs.cluster import ClusterSpec
from refshard.specs.reading import convert, parse_toml
from refshard.specs.suite import NetworkSpec
from refshard.specs.writing import to_toml

_SAMPLES = ".samples"
"""What is added to a profile's name for the folder of the samples that it is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure, as the command line says it. ``sbatch`` are options for the launcher ``slurm``."""

    ranks: int | None = None
    threads: int = 1
    network: str | None = None
    device: Device = "auto"
    quick: bool = False
    sweeps: int | None = None
    launcher: str | None = None
    sbatch: str | None = None


def calibrate(output: Path | None, options: Options) -> Answer:
    """Measure, and write the profile to ``output``, or to a new file under ``runs/``.

    While ranks measure, their samples are in a folder next to it, which is removed once everything was measured.

    Raises:
        RefshardError: the request cannot be measured, or too little was measured for a profile.
        KeyboardInterrupt: it was cut short; samples until then are kept.
    """
    check_launcher(options.launcher, options.sbatch)
    if options.network is not None and options.launcher is not None:
        raise SpecError("network: --network brings its own launcher; leave out --network or --launcher")
    network = None if options.network is None else _network(options.network)
    plan = plan_calibration(
        ranks=options.ranks, threads=options.threads, network=network, device=options.device, quick=options.quick,
        sweeps=options.sweeps, place=place_of(os.environ) if options.launcher == "torchrun" else None,
        elsewhere=options.launcher == "slurm",
    )  # fmt: skip
    target = output or _new_profile()
    with make_launcher(options.launcher or "local", options.sbatch, network) as launcher:
        folder = _samples_folder(target)
        tell(f"samples: {folder}")
        try:
            ended = measure(plan, launcher, folder.absolute(), lambda phase: tell(f"  {phase}"))
            written = _write(read_profile(folder, ended), target, ended)
        finally:
            if not is_begun(folder):
                shutil.rmtree(folder)
        if ended is None:
            shutil.rmtree(folder)
        if isinstance(launcher, TorchrunLauncher):
            launcher.dismiss(well=ended is None)
    return written


def from_samples(folder: Path, output: Path | None) -> Answer:
    """Write the profile of samples that an earlier calibration left in ``folder``; measure nothing.

    Raises:
        RefshardError: there are none, or too few.
    """
    if output is None and folder.suffix != _SAMPLES:
        raise SpecError(f"out: must be given unless the folder is NAME.toml{_SAMPLES}, got {folder}; add --out")
    return _write(read_profile(folder), output or folder.with_suffix(""), None)


def from_trace(path: Path, output: Path | None) -> Answer:
    """Write the profile of the trace's device with the rates that the trace shows; measure nothing.

    Raises:
        RefshardError: the trace shows none, or its device has no profile.
    """
    from refshard.measure.calibration.from_trace import profile_from_trace

    shipped, profile = profile_from_trace(path)
    _save(profile, target := output or _new_profile())
    return changed_profile_answer(shipped, profile, f"profile: {target}")


def _new_profile() -> Path:
    return Path("runs") / f"{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}-cluster.toml"


def _samples_folder(target: Path) -> Path:
    """A new folder next to the profile, made at once: if nothing can be written there, fail before measuring."""
    if target.is_dir():
        raise SpecError(f"out: {target} is a folder; name the file to write")
    profile = _new_profile() if target == STDOUT else target
    folder = profile.with_name(profile.name + _SAMPLES)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise SpecError(
            f"out: {folder} holds samples of an earlier calibration; make a profile of them with --from {folder}, "
            "delete them, or name another file"
        ) from None
    except OSError as error:
        raise SpecError(f"out: {target} cannot be written ({error.strerror}); name a writable file") from None
    return folder


def _write(profile: ClusterSpec, target: Path, ended: str | None) -> Answer:
    """Write the profile, and answer with it; the status is 1 if the ranks ``ended`` early, which it says."""
    _save(profile, target)
    more = f"profile: {target}"
    if ended is not None:
        more = f"Not everything was measured: {ended}\n{more}"
    return profile_answer(profile, more, status=0 if ended is None else 1)


def _save(profile: ClusterSpec, target: Path) -> None:
    text = to_toml(profile)
    assert convert(parse_toml(text, str(target)), ClusterSpec, where=str(target)) == profile  # what others will read
    replace_file(target, [text])


def device(given: str) -> Device:
    """The requested device.

    Raises:
        SpecError: unknown name.
    """
    for known in get_args(Device):
        if given == known:
            return cast(Device, known)
    raise SpecError(f"device must be one of {', '.join(get_args(Device))}, got '{given}'")


def _network(given: str) -> NetworkSpec:
    """``2x2gbit``: hosts, and what each can send.

    Raises:
        SpecError: it is nothing of the kind.
    """
    if not (parts := re.fullmatch(r"(\d{1,4})x(\w+)", given)):
        raise SpecError(f"network must be HOSTSxRATE, such as 2x2gbit, got '{given}'")
    return convert({"hosts": int(parts[1]), "rate": parts[2]}, NetworkSpec, where="network")
