"""What the engine was not written against: policies, experts on a mesh of their own, weights seen in unusual ways."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import refshard
from tests.distributed.cases.by_rank import Dropping, Mixture, Sparse, _by_row, _choice, _log_presence
from tests.distributed.cases.case import EVALUATED, PLAIN, case
from tests.distributed.cases.models import (
    Adapted,
    Block,
    Checkpointing,
    Language,
    Stack,
    adamw,
    adapted,
    mean_square,
    next_token,
    sgd,
    train,
)
from tests.distributed.cases.sides import DIM, Side
from tests.distributed.cases.subclasses import Coded, Master, Rows, quantised

EXPERTS = 6
BF16 = refshard.Precision(parameters=torch.bfloat16, reduction=torch.float32)
WIDE = refshard.Precision(parameters=torch.float32)
NARROWED = refshard.Precision(parameters=torch.float32, output=torch.bfloat16)

# Experts on a mesh of their own


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


@case(variants=PLAIN, only_on_cpu=True)
def spread_experts_penalised(side: Side) -> None:
    """A penalty on weights, of all experts, in the loss."""
    model = _spread(side, Mixed())

    def loss(step: int) -> torch.Tensor:
        penalty = sum(p.square().sum() for layer in model.layers for p in layer.experts.parameters())
        total: torch.Tensor = mean_square(model(side.x(step))) + 0.01 * penalty
        return total

    train(side, model, loss)


@case(variants=PLAIN, only_on_cpu=True)
def spread_experts_penalised_times_each_ranks_loss(side: Side) -> None:
    model = _spread(side, Mixed())

    def loss(step: int) -> torch.Tensor:
        penalty = sum(p.square().sum() for layer in model.layers for p in layer.experts.parameters())
        total: torch.Tensor = mean_square(model(side.x(step))) * penalty
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
        penalty = sum(p.square().sum() for layer in model.layers for p in layer.experts.parameters())
        total: torch.Tensor = mean_square(model(side.x(step))) + 0.01 * penalty
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


# Policies

EACH_MODE = {
    "embed": refshard.Policy(mode="replicate"),
    "layers.0": refshard.Policy(mode="zero2"),
    "layers.1": refshard.Policy(mode="replicate"),
    "layers.2": refshard.Policy(mode="fsdp"),
    "head": refshard.Policy(mode="zero1"),
}


def _language(side: Side, **options: Any) -> Language:
    return side.shard(Language(), side.tokens(), **{"policies": EACH_MODE, **options})


@case()
def modes_clipped_by_torch(side: Side) -> None:
    model = _language(side)

    def clip(step: int) -> None:
        side.log(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=step % 2 == 0 or None))

    train(side, model, lambda step: next_token(model, side.tokens(step)), before_step=clip)


@case()
def modes_clipped_by_the_sides_own(side: Side) -> None:
    model = _language(side)

    def clip(step: int) -> None:
        side.log(f"norm {step}", side.own_clip(model, 0.05, (2.0, 1.0, float("inf"))[step % 3]))

    train(side, model, lambda step: next_token(model, side.tokens(step)), before_step=clip)


@case(variants=EVALUATED)
def modes_with_foreach_and_a_scaler(side: Side) -> None:
    model = _language(side)
    optimizer = adamw(model.parameters(), foreach=True)
    scaler = torch.amp.GradScaler(side.device.type, init_scale=8.0, growth_interval=2)
    for step in range(5):
        loss = next_token(model, side.tokens(step))
        scaler.scale(loss * float("inf") if step == 2 and side.rank == 0 else loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        side.log("scale", scaler.get_scale())


@case(variants=PLAIN)
def modes_with_a_fused_step(side: Side) -> None:
    model = _language(side)
    optimizer = adamw(model.parameters(), fused=True)
    train(side, model, lambda step: next_token(model, side.tokens(step)), optimizer=optimizer)


@case()
def modes_accumulated_unsharded_by_option(side: Side) -> None:
    """Also with what is cleared half way."""
    if side.engine and side.mode == "yafsdp":  # type: ignore[attr-defined]
        side.mode = "fsdp"  # type: ignore[attr-defined]
    model = _language(side, accumulation="unsharded")
    optimizer = sgd(model, momentum=0.9)
    for step in range(4):
        for microbatch in range(3):
            with side.microbatch(model, last=microbatch == 2):
                next_token(model, side.tokens(3 * step + microbatch)).backward()
            if step == 2 and microbatch == 0:
                optimizer.zero_grad()
        side.log_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


@case(variants=PLAIN)
def modes_with_masters_offloaded(side: Side) -> None:
    model = _language(side, offload=True)
    train(side, model, lambda step: next_token(model, side.tokens(step)), optimizer=adamw(model.parameters()))


@case(variants=PLAIN)
def modes_over_replicas(side: Side) -> None:
    model = _language(side, replicas=True)

    def clip(step: int) -> None:
        side.log(f"norm {step}", side.own_clip(model, 0.05))

    train(side, model, lambda step: next_token(model, side.tokens(step)), before_step=clip)


@case(variants=PLAIN, refuses="its policy names a mesh or a mode")
def modes_stepped_whole(side: Side) -> None:
    model = _language(side)
    optimizer = side.whole_tensors(torch.optim.Adafactor, model, model.parameters(), lr=0.01)
    train(side, model, lambda step: next_token(model, side.tokens(step)), optimizer=optimizer)


@case(variants=PLAIN)
def modes_frozen_and_unfrozen_in_turn(side: Side) -> None:
    model = _language(side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = [model.embed, *model.layers, model.head]
    for stage, part in enumerate(parts):
        part.requires_grad_(False)
        train(side, model, lambda step: next_token(model, side.tokens(step)), optimizer=optimizer, start=stage, steps=1)
        part.requires_grad_(stage % 2 == 0)
    train(side, model, lambda step: next_token(model, side.tokens(step)), optimizer=optimizer, start=9, steps=2)


@case(variants=PLAIN)
def modes_loaded_and_resumed(side: Side) -> None:
    """Best weights and the optimizer's state are kept by deep copies."""
    model = _language(side)
    optimizer = adamw(model.parameters())
    train(side, model, lambda step: next_token(model, side.tokens(step)), optimizer=optimizer, steps=2)
    best, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(side, model, lambda step: next_token(model, side.tokens(step)), optimizer=optimizer, start=2, steps=2)
    model.load_state_dict(best)
    optimizer.load_state_dict(state)
    train(side, model, lambda step: next_token(model, side.tokens(step)), optimizer=optimizer, start=4, steps=2)


