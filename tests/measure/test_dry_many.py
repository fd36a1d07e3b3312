"""Dry runs of many cases in one process."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.fakecuda.needs import needs_device

ASKS = """
import sys
from pathlib import Path
from refshard.measure.dry.many import dry_run_many
from refshard.specs.case import Case
case = Case.of(
    strategy="fsdp2", model="llama3-8b", seq_len=8192, gpus=8, global_batch=8, precision="bf16", cluster="dgx-h100",
    fidelity="dryrun",
)
dry_run_many([case, case], Path(sys.argv[1]), print, time_limit_s=600)
"""


@needs_device
@pytest.mark.processes
def test_all_processes_end_with_the_one_that_asked(tmp_path: Path) -> None:
    asking = subprocess.Popen([sys.executable, "-c", ASKS, str(tmp_path / "runs")])
    found: set[psutil.Process] = set()
    try:
        deadline = time.monotonic() + 300
        while len(found) < 3 and asking.poll() is None and time.monotonic() < deadline:  # one, and a fork for each case
            found = set(psutil.Process(asking.pid).children(recursive=True))
            time.sleep(0.1)
    finally:
        asking.kill()
        asking.wait()
    assert len(found) >= 3
    _, alive = psutil.wait_procs(found, timeout=300)
    assert not alive
    assert not list(tmp_path.rglob("result.json")), "a case went on to its end"
