"""``python -m tests.measure.fake_gpu_worker PROGRAM FOLDER LAUNCHER_PID [MEMORY_BYTES]``: a rank's worker that has
fake H100s, with so much memory each if it is given.
"""

import sys
from pathlib import Path

import msgspec

from refshard.fakecuda import activate
from refshard.specs.hardware import load_hardware

if __name__ == "__main__":
    hardware = load_hardware("h100-sxm-80gb")
    if memory_bytes := sys.argv[4:]:
        hardware = msgspec.structs.replace(hardware, memory_bytes=int(memory_bytes[0]))
    activate(hardware, mode="host")
    from refshard.measure.worker import main

    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
