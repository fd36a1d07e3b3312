"""Activation checkpointing per layer: a layer keeps its input only, and backward computes the rest again."""

from collections.abc import Sequence
from functools import partial

from torch.utils.checkpoint import checkpoint

from refshard.models.llama import Llama
from refshard.plan.checkpointing import checkpointed_layers


def checkpoint_layers(model: Llama, policy: str | Sequence[int]) -> None:
    """Let the layers of ``model`` that ``policy`` names recompute their activations, in place.

    To be called before the model is sharded. Only the instance's ``forward`` is wrapped: modules and parameters keep
    their names, and whatever hooks a strategy puts on a layer run outside of what is recomputed, once in forward and
    never in backward. A unit is gathered for backward before its recomputation, since that starts when autograd asks
    for the first saved tensor, which is after the hooks on the layer's output.

    Raises:
        SpecError: see :func:`checkpointed_layers`.
    """
    for index in checkpointed_layers(policy, model.spec.n_layers):
        layer = model.model.layers[index]
        # The model draws nothing at random, so there is no generator's state to keep.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
