"""Llama and Qwen3 as the code of the published runs builds them; ``train.py`` has the options."""

import argparse
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip


class Norm(nn.Module):
    """RMSNorm out of single operators; by ``late`` the weight is applied in fp32, as torch 2.7's own did."""

    def __init__(self, width: int, eps: float, *, late: bool) -> None:
        super().__init__()
        self.eps, self.late = eps, late
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.late:
            return self.normalise(x.float()).type_as(x)
        return self.normalise(x.float()).type_as(x) * self.weight

    def normalise(self, x: Tensor) -> Tensor:
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normal * self.weight if self.late else normal

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def make_norm(kind: str, width: int) -> nn.Module:
    return nn.RMSNorm(width, eps=1e-5) if kind == "fused" else Norm(width, 1e-5, late=kind == "composite")


def rotations(options: argparse.Namespace) -> Tensor:
    """By position: a complex number for each pair (complex64), or cosines, then sines (fp32) for each element."""
    width = options.rotated or options.head_dim
    angles = 1.0 / (500_000.0 ** (torch.arange(0, width, 2).float() / width))
    positions = torch.arange(options.positions, device=angles.device)
    angles = torch.outer(positions, angles).float()
    if options.rotary == "complex":
        return torch.polar(torch.ones_like(angles), angles)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotate_pairs(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    pairs_q = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    pairs_k = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    table = table[: q.shape[1]].view(1, q.shape[1], 1, -1)
    rotated_q = torch.view_as_real(pairs_q * table).flatten(3)
    rotated_k = torch.view_as_real(pairs_k * table).flatten(3)
    return rotated_q.type_as(q), rotated_k.type_as(k)


def rotate_halves(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    width = q.shape[-1]
    table = table[: q.shape[1]].view(-1, q.shape[1], 1, 2 * width)
    cosines, sines = table[..., :width].to(dtype=q.dtype), table[..., width:].to(dtype=q.dtype)
    rotated_q = (q * cosines) + (turned(q) * sines)
    rotated_k = (k * cosines) + (turned(k) * sines)
    return rotated_q.type_as(q), rotated_k.type_as(k)


def turned(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def repeated(x: Tensor, times: int) -> Tensor:
    """Key or value heads, each for as many query heads."""
    if times == 1:
        return x
    batch, length, heads, width = x.shape
    return x.unsqueeze(3).expand(batch, length, heads, times, width).reshape(batch, length, heads * times, width)


@cache
def compiled_attention() -> Callable[..., Tensor]:
    """FlexAttention, compiled for itself."""
    return torch.compile(flex_attention, mode="max-autotune-no-cudagraphs")


@cache
def compiled_mask() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask)


class Documents:
    """The mask of the batch, in which a document ends with token 1."""

    mask: BlockMask | None = None

    @classmethod
    @torch.no_grad()
    def read(cls, tokens: Tensor) -> None:
        ends = tokens == 1
        ends[:, -1] = True
        counted = torch.cumsum(torch.where(ends, 1, 0), dim=1)
        document = torch.zeros_like(counted, dtype=torch.int32)
        document[:, 1:] = counted[:, :-1]

        def seen(b: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (document[b, query] == document[b, key]) & (query >= key)

        cls.mask = compiled_mask()(seen, tokens.shape[0], None, tokens.shape[1], tokens.shape[1])


def attend(q: Tensor, k: Tensor, v: Tensor, options: argparse.Namespace) -> Tensor:
    if options.attention == "flex":
        return compiled_attention()(q, k, v, block_mask=Documents.mask)
    first = KERNELS[options.attention]
    kernels = [first] + [KERNELS[name] for name in ("flash", "efficient", "math") if KERNELS[name] != first]
    with sdpa_kernel(kernels, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        width, heads, kv_heads = options.head_dim, options.heads, options.kv_heads
        self.query_norm = make_norm(options.norm, width) if options.query_norm else None
        self.key_norm = make_norm(options.norm, width) if options.query_norm else None
        self.q = nn.Linear(options.dim, heads * width, bias=False)
        self.k = nn.Linear(options.dim, kv_heads * width, bias=False)
        self.v = nn.Linear(options.dim, kv_heads * width, bias=False)
        self.o = nn.Linear(heads * width, options.dim, bias=False)
        self.rotate = rotate_pairs if options.rotary == "complex" else rotate_halves

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        length, width, times = self.options.seq_len, self.options.head_dim, self.options.heads // self.options.kv_heads
        batch = x.shape[0] // length if self.options.fold else x.shape[0]
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = q.view(batch, length, -1, width)
        k = k.view(batch, length, -1, width)
        v = v.view(batch, length, -1, width)
        if self.query_norm is not None and self.key_norm is not None:
            q = self.query_norm(q)
            k = self.key_norm(k)
        q, k = self.rotate(q, k, table)
        keys, values = repeated(k, times), repeated(v, times)
        q, k, v = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        out = attend(q, k, v, self.options).transpose(1, 2).contiguous()
        out = out.view(batch * length, -1) if self.options.fold else out.view(batch, length, -1)
        return self.o(out)


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace, _: int) -> None:
        super().__init__()
        self.attention = Attention(options)
        self.feed_forward = FeedForward(options.dim, options.hidden)
        self.attention_norm = make_norm(options.norm, options.dim)
        self.feed_forward_norm = make_norm(options.norm, options.dim)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), table)
        return h + self.feed_forward(self.feed_forward_norm(h))


class Transformer(nn.Module):
    def __init__(self, options: argparse.Namespace, block: Callable[[argparse.Namespace, int], nn.Module]) -> None:
        super().__init__()
        self.options = options
        self.embedding = nn.Embedding(options.vocab, options.dim)
        self.register_buffer("table", rotations(options), persistent=False)
        self.layers = nn.ModuleDict({str(i): block(options, i) for i in range(options.layers)})
        self.norm = make_norm(options.norm, options.dim)
        self.head = nn.Linear(options.dim, options.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        if self.options.fold:
            h = h.view(-1, self.options.dim)
        for layer in self.layers.values():
            h = layer(h, self.table)
        h = self.norm(h)
        if self.options.fold:
            h = h.view(tokens.shape[0], h.shape[0] // tokens.shape[0], self.options.dim)
        return self.head(h).float() if self.options.logits_fp32 == "model" else self.head(h)

    @torch.no_grad()
    def initialise(self) -> None:
        with torch.device(self.table.device):
            self.table = rotations(self.options)
        nn.init.normal_(self.embedding.weight)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, Norm | nn.RMSNorm):
                module.reset_parameters()
