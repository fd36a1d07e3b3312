"""What a rank says of the error that ended it, and how long its limit holds. The process and its limit are real."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from refshard.errors import UnsupportedError
from refshard.measure.rank import CASE_FILE, rank_file, state_of
from refshard.measure.timing import RankResult
from refshard.quantities import GIB
from refshard.specs.case import Case
from refshard.specs.job import CommMemory
from tests.fakecuda.fresh import needs_device

THREADS_OF_64_MIB = """
import sys, threading
from pathlib import Path
from torch.nn.modules.module import register_module_forward_pre_hook
from refshard.measure.rank import run_rank

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

register_module_forward_pre_hook(start_threads)
sys.exit(run_rank(Path(sys.argv[1])))
"""

HANGING_END = """
import sys, time
from pathlib import Path
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from refshard.measure.rank import run_rank

def fail(*_):
    raise ZeroDivisionError("planted")

dist.destroy_process_group = lambda *_: time.sleep(3600)  # as NCCL's, whose peers do not come
register_module_forward_pre_hook(fail)
sys.exit(run_rank(Path(sys.argv[1])))
"""


def run_rank_of(script: str, folder: Path, case: Case) -> RankResult:
    """What the only rank of ``case`` leaves, which runs in ``script`` and ends with status 1."""
    (folder / CASE_FILE).write_bytes(msgspec.json.encode(case))
    done = subprocess.run(
        [sys.executable, "-c", script, folder], env={**os.environ, **ALONE}, check=False, timeout=1800
    )
    assert done.returncode == 1
    return msgspec.json.decode(rank_file(folder, 0).read_bytes(), type=RankResult)


@pytest.mark.processes
def test_a_rank_that_fails_ends_without_waiting_for_its_peers(tmp_path: Path) -> None:
    case = Case.of(strategy="single", gpus=1, model="llama-tiny", global_batch=1, seq_len=8, device="cpu")
    result = run_rank_of(HANGING_END, tmp_path, case)
    assert (result.state, result.error) == ("failed", "ZeroDivisionError: planted")


PRINTS_NCCLS_POLICY = """
import os, sys
from pathlib import Path
from refshard.measure.rank import run_rank

end = os._exit
os._exit = lambda status: (print(os.environ.get("NCCL_CTA_POLICY"), flush=True), end(status))
sys.exit(run_rank(Path(sys.argv[1])))
"""
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.processes
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
    case = Case.of(
        strategy="single",
        gpus=1,
        model="llama-tiny",
        global_batch=1,
        seq_len=8,
        device="cpu",
        memory_limit_gib=limit_gib,
    )
    result = run_rank_of(THREADS_OF_64_MIB, tmp_path, case)
    assert (result.state, result.error) == (state, error)


LIMIT_AT_EACH_FORWARD = """
import json, resource, sys
from pathlib import Path
from torch.nn.modules.module import register_module_forward_pre_hook
from refshard.measure.rank import run_rank

seen = []
register_module_forward_pre_hook(lambda *_: seen.append(resource.getrlimit(resource.RLIMIT_DATA)[0]))
status = run_rank(Path(sys.argv[1]))
print(json.dumps(seen))
sys.exit(status)
"""


@pytest.mark.processes
def test_a_ranks_limit_holds_for_its_training_and_not_for_the_trace(tmp_path: Path) -> None:
    case = Case.of(
        strategy="single", gpus=1, model="llama-tiny", global_batch=1, seq_len=8, device="cpu",
        measured_steps=2, traced_steps=1, memory_limit_gib=2.0,
    )  # fmt: skip
    (tmp_path / CASE_FILE).write_bytes(msgspec.json.encode(case))
    done = subprocess.run(
        [sys.executable, "-c", LIMIT_AT_EACH_FORWARD, tmp_path],
        env={**os.environ, **ALONE}, check=True, timeout=1800, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    seen = json.loads(done.stdout)
    steps = (
        case.protocol.warmup_steps + case.protocol.measured_steps + 2
    )  # the profiler's own warm-up step, and the traced one
    calls = len(seen) // steps
    assert len(seen) == calls * steps
    assert set(seen[: -2 * calls]) == {2 * GIB}
    assert set(seen[-2 * calls :]) == {resource.getrlimit(resource.RLIMIT_DATA)[0]}


ON_A_FAKE_GPU = """
import sys
from pathlib import Path
from refshard.fakecuda import activate
from refshard.specs.hardware import load_hardware

activate(load_hardware("h100-sxm-80gb"), mode="host")
from refshard.measure.rank import run_rank
sys.exit(run_rank(Path(sys.argv[1])))
"""


@pytest.mark.processes
@pytest.mark.parametrize(("limit_gib", "state"), [(0.04, "oom"), (1.0, "ok"), (1000.0, "ok"), (None, "ok")])
def test_a_limit_of_a_gpu_is_one_of_its_allocator(tmp_path: Path, limit_gib: float | None, state: str) -> None:
    """The GPU has 80 GB; parameters, gradients and AdamW's state of llama-tiny alone are 76 MiB."""
    needs_device()
    case = Case.of(
        strategy="single", gpus=1, model="llama-tiny", global_batch=1, seq_len=8, device="cuda",
        measured_steps=1, traced_steps=1, memory_limit_gib=limit_gib,
    )  # fmt: skip
    (tmp_path / CASE_FILE).write_bytes(msgspec.json.encode(case))
    command = [sys.executable, "-c", ON_A_FAKE_GPU, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **ALONE}, check=False, timeout=1800)
    result = msgspec.json.decode(rank_file(tmp_path, 0).read_bytes(), type=RankResult)
    assert (result.state, done.returncode) == (state, 0 if state == "ok" else 1)
    if state == "oom":
        assert (result.error or "").startswith("OutOfMemoryError: CUDA out of memory.")
        assert "40.96 MiB allowed" in (result.error or "")


@pytest.mark.processes
@pytest.mark.parametrize(("memory", "policy"), [("symmetric", "2"), ("group", "None")])
def test_memory_that_is_not_there_ends_unsupported_and_symmetric_memory_has_nccls_copy_engines(
    tmp_path: Path, memory: CommMemory, policy: str
) -> None:
    case = Case.of(
        strategy="fsdp2", gpus=1, model="llama-tiny", global_batch=1, seq_len=8, device="cpu", comm_memory=memory
    )
    (tmp_path / CASE_FILE).write_bytes(msgspec.json.encode(case))
    variables = {name: value for name, value in os.environ.items() if name != "NCCL_CTA_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", PRINTS_NCCLS_POLICY, tmp_path], env={**variables, **ALONE}, check=False, timeout=1800,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split()[-1] == policy
    result = msgspec.json.decode(rank_file(tmp_path, 0).read_bytes(), type=RankResult)
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
