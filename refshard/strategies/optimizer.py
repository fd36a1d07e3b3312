"""The optimizer that most strategies step: torch's fused AdamW, torchao's with 8-bit state, Muon and AdamW, SGD with
momentum, or Adafactor.

Muon steps the matrices of the blocks and AdamW all else, as practitioners train: an embedding, a head and a norm are no
matrices between hidden layers. One learning rate serves both, since ``match_rms_adamw`` gives Muon's updates the size
of AdamW's.

Over DTensors, Muon multiplies matrices that are sharded by rows. DTensor gathers or sums in each product, by its own
estimate of what is cheapest, so there is no closed form of what it communicates. But DTensor plans by shapes alone:
Muon's step over DTensors on the meta device issues the same collectives without communicating.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from refshard.engine.local_part import LocalPart
from refshard.engine.optim import local_parameters
from refshard.errors import UnsupportedError
from refshard.specs.case import Case

MakeWhole = Callable[..., torch.optim.Optimizer]
"""Makes an optimizer that needs whole tensors (Muon, Adafactor) from its class, the tensors and options."""
EPSILON = 1e-3
"""AdamW's epsilon. With torch's 1e-8 its steps hardly depend on the scale of gradients: of twice the right ones, a sum
over two ranks in place of the mean, ten losses of llama-tiny differ by 4e-7; with this, by far more than loss parity
allows. Adafactor's first epsilon is this, too.
"""
MOMENTUM = 0.9
"""SGD's."""


def unsharded(
    kind: type[torch.optim.Optimizer], tensors: Sequence[nn.Parameter], **options: Any
) -> torch.optim.Optimizer:
    """An optimizer of tensors that every rank has whole."""
    return kind(tensors, **options)


def make_optimizer(module: nn.Module, case: Case, whole: MakeWhole = unsharded) -> torch.optim.Optimizer:
    """The case's optimizer over the module's trained parameters. ``whole`` makes those that need whole tensors.

    Raises:
        UnsupportedError: AdamW with 8-bit state cannot step these.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if case.job.optimizer == "adamw-8bit":
        return _adamw_8bit(trained, case)
    if case.job.optimizer == "sgd":
        # DTensor has no fused SGD; without foreach, torch would step DTensors one by one.
        return torch.optim.SGD(_groups(trained), lr=case.protocol.learning_rate, momentum=MOMENTUM, foreach=True)
    if case.job.optimizer == "adafactor":
        return whole(torch.optim.Adafactor, trained, lr=case.protocol.learning_rate, eps=(EPSILON, 1e-3))
    matrices = _block_matrices(module) if case.job.optimizer == "muon" else []
    parts = [whole(torch.optim.Muon, matrices, **_muon_options(case))] if matrices else []
    rest = [p for p in trained if not any(p is matrix for matrix in matrices)]
    if rest or not parts:
        parts.append(torch.optim.AdamW(_groups(rest), lr=case.protocol.learning_rate, eps=EPSILON, fused=True))
    return parts[0] if len(parts) == 1 else Together(*parts)


def _adamw_8bit(trained: Sequence[nn.Parameter], case: Case) -> torch.optim.Optimizer:
    numels = [(p.to_local() if isinstance(p, DTensor | LocalPart) else p).numel() for p in trained]
    quantised = [numel >= 4096 and numel % 256 == 0 for numel in numels]  # torchao's rule
    if any(q and isinstance(p, DTensor) and p.dtype == torch.bfloat16 for p, q in zip(trained, quantised)):
        raise UnsupportedError(
            "torchao's AdamW8bit does not support bf16 DTensors with quantised state: RuntimeError: expected "
            "dtype torch.bfloat16 for `end`, but got dtype torch.float32"
        )
    if fp32 := sum(numel for numel, q in zip(numels, quantised) if not q):
        warnings.warn(
            f"refshard: AdamW's state is fp32, not 8-bit, for {100 * (fp32 / sum(numels)):.0f} % of this rank's "
            "elements: torchao only quantises parameters with at least 4,096 elements on a rank, and a multiple of 256",
            stacklevel=1,
        )
    given = [{"params": local_parameters(group["params"])} for group in _groups(trained)]
    from torchao.optim import AdamW8bit  # comes with an extra

    optimizer: torch.optim.Optimizer = AdamW8bit(given, lr=case.protocol.learning_rate, eps=EPSILON)
    return optimizer


def _groups(trained: Sequence[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """A group for each mesh that DTensors lie on: one fused step cannot take several."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in trained:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def _block_matrices(module: nn.Module) -> list[nn.Parameter]:
    """The trained matrices of attention and feed-forward of a Llama, wrapped or not."""
    named = module.named_parameters()
    return [p for name, p in named if p.ndim == 2 and (".self_attn." in name or ".mlp." in name) and p.requires_grad]


def _muon_options(case: Case) -> dict[str, Any]:
    return {"lr": case.protocol.learning_rate, "adjust_lr_fn": "match_rms_adamw"}


@final
class Together(torch.optim.Optimizer):
    """Optimizers over different parameters that step as one; each keeps its own state."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "each part would evaluate it"
        for part in self._parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none)


_OPERATIONS = {
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_dtensor::shard_dim_alltoall": "all_to_all",
}
"""DTensor's collectives, and what traces call them."""


def muon_over_dtensors(
    kind: type[torch.optim.Optimizer], matrices: Sequence[nn.Parameter], **options: Any
) -> torch.optim.Optimizer:
    """``torch.optim.Muon``, which is the ``kind``, over DTensors.

    Raises:
        UnsupportedError: DTensor refuses, as it does if a rank has no row of a matrix, or would communicate on another
            device than the matrices are on.
    """
    assert kind is torch.optim.Muon
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


def announce_muon(model: nn.Module, case: Case) -> list[tuple[str, int]]:
    """``(op, bytes)`` of a step's collectives of Muon over the DTensors of ``model``; none if the case has no Muon."""
    return _issued(_block_matrices(model), _muon_options(case)) if case.job.optimizer == "muon" else []


def _issued(matrices: Sequence[nn.Parameter], options: dict[str, Any]) -> list[tuple[str, int]]:
    planned = []
    for matrix in matrices:
        assert isinstance(matrix, DTensor)
        local, shape, stride = matrix.to_local().to("meta"), matrix.shape, matrix.stride()
        made = DTensor.from_local(
            local, matrix.device_mesh, matrix.placements, run_check=False, shape=shape, stride=stride
        )
        planned.append(nn.Parameter(made))
        planned[-1].grad = torch.zeros_like(planned[-1])
    muon, issued = torch.optim.Muon(planned, **options), _Issued()
    unhooked = type(muon).step.__wrapped__  # type: ignore[attr-defined]
    with issued:
        unhooked(muon)  # no hook may take this for a step of training
    return issued.found


class _Issued(TorchDispatchMode):
    """Notes DTensor's collectives, and the bytes of the unsharded tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again as DTensor's collectives
        result = func(*args, **(kwargs or {}))
        if (op := _OPERATIONS.get(func._schema.name)) is not None:
            self.found.append((op, max(args[0].nbytes, result.nbytes)))
        return result
