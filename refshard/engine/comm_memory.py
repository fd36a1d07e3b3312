"""Memory that collectives read and write: torch's own, the process group's, or symmetric memory.

NCCL registers memory of the process group, and reduces it in the switches of NVLink without a copy of its own.
Symmetric memory lies alike on all ranks: NCCL gathers to it by copy engines, which leave the multiprocessors to
compute, where its communicator has the zero-CTA policy (``NCCL_CTA_POLICY=2``), and else by kernels made for it.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist

from refshard.errors import UnsupportedError, first_line

CommMemory = Literal["default", "allocator", "group", "symmetric"]
"""The process group's memory where there is some (``"default"``), torch's caching allocator's, the process group's, or
symmetric memory.
"""


def require_memory(memory: CommMemory, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Check that ``group`` can communicate through this kind of memory on ``device``. Symmetric memory is made ready,
    which is a collective.

    Raises:
        UnsupportedError: it cannot; the message says what is needed.
    """
    if memory in ("default", "allocator"):
        return
    if group is None or group.size() == 1:
        raise UnsupportedError(f"comm_memory: must be 'default' for a single rank, got '{memory}'")
    backend = _nccl(group, device)
    if backend is None:
        raise UnsupportedError(
            f"comm_memory: '{memory}' needs NCCL on GPUs, got {backend_of(group, device)} on {device.type}; use "
            "'default'"
        )
    if memory == "group" and not backend.supports_tensor_alloc(device):
        raise UnsupportedError(
            "comm_memory: 'group' needs NCCL's allocator and GPUs with NVLink multicast (compute capability 9.0 or "
            f"higher, joined by NVLink switches), which torch says {device} does not have; use 'default'"
        )
    if memory == "symmetric":
        _make_symmetric_ready(group)


def allocate(
    memory: CommMemory, numel: int, *, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """An uninitialised 1-D tensor that ``group`` communicates through, in memory that :func:`require_memory` has
    checked; by default in the group's memory, where it can be had. A collective for symmetric memory.
    """
    backend = None if group is None or memory == "allocator" else _nccl(group, device)
    if group is None or backend is None:
        return torch.empty(numel, dtype=dtype, device=device)
    if memory == "symmetric":
        from torch.distributed import _symmetric_memory as symmetric

        with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
            made = torch.empty(numel, dtype=dtype, device=device)
        symmetric.rendezvous(made, group=group.group_name)
        return made
    if not backend.supports_tensor_alloc(device):
        return torch.empty(numel, dtype=dtype, device=device)
    allocated: torch.Tensor = backend.allocate_tensor(numel, dtype=dtype, device=device)
    return allocated


def has_group_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` can allocate memory on ``device``."""
    backend = _nccl(group, device)
    return backend is not None and bool(backend.supports_tensor_alloc(device))


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that serves tensors on ``device``: a group may have one per device type."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {kind: backend for kind, _, backend in pairs}.get(device.type, "")


def _nccl(group: dist.ProcessGroup, device: torch.device) -> Any:
    """NCCL's part of a group; None where something else serves tensors on ``device``."""
    return group._get_backend(device) if device.type == "cuda" and backend_of(group, device) == "nccl" else None


def _make_symmetric_ready(group: dist.ProcessGroup) -> None:
    # Here, since few ask for it, and what it imports takes time.
    from torch.distributed import _symmetric_memory as symmetric

    if not hasattr(symmetric, "get_mem_pool"):
        raise UnsupportedError(
            f"comm_memory: 'symmetric' needs torch's pools of symmetric memory, got torch {torch.__version__}, which "
            "has none; install torch >= 2.13"
        )
    try:
        symmetric.set_backend("NCCL")
    except RuntimeError as error:
        raise UnsupportedError(
            f"comm_memory: 'symmetric' needs torch built with NCCL >= 2.27, and this one says: {first_line(error)}"
        ) from None
    dist.barrier(group=group)  # the communicator must be there before memory is registered with it
