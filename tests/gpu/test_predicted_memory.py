"""Predicted memory against CUDA's allocator: for one rank of a pretended world, and for ranks that talk over NCCL."""

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from refshard.estimate.recipe import RECIPES
from refshard.memory.tensors import Batch
from refshard.memory.walk import RankJob, predict_memory
from refshard.models.activation import checkpoint_layers
from refshard.models.llama import Llama, next_token_loss
from refshard.specs.layers import checkpointing_of
from refshard.specs.model import load_model
from tests.distributed.ranks import run_ranks
from tests.gpu.needs import needs_allocations
from tests.memory.pretended import wrap

WORLD_SIZE, SEQUENCES, SEQ_LEN = 8, 4, 1024

pytestmark = [pytest.mark.gpu, needs_allocations]


STRATEGIES = ("fsdp2", "fsdp2-tuned", "refshard-zero2", "refshard-fsdp", "refshard-yafsdp")


@pytest.fixture(scope="module")
def pretended_world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


def measured(strategy: str, policy: str) -> int:
    """Bytes allocated at most in the third step, over what was there before the model."""
    spec, device = load_model("llama-mini"), torch.device("cuda", torch.cuda.current_device())
    ones = torch.ones(64, 64, device=device, requires_grad=True)
    (ones @ ones).sum().backward()  # the library's workspaces, of this thread and of autograd's
    del ones
    start = torch.cuda.memory_allocated(device)
    model = Llama(spec).to(device)
    checkpoint_layers(model, policy)
    module = wrap(model, strategy, init_device_mesh("cuda", (dist.get_world_size(),)), bf16=True)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    tokens = torch.randint(spec.vocab, (2, SEQUENCES, SEQ_LEN), device=device)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats(device)
        next_token_loss(module(tokens[0]), tokens[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    peak: int = torch.cuda.max_memory_allocated(device) - start
    del model, module, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def predicted(strategy: str, policy: str, world_size: int) -> int:
    """The same, in closed form."""
    spec = load_model("llama-mini")
    batch = Batch(sequences=SEQUENCES, seq_len=SEQ_LEN, dtype="bf16")
    job = RankJob(model=spec, world_size=world_size, batch=batch, checkpointing=checkpointing_of(policy, spec.n_layers))
    return predict_memory(job, RECIPES[strategy]).peak


@pytest.mark.usefixtures("pretended_world")
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_peak_is_predicted_within_3_percent(strategy: str, policy: str) -> None:
    assert predicted(strategy, policy, WORLD_SIZE) == pytest.approx(measured(strategy, policy), rel=0.03)


def all_measured() -> dict[str, int]:
    """What this rank measures of each strategy with full checkpointing, where communication shows most."""
    return {strategy: measured(strategy, "full") for strategy in STRATEGIES}


@pytest.fixture(
    scope="module",
    params=[pytest.param(count, marks=pytest.mark.gpu(count=count), id=f"{count} GPUs") for count in (2, 8)],
)
def on_ranks(request: pytest.FixtureRequest) -> list[dict[str, int]]:
    """What each rank of a real world measures."""
    ranks: list[dict[str, int]] = run_ranks(request.param, all_measured, backend="nccl")
    return ranks


@pytest.mark.processes
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_peak_of_every_rank_is_predicted_within_3_percent(on_ranks: list[dict[str, int]], strategy: str) -> None:
    expected = predicted(strategy, "full", len(on_ranks))
    for rank, found in enumerate(on_ranks):
        assert found[strategy] == pytest.approx(expected, rel=0.03), f"rank {rank}"
