"""``refshard`` as a process of its own, and what it left."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from refshard.cli import main
from refshard.measure.store import read_run
from refshard.records import Run

SUITE = """
name = "test"
{head}
[matrix]
strategy = [{strategies}]
gpus = [{ranks}]
[case]
model = "llama-tiny"
global_batch = 2
seq_len = 16
device = "cpu"
measured_steps = {steps}
traced_steps = 1
{more}
"""


def write_suite(folder: Path, *strategies: str, ranks: int = 1, steps: int = 3, head: str = "", more: str = "") -> Path:
    """A suite of llama-tiny; ``head`` is put before its tables, and ``more`` after what its cases share."""
    path = folder / "suite.toml"
    quoted = ", ".join(f'"{s}"' for s in strategies)
    path.write_text(SUITE.format(head=head, strategies=quoted, ranks=ranks, steps=steps, more=more))
    return path


def start(*arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """``refshard`` with ``arguments``, in the environment ``env`` or in this process's."""
    command = [sys.executable, "-m", "refshard", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def refshard(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=900)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def status_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Exit status and standard error of the command line in this process, which has imported what it needs."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code, capsys.readouterr().err


def processes_of(folder: Path, module: str | None = None) -> list[psutil.Process]:
    """Every living process that carries the run's folder in its command line, and that runs ``module``, if given."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            alike = any(str(folder) in word for word in words) and (module is None or words[1:3] == ["-m", module])
            if alike and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(condition: Callable[[], object], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def interrupted(run: Path) -> str:
    """The last line of ``refshard run`` when it was cut short, by what it left in its folder."""
    kept = read_run(run)
    saved = f"{len(kept.launches)} of {kept.header.planned} launches saved"
    return f"Interrupted: {saved}. Resume with: refshard run --resume {run}"


def only_case(run: Run, strategy: str) -> tuple[str, str | None, tuple[str, ...]]:
    (record,) = (r for r in run.launches if r.case.job.strategy == strategy)
    return record.state, record.error, record.log_tail
