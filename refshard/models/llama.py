"""The Llama family, and Qwen 3's dense models, written to be read and to be sharded.

Modules carry Hugging Face's names, so a ``state_dict`` loads into ``transformers.LlamaForCausalLM`` and back without a
mapping. Every weight is used by the module that owns it and by no other, so an engine that hooks module calls sees each
use. Only parameters are stored: the rotary tables are computed once per forward, so a model built on the meta device
needs only ``to_empty`` and :func:`initialise` to become real.

Suffixes name the axes of a tensor: B sequences, T tokens, D model width, F feed-forward width, H query heads, K
key-value heads, Q head width, V vocabulary.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from refshard.errors import SpecError
from refshard.specs.model import ModelSpec, check_trainable

INIT_STD = 0.02
"""Standard deviation of a fresh weight (GPT-2's, and Hugging Face's default for Llama)."""

RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight")
"""The projections that write into the residual stream, which start smaller the deeper the model is."""


class Llama(nn.Module):
    """A Llama-family decoder with its language-model head.

    With ``spec.tied``, ``lm_head.weight`` *is* ``model.embed_tokens.weight``: one parameter, listed once by
    ``parameters()`` and twice by ``state_dict()``, as in Hugging Face.
    """

    def __init__(self, spec: ModelSpec) -> None:
        """Make the modules of ``spec``.

        Raises:
            SpecError: the spec has a field that no Llama has, such as experts; the message names it.
        """
        super().__init__()
        check_trainable(spec)
        self.spec = spec
        self.model = Backbone(spec)
        self.lm_head = nn.Linear(spec.dim, spec.vocab, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make head and embedding share one parameter if the spec says so; ``to_empty`` parts them."""
        if self.spec.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Map token ids (B, T) int64 to next-token logits (B, T, V) in the parameters' dtype."""
        logits_BTV: Tensor = self.lm_head(self.model(tokens_BT))
        return logits_BTV


