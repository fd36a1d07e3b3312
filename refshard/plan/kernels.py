"""What one rank computes of one layer for one microbatch, kernel by kernel, and what parameters it has.

Kernels follow a decoder block as torch runs it eagerly, or with its elementwise kernels fused (by ``torch.compile``, or
in Transformer Engine). Suffixes: n tokens of the rank's part of the sequences, m those of its part of the residual
stream, D model width, F feed-forward width of the rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from refshard.plan.cost_models import MASTER_BYTES
from refshard.specs.hardware import AttentionKernel, Dtype
from refshard.specs.job import Precision
from refshard.specs.model import ModelSpec, prediction_parameters
from refshard.specs.tuning import Lora

Split = Literal["columns", "rows", "whole"]
"""How tensor-parallel ranks divide a matrix; one that is whole is on each of them."""
QUANTISED_BYTES = 7.1
"""Bytes moved to cast an element of an operand to fp8, MXFP8 or NVFP4: two are read, and fewer are written twice."""


@dataclass(frozen=True, slots=True)
class Linear:
    """The matrices (k, n) of one linear layer; ``count`` of them if each expert has its own."""

    name: str
    k: int
    n: int
    split: Split
    count: int = 1

    @property
    def numel(self) -> int:
        """Elements of all of its matrices."""
        return self.k * self.n * self.count


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product (m, k) x (k, n), ``count`` times over."""

    m: float
    k: float
    n: float
    count: int = 1

    @property
    def flops(self) -> float:
        """A multiplication and an addition are two."""
        return 2.0 * self.m * self.k * self.n * self.count

    def nbytes(self, operand: float, result: int) -> float:
        """Bytes that it reads and writes, by the bytes of an element."""
        return self.count * (operand * (self.m * self.k + self.k * self.n) + result * self.m * self.n)


@dataclass(frozen=True, slots=True)
class Move:
    """An elementwise kernel that reads and writes ``nbytes`` and evaluates ``transcendentals`` exponentials.

    ``fresh`` bytes of its output are too many for the allocator to keep, so that the system provides them anew.
    """

    nbytes: float
    transcendentals: float = 0.0
    fresh: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's share of a microbatch: ``sequences`` of ``seq_len`` tokens, divided by ``cp`` ranks, and each
    matrix divided by ``tp`` ranks.

    ``ep`` ranks divide a mixture's experts, and ``expert_tp`` ranks split each (0: ``tp`` if ``ep`` is 1, else 1).
    ``fused``: elementwise kernels are a compiler's. ``fused_norms``: each norm is one kernel. Without
    ``fused_attention``, torch multiplies and stores every score. With ``lora``, only these adapters are trained, and
    weights may be ``quantised``, in NF4.
    """

    sequences: int
    seq_len: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 0
    precision: Precision = "bf16"
    fused: bool = False
    fused_norms: bool = True
    fused_attention: bool = True
    attention: AttentionKernel = "flash"
    lora: Lora | None = None
    quantised: bool = False

    @cached_property
    def tokens(self) -> float:
        """Tokens of the rank's part of the sequences, which tensor-parallel ranks have in common."""
        return self.sequences * self.seq_len / self.cp

    @property
    def expert_split(self) -> int:
        """Ranks that split each expert."""
        return expert_split(self.tp, self.ep, self.expert_tp)

    @property
    def element(self) -> int:
        """Bytes of an activation's element."""
        return MASTER_BYTES if self.precision == "fp32" else 2

    @property
    def dtype(self) -> Dtype:
        """The dtype of all computation except products in fp8, MXFP8 or NVFP4."""
        return "fp32" if self.precision == "fp32" else "bf16"


def expert_split(tp: int, ep: int, expert_tp: int) -> int:
    """Ranks that split each expert: as many as given or, by default, those of tensor parallelism if ``ep`` is 1."""
    return expert_tp or (tp if ep == 1 else 1)


