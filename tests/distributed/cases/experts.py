"""Experts that are spread over a mesh of their own, and sharded over what is left."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import refshard
from tests.distributed.cases.by_rank import _by_row
from tests.distributed.cases.case import EVALUATED, PLAIN, case
from tests.distributed.cases.models import (
    Checkpointing,
    adamw,
    mean_square,
    sgd,
    train,
)
from tests.distributed.cases.sides import DIM, Side

EXPERTS = 6


class Experts(nn.Module):
    """All experts, or after :meth:`spread` this rank's; rows come sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 7) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 7, DIM) / 2)

    def spread(self, ep: DeviceMesh) -> None:
        for name, p in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(p.detach(), ep, [Shard(0)]), p.requires_grad))

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        return torch.cat([torch.tanh(rows @ up[e]) @ down[e] for e, rows in enumerate(x.split(counts))])


class Routed(nn.Module):
    """One expert for each row, beside one that all rows go to; a bias on the choice, as DeepSeek-V3 has it."""

    z_loss: torch.Tensor
    load: torch.Tensor
    bias: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)
        self.experts = Experts()
        self.shared = nn.Linear(DIM, DIM)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.ep: DeviceMesh | None = None

    def forward(self, x: torch.Tensor, choice: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.router(x)
        self.z_loss = logits.logsumexp(-1).square().mean()
        chances = logits.softmax(-1)
        chosen = (chances + self.bias).argmax(-1) if choice is None else choice
        order, counts = chosen.argsort(stable=True), chosen.bincount(minlength=EXPERTS)
        self.load = counts
        sent = x[order]
        done = self.experts(sent, counts.tolist()) if self.ep is None else self.exchange(sent, counts, self.ep)
        mixed = torch.zeros_like(x).index_copy(0, order, done * chances[order, chosen[order], None])
        return x + mixed + torch.tanh(self.shared(x))

    def exchange(self, sent: torch.Tensor, counts: torch.Tensor, ep: DeviceMesh) -> torch.Tensor:
        group, local = ep.get_group(), EXPERTS // ep.size()
        received_counts = all_to_all_single(counts, None, None, group)
        to_ranks = counts.view(-1, local).sum(1).tolist()
        from_ranks = received_counts.view(-1, local).sum(1).tolist()
        received = all_to_all_single_autograd(sent, from_ranks, to_ranks, group)
        by_expert = torch.arange(local).repeat(ep.size()).repeat_interleave(received_counts).argsort(stable=True)
        done = self.experts(received[by_expert], received_counts.view(-1, local).sum(0).tolist())
        done = torch.empty_like(done).index_copy(0, by_expert, done)
        return all_to_all_single_autograd(done, to_ranks, from_ranks, group)


class Mixed(Checkpointing):
    """Two layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(DIM, DIM)
        self.layers: Any = nn.ModuleList(Routed() for _ in range(2))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor, choice: torch.Tensor | None = None) -> torch.Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = self.call(layer, x, choice)
        out: torch.Tensor = self.head(x)
        return out


def _spread(side: Side, model: Mixed, *sample: Any, **options: Any) -> Mixed:
    """Each rank holds some experts whole."""
    if side.engine:
        mesh = init_device_mesh(side.device.type, (1, side.world_size), mesh_dim_names=("edp", "ep"))
        for layer in model.layers:
            layer.ep = mesh["ep"]
            layer.experts.spread(mesh["ep"])
        options["policies"] = {**options.get("policies", {}), "layers.*.experts": refshard.Policy(mesh=mesh["edp"])}
    return side.shard(model, *sample, **options)


@case(only_on_cpu=True)
def spread_experts_clipped(side: Side) -> None:
    model = _spread(side, Mixed(), side.x())

    def clip(step: int) -> None:
        side.log(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    train(side, model, optimizer=adamw(model.parameters(), weight_decay=0.1), before_step=clip)


@case(only_on_cpu=True)
def spread_experts_accumulated_and_clipped_by_the_sides_own(side: Side) -> None:
    model = _spread(side, Mixed(), side.x())
    optimizer = sgd(model, momentum=0.9)
    for step in range(4):
        for microbatch in range(3):
            number = 3 * step + microbatch
            with side.microbatch(model, last=microbatch == 2):
                (mean_square(model(side.x(number))) / 3).backward()
        side.log(f"norm {step}", side.own_clip(model, 0.05))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


@case(variants=EVALUATED, only_on_cpu=True)
def spread_experts_with_z_loss_and_bias(side: Side) -> None:
    """Auxiliary losses by attribute; the bias on the choice follows the load, without a gradient."""
    model = _spread(side, Mixed(), side.x())

    def loss(step: int) -> torch.Tensor:
        out = mean_square(model(side.x(step)))
        total: torch.Tensor = out + 0.1 * sum(layer.z_loss for layer in model.layers)
        return total

    def balance(_: int) -> None:
        for layer in model.layers:
            load = layer.load.clone()
            if side.engine:
                dist.all_reduce(load)
            layer.bias += 0.05 * torch.sign(load.double().mean() - load)

    train(side, model, loss, optimizer=sgd(model, momentum=0.9), before_step=balance)


@case(variants=EVALUATED, only_on_cpu=True)
def spread_experts_with_a_scaler_that_meets_an_infinity(side: Side) -> None:
    model = _spread(side, Mixed(), side.x())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler(side.device.type, init_scale=8.0, growth_interval=2)
    for step in range(5):
        loss = mean_square(model(side.x(step)))
        scaler.scale(loss * float("inf") if step == 2 and side.rank == 0 else loss).backward()
        scaler.unscale_(optimizer)
        if step != 2:
            side.log("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        side.log("scale", scaler.get_scale())


@case(only_on_cpu=True)
def spread_experts_frozen(side: Side) -> None:
    model = Mixed()
    for layer in model.layers:
        layer.experts.requires_grad_(False)
    train(side, _spread(side, model, side.x()))


@case(variants=PLAIN, only_on_cpu=True)
def spread_experts_frozen_and_unfrozen_between_steps(side: Side) -> None:
    model = _spread(side, Mixed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for stage in range(3):
        for layer in model.layers:
            layer.experts.requires_grad_(stage != 1)
        train(side, model, optimizer=optimizer, start=2 * stage, steps=2)


def _penalty(model: Mixed) -> torch.Tensor:
    return torch.stack([p.square().sum() for layer in model.layers for p in layer.experts.parameters()]).sum()


@case(variants=PLAIN, only_on_cpu=True)
def spread_experts_penalised(side: Side) -> None:
    """A penalty on weights, of all experts, in the loss."""
    model = _spread(side, Mixed())

    def loss(step: int) -> torch.Tensor:
        total: torch.Tensor = mean_square(model(side.x(step))) + 0.01 * _penalty(model)
        return total

    train(side, model, loss)


@case(variants=PLAIN, only_on_cpu=True)
def spread_experts_penalised_times_each_ranks_loss(side: Side) -> None:
    model = _spread(side, Mixed())

    def loss(step: int) -> torch.Tensor:
        total: torch.Tensor = mean_square(model(side.x(step))) * _penalty(model)
        return total

    train(side, model, loss)


@case(variants=PLAIN, only_on_cpu=True)
def spread_experts_read_whole_in_the_loss(side: Side) -> None:
    model = _spread(side, Mixed())

    def loss(step: int) -> torch.Tensor:
        up = model.layers[0].experts.up
        whole = up.full_tensor() if hasattr(up, "full_tensor") else up
        total: torch.Tensor = mean_square(model(side.x(step))) + 0.1 * (whole[0] * whole[-1]).sum()
        return total

    train(side, model, loss)


@case(variants=PLAIN, only_on_cpu=True)
def spread_experts_without_rows_at_times(side: Side) -> None:
    """In some steps no rank has rows for some experts, and one rank's experts get none at all."""
    choice = [
        _by_row(side, *values) for values in ((0, 1, 2, 3, 4, 5), (0, 0, 0, 1, 1, 1), (5,) * 6, (0, 5, 0, 5, 0, 5))
    ]
    model = _spread(side, Mixed())
    train(
        side,
        model,
        lambda step: mean_square(model(side.x(step), choice[step % 4])),
        optimizer=sgd(model, momentum=0.9, weight_decay=0.1),
        steps=8,
        before_step=lambda _: side.log_gradients(model),
    )


@case(variants=PLAIN, only_on_cpu=True)
def spread_experts_saved_and_loaded_unspread(side: Side) -> None:
    model = _spread(side, Mixed())
    optimizer = adamw(model.parameters())
    train(side, model, optimizer=optimizer)
    if side.engine:
        refshard.checkpoint.save(side.folder / "saved", model, optimizer)
        other = Mixed()
        refshard.shard(other, mode="fsdp")
        resumed = adamw(other.parameters())
        refshard.checkpoint.load(side.folder / "saved", other, resumed)
        side.models[:] = [other]
        side.shapes[id(other)] = side.shapes[id(model)]
        model, optimizer = other, resumed
    train(side, model, optimizer=optimizer, start=4)


@case(variants=PLAIN, only_on_cpu=True)
def spread_experts_loaded_from_a_whole_state_dict(side: Side) -> None:
    torch.manual_seed(5)
    state = Mixed().state_dict()
    model = _spread(side, Mixed())
    train(side, model, steps=2)
    model.load_state_dict(state)
    train(side, model, start=2)


@case(variants=PLAIN, only_on_cpu=True)
def spread_experts_stepped_whole(side: Side) -> None:
    model = _spread(side, Mixed())
    experts = [p for layer in model.layers for p in layer.experts.parameters()]
    dense = [p for p in model.parameters() if all(p is not e for e in experts)]
    optimizers = [side.whole_tensors(torch.optim.Adafactor, model, dense, lr=0.01), adamw(experts)]
    for step in range(4):
        mean_square(model(side.x(step))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@case(variants=PLAIN, only_on_cpu=True)
def spread_experts_best_kept_by_a_deep_copy(side: Side) -> None:
    model = _spread(side, Mixed())
    train(side, model, steps=2)
    best = copy.deepcopy(model.state_dict())
    train(side, model, start=2, steps=2)
    model.load_state_dict(best)
    train(side, model, start=4, steps=1)


@case(variants=PLAIN, only_on_cpu=True)
def spread_experts_divided_by_a_factor_and_penalised(side: Side) -> None:
    model = _spread(side, Mixed(), gradient_divide_factor=side.world_size * 2)

    def loss(step: int) -> torch.Tensor:
        total: torch.Tensor = mean_square(model(side.x(step))) + 0.01 * _penalty(model)
        return total

    def halve(_: int) -> None:
        for p in model.parameters():
            if not side.engine and p.grad is not None:
                p.grad.div_(2)

    train(side, model, loss, before_step=halve)


def _own_experts(side: Side, clip: Callable[[nn.Module], torch.Tensor]) -> None:
    """Each rank's experts are plain parameters, which the others do not know of."""
    model = Mixed()
    if side.engine:
        mesh = init_device_mesh(side.device.type, (1, side.world_size), mesh_dim_names=("edp", "ep"))
        for layer in model.layers:
            layer.ep = mesh["ep"]
            for name, p in list(layer.experts.named_parameters()):
                own = p.detach().chunk(side.world_size)[side.rank].clone()
                setattr(layer.experts, name, nn.Parameter(own))
        policies = {"layers.*.experts": refshard.Policy(mesh=mesh["edp"])}
        refshard.shard(model, mode=side.mode, policies=policies)  # type: ignore[attr-defined]
    else:
        model = side.shard(model)
    optimizer = sgd(model)
    for step in range(3):
        loss = mean_square(model(side.x(step)))
        loss.backward()
        side.log_mean(f"loss {step}", loss)
        side.log_mean(f"norm {step}", clip(model))
        optimizer.step()
        optimizer.zero_grad()


@case(variants=PLAIN, only_on_cpu=True, refuses="expert|mesh")
def experts_of_each_rank_clipped_by_the_sides_own(side: Side) -> None:
    _own_experts(side, lambda model: side.own_clip(model, 0.05))


@case(variants=PLAIN, only_on_cpu=True, refuses="cannot be clipped.*make experts DTensors")
def experts_of_each_rank_clipped_by_torch(side: Side) -> None:
    _own_experts(side, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05))
