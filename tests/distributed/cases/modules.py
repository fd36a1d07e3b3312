"""torch's own modules, and models of other shapes than a list of blocks."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.cases.case import ALL, EVALUATED, PLAIN, case
from tests.distributed.cases.models import Block, Checkpointing, Stack, mean_square, train
from tests.distributed.cases.sides import DIM, VOCAB, Side


class Recurrent(nn.Module):
    """A recurrent layer over a short sequence made of the row."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.layer = kind(DIM, DIM, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.layer(torch.stack([x, x.tanh(), -x], 1))
        last: torch.Tensor = x + out[:, -1, :DIM]
        return last


@case(table=True, only_on_cpu=True)
def lstm(side: Side) -> None:
    train(side, side.shard(Stack([Recurrent(nn.LSTM) for _ in range(2)]), side.x()))


@case(table=True, only_on_cpu=True)
def gru(side: Side) -> None:
    train(side, side.shard(Stack([Recurrent(nn.GRU) for _ in range(2)]), side.x()))


@case(variants=EVALUATED, only_on_cpu=True)
def lstm_in_both_directions_with_two_layers(side: Side) -> None:
    blocks = [Recurrent(nn.LSTM, num_layers=2, bidirectional=True) for _ in range(2)]
    train(side, side.shard(Stack(blocks), side.x()))


@case(variants=EVALUATED, only_on_cpu=True)
def recurrent_cells(side: Side) -> None:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = torch.zeros_like(x)
            for _ in range(3):
                state = self.cell(x, state)
            return state

    train(side, side.shard(Stack([Cells() for _ in range(2)]), side.x()))


class Attention(nn.Module):
    """Self-attention over a short sequence, by torch's module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequence = torch.stack([x, x.tanh(), -x], 1)
        out, _ = self.attention(sequence, sequence, sequence, need_weights=False)
        found: torch.Tensor = x + out.mean(1)
        return found


@case()
def multihead_attention(side: Side) -> None:
    train(side, side.shard(Stack([Attention() for _ in range(2)]), side.x()))


class Encoder(nn.Module):
    """torch's encoder, whose layers are the blocks."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 1, 7, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(torch.stack([x, x.tanh(), -x], 1)))
        return out


@case(variants=EVALUATED)
def transformer_encoder(side: Side) -> None:
    train(side, side.shard(Encoder(), side.x()))


@case(variants=EVALUATED)
def transformer_encoder_in_evaluation_mode(side: Side) -> None:
    """``eval()`` without gradients takes torch's fast path, which reads weights without calling the layers."""
    model = side.shard(Encoder(), side.x())
    for step in range(3):
        model.train()
        train(side, model, start=step, steps=1)
        model.eval()
        with torch.no_grad():
            side.log_rows("out", model(side.x(9)))


@case(variants=EVALUATED)
def transformer_of_encoder_and_decoder(side: Side) -> None:
    class Translation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.Transformer(DIM, 1, 2, 2, 7, dropout=0.0, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.transformer(torch.stack([x, -x], 1), torch.stack([x.tanh(), x], 1))
            return out

    train(side, side.shard(Translation(), side.x()))


class Image(nn.Module):
    """A convolution, normalisation and shuffle of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.shuffle(self.norm(self.conv(x[:, None, None, :].expand(-1, -1, 4, -1))))
        return x + torch.tanh(out.mean((1, 2))[:, ::2])


@case()
def convolutions(side: Side) -> None:
    train(side, side.shard(Stack([Image() for _ in range(2)]), side.x()))


class Transposed(nn.Module):
    """A transposed convolution over the row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.conv(x[:, None]).mean(1))


@case(variants=EVALUATED)
def transposed_convolutions(side: Side) -> None:
    train(side, side.shard(Stack([Transposed() for _ in range(2)]), side.x()))


@case(variants=PLAIN)
def batch_norm(side: Side) -> None:
    """All ranks have the same rows, as statistics are each rank's own."""
    model = side.shard(Stack([nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)) for _ in range(2)]))
    for step in range(4):
        same = side.put(torch.randn(4, DIM, generator=torch.Generator().manual_seed(step)))
        train(side, model, lambda _, same=same: mean_square(model(same)), start=step, steps=1)  # type: ignore[misc]
    model.eval()
    with torch.no_grad():
        side.log_rows("out", model(side.x(9)))


@case(variants=PLAIN, refuses="max_norm|renorm|embed")
def embedding_with_a_largest_norm(side: Side) -> None:
    """``max_norm`` writes to the weight in forward."""

    class Limited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, DIM, max_norm=0.5)
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x: torch.Tensor = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return x

    model = side.shard(Limited())
    train(side, model, lambda step: mean_square(model(side.tokens(step))))


