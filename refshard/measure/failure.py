"""How a launch that did not end well is recorded: its state, and its cause in one line."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from refshard.measure.flight import waited_for
from refshard.measure.launchers.base import LaunchOutcome
from refshard.measure.timing import RankResult
from refshard.records import State
from refshard.specs.case import CaseSpec

_SOURCE = re.compile(r"/[^\s\"']*/(?=(?:site-packages|python3\.\d+|refshard)/[^\s\"']*\.(?:py|so)\b)")


def failure_of(
    case: CaseSpec, launch: LaunchOutcome, ranks: Sequence[RankResult], flights: Mapping[int, Any]
) -> tuple[State, str]:
    """The state of a case that did not end well, and its cause in one line. ``flights`` are what the ranks' flight
    recorders held when its time was over.
    """
    if launch.out_of_memory:
        return "oom", f"{launch.error}: killed by the kernel's OOM killer"
    if launch.timed_out:
        waiting = waited_for(flights)
        return "timeout", timeout_text(case, launch) + (f"; {waiting}" if waiting else "")
    unwell = [rank for rank in ranks if rank.state != "ok"]
    for rank in unwell:
        if rank.state == "oom":
            return "oom", f"rank {rank.rank}: {rank.error}"
    if launch.failed_rank is not None and launch.failed_rank not in {rank.rank for rank in ranks}:
        return "failed", launch.error or f"rank {launch.failed_rank} ended without a result"
    # The other ranks' errors are but echoes of the first.
    for rank in sorted(unwell, key=lambda rank: (rank.failed_at_s, rank.rank != launch.failed_rank)):
        return rank.state, f"rank {rank.rank}: {rank.error}"
    return "failed", launch.error or "a rank ended without a result"


def timeout_text(case: CaseSpec, launch: LaunchOutcome) -> str:
    """How long a launch had that was ended, and where its ranks stood."""
    stood = f": {launch.error}" if launch.error else ""
    return f"did not finish within time_limit_s = {case.time_limit_s:g}; the ranks were killed{stood}"


def without_home(line: str) -> str:
    """A line of a log with the paths of sources and libraries from their package on: records are shown to others, whom
    it tells nothing where somebody's environment lies.

    >>> without_home('File "/home/me/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 7, in linear')
    'File "site-packages/torch/nn/functional.py", line 7, in linear'
    >>> without_home("Failed to load /home/me/venv/lib/python3.11/site-packages/torchao/_C.abi3.so: a reason")
    'Failed to load site-packages/torchao/_C.abi3.so: a reason'
    """
    return _SOURCE.sub("", line)
