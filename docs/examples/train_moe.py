"""Train a mixture of experts as large as Qwen3-30B-A3B: a plain script, with nothing of refshard in it.

FSDP2 shards everything but the experts over all ranks. The experts are spread over the ranks of a node (expert
parallelism), and tokens go to their experts and back by all-to-alls; FSDP2 shards each expert over the nodes.

On eight GPUs: torchrun --nproc-per-node 8 train_moe.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q = nn.Linear(dim, heads * head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        q = rotate(self.q_norm(self.q(x).view(batch, length, self.heads, self.head_dim)), rotation)
        k = rotate(self.k_norm(self.k(x).view(batch, length, self.kv_heads, self.head_dim)), rotation)
        v = self.v(x).view(batch, length, self.kv_heads, self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(attended.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation[:, None]).flatten(3).type_as(x)


class Router(nn.Module):
    """Chooses ``top_k`` experts for each token, and how much each of them counts."""

    def __init__(self, dim: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, experts, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = self.gate(x).softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        return (weights / weights.sum(-1, keepdim=True)).type_as(x), chosen


class Experts(nn.Module):
    """This rank's experts; tokens come sorted by expert, ``counts`` says how many for each."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, dim, 2 * hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(x, self.gate_up, offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)


class MoE(nn.Module):
    def __init__(self, dim: int, experts: int, top_k: int, hidden: int, ep: DeviceMesh) -> None:
        super().__init__()
        self.ep, self.total, self.local = ep, experts, experts // ep.size()
        self.router = Router(dim, experts, top_k)
        self.experts = Experts(self.local, dim, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.total)
        sent = tokens[order // self.router.top_k]

        # Each rank learns how many tokens it gets for each of its experts, and from whom.
        received_counts = all_to_all_single(counts, None, None, self.ep.get_group())
        to_ranks = counts.view(-1, self.local).sum(1).tolist()
        from_ranks = received_counts.view(-1, self.local).sum(1).tolist()
        received = all_to_all_single_autograd(sent, from_ranks, to_ranks, self.ep.get_group())

        # Tokens come sorted by rank, then by expert; experts take them sorted by expert.
        experts = torch.arange(self.local, device=x.device).repeat(self.ep.size())
        by_expert = experts.repeat_interleave(received_counts, output_size=len(received)).argsort(stable=True)
        done = self.experts(received[by_expert], received_counts.view(-1, self.local).sum(0))
        done = torch.empty_like(done).index_copy(0, by_expert, done)

        returned = all_to_all_single_autograd(done, to_ranks, from_ranks, self.ep.get_group())
        weighted = returned * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // self.router.top_k, weighted).view_as(x)


class Block(nn.Module):
    def __init__(self, ep: DeviceMesh) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.RMSNorm(2048), nn.RMSNorm(2048)
        self.attention = Attention(2048, heads=32, kv_heads=4, head_dim=128)
        self.moe = MoE(2048, experts=128, top_k=8, hidden=768, ep=ep)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.moe(self.moe_norm(x))


class Qwen3(nn.Module):
    def __init__(self, layers: int, vocab: int, ep: DeviceMesh) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 2048)
        self.layers = nn.ModuleList(Block(ep) for _ in range(layers))
        self.norm = nn.RMSNorm(2048)
        self.head = nn.Linear(2048, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        frequencies = 1_000_000.0 ** -(torch.arange(0, 128, 2, device=tokens.device).float() / 128)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device).float(), frequencies)
        rotation = torch.polar(torch.ones_like(angles), angles)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, rotation, use_reentrant=False)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks, on_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    everywhere = init_device_mesh("cuda", (ranks,))
    mesh = init_device_mesh("cuda", (ranks // on_node, on_node), mesh_dim_names=("nodes", "ep"))
    with torch.device("meta"):
        model = Qwen3(options.layers, vocab=151936, ep=mesh["ep"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer.moe.experts, mesh=mesh["nodes"], mp_policy=policy)
        layer.moe.experts.set_gradient_divide_factor(ranks)  # an expert's gradient is of all ranks' tokens
        fully_shard(layer, mesh=everywhere, mp_policy=policy)
    fully_shard(model, mesh=everywhere, mp_policy=policy)
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    others = [p for name, p in model.named_parameters() if ".experts." not in name]
    optimizer = torch.optim.AdamW([{"params": experts}, {"params": others}], lr=3e-4, fused=True)

    for step in range(options.steps):
        batch = torch.randint(151936, (options.batch, options.seq_len + 1), device="cuda")
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
