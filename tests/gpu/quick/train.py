"""A plain training script for one GPU, run on a real one and under ``refshard dryrun``.

It needs torch only; ``--mode refshard`` needs refshard too, and ``--tuning qlora`` bitsandbytes. ``--world 8`` is rank
0 of 8: in a dry run the fake device's, on a real GPU through torch's fake process group, whose collectives return at
once, so that memory and kernels are rank 0's, without a network and without NCCL's buffers.

Peaks of memory and step times are written after every step, so that a later failure loses nothing.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


class Size(NamedTuple):
    """Dimensions of a Llama, or of one whose feed-forward is a mixture of ``experts``, each token taking ``active``."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    head_dim: int = 128
    experts: int = 0
    active: int = 0


SIZES = {
    "tiny": Size(2, 256, 4, 2, 512, 1024, 64),
    "tiny-moe": Size(2, 256, 4, 2, 64, 1024, 64, 8, 2),
    "narrow": Size(16, 128, 2, 1, 256, 1024, 64),  # kernels that take next to nothing: the host's time shows
    "1b": Size(16, 2048, 32, 8, 8192, 128256, 64),
    "3b": Size(28, 3072, 24, 8, 8192, 128256),
    "8b": Size(32, 4096, 32, 8, 14336, 128256),
    "30b-a3b": Size(48, 2048, 32, 4, 768, 151936, 128, 128, 8),  # Qwen3-30B-A3B
}
BACKENDS = {
    "default": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
KINDS = ("allocated", "active", "reserved", "requested")
COUNTS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "segment.all.peak")


class Block(nn.Module):
    """A decoder layer without rotary embeddings."""

    def __init__(self, size: Size, backend: SDPBackend | None, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.backend = size.heads, size.kv_heads, backend
        dim, wide = size.dim, size.heads * size.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.o = linear(dim, wide, bias=False), linear(wide, dim, bias=False)
        self.k, self.v = (linear(dim, size.kv_heads * size.head_dim, bias=False) for _ in range(2))
        if size.experts:
            self.experts = Experts(size)
            return
        self.gate, self.up = linear(dim, size.hidden, bias=False), linear(dim, size.hidden, bias=False)
        self.down = linear(size.hidden, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, length, _ = x_BTD.shape
        h = self.norm1(x_BTD)
        q = self.q(h).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = (w(h).view(batch, length, self.kv_heads, -1).transpose(1, 2) for w in (self.k, self.v))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))  # every backend takes this
        if self.backend is None:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            with sdpa_kernel(self.backend):
                a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.o(a.transpose(1, 2).reshape(batch, length, -1))
        h = self.norm2(x_BTD)
        out_BTD: Tensor = self.experts(h) if hasattr(self, "experts") else self.down(F.silu(self.gate(h)) * self.up(h))
        return x_BTD + out_BTD


