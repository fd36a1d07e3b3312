"""What of a device's memory tensors can fill."""

from refshard.quantities import GIB
from refshard.specs.hardware import HardwareSpec

OUTSIDE_BYTES = 2 * GIB
"""What a GPU's memory holds beside torch's allocator: a CUDA context and loaded kernels, some 0.7 GiB (PyTorch forums,
"High gpu memory overhead"), and two communicators of 0.5 to 0.7 GiB each (NVIDIA/nccl issue 964, "Question about GPU
memory consumption of NCCL": 544 MB for 2 A100s, 688 MB for more).
"""
FRAGMENTATION = 0.04
"""The share of the rest that lies unused between an allocator's blocks. SimuMax's runs on 8 B200 reserve 2 to 7 % more
than they allocate (validation/published/simumax-b200.toml).
"""


def usable(hardware: HardwareSpec) -> int:
    """What of a device's memory torch's allocator can fill with tensors; a CPU has nothing beside it to allow for."""
    outside = OUTSIDE_BYTES if hardware.asynchronous else 0
    return int((hardware.memory_bytes - outside) * (1 - FRAGMENTATION))
