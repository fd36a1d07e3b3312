"""FLOPs of a step by three conventions that the field uses, and the peaks they are held against.

N is the number of parameters, E the token embedding's (and, where it is tied, nothing is left out: the head's matrix
product is real), L the layers, H the heads, Q the head dimension, T the sequence length. Per token, forward and
backward, recompute not counted:

- A: ``6 * (N - E) + 12 * L * H * Q * T`` (torchtitan; tied models keep N)
- B: ``6 * N + 12 * L * H * Q * T`` (torchtitan in 2024, llm-foundry)
- C: ``6 * (N - E) + 6 * L * H * Q * T``, attention's causal half (Megatron)

A forward pass alone is a third of it: each matrix product of forward has two of its size in backward. Frozen weights
have no gradient of their own, so that of a fine-tuning by adapters, which have R parameters, 6N becomes 4N + 6R.
"""

from typing import Literal

from refshard.specs.case import Tuning, Workload
from refshard.specs.model import ModelSpec, parameter_count
from refshard.specs.tuning import LORA

Convention = Literal["A", "B", "C"]

FORMULAS: dict[Workload, dict[Convention, str]] = {
    "training": {
        "A": "6(N-E) + 12LHQT (torchtitan)",
        "B": "6N + 12LHQT (torchtitan 2024, llm-foundry)",
        "C": "6(N-E) + 6LHQT, causal half (Megatron)",
    },
    "inference": {
        "A": "2(N-E) + 4LHQT, forward only (a third of torchtitan's)",
        "B": "2N + 4LHQT, forward only (a third of torchtitan 2024's, llm-foundry's)",
        "C": "2(N-E) + 2LHQT, causal half, forward only (a third of Megatron's)",
    },
}


TUNED = {
    "A": "4(N-E) + 6R + 12LHQT (torchtitan's, without the gradients of frozen weights)",
    "B": "4N + 6R + 12LHQT (torchtitan 2024's, llm-foundry's, without the gradients of frozen weights)",
    "C": "4(N-E) + 6R + 6LHQT, causal half (Megatron's, without the gradients of frozen weights)",
}
"""By convention, of training adapters of R parameters."""


def formula(convention: Convention, workload: Workload, tuning: Tuning = "full") -> str:
    """What :func:`flops_per_token` counts, in words."""
    return TUNED[convention] if workload == "training" and tuning != "full" else FORMULAS[workload][convention]


def adapter_count(model: ModelSpec) -> int:
    """Number of parameters of LoRA's adapters: of a product with an (o, i) matrix, rank * (o + i)."""
    kv_dim = model.n_kv_heads * model.head_dim
    sides = 2 * (model.dim + model.dim) + 2 * (model.dim + kv_dim) + 3 * (model.dim + model.ffn_dim)
    return model.n_layers * LORA.rank * sides


def flops_per_token(
    model: ModelSpec,
    seq_len: int,
    convention: Convention = "A",
    workload: Workload = "training",
    tuning: Tuning = "full",
) -> int:
    """Model FLOPs per token, forward and in training backward too, by one of the conventions above."""
    n = parameter_count(model)
    embedding = 0 if model.tied or convention == "B" else model.vocab * model.dim
    attention = (6 if convention == "C" else 12) * model.n_layers * model.n_heads * model.head_dim * seq_len
    adapters = 0 if tuning == "full" else adapter_count(model)
    if workload == "inference":
        return (6 * (n - embedding) + attention) // 3 + 2 * adapters
    return (6 if tuning == "full" else 4) * (n - embedding) + 6 * adapters + attention