@case(variants=PLAIN, only_on_cpu=True)
def modes_saved_and_loaded_without_policies(side: Side) -> None:
    model = _language(side)
    optimizer = adamw(model.parameters())
    train(side, model, lambda step: next_token(model, side.tokens(step)), optimizer=optimizer)
    if side.engine:
        refshard.checkpoint.save(side.folder / "saved", model, optimizer)
        other = Language()
        refshard.shard(other, mode="zero2")
        resumed = adamw(other.parameters())
        refshard.checkpoint.load(side.folder / "saved", other, resumed)
        side.models[:] = [other]
        side.shapes[id(other)] = side.shapes[id(model)]
        model, optimizer = other, resumed
    train(side, model, lambda step: next_token(model, side.tokens(step)), optimizer=optimizer, start=4)


@case()
def patterns_that_overlap(side: Side) -> None:
    """``layers.*`` matches what lies within the layers, too; the last pattern that matches counts."""
    policies = {
        "layers.*": refshard.Policy(mode="zero2"),
        "layers.1*": refshard.Policy(mode="yafsdp"),
        "*.norm": refshard.Policy(mode="replicate"),
        "layers.2": refshard.Policy(mode="zero1"),
    }
    train(side, side.shard(Stack(), side.x(), policies=policies))


@case()
def ring_within_a_ring(side: Side) -> None:
    model = side.shard(Stack(), side.x(), policies={"layers.*.down": refshard.Policy(mode="yafsdp")})
    train(side, model)


