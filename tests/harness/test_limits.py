"""Limits on memory. The process and its limit are real."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from refshard.harness.limits import limited_memory
from refshard.harness.rank import CASE_FILE
from refshard.quantities import GIB
from refshard.specs.case import CaseSpec

CPU = torch.device("cpu")


def data_bytes() -> int:
    """What counts toward the limit now."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def test_an_allocation_beyond_the_limit_fails_until_it_is_lifted() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with limited_memory(data_bytes() + GIB // 4, CPU):
        torch.empty(GIB // 8, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(GIB, dtype=torch.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    torch.empty(GIB, dtype=torch.uint8)


def test_a_thread_that_cannot_start_is_a_want_of_memory_only_under_a_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    says = r"no room for the stack of a thread \(can't start new thread\)"
    with pytest.raises(MemoryError, match=says), limited_memory(data_bytes() + GIB, CPU):
        raise RuntimeError("can't start new thread")
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with pytest.raises(RuntimeError, match="can't start new thread"), limited_memory(None, CPU):
        raise RuntimeError("can't start new thread")


LIMIT_AT_EACH_FORWARD = """
import json, resource, sys
from pathlib import Path
from torch.nn.modules.module import register_module_forward_pre_hook
from refshard.harness.rank import run_rank

seen = []
register_module_forward_pre_hook(lambda *_: seen.append(resource.getrlimit(resource.RLIMIT_DATA)[0]))
status = run_rank(Path(sys.argv[1]))
print(json.dumps(seen))
sys.exit(status)
"""


@pytest.mark.processes
def test_a_ranks_limit_holds_for_its_training_and_not_for_the_trace(tmp_path: Path) -> None:
    case = CaseSpec(
        strategy="single", world_size=1, model="llama-tiny", global_batch=1, seq_len=8, device="cpu",
        measured_steps=2, traced_steps=1, memory_limit_gib=2.0,
    )  # fmt: skip
    (tmp_path / CASE_FILE).write_bytes(msgspec.json.encode(case))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", LIMIT_AT_EACH_FORWARD, tmp_path],
        env={**os.environ, **alone}, check=True, timeout=120, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    seen = json.loads(done.stdout)
    steps = case.warmup_steps + case.measured_steps + 2  # the profiler's own warm-up step, and the traced one
    calls = len(seen) // steps
    assert len(seen) == calls * steps
    assert set(seen[: -2 * calls]) == {2 * GIB}
    assert set(seen[-2 * calls :]) == {resource.getrlimit(resource.RLIMIT_DATA)[0]}
