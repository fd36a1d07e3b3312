"""Host time that sharding adds to a step: the engine and torch's FSDP2, over the same 32 tiny blocks.

Collectives go to torch's fake process group of 8 ranks and cost nothing, and the blocks are so small that a step is
little but Python: what is measured is what a GPU's host would spend beside launching kernels. The ways take turns in
every round, so that drift of the machine favours none; what a step adds is its time less that of the bare model in the
same round.

    pytest suites/bench_host_time.py --benchmark-json=host_time.json
"""

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import refshard

WORLD_SIZE = 8
BLOCKS = 32
ROUNDS = 40
WARM_UP = 5
WAYS = ("bare", "fsdp2", "refshard-fsdp", "refshard-yafsdp")


class Block(nn.Module):
    """As many parameters as a block of a Llama has, and hardly any elements."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes as they come."""
        y = self.norm(x)
        x = x + self.o(self.q(y) * self.k(y) + self.v(y))
        y = self.second_norm(x)
        out: torch.Tensor = x + self.down(self.gate(y) * self.up(y))
        return out


class Model(nn.Module):
    """The blocks, and a head."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(BLOCKS))
        self.head = nn.Linear(dim, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes as they come."""
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def make(way: str) -> Model:
    """The same model, sharded that way."""
    torch.manual_seed(0)
    model = Model()
    if way == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif way != "bare":
        refshard.shard(model, mode=way.removeprefix("refshard-"))
    return model


def step(model: nn.Module, x: torch.Tensor) -> float:
    """Forward, backward and the gradients let go; seconds."""
    started = time.perf_counter()
    model(x).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    return time.perf_counter() - started


@pytest.fixture
def _fake_process_group() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_fake_process_group")
def test_host_time(benchmark: Any) -> None:
    """The benchmark's own figure is refshard-yafsdp's step; ``extra_info`` holds what each way adds, and ratios."""
    models = {way: make(way) for way in WAYS}
    x = torch.randn(4, 32)
    rounds = [{way: step(model, x) for way, model in models.items()} for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
    added = {way: median(times[way] - times["bare"] for times in rounds) for way in WAYS[1:]}
    ratios = {way: added[way] / added["fsdp2"] for way in WAYS[2:]}
    benchmark.extra_info.update(added_s=added, ratio_to_fsdp2=ratios, rounds=ROUNDS, blocks=BLOCKS)
    benchmark.pedantic(step, args=(models["refshard-yafsdp"], x), rounds=5, warmup_rounds=1)
    lines = [f"{way:<16} adds {seconds * 1e3:6.2f} ms a step" for way, seconds in added.items()]
    lines += [f"{way:<16} / fsdp2 = {ratio:.3f}" for way, ratio in ratios.items()]
    print("\n" + "\n".join(lines))
    assert all(seconds > 0 for seconds in added.values()), "a sharded step cannot be faster than the bare one here"
