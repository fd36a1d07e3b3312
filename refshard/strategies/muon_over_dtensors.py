"""torch's Muon over DTensors: what DTensor communicates for it.

Muon multiplies matrices, of which a rank holds rows. DTensor gathers or sums in each product, by its own estimate of
what is cheapest, which depends on the sizes and the ranks. There is no closed form, but DTensor plans by shapes alone:
Muon's step over DTensors on the meta device issues the same collectives, and none of them communicates.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from refshard.specs.case import CaseSpec
from refshard.strategies.muon import block_matrices, make_muon

_OPERATIONS = {
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
}


def announce_muon(model: nn.Module, case: CaseSpec) -> Iterator[tuple[str, int]]:
    """``(op, bytes)`` of what a step of Muon over the matrices of ``model``, which are DTensors, communicates; nothing
    where the case does not ask for it.
    """
    if case.optimizer != "muon" or case.workload != "training":
        return
    matrices = [nn.Parameter(_on_meta(matrix)) for matrix in block_matrices(model)]
    for matrix in matrices:
        matrix.grad = torch.zeros_like(matrix)
    with _Issued() as issued:
        make_muon(matrices, case, torch.optim.Muon).step()
    yield from issued.found


def _on_meta(matrix: nn.Parameter) -> DTensor:
    assert isinstance(matrix, DTensor)
    local = matrix.to_local().to("meta")
    made: DTensor = DTensor.from_local(
        local, matrix.device_mesh, matrix.placements, run_check=False, shape=matrix.shape, stride=matrix.stride()
    )
    return made


class _Issued(TorchDispatchMode):
    """Notes the functional collectives, which are what DTensor issues, and the bytes of the unsharded tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as what DTensor makes of it
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and func._opname in _OPERATIONS:
            whole = max(args[0].nbytes, result.nbytes)
            self.found.append((_OPERATIONS[func._opname], whole))
        return result
