"""Train a Llama 3 8B with torch's FSDP2: a plain script, with nothing of refshard in it.

On eight GPUs: torchrun --nproc-per-node 8 train_fsdp2.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        h = self.attention_norm(x)
        q = rotate(self.q(h).view(batch, length, self.heads, self.head_dim), rotation)
        k = rotate(self.k(h).view(batch, length, self.kv_heads, self.head_dim), rotation)
        v = self.v(h).view(batch, length, self.kv_heads, self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, -1))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation[:, None]).flatten(3).type_as(x)


class Llama(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, kv_heads: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.checkpointed = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        frequencies = 500_000.0 ** -(torch.arange(0, self.head_dim, 2, device=tokens.device).float() / self.head_dim)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device).float(), frequencies)
        rotation = torch.polar(torch.ones_like(angles), angles)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, rotation, use_reentrant=False) if self.checkpointed else layer(x, rotation)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoint", action="store_true", help="Recompute each block's activations in backward.")
    parser.add_argument("--compile", action="store_true", help="Compile each block with torch.compile.")
    options = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("meta"):
        model = Llama(options.layers, dim=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256)
    model.checkpointed = options.checkpoint
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        if options.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    for step in range(options.steps):
        batch = torch.randint(128256, (options.batch, options.seq_len + 1), device="cuda")
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
