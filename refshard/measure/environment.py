"""The machine and software that a run is measured on; if ranks run elsewhere, one rank of each host describes it."""

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist

from refshard import resources
from refshard.measure.load import cpu_name
from refshard.measure.nvml import GpuSensors, gpu_sensors, visible_uuids
from refshard.measure.worker import request_file
from refshard.records import Environment, GpuSettings
from refshard.resources import available_cores

_PACKAGES = (
    "torch", "numpy", "msgspec", "transformers", "accelerate", "bitsandbytes", "deepspeed", "megatron-fsdp", "peft",
    "torchao",
)  # fmt: skip
COMPARABLE = (
    "os", "cpu", "physical_cores", "logical_cores", "gpus", "python", "torch", "backends", "gemm_threads"
)  # fmt: skip
"""Fields that must match between two runs before their times can be compared."""
_PREFIXES = ("CUDA_", "NCCL_", "TORCH_NCCL_")
_NAMES = (
    "NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
_PLACES = ("CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH", "CUDA_ROOT")
"""Variables that only say where files lie on somebody's machine."""
_LOCAL = ("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID")
"""Variables that differ between hosts or jobs that are alike."""
GPU_COMPARABLE = ("gpu_memory_bytes", "gpu_driver", "cuda", "nccl", "tf32", "gpu_settings")
"""Fields that must match between the hosts of a run, and between runs, if there are GPUs."""
_SAME_MEMORY = 0.01
"""What the kernel keeps to itself differs a little from boot to boot."""


def capture_environment(threads_per_rank: int, network: str = "") -> Environment:
    """Describe this machine; ``network`` says what joins its hosts if it plays several.

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
        **describe_gpus(),
    )
    return msgspec.structs.replace(environment, id=id_of(environment))


def describe_gpus() -> dict[str, Any]:
    """Fields of :class:`Environment` about the GPUs that torch sees; empty without GPUs."""
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if not properties:
        return {}
    found: dict[str, Any] = {
        "gpu_memory_bytes": tuple(each.total_memory for each in properties),
        "cuda": f"ROCm {torch.version.hip}" if torch.version.hip else torch.version.cuda or "",
        "nccl": "",
        "tf32": tf32_allowed(os.environ),
        "variables": variables(os.environ),
    }
    with suppress(AttributeError, RuntimeError):  # a build without NCCL, or the fake device
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    with gpu_sensors(visible_uuids()) as sensors:
        return found if sensors is None else found | describe_sensors(sensors)


def describe_sensors(sensors: GpuSensors) -> dict[str, Any]:
    """Fields of :class:`Environment` from NVML."""
    return {
        "gpu_driver": sensors.driver(),
        "gpu_settings": tuple(sensors.settings(gpu) for gpu in range(sensors.count)),
        "gpu_throttled": tuple(sensors.reading(gpu).throttled for gpu in range(sensors.count)),
    }


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that configure CUDA, NCCL and torch's allocator, by name."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _PLACES
    }


def tf32_allowed(environment: Mapping[str, str]) -> bool:
    """Whether fp32 matrix products on GPUs may be TF32: torch allows it, and NVIDIA's variable does not forbid it."""
    return torch.get_float32_matmul_precision() != "highest" and environment.get("NVIDIA_TF32_OVERRIDE") != "0"


def _shared(environment: Environment) -> dict[str, str]:
    """Its variables that must match."""
    return {name: value for name, value in environment.variables.items() if name not in _LOCAL}


def id_of(environment: Environment) -> str:
    """The hash of everything that must match between two comparable runs.

    A machine without GPUs, or a single host, keeps the id that it had before ids covered GPUs and networks.
    """
    comparable = {field: getattr(environment, field) for field in COMPARABLE}
    if environment.network:
        comparable["network"] = environment.network
    if environment.gpus:
        comparable |= {field: getattr(environment, field) for field in GPU_COMPARABLE}
        comparable["variables"] = _shared(environment)
    return hashlib.sha256(msgspec.json.encode(comparable, order="sorted")).hexdigest()[:12]


def changes(before: Environment, now: Environment) -> list[str]:
    """What differs between two environments and must not within one run: machine, software and code.

    Code counts, not commits: after a commit that only changes documentation, a run can be resumed, and an edit that is
    not committed is a change. Only records from before code was recorded are compared by commit.
    """
    found = [*differences(before, now), *_changed(before, now, ("network",))]
    was, is_ = _shared(before), _shared(now)
    found += [
        f"{name} was {was.get(name, 'not set')} and is {is_.get(name, 'not set')}"
        for name in sorted(was.keys() | is_.keys())
        if was.get(name) != is_.get(name)
    ]
    if abs(now.memory_bytes - before.memory_bytes) > _SAME_MEMORY * before.memory_bytes:
        found.append(f"memory_bytes was {before.memory_bytes} and is {now.memory_bytes}")
    return found


def differences(one: Environment, other: Environment) -> list[str]:
    """What differs between two hosts of one run and must not. Their memory may: firmware keeps some of it."""
    code = "code_sha256" if one.code_sha256 else "git_commit"
    fields = [field for field in GPU_COMPARABLE if field != "gpu_settings"]
    found = _changed(one, other, (*COMPARABLE, "packages", code, *fields))
    before, now = one.gpu_settings, other.gpu_settings
    if len(before) != len(now):
        return [*found, f"gpu_settings were known of {len(before)} GPUs and are of {len(now)}"]
    for gpu, (was, is_) in enumerate(zip(before, now)):
        found += _changed(was, is_, GpuSettings.__struct_fields__, f" of GPU {gpu}")
    return found


def _changed(before: msgspec.Struct, now: msgspec.Struct, fields: Iterable[str], of: str = "") -> list[str]:
    return [
        f"{field}{of} was {was!r} and is {is_!r}"
        for field in fields
        if (was := getattr(before, field)) != (is_ := getattr(now, field))
    ]


def code_sha256(package: Path = Path(resources.__file__).parent) -> str:
    """SHA-256 of the package's sources and of the profiles: they decide what a rank does."""
    profiles = (resources.model_profiles(), resources.cluster_profiles(), resources.hardware_profiles())
    digest = hashlib.sha256()
    for path in [*sorted(package.rglob("*.py")), *(path for found in profiles for path in found.values())]:
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()};".encode())
    return digest.hexdigest()


def measure_gemm(threads: int, size: int = 1024, seconds: float = 0.5) -> float:
    """Best rate in FLOP/s of an fp32 ``size`` x ``size`` matrix product with ``threads`` threads, over ``seconds``.

    It is the peak of a CPU's MFU, so the best counts.
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
    """Commit and whether files differ from it; (None, None) if this is no checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return (None, None) if checkout is None else (git("rev-parse", "HEAD"), bool(git("status", "--porcelain")))
    except (OSError, subprocess.CalledProcessError):
        return None, None


class DescribeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How many threads multiply matrices in the measurement of their rate, and what joins the hosts."""

    threads: int
    network: str = ""


def described_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its :class:`Environment`."""
    return folder / f"environment-rank{rank}.json"


def describe_rank(folder: Path) -> int:
    """Run this rank and return the process's exit status."""
    if int(os.environ["LOCAL_RANK"]) == 0:
        options = msgspec.json.decode(request_file(folder, "environment").read_bytes(), type=DescribeOptions)
        described = msgspec.json.encode(capture_environment(options.threads, options.network))
        described_file(folder, int(os.environ["RANK"])).write_bytes(described)
    return 0
