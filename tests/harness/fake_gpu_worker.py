"""``python -m tests.harness.fake_gpu_worker PROGRAM FOLDER LAUNCHER_PID``: a rank's worker that has fake H100s."""

import sys
from pathlib import Path

from refshard.fakecuda import activate
from refshard.specs.hardware import load_hardware

if __name__ == "__main__":
    activate(load_hardware("h100-sxm-80gb"), mode="host")
    from refshard.harness.worker import main

    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
