"""Bytes that one layer keeps from forward to backward, and needs besides, on one rank for one microbatch.

Tensors are those that autograd saves of a decoder block: the inputs of its norms and products, queries, keys, values
and the output of attention with its sums (or, without a fused kernel, its scores), and what the feed-forward
multiplies. Under tensor parallelism the residual stream is divided by sequence; torch keeps the gathered input of a
product, Megatron its part, and gathers again.
"""

from dataclasses import dataclass

from refshard.plan.kernels import Share, attention_width, inner_tokens_width, projected_width
from refshard.plan.ways import MASTER_BYTES
from refshard.specs.model import ModelSpec

SCORE_BYTES = 4
"""One of attention's scores, in fp32: in bf16, a fused kernel makes none."""
SUMS_BYTES = 4
"""Attention's logarithm of the sum of a query's scores, in fp32, by head and token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes that one layer keeps from forward to backward, and needs in backward.

    - ``nothing``: kept without checkpointing: all that backward reads.
    - ``selective``: kept with checkpointing by operator.
    - ``full``: kept with full checkpointing: the layer's input.
    - ``workspace``: also needed while its backward runs.
    - ``began``, ``halfway``, ``ended``: bytes in addition to ``nothing`` (negative if fewer) when backward has passed
      the layer's last product, the rest of the feed-forward (with what attention's scores need), and the whole layer.
    - ``puts_off``: output gradients that a zero-bubble schedule keeps, to compute weight gradients later.
    """

    nothing: float
    selective: float
    full: float
    workspace: float
    began: float
    halfway: float
    ended: float
    puts_off: float


def kept_by_layer(model: ModelSpec, share: Share, *, dense: bool, gathers_again: bool, casts: bool = False) -> Kept:
    """What a layer keeps. ``gathers_again`` is Megatron's way with the inputs of products. Where autocast ``casts``,
    the residual stream is fp32, and each product has its own copy of its input.
    """
    e, n, t = share.element, share.tokens, share.tensor
    stream = hidden_bytes(model, share, casts=casts)
    hidden = e * n / t * model.dim
    given = hidden if gathers_again else e * n * model.dim
    projected = e * n * projected_width(model) / t
    mixed = e * n * model.n_heads * attention_width(model) / t
    sums = SUMS_BYTES * n * model.n_heads / t
    inner = e * inner_tokens_width(model, share, dense=dense)
    # Of a gated feed-forward: gate, its activation, the other factor, the product; a fused kernel keeps no activation.
    times = (3 if share.fused else 4) if model.gated else 2
    routed = 0.0 if dense or model.experts is None else e * n * model.experts.active * model.dim / t * 2
    norms = 2 * stream + (5 if casts else 2) * given + 2 * SUMS_BYTES * n / t
    scores = 0.0 if share.fused_attention else SCORE_BYTES * n * share.seq_len * model.n_heads / t
    attention = projected + sums if share.fused_attention else 3 * mixed + scores
    everything = norms + attention + mixed + times * inner + routed
    key_value = e * n * (projected_width(model) - model.n_heads * attention_width(model)) / 2 / t
    # Of every second product, the output is kept: of the last one, what tensor-parallel ranks have yet to sum.
    attended = mixed + sums if share.fused_attention else 0.0
    by_operator = stream + given + mixed + attended + key_value + inner + routed
    return Kept(
        nothing=everything, selective=by_operator, full=stream, workspace=3 * inner + 2 * hidden + given,
        # Gradients of both factors beside the product's own; one of the activation's and of the inputs beside what
        # attention keeps, with three more of its scores' size in their softmax's backward; those of queries, keys and
        # values.
        began=2 * inner + stream, halfway=(1 - times) * inner + 2 * given + stream + 3 * scores,
        ended=projected + 2 * stream - everything, puts_off=(2 if model.gated else 1) * inner + projected + 3 * hidden,
    )  # fmt: skip


def hidden_bytes(model: ModelSpec, share: Share, *, casts: bool = False) -> float:
    """Bytes of the residual stream on one rank, which a pipeline's messages are, too."""
    return (MASTER_BYTES if casts else share.element) * share.tokens / share.tensor * model.dim


def loss_bytes(model: ModelSpec, share: Share, *, splits_loss: bool = False) -> float:
    """Bytes at the loss: the logits, and what their softmax and its gradient need, in fp32 unless it is fused. Where
    torch's ``loss_parallel()`` splits it by vocabulary, the gradient takes two more steps in memory of their own.
    """
    logits = share.tokens * model.vocab / share.tensor
    if share.fused:
        return logits * (share.element * 2 + 4)
    return logits * (16 if splits_loss else 12)
