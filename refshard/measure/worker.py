"""What a launcher starts for each rank: ``python -m refshard.measure.worker PROGRAM FOLDER LAUNCHER_PID``.

Before it imports anything that takes time, it asks the kernel to end it should its launcher be killed, so that no rank
is ever left behind, and makes ready to write down where it stands when it is asked.
"""

import ctypes
import faulthandler
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

ASK = signal.SIGUSR1
"""The signal that asks a rank where it stands."""

_PR_SET_PDEATHSIG = 1


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stack when it is asked; it makes the file as it starts."""
    return folder / f"stack{rank}"


def end_with_parent(parent: int, number: signal.Signals) -> bool:
    """Ask the kernel for a signal when ``parent`` ends; False if it has ended already."""
    if sys.platform != "linux":
        return True
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def main(program: str, folder: Path, launcher: int) -> int:
    """Run this rank of one of the programs that ``launchers/base.py`` lists; return the process's exit status."""
    with suppress(OSError):  # on a full disk: a rank that cannot be asked runs all the same
        signal.signal(ASK, lambda *_: None)  # so that threads can be woken by it, too
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
        from refshard.measure.meeting import meet

        meet(folder)
    if program == "calibration":
        from refshard.measure.calibration.rank import calibrate_rank

        return calibrate_rank(folder)
    from refshard.measure.rank import run_rank, run_series_rank

    return run_series_rank(folder) if program == "series" else run_rank(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
