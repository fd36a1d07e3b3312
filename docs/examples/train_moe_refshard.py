"""Train a small mixture of experts with refshard's engine on four ranks of a CPU, and check it against one process.

Experts are spread over two ranks (expert parallelism): tokens go to their experts and back by all-to-alls. The engine
shards each expert over the two ranks that hold it, and everything else over all four.

    python train_moe_refshard.py
"""

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import refshard

RANKS, EP = 4, 2
DIM, HIDDEN, EXPERTS, TOP_K, VOCAB = 32, 48, 8, 2, 64
STEPS, BATCH, LENGTH = 20, 8, 16


class Experts(nn.Module):
    """All experts, or after :meth:`spread` this rank's; tokens come sorted by expert, ``counts`` says how many."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / HIDDEN**0.5)

    def spread(self, ep: DeviceMesh) -> None:
        for name, parameter in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(parameter.detach(), ep, [Shard(0)])))

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        return torch.cat([F.silu(t @ up[e]) @ down[e] for e, t in enumerate(x.split(counts))])


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()
        self.ep: DeviceMesh | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1, dtype=torch.float32).topk(TOP_K, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        sent = tokens[order // TOP_K]
        done = self.experts(sent, counts.tolist()) if self.ep is None else self.exchange(sent, counts, self.ep)
        weighted = done * weights.flatten()[order, None].type_as(done)
        return torch.zeros_like(tokens).index_add(0, order // TOP_K, weighted).view_as(x)

    def exchange(self, sent: torch.Tensor, counts: torch.Tensor, ep: DeviceMesh) -> torch.Tensor:
        """Have each token computed by its expert, on the rank that holds it."""
        group, local = ep.get_group(), EXPERTS // ep.size()
        received_counts = all_to_all_single(counts, None, None, group)
        to_ranks = counts.view(-1, local).sum(1).tolist()
        from_ranks = received_counts.view(-1, local).sum(1).tolist()
        received = all_to_all_single_autograd(sent, from_ranks, to_ranks, group)
        by_expert = torch.arange(local).repeat(ep.size()).repeat_interleave(received_counts).argsort(stable=True)
        done = self.experts(received[by_expert], received_counts.view(-1, local).sum(0).tolist())
        done = torch.empty_like(done).index_copy(0, by_expert, done)
        return all_to_all_single_autograd(done, to_ranks, from_ranks, group)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 4, batch_first=True, bias=False)
        self.moe = MoE()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.moe(self.moe_norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def train(rank: int, ranks: int, port: int, results) -> None:
    """Train; with several ranks, each takes its rows of every batch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        everywhere = init_device_mesh("cpu", (ranks,))
        mesh = init_device_mesh("cpu", (ranks // EP, EP), mesh_dim_names=("edp", "ep"))
        for layer in model.layers:
            layer.moe.ep = mesh["ep"]
            layer.moe.experts.spread(mesh["ep"])
        experts = refshard.Policy(mesh=mesh["edp"])  # gradients are means over all ranks all the same
        refshard.shard(model, everywhere, mode="fsdp", policies={"layers.*.moe.experts": experts})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        batch = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step % 4))
        batch = batch.chunk(ranks)[rank]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        if ranks > 1:
            refshard.clip_grad_norm_(model, 1.0)
            dist.all_reduce(mean := loss.detach() / ranks)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            mean = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    whole = refshard.full_parameters(model) if ranks > 1 else model.named_parameters()
    whole = {name: value.detach() for name, value in whole}
    if rank == 0:
        results.put((losses, {name: value.numpy() for name, value in whole.items()}))
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    context = mp.get_context("spawn")
    results = context.Queue()
    found = []
    for ranks in (1, RANKS):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = [context.Process(target=train, args=(rank, ranks, port, results)) for rank in range(ranks)]
        for process in processes:
            process.start()
        found.append(results.get())
        for process in processes:
            process.join()
        print(f"{ranks} rank{'s' * (ranks > 1)}: loss {found[-1][0][0]:.4f} to {found[-1][0][-1]:.4f}")
    (one, alone), (several, together) = found
    loss = max(abs(a - b) for a, b in zip(one, several))
    weight = max(abs(together[name] - value).max() for name, value in alone.items())
    print(f"largest difference after {STEPS} steps: {loss:.1e} of the loss, {weight:.1e} of a weight")
    assert max(loss, weight) < 1e-3


if __name__ == "__main__":
    main()
