"""The cases of ``cases.txt``: launched on this machine's GPU, or predicted by dry run where there is none."""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from refshard.specs.cluster import ClusterSpec, LinkSpec, load_cluster
from refshard.specs.writing import to_toml

FILE = Path(__file__).with_name("cases.txt")
SCRIPT = Path(__file__).with_name("train.py")
Half = Literal["fit", "held out"]
FITTED_ALONE = frozenset({"30b-a3b-w16-full", "1b-fsdp2-efficient"})
"""No other case has their kernels: grouped products and scattered sums, memory-efficient attention."""
LIMIT_S, COMPILING_LIMIT_S = 60.0, 110.0
SQUEEZE = """
import lzma, pathlib, sys
path = pathlib.Path(sys.argv[1])
pathlib.Path(f"{path}.xz").write_bytes(lzma.compress(path.read_bytes(), preset=4))
path.unlink()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the file: its name, how often it is launched, the allocator's settings, ``train.py``'s arguments."""

    name: str
    launches: int
    allocator: str
    arguments: tuple[str, ...]

    def smaller(self) -> "Case":
        """The same on a tiny model, for a rehearsal."""
        size = "tiny-moe" if "30b-a3b" in self.arguments else "tiny"
        instead = {"--size": size, "--seq-len": "64", "--layers": "2", "--steps": "4"}
        arguments = [instead.get(before, value) for before, value in zip(("", *self.arguments), self.arguments)]
        kept = (argument for argument in arguments if argument != "--compile")
        return replace(self, arguments=("--seq-len", "64", *kept))

    @property
    def world_size(self) -> int:
        """Of the world in which it is rank 0."""
        return int(self.arguments[self.arguments.index("--world") + 1]) if "--world" in self.arguments else 1

    @property
    def steps(self) -> int:
        """Steps it takes."""
        return int(self.arguments[self.arguments.index("--steps") + 1]) if "--steps" in self.arguments else 8

    @property
    def limit_s(self) -> float:
        """What a launch may take."""
        return COMPILING_LIMIT_S if "--compile" in self.arguments else LIMIT_S


def read_cases(file: Path = FILE) -> list[Case]:
    """All cases, in order."""
    lines = (line.split("|") for line in file.read_text().splitlines() if line and not line.startswith("#"))
    return [
        Case(name=name.strip(), launches=int(launches), allocator=conf.strip(), arguments=tuple(arguments.split()))
        for name, launches, conf, arguments in lines
    ]


def half_of(case: Case) -> Half:
    """Whether constants of dry runs may be fitted to the case: every other one, and those with kernels of their own."""
    if case.name in FITTED_ALONE:
        return "fit"
    return ("fit", "held out")[[one.name for one in read_cases()].index(case.name) % 2]


def in_turns(cases: Sequence[Case]) -> Iterator[tuple[int, Case]]:
    """Every launch, with its number: second ones after all first ones."""
    for launch in range(max((case.launches for case in cases), default=0)):
        yield from ((launch, case) for case in cases if launch < case.launches)


