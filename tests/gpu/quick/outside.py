"""Device memory that a process takes beside torch's allocator, stage by stage: context, libraries, communicators."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def attend(backend: SDPBackend) -> None:
    """Forward and backward of causal attention."""
    q, k, v = (torch.randn(1, 8, 1024, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with sdpa_kernel(backend):
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


def product(dtype: torch.dtype) -> None:
    """A matrix product and its gradients."""
    x = torch.randn(1024, 1024, device="cuda", dtype=dtype, requires_grad=True)
    (x @ x).sum().backward()


def optimize(**options: Any) -> None:
    """Two steps of AdamW."""
    weight = torch.nn.Parameter(torch.randn(1024, 1024, device="cuda"))
    optimizer = torch.optim.AdamW([weight], **options)
    for _ in range(2):
        weight.grad = torch.randn_like(weight)
        optimizer.step()


def communicate() -> None:
    """Each collective once in a new group of one rank."""
    group = dist.new_group([0])
    x, y = torch.randn(1 << 20, device="cuda"), torch.randn(1 << 20, device="cuda")
    dist.all_reduce(x, group=group)
    dist.all_gather_into_tensor(y, x, group=group)
    dist.reduce_scatter_tensor(y, x, group=group)


def stages() -> Iterator[tuple[str, Callable[[], object]]]:
    """In order; each keeps what those before it loaded."""
    yield "context", lambda: torch.cuda.mem_get_info()
    yield "first allocation", lambda: torch.empty(1, device="cuda")
    yield "elementwise kernel", lambda: torch.zeros(1 << 20, device="cuda") + 1
    yield "random numbers", lambda: torch.randn(1 << 20, device="cuda")
    yield "matrix product, bf16", lambda: product(torch.bfloat16)
    yield "matrix product, fp32", lambda: product(torch.float32)
    yield "matrix product, bf16, again", lambda: product(torch.bfloat16)
    yield "attention, flash", lambda: attend(SDPBackend.FLASH_ATTENTION)
    yield "attention, cuDNN", lambda: attend(SDPBackend.CUDNN_ATTENTION)
    yield "attention, efficient", lambda: attend(SDPBackend.EFFICIENT_ATTENTION)
    yield (
        "embedding and cross-entropy",
        lambda: F.cross_entropy(
            F.embedding(torch.zeros(64, dtype=torch.int64, device="cuda"), torch.randn(64, 64, device="cuda")),
            torch.zeros(64, dtype=torch.int64, device="cuda"),
        ),
    )
    yield "AdamW fused", lambda: optimize(fused=True)
    yield "AdamW foreach", lambda: optimize(foreach=True)
    yield "NCCL initialised", lambda: dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    yield "NCCL all-reduce", lambda: dist.all_reduce(torch.randn(1 << 20, device="cuda"))
    for number in range(2, 6):
        yield f"NCCL group {number}", communicate
    yield "second stream", lambda: torch.cuda.Stream().synchronize()
    yield "profiler", lambda: torch.profiler.profile().__enter__()
    yield "profiled kernel", lambda: torch.zeros(16, device="cuda") + 1


def main(out: Path) -> None:
    """Write bytes used on the device and bytes reserved by torch after each stage."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"}.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(0)
    found: list[dict[str, object]] = []
    for name, call in stages():
        call()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        found.append({"stage": name, "used": total - free, "reserved": reserved})
        out.write_text(json.dumps(found, indent=1))
        print(
            f"{(total - free - reserved) / 2**20:10.0f} MiB outside, {reserved / 2**20:8.0f} reserved  {name}",
            flush=True,
        )
    os._exit(0)  # a process group or profiler that does not end is not what is measured


if __name__ == "__main__":
    main(Path(sys.argv[1]))
