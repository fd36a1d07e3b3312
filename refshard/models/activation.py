"""Activation checkpointing by layer: a layer keeps its input, and perhaps more; backward computes the rest again."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from refshard.models.llama import Llama
from refshard.specs.layers import Checkpointing

_ATTENTION = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default
    for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
)


def checkpoint_layers(model: Llama, chosen: Checkpointing) -> None:
    """As :func:`recompute`, for the layers of a Llama; the generator's state is kept if the model has dropout."""
    random = any(isinstance(module, nn.Dropout) and module.p for module in model.modules())
    recompute(model.model.layers, chosen, random=random)


def recompute(layers: Iterable[nn.Module], chosen: Checkpointing, *, random: bool) -> None:
    """Let the ``chosen`` layers recompute their activations, in place.

    Call it before the model is sharded. Only the instance's ``forward`` is wrapped: modules and parameters keep their
    names, and the hooks of a strategy run outside of the recomputation, once in forward and never in backward. A unit
    is gathered for backward before its recomputation, which starts when autograd asks for the first saved tensor, after
    the hooks on the layer's output. If the layers are ``random``, recomputation draws the same numbers again.
    """
    layers = list(layers)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if chosen.by_op:
        options["context_fn"] = _keeping_by_op
    for index in chosen.layers:
        layer = layers[index]
        layer.forward = partial(checkpoint, layer.forward, **options)


def _keeping_by_op() -> Any:
    """Contexts of one layer's forward and of its recomputation, in which attention's output and every second matrix
    product's, from the first on, are kept.
    """
    products = {False: 0, True: 0}

    def decide(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = op in _ATTENTION
        if op == torch.ops.aten.mm.default:
            kept = products[context.is_recompute] % 2 == 0
            products[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)
