"""Modules that are sharded in another mode or precision than the rest of the model."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import refshard
from tests.distributed.cases.case import EVALUATED, PLAIN, case
from tests.distributed.cases.models import (
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


@case(table=True)
def a_mode_for_each_kind_of_module(side: Side) -> None:
    """An embedding kept whole, one block kept from forward to backward, another one replicated, the head in zero1."""
    policies = {
        "embed": refshard.Policy(mode="replicate"),
        "layers.0": refshard.Policy(mode="zero2"),
        "layers.1": refshard.Policy(mode="replicate"),
        "head": refshard.Policy(mode="zero1"),
    }
    model = side.shard(Language(), side.tokens(), policies=policies)
    train(side, model, lambda step: next_token(model, side.tokens(step)))


@case(table=True)
def modes_by_a_function_with_microbatches(side: Side) -> None:
    """Gradients of some units wait unsharded for the last microbatch, those of others are reduced each time."""

    def policy(name: str, module: nn.Module) -> refshard.Policy | None:
        return refshard.Policy(mode="zero1") if isinstance(module, nn.LayerNorm) else None

    model = side.shard(Stack(), side.x(), policies=policy)
    optimizer = sgd(model)
    for step in range(4):
        for microbatch in range(2):
            with side.microbatch(model, last=microbatch == 1):
                mean_square(model(side.x(2 * step + microbatch))).backward()
        side.log_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@case(table=True)
def frozen_backbone_in_a_mode_of_its_own(side: Side) -> None:
    """LoRA: what is frozen stays whole, adapters are sharded as the model is."""
    model = side.shard(adapted(), side.x(), policies={"layers.*.base": refshard.Policy(mode="replicate")})
    train(side, model)


@case(table=True)
def module_within_a_block_by_itself(side: Side) -> None:
    """A unit within a unit."""
    model = side.shard(Stack(), side.x(), policies={"layers.*.up": refshard.Policy(mode="fsdp")})
    train(side, model)


class Gated(nn.Module):
    """A layer whose router, and norm, are sensitive to rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, 2)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        weights = self.router(normed)
        assert self.router.weight.dtype == weights.dtype
        chances = weights.softmax(-1).type_as(normed)
        mixed = sum(chances[..., i, None] * torch.tanh(e(normed)) for i, e in enumerate(self.experts))
        out: torch.Tensor = x + mixed
        return out


class Logging(Stack):
    """Tells in which dtypes its routers and experts compute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen: set[str] = set()
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                self._forget(name, module)
        return super().forward(x)

    def _forget(self, name: str, module: nn.Module) -> None:
        def tell(_: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            self.seen.add(f"{name}: {args[0].dtype} to {out.dtype}")
            handle.remove()

        handle = module.register_forward_hook(tell)


BF16 = refshard.Precision(parameters=torch.bfloat16, reduction=torch.float32)
WIDE = refshard.Precision(parameters=torch.float32)


@case(variants=EVALUATED, rtol=0.05, table=True)
def router_and_norms_in_fp32(side: Side) -> None:
    """Within blocks that compute in bf16. A norm returns bf16 again; the model casts what the router returns."""
    policies = {
        "layers.*.router": refshard.Policy(precision=WIDE),
        "layers.*.norm": refshard.Policy(precision=refshard.Precision(parameters=torch.float32, output=torch.bfloat16)),
    }
    model = side.shard(Logging([Gated() for _ in range(2)]), side.x(), precision=BF16, policies=policies)
    train(side, model, lambda step: mean_square(model(side.x(step)).double()), optimizer=adamw(model.parameters()))
    if side.engine:
        fp32, bf16 = torch.float32, torch.bfloat16
        assert {
            f"layers.0.norm: {fp32} to {bf16}", f"layers.0.router: {fp32} to {fp32}",
            f"layers.0.experts.0: {bf16} to {bf16}",
        } <= model.seen  # fmt: skip


@case(variants=EVALUATED, rtol=1e-4, table=True)
def rounding_of_the_rest_leaves_a_wide_module_alone(side: Side) -> None:
    """A loss that reads the wide module's output alone is as exact as in fp32, though the head is in bf16."""

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = self.layers[0](x)
            narrow = F.relu(self.layers[1](wide.detach()))
            out: torch.Tensor = wide.double() + 0 * narrow.double().sum()
            return out

    policies = {"layers.0": refshard.Policy(precision=WIDE)}
    model = side.shard(Ends(), side.x(), precision=BF16, policies=policies)
    train(side, model, lambda step: mean_square(model(side.x(step))))


BF16 = refshard.Precision(parameters=torch.bfloat16, reduction=torch.float32)
WIDE = refshard.Precision(parameters=torch.float32)
NARROWED = refshard.Precision(parameters=torch.float32, output=torch.bfloat16)


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


class Listed(nn.Module):
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
    model = side.shard(Stack([Listed() for _ in range(2)]), side.x(), precision=BF16, policies=policies)
    train(side, model, lambda step: mean_square(model(side.x(step)).double()))


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
