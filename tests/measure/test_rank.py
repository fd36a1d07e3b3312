"""What a rank leaves of the error that ended it, and how long its limit holds. Processes and limits are real."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from refshard.errors import UnsupportedError
from refshard.measure.rank import RankResult, rank_file, state_of
from refshard.measure.worker import request_file
from refshard.quantities import GIB
from refshard.specs.case import Case
from refshard.specs.job import CommMemory
from tests.fakecuda.fresh import needs_device

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
CASE = Case.of(
    strategy="single", gpus=1, model="llama-tiny", global_batch=1, seq_len=8, device="cpu", measured_steps=2,
    traced_steps=1,
)  # fmt: skip
RANK = """
import json, os, resource, sys, threading, time
from pathlib import Path
{first}
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook as before_forward
from refshard.measure.rank import run_rank

{script}
status = run_rank(Path(sys.argv[1]))
{then}
sys.exit(status)
"""
FAKE_GPU = """
from refshard.fakecuda import activate
from refshard.specs.hardware import load_hardware
activate(load_hardware("h100-sxm-80gb"), mode="host")
"""
THREADS_OF_64_MIB = """
def start_threads(*_):
    threading.stack_size(64 * 2**20)
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(40)]
    try:
        for thread in threads:
            thread.start()
    finally:
        over.set()
    raise RuntimeError("all of them started")

before_forward(start_threads)
"""
HANGING_END = """
def fail(*_):
    raise ZeroDivisionError("planted")

dist.destroy_process_group = lambda *_: time.sleep(3600)  # as NCCL's, whose peers do not come
before_forward(fail)
"""
PRINTS_NCCLS_POLICY = """
end = os._exit
os._exit = lambda status: (print(os.environ.get("NCCL_CTA_POLICY"), flush=True), end(status))
"""


def run_alone(folder: Path, script: str = "", then: str = "", first: str = "", **case: Any) -> tuple[RankResult, str]:
    """What the only rank of a case leaves and prints, whose process runs ``first`` before torch, and ``script`` and
    ``then`` around it.
    """
    request_file(folder, "case").write_bytes(msgspec.json.encode(CASE.changed(**case)))
    command = [sys.executable, "-c", RANK.format(first=first, script=script, then=then), str(folder)]
    variables = {name: value for name, value in os.environ.items() if name != "NCCL_CTA_POLICY"} | ALONE
    done = subprocess.run(command, env=variables, check=False, timeout=1800, stdout=subprocess.PIPE, text=True)
    result = msgspec.json.decode(rank_file(folder, 0).read_bytes(), type=RankResult)
    assert done.returncode == (0 if result.state == "ok" else 1)
    return result, done.stdout


@pytest.mark.processes
def test_a_rank_that_fails_ends_without_waiting_for_its_peers(tmp_path: Path) -> None:
    result, _ = run_alone(tmp_path, HANGING_END)
    assert (result.state, result.error) == ("failed", "ZeroDivisionError: planted")


@pytest.mark.parametrize(
    ("limit_gib", "state", "error"),
    [
        (1.0, "oom", "MemoryError: no room for the stack of a thread (can't start new thread)"),
        (None, "failed", "RuntimeError: all of them started"),
    ],
)
@pytest.mark.full
def test_a_thread_without_room_for_its_stack_is_out_of_memory(
    tmp_path: Path, limit_gib: float | None, state: str, error: str
) -> None:
    result, _ = run_alone(tmp_path, THREADS_OF_64_MIB, memory_limit_gib=limit_gib)
    assert (result.state, result.error) == (state, error)


@pytest.mark.processes
def test_a_ranks_limit_holds_for_its_training_and_not_for_the_trace(tmp_path: Path) -> None:
    note = "seen = []\nbefore_forward(lambda *_: seen.append(resource.getrlimit(resource.RLIMIT_DATA)[0]))"
    _, printed = run_alone(tmp_path, note, "print(json.dumps(seen))", memory_limit_gib=2.0)
    seen = json.loads(printed)
    steps = (
        CASE.protocol.warmup_steps + CASE.protocol.measured_steps + 2
    )  # the profiler's own warm-up step, and the traced one
    calls = len(seen) // steps
    assert len(seen) == calls * steps
    assert set(seen[: -2 * calls]) == {2 * GIB}
    assert set(seen[-2 * calls :]) == {resource.getrlimit(resource.RLIMIT_DATA)[0]}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("limit_gib", "state"),
    [(0.04, "oom"), *(pytest.param(limit, "ok", marks=pytest.mark.full) for limit in (1.0, 1000.0, None))],
)
def test_a_limit_of_a_gpu_is_one_of_its_allocator(tmp_path: Path, limit_gib: float | None, state: str) -> None:
    """The GPU has 80 GB; parameters, gradients and AdamW's state of llama-tiny alone are 76 MiB."""
    needs_device()
    result, _ = run_alone(tmp_path, first=FAKE_GPU, device="cuda", memory_limit_gib=limit_gib)
    assert result.state == state
    if state == "oom":
        assert (result.error or "").startswith("OutOfMemoryError: CUDA out of memory.")
        assert "40.96 MiB allowed" in (result.error or "")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("memory", "policy"), [("symmetric", "2"), pytest.param("group", "None", marks=pytest.mark.full)]
)
def test_memory_that_is_not_there_ends_unsupported_and_symmetric_memory_has_nccls_copy_engines(
    tmp_path: Path, memory: CommMemory, policy: str
) -> None:
    result, printed = run_alone(tmp_path, PRINTS_NCCLS_POLICY, strategy="fsdp2", comm_memory=memory)
    assert printed.split()[-1] == policy
    assert result.state == "unsupported"
    assert result.error == f"comm_memory: must be 'default' for a single rank, got '{memory}'"


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), "oom"),
        (torch.AcceleratorError("CUDA error: out of memory"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (dist.DistBackendError("NCCL error, unhandled cuda error: Cuda failure 2 'out of memory'"), "oom"),
        (RuntimeError("can't start new thread"), "failed"),  # not for want of memory, where none limits it
        (ValueError("out of memory"), "failed"),
        (UnsupportedError("cannot"), "unsupported"),
    ],
)
def test_the_state_that_an_error_ends_a_case_in(error: BaseException, state: str) -> None:
    assert state_of(error) == state
