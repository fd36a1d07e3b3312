"""Where a step's time goes over loopback: what the engine itself costs, and what moving bytes takes from the cores.

Two ranks of one thread each train llama-mini on 512 tokens. Within a launch, these take turns, step by step:

- ``free``: the model as it is, with an optimizer over half of each parameter: a sharding that costs nothing;
- ``no wire``: the engine over torch's fake process group, whose collectives do nothing: what it costs by itself;
- ``engine``: the engine over gloo; ``kept`` with ``keep_buffers``; ``ddp`` and ``fsdp2-tuned`` beside them;
- ``exchange``: the collectives of the engine's step and nothing else, one after the other.

A rank's processor time includes gloo's threads and the kernel's work for sockets. With two ranks on two cores, that
work competes with compute.

    pytest suites/bench_step_parts.py --long -s --benchmark-json=step_parts.json
"""

import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import refshard
from refshard.engine.api import engine_of
from refshard.engine.schedule import OpKind
from refshard.measure.trainer import Trainer
from refshard.models.llama import Llama, next_token_loss
from refshard.specs.case import Case
from refshard.specs.model import load_model
from refshard.strategies import strategy_for

pytestmark = pytest.mark.long

WAYS = ("free", "no wire", "engine", "kept", "ddp", "fsdp2-tuned", "exchange")
SAVING = ("no wire", "engine", "kept", "ddp")
RANKS, WARM_UP, ROUNDS = 2, 3, 3

Seconds = tuple[float, float]
"""Of the clock, and of the processor over all threads of this rank."""
Times = dict[str, Seconds]


def rank_of(rank: int, meeting: str, model: str, tokens: int, steps: int, results: "SimpleQueue[Times]") -> None:
    """One rank's process: all ways take turns, step by step; it puts the medians of each into ``results``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    ways = {way: stepping(way, model, tokens) for way in WAYS}
    taken: dict[str, list[Seconds]] = {way: [] for way in WAYS}
    for index in range(WARM_UP + steps):
        for way in WAYS if index % 2 else WAYS[::-1]:
            seconds = timed(ways[way])
            taken[way] += [seconds] if index >= WARM_UP else []
    results.put({way: middle(times) for way, times in taken.items()})
    dist.destroy_process_group()


def middle(times: Sequence[Seconds]) -> Seconds:
    """The medians of both."""
    return median(wall for wall, _ in times), median(processor for _, processor in times)


def saved_by(way: str, times: Times) -> float:
    """The part that it saves of the time by which a step of FSDP2 tuned is longer than that of ``free``."""
    tuned = times["fsdp2-tuned"][0]
    return (tuned - times[way][0]) / (tuned - times["free"][0])


def timed(step: Callable[[], object]) -> Seconds:
    """A step that all ranks begin and end together."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    step()
    dist.barrier()
    return time.perf_counter() - wall, time.process_time() - processor


def stepping(way: str, name: str, tokens: int) -> Callable[[], object]:
    """One training step that way of the model called ``name``; of ``exchange``, its collectives."""
    torch.manual_seed(0)
    if way == "fsdp2-tuned":
        case = Case.of(strategy=way, model=name, gpus=RANKS, global_batch=RANKS, seq_len=tokens, device="cpu")
        group = dist.group.WORLD
        assert group is not None
        trainer = Trainer(case, load_model(name), strategy_for(case, cuda=False), group, torch.device("cpu"))
        batch = trainer.batch(0)
        return lambda: trainer.step(batch)
    model = Llama(load_model(name))
    trained: nn.Module = model
    if way == "ddp":
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif way == "no wire":
        silent = dist.new_group(backend="fake")
        refshard.shard(model, DeviceMesh.from_group(silent, "cpu"), communication_streams=1)
    elif way != "free":
        refshard.shard(model, keep_buffers=way == "kept")
    parameters = list(model.parameters())
    held = [nn.Parameter(p.detach()[: p.shape[0] // RANKS]) for p in parameters] if way == "free" else parameters
    optimizer = torch.optim.AdamW(held)
    ids = torch.randint(model.spec.vocab, (1, tokens + 1))

    def step() -> None:
        next_token_loss(trained(ids[:, :-1]), ids[:, 1:]).backward()
        if way == "free":
            for part, parameter in zip(held, parameters):
                assert parameter.grad is not None
                part.grad, parameter.grad = parameter.grad[: part.shape[0]], None
        optimizer.step()
        optimizer.zero_grad()

    return exchanging(model, step) if way == "exchange" else step


def exchanging(model: Llama, step: Callable[[], object]) -> Callable[[], object]:
    """What the engine's stream issues in a step, known after two of them."""
    step(), step()
    engine = engine_of(model)
    fulls = [torch.zeros(unit.flats[0].layout.numel) for unit in engine.units]
    shards = [full[: unit.flats[0].layout.shard_numel].clone() for full, unit in zip(fulls, engine.units)]

    def exchange() -> None:
        for op in engine.executor.stream:
            full, shard = fulls[op.unit], shards[op.unit]
            if op.kind is OpKind.GATHER:
                engine.collectives.all_gather(full, shard).wait()
            elif op.kind is OpKind.REDUCE:
                engine.collectives.reduce_scatter(shard, full).wait()

    return exchange


def launch(model: str, tokens: int, steps: int, meeting: Path) -> Times:
    """Fresh ranks, which find each other through the file ``meeting``; the slower one's seconds of each way."""
    context = get_context("spawn")
    results = context.SimpleQueue()
    meeting.unlink(missing_ok=True)
    given = [(rank, str(meeting), model, tokens, steps, results) for rank in range(RANKS)]
    ranks = [context.Process(target=rank_of, args=args) for args in given]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert not any(rank.exitcode for rank in ranks), "a rank failed; its output is above"
    one, other = results.get(), results.get()
    return {way: (max(one[way][0], other[way][0]), max(one[way][1], other[way][1])) for way in WAYS}


def test_step_parts(benchmark: Any, tmp_path: Path) -> None:
    """The benchmark's own figure is a launch; ``extra_info`` has medians by way, of each launch and of all."""
    model, tokens, steps = ("llama-tiny", 16, 1) if benchmark.disabled else ("llama-mini", 512, 8)
    launches: list[Times] = []

    def once() -> None:
        launches.append(launch(model, tokens, steps, tmp_path / "meeting"))

    benchmark.pedantic(once, rounds=1 if benchmark.disabled else ROUNDS)
    medians = {way: middle([times[way] for times in launches]) for way in WAYS}
    saved = {way: median([saved_by(way, times) for times in launches]) for way in SAVING}
    benchmark.extra_info.update(model=model, tokens=tokens, launches=launches, medians=medians, saved=saved)
    lines = [
        f"{way:<11} step {wall * 1e3:7.1f} ms, processor {cpu * 1e3:7.1f} ms" for way, (wall, cpu) in medians.items()
    ]
    lines += [f"{way} saves {share:.0%} of what FSDP2 tuned takes more than free" for way, share in saved.items()]
    print("\n" + "\n".join(lines))
    assert medians["exchange"][1] < medians["engine"][1], "a step contains its exchanges"
