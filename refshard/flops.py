"""FLOPs of a step by three conventions that the field uses, and the peaks they are compared with.

N is the number of parameters, E the token embedding's (and, where it is tied, nothing is left out: the head's matrix
product is real), L the layers, H the heads, Q the head dimension, T the sequence length. Per token, forward and
backward, recompute not counted:

- A: ``6 * (N - E) + 12 * L * H * Q * T`` (torchtitan; tied models keep N)
- B: ``6 * N + 12 * L * H * Q * T`` (torchtitan in 2024, llm-foundry)
- C: ``6 * (N - E) + 6 * L * H * Q * T``, attention's causal half (Megatron)

A forward pass alone is a third of it: each matrix product of forward has two of its size in backward. Frozen weights
have no gradient of their own, so that of a fine-tuning by adapters, which have R parameters, 6N becomes 4N + 6R. Of a
frozen head, 6 becomes 4; of frozen layers in front, which backward does not reach, 2, and attention's part a third.

Models beyond Llama:

- With experts, N counts the experts that one token uses (``active_parameter_count``), the shared one and the router. So
  does torchtitan (``get_moe_model_nparams_and_flops``). Megatron (``num_floating_point_operations``) counts the same
  experts but not the router, which is under 0.4 % of N in the presets.
- With latent attention, 2 Q is the width of a query plus that of a value, as both count it.
- With a window of W < T tokens, T of a layer becomes W in A and B; in C, T / 2 becomes W (1 - W / 2T), the mean over a
  sequence. Neither source counts windows: there such layers have T.
- Rows of learned positions are looked up, so they belong to E, tied or not. B counts them in N (llm-foundry does).
"""

from typing import Literal

from refshard.errors import SpecError
from refshard.specs.job import Job, Workload
from refshard.specs.model import ModelSpec, active_parameter_count, position_parameters
from refshard.specs.tuning import Frozen, Lora

Convention = Literal["A", "B", "C"]
CONVENTION: Convention = "C"
"""By which refshard counts, everywhere: only the half of attention that a causal mask leaves is computed."""

FORMULAS = {
    "training": "6(N-E) + 6LHQT, causal half (Megatron)",
    "tuning": "4(N-E) + 6R + 6LHQT, causal half (Megatron's, without the gradients of frozen weights)",
    "inference": "2(N-E) + 2LHQT, causal half, forward only (a third of Megatron's)",
}
"""What :func:`flops_of` counts: of training, of training adapters of R parameters, and of forward alone."""


def adapted_shapes(model: ModelSpec, lora: Lora) -> dict[str, tuple[int, int]]:
    """Widths of the input and of the output of each linear layer of a block that has an adapter, by name.

    Raises:
        SpecError: the model's blocks have no such layer.
    """
    q_dim, kv_dim = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    shapes: dict[str, tuple[int, int]] = {}
    if model.latent is None:
        shapes |= dict.fromkeys(("k_proj", "v_proj"), (model.dim, kv_dim))
        shapes |= {"q_proj": (model.dim, q_dim), "o_proj": (q_dim, model.dim)}
    if model.experts is None:
        shapes |= dict.fromkeys(("gate_proj", "up_proj") if model.gated else ("up_proj",), (model.dim, model.ffn_dim))
        shapes["down_proj"] = (model.ffn_dim, model.dim)
    if unknown := next((name for name in lora.projections if name not in shapes), None):
        raise SpecError(
            f"lora_targets: adapters of this model are known for {', '.join(shapes) or 'no layer'}, got {unknown}; "
            "choose some of these"
        )
    return {name: shapes[name] for name in lora.projections}


def adapter_count(model: ModelSpec, lora: Lora) -> int:
    """Number of parameters of LoRA's adapters: of a product with an (o, i) matrix, rank * (o + i).

    Raises:
        SpecError: as :func:`adapted_shapes`.
    """
    return model.n_layers * lora.rank * sum(map(sum, adapted_shapes(model, lora).values()))


def attention_flops_per_token(model: ModelSpec, seq_len: int, *, causal_half: bool = False) -> int:
    """FLOPs per token, forward and backward, of all layers' scores and of the sums of values that these weight.

    ``causal_half`` counts only the pairs that the causal mask leaves.
    """
    widths = 2 * model.head_dim if model.latent is None else model.latent.query_dim + model.latent.value_dim
    window = min(model.window or seq_len, seq_len)
    windowed = model.n_layers - model.global_layers
    if causal_half:
        twice_keys_T = model.global_layers * seq_len**2 + windowed * window * (2 * seq_len - window)
        return 3 * model.n_heads * widths * twice_keys_T // seq_len
    return 6 * model.n_heads * widths * (model.global_layers * seq_len + windowed * window)


def flops_per_token(
    model: ModelSpec,
    seq_len: int,
    convention: Convention = CONVENTION,
    workload: Workload = "training",
    lora: Lora | None = None,
    frozen: Frozen | None = None,
) -> int:
    """Model FLOPs per token, forward and in training backward too, by one of the conventions above.

    Raises:
        SpecError: as :func:`adapted_shapes`.
    """
    n = active_parameter_count(model)
    embedding = (0 if model.tied else model.vocab * model.dim) + position_parameters(model)
    n -= 0 if convention == "B" else embedding
    attention = attention_flops_per_token(model, seq_len, causal_half=convention == "C")
    adapters = 0 if lora is None else adapter_count(model, lora)
    if workload == "inference":
        return (6 * n + attention) // 3 + 2 * adapters
    head, frozen = model.vocab * model.dim, frozen or Frozen()
    layers = frozen.layers * (n - head - model.dim - (embedding if convention == "B" else 0)) // model.n_layers
    unreached = 4 * layers + 2 * attention * frozen.layers // (3 * model.n_layers)
    unreached += 2 * head * (frozen.head or (model.tied and frozen.embedding))
    return (6 if lora is None else 4) * n + 6 * adapters + attention - unreached


def flops_of(job: Job, model: ModelSpec) -> int:
    """Model FLOPs of a job per token, by refshard's convention.

    Raises:
        SpecError: as :func:`adapted_shapes`.
    """
    return flops_per_token(model, job.seq_len, workload=job.workload, lora=job.lora, frozen=job.frozen_parts)
