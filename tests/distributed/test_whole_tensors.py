"""Optimizers that need whole tensors, beside the same optimizers on an unsharded model with the same gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import refshard
from refshard.plan.placement import MODES
from tests.distributed.ranks import run_ranks
from tests.engine.fakes import make_net

pytestmark = pytest.mark.processes

STEPS = 4


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return getattr(parameter, "full_tensor", parameter.detach)()


def assign_gradients(step: int, *models: list[nn.Parameter]) -> None:
    """The same gradients to all; some parameters have none in one step."""
    generator = torch.Generator().manual_seed(step)
    for index, alike in enumerate(zip(*models)):
        gradient = torch.randn(alike[0].shape, generator=generator)
        for parameter in alike:
            parameter.grad = None if step == 2 and index % 3 == 1 else gradient.clone()


def step_beside_unsharded(
    make: Callable[..., torch.optim.Optimizer], mode: str, replicas: int = 1, **options: Any
) -> int:
    """How many tensors this rank keeps state of, once every step has left the same bits on both sides."""
    bare, model = make_net(), make_net()
    sizes = (replicas, dist.get_world_size() // replicas)
    refshard.shard(model, init_device_mesh("cpu", sizes) if replicas > 1 else None, mode=mode, **options)
    alone = make(matrices(bare), lr=0.02)
    optimizer = refshard.whole_tensors(make, model, matrices(model), lr=0.02)
    for step in range(STEPS):
        assign_gradients(step, matrices(bare), matrices(model))
        alone.step()
        optimizer.step()
        for mine, theirs in zip(model.parameters(), bare.parameters()):
            assert torch.equal(whole(mine), theirs), f"{mode}, step {step}"
    return sum(bool(state) for state in optimizer.state.values())


def step_in_every_mode() -> dict[tuple[str, str], int]:
    return {
        (make.__name__, mode): step_beside_unsharded(make, mode)
        for make in (torch.optim.Muon, torch.optim.Adafactor)
        for mode in MODES
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_is_equal_to_the_bit_to_that_of_unsharded_parameters(world_size: int) -> None:
    """And each tensor's state is on one rank; on every rank where nothing is sharded."""
    ranks = run_ranks(world_size, step_in_every_mode)
    tensors = len(matrices(make_net()))
    for (name, mode), mine in ranks[0].items():
        owned = [found[name, mode] for found in ranks]
        assert sum(owned) == tensors * (world_size if MODES[mode].optimizer == "replicate" else 1)
        assert mine > 0
