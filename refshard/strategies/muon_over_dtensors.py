"""torch's Muon over DTensors, and what DTensor communicates for it.

Muon multiplies matrices, of which a rank holds rows. DTensor gathers or sums in each product, by its own estimate of
what is cheapest, which depends on the sizes and the ranks. There is no closed form, but DTensor plans by shapes alone:
Muon's step over DTensors on the meta device issues the same collectives, and none of them communicates.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from refshard.errors import UnsupportedError
from refshard.specs.case import CaseSpec
from refshard.strategies.muon import block_matrices, muon_options

_OPERATIONS = {
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_dtensor::shard_dim_alltoall": "all_to_all",
}
"""What DTensor issues, by what traces call it."""


def muon_over_dtensors(matrices: Sequence[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """``torch.optim.Muon``, where DTensor can step these matrices with it.

    Raises:
        UnsupportedError: DTensor refuses, as it does where a rank has no row of a matrix, or would communicate on
            another device than the matrices are on.
    """
    for matrix in matrices:
        assert isinstance(matrix, DTensor)
        if (device := matrix.to_local().device.type) != (meshs := matrix.device_mesh.device_type):
            raise UnsupportedError(f"torch's Muon needs DTensors on the mesh's device ({meshs}), got {device}")
    try:
        _issued(matrices, options)
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise UnsupportedError(f"torch's Muon over DTensors says: {type(error).__name__}: {said}") from error
    return torch.optim.Muon(matrices, **options)


def announce_muon(model: nn.Module, case: CaseSpec) -> list[tuple[str, int]]:
    """``(op, bytes)`` of what a step of Muon over the matrices of ``model``, which are DTensors, communicates; nothing
    where the case does not ask for it.
    """
    return _issued(block_matrices(model), muon_options(case)) if case.optimizer == "muon" else []


def _issued(matrices: Sequence[nn.Parameter], options: dict[str, Any]) -> list[tuple[str, int]]:
    planned = [nn.Parameter(_on_meta(matrix)) for matrix in matrices]
    for matrix in planned:
        matrix.grad = torch.zeros_like(matrix)
    muon, issued = torch.optim.Muon(planned, **options), _Issued()
    unhooked = type(muon).step.__wrapped__  # type: ignore[attr-defined]
    with issued:
        unhooked(muon)  # a step that no hook may take for one of training
    return issued.found


def _on_meta(matrix: nn.Parameter) -> DTensor:
    assert isinstance(matrix, DTensor)
    local = matrix.to_local().to("meta")
    made: DTensor = DTensor.from_local(
        local, matrix.device_mesh, matrix.placements, run_check=False, shape=matrix.shape, stride=matrix.stride()
    )
    return made


class _Issued(TorchDispatchMode):
    """Notes DTensor's collectives, and the bytes of the unsharded tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as what DTensor makes of it
        result = func(*args, **(kwargs or {}))
        if (op := _OPERATIONS.get(func._schema.name)) is not None:
            self.found.append((op, max(args[0].nbytes, result.nbytes)))
        return result
