"""Local parts over several ranks: operators, torch's checkpoints and state-dict functions, against whole tensors."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import refshard
from refshard.engine.local_part import LocalPart
from refshard.engine.placement import MODES
from refshard.errors import EngineError
from refshard.models.llama import Llama, next_token_loss
from refshard.strategies.tensor_parallel import split
from tests.distributed.ranks import run_ranks
from tests.distributed.test_split import make_model, tokens
from tests.engine.fakes import Net, loss_of, make_batch, make_net

pytestmark = pytest.mark.processes

dcp: Any = torch_checkpoint
WORLD_SIZES = [2, pytest.param(3, marks=pytest.mark.full)]
ROWS = 6
FULL, ON_CPU = StateDictOptions(full_state_dict=True), StateDictOptions(full_state_dict=True, cpu_offload=True)
Tensors = dict[str, torch.Tensor]


def rows_of(step: int) -> tuple[torch.Tensor, ...]:
    return tuple(t.chunk(dist.get_world_size())[dist.get_rank()] for t in make_batch(step, rows=ROWS))


def trained(mode: str, steps: int = 2, seed: int = 0) -> tuple[Net, torch.optim.AdamW]:
    model = make_net(seed)
    refshard.shard(model, mode=mode, debug=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        loss_of(model, rows_of(step)).backward()  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, LocalPart | DTensor) else value


def wholes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Tensors:
    """Parameters, and optimizer state, whole, by name."""
    found = dict(refshard.full_parameters(model))
    for name, parameter in model.named_parameters() if optimizer is not None else ():
        assert optimizer is not None
        found.update({f"{name}/{k}": whole(v) for k, v in optimizer.state[parameter].items()})
    return found


def same(found: Any, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(
        type(found[n]) is torch.Tensor and found[n].shape == v.shape and torch.equal(found[n], v)
        for n, v in expected.items()
    )


# Operators


def alone(step: int = 0, penalty: Callable[[nn.Module], torch.Tensor] | None = None) -> Net:
    bare = make_net()
    loss = loss_of(bare, make_batch(step, rows=ROWS))
    (loss if penalty is None else loss + penalty(bare)).backward()
    return bare


def l2(model: nn.Module) -> torch.Tensor:
    """The penalty that one adds to the loss; of some a plain sum, whose gradient autograd gives as a plain tensor."""
    terms = (p.sum() if p.ndim == 1 else p.pow(2).sum() for p in model.parameters())
    return 0.01 * sum(terms, torch.zeros(()))


def use_operators() -> dict[str, dict[str, Any]]:
    """Per mode what a training loop that looks at parameters and gradients finds."""
    found: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        report = found[mode] = {}
        model = make_net()
        model.embed.weight.is_embedding = True  # type: ignore[attr-defined]
        refshard.shard(model, mode=mode, debug=True)
        assert model.embed.weight.is_embedding  # type: ignore[attr-defined]
        report["shapes"] = [(p.shape, p.ndim, p.numel()) for p in model.parameters()]
        if MODES[mode].optimizer == "shard":
            # In the other modes a gradient that is not the engine's own is its executor's affair.
            (loss_of(model, rows_of(0)) + l2(model)).backward()  # type: ignore[arg-type]
            report["penalty"] = [whole(p.grad) for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        loss_of(model, rows_of(0)).backward()  # type: ignore[arg-type]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        report["norms"] = [
            (g.norm().item(), g.detach().norm().item(), g.data.double().view(-1).norm().item(),
             g.pow(2).sum().sqrt().item(), torch.linalg.vector_norm(g, 2).item())
            for g in gradients
        ]  # fmt: skip
        report["mean and max"] = [(p.mean().item(), p.abs().max().item()) for p in model.parameters()]
        for p in model.parameters():
            assert p.grad is not None
            p.grad = p.grad + torch.ones(p.shape)
        report["clipped"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        with torch.no_grad():
            for p in model.parameters():
                p.data.mul_(0.5)  # a hand-written optimizer
        report["loss"] = loss_of(model, make_batch(1, rows=ROWS)).item()
        report["whole"] = [whole(p) for p in model.parameters()]
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_training_loop_sees_whole_tensors(world_size: int) -> None:
    bare, penalised = alone(), alone(penalty=l2)
    gradients = [p.grad for p in bare.parameters() if p.grad is not None]
    norms = [g.norm().item() for g in gradients]
    noisy = torch.cat([g.flatten() + 1 for g in gradients]).norm().item()
    shapes = [(p.shape, p.ndim, p.numel()) for p in bare.parameters()]
    values = [(p.mean().item(), p.abs().max().item()) for p in bare.parameters()]
    with torch.no_grad():
        for p in bare.parameters():
            p.mul_(0.5)
    loss = loss_of(bare, make_batch(1, rows=ROWS)).item()
    for found in run_ranks(world_size, use_operators):
        for mode, report in found.items():
            assert report["shapes"] == shapes
            for of_one, norm in zip(report["norms"], norms, strict=True):
                assert of_one == pytest.approx([norm] * 5, rel=1e-5), mode
            for mine, theirs in zip(report["mean and max"], values, strict=True):
                assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-7)
            assert report["clipped"] == pytest.approx(noisy, rel=1e-5)
            assert report["loss"] == pytest.approx(loss, rel=1e-6), f"{mode}: what was written did not reach the model"
            for mine, p in zip(report["whole"], bare.parameters(), strict=True):
                assert torch.equal(mine, p)
            for mine, p in zip(report.get("penalty", []), penalised.parameters()):
                torch.testing.assert_close(mine, p.grad, rtol=1e-4, atol=1e-6)


def read_wholes() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The whole of each parameter, and this rank's part, whole again, of the gradient of what is computed from it."""
    found = []
    for shape in (None, (dist.get_world_size() // 2, 2)) if dist.get_world_size() % 2 == 0 else (None,):
        model = make_net()
        refshard.shard(model, shape and init_device_mesh("cpu", shape), mode="fsdp")
        for parameter in model.parameters():
            part: Any = parameter
            (part.full_tensor().square() * (dist.get_rank() + 1)).sum().backward()
            assert type(part.grad) is LocalPart
            found.append((whole(part), whole(part.grad)))
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_whole_is_differentiable_and_its_gradient_the_mean_over_ranks(world_size: int) -> None:
    expected = list(make_net().parameters())
    mean = sum(range(1, world_size + 1)) / world_size
    for found in run_ranks(world_size, read_wholes):
        assert len(found) % len(expected) == 0
        for (value, gradient), p in zip(found, expected * 2):
            assert torch.equal(value, p)
            torch.testing.assert_close(gradient, 2 * mean * p.detach())


# torch.distributed.checkpoint


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def load_into(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def save_by_torch(folder: Path) -> dict[Any, Any]:
    """Save under each mode, at once and in the background, and load in other ways."""
    found: dict[Any, Any] = {}
    for mode in ("fsdp", "zero1", "replicate"):
        model, optimizer = trained(mode)
        found["expected"] = wholes(model, optimizer)
        dcp.save(state_of(model, optimizer), checkpoint_id=folder / mode)
        pending = dcp.async_save(state_of(model, optimizer), checkpoint_id=folder / f"{mode} async")
        pending.result()
        for name in (mode, f"{mode} async"):
            for other in ("yafsdp", "replicate"):
                fresh, theirs = trained(other, steps=1, seed=1)
                load_into(folder / name, fresh, theirs)
                found[name, other] = wholes(fresh, theirs)
        resumed, theirs = trained("zero2", steps=1, seed=1)
        refshard.checkpoint.load(folder / mode, resumed, theirs)
        found[mode, "refshard.checkpoint"] = wholes(resumed, theirs)
    refshard.checkpoint.save(folder / "ours", model, optimizer)
    return found


def load_in_fsdp2(folder: Path) -> dict[str, Tensors]:
    found = {}
    for path in sorted(folder.iterdir()):
        model: nn.Module = make_net(seed=1)
        for block in model.layers:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        load_into(path, model, optimizer)
        ours, _ = trained("fsdp", steps=1, seed=1)
        ours.load_state_dict(model.state_dict())  # DTensors are gathered
        assert same(wholes(ours), {n: whole(p) for n, p in model.named_parameters()})
        found[path.name] = {n: whole(p) for n, p in model.named_parameters()} | {
            f"{n}/{k}": whole(v) for n, p in model.named_parameters() for k, v in optimizer.state[p].items()
        }
    return found


def load_in_another_world(folder: Path) -> dict[str, Tensors]:
    found = {}
    for path in sorted(folder.iterdir()):
        model, optimizer = trained("fsdp", steps=1, seed=1)
        load_into(path, model, optimizer)
        found[path.name] = wholes(model, optimizer)
    return found


def test_torchs_own_checkpoints_hold_the_whole_and_load_anywhere(tmp_path: Path) -> None:
    reports = run_ranks(2, save_by_torch, tmp_path)
    expected = reports[0].pop("expected")
    for report in reports:
        report.pop("expected", None)
        for how, found in report.items():
            assert same(found, expected), how
    for found in (*run_ranks(3, load_in_another_world, tmp_path), *run_ranks(2, load_in_fsdp2, tmp_path)):
        assert found.keys() == {"fsdp", "fsdp async", "ours", "replicate", "replicate async", "zero1", "zero1 async"}
        for name, values in found.items():
            assert same(values, expected), name
    bare = make_net(seed=1)
    dcp.load({"model": bare.state_dict()}, checkpoint_id=tmp_path / "fsdp", no_dist=True)
    assert all(torch.equal(p, expected[n]) for n, p in bare.named_parameters())


# torch.distributed.checkpoint.state_dict


def broadcast(model: nn.Module, full: Tensors, _: Tensors) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(full) if dist.get_rank() == 0 else {}, options=options)


LOADS: dict[str, Callable[[nn.Module, Tensors, Tensors], object]] = {
    "load_state_dict": lambda model, full, _: model.load_state_dict(full),
    "load_state_dict of parts": lambda model, _, parts: model.load_state_dict(parts),
    "set_model_state_dict": lambda model, full, _: set_model_state_dict(model, dict(full), options=FULL),
    "broadcast": broadcast,
}


def use_state_dict_functions() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for mode in ("fsdp", "zero1", "replicate"):
        model, optimizer = trained(mode)
        expected, everything = wholes(model), wholes(model, optimizer)
        # Where nothing is sharded it shares the parameters' memory, as a bare model's does.
        full: Any = copy.deepcopy(get_model_state_dict(model, options=FULL))
        found[mode, "full"] = same(full, expected)
        on_cpu = get_model_state_dict(model, options=ON_CPU)
        found[mode, "full on the CPU"] = same(on_cpu, expected) if dist.get_rank() == 0 else not on_cpu
        found[mode, "a module's"] = same(
            get_model_state_dict(model.layers[1], options=FULL),
            {n.removeprefix("layers.1."): v for n, v in expected.items() if n.startswith("layers.1.")},
        )
        torch.save(full, io.BytesIO())
        for what in (model.state_dict(), optimizer.state_dict(), model.embed.weight) if mode != "replicate" else ():
            with pytest.raises(EngineError, match="full_state_dict"):
                torch.save(what, io.BytesIO())
        state: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL))
        found[mode, "optimizer"] = all(
            torch.equal(value, everything[f"{name}/{key}"]) and type(value) is torch.Tensor
            for name, values in state["state"].items()
            for key, value in values.items()
        )
        parts: Any = model.state_dict()
        for name, load in LOADS.items():
            other, theirs = trained(mode, steps=1, seed=1)
            load(other, full, parts)
            found[mode, name] = same(wholes(other), expected)
            set_optimizer_state_dict(other, theirs, copy.deepcopy(state), options=FULL)
            for m, o in ((model, optimizer), (other, theirs)):
                loss_of(m, rows_of(7)).backward()  # type: ignore[arg-type]
                o.step()
                o.zero_grad()
            found[mode, name, "goes on"] = same(wholes(other), wholes(model))
            model.load_state_dict(full)
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=FULL)
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_torchs_state_dict_functions_gather_and_distribute(world_size: int) -> None:
    for found in run_ranks(world_size, use_state_dict_functions):
        assert [how for how, right in found.items() if not right] == []


