"""Adapters on frozen weights in closed form: what they hold, save for backward and compute.

Sizes follow peft's LoRA on a decoder block: a frozen linear layer saves nothing, while its adapter saves its input
behind dropout, the mask of that, and what comes of its first product. Weights and adapters are kept in the dtype of the
computation, and so are gradients and the optimizer's state; with QLoRA, the blocks' linear layers are in NF4.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from refshard.flops import adapted_shapes
from refshard.plan.kernels import Move, Product, Share, inner_tokens_width, projected_width, sizes_of
from refshard.specs.model import ModelSpec
from refshard.specs.tuning import PROJECTIONS

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of an element in NF4 with double quantisation: a code, its part of a block's statistic of 8 bits, and of the
fp32 scale of 256 of those (Dettmers et al., "QLoRA", 2023).
"""
DEQUANTISING_KERNELS = 3
"""Kernels for one matrix: of its statistics, of their offset, and of the codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedLayer:
    """One layer with adapters, on a rank that has all of it.

    - ``adapters``: elements of them; ``factored``: rows and columns of their matrices.
    - ``frozen``: bytes of the layer's own weights.
    - ``none``, ``selective``, ``full``: bytes that it keeps for backward, with each policy of checkpointing.
    - ``unneeded``: bytes of these, with policy none, that a first layer does not keep, since its input has no gradient.
    - ``workspace``: bytes that its backward also needs.
    """

    adapters: float
    factored: float
    frozen: float
    none: float
    selective: float
    full: float
    unneeded: float
    workspace: float


def tuned_layer(model: ModelSpec, share: Share) -> TunedLayer:
    """The memory of one layer and microbatch.

    Raises:
        SpecError: adapters of this model are not known.
    """
    assert share.lora is not None
    e, n, rank, shapes = share.element, share.tokens, share.lora.rank, adapted_shapes(model, share.lora)
    stream = e * n * model.dim
    mixed = e * n * model.n_heads * model.head_dim
    sums = 4.0 * n * model.n_heads
    inner = e * inner_tokens_width(model, share, dense=model.experts is None)
    # Gate, activation and the other factor; a fused kernel keeps no activation.
    times = (2 if share.fused else 3) if model.gated else 1
    entered = sum((e + 1) * n * width + e * n * rank for width, _ in shapes.values())
    attention = e * n * projected_width(model) + sums + mixed
    attention += e * n * (model.n_heads + model.n_kv_heads) * model.head_dim if model.query_norm else 0.0
    elements = sizes_of(model, 1, 1)
    whole = elements.dense if model.experts is None else elements.routed + elements.experts
    return TunedLayer(
        adapters=rank * sum(map(sum, shapes.values())),
        factored=sum(2.0 * rank + sum(sides) for sides in shapes.values()),
        frozen=whole * (NF4_BYTES if share.quantised else e),
        none=2 * stream + 2 * 4 * n + attention + times * inner + entered,
        selective=stream + mixed + sums + sum(e * n * width for width in _second_outputs(model, share)),
        full=stream,
        unneeded=stream + sum(n * shapes[name][0] for name in ("q_proj", "k_proj", "v_proj") if name in shapes),
        workspace=inner + 2 * stream + (e * model.dim * model.ffn_dim if share.quantised else 0),
    )  # fmt: skip


def _second_outputs(model: ModelSpec, share: Share) -> list[int]:
    """Widths of the results of every second product of a layer, from the first on: frozen ones, and both of an
    adapter.
    """
    assert share.lora is not None
    shapes, rank = adapted_shapes(model, share.lora), share.lora.rank
    q_dim, kv_dim = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    widths = dict(zip(PROJECTIONS, (q_dim, kv_dim, kv_dim, model.dim, model.ffn_dim, model.ffn_dim, model.dim)))
    if not model.gated:
        del widths["gate_proj"]
    results = [w for name, width in widths.items() for w in ((width, rank, width) if name in shapes else (width,))]
    return results[::2]


def adapter_products(model: ModelSpec, share: Share) -> Iterator[Product]:
    """Of a layer's forward; the gradients of inputs and of weights take two of each size more."""
    if share.lora is not None:
        for entry, result in adapted_shapes(model, share.lora).values():
            yield Product(share.tokens, entry, share.lora.rank)
            yield Product(share.tokens, share.lora.rank, result)


def adapter_moves(model: ModelSpec, share: Share) -> Iterator[Move]:
    """Elementwise kernels of a layer's forward: dropout with its mask, scaling, and the sum; backward has as many."""
    if share.lora is not None:
        e, n = share.element, share.tokens
        for entry, result in adapted_shapes(model, share.lora).values():
            yield from (Move((2 * e + 1) * n * entry), Move(2 * e * n * result), Move(3 * e * n * result))


def dequantising_moves(model: ModelSpec, share: Share) -> Iterator[Move]:
    """One pass through a layer reads its codes and writes its weights in the dtype of the computation."""
    if share.quantised:
        count = DEQUANTISING_KERNELS * (7 if model.gated else 6)
        yield from [Move(sizes_of(model, 1, 1).dense * (NF4_BYTES + share.element) / count)] * count
