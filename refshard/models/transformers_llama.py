"""transformers' ``LlamaForCausalLM`` made of the modules of a :class:`Llama`.

Both name their modules alike, so embedding, head and every projection, adapted or in 4 bits, simply change places:
whoever holds the bare model still holds what is trained. Norms are transformers' own, and both models have them.
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from refshard.models.hugging_face import config_of
from refshard.models.llama import Llama

BLOCK = "LlamaDecoderLayer"
"""The class of transformers' blocks."""
_WRAPPER = "_checkpoint_wrapped_module."


def llama_for_causal_lm(model: Llama) -> nn.Module:
    """Make a Llama of transformers' that computes with the parameters, and but for norms the modules, of ``model``.

    ``model`` is not to be called any more. Modules keep the mode, training or not, that they are in.
    """
    fields = {**config_of(model.spec), "attn_implementation": "sdpa"}
    config = LlamaConfig(**{key: value for key, value in fields.items() if key not in ("architectures", "model_type")})
    config.use_cache = False
    with torch.device("meta"):
        theirs: nn.Module = LlamaForCausalLM(config)
    # Its tables are buffers, which it computes when it is made.
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
    """A module's or parameter's name in the bare model, less what wraps a block whose activations are recomputed."""
    return f"{name}.".replace(_WRAPPER, "").removesuffix(".")
