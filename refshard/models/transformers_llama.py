"""transformers' ``LlamaForCausalLM`` made of the modules of a :class:`Llama`.

Both name their modules alike, so embedding, head and every projection, adapted or in 4 bits, simply change places: the
bare model still holds the trained parameters. Norms are transformers' own, and both models have them.
"""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from refshard.errors import UnsupportedError
from refshard.models.llama import Llama
from refshard.specs.model import ModelSpec

BLOCK = "LlamaDecoderLayer"
"""The class of transformers' blocks."""
_WRAPPER = "_checkpoint_wrapped_module."
_DEFAULT_POSITIONS = 2048
"""``max_position_embeddings`` of a model if its spec does not bound it: transformers' own default for Llama."""


def llama_for_causal_lm(model: Llama) -> nn.Module:
    """Make a Llama of transformers' with the parameters and, except norms, the modules of ``model``.

    ``model`` must not be called any more. Modules keep their mode, training or not.

    Raises:
        UnsupportedError: the model norms queries and keys, which transformers' Llama does not.
    """
    if model.spec.query_norm:
        raise UnsupportedError("transformers' Llama has no norms of queries and keys, got query_norm = true")
    config = _config_of(model.spec)
    with torch.device("meta"):
        theirs: nn.Module = LlamaForCausalLM(config)
    # Its tables are buffers, computed when it is made.
    theirs.set_submodule("model.rotary_emb", LlamaRotaryEmbedding(config).to(model.lm_head.weight.device))
    theirs.set_submodule("model.embed_tokens", model.model.embed_tokens)
    theirs.set_submodule("lm_head", model.lm_head)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.RMSNorm):
            norm = theirs.get_submodule(name)
            norm.weight = module.weight
            model.set_submodule(name, norm)
        elif name.endswith("_proj"):
            theirs.set_submodule(name, module)
    return theirs


def bare_name(name: str) -> str:
    """A module's or parameter's name in the bare model, without the wrapper of a recomputed block."""
    return f"{name}.".replace(_WRAPPER, "").removesuffix(".")


def _config_of(spec: ModelSpec) -> LlamaConfig:
    """The configuration with which transformers' Llama computes the same as ``Llama(spec)``."""
    positions, rope, scaling = _DEFAULT_POSITIONS, None, spec.rope_scaling
    if scaling is not None:
        positions = int(scaling.factor * scaling.original_context)
        rope = {
            "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor, "original_max_position_embeddings": scaling.original_context,
        }  # fmt: skip
    options: dict[str, Any] = {
        "attn_implementation": "sdpa", "use_cache": False, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False,
        "hidden_size": spec.dim, "intermediate_size": spec.ffn_dim, "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads, "num_key_value_heads": spec.n_kv_heads, "head_dim": spec.head_dim,
        "vocab_size": spec.vocab, "tie_word_embeddings": spec.tied, "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta, "rope_scaling": rope, "max_position_embeddings": positions,
    }  # fmt: skip
    return LlamaConfig(**options)
