"""Ranks with a GPU each, over NCCL: every mode against one unsharded rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import refshard
from refshard.engine.placement import MODES
from tests.distributed.ranks import run_ranks
from tests.gpu.needs import needs_values
from tests.gpu.threads import no_pause
from tests.gpu.training import furthest, make_model, train, train_alone

COUNTS = [pytest.param(count, marks=pytest.mark.gpu(count=count), id=f"{count} GPUs") for count in (2, 8)]
WAYS = {**{mode: (mode, False) for mode in MODES}, "hybrid": ("yafsdp", True)}
"""By name, a mode and whether half of the ranks replicate what the other half shards."""

pytestmark = [pytest.mark.processes, needs_values]


def distances() -> dict[str, float]:
    """How far this rank's parameters are after training in each way from those of unsharded training."""
    device = torch.device("cuda", torch.cuda.current_device())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone = train_alone(device)
    halves = init_device_mesh("cuda", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    found = {}
    for name, (mode, hybrid) in WAYS.items():
        model = make_model(no_pause).to(device)
        refshard.shard(model, halves if hybrid else None, mode=mode, debug=True)
        train(model, device, rank, ranks, no_pause)
        found[name] = furthest({key: value.cpu() for key, value in refshard.full_parameters(model)}, alone)
    return found


@pytest.fixture(scope="module", params=COUNTS)
def found(request: pytest.FixtureRequest) -> list[dict[str, float]]:
    ranks: list[dict[str, float]] = run_ranks(request.param, distances, backend="nccl")
    return ranks


@pytest.mark.parametrize("way", list(WAYS))
def test_training_equals_one_rank(found: list[dict[str, float]], way: str) -> None:
    assert max(ranks[way] for ranks in found) < 2e-5
