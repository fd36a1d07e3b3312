"""Hooks that users register on modules, before and after sharding, and what torch builds from such hooks."""

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.distributed.cases.case import EVALUATED, PLAIN, case
from tests.distributed.cases.models import Stack, mean_square, sgd, train
from tests.distributed.cases.sides import DIM, Side


def _norm_of(module: nn.Module) -> torch.Tensor:
    """A number from all elements of a module's weight, by its 2-D shape."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    ones = torch.ones(weight.shape[-1], dtype=weight.dtype, device=weight.device)
    return (weight.detach() @ ones).square().sum()


@case(table=True)
def forward_pre_hook_from_before_reads_the_weight(side: Side) -> None:
    model = Stack([nn.Linear(DIM, DIM) for _ in range(3)])
    seen: list[float] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, _: seen.append(_norm_of(module).item()))
    side.shard(model, side.x())
    train(side, model)
    side.log("seen", torch.tensor(seen))


@case(table=True)
def forward_hook_from_before_reads_the_weight(side: Side) -> None:
    model = Stack([nn.Linear(DIM, DIM) for _ in range(3)])
    seen: list[float] = []
    for module in (*model.layers, model.head):
        module.register_forward_hook(lambda module, _, __: seen.append(_norm_of(module).item()))
    side.shard(model, side.x())
    train(side, model)
    side.log("seen", torch.tensor(seen))


@case(table=True)
def forward_hook_from_after_reads_the_weight(side: Side) -> None:
    model = side.shard(Stack([nn.Linear(DIM, DIM) for _ in range(3)]), side.x())
    seen: list[float] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, _, __: seen.append(_norm_of(module).item()))
    train(side, model)
    side.log("seen", torch.tensor(seen))


@case()
def forward_hook_from_after_computes_with_the_bias(side: Side) -> None:
    """Elementwise: a part of the bias may broadcast."""
    model = side.shard(Stack([nn.Linear(DIM, DIM) for _ in range(3)]), side.x())
    for layer in model.layers:
        layer.register_forward_hook(lambda module, _, out: out + 0.1 * module.bias)
    train(side, model)


@case(table=True)
def forward_pre_hook_from_after_reads_the_weight(side: Side) -> None:
    model = side.shard(Stack([nn.Linear(DIM, DIM) for _ in range(3)]), side.x())
    seen: list[float] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, _: seen.append(_norm_of(module).item()))
    train(side, model)
    side.log("seen", torch.tensor(seen))


@case(table=True, refuses="layers|hook|whole|part")
def forward_pre_hook_put_first_reads_the_weight(side: Side) -> None:
    """Registered after sharding with ``prepend=True``, so that it comes before what gathers."""
    model = side.shard(Stack([nn.Linear(DIM, DIM) for _ in range(3)]), side.x())
    seen: list[float] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, _: seen.append(_norm_of(module).item()), prepend=True)
    train(side, model)
    side.log("seen", torch.tensor(seen))


@case(refuses="layers|hook|whole|part")
def forward_pre_hook_put_first_computes_with_the_bias(side: Side) -> None:
    model = side.shard(Stack([nn.Linear(DIM, DIM) for _ in range(3)]), side.x())
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: (args[0] + 0.1 * module.bias,), prepend=True)
    train(side, model)


@case()
def hooks_change_inputs_and_outputs(side: Side) -> None:
    model = Stack()
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: (args[0] * 1.1,))
        layer.register_forward_hook(lambda _, __, out: out * 0.9)
    side.shard(model, side.x())
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: (args[0] + 0.1,))
        layer.register_forward_hook(lambda _, __, out: torch.tanh(out))
    train(side, model)


def _backward_hooked(side: Side, *, after: bool) -> None:
    model = Stack()
    seen: list[torch.Tensor] = []

    def hook(_: nn.Module, __: Any, gradients: Any) -> None:
        seen.append(gradients[0].abs().sum().detach())

    if after:
        side.shard(model, side.x())
    for layer in model.layers:
        layer.register_full_backward_hook(hook)
    if not after:
        side.shard(model, side.x())
    train(side, model)
    side.log_mean("seen", torch.stack(seen[-3:]))


@case()
def full_backward_hook_from_before(side: Side) -> None:
    _backward_hooked(side, after=False)


@case()
def full_backward_hook_from_after(side: Side) -> None:
    _backward_hooked(side, after=True)


@case(refuses="layers|hook|whole|part")
def full_backward_pre_hook_reads_the_weight(side: Side) -> None:
    model = side.shard(Stack([nn.Linear(DIM, DIM) for _ in range(3)]), side.x())
    seen: list[float] = []
    for layer in model.layers:
        layer.register_full_backward_pre_hook(lambda module, _: seen.append(_norm_of(module).item()))
    train(side, model)
    side.log("seen", torch.tensor(seen))


@case()
def full_backward_hook_scales_gradients(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    for layer in model.layers:
        layer.register_full_backward_hook(lambda _, into, __: tuple(g * 0.5 for g in into))
    train(side, model)


@case()
def tensor_hook_on_an_activation(side: Side) -> None:
    class Hooked(Stack):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            out = super().encode(x)
            if out.requires_grad:
                out.register_hook(lambda gradient: gradient * 0.5)
            return out

    train(side, side.shard(Hooked(), side.x()))


@case(table=True)
def pruned_before_sharding(side: Side) -> None:
    model = Stack().to(side.device)
    prune.random_unstructured(model.head, "weight", amount=0.4)
    for layer in model.layers:
        prune.l1_unstructured(layer.up, "weight", amount=0.3)
    train(side, side.shard(model, side.x()))


@case(refuses="prune|weight|layers|replaced|changed")
def pruned_after_sharding(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    prune.custom_from_mask(model.head, "weight", torch.ones(3, DIM, device=side.device).tril())
    train(side, model)


class Symmetric(nn.Module):
    """A parametrization: a square matrix made symmetric."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@case()