def attention_linears(model: ModelSpec) -> tuple[Linear, ...]:
    """The linear layers of one block's attention; queries, keys and values are one."""
    heads, width = model.n_heads, model.head_dim
    if model.latent is None:
        projected = (heads + 2 * model.n_kv_heads) * width
        return (
            Linear("qkv", model.dim, projected, "columns"),
            Linear("o", heads * width, model.dim, "rows"),
        )
    latent = model.latent
    query = heads * (latent.nope_dim + latent.rope_dim)
    queries = (
        (Linear("q", model.dim, query, "columns"),)
        if not latent.query_rank
        else (
            Linear("q down", model.dim, latent.query_rank, "whole"),
            Linear("q up", latent.query_rank, query, "columns"),
        )
    )
    return (
        *queries,
        Linear("kv down", model.dim, latent.kv_rank + latent.rope_dim, "whole"),
        Linear("kv up", latent.kv_rank, heads * (latent.nope_dim + latent.value_dim), "columns"),
        Linear("o", heads * latent.value_dim, model.dim, "rows"),
    )


def feed_forward_linears(model: ModelSpec, *, dense: bool = True) -> tuple[Linear, ...]:
    """The linear layers of one block's feed-forward: of a dense one, or of a mixture, its router first."""
    entries = 2 if model.gated else 1
    experts = model.experts
    if dense or experts is None:
        return (Linear("up", model.dim, entries * model.ffn_dim, "columns"),
                Linear("down", model.ffn_dim, model.dim, "rows"))  # fmt: skip
    shared = (
        Linear("shared up", model.dim, entries * experts.shared_ffn_dim, "columns"),
        Linear("shared down", experts.shared_ffn_dim, model.dim, "rows"),
    )
    return (
        Linear("router", model.dim, experts.count, "whole"),
        *(shared if experts.shared_ffn_dim else ()),
        Linear("expert up", model.dim, entries * experts.ffn_dim, "columns", experts.count),
        Linear("expert down", experts.ffn_dim, model.dim, "rows", experts.count),
    )


