"""What tensors cannot have of a GPU's memory: CUDA's context and NCCL's communicators, which are estimates with their
sources; and the setting with which torch's allocator leaves least unused.
"""

from dataclasses import dataclass

from refshard.quantities import MIB
from refshard.specs.hardware import HardwareSpec

EXPANDABLE_SEGMENTS = "PYTORCH_ALLOC_CONF=expandable_segments:True"
"""The environment variable with which torch's allocator fragments least. Until torch 2.8 it is PYTORCH_CUDA_ALLOC_CONF.
"""
COMMUNICATOR_BYTES = (558 * MIB, 390 * MIB)
"""What NCCL takes for a process's first communicator, and for each further one: measured on an H200 with groups of one
rank (profiles/recorded/h200/outside.json).
"""
_MEASURED = (
    "measured on an H200 with CUDA 13: 527 MiB for the context, 92 for the first kernels, 131 for cuBLAS, 18 for "
    "attention (profiles/recorded/h200/outside.json)"
)
_HOPPER, _A100, _CONSUMER_AMPERE, _ADA, _CONSUMER_BLACKWELL = (9, 0), (8, 0), (8, 6), (8, 9), (12, 0)
_CONSUMER = (
    280 * MIB,
    "median of every other public out-of-memory message of one GPU (validation/outside_memory.json)",
)
_CONTEXTS = {
    _HOPPER: (767 * MIB, _MEASURED),
    _A100: (514 * MIB, "an out-of-memory message of an A800 (modelscope/ms-swift issue 6675)"),
    _CONSUMER_AMPERE: _CONSUMER,
    _ADA: _CONSUMER,
    _CONSUMER_BLACKWELL: _CONSUMER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Bytes of device memory outside the caching allocator: their purpose, and the source of the estimate."""

    name: str
    bytes: int
    source: str


def context(hardware: HardwareSpec) -> Overhead:
    """What CUDA's context takes of this GPU, with the kernels and libraries that a training step loads."""
    measured, _ = _CONTEXTS[_HOPPER]
    size, source = _CONTEXTS.get(hardware.capability, (measured, f"not known for this GPU; {_MEASURED}"))
    return Overhead(name="CUDA context, loaded kernels, cuBLAS and cuDNN", bytes=size, source=source)


def outside_bytes(hardware: HardwareSpec, communicators: int) -> int:
    """Bytes of a GPU's memory outside the allocator, of a process with so many communicators."""
    first, further = COMMUNICATOR_BYTES
    nccl = first + (communicators - 1) * further if communicators else 0
    return context(hardware).bytes + nccl
