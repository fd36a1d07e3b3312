"""Which layers a policy checkpoints, and that recomputing them changes memory and nothing else."""

import pytest
import torch
from torch import Tensor, nn

from refshard.errors import SpecError
from refshard.models.activation import checkpoint_layers
from refshard.models.llama import Llama, initialise, next_token_loss
from refshard.specs.layers import checkpointing_of
from tests.models import small_spec


@pytest.mark.parametrize(
    ("policy", "layers"),
    [
        ("none", set()),
        ("full", {0, 1, 2, 3, 4}),
        ("every-1", {0, 1, 2, 3, 4}),
        ("every-2", {1, 3}),
        ("every-5", {4}),
        ([0, 4], {0, 4}),
    ],
)
def test_a_policy_is_a_set_of_layers(policy: str | list[int], layers: set[int]) -> None:
    assert checkpointing_of(policy, 5).layers == layers


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            "some",
            r"checkpointing must be 'none', 'full', 'selective', 'every-K', 'first-N' or .*, got 'some'; correct it",
        ),
        ("every-0", r"checkpointing must be .*, got 'every-0'"),
        ("every-6", r"checkpointing: its number must be at most the 5 layers, got 'every-6'; lower it"),
        ([1, 5], r"checkpointing: layers must lie in 0..4, got 5; name layers that the model has"),
    ],
)
def test_a_policy_that_the_model_cannot_follow_is_refused(policy: str | list[int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        checkpointing_of(policy, 5)


def step(policy: str | list[int]) -> tuple[Llama, list[str], Tensor, dict[str, Tensor]]:
    """One step's loss and gradients, and every call of a block that its hooks and of an MLP that its body saw."""
    model = Llama(small_spec(n_layers=4))
    initialise(model, 0)
    checkpoint_layers(model, checkpointing_of(policy, len(model.model.layers)))
    calls: list[str] = []

    def seen(name: str) -> None:
        model.get_submodule(name).register_forward_pre_hook(lambda *_: calls.append(name))

    for index in range(4):
        seen(f"model.layers.{index}")
        seen(f"model.layers.{index}.mlp.gate_proj")
    tokens_BT = torch.arange(32).view(2, 16)
    loss = next_token_loss(model(tokens_BT), tokens_BT)
    loss.backward()
    return model, calls, loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_checkpointed_layers_compute_twice_and_their_own_hooks_run_once() -> None:
    _, calls, _, _ = step([1, 3])
    assert [calls.count(f"model.layers.{i}") for i in range(4)] == [1, 1, 1, 1]
    assert [calls.count(f"model.layers.{i}.mlp.gate_proj") for i in range(4)] == [1, 2, 1, 2]


@pytest.mark.parametrize("policy", ["full", "every-2", [0]])
def test_losses_gradients_and_names_stay_to_the_bit(policy: str | list[int]) -> None:
    plain, _, loss, gradients = step("none")
    model, _, same_loss, same_gradients = step(policy)
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(loss, same_loss)
    assert gradients.keys() == same_gradients.keys()
    assert all(torch.equal(gradients[name], same_gradients[name]) for name in gradients)


def test_a_checkpointed_layer_keeps_its_input_and_not_its_activations() -> None:
    """Bytes that autograd saves in forward: what the blocks' insides save is gone."""

    def saved(policy: str) -> int:
        model = Llama(small_spec(n_layers=4))
        initialise(model, 0)
        checkpoint_layers(model, checkpointing_of(policy, len(model.model.layers)))
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tokens_BT = torch.arange(64).view(2, 32)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = next_token_loss(model(tokens_BT), tokens_BT)
        assert loss.requires_grad
        return sum(held.values())

    assert saved("full") < saved("none") / 3
