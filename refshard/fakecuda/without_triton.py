"""Refuse ``torch.compile`` at once where Triton is missing: inductor finds out only after it has lowered the graph."""

from importlib.util import find_spec
from types import ModuleType
from typing import Any

from refshard.resources import install_extra

MISSING = (
    "compiled code and Triton kernels need triton, which is not installed: "
    f"{install_extra('compiled')} or pip install triton (no GPU is needed), or run eagerly with --compile no"
)


class Refused(BaseException):
    """The device cannot go on; no ``except Exception`` of Dynamo or the script turns it into eager code."""


def refuse_inductor(ext: ModuleType) -> None:
    """Without Triton, raise where Dynamo hands inductor the first graph with a tensor on the GPU."""
    if not ext.is_dry() or find_spec("triton") is not None:
        return
    import torch

    inductor: Any = torch._TorchCompileInductorWrapper
    compile_graph = inductor.__call__

    def refuse(self: Any, graph: Any, inputs: Any, **options: Any) -> Any:
        if any(isinstance(one, torch.Tensor) and one.is_cuda for one in inputs):
            raise Refused(MISSING)
        return compile_graph(self, graph, inputs, **options)

    inductor.__call__ = refuse
