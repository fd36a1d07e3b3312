"""A world of one process for the engine's own tests: collectives that are late, strict and countable."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from refshard.engine.collectives import Collectives, Pending


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory, whatever the dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


@dataclass
class LateWork:
    """A collective that happens when it is awaited, and notices if its input was touched in between."""

    source: torch.Tensor
    target: torch.Tensor
    seen: torch.Tensor

    def wait(self) -> None:
        same = torch.equal(bytes_of(self.source), bytes_of(self.seen))
        in_place = self.source.data_ptr() == self.target.data_ptr()
        assert same or in_place, "the input changed while the collective was under way"
        untouched = bool((bytes_of(self.target) == 255).all())
        assert untouched, "the output was written to while the collective was under way"
        self.target.copy_(self.seen)


class LateCollectives(Collectives):
    """One rank. Outputs hold NaN from issue to wait, so that reading too early shows.

    ``issued`` lists each collective and the bytes of its larger tensor.
    """

    rank = 0
    world_size = 1
    gathers = True

    def __init__(self) -> None:
        self.issued: list[tuple[str, int]] = []

    def _issue(self, op: str, target: torch.Tensor, source: torch.Tensor) -> Pending:
        self.issued.append((op, max(target.nbytes, source.nbytes)))
        seen = source.detach().clone()
        bytes_of(target).fill_(255)  # NaN
        return LateWork(source, target, seen)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        return self._issue("all_gather", output, shard)

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, scratch: torch.Tensor | None = None) -> Pending:
        return self._issue("reduce_scatter", output, full)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._issue("all_reduce", tensor, tensor)

    def all_to_all(
        self, output: torch.Tensor, given: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        return self._issue("all_to_all", output, given)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.issued.append(("broadcast", tensor.nbytes))

    def reduce_over_shards(self, tensor: torch.Tensor, op: str) -> None:
        """One rank's sum is its own."""

    def all_reduce_max(self, tensor: torch.Tensor) -> Pending:
        return self._issue("all_reduce", tensor, tensor)

    def agree(self, value: int) -> bool:
        return True


class FailingCollectives(LateCollectives):
    """A peer has died: what was issued cannot be awaited."""

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        class Broken:
            def wait(self) -> None:
                raise RuntimeError("Connection closed by peer")

        return Broken()


class Block(nn.Module):
    """A residual block with odd shapes."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Embedding, blocks, norm and head: a language model in miniature."""

    def __init__(self, n_blocks: int = 4, dim: int = 6, vocab: int = 11, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(n_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.skip: set[int] = set()
        self.order: list[int] | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index in self.order or range(len(self.layers)):
            if index not in self.skip:
                x = self.layers[index](x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def make_net(seed: int = 0, **arguments: bool) -> Net:
    """The same network for the same seed."""
    torch.manual_seed(seed)
    return Net(**arguments)


def make_batch(step: int, rows: int = 4, length: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one step."""
    tokens = torch.randint(0, 11, (rows, length + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy."""
    logits = model(batch[0])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def train(
    model: nn.Module, steps: int, *, start: int = 0, optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    """Train ``steps`` steps and return the losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(start, start + steps):
        loss = loss_of(model, make_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
