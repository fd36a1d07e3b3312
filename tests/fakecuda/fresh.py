"""Run checks in fresh processes: the fake CUDA device has to be there before torch.

A module of checks defines functions without arguments; what each returns comes back through JSON. The pytest side
asserts values, so that a failure reads as usual.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from torch._C._distributed_c10d import TCPStore

from refshard.errors import RefshardError
from refshard.fakecuda.build import extension
from refshard.measure.launchers.base import rank_environment

_HOST = "127.0.0.1"
_TIMEOUT_S = 1800


class Seen:
    """What the checks of a module returned, on each rank."""

    def __init__(self, ranks: list[dict[str, Any]]) -> None:
        self._ranks = ranks

    def __call__(self, check: str, rank: int = 0) -> Any:
        """What a check returned on this rank; fails with the check's traceback if it raised."""
        return _value(self._ranks[rank], check)

    def on_all(self, check: str) -> list[Any]:
        """What a check returned, in rank order."""
        return [_value(seen, check) for seen in self._ranks]


def _value(seen: dict[str, Any], check: str) -> Any:
    value, error = seen[check]
    if error:
        pytest.fail(f"{check}: {error}", pytrace=False)
    return value


def see(
    checks: str, *, mode: Literal["dry", "host"], ranks: int = 1, alone: bool = False,
    environment: Mapping[str, str] | None = None, **device: Any,
) -> Seen:  # fmt: skip
    """Run all checks of the module ``checks`` on a fake H100 and return what they returned.

    With ``ranks`` above 1, on as many processes with torchrun's variables, or with ``alone`` on the first of them only.
    ``device`` goes to :func:`refshard.fakecuda.activate`, but for ``memory_bytes``, which replaces the H100's.
    """
    needs_device()
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
    count = 1 if alone else ranks
    with tempfile.TemporaryDirectory() as folder:
        asked = {"checks": checks, "mode": mode, "ranks": count, "folder": folder, "device": device}
        variables = {**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1", **(environment or {})}
        if store is not None:
            variables.update(_cluster(ranks, store.port))
        command = [sys.executable, "-m", "tests.fakecuda.child", json.dumps(asked)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_TIMEOUT_S)
        found = [Path(folder) / f"{rank}.json" for rank in range(count)]
        if done.returncode or not all(path.exists() for path in found):
            pytest.fail(f"{checks} ended with exit status {done.returncode}:\n{done.stderr[-4000:]}", pytrace=False)
        return Seen([json.loads(path.read_text()) for path in found])


@cache
def needs_device() -> None:
    """Skip where the device cannot be built here."""
    try:
        extension()
    except RefshardError as error:
        if "could not be built" in str(error):
            raise
        pytest.skip(str(error))


def _cluster(ranks: int, port: int) -> dict[str, str]:
    """What torchrun tells all ranks; the child adds what differs."""
    told = rank_environment(0, 0, world_size=ranks, local_world_size=ranks, address=_HOST, port=port)
    return {**told, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
