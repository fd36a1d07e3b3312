"""A dry run of operators that compute nothing, for :mod:`tests.fakecuda.test_dry_mode`.

Tensors are large enough not to be resident; each check returns shapes, dtypes or counts.
"""

import math
import resource
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from refshard.dryrun.recording import HOST_COUNTS, Flag, Kind
from refshard.fakecuda.build import NAME
from tests.fakecuda.child import check

WIDE = 1 << 10


def shapes(tensors: Iterable[torch.Tensor]) -> list[list[int]]:
    return [list(one.shape) for one in tensors]


def through(module: nn.Module, *shape: int) -> list[list[int]]:
    """Shapes of the output and of all gradients."""
    module = module.cuda()
    x = torch.ones(*shape, device="cuda", requires_grad=True)
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    return shapes([out, *torch.autograd.grad(out.sum(), [x, *module.parameters()])])


@check
def layers() -> dict[str, list[list[int]]]:
    return {
        "linear": through(nn.Linear(WIDE, 2 * WIDE), 8, WIDE),
        "convolution": through(nn.Conv2d(64, 128, 3, stride=2, padding=1), 2, 64, 32, 32),
        "batch norm": through(nn.BatchNorm2d(64), 2, 64, 32, 32),
        "rms norm": through(nn.RMSNorm(WIDE), 8, WIDE),
        "group norm": through(nn.GroupNorm(4, 64), 2, 64, 32, 32),
        "attention": through(nn.TransformerEncoderLayer(256, 4, 512, batch_first=True), 2, 128, 256),
    }


@check
def sync_batch_norm_parts() -> list[list[int]]:
    x, counts = torch.ones(4, 1024, 64, device="cuda"), torch.ones(2, 1, device="cuda")
    mean, inverse = torch.batch_norm_stats(x, 1e-5)
    means, inverses = torch.stack([mean, mean]), torch.stack([inverse, inverse])
    mean, inverse = torch.batch_norm_gather_stats_with_counts(
        x, means, inverses, None, None, 0.1, 1e-5, counts.view(-1)
    )
    out = torch.batch_norm_elemt(x, None, None, mean, inverse, 1e-5)
    total, product, of_weight, of_bias = torch.batch_norm_backward_reduce(out, x, mean, inverse, mean, True, True, True)
    return shapes([out, mean, total, product, of_weight, of_bias])


@check
def optimizers() -> dict[str, int]:
    """Optimizers in one launch, of which torch has no meta kernel for some: how many launches a step takes."""
    ext: Any = sys.modules[NAME]
    found = {}
    for make in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad):
        parameters = [torch.ones(WIDE, WIDE, device="cuda", requires_grad=True) for _ in range(3)]
        rate = torch.tensor(0.1, device="cuda") if make is torch.optim.AdamW else 0.1
        optimizer = make(parameters, lr=rate, fused=True)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        ext.clear_recording()
        ext.record(True)
        optimizer.step()
        ext.record(False)
        names = _names(ext, Kind.LAUNCH)
        found[make.__name__] = sum("_fused_" in name for name in names)
    return found


def _names(ext: Any, kind: Kind) -> list[str]:
    table = ext.recording()
    return [table["name_table"][name] for of, name in zip(table["kinds"], table["names"]) if of == kind]


def recording_of(run: Callable[[], object]) -> dict[str, Any]:
    """Columns by name."""
    ext: Any = sys.modules[NAME]
    ext.clear_recording()
    ext.record(True)
    run()
    ext.mark("end")
    ext.record(False)
    found: dict[str, Any] = ext.recording()
    return found


@check
def strided() -> dict[str, bool]:
    """Which operators compute the address of each element."""
    x, y = (torch.ones(WIDE, WIDE, device="cuda") for _ in range(2))
    runs: dict[str, Callable[[], object]] = {
        "alike": lambda: x * y,
        "with a scalar": lambda: x * 2.0,
        "both transposed": lambda: x.t() * y.t(),
        "one transposed": lambda: x * y.t(),
        "broadcast": lambda: x * y[:1],
        "columns": lambda: x[:, :8] + y[:, :8],
        "copy": lambda: x.copy_(y),
        "transposing copy": lambda: x.copy_(y.t()),
        "expanding copy": lambda: x.copy_(y[:1]),
        "product": lambda: x @ y.t(),
    }
    return {name: bool((recording_of(run)["flags"] & Flag.STRIDED).any()) for name, run in runs.items()}


