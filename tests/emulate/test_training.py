"""DDP, FSDP2 and the engine train unchanged as one rank of eight, and their traces show what they announce."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import refshard
from refshard.analysis.kineto import read_timeline
from refshard.analysis.overlap import collectives_per_step
from refshard.analysis.recording import WARMUP_STEPS, capture_steps
from refshard.emulate.process_group import emulated_world
from refshard.emulate.world import EmulatedWorld
from refshard.engine.placement import MODES
from refshard.events.timeline import Kind
from refshard.measure.trainer import Trainer
from refshard.records import CollectiveCount
from refshard.specs.case import Case
from refshard.strategies import make_strategy
from tests.emulate import FAST, make_cluster
from tests.models import small_spec

WORLD, STEPS = 8, 3
ENGINE = tuple(f"refshard-{mode}" for mode in MODES)


def world(library: str = "nccl") -> EmulatedWorld:
    return EmulatedWorld(make_cluster(library, **FAST), rank=0, world_size=WORLD)


def trainer(strategy: Any, name: str, group: dist.ProcessGroup, **changes: Any) -> Trainer:
    fields: dict[str, Any] = {"model": "llama-tiny", "global_batch": WORLD, "seq_len": 16, "device": "cpu", **changes}
    case = Case.of(strategy=name, gpus=WORLD, fidelity="emulated", cluster="by-hand", threads_per_rank=1, **fields)
    return Trainer(case, small_spec(), strategy, group, torch.device("cpu"))


@pytest.mark.parametrize("library", ["nccl", "gloo"])
@pytest.mark.parametrize("name", ["ddp", "fsdp1", "fsdp1-grad-op", "fsdp2", "fsdp2-tuned", *ENGINE])
def test_every_strategy_trains_and_its_trace_holds_what_it_announces(tmp_path: Path, name: str, library: str) -> None:
    strategy = make_strategy(name)
    with emulated_world(world(library)) as group:
        made = trainer(strategy, name, group)
        for _ in range(STEPS):
            made.timed_step(aligned=True)  # which refuses a loss that is not finite
        with capture_steps(tmp_path / "trace.json", 1, all_threads=True) as profiler:
            for _ in range(WARMUP_STEPS + 1):
                made.timed_step(aligned=False)
                profiler.step()
        announced = strategy.announced()
    timeline = read_timeline(tmp_path / "trace.json")
    (issued,) = collectives_per_step(timeline).values()
    assert tuple(CollectiveCount(op=op, count=count, bytes=size) for op, count, size in issued) == announced
    exchanges = library == "gloo" and name in ("fsdp2-tuned", *ENGINE) and name != "refshard-replicate"
    assert ("all_to_all" in {one.op for one in announced}) == exchanges
    ran = [one for one in timeline.collectives if one.start is not None]
    assert len(ran) == sum(one.count for one in announced)
    assert all(one.lane and one.lane.startswith("emulated ") for one in ran)
    told = {"unsigned char"} if name in ENGINE else set()  # which parameters were used
    assert {one.dtype for one in ran} == {"float"} | told
    assert all(one.launched is not None and one.launched <= (one.start or 0) < (one.end or 0) for one in ran)
    assert len(set(made.losses)) > 1, "the weights must move"
    if name.startswith(("fsdp2", "refshard")):
        assert {one.unit for one in ran} >= {f"model.layers.{layer}" for layer in range(3)}
    assert timeline.busy(Kind.COMM).length > 0


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "refshard-yafsdp"])
def test_inference_and_accumulation_too(name: str) -> None:
    for changes in ({"workload": "inference"}, {"microbatches": 2, "global_batch": 2 * WORLD}):
        with emulated_world(world()) as group:
            made = trainer(make_strategy(name), name, group, **changes)
            for _ in range(2):
                made.timed_step(aligned=True)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3)))


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.ones(4, 24)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True), losses


def sharded_by_fsdp2(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


@pytest.mark.parametrize("library", ["nccl", "gloo"])
@pytest.mark.parametrize("mode", [*MODES, "fsdp2"])
def test_a_mesh_of_two_axes_trains(mode: str, library: str) -> None:
    """The loss falls, too: the gradients that arrive are those of the weights that were gathered."""
    with emulated_world(world(library)):
        mesh, model = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard")), layers()
        if mode == "fsdp2":
            train(sharded_by_fsdp2(model, mesh))
        else:
            train(refshard.shard(model, mesh, mode=mode, blocks=["0", "1", "2"]))


def test_a_subgroup_trains_with_ddp() -> None:
    with emulated_world(world()):
        train(DistributedDataParallel(layers(), process_group=dist.new_group([0, 3, 6])))
