"""Parameters of a model's parts on one rank, after tensor and expert parallelism."""

from dataclasses import dataclass

from refshard.plan.kernels import Linear, attention_linears, feed_forward_linears
from refshard.specs.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Elements on one rank: of a dense layer and of a mixture's, without and with its experts, and of both ends; and of
    the feed-forward of the larger kind of layer.
    """

    dense: float
    routed: float
    experts: float
    embedding: float
    head: float
    feed_forward: float


def sizes_of(model: ModelSpec, tensor: int, expert: int) -> Sizes:
    """The parts on a rank of ``tensor`` ranks that divide each matrix, and ``expert`` that divide the experts."""
    norm = model.dim * (2 if model.biased or model.norm_biases else 1)
    norms = (4 if model.extra_norms else 2) * norm + (2 * model.head_dim if model.query_norm else 0)
    norms += model.latent.query_rank + model.latent.kv_rank if model.latent else 0
    attention = [*attention_linears(model)]
    dense = _numel([*attention, *feed_forward_linears(model)], tensor, 1, biased=model.biased) + norms
    mixture = feed_forward_linears(model, dense=False) if model.experts else ()
    routed = _numel([*attention, *(one for one in mixture if one.count == 1)], tensor, 1, biased=model.biased) + norms
    experts = _numel([one for one in mixture if one.count > 1], tensor, expert, biased=False)
    inner = _numel([*feed_forward_linears(model)], tensor, 1, biased=model.biased)
    mixed = _numel([one for one in mixture if one.count == 1], tensor, 1, biased=model.biased) + experts
    ends = model.vocab * model.dim / tensor
    positions = model.positions * model.dim
    return Sizes(
        dense=dense, routed=routed if model.experts else 0.0, experts=experts, embedding=ends + positions,
        head=norm + (0.0 if model.tied else ends), feed_forward=mixed if routed + experts > dense else inner,
    )  # fmt: skip


def _numel(linears: list[Linear], tensor: int, expert: int, *, biased: bool) -> float:
    total = 0.0
    for one in linears:
        part = tensor if one.split != "whole" else 1
        total += one.numel / part / (expert if one.count > 1 else 1)
        if biased:
            total += one.n / (tensor if one.split == "columns" else 1)
    return total
