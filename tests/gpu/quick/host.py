"""What the host needs to ask a GPU for things, by kind: median seconds a call while the device keeps up.

Tensors are so small that no kernel takes longer than its launch. Nothing waits for the device while a clock runs.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.gpu.quick.train import keep_products

CALLS, ROUNDS = 100, 7
Timed = tuple[str, Callable[[], object], int]
"""A name, what to time, and how many of the things named it does."""
attention: Any = partial(F.scaled_dot_product_attention, is_causal=True)


class PassThrough(TorchDispatchMode):
    """A dispatch mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def chain(x: Tensor, step: Callable[[Tensor], Tensor], count: int = CALLS) -> Tensor:
    """``count`` operators, each on the result of the one before."""
    for _ in range(count):
        x = step(x)
    return x


def repeated(call: Callable[..., object], *arguments: Any) -> None:
    """Call it 100 times."""
    for _ in range(CALLS):
        call(*arguments)


def forward_backward(x: Tensor, step: Callable[[Tensor], Tensor]) -> None:
    """A chain and its backward."""
    chain(x, step).float().sum().backward()


def operators(device: torch.device) -> Iterator[Timed]:
    """Operators without autograd, with it, and their backward."""
    x = torch.randn(16, 16, device=device)
    w = torch.randn(16, 16, device=device, requires_grad=True)
    qkv = [torch.randn(1, 2, 16, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
    steps: dict[str, Callable[[Tensor], Tensor]] = {
        "add": lambda y: y + x,
        "mul": lambda y: y * x,
        "mm": lambda y: torch.mm(y, x),
        "linear": lambda y: F.linear(y, x),
        "linear with weight gradient": lambda y: F.linear(y, w),
        "silu": F.silu,
        "rms_norm": lambda y: F.rms_norm(y, (16,)),
        "view": lambda y: y.view(16, 16),
        "transpose": lambda y: y.t(),
        "repeat_interleave": lambda y: y.repeat_interleave(2, 0)[:16],
        "cast": lambda y: y.to(torch.bfloat16 if y.dtype == torch.float32 else torch.float32),
    }
    yield "python", lambda: chain(x, lambda y: y), CALLS
    yield "empty", lambda: [torch.empty((16, 16), device=device) for _ in range(CALLS)], CALLS
    yield "empty 8 MiB", lambda: [torch.empty(1 << 21, device=device) for _ in range(CALLS)], CALLS
    yield "in place", partial(repeated, x.mul_, 1.0), CALLS
    for name, step in steps.items():
        with torch.no_grad():
            yield f"{name}, no autograd", partial(chain, x, step), CALLS
        y = x.clone().requires_grad_()
        yield f"{name}, forward", partial(chain, y, step), CALLS
        yield f"{name}, forward and backward", partial(forward_backward, y, step), CALLS
    with torch.no_grad():
        yield "sdpa, no autograd", partial(repeated, attention, *qkv), CALLS
    trained = [t.requires_grad_() for t in qkv]
    yield "sdpa, forward", partial(repeated, attention, *trained), CALLS
    yield "sdpa and sum, forward and backward", partial(repeated, lambda: attention(*trained).sum().backward()), CALLS
    with torch.autocast("cuda", torch.bfloat16):
        yield "linear under autocast, forward", lambda: chain(x, lambda y: F.linear(y, w)), CALLS
    with PassThrough(), torch.no_grad():
        yield "add under a dispatch mode", lambda: chain(x, lambda y: y + x), CALLS


def ten_blocks(x: Tensor, block: Callable[[Tensor], Tensor]) -> None:
    """Ten of them in a row, and their backward."""
    chain(x, block, 10).sum().backward()


def python(device: torch.device) -> Iterator[Timed]:
    """Modules, hooks, checkpointing and DTensors: what Python code adds to operators."""
    x = torch.randn(16, 16, device=device, requires_grad=True)
    identity, hooked = nn.Identity(), nn.Identity()
    hooked.register_forward_pre_hook(lambda *_: None)
    hooked.register_forward_hook(lambda *_: None)
    yield "module", partial(chain, x, identity), CALLS
    yield "module with two hooks", partial(chain, x, hooked), CALLS

    def body(y: Tensor) -> Tensor:
        return chain(y, lambda z: z * 1.5, 10)

    def full(y: Tensor) -> Tensor:
        out: Tensor = checkpoint(body, y, use_reentrant=False)
        return out

    def selective(y: Tensor) -> Tensor:
        context = partial(create_selective_checkpoint_contexts, keep_products)
        out: Tensor = checkpoint(body, y, use_reentrant=False, context_fn=context)
        return out

    for name, block in {"": body, " checkpointed": full, " checkpointed selectively": selective}.items():
        yield f"10 operators{name}, forward", partial(chain, x, block, 10), 10
        yield f"10 operators{name}, forward and backward", partial(ten_blocks, x, block), 10
    mesh = init_device_mesh("cuda", (1,))
    with torch.no_grad():
        sharded = distribute_tensor(torch.randn(16, 16, device=device), mesh, [Shard(0)])
        replicated = distribute_tensor(torch.randn(16, 16, device=device), mesh, [Replicate()])
        yield "add of DTensors", lambda: chain(sharded, lambda y: y + sharded), CALLS
        yield "mm of DTensors", lambda: chain(replicated, lambda y: torch.mm(y, replicated)), CALLS


def awaited(call: Callable[..., Any], output: Tensor, shard: Tensor) -> None:
    """Start a collective and have the stream wait for it."""
    call(output, shard, async_op=True).wait()


def driver(device: torch.device) -> Iterator[Timed]:
    """Streams, events, waits and collectives of one rank."""
    side = torch.cuda.Stream(device)
    recorded = torch.cuda.Event()
    recorded.record()
    x = torch.randn(1024, device=device)
    y = torch.randn(1024, device=device)

    def switch() -> None:
        for _ in range(CALLS):
            with torch.cuda.stream(side):
                pass

    yield "event made", lambda: [torch.cuda.Event() for _ in range(CALLS)], CALLS
    yield "event recorded", partial(repeated, torch.cuda.Event().record), CALLS
    yield "event waited for by a stream", partial(repeated, side.wait_event, recorded), CALLS
    yield "stream entered and left", switch, CALLS
    yield "record_stream", partial(repeated, lambda: torch.empty(16, device=device).record_stream(side)), CALLS
    yield "synchronise", partial(repeated, torch.cuda.synchronize), CALLS
    yield "item", partial(repeated, lambda: x[0].item()), CALLS
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        call = getattr(dist, name)
        yield f"{name}, one rank", partial(repeated, call, y, x), CALLS
        yield f"{name}, one rank, asynchronous", partial(repeated, partial(awaited, call, y, x)), CALLS
    yield "all_reduce, one rank", lambda: [dist.all_reduce(x) for _ in range(CALLS)], CALLS


def optimizers(device: torch.device) -> Iterator[Timed]:
    """A step over 100 parameters."""
    ways: dict[str, Any] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for loop": {"foreach": False}}
    for name, options in ways.items():
        parameters = [nn.Parameter(torch.randn(16, 16, device=device)) for _ in range(CALLS)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        yield f"AdamW {name}, 100 parameters", torch.optim.AdamW(parameters, **options).step, 1
    parts = [torch.randn(64, device=device) for _ in range(10)]
    whole = torch.empty(640, device=device)
    into = [torch.empty(64, device=device) for _ in range(10)]
    split = partial(torch.split_with_sizes_copy, out=into)
    yield "foreach copy of 10", partial(repeated, torch._foreach_copy_, into, parts), CALLS
    yield "split_with_sizes_copy of 10", partial(repeated, split, whole, [64] * 10, 0), CALLS
    yield "chunk_cat of 10", partial(repeated, torch._chunk_cat, parts, 0, 1), CALLS


def main(out: Path) -> None:
    """Time all of them; each is written as it ends."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}.items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    found: dict[str, float] = {}
    for kinds in (operators, python, driver, optimizers):
        for name, call, count in kinds(device):
            call()
            taken = []
            for _ in range(ROUNDS):
                torch.cuda.synchronize()
                began = time.perf_counter()
                call()
                taken.append((time.perf_counter() - began) / count)
            found[name] = median(taken)
            out.write_text(json.dumps(found, indent=1))
            print(f"{found[name] * 1e6:10.2f} us  {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
