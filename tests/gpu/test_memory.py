"""Device memory: nothing newly taken from the device once a ring stands, and a peak no higher than FSDP2's."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import refshard
from refshard.engine.api import engine_of
from refshard.engine.executor import Order
from tests.engine.fakes import Net
from tests.gpu.needs import needs_allocations

WORLD_SIZE = 8
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device, in a world whose other ranks are pretended: collectives return at once, with whatever was there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
    dist.destroy_process_group()


def sharded_by_fsdp2(model: Net) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def sharded_by_refshard(model: Net) -> nn.Module:
    return refshard.shard(model, mode="yafsdp")


def sharded_by_refshard_kept(model: Net) -> nn.Module:
    return refshard.shard(model, mode="yafsdp", keep_buffers=True)


def unsharded(model: Net) -> nn.Module:
    return model


def make_step(
    device: torch.device, shard: Callable[[Net], nn.Module], dim: int
) -> tuple[nn.Module, Callable[[], None]]:
    """A model whose vocabulary is eight times its width, and what trains it one step."""
    torch.manual_seed(0)
    vocab = 8 * dim
    model = shard(Net(n_blocks=6, dim=dim, vocab=vocab).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, vocab, (4, 65), device=device)

    def step() -> None:
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def test_a_world_of_pretended_ranks_trains(device: torch.device) -> None:
    """What the measurements below rely on."""
    model, step = make_step(device, sharded_by_refshard, dim=16)
    for _ in range(3):
        step()
    assert engine_of(model).executor.order is Order.FOLLOWING


def measure(device: torch.device, shard: Callable[[Net], nn.Module], counter: str, dim: int = 1024) -> tuple[int, int]:
    """A counter of the allocator after the third step, and its rise over the next three."""
    model, step = make_step(device, shard, dim)
    for _ in range(3):
        step()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)[counter]
    for _ in range(3):
        step()
    rise = torch.cuda.memory_stats(device)[counter] - before
    del model, step
    _forget()
    return before, rise


@pytest.mark.gpu
@needs_allocations
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_ring_takes_nothing_from_the_device_after_step_two(device: torch.device) -> None:
    """With buffers that are kept, the allocator is asked only for the gradient shards of eight units; without, for
    less than half of what FSDP2 asks for.
    """
    assert measure(device, sharded_by_refshard, "num_device_alloc")[1] == 0
    mine, kept, fsdp2, bare = (
        measure(device, shard, "allocation.all.allocated")[1]
        for shard in (sharded_by_refshard, sharded_by_refshard_kept, sharded_by_fsdp2, unsharded)
    )
    assert kept - bare == 3 * 8
    assert kept < mine
    assert 2 * (mine - bare) < fsdp2 - bare


def peak(device: torch.device, shard: Callable[[Net], nn.Module]) -> int:
    """Bytes allocated at most in steps four to six, over what was there before the model."""
    start = torch.cuda.memory_allocated(device)
    model, step = make_step(device, shard, dim=1024)
    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):
        step()
    found: int = torch.cuda.max_memory_allocated(device) - start
    del model, step
    _forget()
    return found


def _forget() -> None:
    """A sharded model and its hooks refer to each other."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.gpu
@needs_allocations
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_the_peak_is_no_higher_than_fsdp2s(device: torch.device) -> None:
    assert peak(device, sharded_by_refshard) <= peak(device, sharded_by_fsdp2)
