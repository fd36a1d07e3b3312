"""DeepSeek-V3's blocks as torchtitan builds them: latent attention and a mixture of experts; ``train.py`` has the
options.

Which tokens go to which expert depends on the router. ``--code`` is a day: the code changed between them.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import FeedForward, attend, make_norm
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

ALIGNMENT = 8
"""An expert gets a multiple of so many tokens, as grouped products of matrices in bf16 need."""


class LatentAttention(nn.Module):
    """Keys and values of every head come out of one narrow vector; one rotated key serves all heads."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        heads, width, rotated = options.heads, options.head_dim, options.rotated
        self.q = nn.Linear(options.dim, heads * (width + rotated), bias=False)
        self.down = nn.Linear(options.dim, options.latent + rotated, bias=False)
        self.norm = make_norm(options.norm, options.latent)
        self.up = nn.Linear(options.latent, heads * 2 * width, bias=False)
        self.o = nn.Linear(heads * width, options.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, length, _ = x.shape
        width, rotated = self.options.head_dim, self.options.rotated
        q = self.q(x).view(batch, length, -1, width + rotated)
        q, turned = torch.split(q, [width, rotated], dim=-1)
        q = torch.cat([q, rotate(turned, table)], dim=-1)
        latent, turned = torch.split(self.down(x), [self.options.latent, rotated], dim=-1)
        turned = rotate(turned.unsqueeze(2), table)
        latent = self.up(self.norm(latent)).view(batch, length, -1, 2 * width)
        k, v = torch.split(latent, [width, width], dim=-1)
        k = torch.cat([k, turned.expand(-1, -1, self.options.heads, -1)], dim=-1)
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.options)
        return self.o(out.transpose(1, 2).contiguous().view(batch, length, -1))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table.view(1, pairs.size(1), 1, pairs.size(-1))).flatten(3).to(x.dtype)


class Exchange(torch.autograd.Function):
    """An all-to-all of rows, whose backward sends them back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        ctx.sizes, ctx.group = (received, sent), group
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        received, sent = ctx.sizes
        out = gradients[0].new_empty((sum(sent), *gradients[0].shape[1:]))
        dist.all_to_all_single(out, gradients[0].contiguous(), sent, received, group=ctx.group)
        return out, None, None, None


class Experts(nn.Module):
    """Feed-forwards of one shape, stacked; with ``shard``, each rank has some of them and tokens are exchanged."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        shape = (options.experts, options.expert_hidden, options.dim)
        self.gate, self.up = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.down = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))
        self.group: dist.ProcessGroup | None = None
        self.rest: DeviceMesh | None = None

    def shard(self, mesh: DeviceMesh, rest: DeviceMesh) -> None:
        """Over the ranks of ``mesh``; FSDP shards each rank's over the ``rest``."""
        self.group, self.rest = mesh.get_group(), rest
        for name, parameter in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        if self.group is None:
            return self.compute(x, counts)
        exchange = Exchange.apply if self.options.code < "2025-08-31" else all_to_all_single_autograd
        counts, received, sent = self.exchange_counts(counts, self.group)
        out = self.compute(exchange(x, received, sent, self.group), counts)
        return exchange(out, sent, received, self.group)

    @torch.no_grad()
    def exchange_counts(self, counts: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[int], list[int]]:
        """How many tokens each of this rank's experts gets from each rank; rows to receive and to send."""
        if self.options.code < "2025-09-06":
            ours = counts.new_empty(counts.shape[0])
            dist.all_to_all_single(ours, counts, group=group)
        else:
            ours = torch.ops._c10d_functional.wait_tensor(all_to_all_single(counts, None, None, group=group))
        rows = [
            each.view(dist.get_world_size(group), -1).sum(dim=1).to(torch.device("cpu"), non_blocking=each is counts)
            for each in (counts, ours)
        ]
        torch.cuda.current_stream().synchronize()
        sent, received = (each.to(torch.int64).tolist() for each in rows)
        return ours, received, sent

    def compute(self, x: Tensor, counts: Tensor) -> Tensor:
        """Sort the tokens by expert, each expert's padded to a multiple, and back."""
        weights = [w.to_local() if isinstance(w, DTensor) else w for w in (self.gate, self.down, self.up)]
        with torch.no_grad():
            order, counts = sorted_by_expert(x.shape[0], counts, weights[0].shape[0])
        x = torch.vstack((x, x.new_zeros(x.shape[-1])))
        shape, x = x.shape, x[order, :]
        products = grouped if self.options.experts_by == "grouped" else one_by_one
        out = products(x, counts, *weights)
        unsorted = out.new_empty(shape)
        unsorted[order, :] = out
        return unsorted[:-1]