class Experts(nn.Module):
    """A mixture of experts by grouped matrix products. Routing is forced to be even, so that no shape depends on it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.active, self.count = size.active, size.experts
        self.router = nn.Linear(size.dim, size.experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(size.experts, size.dim, size.hidden)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(size.experts, size.hidden, size.dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_TD = x_BTD.flatten(0, 1)
        slots = x_TD.shape[0] * self.active
        order = torch.arange(slots, device=x_TD.device).view(-1, self.count).t().flatten()
        chosen = (torch.arange(slots, device=x_TD.device) % self.count).view(-1, self.active)
        scores = F.softmax(self.router(x_TD).float(), dim=-1).gather(1, chosen)
        token = order // self.active
        ends = torch.arange(1, self.count + 1, device=x_TD.device, dtype=torch.int32) * (slots // self.count)
        h = x_TD[token]
        h = F.silu(torch._grouped_mm(h, self.gate, ends)) * torch._grouped_mm(h, self.up, ends)
        y = torch._grouped_mm(h, self.down, ends) * scores.flatten()[order].unsqueeze(-1).to(h.dtype)
        return torch.zeros_like(x_TD).index_add(0, token, y).view_as(x_BTD)


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of rank 16 beside it."""

    def __init__(self, base: nn.Module, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(fan_in, 16, bias=False, dtype=torch.bfloat16)
        self.b = nn.Linear(16, fan_out, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


def adapt(model: nn.Module, tuning: str) -> None:
    """Freeze the model in bf16, its layers' products in NF4 with ``qlora``, and put an adapter beside each of these."""
    model.to(torch.bfloat16).requires_grad_(False)
    for block in model.layers:  # type: ignore[union-attr]
        for name, child in list(block.named_children()):
            if not isinstance(child, nn.Linear):
                continue
            base: nn.Module = child
            if tuning == "qlora":
                from bitsandbytes.nn.modules import Linear4bit, Params4bit

                base = Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16,
                    compress_statistics=True, quant_type="nf4", device="meta",
                )  # fmt: skip
                base.weight = Params4bit(
                    child.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=base
                )._quantize("cuda")
            with torch.device("cuda"):
                setattr(block, name, Adapted(base, child.in_features, child.out_features))


def keep_products(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Selective checkpointing: products and attention are kept, the rest is computed again."""
    kept = op in (torch.ops.aten.mm.default,) or "scaled_dot_product" in str(op)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Llama(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, size: Size, backend: str, ac: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.dim)
        self.layers = nn.ModuleList(Block(size, BACKENDS[backend], nn.Linear) for _ in range(size.layers))
        self.norm, self.head, self.ac = nn.RMSNorm(size.dim), nn.Linear(size.dim, size.vocab, bias=False), ac

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embedding(tokens_BT)
        for layer in self.layers:
            if self.ac == "none":
                x = layer(x)
            elif self.ac == "full":
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = checkpoint(
                    layer, x, use_reentrant=False,
                    context_fn=lambda: create_selective_checkpoint_contexts(keep_products),
                )  # fmt: skip
        logits: Tensor = self.head(self.norm(x))
        return logits


class Optimizers(list[torch.optim.Optimizer]):
    """Several optimizers that step together."""

    def step(self) -> None:
        for one in self:
            one.step()

    def zero_grad(self) -> None:
        for one in self:
            one.zero_grad()


def make_optimizers(name: str, model: nn.Module) -> Optimizers:
    """AdamW, or Muon for the blocks' matrices and AdamW for the rest; ``adamw8bit`` is bitsandbytes'."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw8bit":
        from bitsandbytes.optim.adamw import AdamW8bit

        return Optimizers([AdamW8bit(trained, lr=1e-4)])
    if name == "muon":
        matrices = [p for p in model.layers.parameters() if p.ndim == 2]  # type: ignore[union-attr]
        known = {id(p) for p in matrices}
        rest = torch.optim.AdamW([p for p in trained if id(p) not in known], lr=1e-4, fused=True)
        return Optimizers([torch.optim.Muon(matrices, lr=1e-3), rest])
    return Optimizers([torch.optim.AdamW(trained, lr=1e-4, fused=name == "fused", foreach=name == "foreach")])


def wrap(model: nn.Module, mode: str, mesh: DeviceMesh) -> nn.Module:
    """The model as its strategy makes it."""
    if mode == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    if mode == "ddp":
        return DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)
    if mode == "refshard":
        import refshard

        precision = refshard.Precision(parameters=torch.bfloat16, reduction=torch.float32)
        refshard.shard(model, mesh, mode="yafsdp", precision=precision)
    return model


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True, help="JSON file for peaks and step times")
    p.add_argument("--size", choices=SIZES, default="1b")
    p.add_argument("--layers", type=int, help="other than the size's")
    p.add_argument("--mode", choices=["plain", "ddp", "fsdp2", "refshard"], default="fsdp2")
    p.add_argument("--ac", choices=["none", "selective", "full"], default="none")
    p.add_argument("--optimizer", choices=["fused", "foreach", "muon", "adamw8bit"], default="fused")
    p.add_argument("--tuning", choices=["full", "lora", "qlora"], default="full")
    p.add_argument("--sdpa", choices=BACKENDS, default="default")
    p.add_argument("--seq-len", type=int, default=4096)
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--world", type=int, default=1, help="ranks, of which this is the first")
    p.add_argument("--pause", type=float, default=0.0, help="seconds to sleep after each step")
    p.add_argument("--compile", action="store_true", help="torch.compile each block")
    p.add_argument("--trace", help="on a real GPU, profile two more steps into this .json file")
    p.add_argument("--snapshot", help="on a real GPU, record the allocator's history into this pickle file")
    return p.parse_args(arguments)


