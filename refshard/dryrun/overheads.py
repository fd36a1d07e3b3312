"""Memory of a GPU that torch's allocator does not see: estimates, with their source."""

from dataclasses import dataclass

from refshard.quantities import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Bytes of device memory outside of the caching allocator, what for, and who says so."""

    name: str
    bytes: int
    source: str


CONTEXT = Overhead(
    name="CUDA context",
    bytes=500 * MIB,
    source="about 0.5 GiB on A100 and H100, CUDA 12 with lazily loaded kernels: nvidia-smi less what torch reserves",
)
_NCCL = Overhead(
    name="NCCL buffers",
    bytes=600 * MIB,
    source="channels of a communicator times NCCL_BUFFSIZE (4 MiB, NCCL's documentation), counted for one communicator "
    "over all ranks: estimated",
)


def overheads(world_size: int) -> tuple[Overhead, ...]:
    """What a rank of so many takes beside its tensors."""
    return (CONTEXT,) if world_size == 1 else (CONTEXT, _NCCL)
