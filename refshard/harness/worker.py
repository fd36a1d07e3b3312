"""What a launcher starts for each rank: ``python -m refshard.harness.worker PROGRAM FOLDER LAUNCHER_PID``.

Before it imports anything that takes time, it asks the kernel to end it should its launcher be killed, so that no rank
is ever left behind.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: signal.Signals) -> bool:
    """Ask the kernel for a signal when ``parent`` ends; False if it has ended already."""
    if sys.platform != "linux":
        return True
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def main(program: str, folder: Path, launcher: int) -> int:
    """Run this rank of one of the programs that ``launchers/base.py`` lists; return the process's exit status."""
    if not end_with_parent(launcher, signal.SIGKILL):
        return 1
    if program == "environment":
        from refshard.harness.describe import describe_rank

        return describe_rank(folder)
    if "MASTER_PORT" not in os.environ:
        from refshard.harness.meeting import meet

        meet(folder)
    if program == "calibration":
        from refshard.harness.calibration.rank import calibrate_rank

        return calibrate_rank(folder)
    from refshard.harness.rank import run_rank

    return run_rank(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