@case()
def adapters_in_modes_of_their_own(side: Side) -> None:
    """Microbatches, clipping, momentum; frozen weights of each layer in another mode."""
    policies = {
        "layers.0.base": refshard.Policy(mode="replicate"),
        "layers.1.base": refshard.Policy(mode="zero2"),
        "layers.2": refshard.Policy(mode="zero1"),
    }
    model = side.shard(adapted(), side.x(), policies=policies)
    optimizer = sgd(model, momentum=0.9)
    for step in range(4):
        for microbatch in range(2):
            with side.microbatch(model, last=microbatch == 1):
                mean_square(model(side.x(2 * step + microbatch))).backward()
        side.log("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()


@case(variants=EVALUATED, refuses="policies of different modes")
def tied_weight_in_two_modes(side: Side) -> None:
    policies = {"embed": refshard.Policy(mode="replicate"), "head": refshard.Policy(mode="zero2")}
    model = side.shard(Language(tied=True), side.tokens(), policies=policies)
    train(side, model, lambda step: next_token(model, side.tokens(step)))


@case(variants=EVALUATED, rtol=0.1, refuses="polic")
def tied_weight_in_two_precisions(side: Side) -> None:
    policies = {"head": refshard.Policy(precision=WIDE)}
    model = side.shard(Language(tied=True), side.tokens(), precision=BF16, policies=policies)
    train(side, model, lambda step: next_token(model, side.tokens(step)).double())


@case(variants=EVALUATED, rtol=0.1)
def final_norm_in_fp32_before_a_head_in_bf16(side: Side) -> None:
    """The norm and the head are one unit."""
    policies = {"*norm": refshard.Policy(precision=NARROWED)}
    model = side.shard(Language(), side.tokens(), precision=BF16, policies=policies)
    train(side, model, lambda step: next_token(model, side.tokens(step)).double())


@case(variants=EVALUATED, rtol=0.1)
def head_in_fp32_after_a_norm_in_bf16(side: Side) -> None:
    policies = {"head": refshard.Policy(precision=WIDE)}
    model = side.shard(Language(), side.tokens(), precision=BF16, policies=policies)
    train(side, model, lambda step: next_token(model, side.tokens(step)).double())


class Two(nn.Module):
    """Two layers without blocks, which get the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.layers, self.wide = (
            nn.Linear(DIM, DIM),
            nn.ModuleList([nn.Linear(DIM, DIM)]),
            nn.Linear(DIM, DIM),
        )
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        y = self.layers[0](self.narrow(x))
        self.wide(y.detach())
        out: torch.Tensor = self.last(x + 1e-4).double() + 0 * y.double()
        return out


@case(variants=PLAIN, rtol=1e-5)
def input_of_a_wide_module_beside_a_narrow_one(side: Side) -> None:
    """Both are in one unit; the wide one's input is not rounded as the narrow one's is."""
    policies = {"last": refshard.Policy(precision=WIDE)}
    model = side.shard(Two(), precision=BF16, policies=policies)
    with torch.no_grad():
        side.log_rows("out", model(side.x()))


class Gated(nn.Module):
    """Experts in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 2)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chances = self.router(x).softmax(-1)
        mixed = sum(chances[..., i, None] * torch.tanh(e(x)) for i, e in enumerate(self.experts))
        out: torch.Tensor = x + mixed
        return out


@case(variants=EVALUATED, rtol=0.1)
def list_of_experts_in_fp32(side: Side) -> None:
    policies = {"layers.*.experts": refshard.Policy(precision=NARROWED)}
    model = side.shard(Stack([Gated() for _ in range(2)]), side.x(), precision=BF16, policies=policies)
    train(side, model, lambda step: mean_square(model(side.x(step)).double()))


@case(variants=EVALUATED, rtol=0.1)
def all_layers_in_fp32_by_their_list(side: Side) -> None:
    policies = {"layers": refshard.Policy(precision=NARROWED)}
    model = side.shard(Stack(), side.x(), precision=BF16, policies=policies)
    train(side, model, lambda step: mean_square(model(side.x(step)).double()))


@case(variants=EVALUATED)
def experts_by_rank_in_modes_of_their_own(side: Side) -> None:
    """Each expert is a unit, within a layer in another mode, and some ranks do not call it."""
    model = side.shard(
        Mixture(),
        side.x(),
        _choice(side, 0),
        blocks=["layers"],
        policies={"layers.0": refshard.Policy(mode="zero1"), "layers.1": refshard.Policy(mode="replicate")},
    )
    train(
        side,
        model,
        lambda step: mean_square(model(side.x(step), _choice(side, step))),
        optimizer=sgd(model, momentum=0.9, weight_decay=0.1),
        steps=6,
        before_step=lambda _: _log_presence(side, model),
    )


