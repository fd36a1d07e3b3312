"""What a launcher starts for each rank: ``python -m refshard.measure.worker PROGRAM FOLDER LAUNCHER_PID``.

Before it imports anything slow, it asks the kernel to end it if its launcher is killed, so that no rank is ever left
behind, and prepares to write its stack on request.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

ASK = signal.SIGUSR1
"""The signal that asks a rank where it stands."""
PROGRESS_FILE = "progress"
"""Where rank 0 writes what it is doing."""
STORE_IS_HELD = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
"""Variables that say the store exists already, so rank 0 opens none; torch then reads the count too."""
_PR_SET_PDEATHSIG = 1
_PATIENCE_S, _POLL_S = 300.0, 0.1

_held: list[object] = []
"""Rank 0's store, which lives as long as its process."""


def request_file(folder: Path, program: str) -> Path:
    """What a program is to do, as JSON, in the folder of its launch."""
    return folder / f"{program}.json"


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stack on request; it creates the file at its start."""
    return folder / f"stack{rank}"


def end_with_parent(parent: int, number: signal.Signals) -> bool:
    """Ask the kernel for a signal when ``parent`` ends; False if it has ended already."""
    if sys.platform != "linux":
        return True
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def meet(folder: Path, patience_s: float = _PATIENCE_S) -> None:
    """Set the variables by which ``init_process_group`` finds the store, if the launcher holds none.

    Rank 0 holds it, on a port that the kernel chose, and leaves its address in the launch's folder, which all ranks
    share. So no port is agreed on before, and none can be taken.

    Raises:
        LaunchError: rank 0 left no address in time.
    """
    path = folder / "meeting"
    if os.environ["RANK"] == "0":
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # If one host has all ranks, none needs to find it by its name.
        alone = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
        host = "127.0.0.1" if alone else socket.gethostname()
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        _held.append(store)
        path.with_suffix(".tmp").write_text(f"{host} {store.port}")
        path.with_suffix(".tmp").replace(path)
    deadline = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > deadline:
            from refshard.errors import LaunchError

            raise LaunchError(
                f"rank 0 left no address in {path} within {patience_s:g} s; all nodes must share the folder"
            )
        time.sleep(_POLL_S)
    address, port = path.read_text().split()
    os.environ.update({"MASTER_ADDR": address, "MASTER_PORT": port, **STORE_IS_HELD})


def main(program: str, folder: Path, launcher: int) -> int:
    """Run this rank of a program of ``launchers/base.py``; return the process's exit status."""
    with suppress(OSError):  # on a full disk: a rank that cannot write its stack runs all the same
        signal.signal(ASK, lambda *_: None)  # so that it can wake threads, too
        faulthandler.register(ASK, stack_file(folder, int(os.environ.get("RANK", "0"))).open("w"), chain=True)
    if not end_with_parent(launcher, signal.SIGKILL):
        return 1
    if program == "environment":
        from refshard.measure.environment import describe_rank

        return describe_rank(folder)
    if program == "dryrun":
        from refshard.measure.dry.rank import run_dry_ranks

        run_dry_ranks(folder)
    if "MASTER_PORT" not in os.environ:
        meet(folder)
    if program == "calibration":
        from refshard.measure.calibration.rank import calibrate_rank

        return calibrate_rank(folder)
    from refshard.measure.rank import run_rank, run_series_rank

    return run_series_rank(folder) if program == "series" else run_rank(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
