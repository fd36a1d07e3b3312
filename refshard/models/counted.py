"""FLOPs of any module, counted by torch while the module runs on the meta device.

A meta tensor has no values, yet modules ask small questions of integers, such as whether positions restart within a
sequence. So tensors that depend on integers alone are computed twice, on the meta device and on the CPU.
"""

from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from refshard.models.own import Arguments, OwnModel

_META, _CPU = torch.device("meta"), torch.device("cpu")
_LARGEST = 2**22
"""Elements of the largest tensor that is computed on the CPU too."""


def count_flops(own: OwnModel, seq_len: int, *, backward: bool) -> float:
    """FLOPs of one sequence over ``seq_len``: matrix products, attention and convolutions.

    Attention counts as two full matrix products, since only the module knows its mask. An operator that torch has no
    formula for counts as nothing.

    Raises:
        Exception: the module's own, on the meta device.
    """
    given = own.batch(0, 1, seq_len, range(1), _CPU)
    state: dict[str, Tensor] = {
        name: nn.Parameter(torch.empty_like(p, device=_META), p.requires_grad)
        for name, p in own.module.named_parameters()
    }
    state |= {name: with_values(buffer) for name, buffer in own.module.named_buffers()}
    batch = Arguments({name: with_values(tensor) for name, tensor in given.tensors.items()}, own.factory)
    counter = FlopCounterMode(display=False)
    with _META, sdpa_kernel(SDPBackend.MATH), counter, Values(), torch.set_grad_enabled(backward):
        # A batch only calls the module.
        loss = batch.loss(cast(nn.Module, lambda **given: functional_call(own.module, state, (), given)))
        if backward:
            loss.backward()
    return float(counter.get_total_flops()) / seq_len


@final
class Values(TorchDispatchMode):
    """Keeps the values of meta tensors that are computed from known ones alone, and answers questions about them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = all(hasattr(tensor, "_value") for tensor in given)
        if func is torch.ops.aten._local_scalar_dense.default and known:
            return given[0]._value.item()  # type: ignore[attr-defined]
        if func._schema.is_mutable and not known:
            for tensor in given:
                if hasattr(tensor, "_value"):
                    raise NotImplementedError(f"{func} writes to a tensor whose values other tensors may share")
        result = func(*args, **kwargs)
        small = all(leaf.numel() <= _LARGEST for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        if known and torch.Tag.nondeterministic_seeded not in func.tags and small:
            real_args, real_kwargs = tree_map_only(Tensor, lambda t: t._value, (args, kwargs))
            if "device" in real_kwargs:
                real_kwargs["device"] = _CPU
            for made, value in zip(tree_leaves(result), tree_leaves(func(*real_args, **real_kwargs))):
                if isinstance(made, Tensor):
                    made._value = value  # type: ignore[attr-defined]
        return result


def with_values(tensor: Tensor) -> Tensor:
    """A tensor like it on the meta device, with its values if they are integers."""
    made = torch.empty_like(tensor, device=_META)
    if not tensor.is_meta and not tensor.is_floating_point() and tensor.numel() <= _LARGEST:
        made._value = tensor.cpu()  # type: ignore[attr-defined]
    return made
