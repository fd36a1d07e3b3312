"""Optimizers: torch's, hand-written ones, and when they are made."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.distributed.cases.case import EVALUATED, PLAIN, Case, case
from tests.distributed.cases.models import Stack, adamw, mean_square, sgd, train, train_by_hand
from tests.distributed.cases.sides import Side

NEEDS_WHOLE = "whole|part|norm|mean|matrix|ndim|1-D"
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _trained_by(name: str, make: Make, **expected: Any) -> Case:
    def run(side: Side) -> None:
        model = side.shard(Stack(), side.x())
        train(side, model, optimizer=make(model.parameters()))

    run.__name__ = f"optimizer_{name}"
    return case(variants=EVALUATED, **expected)(run)


OPTIMIZERS = [
    _trained_by("adamw_foreach", lambda ps: adamw(ps, foreach=True)),
    _trained_by("adamw_fused", lambda ps: adamw(ps, fused=True)),
    _trained_by("adamw_in_a_loop", lambda ps: adamw(ps, foreach=False)),
    _trained_by("adamw_amsgrad", lambda ps: adamw(ps, amsgrad=True)),
    _trained_by("sgd_momentum", lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1)),
    _trained_by("sgd_nesterov", lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True)),
    _trained_by("adagrad", lambda ps: torch.optim.Adagrad(ps, lr=0.01, eps=1e-3)),
    _trained_by("rmsprop", lambda ps: torch.optim.RMSprop(ps, lr=0.01, eps=1e-2)),
    _trained_by("adadelta", lambda ps: torch.optim.Adadelta(ps, lr=0.1)),
    _trained_by("nadam", lambda ps: torch.optim.NAdam(ps, lr=0.01, eps=1e-2)),
    _trained_by("lion_by_hand", lambda ps: Lion(ps)),
    _trained_by("adafactor", lambda ps: torch.optim.Adafactor(ps, lr=0.01), refuses=NEEDS_WHOLE),
    _trained_by("adafactor_subclass", lambda ps: SubclassOfAdafactor(ps, lr=0.01), table=True, refuses=NEEDS_WHOLE),
    _trained_by("lamb_by_hand", lambda ps: Trust(ps), table=True),
    _trained_by("trust_ratio_of_detached", lambda ps: Trust(ps, detached=True)),
    _trained_by("trust_ratio_by_squares", lambda ps: Trust(ps, squares=True)),
    _trained_by("that_divides_by_its_mean", lambda ps: MeanOfUpdate(ps)),
    _trained_by("by_rows", lambda ps: ByRows(ps), refuses=NEEDS_WHOLE),
    _trained_by("orthogonalised", lambda ps: Orthogonal(ps), refuses=NEEDS_WHOLE),
]


class _Simple(torch.optim.Optimizer):
    """An optimizer of few lines: ``update`` gives the direction for one parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """What is taken off, times the rate."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take it off."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.update(parameter, parameter.grad), alpha=-group["lr"])


class Lion(_Simple):
    """Elementwise, with a momentum and a soft sign."""

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        found = torch.tanh(10 * (0.9 * momentum + 0.1 * gradient))
        momentum.mul_(0.99).add_(gradient, alpha=0.01)
        return found


class Trust(_Simple):
    """A trust ratio: the weight's norm over the gradient's."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, detached: bool = False, squares: bool = False) -> None:
        super().__init__(parameters)
        self.detached, self.squares = detached, squares

    def _norm(self, value: torch.Tensor) -> torch.Tensor:
        if self.squares:
            return value.pow(2).sum().sqrt()
        total: torch.Tensor = (value.detach() if self.detached else value).norm()
        return total

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ratio = (self._norm(parameter) + 0.1) / (self._norm(gradient) + 0.1)
        return gradient * ratio


class MeanOfUpdate(_Simple):
    """Divides by the root mean square of the update, as Adafactor does."""

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / (gradient.square().mean().sqrt() + 0.1)


class ByRows(_Simple):
    """A second moment for each row."""

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        moment = gradient.square().mean(-1, keepdim=True) if gradient.ndim > 1 else gradient.square()
        return gradient / (moment.sqrt() + 0.1)


class Orthogonal(_Simple):
    """A step of Newton and Schulz on matrices, as Muon does."""

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.ndim < 2:
            return gradient
        scaled = gradient / (gradient.norm() + 0.1)
        total: torch.Tensor = 1.5 * scaled - 0.5 * scaled @ scaled.T @ scaled
        return total


class SubclassOfAdafactor(torch.optim.Adafactor):
    """Another name for an optimizer that needs whole tensors."""


class SubclassOfLBFGS(torch.optim.LBFGS):
    """Likewise."""


