"""What the engine asks of NCCL, on one GPU: groups of one rank are kept, so that every collective is really issued.

On the CPU gloo stands where NCCL does; on the fake device, its own NCCL.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import refshard
from refshard.engine.api import engine_of
from refshard.engine.collectives import GroupCollectives, group_beside
from refshard.engine.executor import Order
from refshard.engine.placement import MODES
from tests.engine.fakes import loss_of, make_batch
from tests.gpu.needs import needs_values
from tests.gpu.threads import no_pause
from tests.gpu.training import furthest, make_model, train, train_alone

pytestmark = needs_values
GATHER, SCATTER, SUM = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[torch.device]:
    """The device of the only rank of a process group."""
    on = torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")
    dist.init_process_group(
        "nccl" if on.type == "cuda" else "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield on
    dist.destroy_process_group()


def sharding(device: torch.device, *, streams: int = 2) -> GroupCollectives:
    """Collectives over a shard axis of one rank, whose group is kept."""
    world = dist.group.WORLD
    assert world is not None
    reducing = group_beside(world, [0]) if streams == 2 else None
    return GroupCollectives(world, reducing=reducing, device=device, groups_of_one=True)


def replicating(device: torch.device) -> GroupCollectives:
    """The same over a replicate axis."""
    return GroupCollectives(None, dist.group.WORLD, device=device, groups_of_one=True)


def issued(call: Callable[[], object], device: torch.device) -> Counter[str]:
    """How often each of torch's operators that communicate is called within ``call``."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return Counter(event.name for event in profiled.events() if event.name.startswith("c10d::"))


def test_each_collective_is_issued_and_gives_what_one_rank_has(device: torch.device) -> None:
    shards, replicas = sharding(device), replicating(device)
    given = torch.arange(8.0, device=device)
    out: dict[str, torch.Tensor] = {name: torch.full_like(given, -1) for name in ("gathered", "scattered", "sent")}
    summed, broadcast, most = given.clone(), given.clone(), torch.tensor([3.0], device=device)

    def all_of_them() -> None:
        shards.all_gather(out["gathered"], given).wait()
        shards.reduce_scatter(out["scattered"], given).wait()
        shards.all_to_all(out["sent"], given, [8], [8]).wait()
        replicas.all_reduce(summed).wait()
        shards.broadcast(broadcast)
        shards.reduce_over_shards(most, "max")
        assert shards.agree(5)

    found = issued(all_of_them, device)
    assert found[GATHER] == found[SCATTER] == found["c10d::alltoall_base_"] == found["c10d::broadcast_"] == 1
    assert found[SUM] == 3, "of replicas, of a norm, and of what is agreed on"
    for name, tensor in {**out, "summed": summed, "broadcast": broadcast}.items():
        assert torch.equal(tensor, given), name
    assert most.item() == 3


def test_parts_and_objects_of_one_rank_are_gathered(device: torch.device) -> None:
    shards, part = sharding(device), torch.arange(5.0, device=device)
    assert torch.equal(shards.gather_ranges(part, [(0, 5)]), part)
    assert shards.gather_objects({"a": 1}) == [{"a": 1}]


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("mode", list(MODES))
def test_training_by_collectives_of_one_rank_equals_unsharded_training(
    device: torch.device, mode: str, streams: int
) -> None:
    """NCCL on the lanes' own streams, and in its registered memory where a GPU has such."""
    model = make_model(no_pause).to(device)
    collectives = replicating(device) if MODES[mode].optimizer == "replicate" else sharding(device, streams=streams)
    refshard.shard(model, mode=mode, collectives=collectives, communication_streams=streams, debug=True)
    train(model, device, 0, 1, no_pause)
    found = {name: value.cpu() for name, value in refshard.full_parameters(model)}
    assert furthest(found, train_alone(device)) < 2e-5
    assert engine_of(model).executor.order is Order.FOLLOWING


GATHERS = {"zero1": 8, "zero2": 8, "fsdp": 8 + 6, "yafsdp": 8 + 5}
"""In a step of eight units. For backward, ``fsdp`` gathers the six blocks again, and a ring still has the last one. The
head is still there, and the embedding's backward does not read it.
"""


@pytest.mark.parametrize("mode", list(MODES))
def test_a_step_calls_nccl_as_often_as_its_mode_has_collectives(device: torch.device, mode: str) -> None:
    model = make_model(no_pause).to(device)
    sharded = MODES[mode].optimizer != "replicate"
    refshard.shard(model, mode=mode, collectives=sharding(device) if sharded else replicating(device))
    train(model, device, 0, 1, no_pause)
    batch = tuple(part.to(device) for part in make_batch(0))
    found = issued(lambda: loss_of(model, (batch[0], batch[1])).backward(), device)
    assert (found[GATHER], found[SCATTER]) == ((GATHERS[mode], 8) if sharded else (0, 0))
    assert found[SUM] == (0 if sharded else 8)