# Recurrent modules, and what cannot be put in place


class Recurrent(nn.Module):
    """A block of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.LSTM(5, 5, batch_first=True), nn.GRU(5, 5, 2, batch_first=True), nn.RNN(5, 5, batch_first=True)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


def train_recurrent(sharded: bool) -> list[float]:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    losses = []
    for mode in MODES if sharded else ("",):
        torch.manual_seed(0)
        model = Recurrent()
        if sharded:
            refshard.shard(model, mode=mode, debug=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(4):
            x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach().double()
        if sharded:
            dist.all_reduce(total)
        losses.append(total.item() / world_size)
    return losses


def test_recurrent_modules_train() -> None:
    (expected,) = train_recurrent(sharded=False)
    for losses in run_ranks(2, train_recurrent, True):
        assert losses == pytest.approx([expected] * len(MODES), rel=1e-5)


# Tensor parallelism, and replicas


def split_and_sharded(seed: int = 0) -> tuple[Llama, torch.optim.AdamW]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    split(model, mesh["tensor"])
    refshard.shard(model, mesh["shard"], mode="fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = tokens().chunk(2)[mesh["shard"].get_local_rank()]
    next_token_loss(model(rows), rows).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def checkpoint_split(folder: Path) -> dict[str, Any]:
    model, optimizer = split_and_sharded()
    expected = wholes(model, optimizer)
    refshard.checkpoint.save(folder / "ours", model, optimizer)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "torchs")
    other, theirs = split_and_sharded(seed=1)
    refshard.checkpoint.load(folder / "ours", other, theirs)
    found = {"ours": same(wholes(other, theirs), expected)}
    again, _ = split_and_sharded(seed=1)
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=folder / "torchs")
    found["torchs"] = same(wholes(again), wholes(model))
    found["full"] = same(get_model_state_dict(model, options=FULL), wholes(model))
    found["gathered"] = all(torch.equal(whole(p), wholes(model)[n]) for n, p in model.named_parameters())
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net, fresh = (refshard.shard(make_net(seed), hybrid, mode="yafsdp") for seed in (0, 1))
    refshard.checkpoint.save(folder / "hybrid", net)
    dcp.load(state := {"model": fresh.state_dict()}, checkpoint_id=folder / "hybrid")
    found["hybrid"] = same(wholes(fresh), wholes(net)) and same(get_model_state_dict(fresh, options=FULL), wholes(net))
    return {**found, "expected": wholes(model), "names": sorted(state["model"])}


def test_what_is_divided_over_two_axes_is_saved_and_loaded_whole(tmp_path: Path) -> None:
    reports = run_ranks(4, checkpoint_split, tmp_path)
    for report in reports:
        assert [how for how, right in report.items() if how not in ("expected", "names") and not right] == []
        assert report["names"] == sorted(make_net().state_dict())
    for name in ("ours", "torchs"):
        bare = make_model()
        dcp.load({"model": bare.state_dict()}, checkpoint_id=tmp_path / name, no_dist=True)
        assert same(dict(bare.state_dict()), reports[0]["expected"])