@case(variants=PLAIN, refuses="sparse", only_on_cpu=True)
def sparse_embedding(side: Side) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, DIM, sparse=True)
            self.layers = nn.ModuleList([Block()])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers[0](self.embed(tokens))
            return out

    model = side.shard(Sparse())
    train(side, model, lambda step: mean_square(model(side.tokens(step))))


@case(variants=PLAIN)
def bilinear_and_prelu(side: Side) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bilinear, self.prelu = nn.Bilinear(DIM, DIM, DIM), nn.PReLU(DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.prelu(self.bilinear(x, x))
            return out

    train(side, side.shard(Stack([Pair() for _ in range(2)])))


class Nested(Checkpointing):
    """Stages of blocks: a ModuleList of ModuleLists, of which no inner list is ever called."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            for block in stage:
                x = self.call(block, x)
        out: torch.Tensor = self.head(x)
        return out


@case(table=True)
def list_of_lists(side: Side) -> None:
    train(side, side.shard(Nested(), side.x()))


@case(variants=ALL)
def list_of_lists_with_blocks_named(side: Side) -> None:
    train(side, side.shard(Nested(), side.x(), blocks=["stages.0", "stages.1"]))


@case()
def list_of_dictionaries(side: Side) -> None:
    class Branched(Checkpointing):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(
                nn.ModuleDict({"left": nn.Linear(DIM, DIM), "right": nn.Linear(DIM, DIM)}) for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for branch in self.branches:
                assert isinstance(branch, nn.ModuleDict)
                x = torch.tanh(self.call(branch["left"], x)) + self.call(branch["right"], x)
            return x

    train(side, side.shard(Branched(), side.x()))


@case(variants=EVALUATED)
def dictionary_of_blocks(side: Side) -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleDict({"a": Block(), "b": Block()})
            self.head = nn.Linear(DIM, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.blocks["b"](self.blocks["a"](x)))
            return out

    train(side, side.shard(Keyed(), side.x(), blocks=["blocks.a", "blocks.b"]))


@case(variants=EVALUATED)
def two_lists_of_blocks(side: Side) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList(Block() for _ in range(2))
            self.decoder = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(DIM, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.encoder:
                x = block(x)
            memory = x
            for block in self.decoder:
                x = block(x + memory)
            out: torch.Tensor = self.head(x)
            return out

    train(side, side.shard(Both(), side.x()))


@case(variants=EVALUATED)
def parallel_branches(side: Side) -> None:
    """Blocks that do not depend on one another."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([tower(x) for tower in self.towers]).sum(0)

    train(side, side.shard(Parallel(), side.x()))


@case()
def positional_table(side: Side) -> None:
    """A table of the root's own is sliced and added."""

    class Positioned(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.randn(7, DIM))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.positions[:1])

    train(side, side.shard(Positioned(), side.x()))


@case(variants=EVALUATED, refuses="output of unit|returns a parameter|table")
def module_that_returns_its_parameter(side: Side) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(7, DIM))

        def forward(self) -> torch.Tensor:
            return self.table[:1]

    class Positioned(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.positions = Table()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.positions())

    train(side, side.shard(Positioned(), side.x()))


@case(variants=EVALUATED)
def function_of_ones_own(side: Side) -> None:
    """An autograd function that saves a weight itself."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            return gradient @ weight.T, x.T @ gradient

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(DIM, DIM))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = x + torch.tanh(Product.apply(x, self.weight))
            return found

    train(side, side.shard(Stack([Own() for _ in range(3)]), side.x()))


@case(variants=EVALUATED)
def function_that_keeps_a_weight_on_its_context(side: Side) -> None:
    """Out of autograd's sight: no version is checked when it is read."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.weight = weight.detach()
            total: torch.Tensor = x * ctx.weight
            return total

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient * ctx.weight, None

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)
            self.scale = nn.Parameter(torch.full((DIM,), 0.7), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = x + torch.tanh(self.linear(Product.apply(x, self.scale)))
            return found

    train(side, side.shard(Stack([Own() for _ in range(3)]), side.x()))


@case()
def dropout_of_zero_and_attention_function(side: Side) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(DIM, 3 * DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(torch.stack([x, -x], 1)).chunk(3, -1)
            out = F.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(DIM))
            return x + F.dropout(out.mean(1), 0.0)

    train(side, side.shard(Stack([Scaled() for _ in range(2)]), side.x()))
