"""Step time and peak memory over blocks of Llama 3 8B's shape: torch's FSDP2 and refshard-yafsdp, one rank of 8.

Blocks, embedding and head have their real dimensions, and only the number of layers is cut. Collectives go to torch's
fake process group: what a strategy copies around them is real, and the wire costs nothing, so a step's time is what
compute, copies and the host leave when communication is free. Values mean nothing, since no other rank's data comes.

On CUDA parameters are computed with in bf16, and masters and reductions are fp32. On a CPU all is fp32, with fewer
layers and tokens, and for step times a small vocabulary; what fresh memory costs weighs heavily in them there, since
the C library takes it from the system anew for each large tensor, where CUDA's allocator hands out its own.

Step times are taken without activation checkpointing and in turns, so that drift of the machine favours none. Peak
memory is taken with every layer checkpointed, of one model after another, and after the step times: what a process
allocates once (64 MiB on a CPU) would count for the first.

    pytest suites/bench_blocks.py --long -s --benchmark-json=blocks.json

It takes minutes and, on a CPU, 10 GB; `pytest suites` leaves it out unless told ``--long``.

With ``--benchmark-disable`` a tiny model only shows that everything runs.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import refshard
from refshard.analysis.recording import AllocatorPeak, GpuPeaks
from refshard.engine.api import engine_of
from refshard.engine.local_part import local_of
from refshard.models.activation import checkpoint_layers
from refshard.models.llama import INIT_STD, Llama, next_token_loss
from refshard.specs.layers import checkpointing_of
from refshard.specs.model import ModelSpec, load_model

pytestmark = pytest.mark.long

WORLD_SIZE = 8
BARE, FSDP2, TUNED, YAFSDP = "bare", "fsdp2", "fsdp2-tuned", "refshard-yafsdp"
ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if ON_CUDA else torch.device("cpu")
COMPUTED = torch.bfloat16 if ON_CUDA else torch.float32
TOKENS = (2048, 8192) if ON_CUDA else (32,)
WARM_UP = 2
"""Rounds before those that are timed. The engine observes its first step, and has its rings from the second on."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a model is measured, and how often.

    ``timed`` are the ways whose steps are timed, of ``timed_spec``, and ``weighed`` those whose memory is taken, of
    each of ``weighed_specs``. The bare model tells the host's time of the others, which a CPU's step hides.
    """

    weighed_specs: tuple[ModelSpec, ...]
    timed_spec: ModelSpec
    rounds: int
    timed: tuple[str, ...]
    weighed: tuple[str, ...]


EIGHT_B = msgspec.structs.replace(load_model("llama3-8b"), n_layers=6 if ON_CUDA else 3)
BLOCKS = msgspec.structs.replace(EIGHT_B, vocab=2048)
"""With hardly any embedding and head: what the blocks alone take."""
TINY = load_model("llama-tiny")
SMOKE = Scale(
    weighed_specs=(TINY,),
    timed_spec=TINY,
    rounds=1,
    timed=(BARE, FSDP2, TUNED, YAFSDP),
    weighed=(FSDP2, TUNED, YAFSDP),
)
FULL = (
    replace(SMOKE, weighed_specs=(BLOCKS, EIGHT_B), timed_spec=EIGHT_B, rounds=20)
    if ON_CUDA
    else Scale(
        weighed_specs=(BLOCKS, EIGHT_B),
        # Faulting in what a real vocabulary's head and embedding allocate would outlast all else.
        timed_spec=BLOCKS,
        rounds=3,
        timed=(TUNED, YAFSDP),
        weighed=(TUNED, YAFSDP),
    )
)


def make(way: str, spec: ModelSpec, checkpointing: str) -> Llama:
    """One rank's model, sharded that way; of the whole no more than a unit is ever there."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Llama(spec)
    checkpoint_layers(model, checkpointing_of(checkpointing, len(model.model.layers)))
    mesh = init_device_mesh(DEVICE.type, (WORLD_SIZE,))
    if way == YAFSDP:
        precision = refshard.Precision(parameters=COMPUTED)
        refshard.shard(model, mesh, precision=precision, initialise=lambda module: module)
    elif way == BARE:
        model.to(COMPUTED).to_empty(device=DEVICE)
    else:
        policy = MixedPrecisionPolicy(param_dtype=COMPUTED, reduce_dtype=torch.float32)
        if way == TUNED:
            fully_shard(model.model.embed_tokens, mesh=mesh, mp_policy=policy).set_unshard_in_backward(False)
            # As a list, these are one unit.
            fully_shard([model.model.norm, model.lm_head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device=DEVICE)
    fill(model)
    return model


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Give this rank's parts values that keep a forward's within bounds."""
    for name, parameter in model.named_parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        part.fill_(1.0) if "norm" in name else part.normal_(std=INIT_STD)


def batch(tokens: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one sequence."""
    drawn = torch.randint(vocab, (1, tokens + 1), device=DEVICE)
    return drawn[:, :-1], drawn[:, 1:].contiguous()


@dataclass(frozen=True)
class Times:
    """Seconds of a step, and until the host had issued it."""

    step_s: float
    host_s: float


def step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Times:
    """Forward, backward and the gradients let go."""
    synchronise()
    started = time.perf_counter()
    next_token_loss(model(inputs), targets).backward()
    issued = time.perf_counter()
    synchronise()
    ended = time.perf_counter()
    for parameter in model.parameters():
        parameter.grad = None
    return Times(ended - started, issued - started)


def synchronise() -> None:
    """Let the host wait for the device."""
    if ON_CUDA:
        torch.cuda.synchronize()


def let_go() -> None:
    """Free what only cycles of references, or the allocator's cache, still hold."""
    gc.collect()
    if ON_CUDA:
        torch.cuda.empty_cache()


def blocks_held(model: Llama) -> float:
    """How many blocks' unsharded parameters the engine's columns for them have room for, all taken together."""
    engine = engine_of(model)
    in_blocks = {unit.index for unit in engine.units if unit.name.startswith("model.layers.")}
    arena = engine.executor.arena
    assert arena is not None
    room = sum(column.nbytes for column in arena.columns if in_blocks & set(column.parameters))
    return room / sum(flat.layout.numel * flat.dtype.itemsize for flat in engine.units[min(in_blocks)].flats)


def arena_over_bound(model: Llama) -> float:
    """The bytes of all planned columns over the most that is in use at one time."""
    arena = engine_of(model).executor.arena
    assert arena is not None
    return arena.nbytes / arena.bound


@pytest.fixture
def scale(benchmark: Any) -> Iterator[Scale]:
    """The scale to measure at, within the fake process group."""
    let_go()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield SMOKE if benchmark.disabled else FULL
    dist.destroy_process_group()
    let_go()


@pytest.mark.parametrize("tokens", TOKENS)
def test_step_time(benchmark: Any, scale: Scale, tokens: int) -> None:
    """The benchmark's own figure is refshard-yafsdp's step; ``extra_info`` holds medians, and FSDP2's over it."""
    models = {way: make(way, scale.timed_spec, "none") for way in scale.timed}
    tokens_and_targets = batch(tokens, scale.timed_spec.vocab)
    rounds: list[dict[str, Times]] = []
    for index in range(WARM_UP + scale.rounds):
        ways = list(models) if index % 2 else list(models)[::-1]
        rounds.append({way: step(models[way], *tokens_and_targets) for way in ways})
    measured = rounds[WARM_UP:]
    step_s = {way: median(times[way].step_s for times in measured) for way in models}
    ratios = {
        way: median(times[way].step_s / times[YAFSDP].step_s for times in measured)
        for way in (FSDP2, TUNED)
        if way in models
    }
    added = host_time_added(measured)
    benchmark.extra_info.update(
        facts(scale.timed_spec, tokens), rounds=scale.rounds, step_s=step_s, ratio_to_refshard_yafsdp=ratios
    )
    benchmark.extra_info.update(host_time_added_s=added)
    benchmark.pedantic(step, args=(models[YAFSDP], *tokens_and_targets), rounds=5 if ON_CUDA else 1)
    lines = [f"{way:<15} step {seconds:8.4f} s" for way, seconds in step_s.items()]
    lines += [f"{way:<15} adds {seconds * 1e3:6.2f} ms of the host's time" for way, seconds in added.items()]
    lines += [f"{way:<15} / {YAFSDP} = {ratio:.3f} of step time" for way, ratio in ratios.items()]
    print(
        f"\n{scale.timed_spec.n_layers} layers, vocabulary {scale.timed_spec.vocab}, {tokens} tokens\n"
        + "\n".join(lines)
    )
    assert engine_of(models[YAFSDP]).executor.stream, "the engine must have followed its plan, not served on demand"


def host_time_added(rounds: Sequence[dict[str, Times]]) -> dict[str, float]:
    """Seconds until a step was issued, less those of the bare model in the same round; nothing without one."""
    ways = rounds[0] if BARE in rounds[0] else ()
    return {way: median(times[way].host_s - times[BARE].host_s for times in rounds) for way in ways if way != BARE}


def peak_of_step() -> AllocatorPeak | GpuPeaks:
    """What watches the memory of a window, made before the model is."""
    return GpuPeaks(DEVICE) if DEVICE.type == "cuda" else AllocatorPeak()


def bytes_of(peak: AllocatorPeak | GpuPeaks) -> int | None:
    """The allocated peak of its window."""
    if isinstance(peak, AllocatorPeak):
        return peak.peak_bytes
    return peak.memory.allocated_bytes if peak.memory else None


@pytest.mark.parametrize("tokens", TOKENS)
def test_peak_memory(benchmark: Any, scale: Scale, tokens: int) -> None:
    """The benchmark's own figure is refshard-yafsdp's step; ``extra_info`` has peaks by vocabulary, and its share."""
    lines = [f"{scale.timed_spec.n_layers} layers, {tokens} tokens, all layers checkpointed"]
    for spec in scale.weighed_specs:
        peaks: dict[str, int] = {}
        for way in scale.weighed:
            let_go()
            peak = peak_of_step()
            model = make(way, spec, "full")
            tokens_and_targets = batch(tokens, spec.vocab)
            step(model, *tokens_and_targets)
            with peak.window():
                step(model, *tokens_and_targets)
            if (nbytes := bytes_of(peak)) is None:
                pytest.skip("the C library does not tell what it has handed out")
            peaks[way] = nbytes
            if way == YAFSDP:
                held, sharded = blocks_held(model), sum(local_of(p).nbytes for p in model.parameters())
                over = arena_over_bound(model)
                if spec is scale.weighed_specs[-1]:
                    benchmark.pedantic(step, args=(model, *tokens_and_targets), rounds=1)
            del model
        ratios = {way: peaks[YAFSDP] / peaks[way] for way in peaks if way != YAFSDP}
        benchmark.extra_info[f"vocabulary {spec.vocab}"] = {
            **facts(spec, tokens), "peak_bytes": peaks, "ratio_of_refshard_yafsdp": ratios, "blocks_held": held,
            "arena_over_bound": over,
        }  # fmt: skip
        lines += [f"vocabulary {spec.vocab}, {way:<15} peak {nbytes / 2**30:7.3f} GiB" for way, nbytes in peaks.items()]
        lines += [f"vocabulary {spec.vocab}, {YAFSDP} / {w:<11} = {r:.3f} of peak memory" for w, r in ratios.items()]
        head = spec.vocab * spec.dim * COMPUTED.itemsize
        assert min(peaks.values()) > sharded + head, "a step holds this rank's parts, and the head unsharded"
        assert held <= 2, "the ring's blocks take turns in two slots"
        lines.append(f"vocabulary {spec.vocab}, {YAFSDP} has room for {held:.2f} unsharded blocks")
        lines.append(f"vocabulary {spec.vocab}, arena / most in use at one time = {over:.2f}")
    print("\n" + "\n".join(lines))


def facts(spec: ModelSpec, tokens: int) -> dict[str, object]:
    """What was measured, as ``extra_info`` has it."""
    return {
        "device": torch.cuda.get_device_name(DEVICE) if ON_CUDA else "cpu",
        "layers": spec.n_layers,
        "vocab": spec.vocab,
        "parameters_dtype": str(COMPUTED),
        "tokens": tokens,
        "world_size": WORLD_SIZE,
    }
