"""What people do to ``.grad`` between backward and step: read, scale, clip, replace, clear, hook."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.cases.case import EVALUATED, PLAIN, Case, case
from tests.distributed.cases.models import Stack, adamw, mean_square, sgd, train
from tests.distributed.cases.sides import Side

TOTAL = "whole|part|norm|sum|gradient"


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _number(value: torch.Tensor) -> torch.Tensor:
    """A total as a plain number; FSDP2's is a DTensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _clip(gradients: Iterable[torch.Tensor], total: torch.Tensor, limit: float = 0.05) -> None:
    factor = (limit / (_number(total.detach()) + 1e-6)).clamp(max=1.0).item()
    for gradient in gradients:
        gradient.mul_(factor)


Norm = Callable[[list[torch.Tensor]], torch.Tensor]


def _clipped(name: str, norm: Norm, *, table: bool = False, refuses: str | None = None) -> Case:
    def run(side: Side) -> None:
        model = side.shard(Stack(), side.x())

        def clip(step: int) -> None:
            total = norm(_gradients(model))
            side.log(f"norm {step}", total)
            _clip(_gradients(model), total)

        train(side, model, before_step=clip)

    run.__name__ = f"clipped_by_{name}"
    return case(variants=EVALUATED, table=table, refuses=refuses)(run)


def _root_of_squares(each: Callable[[torch.Tensor], torch.Tensor]) -> Norm:
    return lambda gradients: torch.stack([_number(each(g)) for g in gradients]).square().sum().sqrt()


CLIPPED = [
    _clipped("norm", _root_of_squares(lambda g: g.norm())),
    _clipped("norm_of_detached", _root_of_squares(lambda g: g.detach().norm()), table=True),
    _clipped("norm_of_data", _root_of_squares(lambda g: g.data.norm(2)), table=True),
    _clipped("norm_of_clone", _root_of_squares(lambda g: g.clone().norm()), table=True),
    _clipped("norm_of_float", _root_of_squares(lambda g: g.float().double().norm())),
    _clipped("norm_of_double", _root_of_squares(lambda g: g.double().norm())),
    _clipped("norm_of_view", _root_of_squares(lambda g: g.view(-1).norm()), table=True),
    _clipped("norm_of_flattened", _root_of_squares(lambda g: g.detach().flatten().norm())),
    _clipped("norm_of_scaled", _root_of_squares(lambda g: (g * 0.5).norm() * 2)),
    _clipped("norm_of_list", _root_of_squares(lambda g: torch.linalg.vector_norm(g.detach()))),
    _clipped("squares", _root_of_squares(lambda g: g.pow(2).sum().sqrt()), table=True),
    _clipped("squares_of_data", _root_of_squares(lambda g: (g.data**2).sum().sqrt())),
    _clipped("products", _root_of_squares(lambda g: (g * g).sum().sqrt())),
    _clipped("dot_product", _root_of_squares(lambda g: torch.dot(g.flatten(), g.flatten()).sqrt())),
    _clipped("largest", lambda gs: torch.stack([_number(g.abs().max()) for g in gs]).max()),
    _clipped("infinity_norm", lambda gs: torch.stack([_number(g.norm(float("inf"))) for g in gs]).max()),
    _clipped("total_norm", lambda gs: nn.utils.get_total_norm(gs)),
    _clipped("foreach_norm", lambda gs: torch.stack([_number(n) for n in torch._foreach_norm(gs)]).norm()),
    _clipped(
        "foreach_powsum",
        lambda gs: torch.stack([_number(n) for n in torch._foreach_powsum(gs, 2)]).sum().sqrt(),
        table=True,
        refuses="_foreach_powsum of .*this rank holds",
    ),
    _clipped(
        "norm_of_concatenated",
        lambda gs: torch.cat([g.view(-1) for g in gs]).norm(),
        refuses="cat of .*this rank holds",
    ),
]


def _clipped_by_torch(side: Side, p: float, *, foreach: bool | None = None) -> None:
    model = side.shard(Stack(), side.x())

    def clip(step: int) -> None:
        side.log(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 0.05, p, foreach=foreach))

    train(side, model, before_step=clip)


@case()
def clip_grad_norm(side: Side) -> None:
    _clipped_by_torch(side, 2.0)