class Backbone(nn.Module):
    """Embedding, blocks and final norm: all but the head.

    ``positions`` are those of its tokens in their sequence, int64 (T); by default all from 0 on.
    """

    positions: Tensor | int | None = None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab, spec.dim)
        self.layers = nn.ModuleList(Block(spec) for _ in range(spec.n_layers))
        self.norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Map token ids (B, T) int64 to normalised hidden states (B, T, D)."""
        x_BTD: Tensor = self.embed_tokens(tokens_BT)
        positions = tokens_BT.shape[1] if self.positions is None else self.positions
        cos_T1Q, sin_T1Q = rotary_tables(self.spec, positions, x_BTD)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_T1Q, sin_T1Q)
        normed_BTD: Tensor = self.norm(x_BTD)
        return normed_BTD


class Block(nn.Module):
    """One decoder layer: pre-normed attention and feed-forward, each added to the residual stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = FeedForward(spec)
        self.input_layernorm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)

    def forward(self, x_BTD: Tensor, cos_T1Q: Tensor, sin_T1Q: Tensor) -> Tensor:
        """Map hidden states (B, T, D) to the same shape; the tables are those of :func:`rotary_tables`."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_T1Q, sin_T1Q)
        out_BTD: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out_BTD


class Attention(nn.Module):
    """Causal self-attention with rotary positions; K key-value heads each serve H / K query heads.

    With ``spec.query_norm``, each head's queries and keys are normed before they are rotated.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.grouped = spec.n_kv_heads < spec.n_heads
        q_dim, kv_dim = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.dim, q_dim, bias=False)
        self.k_proj = nn.Linear(spec.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(spec.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(q_dim, spec.dim, bias=False)
        self.q_norm = nn.RMSNorm(spec.head_dim, eps=spec.norm_eps) if spec.query_norm else None
        self.k_norm = nn.RMSNorm(spec.head_dim, eps=spec.norm_eps) if spec.query_norm else None

    def forward(self, x_BTD: Tensor, cos_T1Q: Tensor, sin_T1Q: Tensor) -> Tensor:
        """Map hidden states (B, T, D) to the same shape; position t attends to positions up to t."""
        q_BTHQ = rotate(self._split_heads(self.q_proj(x_BTD), self.q_norm), cos_T1Q, sin_T1Q)
        k_BTKQ = rotate(self._split_heads(self.k_proj(x_BTD), self.k_norm), cos_T1Q, sin_T1Q)
        v_BTKQ = self._split_heads(self.v_proj(x_BTD))
        q_BHTQ, k_BKTQ, v_BKTQ = q_BTHQ.transpose(1, 2), k_BTKQ.transpose(1, 2), v_BTKQ.transpose(1, 2)
        mixed_BHTQ = F.scaled_dot_product_attention(q_BHTQ, k_BKTQ, v_BKTQ, is_causal=True, enable_gqa=self.grouped)
        out_BTD: Tensor = self.o_proj(mixed_BHTQ.transpose(1, 2).flatten(2))
        return out_BTD

    def _split_heads(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        heads = x.view(*x.shape[:-1], -1, self.head_dim)
        return heads if norm is None else norm(heads)


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
        self.up_proj = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
        self.down_proj = nn.Linear(spec.ffn_dim, spec.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map hidden states (B, T, D) to the same shape."""
        gated_BTF = F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        out_BTD: Tensor = self.down_proj(gated_BTF)
        return out_BTD


def rotary_tables(spec: ModelSpec, positions: int | Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines (T, 1, Q) for :func:`rotate`, on the device and in the dtype of ``like``, of these
    positions (T) or of as many from 0 on.

    Angles are fp32 in every dtype: bf16 cannot tell position 256 from 257.
    """
    if isinstance(positions, int):
        positions_T = torch.arange(positions, dtype=torch.float32, device=like.device)
    else:
        positions_T = positions.to(torch.float32)
    angles = positions_T[:, None, None] * _rotary_frequencies(spec, like.device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(like.dtype), torch.cat((-sin, sin), dim=-1).to(like.dtype)


def rotate(x_BTHQ: Tensor, cos_T1Q: Tensor, sin_T1Q: Tensor) -> Tensor:
    """Turn the pairs (i, i + Q/2) of each head by their position's angle: Hugging Face's rotate-half layout.

    The first half of ``sin_T1Q`` is negated, which spares ``rotate_half`` its negation and concatenation.
    """
    swapped_BTHQ = x_BTHQ.roll(x_BTHQ.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BTHQ * cos_T1Q, swapped_BTHQ, sin_T1Q)


def _rotary_frequencies(spec: ModelSpec, device: torch.device) -> Tensor:
    """Radians per position (Q/2), fp32. Llama 3.1's scaling keeps frequencies that turn often within the original
    context, and slows the others.
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=device) / spec.head_dim
    frequencies, scaling = 1.0 / spec.rope_theta**exponents, spec.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_context * frequencies / (2 * math.pi)
    band = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / band).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class Initialiser:
    """Fills the parameters of one model with values that ``seed`` and their names alone decide.

    Names are those when this is made, so that it fills the modules of a model that was wrapped or sharded since. See
    :func:`initialise` for the values, which are drawn on ``device``; by default on each parameter's own.
    """

    def __init__(self, model: Llama, seed: int, device: torch.device | None = None) -> None:
        self._seed, self._n_layers, self._device = seed, model.spec.n_layers, device
        first = {parameter: name for name, parameter in model.named_parameters()}
        self._names = {
            module: {own: first[parameter] for own, parameter in module.named_parameters(recurse=False)}
            for module in model.modules()
        }

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        """Fill what ``module`` holds directly, in place; a module that is not of the model holds nothing. Of a DTensor
        each rank fills its part of the whole.

        Raises:
            SpecError: a parameter is on the meta device.
        """
        for own, name in self._names.get(module, {}).items():
            parameter = getattr(module, own)
            if parameter.is_meta:
                raise SpecError(
                    f"initialise needs storage, but {name} is on meta; call model.to_empty(device=...) first"
                )
            if parameter.ndim == 1:  # a norm's gain
                parameter.fill_(1.0)
            elif isinstance(parameter, DTensor):
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device or parameter.device)
                mesh, placements = parameter.device_mesh, parameter.placements
                self._draw(name, whole)
                parameter.copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None))
            else:
                self._draw(name, parameter)

    def _draw(self, name: str, whole: Tensor) -> None:
        generator = torch.Generator(whole.device).manual_seed(parameter_seed(name, self._seed))
        std = INIT_STD / math.sqrt(2 * self._n_layers) if name.endswith(RESIDUAL_PROJECTIONS) else INIT_STD
        whole.normal_(std=std, generator=generator)


def initialise(model: Llama, seed: int, device: torch.device | None = None) -> None:
    """Fill a model's parameters, in place, with random values that ``seed`` alone decides.

    Weights are normal with standard deviation 0.02, that of the residual projections divided by ``sqrt(2 * n_layers)``
    (GPT-2); norms are 1. Each parameter draws from a generator of its own, seeded by its name, so no value depends on
    the order of creation, and the global generators stay untouched. CPU and CUDA draw different values; those of
    DTensors are drawn on ``device``, by default their own.

    Raises:
        SpecError: a parameter is on the meta device.
    """
    model.tie_weights()
    fill = Initialiser(model, seed, device)
    for module in model.modules():
        fill(module)


def parameter_seed(name: str, seed: int) -> int:
    """63 bits that no two parameters and no two seeds are expected to share."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy (nats, scalar fp32) of target ids (B, T) int64 under logits (B, T, V), which may be a DTensor
    within torch's ``loss_parallel()``.
    """
    loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
    # No view: torch's zero-bubble schedules detach it in place.
    return loss.to_local().clone() if isinstance(loss, DTensor) else loss
