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
    name="CUDA context, loaded kernels, cuBLAS and cuDNN",
    bytes=767 * MIB,
    source="measured on an H200 with CUDA 13: 527 MiB for the context, 92 for the first kernels, 131 for cuBLAS, 18 "
    "for attention (profiles/recorded/h200/outside.json)",
)
_NCCL = Overhead(
    name="NCCL buffers",
    bytes=558 * MIB,
    source="measured on an H200 for a first communicator, of one rank; each further one took 390 MiB, which is not "
    "counted (profiles/recorded/h200/outside.json)",
)


def overheads(world_size: int) -> tuple[Overhead, ...]:
    """What each of ``world_size`` ranks needs outside the allocator; a single rank needs no NCCL."""
    return (CONTEXT,) if world_size == 1 else (CONTEXT, _NCCL)
