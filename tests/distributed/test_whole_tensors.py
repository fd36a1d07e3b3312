"""Optimizers that need whole tensors, beside the same optimizers on an unsharded model with the same gradients."""

import copy
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh

import refshard
from refshard import checkpoint
from refshard.engine.placement import MODES
from refshard.errors import EngineError
from tests.distributed.ranks import run_ranks
from tests.engine.fakes import loss_of, make_batch, make_net

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
    root: torch.Tensor = (vectors * values.clamp(min=1e-6) ** -0.25) @ vectors.T
    return root


MAKES: tuple[Make, ...] = (torch.optim.Muon, torch.optim.Adafactor, Shampoo)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def whole(parameter: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = getattr(parameter, "full_tensor", parameter.detach)()
    return found


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


def grouped(model: nn.Module, lr: float | torch.Tensor) -> list[dict[str, Any]]:
    """Two groups of named parameters that lie between each other."""
    named = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    up, rest = ([(name, p) for name, p in named if ("up" in name) is chosen] for chosen in (True, False))
    return [{"params": up, "lr": 2 * lr, "weight_decay": 0.3}, {"params": rest}]


def step_as_torch_does() -> None:
    """Schedulers of rate and momentum, a tensor as rate, hooks, state that is cleared, weights that are written to."""
    lrs: tuple[Any, ...] = (0.02, torch.tensor(0.02))
    for mode, lr in itertools.product(("fsdp", "replicate"), lrs):
        beside = Beside(torch.optim.Muon, mode)
        beside.alone = torch.optim.Muon(grouped(beside.bare, lr), lr=copy.copy(lr))
        beside.optimizer = refshard.whole_tensors(
            torch.optim.Muon, beside.model, grouped(beside.model, lr), lr=copy.copy(lr)
        )
        both = (beside.alone, beside.optimizer)
        schedules = [torch.optim.lr_scheduler.OneCycleLR(o, [0.1, 0.05], total_steps=STEPS + 1) for o in both]
        called: list[str] = []
        beside.optimizer.register_step_pre_hook(lambda *_, called=called: called.append("pre"))
        beside.optimizer.register_step_post_hook(lambda *_, called=called: called.append("post"))
        for step in range(STEPS):
            beside.step(range(step, step + 1))
            for schedule in schedules:
                schedule.step()
            with torch.no_grad():
                for parameter in (*beside.bare.parameters(), *beside.model.parameters()):
                    parameter.mul_(0.99)
            for optimizer in both if step == 2 else ():
                optimizer.state.clear()
            beside.optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert called == ["pre", "post"] * STEPS
        for mine, theirs in zip(beside.optimizer.param_groups, beside.alone.param_groups):
            assert mine.keys() == theirs.keys()
            assert all(mine[key] == theirs[key] for key in mine if key != "params")


@pytest.mark.full
def test_groups_schedulers_hooks_and_clearing_are_those_of_the_optimizer_alone() -> None:
    run_ranks(2, step_as_torch_does)


class CountsInGroup(torch.optim.SGD):
    """Keeps a number for a whole group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


class ListsInState(torch.optim.SGD):
    """Keeps tensors in a list."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["factors"] = [torch.zeros(1)]
        return super().step(closure)


class Communicates(torch.optim.SGD):
    """Takes all ranks to step all tensors."""

    def step(self, closure: Any = None) -> Any:
        dist.all_reduce(torch.ones(1))
        return super().step(closure)


class Regroups(torch.optim.SGD):
    """Makes a group for each parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.param_groups = [{**group, "params": [p]} for group in self.param_groups for p in group["params"]]


def misuse() -> dict[str, str]:
    """What each misuse raises."""
    model = refshard.shard(make_net(), mode="fsdp")
    chosen = matrices(model)

    def make(kind: Make, parameters: Any = None, **options: Any) -> torch.optim.Optimizer:
        return refshard.whole_tensors(kind, model, parameters or chosen, **options)

    def step(kind: Make) -> torch.optim.Optimizer:
        optimizer = make(kind, lr=0.1)
        assign_gradients(0, chosen)
        optimizer.step()
        return optimizer

    def disagree() -> None:
        optimizer = make(torch.optim.Muon)
        assign_gradients(0, chosen)
        chosen[3].grad = None if dist.get_rank() else chosen[3].grad
        optimizer.step()

    def step_unreduced() -> None:
        unreduced = refshard.shard(make_net(), mode="fsdp", accumulation="unsharded")
        optimizer = refshard.whole_tensors(torch.optim.Adafactor, unreduced)
        with refshard.no_sync(unreduced):
            loss_of(unreduced, make_batch(0)).backward()
        optimizer.step()

    misuses: dict[str, Callable[[], object]] = {
        "not reduced": step_unreduced,
        "takes matrices only": lambda: refshard.whole_tensors(torch.optim.Muon, model),
        "calls its closure": lambda: make(torch.optim.LBFGS),
        "another's parameter": lambda: make(torch.optim.Muon, [nn.Parameter(torch.ones(2, 2))]),
        "one more group": lambda: make(torch.optim.Muon).add_param_group({"params": []}),
        "not sharded": lambda: refshard.whole_tensors(torch.optim.Muon, make_net()),
        "counts in its groups": lambda: step(CountsInGroup),
        "lists in its state": lambda: step(ListsInState).state_dict(),
        "communicates": lambda: step(Communicates),
        "copied": lambda: copy.deepcopy(make(torch.optim.Muon)),
        "regroups": lambda: make(Regroups, lr=0.1),
        "disagree": disagree,
    }
    found = {}
    for name, call in misuses.items():
        with pytest.raises((EngineError, ValueError)) as caught:
            call()
        found[name] = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    return found


MISUSES = {
    "not reduced": "gradient of 'embed.weight' .*, which is not reduced over ranks yet",
    "takes matrices only": r"only supports 2D(.|\n)*parameters=\[p for p in model\.parameters\(\) if p\.ndim == 2\]",
    "calls its closure": "LBFGS calls its closure",
    "another's parameter": r"of shape \(2, 2\) is not the sharded model's",
    "one more group": r"whole_tensors\(Muon\): a parameter group cannot be added",
    "not sharded": "the model is not sharded",
    "counts in its groups": r"changes 'steps' of its parameter groups in a step \(from None to 1\)",
    "lists in its state": "state 'factors' of 'embed.weight' .* is a list of tensors",
    "communicates": "Communicates communicates in a step",
    "copied": r"whole_tensors\(Muon\) cannot be copied or pickled",
    "regroups": "Regroups changes its parameter groups",
    "disagree": "rank . steps other parameters than another rank does",
}


def test_what_owners_cannot_compute_is_refused_on_every_rank() -> None:
    for found in run_ranks(2, misuse):
        assert found.keys() == MISUSES.keys()
        for name, pattern in MISUSES.items():
            assert re.search(pattern, found[name]), found[name]


def through_torch(folder: Path) -> None:
    """State as torch's functions give it, whole and in parts, is that of the optimizer alone, and comes back."""
    for make, mode in itertools.product(MAKES, ("fsdp", "replicate")):
        beside, other = Beside(make, mode), Beside(make, mode, lr=9.0)
        beside.step(range(STEPS))
        whole_state = get_optimizer_state_dict(
            beside.model, beside.optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if dist.get_rank() == 0:
            assert_whole(whole_state["state"], beside)
        state = {"optimizer": get_optimizer_state_dict(beside.model, beside.optimizer)}
        dcp_save(state, checkpoint_id=folder / f"{make.__name__} {mode}")
        read = {"optimizer": get_optimizer_state_dict(other.model, other.optimizer)}
        dcp_load(read, checkpoint_id=folder / f"{make.__name__} {mode}")
        everywhere = [whole_state]
        dist.broadcast_object_list(everywhere)
        for given, full in ((read["optimizer"], False), (everywhere[0], True)):
            beside.optimizer = refshard.whole_tensors(make, beside.model, matrices(beside.model), lr=9.0)
            kept = copy.deepcopy((beside.bare.state_dict(), beside.alone.state_dict()))
            parts = [p.detach().clone() for p in beside.model.parameters()]
            options = StateDictOptions(full_state_dict=full)
            beside.optimizer.zero_grad()  # torch makes state to load into by a step only where there is no gradient
            set_optimizer_state_dict(beside.model, beside.optimizer, given, options=options)
            beside.step(range(STEPS, STEPS + 2))
            beside.bare.load_state_dict(kept[0])
            beside.alone.load_state_dict(kept[1])
            with torch.no_grad():
                for parameter, part in zip(beside.model.parameters(), parts):
                    parameter.copy_(part)


def assert_whole(state: Any, beside: Beside) -> None:
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in beside.bare.named_parameters()}
    for parameter, expected in beside.alone.state.items():
        found = state[names[parameter]]
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), f"{names[parameter]}: {key}"


def test_torchs_state_dict_functions_see_all_state(tmp_path: Path) -> None:
    run_ranks(2, through_torch, tmp_path)


def save_a_part(folder: Path) -> str:
    beside = Beside(torch.optim.Muon, "fsdp")
    beside.step(range(2))
    kept, weights = copy.deepcopy(beside.optimizer.state_dict()), copy.deepcopy(beside.model.state_dict())
    alone = copy.deepcopy((beside.bare.state_dict(), beside.alone.state_dict()))
    beside.step(range(2, 4))
    beside.optimizer.load_state_dict(kept)
    beside.model.load_state_dict(weights)
    beside.bare.load_state_dict(alone[0])
    beside.alone.load_state_dict(alone[1])
    beside.step(range(2, 4))
    with pytest.raises(EngineError) as caught:
        torch.save(beside.optimizer.state_dict(), folder / f"{dist.get_rank()}.pt")
    return str(caught.value)


def test_a_state_dict_comes_back_and_is_never_saved_in_part(tmp_path: Path) -> None:
    for message in run_ranks(2, save_a_part, tmp_path):
        assert "momentum_buffer' of shape" in message
        assert "cannot be pickled or saved by torch.save" in message
