"""Emulation on a GPU: its kernels hold a collective until its end, and every strategy trains in bf16.

It needs no NCCL and one GPU. On the fake device, with the fake driver of ``tests/emulate/test_on_fake_gpu.py``, all of
it runs but what asks for time and for real kernels, and races between streams fail it.
"""

import gzip
import os
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from refshard.analysis.kineto import read_timeline
from refshard.analysis.overlap import collectives_per_step
from refshard.analysis.recording import WARMUP_STEPS, capture_steps
from refshard.costs import collective_cost, group_shape
from refshard.emulate.process_group import emulated_world
from refshard.emulate.world import EmulatedWorld
from refshard.events.timeline import Kind
from refshard.fakecuda import is_active
from refshard.measure.trainer import Trainer
from refshard.records import CollectiveCount
from refshard.specs.case import Case
from refshard.strategies import strategy_for
from tests.emulate import make_cluster
from tests.fakecuda.recorded import racing
from tests.models import small_spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
on_a_real_one = pytest.mark.skipif(is_active(), reason="the fake device has neither time nor kernels")

SHARED = "PYTEST_XDIST_WORKER" in os.environ
"""Whether other tests use the GPU at the same time, which may delay local copies."""
WORLD, STEPS = 8, 3
TUNED = pytest.param(
    "fsdp2-tuned",
    marks=pytest.mark.skipif(
        not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="fsdp2-tuned needs torch >= 2.13"
    ),
)
STRATEGIES = ("ddp", "fsdp2", TUNED, "refshard-fsdp", "refshard-yafsdp")


@pytest.fixture
def device() -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture
def world() -> EmulatedWorld:
    """Two nodes of four ranks."""
    return EmulatedWorld(make_cluster(), rank=0, world_size=WORLD)


def test_collectives_leave_in_memory_what_they_would(device: torch.device, world: EmulatedWorld) -> None:
    with emulated_world(world):
        own = torch.full((1000,), 0.5, dtype=torch.bfloat16, device=device)
        gathered = torch.zeros(WORLD * 1000, dtype=torch.bfloat16, device=device)
        work = dist.all_gather_into_tensor(gathered, own, async_op=True)
        assert work is not None
        work.wait()
        reduced = torch.zeros(1000, device=device)
        dist.reduce_scatter_tensor(reduced, gathered.float())
        dist.all_reduce(own)
        assert (gathered == 0.5).all()
        assert (reduced == 4.0).all()
        assert (own == 4.0).all()


@on_a_real_one
def test_a_collective_takes_no_less_than_its_cluster_says(device: torch.device, world: EmulatedWorld) -> None:
    """However busy the GPU is. The spin is on ``%globaltimer``, the measurement by events."""
    tensor = torch.ones(2_500_000, device=device)
    cost = collective_cost(world.cluster, "all_reduce", tensor.nbytes, group_shape(world.cluster, range(WORLD)))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with emulated_world(world):
        dist.all_reduce(tensor)  # the first one compiles
        torch.cuda.synchronize()
        begin.record()
        for _ in range(3):
            dist.all_reduce(tensor)
        end.record()
        torch.cuda.synchronize()
        assert SHARED or world.remark() == ""
    assert begin.elapsed_time(end) * 1e-3 > 0.99 * 3 * (cost.transfer_s + cost.latency_s)


def watching() -> AbstractContextManager[list[str]]:
    """Races between streams, which the fake device alone can tell."""
    return racing() if is_active() else nullcontext([])


def train(strategy: str, device: torch.device, world: EmulatedWorld, trace: Path) -> tuple[CollectiveCount, ...]:
    """Train a few steps in bf16, one of them traced; returns what the strategy announced."""
    case = Case.of(
        strategy=strategy, gpus=WORLD, fidelity="emulated", cluster="by-hand", device="cuda", precision="bf16",
        model="llama-tiny", global_batch=WORLD, seq_len=64,
    )  # fmt: skip
    made = strategy_for(case, cuda=True)
    with emulated_world(world) as group:
        trainer = Trainer(case, small_spec(), made, group, device)
        for _ in range(STEPS):
            trainer.timed_step(aligned=True)  # which refuses a loss that is not finite
        with watching() as races:
            trainer.timed_step(aligned=True)
        assert races == []
        with capture_steps(trace, 1, all_threads=True) as profiler:
            for _ in range(WARMUP_STEPS + 1):
                trainer.timed_step(aligned=False)
                profiler.step()
        assert len(set(trainer.losses)) > 1, "the weights must move"
        return made.announced()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_in_bf16_and_issues_what_it_announces(
    tmp_path: Path, device: torch.device, world: EmulatedWorld, strategy: str
) -> None:
    announced = train(strategy, device, world, tmp_path / "trace.json.gz")
    timeline = read_timeline(tmp_path / "trace.json.gz")
    (issued,) = collectives_per_step(timeline).values()
    assert tuple(CollectiveCount(op=op, count=count, bytes=size) for op, count, size in issued) == announced
    assert timeline.busy(Kind.COMM).length > 0
    assert timeline.busy(Kind.COMPUTE).length > 0


@on_a_real_one
def test_a_trace_has_both_kernels_and_an_attention_that_is_fast(
    tmp_path: Path, device: torch.device, world: EmulatedWorld
) -> None:
    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("no fast attention in bf16 below compute capability 8.0")
    train("refshard-yafsdp", device, world, tmp_path / "trace.json.gz")
    text = gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).decode()
    assert {"refshard_emulated_start", "refshard_emulated_hold"} <= set(re.findall(r'"name": "(refshard_\w+)"', text))
    assert re.search(r"aten::_scaled_dot_product_(flash|cudnn)_attention", text)
    assert "aten::_scaled_dot_product_attention_math" not in text