def sorted_by_expert(tokens: int, counts: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Places of the tokens by expert, -1 where padding lies, and how many each expert gets with it.

    A Triton kernel fills in the places; no size depends on them, so they stay -1 here.
    """
    totals = torch.clamp_min(counts.view(-1, experts).sum(0), ALIGNMENT)
    sizes = ((totals + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).to(torch.int32)
    order = torch.full((tokens + experts * ALIGNMENT,), -1, dtype=torch.int32, device=counts.device)
    return order, sizes


def grouped(x: Tensor, counts: Tensor, gate: Tensor, down: Tensor, up: Tensor) -> Tensor:
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    h = F.silu(torch._grouped_mm(x.bfloat16(), gate.bfloat16().transpose(-2, -1), offs=offsets))
    h = h * torch._grouped_mm(x.bfloat16(), up.bfloat16().transpose(-2, -1), offs=offsets)
    return torch._grouped_mm(h, down.bfloat16().transpose(-2, -1), offs=offsets).type_as(x)


def one_by_one(x: Tensor, counts: Tensor, gate: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """As on a GPU without grouped products."""
    sizes = counts.tolist()
    padding, out = x.shape[0] - sum(sizes), []
    for place, part in enumerate(torch.split(x[: sum(sizes)], sizes, dim=0)):
        h = F.silu(torch.matmul(part, gate[place].transpose(-2, -1)))
        h = h * torch.matmul(part, up[place].transpose(-2, -1))
        out.append(torch.matmul(h, down[place].transpose(-2, -1)))
    all_out = torch.cat(out, dim=0)
    return torch.vstack((all_out, all_out.new_zeros((padding, all_out.shape[-1]))))


class Mixture(nn.Module):
    """A router picks experts for each token; a shared one serves all. A bias per expert balances them over steps."""

    bias: Tensor
    tokens: Tensor

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.router = nn.Linear(options.dim, options.experts, bias=False)
        self.experts = Experts(options)
        self.shared = FeedForward(options.dim, options.expert_hidden * options.shared_experts)
        for name in ("bias", "tokens"):
            self.register_buffer(name, torch.zeros(options.experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        x = x.view(-1, dim)
        scores = F.softmax(self.router(x).to(torch.float32), dim=1)
        _, chosen = torch.topk(scores + self.bias, k=self.options.active, dim=1)
        weights = scores.gather(dim=1, index=chosen)
        if self.options.code >= "2025-10-02":
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        weights = weights * 1.0
        counts = self.count(chosen)
        with torch.no_grad():
            self.tokens.add_(counts)
        counts = self.count(chosen)
        by_expert = torch.argsort(chosen.view(-1), stable=True)
        weights = weights.view(-1)[by_expert]
        places = (by_expert // self.options.active).reshape(-1, 1).expand(-1, dim)
        routed = self.experts(torch.gather(x, dim=0, index=places), counts)
        if self.options.code >= "2025-10-02":
            out = self.shared(x)
            routed = (routed.to(torch.float32) * weights.reshape(-1, 1)).to(x.dtype)
        else:
            routed = (routed.to(torch.float32) * weights.reshape(-1, 1)).to(x.dtype)
            out = self.shared(x)
        return out.scatter_add(dim=0, index=places, src=routed).reshape(batch, length, dim)

    def count(self, chosen: Tensor) -> Tensor:
        return torch.histc(chosen.view(-1), bins=self.options.experts, min=0, max=self.options.experts)


class SparseBlock(nn.Module):
    """One of the first ``dense`` blocks has a plain feed-forward."""

    def __init__(self, options: argparse.Namespace, place: int) -> None:
        super().__init__()
        self.attention = LatentAttention(options)
        self.attention_norm = make_norm(options.norm, options.dim)
        self.feed_forward_norm = make_norm(options.norm, options.dim)
        dense = place < options.dense
        self.feed_forward = FeedForward(options.dim, options.hidden) if dense else Mixture(options)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.feed_forward_norm(x))


@torch.no_grad()
def balance(mixtures: list[Mixture]) -> None:
    """Raise the bias of experts that got fewer tokens than the mean on all ranks."""
    tokens = torch.vstack([mixture.tokens // 2 for mixture in mixtures])
    dist.all_reduce(tokens)
    for mixture, got in zip(mixtures, tokens):
        change = 1e-3 * torch.sign(got.float().mean() - got)
        mixture.bias.add_(change - change.mean())
        mixture.tokens.zero_()
