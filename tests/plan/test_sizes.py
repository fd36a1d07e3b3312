"""Parameters of a model's parts on one rank, against the count of the whole model."""

import pytest

from refshard import resources
from refshard.plan.kernels import sizes_of
from refshard.specs.model import ModelSpec, load_model, parameter_count

MODELS = sorted(resources.model_profiles())


def on_one_rank(model: ModelSpec, tp: int = 1, expert: int = 1) -> float:
    sizes, routed = sizes_of(model, tp, expert), model.expert_layers
    dense = (model.n_layers - routed) * sizes.dense
    return dense + routed * (sizes.routed + sizes.experts) + sizes.embedding + sizes.head


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_an_undivided_model_are_all_of_its_parameters(name: str) -> None:
    model = load_model(name)
    assert on_one_rank(model) == parameter_count(model)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_divide_matrices_hold_all_of_them_and_norms_each(name: str) -> None:
    """Routers, latent attention's narrow products and learned positions are whole on each rank, too."""
    model = load_model(name)
    twice = 2 * on_one_rank(model, tp=2)
    assert parameter_count(model) <= twice <= 1.003 * parameter_count(model)


@pytest.mark.parametrize("name", [name for name in MODELS if load_model(name).experts])
def test_expert_ranks_divide_experts_alone(name: str) -> None:
    model = load_model(name)
    whole, part = sizes_of(model, 1, 1), sizes_of(model, 1, 4)
    assert part.experts == whole.experts / 4
    assert (part.dense, part.routed, part.embedding, part.head) == (
        whole.dense, whole.routed, whole.embedding, whole.head,
    )  # fmt: skip


def test_a_tied_head_has_only_its_norm() -> None:
    model = load_model("llama3.2-1b")
    assert sizes_of(model, 1, 1).head == model.dim