class PassThrough(TorchDispatchMode):
    """A dispatch mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@check
def host_work() -> dict[str, dict[str, int]]:
    """What the host does for a chain of ten multiplications, in several ways, in all."""
    x = torch.ones(WIDE, WIDE, device="cuda", requires_grad=True)

    def chain(y: torch.Tensor, step: Callable[[torch.Tensor], torch.Tensor] = lambda y: y * 1.5) -> torch.Tensor:
        for _ in range(10):
            y = step(y)
        return y

    def moded() -> None:
        with PassThrough():
            chain(x)

    def summed(run: Callable[[], object]) -> dict[str, int]:
        recording_of(lambda: None)  # takes what was counted until now
        columns = recording_of(run)
        return {name.removeprefix("host_"): int(columns[name].sum()) for name in HOST_COUNTS}

    ext: Any = sys.modules[NAME]

    def told() -> None:
        ext.set_unknown_value_callback(lambda value: repr(value) and (lambda: None)())
        y.item()
        ext.set_unknown_value_callback(lambda _: None)

    y = x.sum()
    recording_of(y.item)  # paths of files are looked up once
    ext.count_host_work()
    return {
        "read": summed(y.item),
        "read that is told": summed(told),
        "forward": summed(lambda: chain(x)),
        "forward again": summed(lambda: chain(x)),
        "with views": summed(lambda: chain(x, lambda y: y.view(-1).view(WIDE, WIDE) * 1.5)),
        "under a mode": summed(moded),
        "forward and backward": summed(lambda: torch.autograd.grad(chain(x).sum(), [x])),
    }


@check
def memory() -> dict[str, bool]:
    """A terabyte of activations takes neither pages nor time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = torch.ones(1 << 17, 1 << 16, dtype=torch.bfloat16, device="cuda")  # 16 GiB
    y = (x * 2).relu_()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"pages": grown_kib < 100 << 10, "allocated": torch.cuda.memory_allocated() >= x.nbytes + y.nbytes}


def _reserved_after(waits_for_the_later_event: bool) -> int:
    """Bytes in segments after a block was freed that a side stream uses, and one like it was asked for.

    The side stream has passed the block's kernel, but waits for another stream. The host waits for an event of it from
    before, or from after, it waits.
    """
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    block = torch.empty(64 << 20, device="cuda")
    block.record_stream(side)
    earlier = side.record_event()
    side.wait_event(other.record_event())
    del block
    (side.record_event() if waits_for_the_later_event else earlier).synchronize()
    fresh = torch.empty(64 << 20, device="cuda")
    reserved = torch.cuda.memory_reserved() - before
    del fresh
    return reserved >> 20


@check
def held_back() -> list[int]:
    return [_reserved_after(False), _reserved_after(True)]


@check
def holds() -> dict[str, Any]:
    """What is recorded of ``record_stream()``, and of how much was asked for."""
    ext: Any = sys.modules[NAME]
    side = torch.cuda.Stream()
    ext.clear_recording()
    ext.record(True)
    block = torch.empty(1000, dtype=torch.uint8, device="cuda")
    block.record_stream(torch.cuda.current_stream())  # its own, for which nothing is held back
    block.record_stream(side)
    ext.record(False)
    table = ext.recording()
    rows = [int(row) for row in (table["kinds"] == Kind.HOLD).nonzero()[0]]
    (made,) = (table["kinds"] == Kind.ALLOCATE).nonzero()[0]
    return {
        "streams": [int(table["streams"][row]) == side.stream_id for row in rows],
        "blocks": [int(table["subjects"][row]) == int(table["subjects"][made]) for row in rows],
        "sizes": [int(table["sizes"][made]), int(table["writes"][made])],
    }


@check
def allocators_alike() -> dict[str, int]:
    """An allocator like the device's, on a device of another size: settings, memory and fraction."""
    ext: Any = sys.modules[NAME]
    torch.cuda.set_per_process_memory_fraction(0.5)
    taken: list[int] = []
    allocator = ext.allocator_like(0, ext.Streams(), taken.append, 100 << 20)
    torch.cuda.set_per_process_memory_fraction(1.0)
    allocator.allocate(40 << 20, 0)
    try:
        allocator.allocate(40 << 20, 0)
    except ext.OutOfMemory:
        taken.append(0)
    small: list[int] = []
    for expandable in (False, True):
        ext.allocator_like(0, ext.Streams(), small.append, 0, expandable=expandable).allocate(12 << 20, 0)
    return {"fraction": round(allocator.memory_fraction, 6), "taken": taken, "small": small}


