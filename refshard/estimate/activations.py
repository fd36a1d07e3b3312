"""Bytes that one layer keeps from forward to backward, and needs besides, on one rank for one microbatch.

Tensors are those that autograd saves of a decoder block: the inputs of its norms and products, queries, keys, values
and the output of attention with its sums, and what the feed-forward multiplies. Under tensor parallelism the residual
stream is divided by sequence; torch keeps the gathered input of a product, Megatron its part, and gathers again.
"""

from dataclasses import dataclass

from refshard.estimate.kernels import Share, attention_width, inner_tokens_width, projected_width
from refshard.specs.model import ModelSpec

SUMS_BYTES = 4
"""Attention's logarithm of the sum of a query's scores, in fp32, by head and token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes that one layer keeps: all that backward reads, what checkpointing by operator leaves of it, and its input,
    which full checkpointing keeps. ``workspace`` is needed besides while its backward runs.
    """

    nothing: float
    selective: float
    full: float
    workspace: float


def kept_by_layer(model: ModelSpec, share: Share, *, dense: bool, gathers_again: bool) -> Kept:
    """What a layer keeps. ``gathers_again`` is Megatron's way with the inputs of products."""
    e, n, t = share.element, share.tokens, share.tensor
    hidden = e * n / t * model.dim
    given = hidden if gathers_again else e * n * model.dim
    projected = e * n * projected_width(model) / t
    mixed = e * n * model.n_heads * attention_width(model) / t
    sums = SUMS_BYTES * n * model.n_heads / t
    inner = e * inner_tokens_width(model, share, dense=dense)
    # Of a gated feed-forward: gate, its activation, the other factor, the product; a fused kernel keeps no activation.
    times = (3 if share.fused else 4) if model.gated else 2
    routed = 0.0 if dense or model.experts is None else e * n * model.experts.active * model.dim / t * 2
    norms = 2 * hidden + 2 * given + 2 * SUMS_BYTES * n / t
    everything = norms + projected + mixed + sums + times * inner + routed
    key_value = e * n * (projected_width(model) - model.n_heads * attention_width(model)) / 2 / t
    by_operator = 2 * hidden + 2 * mixed + key_value + sums + inner + routed
    return Kept(
        nothing=everything, selective=by_operator, full=hidden, workspace=3 * inner + 2 * hidden + given,
    )  # fmt: skip


def loss_bytes(model: ModelSpec, share: Share) -> float:
    """Bytes at the loss: the logits, and what their softmax and its gradient need, in fp32 unless it is fused."""
    logits = share.tokens * model.vocab / share.tensor
    return logits * ((share.element * 2 + 4) if share.fused else 12)
