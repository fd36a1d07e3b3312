"""Run one rank of a script on the fake device, in a process of its own, and say what it asked of the device."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from refshard.dryrun.child import ANSWER, RECORDING, REQUEST
from refshard.dryrun.collect import load
from refshard.dryrun.recording import Recording
from refshard.dryrun.request import Answer, Request
from refshard.errors import RefshardError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DryRun:
    """What was asked for, how it went, and what was asked of the device."""

    request: Request
    answer: Answer
    recording: Recording


def dry_run(request: Request) -> DryRun:
    """Run the script that the request names; what it prints goes where this process's output goes, on standard error.

    Raises:
        RefshardError: the device could not be made, or the script's process ended without a word.
    """
    with tempfile.TemporaryDirectory(prefix="refshard-dryrun-") as name:
        folder = Path(name)
        (folder / REQUEST).write_bytes(msgspec.json.encode(request))
        done = subprocess.run([sys.executable, "-m", "refshard.dryrun.child", name], stdout=sys.stderr)
        if not (folder / ANSWER).exists():
            raise RefshardError(_cause(done.returncode))
        answer = msgspec.json.decode((folder / ANSWER).read_bytes(), type=Answer)
        return DryRun(request=request, answer=answer, recording=load(folder / RECORDING))


def _cause(status: int) -> str:
    if status == 2:
        return "dryrun: the fake device could not be made; the reason is above"
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"dryrun: the script's process {how} and left no recording; run it alone to see why"