def _closed(side: Side, make: Make, *, whole: bool = False) -> None:
    model = side.shard(Stack(), side.x())
    optimizer = side.whole_tensors(make, model, model.parameters()) if whole else make(model.parameters())
    for step in range(3):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = mean_square(model(side.x(step)))
            loss.backward()
            return loss

        side.log_mean("loss", optimizer.step(closure))


@case(variants=EVALUATED)
def optimizer_with_a_closure(side: Side) -> None:
    _closed(side, lambda ps: torch.optim.SGD(ps, lr=0.1))


@case(variants=EVALUATED, refuses=NEEDS_WHOLE)
def lbfgs(side: Side) -> None:
    _closed(side, lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=2))


@case(variants=EVALUATED, table=True, refuses=NEEDS_WHOLE)
def lbfgs_subclass(side: Side) -> None:
    _closed(side, lambda ps: SubclassOfLBFGS(ps, lr=0.1, max_iter=2))


@case(variants=PLAIN, refuses=NEEDS_WHOLE, or_torch="Muon only supports 2D", rtol=1e-2)
def muon(side: Side) -> None:
    model = side.shard(Stack())
    matrices = [p for n, p in model.named_parameters() if n.endswith("weight") and "norm" not in n]
    train(side, model, optimizer=torch.optim.Muon(matrices, lr=0.01))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def _whole(name: str, make: Make, **expected: Any) -> Case:
    """Trained whole, with weights that are written to between steps."""

    def run(side: Side) -> None:
        model = side.shard(Stack(), side.x())
        optimizer = side.whole_tensors(make, model, model.parameters())
        for start in (0, 2):
            train(side, model, optimizer=optimizer, start=start, steps=2)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)

    run.__name__ = f"whole_tensors_{name}"
    return case(**expected)(run)


WHOLE = [
    _whole("adafactor", lambda ps: torch.optim.Adafactor(ps, lr=0.01), table=True),
    _whole("trust_ratio", lambda ps: Trust(ps)),
    _whole("by_rows", lambda ps: ByRows(ps)),
    _whole("orthogonalised", lambda ps: Orthogonal(ps), table=True),
]


@case(table=True, rtol=1e-2)
def whole_tensors_muon_beside_adamw(side: Side) -> None:
    """Two optimizers that share the model, under one schedule each. Muon rounds to bf16."""
    model = side.shard(Stack(), side.x())
    muon = side.whole_tensors(torch.optim.Muon, model, matrices(model), lr=0.01)
    others = adamw([p for p in model.parameters() if p.ndim != 2])
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (muon, others)]
    for step in range(4):
        loss = mean_square(model(side.x(step)))
        loss.backward()
        for optimizer, schedule in zip((muon, others), schedules):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        side.log_mean(f"loss {step}", loss)


