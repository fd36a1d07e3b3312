"""``python -m tests.fakecuda.child ASKED``: the process that :func:`tests.fakecuda.fresh.see` runs checks in."""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from refshard.fakecuda import activate
from refshard.specs.hardware import load_hardware


def main(asked: dict[str, Any]) -> int:
    """Run the checks on every rank; each leaves a file with what they returned. Returns the exit status."""
    device = dict(asked["device"])
    hardware = load_hardware("h100-sxm-80gb")
    if memory_bytes := device.pop("memory_bytes", 0):
        hardware = msgspec.structs.replace(hardware, memory_bytes=memory_bytes)
    activate(hardware, mode=asked["mode"], **device)
    import torch

    torch.set_num_threads(1)
    checks = _checks(asked["checks"])
    others = [_fork(rank, checks, asked) for rank in range(1, asked["ranks"])]
    _run(0, checks, asked)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in others]
    return max(map(abs, statuses), default=0)


def _checks(module: str) -> dict[str, Callable[[], Any]]:
    found = vars(importlib.import_module(module))
    return {name: value for name, value in found.items() if getattr(value, "is_check", False)}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Mark a function as one to be run; what it returns must be JSON's."""
    function.is_check = True  # type: ignore[attr-defined]
    return function


def _fork(rank: int, checks: dict[str, Callable[[], Any]], asked: dict[str, Any]) -> int:
    """The process of another rank: nothing has run yet that a fork would break, and importing torch takes seconds."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        _run(rank, checks, asked)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def _run(rank: int, checks: dict[str, Callable[[], Any]], asked: dict[str, Any]) -> None:
    import torch.distributed as dist

    seen = {}
    for name, function in checks.items():
        try:
            seen[name] = (function(), "")
        except Exception:
            seen[name] = (None, traceback.format_exc(limit=-12))
    (Path(asked["folder"]) / f"{rank}.json").write_text(json.dumps(seen))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    # Under its own name, so that there is one `check`.
    sys.exit(importlib.import_module("tests.fakecuda.child").main(json.loads(sys.argv[1])))