@case(variants=EVALUATED, only_on_cpu=True)
def modes_compiled(side: Side) -> None:
    """Microbatches, and evaluations between steps."""
    torch._dynamo.reset()
    policies = {"layers.0": refshard.Policy(mode="zero1"), "layers.1": refshard.Policy(mode="zero2")}
    model = side.shard(Stack(), side.x(), policies=policies)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    optimizer = sgd(model)
    for step in range(3):
        for microbatch in range(2):
            with side.microbatch(model, last=microbatch == 1):
                mean_square(model(side.x(2 * step + microbatch))).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            side.log_rows("out", model(side.x()))


# Ranks that use different parameters


class Looping(Mixture):
    """Runs its layers twice, each time checkpointed."""

    reentrant = True

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        for loop in range(2):
            for index, layer in enumerate(self.layers):
                given = (choice + index + 2 * loop) % self.used
                x = checkpoint(layer, x, given, use_reentrant=self.reentrant)
        out: torch.Tensor = self.head(x)
        return out


def _looping(side: Side, *, reentrant: bool) -> None:
    model = Looping()
    model.reentrant = reentrant
    side.shard(model, side.x(), _choice(side, 0), blocks=["layers"])
    train(
        side,
        model,
        lambda step: mean_square(model(side.x(step).requires_grad_(), _choice(side, step))),
        optimizer=sgd(model, momentum=0.9),
        steps=6,
        before_step=lambda _: side.log_gradients(model),
    )


class Revisiting(Stack):
    """Runs its blocks twice, each time checkpointed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for layer in [*self.layers, *self.layers]:
            x = checkpoint(layer, x, use_reentrant=True)
        out: torch.Tensor = self.head(x)
        return out


@case(variants=EVALUATED)
def blocks_looped_reentrant(side: Side) -> None:
    train(side, side.shard(Revisiting(), side.x()))


@case(variants=EVALUATED)
def layers_of_experts_by_rank_looped_reentrant(side: Side) -> None:
    """A layer's backward has two parts, in which a rank uses different experts."""
    _looping(side, reentrant=True)


@case(variants=EVALUATED)
def layers_of_experts_by_rank_looped_checkpointed(side: Side) -> None:
    _looping(side, reentrant=False)