@case(variants=PLAIN)
def whole_tensors_with_a_gradient_scaler(side: Side) -> None:
    """One step has an infinite gradient on the rank of the last row, and is skipped on all."""
    model = side.shard(Stack(), side.x())
    optimizer = side.whole_tensors(lambda ps: Orthogonal(ps), model, model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        last = side.rank == side.world_size - 1
        loss = mean_square(model(side.x(step))) * (float("inf") if step == 2 and last else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    side.log("scale", scaler.get_scale())


@case(variants=PLAIN)
def whole_tensors_with_a_closure(side: Side) -> None:
    _closed(side, lambda ps: torch.optim.Adafactor(ps, lr=0.01), whole=True)


@case(variants=PLAIN)
def whole_tensors_of_some_blocks(side: Side) -> None:
    """Blocks take turns to compute; what did not has no gradient, and is not stepped."""
    model = side.shard(Stack(), side.x())
    optimizer = side.whole_tensors(lambda ps: Orthogonal(ps), model, model.parameters())
    for step in range(4):
        with warnings.catch_warnings(action="ignore"):
            loss = mean_square(model.head(model.layers[step % 2](model.inputs(side.x(step)))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        side.log_mean(f"loss {step}", loss)


@case(variants=PLAIN, refuses="closure")
def whole_tensors_lbfgs(side: Side) -> None:
    """Couples all tensors."""
    _closed(side, lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=2), whole=True)


@case(variants=PLAIN, modes=("replicate", "zero1", "zero2", "fsdp"))
def whole_tensors_without_reductions(side: Side) -> None:
    options: dict[str, Any] = {"accumulation": "unsharded"} if side.engine else {}
    model = side.shard(Stack(), **options)
    optimizer = side.whole_tensors(lambda ps: Orthogonal(ps), model, model.parameters())
    for step in range(0, 6, 2):
        for index in range(2):
            with side.microbatch(model, last=index == 1):
                mean_square(model(side.x(step + index))).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(table=True)
def sgd_by_hand_through_data(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train_by_hand(side, model, lambda parameter, gradient: parameter.data.add_(gradient, alpha=-0.1))


@case(variants=EVALUATED)
def sgd_by_hand_under_no_grad(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train_by_hand(side, model, torch.no_grad()(lambda parameter, gradient: parameter.sub_(0.1 * gradient)))


@case(variants=EVALUATED, refuses="replaced|moved|data")
def sgd_by_hand_that_assigns_data(side: Side) -> None:
    """``p.data = p.data - ...`` gives the parameter other memory."""
    model = side.shard(Stack(), side.x())

    def update(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        parameter.data = parameter.data - 0.1 * gradient

    train_by_hand(side, model, update)


@case(table=True)
def average_swapped_in_for_evaluation(side: Side) -> None:
    """An exponential moving average of the weights, swapped in through ``.data`` and out again."""
    model = side.shard(Stack(), side.x())
    averages = [p.detach().clone() for p in model.parameters()]
    for step in range(4):
        train(side, model, start=step, steps=1)
        for average, parameter in zip(averages, model.parameters()):
            average.lerp_(parameter.detach(), 0.3)
        kept = [p.detach().clone() for p in model.parameters()]
        for parameter, average in zip(model.parameters(), averages):
            parameter.data.copy_(average)
        with torch.no_grad():
            side.log_rows("averaged", model(side.x(77)))
        for parameter, value in zip(model.parameters(), kept):
            parameter.data.copy_(value)


@case(variants=EVALUATED)
def averages_by_foreach(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    averages = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        train(side, model, start=step, steps=1)
        with torch.no_grad():
            torch._foreach_lerp_(averages, list(model.parameters()), 0.3)
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), averages)
        side.log_rows("averaged", model(side.x(77)))


@case(variants=PLAIN, refuses="copied|pickled|copy")
def averaged_model_of_torch(side: Side) -> None:
    """``AveragedModel`` makes a deep copy."""
    model = side.shard(Stack())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for step in range(3):
        train(side, model, start=step, steps=1)
        average.update_parameters(model)
    with torch.no_grad():
        side.log_rows("averaged", average(side.x(77)))


@case(variants=EVALUATED)
def momentum_teacher(side: Side) -> None:
    """Another sharded model follows this one (BYOL, MoCo)."""
    teacher = side.shard(Stack().requires_grad_(False), side.x())
    model = side.shard(Stack(), side.x())
    for step in range(4):

        def loss(step: int) -> torch.Tensor:
            with torch.no_grad():
                target = teacher(side.x(step) * 1.1)
            return mean_square(model(side.x(step)) - target)

        train(side, model, loss, start=step, steps=1)
        with torch.no_grad():
            for theirs, mine in zip(teacher.parameters(), model.parameters()):
                theirs.lerp_(mine.detach(), 0.3)


def _sharpness_aware(side: Side, *, through_data: bool) -> None:
    model = side.shard(Stack(), side.x())
    optimizer = sgd(model)
    for step in range(3):
        loss = mean_square(model(side.x(step)))
        loss.backward()
        total = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        factor = 0.05 / (total.full_tensor() if hasattr(total, "full_tensor") else total).item()
        moved = []
        for parameter in model.parameters():
            assert parameter.grad is not None
            moved.append(factor * parameter.grad)
            with torch.no_grad():
                (parameter.data if through_data else parameter).add_(moved[-1])
        model.zero_grad()
        mean_square(model(side.x(step))).backward()
        for parameter, shift in zip(model.parameters(), moved):
            with torch.no_grad():
                (parameter.data if through_data else parameter).sub_(shift)
        optimizer.step()
        optimizer.zero_grad()
        side.log_mean("loss", loss)


@case(variants=EVALUATED)
def sharpness_aware(side: Side) -> None:
    _sharpness_aware(side, through_data=False)


@case(variants=EVALUATED, table=True)
def sharpness_aware_through_data(side: Side) -> None:
    _sharpness_aware(side, through_data=True)


def _by_dimensions(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 2.0}, {"params": rest, "weight_decay": 0.0}]
    return adamw([group for group in groups if group["params"]])


@case(variants=EVALUATED, table=True)
def decay_by_ndim_before_sharding(side: Side) -> None:
    model = Stack()
    decays = {name: 2.0 if p.ndim >= 2 else 0.0 for name, p in model.named_parameters()}
    side.shard(model, side.x())
    groups = [{"params": [p], "weight_decay": decays[n]} for n, p in model.named_parameters()]
    train(side, model, optimizer=adamw(groups))


@case(variants=EVALUATED, table=True)
def decay_by_ndim_after_sharding(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    train(side, model, optimizer=_by_dimensions(model))


@case(variants=EVALUATED)
def decay_by_length_of_shape_after_sharding(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    decays = {p: 0.0 if len(p.shape) == 1 else 2.0 for p in model.parameters()}
    train(side, model, optimizer=adamw([{"params": [p], "weight_decay": w} for p, w in decays.items()]))


@case(variants=PLAIN)
def rate_by_numel_after_sharding(side: Side) -> None:
    """A learning rate for each size of tensor; and the count of parameters that everybody prints."""
    model = side.shard(Stack())
    side.log("parameters", float(sum(p.numel() for p in model.parameters())))
    train(side, model, optimizer=adamw([{"params": [p], "lr": 0.1 / p.numel()} for p in model.parameters()]))


@case(variants=EVALUATED)
def decay_by_an_attribute_set_before_sharding(side: Side) -> None:
    model = Stack()
    for name, parameter in model.named_parameters():
        parameter.no_decay = name.endswith("bias")  # type: ignore[attr-defined]
    side.shard(model, side.x())
    groups = [
        {"params": [p], "weight_decay": 0.0 if getattr(p, "no_decay", False) else 2.0} for p in model.parameters()
    ]
    train(side, model, optimizer=adamw(groups))


@case(variants=PLAIN)
def attributes_set_after_sharding_last(side: Side) -> None:
    model = side.shard(Stack())
    for parameter in model.parameters():
        parameter.mine = 1.0  # type: ignore[attr-defined]
    train(side, model)
    side.log("kept", sum(getattr(p, "mine", 0.0) for p in model.parameters()))


@case(variants=EVALUATED)
def optimizer_made_before_sharding(side: Side) -> None:
    model = Stack()
    optimizer = adamw(model.parameters())
    side.shard(model, side.x())
    train(side, model, optimizer=optimizer)


@case(variants=EVALUATED, table=True)
def optimizer_made_after_a_partial_forward(side: Side) -> None:
    """Only one of the modules of a unit ran; an optimizer made now must train all."""
    model = side.shard(Stack(), side.x())
    with torch.no_grad():
        model.inputs(side.x())
        model.layers[0](side.x())
    train(side, model, optimizer=adamw(model.parameters()))


@case(variants=PLAIN, table=True)
def optimizer_made_after_a_dry_run(side: Side) -> None:
    model = side.shard(Stack())
    model(side.x())
    optimizer = adamw(model.parameters())
    train(side, model, optimizer=optimizer)


@case(variants=EVALUATED, table=True)
def optimizer_made_between_forward_and_backward(side: Side) -> None:
    model = side.shard(Stack(), side.x())
    loss = mean_square(model(side.x()))
    optimizer = adamw(model.parameters())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    train(side, model, optimizer=optimizer)


@case(variants=PLAIN)
def schedules_and_groups(side: Side) -> None:
    model = side.shard(Stack())
    optimizer = adamw([{"params": model.layers.parameters(), "lr": 0.1}, {"params": model.head.parameters()}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    with warnings.catch_warnings(action="ignore"):
        train(side, model, optimizer=optimizer, before_step=lambda _: schedule.step())


@case(variants=PLAIN)
def one_optimizer_for_each_parameter(side: Side) -> None:
    model = side.shard(Stack())
    optimizers = [adamw([p]) for p in model.parameters()]
    for step in range(4):
        mean_square(model(side.x(step))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@case(variants=PLAIN)
def optimizer_state_saved_and_loaded(side: Side) -> None:
    """Within one run: state_dict and load_state_dict of the optimizer."""
    model = side.shard(Stack())
    optimizer = adamw(model.parameters())
    train(side, model, optimizer=optimizer)
    other = adamw(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    train(side, model, optimizer=other, start=4)


@case(variants=PLAIN)
def weights_copied_in_place(side: Side) -> None:
    model = side.shard(Stack())
    train(side, model, steps=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 0.5)
    train(side, model, start=2)


@case(variants=EVALUATED)
def weights_clamped_after_each_step(side: Side) -> None:
    """WGAN's clipping of weights."""
    model = side.shard(Stack(), side.x())
    for step in range(4):
        train(side, model, start=step, steps=1)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.3, 0.3)


@case(variants=EVALUATED, refuses="head|whole|part|norm|renorm|index")
def weights_renormalised_after_each_step(side: Side) -> None:
    """Unit rows, as of class prototypes (DINO, SwAV)."""
    model = side.shard(Stack(), side.x())
    for step in range(3):
        train(side, model, start=step, steps=1)
        with torch.no_grad():
            model.head.weight.copy_(nn.functional.normalize(model.head.weight, dim=1))
