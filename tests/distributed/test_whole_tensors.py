"""Optimizers that need whole tensors, beside the same optimizers on an unsharded model with the same gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import refshard
from refshard import checkpoint
from refshard.plan.placement import MODES
from tests.distributed.ranks import run_ranks
from tests.engine.fakes import make_net

pytestmark = pytest.mark.processes

STEPS = 4
REPLICATED = [mode for mode in MODES if MODES[mode].optimizer == "replicate"]
Make = Callable[..., torch.optim.Optimizer]


class Shampoo(torch.optim.Optimizer):
    """A preconditioner for each dimension of a matrix, and momentum: state of three shapes, and a number."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self._direction(parameter.grad, self.state[parameter]), alpha=group["lr"])

    def _direction(self, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        rows = gradient.reshape(len(gradient), -1)
        if not state:
            state.update(left=torch.eye(rows.shape[0]), right=torch.eye(rows.shape[1]))
            state.update(momentum=torch.zeros_like(gradient), step=torch.tensor(0.0), steps=0)
        state["step"] += 1
        state["steps"] += 1
        state["left"] += rows @ rows.T
        state["right"] += rows.T @ rows
        found = _inverse_root(state["left"]) @ rows @ _inverse_root(state["right"])
        state["momentum"].mul_(0.9).add_(found.view_as(gradient))
        direction: torch.Tensor = state["momentum"] / state["steps"]
        return direction


def _inverse_root(matrix: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=1e-6) ** -0.25) @ vectors.T


MAKES: tuple[Make, ...] = (torch.optim.Muon, torch.optim.Adafactor, Shampoo)


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


class Beside:
    """A sharded model and an unsharded one, whose optimizers get the same gradients."""

    def __init__(self, make: Make, mode: str, replicas: int = 1, lr: float = 0.02, **options: Any) -> None:
        self.bare, self.model = make_net(), make_net()
        sizes = (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh("cpu", sizes) if replicas > 1 else None
        refshard.shard(self.model, mesh, mode=mode, **options)
        self.alone = make(matrices(self.bare), lr=lr)
        self.optimizer = refshard.whole_tensors(make, self.model, matrices(self.model), lr=lr)

    def step(self, steps: range) -> None:
        for step in steps:
            assign_gradients(step, matrices(self.bare), matrices(self.model))
            self.alone.step()
            self.optimizer.step()
            self.check(f"step {step}")

    def check(self, when: str) -> None:
        """Raise unless both have the same bits."""
        for mine, theirs in zip(self.model.parameters(), self.bare.parameters()):
            assert torch.equal(whole(mine), theirs), when


def step_in_every_mode() -> dict[tuple[str, str], int]:
    """How many tensors this rank has state of, by optimizer and mode."""
    found = {}
    for make in MAKES:
        for mode in MODES:
            beside = Beside(make, mode)
            beside.step(range(STEPS))
            found[make.__name__, mode] = sum(bool(state) for state in beside.optimizer.state.values())
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_is_equal_to_the_bit_to_that_of_unsharded_parameters(world_size: int) -> None:
    """And each tensor's state is on one rank; on every rank where nothing is sharded."""
    ranks = run_ranks(world_size, step_in_every_mode)
    tensors = len(matrices(make_net()))
    for (name, mode), mine in ranks[0].items():
        owned = [found[name, mode] for found in ranks]
        assert sum(owned) == tensors * (world_size if mode in REPLICATED else 1)
        assert mine > 0


def step_with_replicas_and_offload() -> None:
    for mode in MODES:
        Beside(torch.optim.Muon, mode, replicas=2).step(range(STEPS))
    Beside(torch.optim.Muon, "fsdp", offload=True).step(range(STEPS))


@pytest.mark.full
def test_a_step_over_a_mesh_of_two_axes_and_with_offload() -> None:
    run_ranks(4, step_with_replicas_and_offload)


def save_all(folder: Path) -> None:
    for make in MAKES:
        for mode in ("fsdp", "replicate"):
            beside = Beside(make, mode)
            beside.step(range(STEPS))
            checkpoint.save(folder / f"{make.__name__} {mode}", beside.model, beside.optimizer)


def resume_all(folder: Path, modes: tuple[str, ...], saved: str) -> None:
    """Go on from what other ranks have saved, beside an unsharded run that has never stopped."""
    for make in MAKES:
        for mode in modes:
            beside = Beside(make, mode, lr=9.0)
            beside.alone.param_groups[0]["lr"] = 0.02
            for step in range(STEPS):
                assign_gradients(step, matrices(beside.bare))
                beside.alone.step()
            checkpoint.load(folder / f"{make.__name__} {saved}", beside.model, beside.optimizer)
            beside.check("loaded")
            beside.step(range(STEPS, 2 * STEPS))


def test_a_checkpoint_resumes_under_other_modes_and_world_sizes_to_the_bit(tmp_path: Path) -> None:
    """The owners change with the world size, and there are none where nothing is sharded."""
    run_ranks(2, save_all, tmp_path)
    run_ranks(3, resume_all, tmp_path, ("zero1", "yafsdp", "replicate"), "fsdp")
    run_ranks(2, resume_all, tmp_path, ("fsdp", "zero2"), "replicate")