@case()
def experts_by_rank_with_gradients_zeroed(side: Side) -> None:
    """``zero_grad(set_to_none=False)``: weight decay goes on for experts that nobody uses."""
    model = side.shard(Mixture(), side.x(), _choice(side, 0), blocks=["layers"])
    optimizer = adamw(model.parameters(), weight_decay=0.1)
    for step in range(8):
        for microbatch in range(2):
            with side.microbatch(model, last=microbatch == 1):
                mean_square(model(side.x(2 * step + microbatch), _choice(side, step + microbatch))).backward()
        _log_presence(side, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@case()
def experts_by_rank_partly_frozen(side: Side) -> None:
    model = Mixture()
    for layer in model.layers:
        assert isinstance(layer, Sparse)
        layer.experts[0].requires_grad_(False)
        next(layer.experts[2].children()).requires_grad_(False)
    side.shard(model, side.x(), _choice(side, 0), blocks=["layers"])
    train(
        side,
        model,
        lambda step: mean_square(model(side.x(step), _choice(side, step))),
        optimizer=sgd(model, momentum=0.9),
        steps=6,
        before_step=lambda _: _log_presence(side, model),
    )


@case()
def experts_by_rank_stepped_in_backward(side: Side) -> None:
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""
    model = side.shard(Mixture(), side.x(), _choice(side, 0), blocks=["layers"])
    optimizers = {p: adamw([p]) for p in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    for step in range(6):
        loss = mean_square(model(side.x(step), _choice(side, step)))
        loss.backward()
        side.log_mean("loss", loss)


@case(variants=EVALUATED)
def experts_by_rank_with_a_scaler(side: Side) -> None:
    model = side.shard(Mixture(), side.x(), _choice(side, 0), blocks=["layers"])
    optimizer = sgd(model, momentum=0.9)
    scaler = torch.amp.GradScaler(side.device.type, init_scale=8.0, growth_interval=2)
    for step in range(6):
        loss = mean_square(model(side.x(step), _choice(side, step)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        side.log("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@case()
def adapters_skipped_by_one_rank_later(side: Side) -> None:
    """LayerDrop by rank over blocks with frozen weights, with microbatches."""
    model = Dropping([Adapted() for _ in range(3)])
    everything = [_by_row(side, 1, 1, 1, 1, 1, 1)] * 3
    some = [everything[0], _by_row(side, 1, 1, 1, 0, 0, 0), _by_row(side, 0, 0, 0, 1, 1, 1)]
    side.shard(model, side.x(), everything)
    optimizer = sgd(model, momentum=0.9)
    for step in range(5):
        for microbatch in range(2):
            with side.microbatch(model, last=microbatch == 1):
                kept = some if step >= 2 and microbatch == step % 2 else everything
                mean_square(model(side.x(2 * step + microbatch), kept)).backward()
        _log_presence(side, model)
        optimizer.step()
        optimizer.zero_grad()


def _weighed(side: Side, model: nn.Module, step: int) -> torch.Tensor:
    """The first rank's rows do not count in the third step."""
    weights = _by_row(side, *((0, 0, 0, 1, 1, 1) if step == 2 else (1,) * 6))
    losses: torch.Tensor = (model(side.x(step)) - 0.3).square().mean(1) * weights
    return losses.mean()


def _skipping(side: Side, **options: Any) -> None:
    model = side.shard(Stack(), **options)
    optimizer = sgd(model)
    for step in range(5):
        loss = _weighed(side, model, step)
        if not side.engine or step != 2 or loss.item() != 0:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        side.log_mean("loss", loss)


@case(variants=PLAIN, refuses="all ranks must|no gradients since")
def backward_skipped_by_one_rank(side: Side) -> None:
    """As after a loss that is not finite, or an error that was caught."""
    _skipping(side)


@case(variants=PLAIN, refuses="all ranks must|no gradients since")
def backward_skipped_by_one_rank_in_debug(side: Side) -> None:
    _skipping(side, debug=True)


def _evaluated_alone(side: Side, **options: Any) -> None:
    model = side.shard(Stack(), **options)
    for step in range(4):
        train(side, model, start=step, steps=1)
        if side.rank == 0:
            with torch.no_grad():
                model(side.x())


@case(variants=PLAIN, refuses="all ranks must")
def evaluated_by_the_first_rank_alone_in_debug(side: Side) -> None:
    _evaluated_alone(side, debug=True)


# Weights that are seen in unusual ways


@case(variants=PLAIN, refuses="memory")
def weights_tied_through_data(side: Side) -> None:
    model = Language()
    model.head.weight.data = model.embed.weight.data
    side.shard(model)
    train(side, model, lambda step: next_token(model, side.tokens(step)))


@case(variants=PLAIN, refuses="memory")
def buffer_over_the_memory_of_a_weight(side: Side) -> None:
    class Shadowed(nn.Module):
        shadow: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(DIM, DIM) / 2)
            self.register_buffer("shadow", self.weight.detach())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(x @ self.weight) + 0.1 * torch.tanh(x @ self.shadow)

    train(side, side.shard(Stack([Shadowed() for _ in range(3)])))


class Acting(Block):
    """Does something to its weights in some calls."""

    def __init__(self, act: Callable[["Acting", int], Any]) -> None:
        super().__init__()
        self.act, self.calls = act, 0
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.act(self, self.calls)
        self.calls += 1
        out = super().forward(x)
        return out if found is None else out + found(x)


def _acting(side: Side, act: Callable[[Acting, int], Any], frozen: bool = False) -> None:
    model = Stack([Acting(act) for _ in range(3)])
    for layer in model.layers if frozen else ():
        layer.up.weight.requires_grad_(False)
    side.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(side, model, optimizer=optimizer, steps=6)


@case(variants=PLAIN, refuses="requires_grad")
def frozen_within_forward_once(side: Side) -> None:
    def act(block: Acting, call: int) -> None:
        if call == 2:
            block.up.weight.requires_grad_(False)

    _acting(side, act)


@case(variants=PLAIN, refuses="requires_grad|unfrozen")
def unfrozen_within_forward_once(side: Side) -> None:
    def act(block: Acting, call: int) -> None:
        if call == 2:
            block.up.weight.requires_grad_(True)

    _acting(side, act, frozen=True)


@case(variants=PLAIN, refuses="hook")
def hook_put_on_a_weight_within_the_first_forward(side: Side) -> None:
    def act(block: Acting, call: int) -> None:
        if call == 0:
            block.up.weight.register_hook(lambda gradient: gradient * 0.5)

    _acting(side, act)


@case(variants=PLAIN, refuses="hook")
def post_accumulate_hook_put_on_a_weight_within_the_first_forward(side: Side) -> None:
    def act(block: Acting, call: int) -> None:
        if call == 0:
            block.up.weight.register_post_accumulate_grad_hook(halve)

    def halve(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    _acting(side, act)


@case(variants=EVALUATED)
def attribute_of_a_weight_read_in_forward(side: Side) -> None:
    """As muP's readout does."""

    def act(block: Acting, call: int) -> Any:
        return lambda x: x * block.up.weight.width  # type: ignore[attr-defined]

    model = Stack([Acting(act) for _ in range(3)])
    for layer in model.layers:
        layer.up.weight.width = 0.3
    train(side, side.shard(model, side.x()))


@case(variants=PLAIN, refuses="view|memory")
def view_of_a_weight_kept_from_the_first_forward(side: Side) -> None:
    def act(block: Acting, call: int) -> Any:
        if call == 0:
            block.kept = block.up.weight.t()
        return lambda x: torch.tanh(x @ block.kept)[:, :DIM]

    _acting(side, act)


@case(variants=PLAIN, refuses="view|memory")
def view_of_a_weight_kept_without_gradient(side: Side) -> None:
    def act(block: Acting, call: int) -> Any:
        if call == 0:
            block.kept = block.up.weight.detach().t()
        return lambda x: torch.tanh(x @ block.kept)[:, :DIM]

    _acting(side, act)


class Kept(torch.autograd.Function):
    """Keeps a weight on its context, in a dictionary."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.state = {"weight": weight}
        ctx.save_for_backward(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] @ ctx.state["weight"], gradients[0].T @ x


class Tapped(nn.Module):
    """Has something for the loss beside its output."""

    tap: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 2)
        self.bias = nn.Parameter(torch.randn(DIM) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tap = Kept.apply(torch.tanh(x), self.weight)
        return x + torch.tanh(self.tap + self.bias)


@case(variants=PLAIN)
def weight_in_a_dictionary_of_a_context_read_early(side: Side) -> None:
    model = side.shard(Stack([Tapped() for _ in range(3)]))

    def loss(step: int) -> torch.Tensor:
        model(side.x(step))
        first: torch.Tensor = model.layers[0].tap
        return first.square().mean()

    train(side, model, loss)


class Equilibrium(Stack):
    """A deep equilibrium model: a hook on the fixed point solves for its gradient, by backwards within the backward."""

    def step(self, z: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = 0.5 * torch.tanh(self.layers[0](z)) + 0.5 * u
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.inputs(x)
        z = u
        with torch.no_grad():
            for _ in range(4):
                z = self.step(z, u)
        z = self.step(z, u)
        if torch.is_grad_enabled():
            start = z.detach().requires_grad_()
            end = self.step(start, u.detach())

            def solve(gradient: torch.Tensor) -> torch.Tensor:
                y = gradient
                for _ in range(3):
                    y = torch.autograd.grad(end, start, y, retain_graph=True)[0] + gradient
                return y

            z.register_hook(solve)
        out: torch.Tensor = self.head(z)
        return out


@case(variants=EVALUATED)
def deep_equilibrium(side: Side) -> None:
    train(side, side.shard(Equilibrium([Block()]), side.x()))


@case(variants=EVALUATED)
def deep_equilibrium_of_adapters(side: Side) -> None:
    train(side, side.shard(Equilibrium([Adapted()]), side.x()))


class Coupling(torch.autograd.Function):
    """An invertible pair of blocks, whose inputs are computed from its outputs."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, f: nn.Module, g: nn.Module) -> Any:
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            a = a + f(b)
            b = b + g(a)
        ctx.save_for_backward(a, b)
        return a, b

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        of_a, of_b = gradients
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            second = ctx.g(a)
            second.backward(of_b)
        of_a = of_a + a.grad
        b = (b - second).detach().requires_grad_()
        with torch.enable_grad():
            first = ctx.f(b)
            first.backward(of_a)
        return of_a, of_b + b.grad, None, None


class Reversible(Stack):
    """Reversible residual layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = b = self.inputs(x)
        for f, g in zip(self.layers[::2], self.layers[1::2]):
            a, b = Coupling.apply(a, b, f, g)
        out: torch.Tensor = self.head(a + b)
        return out


@case(variants=EVALUATED)
def reversible_blocks(side: Side) -> None:
    train(side, side.shard(Reversible([Block() for _ in range(4)]), side.x()))


@case(variants=EVALUATED)
def reversible_blocks_with_adapters(side: Side) -> None:
    train(side, side.shard(Reversible([Adapted() for _ in range(4)]), side.x()))


# State, optimizers, several models


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


@case(variants=PLAIN)
def best_weights_kept_on_the_host(side: Side) -> None:
    model = side.shard(Stack())
    best = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    train(side, model, steps=2)
    model.load_state_dict(best)
    train(side, model, start=2, steps=2)


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


# Tensor subclasses


@case()
def adapters_on_codes_in_modes_of_their_own(side: Side) -> None:
    policies = {"layers.0": refshard.Policy(mode="replicate"), "layers.1": refshard.Policy(mode="zero1")}
    model = side.shard(quantised(Coded), side.x(), policies=policies)
    optimizer = sgd(model, momentum=0.9)
    for step in range(4):
        for microbatch in range(2):
            with side.microbatch(model, last=microbatch == 1):
                mean_square(model(side.x(2 * step + microbatch))).backward()
        side.log("norm", side.own_clip(model, 0.05))
        optimizer.step()
        optimizer.zero_grad()


@case()
def adapters_on_quantised_rows_in_modes_of_their_own(side: Side) -> None:
    policies = {
        "layers.0": refshard.Policy(mode="replicate"),
        "layers.1": refshard.Policy(mode="zero1", precision=refshard.Precision(parameters=torch.float64)),
    }
    train(side, side.shard(quantised(Rows), side.x(), policies=policies))


@case()
def gathered_in_float8_in_modes_of_their_own(side: Side) -> None:
    policies = {"layers.0": refshard.Policy(mode="replicate"), "layers.1": refshard.Policy(mode="zero1")}
    model = side.shard(quantised(Master), side.x(), policies=policies)

    def clip(step: int) -> None:
        side.log(f"norm {step}", side.own_clip(model, 0.3))

    train(side, model, optimizer=sgd(model, momentum=0.9), before_step=clip)


@case(variants=PLAIN)
def gathered_in_float8_with_the_best_kept(side: Side) -> None:
    """Best weights by a deep copy of the state dict, and back; one matrix frozen meanwhile."""
    model = side.shard(quantised(Master))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(side, model, optimizer=optimizer, steps=2)
    best = copy.deepcopy(model.state_dict())
    model.layers[0].weight.requires_grad_(False)
    train(side, model, optimizer=optimizer, start=2, steps=2)
    model.load_state_dict(best)
    model.layers[0].weight.requires_grad_(True)
    train(side, model, optimizer=optimizer, start=4, steps=2)


@case(variants=PLAIN, refuses="cast|moved|to\\(|after")
def quantised_model_cast_after_sharding(side: Side) -> None:
    model = side.shard(quantised(Coded))
    model.to(torch.float64)
    train(side, model)


@case(variants=PLAIN)
def adapters_loaded_alone(side: Side) -> None:
    """Adapters are saved and loaded by name, without the quantised weights."""
    model = side.shard(quantised(Coded))
    train(side, model, steps=2)
    saved = {n: v.clone() for n, v in model.state_dict().items() if n.rpartition(".")[2] in ("a", "b", "bias")}
    train(side, model, start=2, steps=2)
    model.load_state_dict(saved, strict=False)
    train(side, model, start=4, steps=2)
