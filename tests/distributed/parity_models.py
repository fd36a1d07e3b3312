"""The model of the parity matrix: a language model in miniature, of odd shapes, that can do what the features ask."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, ROWS, LENGTH = 13, 9, 12, 5
"""12 rows divide among 1, 2, 3 and 4 ranks."""


class Adapted(nn.Module):
    """A linear layer, frozen as a rule, with a low-rank addition (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 3)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return out


class Block(nn.Module):
    """A residual block; the ``spare`` layer that it may hold never runs."""

    def __init__(self, *, adapted: bool, spare: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        up, down = nn.Linear(DIM, 2 * DIM + 1), nn.Linear(2 * DIM + 1, DIM, bias=False)
        self.up: nn.Module = Adapted(up) if adapted else up
        self.down: nn.Module = Adapted(down) if adapted else down
        if spare:
            self.spare = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Embedding, four blocks, norm and head.

    ``order`` is that in which the blocks run, and may be changed between steps; every ``checkpoint_every``-th of them
    is recomputed in backward. ``trained`` says by name which parameters are; with ``adapted``, linear layers of blocks
    have adapters.
    """

    def __init__(
        self,
        *,
        tied: bool = False,
        adapted: bool = False,
        spare: bool = False,
        trained: Callable[[str], bool] = lambda _: True,
        order: Sequence[int] = (0, 1, 2, 3),
        checkpoint_every: int = 0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(adapted=adapted, spare=spare) for _ in range(4))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(trained(name))
        self.order = tuple(order)
        self.checkpoint_every = checkpoint_every

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for place, index in enumerate(self.order):
            layer = self.layers[index]
            recomputed = self.checkpoint_every and place % self.checkpoint_every == 0
            x = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def make_batch(step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one microbatch of one step, of all ranks."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy, in fp32."""
    return nn.functional.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten())
