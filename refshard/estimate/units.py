"""A Llama's parameters by unit, or a dense Qwen 3's: names and shapes in registration order, without a tensor."""

import math
from dataclasses import dataclass
from typing import Literal

from refshard.engine.layout import lay_out
from refshard.engine.schedule import UnitFacts
from refshard.estimate.recipe import Grouping, Recipe
from refshard.specs.model import ModelSpec, check_trainable

Role = Literal["embedding", "block", "head", "around"]
"""What a unit computes: before the blocks, one of them, after them, or both ends of a unit around them."""


@dataclass(frozen=True, slots=True)
class ModelUnit:
    """One unit: its role, the index of its block (None beside the blocks), and its parameters' names and shapes."""

    name: str
    role: Role
    layer: int | None
    parameters: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(math.prod(shape) for _, shape in self.parameters)

    @property
    def facts(self) -> UnitFacts:
        """What the schedule has to know."""
        shapes = tuple(shape for _, shape in self.parameters)
        return UnitFacts(size_class=shapes, read_in_backward=self.role != "embedding")

    def gathered_numel(self, recipe: Recipe, ranks: int) -> int:
        """Elements of the gathered unit with its padding, as ``recipe`` shards it over ``ranks``."""
        if recipe.flat:
            return lay_out(self.name, self.parameters, ranks).numel
        return sum(-(-shape[0] // ranks) * ranks * math.prod(shape[1:]) for _, shape in self.parameters)


def model_units(model: ModelSpec, grouping: Grouping) -> tuple[ModelUnit, ...]:
    """The units of a Llama in the order in which forward meets them; a tied model's ends are one unit around the
    blocks, however they are grouped; except for buckets, which group nothing, so that a unit is just a place in time.
    """
    blocks = [ModelUnit(f"model.layers.{i}", "block", i, block_parameters(model, i)) for i in range(model.n_layers)]
    embedding = (("model.embed_tokens.weight", (model.vocab, model.dim)),)
    norm = (("model.norm.weight", (model.dim,)),)
    head = () if model.tied else (("lm_head.weight", (model.vocab, model.dim)),)
    if grouping == "root" or (model.tied and grouping == "ends"):
        return (ModelUnit("root", "around", None, (*embedding, *norm, *head)), *blocks)
    return (
        ModelUnit("model.embed_tokens", "embedding", None, embedding),
        *blocks,
        ModelUnit("model.norm+lm_head", "head", None, (*norm, *head)),
    )


def block_parameters(model: ModelSpec, layer: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes of one block's parameters in registration order.

    Raises:
        SpecError: the model is not one that refshard trains.
    """
    check_trainable(model)
    dim, ffn = model.dim, model.ffn_dim
    q_dim, kv_dim = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    norms = {"self_attn.q_norm": (model.head_dim,), "self_attn.k_norm": (model.head_dim,)} if model.query_norm else {}
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q_dim, dim),
        "self_attn.k_proj": (kv_dim, dim),
        "self_attn.v_proj": (kv_dim, dim),
        "self_attn.o_proj": (dim, q_dim),
        **norms,
        "mlp.gate_proj": (ffn, dim),
        "mlp.up_proj": (ffn, dim),
        "mlp.down_proj": (dim, ffn),
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
    }
    return tuple((f"model.layers.{layer}.{name}.weight", shape) for name, shape in shapes.items())
