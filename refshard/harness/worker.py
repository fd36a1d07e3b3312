"""What a launcher starts for each rank: ``python -m refshard.harness.worker PROGRAM FOLDER LAUNCHER_PID``.

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


def main(program: str, folder: Path, launcher: int) -> int:
    """Run this rank of the program, ``case``, ``series`` or ``calibration``, and return the process's exit status."""
    with suppress(OSError):  # on a full disk: a rank that cannot be asked runs all the same
        faulthandler.register(ASK, stack_file(folder, int(os.environ.get("RANK", "0"))).open("w"))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            return 1  # it was killed before the kernel was asked
    if program == "calibration":
        from refshard.harness.calibration.rank import calibrate_rank

        return calibrate_rank(folder)
    from refshard.harness.rank import run_rank, run_series_rank

    return run_series_rank(folder) if program == "series" else run_rank(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
