"""GPU memory outside torch's allocator: estimates, with their sources."""

from dataclasses import dataclass

from refshard.quantities import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Bytes of device memory outside the caching allocator: their purpose, and the source of the estimate."""

    name: str
    bytes: int
    source: str


CONTEXT = Overhead(
    name="CUDA context",
    bytes=500 * MIB,
    source="about 0.5 GiB on A100 and H100 with CUDA 12 and lazily loaded kernels: nvidia-smi minus torch's reserved "
    "memory",
)
_NCCL = Overhead(
    name="NCCL buffers",
    bytes=600 * MIB,
    source="estimated for one communicator over all ranks: its channels times NCCL_BUFFSIZE (4 MiB in NCCL's "
    "documentation)",
)


def overheads(world_size: int) -> tuple[Overhead, ...]:
    """What each of ``world_size`` ranks needs outside the allocator; a single rank needs no NCCL."""
    return (CONTEXT,) if world_size == 1 else (CONTEXT, _NCCL)
