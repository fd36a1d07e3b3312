"""What machine and software a run is measured on; one rank of each host describes it where ranks run elsewhere."""

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil
import torch
import torch.distributed as dist

from refshard import resources
from refshard.measure import gpus as of_gpus
from refshard.measure.load import available_cores, cpu_name
from refshard.records import Environment

_PACKAGES = (
    "torch", "numpy", "msgspec", "transformers", "accelerate", "bitsandbytes", "deepspeed", "megatron-fsdp", "peft",
    "torchao",
)  # fmt: skip
COMPARABLE = (
    "os", "cpu", "physical_cores", "logical_cores", "gpus", "python", "torch", "backends", "gemm_threads"
)  # fmt: skip
"""Fields that must match between two runs before their times can be compared."""
_SAME_MEMORY = 0.01
"""What the kernel keeps to itself differs a little from boot to boot."""


def capture_environment(threads_per_rank: int, network: str = "") -> Environment:
    """Describe this machine, and in ``network`` what joins its hosts if it plays several.

    Takes about a second, most of it to measure matrix multiplication.
    """
    commit, dirty = git_state(resources.checkout())
    environment = Environment(
        id="",
        hostname=platform.node(),
        os=f"{platform.system()} {platform.release()}",
        cpu=cpu_name(),
        physical_cores=psutil.cpu_count(logical=False) or 1,
        logical_cores=available_cores(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        python=platform.python_version(),
        torch=str(torch.__version__),
        backends=tuple(name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()),
        packages={name: found for name in _PACKAGES if (found := _version(name))},
        gemm_flops_per_s=measure_gemm(threads_per_rank),
        gemm_threads=threads_per_rank,
        git_commit=commit,
        git_dirty=dirty,
        code_sha256=code_sha256(),
        argv=("refshard", *sys.argv[1:]),
        network=network,
        **of_gpus.describe_gpus(),
    )
    return msgspec.structs.replace(environment, id=id_of(environment))


def id_of(environment: Environment) -> str:
    """The hash of everything that must match between two comparable runs.

    A machine without GPUs, or a single host, keeps the id that it had before there were GPUs and networks here.
    """
    comparable = {field: getattr(environment, field) for field in COMPARABLE}
    if environment.network:
        comparable["network"] = environment.network
    if environment.gpus:
        comparable |= {field: getattr(environment, field) for field in of_gpus.COMPARABLE}
        comparable["variables"] = of_gpus.shared_variables(environment)
    return hashlib.sha256(msgspec.json.encode(comparable, order="sorted")).hexdigest()[:12]


def changes(before: Environment, now: Environment) -> list[str]:
    """In words, what differs between two environments that must not within one run: machine, software and code.

    Code counts, not commits: of two commits that differ in a page of documentation, one resumes what the other began;
    and an edit that is not committed is a change. Only a record from before code was recorded has but its commit.
    """
    found = [*differences(before, now), *_changed(before, now, ("network",))]
    was, is_ = of_gpus.shared_variables(before), of_gpus.shared_variables(now)
    found += [
        f"{name} was {was.get(name, 'not set')} and is {is_.get(name, 'not set')}"
        for name in sorted(was.keys() | is_.keys())
        if was.get(name) != is_.get(name)
    ]
    if abs(now.memory_bytes - before.memory_bytes) > _SAME_MEMORY * before.memory_bytes:
        found.append(f"memory_bytes was {before.memory_bytes} and is {now.memory_bytes}")
    return found


def differences(one: Environment, other: Environment) -> list[str]:
    """In words, what differs between two hosts of one run that must not. Their memory does, by what firmware keeps."""
    code = "code_sha256" if one.code_sha256 else "git_commit"
    of_each = [field for field in of_gpus.COMPARABLE if field != "gpu_settings"]
    settings = of_gpus.setting_changes(one.gpu_settings, other.gpu_settings)
    return [*_changed(one, other, (*COMPARABLE, "packages", code, *of_each)), *settings]


def _changed(before: Environment, now: Environment, fields: Iterable[str]) -> list[str]:
    return [
        f"{field} was {was!r} and is {is_!r}"
        for field in fields
        if (was := getattr(before, field)) != (is_ := getattr(now, field))
    ]


def code_sha256(package: Path = Path(resources.__file__).parent) -> str:
    """SHA-256 over what decides what a rank does: the package's sources, and the profiles that are read here."""
    profiles = (resources.model_profiles(), resources.cluster_profiles(), resources.hardware_profiles())
    digest = hashlib.sha256()
    for path in [*sorted(package.rglob("*.py")), *(path for found in profiles for path in found.values())]:
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()};".encode())
    return digest.hexdigest()


def measure_gemm(threads: int, size: int = 1024, seconds: float = 0.5) -> float:
    """Best rate in FLOP/s of an fp32 ``size`` x ``size`` matrix product with ``threads`` threads, over ``seconds``.

    It serves as the peak that a CPU's MFU is held against; the best, since a peak is what the machine can do.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b, out = (torch.ones(size, size) for _ in range(3))
        best, end = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < end:
            started = time.perf_counter()
            torch.mm(a, b, out=out)
            best = min(best, time.perf_counter() - started)
        return float(2 * size**3 / best)
    finally:
        torch.set_num_threads(before)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_state(checkout: Path | None) -> tuple[str | None, bool | None]:
    """Commit and whether files differ from it; (None, None) where this is no checkout."""
    if checkout is None:
        return None, None
    try:
        commit = _git(checkout, "rev-parse", "HEAD")
        return commit, bool(_git(checkout, "status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return None, None


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", checkout, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


DESCRIBE_FILE = "environment.json"


class DescribeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """With how many threads to measure the rate of a matrix product; and in words what joins the hosts."""

    threads: int
    network: str = ""


def described_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its :class:`Environment`."""
    return folder / f"environment-rank{rank}.json"


def describe_rank(folder: Path) -> int:
    """Run this rank and return the process's exit status."""
    if int(os.environ["LOCAL_RANK"]) == 0:
        options = msgspec.json.decode((folder / DESCRIBE_FILE).read_bytes(), type=DescribeOptions)
        described = msgspec.json.encode(capture_environment(options.threads, options.network))
        described_file(folder, int(os.environ["RANK"])).write_bytes(described)
    return 0
