"""Small models of odd shapes for the cases, and loops that train them."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.distributed.cases.sides import DIM, VOCAB, Side

STEPS = 4


class Block(nn.Module):
    """A residual block."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank addition (LoRA), then a nonlinearity."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, dim) / 2)
        self.b = nn.Parameter(torch.randn(dim, 2) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.base(x) + x @ self.a.T @ self.b.T)
        return out


class Checkpointing(nn.Module):
    """A model that can recompute its blocks in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpointing = False

    def call(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a block, checkpointed or not."""
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False, **kwargs)
        return block(*args, **kwargs)


class Stack(Checkpointing):
    """An input layer, blocks, and a head, over rows of numbers."""

    def __init__(self, blocks: Sequence[nn.Module] | None = None, head: nn.Module | None = None) -> None:
        super().__init__()
        self.inputs = nn.Linear(DIM, DIM)
        self.layers: Any = nn.ModuleList([Block() for _ in range(3)] if blocks is None else blocks)
        self.head: Any = nn.Linear(DIM, 3) if head is None else head

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """All but the head."""
        x = self.inputs(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encode(x))
        return out


class Language(Checkpointing):
    """A language model in miniature."""

    def __init__(self, *, tied: bool = False, blocks: Sequence[nn.Module] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Block() for _ in range(3)] if blocks is None else blocks)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        """All but the head."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.call(layer, x)
        out: torch.Tensor = self.norm(x)
        return out

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encode(tokens))
        return logits


class Frozen(nn.Module):
    """A block that is not trained."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.second(torch.tanh(self.first(x))))
        return out


def adapted() -> Stack:
    """A stack of blocks with adapters."""
    return Stack([Adapted() for _ in range(3)])


def frozen() -> Stack:
    """A stack of frozen blocks between trained layers."""
    return Stack([Frozen() for _ in range(3)])


def mean_square(out: torch.Tensor) -> torch.Tensor:
    """The loss of most cases: of a mean over rows, the mean over ranks is that of all rows."""
    return (out - 0.3).square().mean()


def next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each token's successor."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, **options)


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """AdamW whose epsilon keeps rounding from deciding a step's sign."""
    return torch.optim.AdamW(parameters, **{"lr": 1e-2, "eps": 1e-3, **options})


@contextmanager
def raises(kind: type[Exception], pattern: str) -> Iterator[None]:
    """As ``pytest.raises``, whose own failure is no ``Exception``: another error passes, none at all is an error."""
    try:
        yield
    except kind as error:
        if not re.search(pattern, str(error)):
            raise
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def train(
    side: Side,
    model: nn.Module,
    loss_of: Callable[[int], torch.Tensor] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = STEPS,
    start: int = 0,
    before_step: Callable[[int], object] | None = None,
) -> None:
    """An ordinary loop: forward, backward, ``before_step``, the optimizer's step; the loss of a step is logged.

    By default one SGD for a model, made before its first step.
    """
    if optimizer is None:
        optimizer = side.optimizers.get(id(model)) or sgd(model)
        side.optimizers[id(model)] = optimizer
    for step in range(start, start + steps):
        loss = mean_square(model(side.x(step))) if loss_of is None else loss_of(step)
        loss.backward()
        if before_step is not None:
            before_step(step)
        optimizer.step()
        optimizer.zero_grad()
        side.log_mean(f"loss {step}", loss)


def train_by_hand(
    side: Side,
    model: nn.Module,
    update: Callable[[nn.Parameter, torch.Tensor], object],
    loss_of: Callable[[int], torch.Tensor] | None = None,
) -> None:
    """A loop without an optimizer: ``update`` is given each parameter and its gradient."""
    for step in range(STEPS):
        loss = mean_square(model(side.x(step))) if loss_of is None else loss_of(step)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            update(parameter, parameter.grad)
        model.zero_grad()
        side.log_mean(f"loss {step}", loss)