def parametrized_before_sharding(side: Side) -> None:
    model = Stack([nn.Linear(DIM, DIM) for _ in range(3)])
    for layer in model.layers:
        parametrize.register_parametrization(layer, "weight", Symmetric())
    train(side, side.shard(model, side.x()))


@case(refuses="parametri|weight|layers|replaced")
def parametrized_after_sharding(side: Side) -> None:
    model = side.shard(Stack([nn.Linear(DIM, DIM) for _ in range(3)]), side.x())
    for layer in model.layers:
        parametrize.register_parametrization(layer, "weight", Symmetric())
    train(side, model)


@case(table=True, refuses="weight_norm")
def weight_norm_of_old(side: Side) -> None:
    model = Stack([nn.utils.weight_norm(nn.Linear(DIM, DIM)) for _ in range(3)])
    train(side, side.shard(model, side.x()))


@case()
def weight_norm_by_parametrization(side: Side) -> None:
    model = Stack([parametrizations.weight_norm(nn.Linear(DIM, DIM)) for _ in range(3)])
    train(side, side.shard(model, side.x()))


@case(variants=PLAIN, table=True)
def spectral_norm_of_old(side: Side) -> None:
    model = Stack([nn.utils.spectral_norm(nn.Linear(DIM, DIM)) for _ in range(3)])
    train(side, side.shard(model))


@case(variants=PLAIN)
def spectral_norm_by_parametrization(side: Side) -> None:
    model = Stack([parametrizations.spectral_norm(nn.Linear(DIM, DIM)) for _ in range(3)])
    train(side, side.shard(model))


@case(variants=PLAIN)
def orthogonal_by_parametrization(side: Side) -> None:
    model = Stack([parametrizations.orthogonal(nn.Linear(DIM, DIM)) for _ in range(3)])
    train(side, side.shard(model))


@case(variants=EVALUATED)
def forward_patched_after_sharding(side: Side) -> None:
    """A profiler, or an adapter library, wraps ``module.forward``."""
    model = side.shard(Stack(), side.x())
    for layer in model.layers:
        forward = layer.forward
        layer.forward = lambda x, forward=forward: forward(x) * 0.9
    train(side, model)


@case(variants=EVALUATED)
def global_module_hooks(side: Side) -> None:
    """Hooks on all modules at once, which run before any module's own."""
    calls: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, _, __: calls.append(type(module).__name__))
    try:
        model = side.shard(Stack(), side.x())
        train(side, model)
    finally:
        handle.remove()
    side.log("calls", float(len(calls)))


@case(variants=EVALUATED, table=True)
def frozen_block_with_a_pre_hook_that_keeps_the_input(side: Side) -> None:
    """A hook adds a loss term from the input of frozen blocks."""
    from tests.distributed.cases.models import frozen

    model = frozen()
    kept: list[torch.Tensor] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    side.shard(model, side.x())

    def loss(step: int) -> torch.Tensor:
        kept.clear()
        out = model(side.x(step))
        return mean_square(out) + torch.stack([mean_square(x) for x in kept]).sum()

    train(side, model, loss, optimizer=sgd(model))
