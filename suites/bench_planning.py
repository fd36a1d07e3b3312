"""What it takes to predict memory, and torch's own tracker beside it.

The first test predicts every strategy's step of a 405B model on 16,384 ranks. The second asks ``FSDPMemTracker``
(``torch.distributed._tools.fsdp2_mem_tracker``) for the peak of FSDP2's step, in a process of its own: with fake
tensors, of a 70B model as one of 256 ranks, which takes minutes; and with real ones, of a model that a CPU holds. Ranks
are pretended. Two steps are taken, since the first one makes the optimizer's state. On a CPU all is fp32.

    pytest suites/bench_planning.py --long --benchmark-json=planning.json

Without ``--long``, the tracker is asked about real tensors only.

With ``--benchmark-disable`` small models only show that everything runs.
"""

import json
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest

from refshard.estimate.recipe import RECIPES
from refshard.memory.tensors import Batch
from refshard.memory.walk import MemoryForecast, RankJob, predict_memory
from refshard.specs.layers import checkpointing_of
from refshard.specs.model import load_model

ROUNDS = 5


def predict(model: str, strategy: str, ranks: int, seq_len: int, **changes: Any) -> MemoryForecast:
    """One strategy's memory, every layer checkpointed; bf16 on CUDA unless ``changes`` say otherwise."""
    spec = load_model(model)
    batch = Batch(sequences=1, seq_len=seq_len, dtype=changes.pop("dtype", "bf16"))
    checkpointing = checkpointing_of("full", spec.n_layers)
    job = RankJob(model=spec, world_size=ranks, batch=batch, checkpointing=checkpointing, **changes)
    return predict_memory(job, RECIPES[strategy])


def test_every_strategy(benchmark: Any) -> None:
    """All strategies for 405B on 16,384 ranks."""
    model, ranks = ("llama-tiny", 8) if benchmark.disabled else ("llama3.1-405b", 16_384)
    found = benchmark.pedantic(lambda: {s: predict(model, s, ranks, 8192) for s in RECIPES}, rounds=ROUNDS)
    peaks = {strategy: forecast.peak for strategy, forecast in found.items()}
    benchmark.extra_info.update(model=model, ranks=ranks, seq_len=8192, peak_bytes=peaks)


@pytest.mark.parametrize("tensors", [pytest.param("fake", marks=pytest.mark.long), "real"])
def test_beside_torchs_tracker(benchmark: Any, tensors: str) -> None:
    """FSDP2's peak as the tracker finds it and as it is predicted, and the time that each takes."""
    large = tensors == "fake" and not benchmark.disabled
    model, ranks, seq_len = ("llama3-70b", 256, 2048) if large else ("llama-tiny", 8, 256)
    script = [sys.executable, __file__, model, str(ranks), str(seq_len), tensors]
    told = json.loads(subprocess.run(script, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    mine = benchmark.pedantic(
        lambda: predict(model, "fsdp2", ranks, seq_len, dtype="fp32", device="cpu"), rounds=ROUNDS, warmup_rounds=1
    )
    facts = {"model": model, "ranks": ranks, "seq_len": seq_len, "layers": load_model(model).n_layers}
    benchmark.extra_info.update(facts, tracker=told, predicted=msgspec.to_builtins(mine.at_peak), peak_bytes=mine.peak)
    print(f"\n{facts}\npredicted {mine.peak:,} {mine.at_peak}\ntracker   {told}")
    if tensors == "real":
        assert told["between_steps"] == sum(mine.between_steps.values()) + told["inputs"]


def track(model: str, ranks: int, seq_len: int, *, fake: bool) -> dict[str, Any]:
    """What torch's tracker says of two steps: seconds, bytes at the peak by kind, and bytes after the steps."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from refshard.models.activation import checkpoint_layers
    from refshard.models.llama import Llama, next_token_loss

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    started = time.perf_counter()
    with FakeTensorMode() if fake else nullcontext():
        llama = Llama(load_model(model))
        checkpoint_layers(llama, "full")
        for layer in llama.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(llama, mesh=mesh)
        optimizer = torch.optim.AdamW(llama.parameters(), fused=True)
        tokens = torch.zeros(1, seq_len, dtype=torch.int64)
        tracker = FSDPMemTracker(llama, optimizer)
        tracker.track_inputs((tokens,))
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                next_token_loss(llama(tokens), tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
    seconds = time.perf_counter() - started
    peak, after = (next(iter(tracker.get_tracker_snapshot(when).values())) for when in ("peak", "current"))
    return {
        "seconds": seconds,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_bytes": peak["Total"],
        "at_peak": {str(kind).removeprefix("_FSDPRefType."): size for kind, size in peak.items() if kind != "Total"},
        "between_steps": after["Total"],
        "inputs": tokens.nbytes,
    }


if __name__ == "__main__":
    print(json.dumps(track(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), fake=sys.argv[4] == "fake")))
