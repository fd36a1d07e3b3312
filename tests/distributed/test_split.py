"""The engine over parameters that tensor parallelism has split: norms, clipping, whole parameters, refusals."""

import math
import re
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import refshard
from refshard.engine.placement import MODES
from refshard.engine.split import Split
from refshard.errors import EngineError
from refshard.models.llama import Llama, initialise, next_token_loss
from refshard.strategies.tensor_parallel import split
from tests.distributed.ranks import run_ranks
from tests.models import small_spec

pytestmark = pytest.mark.processes

NORMS = (1.0, 2.0, math.inf)


def make_model(tied: bool = False) -> Llama:
    model = Llama(small_spec(n_layers=2, tied=tied))
    initialise(model, 0)
    return model


def tokens() -> torch.Tensor:
    return torch.arange(48).view(4, 12) * 7 % 100


def mesh_of_two_axes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))


def clip() -> dict[Any, Any]:
    """Per mode the norms that refshard and torch find, and full parameters after a clipped step."""
    found: dict[Any, Any] = {}
    mesh = mesh_of_two_axes()
    for mode in MODES:
        model = make_model()
        split(model, mesh["tensor"])
        refshard.shard(model, mesh["shard"], mode=mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = tokens().chunk(2)[mesh["shard"].get_local_rank()]
        next_token_loss(model(rows), rows).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        before = [gradient.clone() for gradient in gradients]
        for p in NORMS:
            norms = [refshard.clip_grad_norm_(model, 1e-3, p).item()]
            for gradient, value in zip(gradients, before):
                gradient.copy_(value)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, p).item())
            found[mode, p] = norms
        optimizer.step()
        found[mode, "parameters"] = dict(refshard.full_parameters(model))
        found[mode, "sums"] = norm_of_summed_gradients(mode, mesh)
        found[mode, "sums over replicas"] = norm_of_summed_gradients(mode, mesh, splits=False)
    return found


def norm_of_summed_gradients(mode: str, mesh: DeviceMesh, *, splits: bool = True) -> float:
    """Where gradients are sums over the shard axis, while the ranks of the other axis hold parts of one gradient; or,
    where it does not split the model, over both.
    """
    model = make_model()
    if splits:
        split(model, mesh["tensor"])
    refshard.shard(model, mesh["shard"] if splits else mesh, mode=mode, gradient_divide_factor=1)
    rows = tokens().chunk(2 if splits else 4)[mesh["shard"].get_local_rank() if splits else mesh.get_rank()]
    next_token_loss(model(rows), rows).backward()
    return refshard.clip_grad_norm_(model, 1e9).item()


def test_norms_and_a_step_are_those_of_one_whole_model() -> None:
    bare = make_model()
    next_token_loss(bare(tokens()), tokens()).backward()
    elements = torch.cat([p.grad.flatten() for p in bare.parameters() if p.grad is not None])
    torch.optim.SGD(bare.parameters(), lr=0.1).step()
    for found in run_ranks(4, clip):
        for mode in MODES:
            for p in NORMS:
                assert found[mode, p] == pytest.approx([elements.norm(p).item()] * 2, rel=1e-5)
            assert found[mode, "sums"] == pytest.approx(2 * elements.norm().item(), rel=1e-5)
            assert found[mode, "sums over replicas"] == pytest.approx(4 * elements.norm().item(), rel=1e-5)
            whole = found[mode, "parameters"]
            assert whole.keys() == dict(bare.named_parameters()).keys()
            for name, parameter in bare.named_parameters():
                torch.testing.assert_close(whole[name], parameter.detach(), rtol=1e-4, atol=1e-6, msg=name)


def splits() -> list[str]:
    mesh = mesh_of_two_axes()
    even = Split.of("a", distribute_tensor(torch.zeros(4, 3), mesh["tensor"], [Shard(0)]))
    assert even is not None
    assert even.divided
    whole = Split.of("a", distribute_tensor(torch.zeros(5), mesh["tensor"], [Replicate()]))
    assert whole is not None
    assert not whole.divided
    assert Split.of("a", torch.zeros(3)) is None
    messages = []
    for parameter in (
        distribute_tensor(torch.zeros(5, 3), mesh["tensor"], [Shard(0)]),
        distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Shard(1)]),
    ):
        with pytest.raises(EngineError) as refused:
            Split.of("a", parameter)
        messages.append(str(refused.value))
    return messages


def test_what_is_split_unevenly_or_over_several_axes_is_refused() -> None:
    for uneven, several in run_ranks(4, splits):
        assert "parameter 'a' must be split evenly over one axis of a mesh" in uneven
        assert "of (5, 3) over 1 axes, 2 ranks; choose a degree that divides it" in uneven
        assert "over 2 axes, 4 ranks" in several


def step_whole() -> tuple[str, list[bool]]:
    """What whole tensors of split parameters raise, and whether those that each rank has whole are stepped right."""
    mesh, model, bare = mesh_of_two_axes(), make_model(), make_model()
    split(model, mesh["tensor"])
    refshard.shard(model, mesh["shard"], mode="fsdp")
    with pytest.raises(EngineError) as refused:
        refshard.whole_tensors(torch.optim.Adafactor, model)
    names = [name for name, _ in bare.named_parameters() if "norm" in name]
    mine, theirs = ([dict(m.named_parameters())[name] for name in names] for m in (model, bare))
    optimizer = refshard.whole_tensors(torch.optim.Adafactor, model, mine)
    alone = torch.optim.Adafactor(theirs)
    for parameter, other in zip(mine, theirs):
        other.grad = torch.arange(1.0, 1 + other.numel()).view_as(other)
        parameter.grad = other.grad.clone()
    optimizer.step()
    alone.step()
    wholes = dict(refshard.full_parameters(model))
    return str(refused.value), [torch.equal(wholes[name], other) for name, other in zip(names, theirs)]


def test_optimizers_of_whole_tensors_refuse_what_is_split() -> None:
    for message, right in run_ranks(4, step_whole):
        assert re.search(r"whole_tensors: '.*' of shape .* is split by tensor parallelism", message)
        assert right
        assert all(right)
