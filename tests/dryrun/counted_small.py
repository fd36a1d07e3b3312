"""A factory of a small module of torch's own layers, with blocks that no dimensions describe."""

from typing import Any

import torch
from torch import Tensor, nn

DIM, INNER, VOCAB, BLOCKS = 64, 96, 128, 3


class Block(nn.Module):
    """Two products; no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, INNER, bias=False), nn.Linear(INNER, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """A residual."""
        summed: Tensor = x + self.down(torch.relu(self.up(x)))
        return summed


class Module(nn.Module):
    """An embedding, blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCAB, DIM), nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def build() -> tuple[nn.Module, Any]:
    def batch(sequences: int, seq_len: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"ids": torch.randint(VOCAB, (sequences, seq_len), generator=generator, device="cpu")}

    return Module(), batch


def unlike() -> tuple[nn.Module, Any]:
    """It runs other operators for two sequences than for three."""

    class Odd(Module):
        def forward(self, ids: Tensor) -> Tensor:
            loss = super().forward(ids)
            return loss * 2 if len(ids) == 2 else loss

    return Odd(), build()[1]


def without_blocks() -> tuple[nn.Module, Any]:
    return nn.Linear(3, 3), build()[1]


def asking() -> tuple[nn.Module, Any]:
    """It asks for a value that nobody computes on the meta device."""

    class Asking(Module):
        def forward(self, ids: Tensor) -> Tensor:
            loss = super().forward(ids)
            return loss if loss.item() > 0 else -loss

    return Asking(), build()[1]