def begin(world: int, *, real: bool) -> DeviceMesh:
    """The process group of rank 0."""
    for name, value in {
        "RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511",
    }.items():  # fmt: skip
        os.environ.setdefault(name, value)
    torch.cuda.set_device(0)
    if real and world > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    else:
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    return init_device_mesh("cuda", (world,))


def make_model(o: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    """The model on its device, wrapped, with ordinary values."""
    sharded = o.mode in ("fsdp2", "refshard")
    size = SIZES[o.size]._replace(layers=o.layers or SIZES[o.size].layers)
    with torch.device("meta" if sharded else "cuda"):
        model: nn.Module = Llama(size, o.sdpa, o.ac)
    if o.tuning != "full":
        adapt(model, o.tuning)
    if o.compile:
        for layer in model.layers:  # type: ignore[union-attr]
            layer.compile()
    model = wrap(model, o.mode, mesh)
    if o.mode == "fsdp2":
        model.to_empty(device="cuda")
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write what was seen."""
    o = options_of(arguments)
    real = "WORLD_SIZE" not in os.environ  # a dry run sets it
    torch.manual_seed(0)
    if real and o.snapshot:
        torch.cuda.memory._record_memory_history(max_entries=200_000)
    mesh = begin(o.world, real=real)
    model = make_model(o, mesh)
    vocab = SIZES[o.size].vocab
    optimizers = make_optimizers(o.optimizer, model)
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=o.mode in ("plain", "ddp") and o.tuning == "full")
    steps: list[dict[str, float]] = []

    def train() -> dict[str, float]:
        """One step; the host's times until each part had been asked for, and the time until all of it was done."""
        batch = torch.randint(vocab, (o.batch, o.seq_len + 1), device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        with autocast:
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        del logits
        forward = time.perf_counter() - began
        loss.backward()
        backward = time.perf_counter() - began
        optimizers.step()
        optimizers.zero_grad()
        issued = time.perf_counter() - began
        torch.cuda.synchronize()
        return {"forward_s": forward, "backward_s": backward, "issued_s": issued, "step_s": time.perf_counter() - began}

    for step in range(o.steps):
        times = train()
        time.sleep(o.pause)
        stats, (free, total) = torch.cuda.memory_stats(), torch.cuda.mem_get_info()
        steps.append(times | {kind: stats[f"{kind}_bytes.all.peak"] for kind in KINDS})
        result = {
            "torch": torch.__version__, "device": torch.cuda.get_device_name(),
            "peak": {kind: stats[f"{kind}_bytes.all.peak"] for kind in KINDS},
            "counts": {count: stats.get(count) for count in COUNTS},
            "reserved_now": torch.cuda.memory_reserved(), "used": total - free, "total": total,
            "step_s": statistics.median(s["step_s"] for s in steps[min(3, step):]),
            "issued_s": statistics.median(s["issued_s"] for s in steps[min(3, step):]),
            "steps": steps,
        }  # fmt: skip
        Path(o.out).write_text(json.dumps(result))
    if real and o.snapshot:
        torch.cuda.memory._dump_snapshot(o.snapshot)
        torch.cuda.memory._record_memory_history(enabled=None)
    if real and o.trace:
        with torch.profiler.profile(record_shapes=True) as profiler:
            traced = [train()["step_s"] for _ in range(2)]
        Path(o.out).write_text(json.dumps(result | {"traced_s": traced}))
        profiler.export_chrome_trace(o.trace)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
