"""Triton kernels on the fake device: each launch is recorded, and nothing is compiled.

A launch reads and writes the tensors that it is given, whole. Torch's own analysis of the kernel's intermediate
representation says which ones it writes (``torch._higher_order_ops.triton_kernel_wrap``). A kernel that multiplies
matrices is flagged, since its FLOPs do not follow from its arguments.
"""

import re
from types import ModuleType
from typing import Any

ON_HOST = (
    "the fake CUDA device does not compute Triton kernels on the host; run without them (and without torch.compile, or "
    "with backend='aot_eager'), or in a dry run"
)


def install(ext: ModuleType) -> None:
    """Let ``@triton.jit`` functions launch on the fake device."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if not ext.is_dry():
            raise NotImplementedError(ON_HOST)
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        given = {name: value for name, value in kwargs.items() if name in self.arg_names}
        bound = self.signature.bind(*args, **given)
        bound.apply_defaults()
        if warmup:
            return
        if callable(grid):
            grid(bound.arguments)
        tensors = {name: found for name, value in bound.arguments.items() if (found := _tensor(value)) is not None}
        with ext.Uncounted():
            read, written = accessed(self, bound.arguments, tensors)
        reads = [_nbytes(tensor) if name in read else 0 for name, tensor in tensors.items()]
        writes = [_nbytes(tensor) if name in written else 0 for name, tensor in tensors.items()]
        device = next((tensor.device.index for tensor in tensors.values()), ext.current_device())
        ext.launch(
            f"triton::{self.fn.__name__}", list(tensors.values()), reads, writes, 0, ext.current_stream(device)[0],
            products=multiplies(str(self.src)),
        )  # fmt: skip

    JITFunction.run = run


def multiplies(source: str) -> bool:
    """Whether a kernel's source has a product of matrices."""
    return re.search(r"\b(tl|language)\.dot(_scaled)?\(", source) is not None


def _tensor(value: Any) -> Any:
    """The tensor that an argument is, or that a tensor descriptor or reinterpreted tensor wraps; else None."""
    import torch

    value = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value
    return value if isinstance(value, torch.Tensor) else None


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


_found: dict[tuple[Any, ...], tuple[frozenset[str], frozenset[str]]] = {}


def accessed(kernel: Any, arguments: dict[str, Any], tensors: dict[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the tensors that a kernel reads, and of those that it writes; all if that cannot be analysed."""
    from torch._higher_order_ops.triton_kernel_wrap import identify_accessed_tensors

    key = (kernel, *((name, tensors[name].dtype if name in tensors else value) for name, value in arguments.items()))
    if key not in _found:
        found = identify_accessed_tensors(kernel, {**arguments, **tensors}, {})
        _found[key] = (
            frozenset(dep.name for dep in found.read_writes.reads),
            frozenset(dep.name for dep in found.read_writes.writes),
        )
    return _found[key]
