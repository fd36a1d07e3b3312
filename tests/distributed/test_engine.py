"""The engine over gloo against one unsharded rank, against DDP to the bit, and its collectives against torch's."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import refshard
from refshard.engine.api import engine_of
from refshard.engine.collectives import GroupCollectives
from refshard.engine.executor import Order
from refshard.engine.local_part import local_of
from refshard.engine.placement import MODES
from tests.distributed.ranks import run_ranks
from tests.engine.fakes import Net, loss_of, make_batch, make_net

pytestmark = pytest.mark.processes

STEPS = 12
ROWS = 12


def train(model: nn.Module, *, clear: bool) -> list[float]:
    """Train on this rank's rows of each batch; return the losses over all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(STEPS):
        inputs, targets = (t.chunk(world_size)[rank] for t in make_batch(step, rows=ROWS))
        loss = loss_of(model, (inputs, targets))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=clear)
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    return losses


def train_all_ways(tied: bool) -> dict[str, Any]:
    """DDP and every mode of the engine, in one launch: losses and full parameters."""
    found: dict[str, Any] = {}
    ddp = DistributedDataParallel(make_net(tied=tied))
    found["ddp"] = train(ddp, clear=True), {n: p.detach() for n, p in ddp.module.named_parameters()}
    for mode in MODES:
        # Other ranks than 0 start with other weights: shard() must give them rank 0's.
        model = make_net(seed=dist.get_rank(), tied=tied)
        refshard.shard(model, mode=mode, debug=True)
        losses = train(model, clear=mode == "fsdp")
        assert engine_of(model).executor.order is Order.FOLLOWING
        found[mode] = losses, dict(refshard.full_parameters(model))
        found[f"{mode} local"] = sum(local_of(p).numel() for p in model.parameters())
    return found


def train_alone(tied: bool) -> tuple[list[float], Net]:
    model = make_net(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, make_batch(step, rows=ROWS))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize(("world_size", "tied"), [(2, False), (3, True)])
def test_training_equals_one_rank_and_ddp(world_size: int, tied: bool) -> None:
    results = run_ranks(world_size, train_all_ways, tied)
    alone, bare = train_alone(tied)
    ddp_losses, ddp_parameters = results[0]["ddp"]
    for mode in MODES:
        losses, parameters = results[0][mode]
        assert losses == pytest.approx(alone, rel=1e-6)
        assert parameters.keys() == dict(bare.named_parameters()).keys()
        for name, value in bare.named_parameters():
            assert torch.allclose(parameters[name], value, rtol=0, atol=2e-6), (mode, name)
        if world_size == 2:
            assert losses == ddp_losses, f"{mode}: two terms have but one sum"
            assert all(torch.equal(parameters[n], p) for n, p in ddp_parameters.items())
        total = sum(p.numel() for p in bare.parameters())
        copies = world_size if MODES[mode].optimizer == "replicate" else 1
        assert sum(r[f"{mode} local"] for r in results) == total * copies, "each element lives on exactly one rank"


def call_collectives() -> dict[str, torch.Tensor]:
    group = dist.group.WORLD
    assert group is not None
    collectives = GroupCollectives(group, reducing=dist.new_group())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    full = torch.arange(world_size * 4, dtype=torch.float32) * (rank + 1)
    gathered, total, ours = torch.empty(world_size * 4), torch.empty(4), full.clone()
    works = [
        collectives.all_gather(gathered, full[:4].clone()),
        collectives.reduce_scatter(total, full),
    ]
    for work in works:
        work.wait()
    collectives.broadcast(ours)
    again = torch.empty(4)
    collectives.reduce_scatter(again, full).wait()
    own = slice(4 * rank, 4 * rank + 4)
    in_place = full.clone()
    collectives.reduce_scatter(in_place[own], in_place).wait()
    whole = torch.full((12,), float("nan"))
    collectives.all_gather(whole, whole[own].copy_(full[:4])).wait()
    largest = torch.tensor([float(rank)])
    collectives.reduce_over_shards(largest, "max")
    agreed = torch.tensor([collectives.agree(7), collectives.agree(7 + (rank == 1))])
    return {"gathered": gathered, "total": total, "again": again, "broadcast": ours, "in place": in_place[own],
            "whole": whole, "largest": largest, "agreed": agreed}  # fmt: skip


def test_collectives_mean_what_they_say() -> None:
    results = run_ranks(3, call_collectives)
    factors = torch.tensor([1.0, 2.0, 3.0])
    base = torch.arange(12, dtype=torch.float32)
    for rank, result in enumerate(results):
        assert torch.equal(result["gathered"], torch.cat([base[:4] * f for f in factors]))
        assert torch.equal(result["total"], base[4 * rank : 4 * rank + 4] * factors.sum())
        assert torch.equal(result["again"], result["total"]), "the receive buffer is used again"
        assert torch.equal(result["in place"], result["total"])
        assert torch.equal(result["whole"], result["gathered"])
        assert result["largest"].item() == 2
        assert result["agreed"].tolist() == [True, False]
        assert torch.equal(result["broadcast"], base)


def users_of_slots() -> list[bool]:
    """In each rank: whether a slot is allocated by the group that gathers to it, and by the one that reduces it."""
    world, beside = dist.group.WORLD, dist.new_group()
    apart, replicated = GroupCollectives(world, reducing=beside), GroupCollectives(None, world)
    return [
        apart.user_of(reduced=False) is world,
        apart.user_of(reduced=True) is beside,
        GroupCollectives(world, beside).user_of(reduced=True) is world,
        replicated.user_of(reduced=False) is None,
        replicated.user_of(reduced=True) is world,
    ]


def test_slots_are_allocated_by_the_group_that_uses_them() -> None:
    assert run_ranks(2, users_of_slots) == [[True] * 5] * 2


def groups_of_models(mode: str, mesh_shape: tuple[int, ...]) -> list[int]:
    """In each rank: how many process groups there are before, and with one model after another and two at a time."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    counts = [len(dist.distributed_c10d._world.pg_map)]
    for count in (1, 1, 2, 2):
        models = [refshard.shard(make_net(), mesh, mode=mode) for _ in range(count)]
        for model in models:
            loss_of(model, make_batch(0)).backward()
        counts.append(len(dist.distributed_c10d._world.pg_map))
        del models, model
        gc.collect()
    return counts


@pytest.mark.parametrize(("mode", "mesh_shape"), [("yafsdp", (2,)), ("replicate", (1, 2)), ("replicate", (2,))])
def test_all_models_share_one_group_for_reductions(mode: str, mesh_shape: tuple[int, ...]) -> None:
    own = 0 if (mode, mesh_shape) == ("replicate", (2,)) else 1
    for before, *counts in run_ranks(2, groups_of_models, mode, mesh_shape):
        assert counts == [before + own] * 4
