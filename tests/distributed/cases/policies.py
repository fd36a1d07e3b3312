"""Modules that are sharded in another mode or precision than the rest of the model."""

import torch
from torch import nn
from torch.nn import functional as F

import refshard
from tests.distributed.cases.case import EVALUATED, case
from tests.distributed.cases.models import Language, Stack, adamw, adapted, mean_square, next_token, sgd, train
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
