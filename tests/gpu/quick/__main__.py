"""``python -m tests.gpu.quick``: what can be learnt in ten minutes on one GPU, from a tree that is not installed.

Every step has a limit of its own, and one that fails stops nothing. Results are written to ``--out`` as they come.
On a machine without a GPU it is a rehearsal of some 15 minutes on two cores: the same programs on the fake device, the
cases on a tiny model. ``--predict`` dry-runs the cases as they are.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from refshard.fakecuda import is_active
from tests.gpu.quick import cases

ROOT = Path(__file__).resolve().parents[3]
REHEARSAL = Path(__file__).with_name("rehearsal")
NOT_REHEARSED = ("--ignore=tests/gpu/test_emulation.py",)
"""Needs a fake driver as well: ``tests/emulate/test_on_fake_gpu.py`` runs it with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A name, a limit in seconds, the arguments of Python, and whether the fake device can rehearse it."""

    name: str
    limit_s: float
    arguments: tuple[str, ...]
    rehearsed: bool = True


def steps(out: Path, *, real: bool) -> list[Step]:
    """In order: what tells most first."""
    here, folder = "tests.gpu.quick", Path(__file__).parent
    left_out = () if real else NOT_REHEARSED
    tests = ("pytest", "-m", "gpu", "tests/gpu", "-q", "-p", "no:cacheprovider", "-n", "6", *left_out)
    run, calibrate = ("refshard", "run"), ("refshard", "calibrate", "--device", "cuda", "--quick")
    commands: list[tuple[str, float, bool, tuple[str, ...]]] = [
        ("doctor", 40, False, ("refshard", "doctor", "--json")),
        ("host", 30, True, (f"{here}.host", str(out / "host.json"))),
        ("outside", 25, True, (f"{here}.outside", str(out / "outside.json"))),
        ("cases", 360, True, (here, "--cases", "--out", str(out))),
        ("tests", 100, True, tests),
        ("suite", 100, False, (*run, str(folder / "suite.toml"), "--out", str(out / "suite"))),
        ("emulated", 100, False, (*run, str(folder / "emulated.toml"), "--out", str(out / "emulated"))),
        ("calibration", 60, False, (*calibrate, "--out", str(out / "calibration.toml"))),
    ]
    return [Step(name=n, limit_s=s, rehearsed=r, arguments=("-m", *command)) for n, s, r, command in commands]


def main() -> int:
    """Run the steps; returns the exit status: 1 if one failed."""
    p = argparse.ArgumentParser(prog="python -m tests.gpu.quick", description=__doc__)
    p.add_argument("--out", type=Path, default=Path("runs/gpu-quick"))
    p.add_argument("--limit", type=float, default=540.0, help="seconds for all steps together [default: 540]")
    p.add_argument("--only", nargs="+", metavar="STEP", help="these steps")
    p.add_argument("--cases", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--predict", metavar="CLUSTER", help="dry-run the cases, on a machine without a GPU")
    p.add_argument(
        "--compare", nargs=2, type=Path, metavar=("PREDICTED", "MEASURED"), help="two files of a JSON row a case"
    )
    p.add_argument("--case", nargs="+", default=[], help="with --predict: these cases")
    o = p.parse_args()
    real = torch.version.cuda is not None and not is_active()
    if o.predict:
        cases.predict(o.out, o.predict, o.case)
        return 0
    if o.compare:
        print(*cases.compare(*o.compare), sep="\n")
        return 0
    if o.cases:
        all_of_them = cases.read_cases()
        cases.measure(o.out, o.limit, all_of_them if real else [case.smaller() for case in all_of_them])
        return 0
    o.out.mkdir(parents=True, exist_ok=True)
    slower = 1 if real else 5
    failed, end = False, time.monotonic() + slower * o.limit
    for step in steps(o.out, real=real):
        if o.only and step.name not in o.only:
            continue
        if not real and not step.rehearsed:
            print(f"== {step.name}: needs a GPU", flush=True)
            continue
        left = end - time.monotonic()
        if left < 10:
            print(f"== {step.name}: no time left", flush=True)
            continue
        failed |= run(step, min(slower * step.limit_s, left), o.out, real=real) != 0
    return int(failed)


def run(step: Step, seconds: float, out: Path, *, real: bool) -> int:
    """Run a step, its output in ``out/NAME.log``; returns its exit status."""
    paths = [ROOT, *([] if real else [REHEARSAL]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, paths)), PYTHONUNBUFFERED="1")
    arguments = [*step.arguments, *(["--limit", str(seconds - 5)] if step.name == "cases" else [])]
    began, log = time.monotonic(), out / f"{step.name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = "too long"
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(8)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    print(f"== {step.name}: {status} after {time.monotonic() - began:.1f} s", flush=True)
    if status or step.name in ("cases", "outside", "tests", "suite", "emulated"):
        shown = 60 if step.name == "cases" else 8
        print(*log.read_text(errors="replace").splitlines()[-shown:], sep="\n", flush=True)
    return 0 if status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
