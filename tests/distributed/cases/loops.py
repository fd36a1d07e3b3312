"""Training loops out of the ordinary: averages, gradient surgery, optimizers that grow, several models."""

import copy

import torch
from torch import nn

from tests.distributed.cases.case import EVALUATED, PLAIN, case
from tests.distributed.cases.models import (
    Stack,
    adapted,
    mean_square,
    sgd,
    train,
)
from tests.distributed.cases.sides import DIM, Side


@case(variants=PLAIN)
def average_of_two_state_dicts(side: Side) -> None:
    model = side.shard(Stack())
    train(side, model, steps=2)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    train(side, model, start=2, steps=2)
    second = model.state_dict()
    model.load_state_dict({name: (first[name] + second[name]) / 2 for name in first})
    train(side, model, start=4, steps=2)


@case(variants=PLAIN)
def moving_average_by_state_dicts(side: Side) -> None:
    model = side.shard(Stack())
    average = copy.deepcopy(model.state_dict())

    def follow(_: int) -> None:
        for name, value in model.state_dict().items():
            average[name].mul_(0.5).add_(value, alpha=0.5)

    train(side, model, before_step=follow)
    model.load_state_dict(average)
    side.log_rows("out", model(side.x()))


@case()
def gradient_surgery(side: Side) -> None:
    """Two losses of one graph; what conflicts is projected away (PCGrad)."""
    model = side.shard(Stack(), side.x())
    optimizer = sgd(model, momentum=0.9)
    for step in range(4):
        out = model(side.x(step))
        mean_square(out).backward(retain_graph=True)
        first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.zero_grad()
        (out[:, 0] + 0.2).square().mean().backward()
        second = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        dot = sum((first[name] * second[name]).sum() for name in first)
        norm = sum(second[name].square().sum() for name in first)
        side.log("dot", dot)
        share = torch.clamp(torch.as_tensor(dot / norm), max=0).item()
        for name, p in model.named_parameters():
            p.grad = first[name] - share * second[name] + second[name]
        optimizer.step()
        optimizer.zero_grad()


@case(variants=PLAIN)
def unfrozen_layers_join_the_optimizer(side: Side) -> None:
    """Groups with rates of their own are added as layers are unfrozen; a layer's moments are reset."""
    model = Stack()
    model.layers.requires_grad_(False)
    side.shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    for stage in range(3):
        train(side, model, optimizer=optimizer, start=2 * stage, steps=2)
        layer = model.layers[2 - stage].requires_grad_(True)
        optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-2 / (stage + 1)})
        for p in model.head.parameters():
            optimizer.state[p]["exp_avg"].zero_()
    train(side, model, optimizer=optimizer, start=6, steps=2)


@case(variants=PLAIN, refuses="sharded already|part of a sharded model|has hooks")
def encoder_shared_by_two_sharded_models(side: Side) -> None:
    trunk = Stack(head=nn.Identity())
    one, other = nn.Sequential(trunk, nn.Linear(DIM, 3)), nn.Sequential(trunk, nn.Linear(DIM, 2))
    side.shard(one)
    side.shard(other)
    parameters = dict.fromkeys([*one.parameters(), *other.parameters()])
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(4):
        (mean_square(one(side.x(step))) + mean_square(other(side.x(step)))).backward()
        optimizer.step()
        optimizer.zero_grad()


@case()
def one_of_two_models_accumulates(side: Side) -> None:
    """Two models that feed each other; the reductions of one are skipped."""
    first, second = side.shard(Stack(head=nn.Linear(DIM, DIM)), side.x()), side.shard(adapted(), side.x())
    optimizers = [sgd(first, momentum=0.9), sgd(second)]
    for step in range(4):
        for microbatch in range(2):
            with side.microbatch(first, last=microbatch == 1):
                mean_square(second(first(side.x(2 * step + microbatch)))).backward()
            if microbatch == 0:
                optimizers[1].step()
                optimizers[1].zero_grad()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@case(variants=EVALUATED)
def adversarial_pair_with_one_graph(side: Side) -> None:
    """The critic's loss and the generator's loss go backward through one graph; gradients of the other are dropped."""
    maker, critic = side.shard(Stack(head=nn.Linear(DIM, DIM)), side.x()), side.shard(Stack(), side.x())
    of_maker, of_critic = sgd(maker, momentum=0.9), sgd(critic, momentum=0.9)
    for step in range(4):
        made = maker(side.x(step))
        verdict = critic(made)
        real = critic(side.x(50 + step))
        (real.square().mean() - 0.1 * mean_square(verdict)).backward(retain_graph=True)
        of_maker.zero_grad()
        side.log("norm", nn.utils.clip_grad_norm_(critic.parameters(), 0.1))
        kept = [p.grad.clone() for p in critic.parameters() if p.grad is not None]
        mean_square(verdict).backward()
        for p, gradient in zip(critic.parameters(), kept):
            p.grad = gradient
        of_maker.step()
        of_critic.step()
        of_maker.zero_grad()
        of_critic.zero_grad()