def measure(out: Path, seconds: float, cases: Sequence[Case]) -> None:
    """Launch all cases, each in a process of its own, and append what it left to ``cases.jsonl`` as it ends.

    Processes are forked from one that has imported torch, but for those with settings of the allocator, which torch
    reads as it is imported. Nothing here may call CUDA: a fork could not use it.
    """
    from tests.gpu.quick import train

    end, work, squeezing = time.monotonic() + seconds, out / "cases", list[subprocess.Popen[bytes]]()
    work.mkdir(parents=True, exist_ok=True)
    for launch, case in in_turns(cases):
        left = end - time.monotonic()
        if left < 8:
            print(f"{case.name}: left out", flush=True)
            continue
        stem = work / f"{case.name}.{launch}"
        arguments = ["--out", f"{stem}.json", *case.arguments, *_extras(case, launch, stem)]
        began = time.monotonic()
        pid = _spawn(case, arguments, stem) if case.allocator else _fork(train.main, arguments, stem)
        status = _wait(pid, min(case.limit_s, left))
        found = json.loads(Path(f"{stem}.json").read_bytes()) if Path(f"{stem}.json").exists() else {}
        if status != 0:
            found["error"] = f"exit {status}: {Path(f'{stem}.log').read_text()[-1500:]}"
        taken = time.monotonic() - began
        row = {"name": case.name, "launch": launch, "wall_s": taken, "arguments": case.arguments, **found}
        with (out / "cases.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        squeezing += [subprocess.Popen([sys.executable, "-c", SQUEEZE, path]) for path in _large(stem)]
        seen = f"{found['step_s'] * 1e3:.1f} ms, {found['peak']['reserved'] / 2**30:.3f} GiB" if "peak" in found else ""
        print(f"{case.name} {launch}: exit {status}, {taken:.1f} s; {seen}{found.get('error', '')[-300:]}", flush=True)
    for process in squeezing:
        process.wait()


def predict(out: Path, cluster: str, only: Sequence[str] = ()) -> None:
    """Dry-run all cases, or those named, as rank 0 of as many nodes of ``cluster`` as they need.

    Links are those of torch's fake backend, which the cases run on: it sends nothing, and copies what a rank has into
    its own result.
    """
    out.mkdir(parents=True, exist_ok=True)
    profile = out / f"{cluster}.toml"
    profile.write_text(to_toml(of_fake_backend(load_cluster(cluster))))
    for case in read_cases():
        if only and case.name not in only:
            continue
        nodes = -(-case.world_size // 8)
        command = [
            sys.executable, "-m", "refshard", "dryrun", "--cluster", f"{profile}" + (f"x{nodes}" if nodes > 1 else ""),
            "--gpus", str(case.world_size), "--steps", str(case.steps), "--json",
            "--", str(SCRIPT), "--out", os.devnull, *case.arguments,
        ]  # fmt: skip
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        if case.allocator:
            environment["PYTORCH_ALLOC_CONF"] = case.allocator
        done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
        if not done.stdout.strip():
            print(f"{case.name}: {done.stderr[-300:]}", flush=True)
            continue
        told = json.loads(done.stdout)
        row = {"name": case.name, "half": half_of(case), "cluster": cluster, **_told(told)}
        with (out / f"predicted-{cluster}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{case.name}: {row['outcome']} {row['error']} {row['peak']['reserved'] / 2**30:.3f} GiB", flush=True)


def of_fake_backend(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with links as fast as a copy within the device."""
    hardware = cluster.accelerator
    link = LinkSpec(bytes_per_s=hardware.memory_bytes_per_s / 2, latency_s=0.0)  # read and written
    source = "torch's fake backend: a copy within the device"
    return msgspec.structs.replace(
        cluster, hardware=hardware, within=link, between=link, quick=None, straggling=0.0,
        compute_beside_communication=1.0, communication_beside_compute=1.0,
        sources=cluster.sources | {"within": source, "between": source},
    )  # fmt: skip


def _told(told: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a dry run."""
    answer = told["answer"]
    kept = ("step_s", "compute_s", "comm_s", "exposed_comm_s", "host_bound_s", "fits", "usable_bytes")
    return {
        "outcome": answer["outcome"], "error": answer["error"], "doubt": answer["doubt"], "torch": answer["torch"],
        "peak": answer["peak"], **{key: told.get(key) for key in kept},
    }  # fmt: skip


def _extras(case: Case, launch: int, stem: Path) -> list[str]:
    """A trace of each case's first launch."""
    if "history" in case.name:
        return ["--snapshot", f"{stem}.pickle"]
    return ["--trace", f"{stem}.trace.json"] if launch == 0 else []


def _large(stem: Path) -> Iterator[str]:
    for path in (f"{stem}.trace.json", f"{stem}.pickle"):
        if Path(path).exists():
            yield path


def _fork(main: Callable[[list[str]], None], arguments: list[str], stem: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(f"{stem}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        main(arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _spawn(case: Case, arguments: list[str], stem: Path) -> int:
    environment = dict(os.environ, PYTORCH_ALLOC_CONF=case.allocator, PYTORCH_CUDA_ALLOC_CONF=case.allocator)
    with Path(f"{stem}.log").open("wb") as log:
        command = [sys.executable, "-m", "tests.gpu.quick.train", *arguments]
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment).pid


def _wait(pid: int, seconds: float) -> int | None:
    """The exit status; None if it took too long and was killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.03)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


HEADER = "| case | allocated, GiB | dry run | reserved, GiB | dry run | step, ms | dry run |"


def compare(predicted: Path, measured: Path) -> Iterator[str]:
    """A Markdown table with a row for each launch: what was measured, and by how much its prediction differs."""
    told = {row["name"]: row for row in map(json.loads, predicted.read_text().splitlines())}
    yield from (HEADER, "|---" * 7 + "|")
    for row in map(json.loads, measured.read_text().splitlines()):
        cells = [row["name"]]
        if "peak" not in row:
            yield f"| {row['name']} | {row['error']} |" + " |" * 5
            continue
        of_case = told.get(row["name"], {})
        for kind in ("allocated", "reserved"):
            cells += [f"{row['peak'][kind] / 2**30:.3f}", _difference(of_case, row["peak"][kind], kind)]
        times = f"{100 * (of_case['step_s'] / row['step_s'] - 1):+.0f} %" if of_case.get("step_s") else "refused"
        yield f"| {' | '.join([*cells, str(round(1e3 * row['step_s'], 1)), times])} |"


def _difference(told: dict[str, Any], measured: int, kind: str) -> str:
    """Of a prediction, which may be missing."""
    if not told.get("step_s"):
        return "refused"
    predicted = told["peak"][kind]
    return "equal" if predicted == measured else f"{100 * (predicted / measured - 1):+.3f} %"
