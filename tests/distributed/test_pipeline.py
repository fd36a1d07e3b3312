"""torch's pipeline schedules around the engine's units: stages over one axis of a mesh, shards over the other."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import refshard
from refshard.engine.api import engine_of
from refshard.engine.executor import Order
from refshard.engine.placement import MODES
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.processes

STAGES, SHARDS, MICROBATCHES, STEPS, WIDTH = 2, 2, 4, 4, 6
SCHEDULES = ("GPipe", "1F1B")


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.inner(x))
        return out


class Part(nn.Module):
    """A stretch of blocks, and a head behind the last."""

    def __init__(self, blocks: Sequence[nn.Module], head: nn.Module | None) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def make_parts() -> list[Part]:
    torch.manual_seed(3)
    blocks, head = [Block() for _ in range(6)], nn.Linear(WIDTH, 2)
    return [Part(blocks[:3], None), Part(blocks[3:], head)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = SHARDS * MICROBATCHES * 2
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, 2, generator=generator)


def trained() -> dict[tuple[str, str], tuple[dict[str, Tensor], Any]]:
    """By schedule and mode, the parameters of this rank's stage after some steps, and what the engine knows then."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    mesh = init_device_mesh("cpu", (STAGES, SHARDS), mesh_dim_names=("stage", "shard"))
    index, part = mesh["stage"].get_local_rank(), mesh["shard"].get_local_rank()
    found = {}
    for name in SCHEDULES:
        for mode in MODES:
            module = make_parts()[index]
            refshard.shard(module, mesh["shard"], mode=mode, debug=True)
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
            hidden = torch.empty(2, WIDTH)
            stage = PipelineStage(
                module, index, STAGES, torch.device("cpu"), group=mesh["stage"].get_group(),
                input_args=hidden.requires_grad_(index > 0), output_args=module(hidden).detach().requires_grad_(),
            )  # fmt: skip
            schedule = get_schedule_class(name)(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
            for step in range(STEPS):
                inputs, targets = (tensor.chunk(SHARDS)[part] for tensor in batch(step))
                schedule.step(*[inputs] * (index == 0), target=targets if index == STAGES - 1 else None)
                optimizer.step()
                optimizer.zero_grad()
            found[name, mode] = dict(refshard.full_parameters(module)), engine_of(module).executor.order
    return found


@pytest.mark.filterwarnings("error:refshard")
def test_stages_train_as_one_model_on_one_rank() -> None:
    parts = make_parts()
    model = nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        inputs, targets = batch(step)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank, found in enumerate(run_ranks(STAGES * SHARDS, trained)):
        expected = dict(parts[rank // SHARDS].named_parameters())
        for (schedule, mode), (parameters, order) in found.items():
            assert order is Order.FOLLOWING, (schedule, mode)
            assert parameters.keys() == expected.keys()
            for name, value in parameters.items():
                torch.testing.assert_close(
                    value, expected[name].detach(), rtol=1e-4, atol=1e-6, msg=f"{schedule}, {mode}, {name}"
                )
