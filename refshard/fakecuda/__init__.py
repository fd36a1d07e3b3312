"""A fake CUDA device: torch's CPU build, with a CUDA device that is not there.

A C++ extension (``csrc/``) registers for torch's real CUDA dispatch key a device guard, an allocator, hooks, a kernel
for every operator and a c10d backend that stands where NCCL does. So a program that trains on GPUs runs unmodified:
every launch, stream, event, allocation and collective is real, and recorded. What an operator computes depends on the
mode: nothing in ``dry``, the right values on the host's memory in ``host``.

:func:`activate` must be called before torch is imported; it builds the extension where it is not built yet.
"""

from refshard.fakecuda.activate import activate, is_active

__all__ = ["activate", "is_active"]
