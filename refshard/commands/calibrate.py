"""``refshard calibrate``: measure this machine and write a cluster's profile."""

import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import cast, get_args

from refshard.errors import SpecError
from refshard.harness.calibrate import calibrate as measure
from refshard.harness.calibrate import plan_calibration
from refshard.harness.launchers.local import LocalLauncher
from refshard.harness.launchers.netlab import network as networks
from refshard.harness.launchers.netlab.launcher import NetlabLauncher
from refshard.report.calibration import terminal_profile
from refshard.specs.case import Device
from refshard.specs.cluster import load_cluster
from refshard.specs.reading import convert
from refshard.specs.suite import NetworkSpec
from refshard.specs.writing import to_toml


def calibrate(
    output: Path | None,
    *,
    ranks: int | None,
    threads: int,
    network: str | None,
    device: Device,
    quick: bool,
    sweeps: int | None = None,
) -> tuple[str, Path]:
    """Measure; write the profile to ``output``, or to a new file under ``runs/``; return its tables and the path.

    Raises:
        RefshardError: what was asked for cannot be measured here, or a rank failed; nothing was written.
        KeyboardInterrupt: it was cut short; nothing was written.
    """
    joined = None if network is None else _network(network)
    plan = plan_calibration(ranks=ranks, threads=threads, network=joined, device=device, quick=quick, sweeps=sweeps)
    target = output or Path("runs") / f"{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}-cluster.toml"
    if target.is_dir():
        raise SpecError(f"out: {target} is a folder; name the file to write")
    unfinished = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished.touch()  # before anything is measured: a minute later is late to learn of it
    except OSError as error:
        raise SpecError(f"out: {target} cannot be written ({error.strerror}); name a file that can") from None
    try:
        if joined is not None:
            networks.check(joined)
        launcher = LocalLauncher() if joined is None else NetlabLauncher(joined)
        profile = measure(plan, launcher, lambda phase: print(f"  {phase}", file=sys.stderr, flush=True))
        unfinished.write_text(to_toml(profile), encoding="utf-8")
        written = load_cluster(str(unfinished))  # what other commands will read
        assert written == profile
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return terminal_profile(written), target


def device(given: str) -> Device:
    """The device that is asked for.

    Raises:
        SpecError: there is none of this name.
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
        raise SpecError(f"network must be hosts, 'x' and what each can send, such as 2x2gbit, got '{given}'")
    return convert({"hosts": int(parts[1]), "rate": parts[2]}, NetworkSpec, where="network")
