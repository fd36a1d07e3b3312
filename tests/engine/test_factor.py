"""Gradients divided by another number than that of the ranks."""

import pytest
import torch

import refshard
from refshard.engine.placement import MODES
from refshard.errors import SpecError
from tests.engine.fakes import LateCollectives, Net, loss_of, make_batch, make_net


@pytest.fixture(params=list(MODES))
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def gradients(model: Net, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Of two microbatches, whose losses read a weight outside of its unit too; divided by ``factor``."""
    for step in range(2):
        (loss_of(model, make_batch(step)) + model.head.weight.square().sum()).backward()
    return {name: p.grad.view(p.shape) / factor for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:refshard. the order of execution changed")
def test_one_rank_divides_too(mode: str) -> None:
    bare, model = make_net(), make_net()
    refshard.shard(model, mode=mode, collectives=LateCollectives(), gradient_divide_factor=3)
    expected, found = gradients(bare, 3), gradients(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


@pytest.mark.filterwarnings("ignore:refshard. the order of execution changed")
def test_gradients_that_are_reduced_in_fp16_do_not_vanish(mode: str) -> None:
    """A gradient of 1e-3 divided by 1e6 is zero in fp16; the mean is divided in the masters' dtype."""
    bare, model = make_net(), make_net()
    precision = refshard.Precision(reduction=torch.float16)
    refshard.shard(model, mode=mode, collectives=LateCollectives(), precision=precision, gradient_divide_factor=1e6)
    expected, found = gradients(bare, 1e6), gradients(model)
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 2e-3 * value.norm(), name


@pytest.mark.parametrize("factor", [0, -2.0, float("inf"), float("nan")])
def test_the_factor_is_a_finite_number_above_zero(factor: float) -> None:
    with pytest.raises(SpecError, match=f"gradient_divide_factor: must be a finite number > 0, got {factor}"):
        refshard.shard(make_net(), collectives=LateCollectives(), gradient_divide_factor=factor)
