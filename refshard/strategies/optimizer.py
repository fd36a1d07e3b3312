"""The optimizer that most strategies step: torch's fused AdamW, torchao's with 8-bit state, or Muon beside AdamW."""

import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from refshard.engine.local_part import LocalPart
from refshard.engine.optim import local_parameters
from refshard.errors import UnsupportedError
from refshard.specs.case import CaseSpec
from refshard.strategies.muon import MakeMuon, Together, block_matrices, muon_options

EPSILON = 1e-3
"""AdamW's epsilon. With torch's 1e-8 its steps hardly depend on the scale of gradients: of twice the right ones, a sum
over two ranks in place of the mean, ten losses of llama-tiny differ by 4e-7; with this, by far more than loss parity
allows.
"""


def make_optimizer(module: nn.Module, case: CaseSpec, muon: MakeMuon = torch.optim.Muon) -> torch.optim.Optimizer:
    """The case's optimizer over those of the module's parameters that are trained. ``muon`` makes Muon of matrices, if
    the case asks for it.

    Raises:
        UnsupportedError: AdamW with 8-bit state cannot step these.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if case.optimizer == "adamw-8bit":
        return _adamw_8bit(trained, case)
    if case.optimizer == "adamw":
        return _adamw(trained, case)
    matrices = block_matrices(module)
    rest = [p for p in trained if not any(p is matrix for matrix in matrices)]
    parts = [muon(matrices, **muon_options(case))] if matrices else []
    return Together(*parts, _adamw(rest, case)) if rest else parts[0]


def _adamw(trained: Sequence[nn.Parameter], case: CaseSpec) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_groups(trained), lr=case.learning_rate, eps=EPSILON, fused=True)


def _adamw_8bit(trained: Sequence[nn.Parameter], case: CaseSpec) -> torch.optim.Optimizer:
    if any(isinstance(p, DTensor) and p.dtype == torch.bfloat16 and _has_8_bits(p) for p in trained):
        raise UnsupportedError(
            "torchao's AdamW8bit does not support bf16 DTensors with quantised state: RuntimeError: expected "
            "dtype torch.bfloat16 for `end`, but got dtype torch.float32"
        )
    whole = sum(_local(p).numel() for p in trained if not _has_8_bits(p))
    if whole:
        part = whole / sum(_local(p).numel() for p in trained)
        warnings.warn(
            f"refshard: AdamW's state is fp32, not 8-bit, for {100 * part:.0f} % of this rank's elements: torchao only "
            "quantises parameters with at least 4,096 elements on a rank, and a multiple of 256",
            stacklevel=1,
        )
    given = [{"params": local_parameters(group["params"])} for group in _groups(trained)]
    # Here, since the package comes with an extra.
    from torchao.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(given, lr=case.learning_rate, eps=EPSILON)
    return optimizer


def _groups(trained: Sequence[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """A group for each mesh that DTensors lie on: one fused step cannot take several."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in trained:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def _has_8_bits(parameter: nn.Parameter) -> bool:
    """Whether torchao quantises the state of what this rank has of a parameter."""
    numel = _local(parameter).numel()
    return numel >= 4096 and numel % 256 == 0


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor | LocalPart) else parameter
