"""What sharding asks of a GPU in one step, counted on a fake one: kernels, collectives and waits between streams.

Each way trains a model as rank 0 of 8 on a fake H100, in bf16, in a process of its own, and its last step is counted.
Kernels added are all kernels but collectives, minus those of ``bare``, the unsharded model with parameters in bf16:
copies into what is sent, copies out of what was received, and casts. Counts are the same on every machine.

    pytest suites/bench_kernels.py -s --benchmark-json=kernels.json
"""

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from typing import Any

from refshard.fakecuda import activate
from refshard.measure.dry.rank import take_place
from refshard.specs.case import Case
from refshard.specs.cluster import load_cluster
from refshard.specs.model import load_model

CLUSTER, WORLD_SIZE = "dgx-h100x1", 8
TOKENS = 2048
WARM_UP = 4
WAYS = ("bare", "fsdp2", "refshard-fsdp", "refshard-yafsdp", "refshard-yafsdp-kept")
COUNTED = ("LAUNCH", "COLLECTIVE", "WAIT", "ALLOCATE")

Counts = dict[str, int]


def rank_of(way: str, model: str, results: "SimpleQueue[Counts]") -> None:
    """A process that trains that way, and puts the counts of its last step into ``results``."""
    ext = activate(load_cluster(CLUSTER).accelerator, devices=WORLD_SIZE)
    take_place(0, WORLD_SIZE, WORLD_SIZE)
    # Here and below, since torch must not be imported before the device is there.
    import numpy as np
    import torch.distributed as dist

    from refshard.dryrun.recording import Flag, Kind, collect

    dist.init_process_group("nccl")
    step = stepping(way, model)
    for _ in range(WARM_UP):
        step()
    ext.record(True)
    step()
    ext.record(False)
    recording = collect(ext, 0, WORLD_SIZE)
    counted = (recording.flags & Flag.HOST_ONLY) == 0
    results.put({name: int(np.count_nonzero((recording.kinds == Kind[name]) & counted)) for name in COUNTED})
    dist.destroy_process_group()


def stepping(way: str, model: str) -> Callable[[], object]:
    """One training step that way."""
    import torch
    import torch.distributed as dist

    from refshard.measure.trainer import Trainer
    from refshard.models.llama import Llama, next_token_loss
    from refshard.strategies import strategy_for

    if way != "bare":
        case = Case.of(
            strategy=way, model=model, gpus=WORLD_SIZE, global_batch=WORLD_SIZE, seq_len=TOKENS,
            precision="bf16", fidelity="dryrun", cluster=CLUSTER,
        )  # fmt: skip
        group = dist.group.WORLD
        assert group is not None
        trainer = Trainer(case, load_model(model), strategy_for(case, cuda=True), group, torch.device("cuda", 0))
        batch = trainer.batch(0)
        return lambda: trainer.step(batch)

    bare = Llama(load_model(model)).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(bare.parameters(), fused=True)
    ids = torch.zeros(1, TOKENS + 1, dtype=torch.long, device="cuda")

    def step() -> None:
        next_token_loss(bare(ids[:, :-1]), ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def count(way: str, model: str) -> Counts:
    """What :func:`rank_of` counts."""
    context = get_context("spawn")
    results = context.SimpleQueue()
    rank = context.Process(target=rank_of, args=(way, model, results))
    rank.start()
    rank.join()
    assert not rank.exitcode, f"'{way}' failed; its output is above"
    counts: Counts = results.get()
    return counts


def test_kernels(benchmark: Any) -> None:
    """The benchmark's own figure is the time that counting takes; ``extra_info`` has the counts."""
    model = "llama-tiny" if benchmark.disabled else "llama3.2-1b"
    counts = benchmark.pedantic(lambda: {way: count(way, model) for way in WAYS})
    added = {way: of_way["LAUNCH"] - counts["bare"]["LAUNCH"] for way, of_way in counts.items()}
    ratios = {way: added[way] / added["fsdp2"] for way in WAYS}
    layers = load_model(model).n_layers
    benchmark.extra_info.update(model=model, layers=layers, counts=counts, added=added, ratio_to_fsdp2=ratios)
    for way, of_way in counts.items():
        print(f"\n{way:<21} kernels added {added[way]:4} ({ratios[way]:.2f} of FSDP2's), {of_way}", end="")
    assert 0 < ratios["refshard-yafsdp"] < 1, "the engine adds fewer kernels than FSDP2 does"