@check
def values() -> dict[str, Any]:
    """What is small is known, and what follows from large tensors is not and says so."""
    ext: Any = sys.modules[NAME]
    counts = torch.arange(6, device="cuda")
    large = torch.ones(WIDE, WIDE, device="cuda")
    ext.clear_recording()
    ext.record(True)
    known = [int(counts.sum()), counts.tolist(), torch.tensor(2.5, device="cuda").mul(2).item()]
    lost = large.sum()
    found = [lost.item(), (lost * 2 + 1).item()]
    copied = large.cpu()
    ext.record(False)
    table = ext.recording()
    waits = table["flags"][table["kinds"] == Kind.SYNCHRONISE]
    return {
        "known": known, "unknown": [bool(flags & Flag.VALUE_UNKNOWN) for flags in waits],
        "placeholders": [isinstance(one, float) for one in found], "copied": list(copied.shape),
    }  # fmt: skip


@check
def placeholders() -> dict[str, Any]:
    """What values that were not computed read as, in each way to read them, and what scripts compute from them."""
    ext: Any = sys.modules[NAME]
    large = torch.ones(WIDE, WIDE, device="cuda")
    loss = large.sum()
    small = torch.empty(4, device="cuda")
    small.copy_(large[0, :4])
    reads = {
        "item": loss.item(), "float": float(loss), "tolist": loss.tolist(), "format": float(f"{loss:.6f}"),
        "copied from large": small.tolist()[0], "large copied to host": large.cpu().mean().item(),
        **{str(dtype): loss.to(dtype).float().item() for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)},
    }  # fmt: skip
    followed = {
        "log": loss.log(), "inverse": 1 / loss, "log of the rest": (1 - loss).log(), "variance": 1 / small.var(),
        "log of a negative": (loss - 1).log(), "exp": (loss * 1000).exp(),
    }  # fmt: skip
    counts = torch.stack([loss, torch.tensor(4096.0, device="cuda")])
    return {
        "reads": {name: value == ext.PLACEHOLDER for name, value in reads.items()},
        "finite": {name: math.isfinite(value.item()) for name, value in followed.items()},
        "checks": [bool(torch.isfinite(large).all()), bool(torch.isnan(large).any()), bool((large > 0).all())],
        "packed with what is known": counts[1].item(), "is an integer": isinstance(large.long().sum().item(), int),
    }  # fmt: skip


@check
def checks_of_gradients() -> dict[str, Any]:
    """Checks that training makes: loss scaling finds no infinity, and clipping no gradient that is not finite."""
    parameters = [torch.ones(size, device="cuda", requires_grad=True) for size in (8, WIDE * WIDE)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    steps: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(True))
    for _ in range(2):
        scaler.scale(parameters[0].sum() + parameters[1].sum()).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {"steps": len(steps), "scale": scaler.get_scale(), "norm is positive": bool(norm > 0)}


@check
def unknown_reads() -> list[float | None]:
    """What the device tells of reads of values that it did not compute; of those that it did, nothing."""
    ext: Any = sys.modules[NAME]
    told: list[float | None] = []
    ext.set_unknown_value_callback(told.append)
    ext.record(True)
    loss = torch.ones(WIDE, WIDE, device="cuda").sum()
    torch.tensor(2.5, device="cuda").mul(2).item()
    loss.item()
    (loss / 2).item()
    loss.to("cpu", non_blocking=True)
    ext.record(False)
    ext.set_unknown_value_callback(lambda _: None)
    return told


@check
def refused() -> str:
    try:
        torch.rand(WIDE, WIDE, device="cuda").to_sparse()
    except NotImplementedError as error:
        return str(error).splitlines()[0]
    return ""


@check
def groups() -> dict[str, Any]:
    """Names of groups, by backend, and what NCCL allocates to gather a list and to scatter a sum of one."""
    ext: Any = sys.modules[NAME]
    dist.init_process_group("nccl", rank=0, world_size=4)
    dist.new_group([0, 1], backend="gloo")
    parts = [torch.empty(WIDE, WIDE, device="cuda") for _ in range(4)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    taken = []
    for work in (dist.all_gather(parts, parts[0], async_op=True), dist.reduce_scatter(parts[0], parts, async_op=True)):
        taken.append((torch.cuda.max_memory_allocated() - before) // parts[0].nbytes)
        work.wait()
    dist.destroy_process_group()
    return {"named": [bool(name) for name, _ in ext.groups()], "taken": taken}


@check
def scalars_of_the_host() -> list[str]:
    """With a tensor of no dimension on the host, in either order, and with a number before the operator."""
    x, scalar = torch.ones(WIDE, WIDE, device="cuda", dtype=torch.bfloat16), torch.tensor(0.5)
    made = (scalar * x, x * scalar, scalar - x, 1.0 - x)
    return [f"{each.device} {each.dtype} {list(each.shape)}" for each in made]
