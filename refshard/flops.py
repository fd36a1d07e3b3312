"""FLOPs of a step by three conventions that the field uses, and the peaks they are held against.

N is the number of parameters, E the token embedding's (and, where it is tied, nothing is left out: the head's matrix
product is real), L the layers, H the heads, Q the head dimension, T the sequence length. Per token, forward and
backward, recompute not counted:

- A: ``6 * (N - E) + 12 * L * H * Q * T`` (torchtitan; tied models keep N)
- B: ``6 * N + 12 * L * H * Q * T`` (torchtitan in 2024, llm-foundry)
- C: ``6 * (N - E) + 6 * L * H * Q * T``, attention's causal half (Megatron)

A forward pass alone is a third of it: each matrix product of forward has two of its size in backward.
"""

from typing import Literal

from refshard.specs.case import Workload
from refshard.specs.model import ModelSpec

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


def parameter_count(model: ModelSpec) -> int:
    """Number of parameters in closed form, a tied embedding counted once."""
    attention = 2 * model.dim * model.dim + 2 * model.dim * model.n_kv_heads * model.head_dim
    block = attention + 3 * model.dim * model.ffn_dim + 2 * model.dim
    embeddings = model.vocab * model.dim * (1 if model.tied else 2)
    return model.n_layers * block + embeddings + model.dim


def flops_per_token(
    model: ModelSpec, seq_len: int, convention: Convention = "A", workload: Workload = "training"
) -> int:
    """Model FLOPs per token, forward and in training backward too, by one of the conventions above."""
    n = parameter_count(model)
    embedding = 0 if model.tied or convention == "B" else model.vocab * model.dim
    attention = (6 if convention == "C" else 12) * model.n_layers * model.n_heads * model.head_dim * seq_len
    training = 6 * (n - embedding) + attention
    return training if workload == "training" else training // 3