def product_of(model: ModelSpec, linear: Linear, share: Share) -> Product:
    """A rank's part of a linear layer's forward product. Tokens are taken to be dealt to the experts evenly."""
    split = share.tp if linear.count == 1 else share.expert_split
    k = linear.k / split if linear.split == "rows" else linear.k
    n = linear.n / split if linear.split == "columns" else linear.n
    if linear.count == 1:
        return Product(share.tokens, k, n)
    assert model.experts is not None
    count = max(1, linear.count // share.ep)
    return Product(share.tokens * split / share.tp * model.experts.active / count, k, n, count)


def attention_width(model: ModelSpec) -> float:
    """Mean of the widths of a key and of a value."""
    if model.latent is None:
        return model.head_dim
    return (model.latent.nope_dim + model.latent.rope_dim + model.latent.value_dim) / 2


def projected_width(model: ModelSpec) -> float:
    """Elements of a token's queries, keys and values together, as attention reads them."""
    if model.latent is None:
        return (model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    latent = model.latent
    return model.n_heads * (2 * (latent.nope_dim + latent.rope_dim) + latent.value_dim)


def inner_tokens_width(model: ModelSpec, share: Share, *, dense: bool) -> float:
    """Elements between the two products of a feed-forward, on one rank: tokens times width, of all experts' tokens."""
    experts = model.experts
    if dense or experts is None:
        return share.tokens * model.ffn_dim / share.tp
    return share.tokens * (experts.active * experts.ffn_dim + experts.shared_ffn_dim) / share.tp


def forward_moves(model: ModelSpec, share: Share, *, dense: bool) -> Iterator[Move]:
    """Elementwise kernels of one layer's forward."""
    e, hidden = share.element, share.tokens / share.tp * model.dim
    rotated = share.tokens * _rotated_width(model) / share.tp
    inner = inner_tokens_width(model, share, dense=dense)
    norms = 4 if model.extra_norms else 2
    if share.fused:  # each norm with the residual addition before it
        yield from [Move(4 * e * hidden)] * norms
        yield Move(2 * e * rotated)
        yield Move((3 if model.gated else 2) * e * inner, inner)
    else:
        for _ in range(norms):
            yield from _norm_forward(share, hidden)
        yield from [Move(e * times * rotated) for times in (2, 2, 3)] if rotated else ()
        yield from [Move(3 * e * hidden)] * 2
        yield Move(2 * e * inner, inner)
        yield from [Move(3 * e * inner)] if model.gated else ()
    if model.query_norm:
        yield from _norm_forward(share, rotated)
    if not dense:
        yield from _dispatch_moves(model, share)


def backward_moves(model: ModelSpec, share: Share, *, dense: bool) -> Iterator[Move]:
    """Elementwise kernels of one layer's backward."""
    e, hidden = share.element, share.tokens / share.tp * model.dim
    rotated = share.tokens * _rotated_width(model) / share.tp
    inner = inner_tokens_width(model, share, dense=dense)
    norms = 4 if model.extra_norms else 2
    if share.fused:
        yield from [Move(5 * e * hidden)] * norms
        yield Move(2 * e * rotated)
        yield Move((5 if model.gated else 3) * e * inner, inner)
    else:
        for _ in range(norms):
            yield from _norm_backward(share, hidden)
        yield from [Move(3 * e * hidden)] * 5  # gradients of tensors with several readers are summed
        yield from [Move(e * times * rotated) for times in (2, 2, 2, 3)] if rotated else ()
        yield Move(3 * e * inner, inner)
        yield from [Move(3 * e * inner)] * 2 if model.gated else ()
    if model.query_norm:
        yield from _norm_backward(share, rotated)
    if not dense:
        yield from _dispatch_moves(model, share)


def quantising_moves(elements: Iterator[float] | list[float]) -> Iterator[Move]:
    """fp8 and narrower: each operand is read in bf16 and written twice, as it is and transposed."""
    for count in elements:
        yield Move(QUANTISED_BYTES * count)


def _rotated_width(model: ModelSpec) -> float:
    """Elements of a token's queries and keys that are rotated; none if positions are learned."""
    if model.positions:
        return 0.0
    if model.latent is not None:
        return (model.n_heads + 1) * model.latent.rope_dim
    return (model.n_heads + model.n_kv_heads) * model.head_dim


def _dispatch_moves(model: ModelSpec, share: Share) -> Iterator[Move]:
    """A mixture's tokens are put in the experts' order, and back, weighted."""
    sent = expert_rows(model, share) * model.dim
    yield Move(2 * share.element * sent)
    yield Move(3 * share.element * sent)


def expert_rows(model: ModelSpec, share: Share) -> float:
    """Tokens that a rank's experts compute, each once for each expert that computes it."""
    assert model.experts is not None
    return share.tokens / share.tp * share.expert_split * model.experts.active


def bias_moves(model: ModelSpec, share: Share, *, backward: bool) -> list[Move]:
    """Biases of experts' products, unless a kernel of the product adds them: that of the last is weighted by the
    router's probabilities, which are fp32, and so are the weighted bias, its sum with the output, and the sums of all
    experts; backward the other way round, with the sums of both biases' gradients. One expert is computed after the
    other, by 2 kernels forward and 5 backward (Megatron's ``TEGroupedMLP``).
    """
    assert model.experts is not None
    rows, local = expert_rows(model, share) * model.dim, max(1, model.experts.count // share.ep)
    if not backward:
        half = (3 * MASTER_BYTES + share.element) * rows
        return [*[Move(half / local / 2)] * (2 * local), Move(half)]
    inner = expert_rows(model, share) * (2 if model.gated else 1) * model.experts.ffn_dim / share.expert_split
    each = (8 * MASTER_BYTES + 2 * share.element) * rows / local
    return [*[Move(each / 5)] * (5 * local), Move(share.element * inner)]


def unfused_moves(model: ModelSpec, share: Share, *, dense: bool, backward: bool) -> list[Move]:
    """What Megatron's fused kernels leave to torch: YaRN's rotation, whose attention factor they do not have
    (``rope_utils.py``), and the clamping of experts' activations (``fused_bias_geglu.py``).
    """
    found = []
    if model.yarn:
        rotated = share.tokens * _rotated_width(model) / share.tp
        found.append(Move(share.element * (11 if backward else 10) * rotated))
    if not dense and model.experts is not None and model.experts.clamped:
        inner = (2 if model.gated else 1) * model.experts.ffn_dim / share.expert_split
        found.append(Move(share.element * (5 if backward else 4) * expert_rows(model, share) * inner))
    return found


def _norm_forward(share: Share, elements: float) -> list[Move]:
    """One kernel; or, in fp32, square, mean, its root's inverse, and scaling, and then the gain."""
    if share.fused_norms or share.fused:
        return [Move(2 * share.element * elements)]
    inner = [Move(MASTER_BYTES * numbers * elements) for numbers in (2, 1, 0, 0, 2)]
    return [*_casts(share, elements), *inner, *_casts(share, elements), Move(2 * share.element * elements)]


def _norm_backward(share: Share, elements: float) -> list[Move]:
    """One kernel; or, in fp32, the gradients of the gain, its input, the scaling, the mean and the square, and sums."""
    if share.fused_norms or share.fused:
        return [Move(4 * share.element * elements)]
    inner = [Move(MASTER_BYTES * numbers * elements) for numbers in (3, 3, 3, 1, 1, 1, 2, 2, 2, 2, 3, 0, 0, 0)]
    return [*_casts(share, elements), *inner, *_casts(share, elements)]


def _casts(share: Share, elements: float) -> list[Move]:
    return [] if share.precision == "fp32" else [Move((share.element + MASTER_BYTES) * elements)]


def hidden_bytes(model: ModelSpec, share: Share, *, casts: bool = False) -> float:
    """Bytes of the residual stream on one rank, which a pipeline's messages are, too."""
    return (MASTER_BYTES if casts else share.element) * share.tokens / share.tp * model.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Elements on one rank: of a dense layer and of a mixture's, without and with its experts, and of both ends; and of
    the feed-forward of the larger kind of layer.
    """

    dense: float
    routed: float
    experts: float
    embedding: float
    head: float
    feed_forward: float


def sizes_of(model: ModelSpec, tensor: int, expert: int, expert_tp: int = 0) -> Sizes:
    """The parts on a rank of ``tensor`` ranks that divide each matrix, ``expert`` that divide the experts, and
    ``expert_tp`` that split each of these.
    """
    norm = model.dim * (2 if model.biased or model.norm_biases else 1)
    norms = (4 if model.extra_norms else 2) * norm + (2 * model.head_dim if model.query_norm else 0)
    norms += model.vectors + (model.latent.query_rank + model.latent.kv_rank if model.latent else 0)
    attention = [*attention_linears(model)]
    dense = _numel([*attention, *feed_forward_linears(model)], tensor, 1, biased=model.biased) + norms
    mixture = feed_forward_linears(model, dense=False) if model.experts else ()
    routed = _numel([*attention, *(one for one in mixture if one.count == 1)], tensor, 1, biased=model.biased) + norms
    split = expert_split(tensor, expert, expert_tp)
    biased = model.experts is not None and (model.biased or model.experts.biased)
    experts = _numel([one for one in mixture if one.count > 1], split, expert, biased=biased)
    inner = _numel([*feed_forward_linears(model)], tensor, 1, biased=model.biased)
    mixed = _numel([one for one in mixture if one.count == 1], tensor, 1, biased=model.biased) + experts
    ends = model.vocab * model.dim / tensor
    positions = model.positions * model.dim
    return Sizes(
        dense=dense, routed=routed if model.experts else 0.0, experts=experts, embedding=ends + positions,
        head=norm + (0.0 if model.tied else ends) + prediction_parameters(model) / tensor,
        feed_forward=mixed if routed + experts > dense else inner,
    )  # fmt: skip


def _numel(linears: list[Linear], tensor: int, expert: int, *, biased: bool) -> float:
    total = 0.0
    for one in linears:
        part = tensor if one.split != "whole" else 1
        total += one.numel / part / (expert if one.count > 1 else 1)
        if biased:
            total += one.n * one.count / (tensor if one.split == "columns" else 1) / (expert if one.count > 1 else 1)
    return total
