"""Activation checkpointing per layer: a layer keeps its input only, and backward computes the rest again."""

from collections.abc import Sequence
from functools import partial

from torch.utils.checkpoint import checkpoint

from refshard.errors import SpecError
from refshard.models.llama import Llama


def checkpointed_layers(policy: str | Sequence[int], n_layers: int) -> frozenset[int]:
    """Indices, from 0, of the layers that ``policy`` checkpoints.

    ``"every-K"`` takes each K-th layer, counted from 1: layers K-1, 2K-1, ... (torchtitan's selective layer
    checkpointing counts so too).

    Raises:
        SpecError: the policy is unknown, or names a layer that the model does not have.
    """
    if policy == "none":
        return frozenset()
    if policy == "full":
        return frozenset(range(n_layers))
    if isinstance(policy, str):
        prefix, _, digits = policy.partition("-")
        if prefix != "every" or not digits.isdecimal() or int(digits) < 1:
            raise SpecError(
                f"checkpointing must be 'none', 'full', 'every-K' or a list of layers, got {policy!r}; correct it"
            )
        if int(digits) > n_layers:
            raise SpecError(
                f"checkpointing: K must be at most the model's {n_layers} layers, got {policy!r}; write 'none' for none"
            )
        return frozenset(range(int(digits) - 1, n_layers, int(digits)))
    if outside := [index for index in policy if not 0 <= index < n_layers]:
        raise SpecError(
            f"checkpointing: layers must lie in 0..{n_layers - 1}, got {outside[0]}; name layers that the model has"
        )
    return frozenset(policy)


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