@case(variants=PLAIN)
def clip_grad_norm_tensor_by_tensor(side: Side) -> None:
    _clipped_by_torch(side, 2.0, foreach=False)


@case(variants=PLAIN)
def clip_grad_norm_by_the_largest(side: Side) -> None:
    _clipped_by_torch(side, float("inf"))


@case(variants=EVALUATED)
def clip_by_the_sides_own(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train(side, model, before_step=lambda step: side.log(f"norm {step}", side.own_clip(model, 0.05)))


def _clipped_with_ignored(side: Side, p: float, *, replicas: bool = False) -> None:
    """Two parameters are not sharded, and their gradients reduced by hand."""
    model = side.shard(Stack(), side.x(), ignored=["head.weight", "layers.1.norm.bias"], replicas=replicas)

    def clip(step: int) -> None:
        for parameter in (model.head.weight, model.layers[1].norm.bias):
            if side.world_size > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= side.world_size
        side.log(f"norm {step}", side.own_clip(model, 0.05, p))

    train(side, model, before_step=clip)


@case(variants=EVALUATED, table=True)
def clip_by_the_sides_own_with_ignored(side: Side) -> None:
    _clipped_with_ignored(side, 2.0)


@case(variants=PLAIN)
def clip_by_the_largest_with_ignored(side: Side) -> None:
    _clipped_with_ignored(side, float("inf"))


@case(variants=PLAIN)
def clip_over_replicas_with_ignored(side: Side) -> None:
    _clipped_with_ignored(side, 2.0, replicas=True)


@case(variants=EVALUATED, table=True)
def wholes_as_gradients_clipped_by_the_sides_own(side: Side) -> None:
    """Each rank puts the same whole tensor in the place of a gradient."""
    model = side.shard(Stack(), side.x())

    def clip(step: int) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = side.whole(parameter.grad, parameter.shape).detach().clone()
        side.log(f"norm {step}", side.own_clip(model, 0.05))

    train(side, model, before_step=clip)


@case(variants=EVALUATED)
def clip_grad_value(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train(side, model, before_step=lambda _: nn.utils.clip_grad_value_(model.parameters(), 0.01))


@case(variants=EVALUATED, table=True)
def clip_grad_norm_after_noise(side: Side) -> None:
    """``p.grad = p.grad + noise``, then torch's clipping."""
    model = side.shard(Stack(), side.x())

    def add(step: int) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad + 0.01
        side.log(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    train(side, model, before_step=add)


@case(variants=EVALUATED)
def clip_grad_norm_with_a_penalty(side: Side) -> None:
    model = side.shard(Stack(), side.x())

    def loss(step: int) -> torch.Tensor:
        penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        return mean_square(model(side.x(step))) + 1e-2 * penalty

    train(side, model, loss, before_step=lambda _: nn.utils.clip_grad_norm_(model.parameters(), 0.05))


@case(variants=EVALUATED)
def clipped_by_groups(side: Side) -> None:
    """Each part of the model is clipped by itself."""
    model = side.shard(Stack(), side.x())

    def clip(step: int) -> None:
        for part in (model.inputs, model.layers, model.head):
            side.log(f"norm {step}", nn.utils.clip_grad_norm_(part.parameters(), 0.02))

    train(side, model, before_step=clip)


@case(variants=EVALUATED, refuses="mean of .* over dimensions")
def gradients_centralised(side: Side) -> None:
    """Gradient centralisation: each row's mean is taken off."""
    model = side.shard(Stack(), side.x())

    def centralise(_: int) -> None:
        for parameter in model.parameters():
            gradient = parameter.grad
            if gradient is not None and gradient.ndim > 1:
                gradient.sub_(gradient.mean(dim=1, keepdim=True))

    train(side, model, before_step=centralise)


@case(variants=EVALUATED)
def gradients_less_their_mean(side: Side) -> None:
    model = side.shard(Stack(), side.x())

    def centralise(_: int) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.sub_(parameter.grad.mean())

    train(side, model, before_step=centralise)


@case(variants=EVALUATED)
def gradients_divided_by_their_deviation(side: Side) -> None:
    model = side.shard(Stack(), side.x())

    def normalise(_: int) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(parameter.grad.pow(2).mean().sqrt() + 0.1)

    train(side, model, before_step=normalise)


@case(variants=EVALUATED)
def signs_of_gradients(side: Side) -> None:
    """Elementwise: the step's direction alone counts."""
    model = side.shard(Stack(), side.x())

    def soften(_: int) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = torch.tanh(100 * parameter.grad) * parameter.grad.abs().sqrt()

    train(side, model, before_step=soften)


@case(variants=EVALUATED)
def gradients_counted(side: Side) -> None:
    """How many elements are larger than a bound; a plain count of a part is a part's."""
    model = side.shard(Stack(), side.x())

    def count(step: int) -> None:
        found = [(g.abs() > 0.01).sum() for g in _gradients(model)]
        side.log(f"count {step}", torch.stack([_number(n) for n in found]).sum())

    train(side, model, before_step=count)


@case(variants=EVALUATED)
def finiteness_checked_by_hand(side: Side) -> None:
    """A step is skipped unless all gradients are finite; each rank must decide alike."""
    model = side.shard(Stack(), side.x())
    optimizer = sgd(model)
    for step in range(4):
        loss = mean_square(model(side.x(step)))
        loss.backward()
        if step == 1:
            assert model.head.weight.grad is not None
            model.head.weight.grad.mul_(float("inf"))
        finite = all(bool(_number(torch.isfinite(g).all())) for g in _gradients(model))
        side.log(f"finite {step}", float(finite))
        if finite:
            optimizer.step()
        optimizer.zero_grad()


@case(variants=EVALUATED, table=True)
def gradients_replaced_between_microbatches(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    optimizer = sgd(model)
    for step in range(4):
        for microbatch in range(3):
            mean_square(model(side.x(10 * step + microbatch))).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad * 0.9
        side.log_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@case(variants=EVALUATED, table=True)
def gradients_cleared_for_some(side: Side) -> None:
    """Of each module the bias's gradient is dropped between microbatches."""
    model = side.shard(Stack(), side.x())
    optimizer = sgd(model)
    for step in range(4):
        mean_square(model(side.x(10 * step))).backward()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.grad = None
        mean_square(model(side.x(10 * step + 1))).backward()
        side.log_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@case(variants=EVALUATED, table=True)
def two_optimizers_that_clear_their_own(side: Side) -> None:
    """Weights and biases of the same modules have an optimizer each; one steps every second time."""
    model = side.shard(Stack(), side.x())
    weights = torch.optim.SGD([p for n, p in model.named_parameters() if n.endswith("weight")], lr=0.1)
    biases = torch.optim.SGD([p for n, p in model.named_parameters() if n.endswith("bias")], lr=0.05)
    for step in range(6):
        loss = mean_square(model(side.x(step)))
        loss.backward()
        weights.step()
        weights.zero_grad()
        if step % 2:
            biases.step()
            biases.zero_grad()
        side.log_mean("loss", loss)


@case(variants=EVALUATED)
def zero_grad_to_zero(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    optimizer = adamw(model.parameters())
    for step in range(4):
        mean_square(model(side.x(step))).backward()
        side.log_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    side.log_gradients(model)


@case(variants=EVALUATED)
def gradients_kept_from_step_to_step(side: Side) -> None:
    """Clones of the last step's gradients are added: momentum by hand."""
    model = side.shard(Stack(), side.x())
    kept: list[torch.Tensor] = []

    def momentum(_: int) -> None:
        for parameter, old in zip(model.parameters(), kept):
            assert parameter.grad is not None
            parameter.grad.add_(old, alpha=0.5)
        kept[:] = [g.clone() for g in _gradients(model)]

    train(side, model, before_step=momentum)


@case(variants=EVALUATED)
def gradients_kept_in_fp64(side: Side) -> None:
    """Accumulated by hand in another dtype."""
    model = side.shard(Stack(), side.x())
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for step in range(3):
        mean_square(model(side.x(step))).backward()
        for total, parameter in zip(sums, model.parameters()):
            assert parameter.grad is not None
            total.add_(parameter.grad)
            parameter.grad = None
    for parameter, total in zip(model.parameters(), sums):
        parameter.grad = total
    side.log_gradients(model)
    sgd(model).step()


@case(variants=EVALUATED, table=True)
def post_accumulate_hook_after_sharding(side: Side) -> None:
    """Optimizer in backward: each parameter steps as its gradient arrives."""
    model = side.shard(Stack(), side.x())
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step_at_once(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)
    for step in range(4):
        loss = mean_square(model(side.x(step)))
        loss.backward()
        side.log_mean("loss", loss)


@case(variants=EVALUATED, refuses="hook")
def post_accumulate_hook_before_sharding(side: Side) -> None:
    model = Stack()
    calls: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    side.shard(model, side.x())
    train(side, model)
    side.log("calls", float(len(calls)))


@case(variants=EVALUATED, table=True)
def tensor_hook_after_sharding(side: Side) -> None:
    """``register_hook`` scales a gradient."""
    model = side.shard(Stack(), side.x())
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    train(side, model)


@case(variants=EVALUATED, refuses="hook")
def tensor_hook_before_sharding(side: Side) -> None:
    model = Stack()
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    side.shard(model, side.x())
    train(side, model)


def _scaled(side: Side, *, infinite: bool) -> None:
    model = side.shard(Stack(), side.x())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler(side.device.type, init_scale=8.0, growth_interval=2)
    for step in range(5):
        loss = mean_square(model(side.x(step)))
        if infinite and step == 2 and side.rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if not (infinite and step == 2):
            side.log("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        side.log("scale", scaler.get_scale())


@case(variants=EVALUATED)
def scaler(side: Side) -> None:
    _scaled(side, infinite=False)


@case(variants=EVALUATED)
def scaler_meets_an_infinity(side: Side) -> None:
    _scaled(side, infinite=True)


@case(variants=PLAIN)
def gradient_shapes_agree_with_parameters(side: Side) -> None:
    """An optimizer's state made like the parameter fits the gradient."""
    model = side.shard(Stack())
    mean_square(model(side.x())).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        (torch.zeros_like(parameter) + parameter.grad).mul_(2)


@case(variants=EVALUATED, refuses="parameter 'head.weight' has hooks")
def hook_before_sharding_on_a_weight_in_the_loss(side: Side) -> None:
    """The gradient comes to the weight itself, and its hooks with it."""
    model = Stack()
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    side.shard(model, side.x())
    train(side, model, lambda step: mean_square(model(side.x(step))) + 0.1 * model.head.weight.sum())


def _combined(name: str, keep: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    """Gradients of two losses, of which one is kept while the other is computed; conflicts are taken out (PCGrad)."""

    def run(side: Side) -> None:
        model = side.shard(Stack(), side.x())
        optimizer = sgd(model)
        for step in range(4):
            kept: list[list[torch.Tensor]] = []
            for target in (0.3, -2.0):
                (model(side.x(step)) - target).square().mean().backward()
                kept.append([keep(gradient) for gradient in _gradients(model)])
                optimizer.zero_grad(set_to_none=True)
            first, second = kept
            product, size, other = (
                torch.stack([_number((a * b).sum()) for a, b in zip(left, right)]).sum()
                for left, right in ((first, second), (first, first), (second, second))
            )
            side.log(f"cosine {step}", product / (size * other).sqrt())
            factor = (product / other).item()
            for parameter, a, b in zip(model.parameters(), first, second):
                parameter.grad = (a - factor * b).view(parameter.shape)
            optimizer.step()
            optimizer.zero_grad()

    run.__name__ = f"gradients_of_two_losses_{name}"
    return case(table=True)(run)


COMBINED = [
    _combined("kept", lambda gradient: gradient),
    _combined("kept_detached", lambda gradient: gradient.detach()),
    _combined("kept_as_views", lambda gradient: gradient.view(-1)),
    _combined("kept_as_data", lambda gradient: gradient.data),
    _combined("cloned", lambda gradient: gradient.clone()),
]


@case(table=True)
def gradient_kept_over_a_step(side: Side) -> None:
    """The last step's gradients, as they were, beside this step's."""
    model = side.shard(Stack(), side.x())
    kept: list[torch.Tensor] = []

    def compare(step: int) -> None:
        for old, new in zip(kept, _gradients(model)):
            side.log(f"product {step}", _number((old * new).sum()))
        kept[:] = _gradients(model)

    train(side, model, before_step=compare)
