"""What operators do on local parts: the rules of dispatch, with several ranks played in one process."""

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from refshard.engine.collectives import Together
from refshard.engine.local_part import LocalPart, local_of
from refshard.engine.whole import Whole
from refshard.errors import EngineError
from tests.engine.fakes import LateCollectives

SHAPE = (3, 5)
CUTS = (0, 4, 4, 13, 15)
"""Four ranks; the second has nothing."""


class OneOfSeveral(LateCollectives):
    """One of several ranks, alone. Its reductions find what the others contributed to theirs in the pass before."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self.heard: list[list[torch.Tensor]] = []
        self.said: list[torch.Tensor] = []

    def reduce_over_shards(self, tensor: torch.Tensor, op: str) -> None:
        index = len(self.said)
        self.issued.append((op, tensor.nbytes))
        self.said.append(tensor.clone())
        for other in self.heard[index] if index < len(self.heard) else []:
            tensor.copy_(tensor + other if op == "sum" else torch.maximum(tensor, other))


class Ranks:
    """The same tensors on several ranks, each with its part."""

    def __init__(self, shape: tuple[int, ...] = SHAPE, cuts: tuple[int, ...] = CUTS) -> None:
        ranges = tuple(pairwise(cuts))
        self.axes = [OneOfSeveral(rank, len(ranges)) for rank in range(len(ranges))]
        self.wholes = [Whole("layers.0.weight", torch.Size(shape), ranges, axis) for axis in self.axes]

    def parts(self, tensor: torch.Tensor) -> list[LocalPart]:
        return [LocalPart(tensor.reshape(-1)[w.start : w.stop].clone(), w) for w in self.wholes]

    def gathered(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What parts come to, once they are sure to be parts of one whole."""
        assert all(type(part) is LocalPart and part.shape == parts[0].shape for part in parts)
        return torch.cat([local_of(part) for part in parts]).view(parts[0].shape)

    def collectively(self, call: Callable[[int], Any]) -> list[Any]:
        """``call(rank)`` on all ranks. Repeated, since a reduction may depend on what an earlier one found."""
        for _ in range(3):
            for axis in self.axes:
                axis.said.clear()
            results = [call(rank) for rank in range(len(self.axes))]
            for axis in self.axes:
                others = [other.said for other in self.axes if other is not axis]
                axis.heard = [[said[i] for said in others] for i in range(len(axis.said))]
        return results


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def values(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


MASK = values(3) > 0
ROW, COLUMN = values(4)[:1], values(5)[:, :1]
ELEMENTWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a scalar": lambda a, _: a * 2.5 + 1,
    "two parts": lambda a, b: a / (b.abs() + 1),
    "functions": lambda a, b: (a.exp().log1p().sqrt().sigmoid() - b.neg()).clamp(-0.5, 0.5),
    "lerp, addcmul, addcdiv": lambda a, b: a.lerp(b, 0.3).addcmul(a, b, value=2).addcdiv(a, b.square() + 1),
    "where": lambda a, b: torch.where(a > b, a, b),
    "a mask of the whole": lambda a, _: torch.where(MASK, a, 0.0) * MASK,
    "a whole on the left": lambda a, _: values(6) - a,
    "a row and a column": lambda a, _: a * ROW + COLUMN,
    "a 0-d tensor": lambda a, _: a * torch.tensor(3.0) + torch.tensor([2.0]),
    "a wider 0-d tensor": lambda a, _: a * torch.tensor(3.0, dtype=torch.float64),
    "a wider whole": lambda a, _: a * values(6, torch.float64),
    "masked_fill": lambda a, _: a.masked_fill(MASK, 7.0),
    "factories": lambda a, b: torch.zeros_like(a) + torch.ones_like(b) + torch.full_like(a, 3.0) + a.new_zeros(a.shape),
    "clones and dtypes": lambda a, _: a.clone().double().to(torch.bfloat16).float() + a.detach() + a.data,
    "in place": lambda a, b: a.clone().add_(b).mul_(MASK).copy_(values(7)).sub_(b, alpha=2),
    "out": lambda a, b: torch.mul(a, b, out=torch.empty_like(a)),
    "foreach": lambda a, b: torch._foreach_add(torch._foreach_mul([a, b], 2.0), [b, a])[0],
    "foreach in place": lambda a, b: _in_place(torch._foreach_addcmul_, [a.clone()], [a], [b], 0.5),
    "assignment by a mask": lambda a, b: _assigned(a.clone(), b > 0),
    "booleans": lambda a, _: (a.isnan() | (a > 0)) ^ MASK,
    "reshapes": lambda a, b: (a.view(-1) + b.reshape(15)).view(5, 3).unsqueeze(0).squeeze(0).reshape(SHAPE),
    "more reshapes": lambda a, b: a.flatten().unflatten(0, SHAPE).contiguous().view_as(a).expand(3, 5).expand_as(b),
}


def _assigned(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    tensor[mask] = 0.5
    tensor[MASK] = -2.0
    return tensor


def _in_place(operator: Callable[..., Any], tensors: list[torch.Tensor], *others: Any) -> torch.Tensor:
    operator(tensors, *others)
    return tensors[0]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operators_give_what_the_whole_gives(ranks: Ranks, name: str) -> None:
    operator, a, b = ELEMENTWISE[name], values(1), values(2)
    found = [operator(mine, other) for mine, other in zip(ranks.parts(a), ranks.parts(b))]
    expected = operator(a, b)
    assert found[0].dtype == expected.dtype
    assert torch.equal(ranks.gathered(found), expected)


REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{f"norm {p}": partial(torch.linalg.vector_norm, ord=p) for p in (0.5, 1, 2, 3, math.inf)},
    "linalg.norm": torch.linalg.norm,
    "vector_norm, all dimensions": lambda a: torch.linalg.vector_norm(a, dim=(0, 1), keepdim=True),
    "norm of a detached, scaled, flat double": lambda a: (a.detach().data.double() * 2).view(-1).norm(),
    "sum of squares": lambda a: a.pow(2).sum(),
    "sum": torch.sum,
    "sum over all dimensions": lambda a: a.sum((0, -1), keepdim=True),
    "mean": torch.mean,
    "max": torch.max,
    "min": lambda a: a.min(),
    "amax": lambda a: a.abs().amax(),
    "amin": lambda a: a.amin((0, 1)),
    "any": lambda a: (a > 2).any(),
    "none": lambda a: a.isnan().any() | a.isinf().any(),
    "any of bytes": lambda a: (a > 2).to(torch.uint8).any(),
    "all": lambda a: (a < 9).all(),
    "not all": lambda a: (a < 0).all(),
    "count": lambda a: (a > 0).count_nonzero(),
    "count of booleans": lambda a: (a > 0).sum(),
    "var": lambda a: a.var(),
    "std": lambda a: a.std(correction=0),
    "dot": lambda a: a.view(-1).dot(a.flatten() + 1),
    "float mean of booleans": lambda a: (a > 0).float().mean(),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_over_everything_are_the_wholes(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    whole = values(1, dtype)
    expected = REDUCTIONS[name](whole)
    parts = ranks.parts(whole)
    for found in ranks.collectively(lambda rank: REDUCTIONS[name](parts[rank])):
        assert type(found) is torch.Tensor
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["max", "min", "norm inf", "norm 2", "amax"])
def test_a_nan_of_one_rank_is_everybodys(ranks: Ranks, name: str) -> None:
    whole = values(1)
    whole[2, 1] = math.nan
    parts = ranks.parts(whole)
    assert all(found.isnan() for found in ranks.collectively(lambda rank: REDUCTIONS[name](parts[rank])))


def test_norms_of_lists_take_one_collective(ranks: Ranks) -> None:
    a, b = ranks.parts(values(1)), ranks.parts(values(2))
    plain = values(9)
    found = ranks.collectively(lambda rank: torch._foreach_norm([a[rank], plain, b[rank]], 2.0))
    for norms in found:
        expected = [values(1).norm(), plain.norm(), values(2).norm()]
        torch.testing.assert_close(norms, expected)
    assert all(len(axis.said) == 1 for axis in ranks.axes)


def test_complex_parts_have_norms_and_real_views(ranks: Ranks) -> None:
    whole = torch.complex(values(1), values(2))
    parts = ranks.parts(whole)
    for found in ranks.collectively(lambda rank: parts[rank].norm()):
        torch.testing.assert_close(found, whole.norm())
    assert torch.equal(ranks.gathered([torch.view_as_real(p) * 2 for p in parts]), torch.view_as_real(whole) * 2)


def test_equality_is_everybodys(ranks: Ranks) -> None:
    other = values(1)
    other[2, 4] = 0
    a, b = ranks.parts(values(1)), ranks.parts(other)
    assert ranks.collectively(lambda rank: torch.equal(a[rank], a[rank])) == [True] * 4
    assert ranks.collectively(lambda rank: torch.equal(a[rank], b[rank])) == [False] * 4
    assert ranks.collectively(lambda rank: torch.equal(a[rank], values(1))) == [True] * 4
    assert not torch.equal(a[0], values(1)[0])
    one = Ranks((1,), (0, 0, 1)).parts(torch.ones(1))
    assert [torch.equal(part, torch.ones(1)) for part in one] == [True] * 2
    assert ranks.collectively(lambda rank: torch.allclose(a[rank], values(1))) == [True] * 4


PENALTIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum of squares": lambda p: p.pow(2).sum(),
    "square, mean": lambda p: p.square().mean(),
    "sum": lambda p: p.sum() * 3,
    "norm": lambda p: p.norm() * 2,
    "norm 1": lambda p: p.norm(1),
    "flat, masked": lambda p: (p.view(-1) * MASK.view(-1)).abs().sum(),
    "standard deviation": lambda p: p.double().std() + p.mean(),
    "dot": lambda p: p.flatten().dot(p.flatten()),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_on_parameters_have_the_wholes_gradient(ranks: Ranks, name: str) -> None:
    """Not scaled by the number of ranks; and each rank's part of it."""
    whole = nn.Parameter(values(1))
    for _ in range(2):  # the second adds up
        PENALTIES[name](whole).backward()
    parameters = [nn.Parameter(part) for part in ranks.parts(values(1))]
    for p, w in zip(parameters, ranks.wholes):
        p.register_hook(lambda g, w=w: g if isinstance(g, LocalPart) else LocalPart(w.cut(g).clone(), w))

    def twice(rank: int) -> torch.Tensor:
        parameters[rank].grad = None
        for _ in range(2):
            PENALTIES[name](parameters[rank]).backward()
        gradient = parameters[rank].grad
        assert gradient is not None
        return gradient

    found = ranks.collectively(twice)
    assert whole.grad is not None
    torch.testing.assert_close(ranks.gathered(found), whole.grad)


@pytest.mark.parametrize("averages", [False, True])
def test_means_go_over_replicas_that_add_up_or_average(averages: bool) -> None:
    """NCCL's all-reduce averages by itself."""

    class Alike(LateCollectives):
        replicas = 3
        scale = 1.0 if averages else 1 / 3

        def all_reduce(self, tensor: torch.Tensor) -> Together:
            tensor.mul_(1 if averages else 3)
            return Together(())

    whole = Whole("weight", torch.Size(SHAPE), ((0, 15),), Alike())
    torch.testing.assert_close(whole.mean_over_ranks(torch.tensor(3.0)), torch.tensor(3.0))
    torch.testing.assert_close(whole.mean_part(values(1)), values(1).view(-1))


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "mm": lambda a: a @ torch.ones(5, 2),
    "t": lambda a: nn.functional.linear(torch.ones(2, 5), a),
    "transpose": lambda a: a.transpose(0, 1),
    "permute": lambda a: a.permute(1, 0),
    "select": lambda a: a[0],
    "slice": lambda a: a[:, 1:],
    "index": lambda a: a[MASK],
    "index_put_": lambda a: a.index_put_((torch.tensor([1]),), torch.tensor(0.0)),
    "sum": lambda a: a.sum(0),
    "mean": lambda a: a.mean(dim=1),
    "linalg_vector_norm": lambda a: a.norm(dim=1),
    "max": lambda a: a.max(0),
    "any": lambda a: a.isnan().any(1),
    "all": lambda a: (a > 0).all(dim=()),
    "dot": lambda a: torch.dot(a.view(15), a.view(15), out=torch.zeros(())),
    "sigmoid": lambda a: torch.sigmoid(torch.ones(5), out=a.data),
    "_foreach_powsum": lambda a: torch._foreach_powsum([a], 2),
    "argmax": lambda a: a.argmax(),
    "sort": lambda a: a.view(-1).sort(),
    "cat": lambda a: torch.cat([a, a]),
    "stack": lambda a: torch.stack([a, a]),
    "embedding": lambda a: nn.functional.embedding(torch.tensor([1]), a),
    "_softmax": lambda a: a.softmax(-1),
    "cumsum": lambda a: a.cumsum(0),
    "expand": lambda a: a.expand(2, 3, 5),
    "flip": lambda a: a.flip(0),
    "mul": lambda a: a * torch.ones(4, 3, 5),
    "add": lambda a: a + torch.ones(4),
    "copy_": lambda a: torch.zeros(SHAPE).copy_(a),
    "add_": lambda a: torch.zeros(SHAPE).add_(a),
    "mul_": lambda a: a.view(5, 3).mul_(a),
    "_foreach_add_": lambda a: torch._foreach_add_([torch.zeros(SHAPE)], [a]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_everything_else_is_refused_in_one_sentence(ranks: Ranks, name: str) -> None:
    """It names the operator, the parameter, what is held and what to call."""
    part = nn.Parameter(ranks.parts(values())[2])
    with torch.no_grad(), pytest.raises(EngineError) as refused:
        REFUSED[name](part)
    message = str(refused.value)
    assert message.startswith(f"{name} of 'layers.0.weight' of shape [")
    assert "this rank holds elements 4 to 13 of 15" in message
    assert "call full_tensor() for the whole, or to_local() for this rank's elements; " in message
    assert message.endswith("reads its weights outside of forward needs refshard.register_forward_method")


HANDED_OUT: list[Callable[[Any], object]] = [
    lambda a: a.tolist(), lambda a: a.numpy(), np.asarray, np.from_dlpack, torch.Tensor.item, bool, list, float,
]  # fmt: skip


@pytest.mark.parametrize("call", HANDED_OUT)
def test_nothing_hands_out_the_part_as_the_whole(ranks: Ranks, call: Callable[[Any], object]) -> None:
    with pytest.raises((EngineError, RuntimeError, ValueError)):
        call(ranks.parts(values())[2])


def test_a_plain_tensor_as_long_as_the_part_is_not_taken_for_it(ranks: Ranks) -> None:
    part = ranks.parts(values())[2]
    with pytest.raises(EngineError, match=r"a plain tensor of shape \[9\] cannot be expanded .* to_local\(\)"):
        part + torch.ones(9)


def test_parts_of_different_ranges_do_not_mix() -> None:
    one, other = Ranks(), Ranks(cuts=(0, 4, 5, 13, 15))
    other.wholes[2].collectives = one.axes[2]
    with pytest.raises(EngineError, match=r"elements 4 to 13 of 15, but elements 5 to 13 of 15 of"):
        one.parts(values())[2] + other.parts(values())[2]


def test_another_parameter_of_the_same_shape_and_ranges_does(ranks: Ranks) -> None:
    part = ranks.parts(values(1))[2]
    whole = part._whole
    other = LocalPart(local_of(part) * 2, Whole("other", whole.shape, whole.ranges, whole.collectives))
    assert torch.equal(local_of(part + other), local_of(part) * 3)


def test_a_scalar_parameter_belongs_to_one_rank() -> None:
    made = Ranks((), (0, 0, 1, 1))
    parts = made.parts(torch.tensor(2.0))
    assert [local_of(p).numel() for p in parts] == [0, 1, 0]
    assert all(p.shape == () and (p * 3).shape == () for p in parts)
    assert parts[1].item() == 2.0
    assert (parts[1] * torch.tensor(1.0, dtype=torch.float64)).dtype is torch.float64
    assert torch.equal(local_of(parts[1].clone().copy_(torch.tensor(5.0))), torch.tensor([5.0]))


def test_the_shape_is_the_wholes_and_the_memory_is_the_ranks(ranks: Ranks) -> None:
    flat = torch.zeros(20)
    with torch.no_grad():
        parameter: Any = nn.Parameter(LocalPart(flat[3:12], ranks.wholes[2]))
    assert all(isinstance(parameter, kind) for kind in (nn.Parameter, LocalPart))
    assert (parameter.shape, parameter.ndim, parameter.numel(), len(parameter)) == (SHAPE, 2, 15, 3)
    assert parameter.is_leaf
    assert parameter.requires_grad
    local: torch.Tensor = parameter.to_local()
    assert (type(local), local.shape, local.requires_grad) == (torch.Tensor, (9,), False)
    local.fill_(2.0)
    assert flat.tolist() == [0] * 3 + [2] * 9 + [0] * 8
    module = nn.Module()
    module.weight = parameter
    assert [n for n, _ in module.named_parameters()] == ["weight"]


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda p: p.mul_(2),
    "data": lambda p: p.data.add_(1),
    "detach": lambda p: p.detach().view(-1).zero_(),
    "to_local": lambda p: p.to_local().zero_(),  # type: ignore[attr-defined]
    "copy_ of the whole": lambda p: p.copy_(values()),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "out": lambda p: torch.mul(p, 2.0, out=p.data),
    "fused": lambda p: torch._fused_adamw_(
        [p.data], [torch.zeros_like(p.data)], [torch.zeros_like(p.data)], [torch.zeros_like(p.data)], [],
        [torch.tensor(1.0)], lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WRITES)
def test_every_write_raises_the_version_of_the_memory(ranks: Ranks, way: str) -> None:
    flat = torch.zeros(20)
    with torch.no_grad():
        parameter = nn.Parameter(LocalPart(flat[3:12], ranks.wholes[2]))
        before = flat._version
        WRITES[way](parameter)
    assert flat._version > before


def test_data_cannot_be_replaced(ranks: Ranks) -> None:
    parameter = nn.Parameter(ranks.parts(values())[2])
    parameter.data = parameter.data.contiguous()
    with pytest.raises(EngineError, match=r"\.data cannot be replaced, .* copy values in place with \.copy_\(\)"):
        parameter.data = torch.zeros(SHAPE)


def test_a_part_prints_itself_without_a_collective(ranks: Ranks) -> None:
    part = ranks.parts(values())[1]
    assert str(part) == "LocalPart('layers.0.weight' of shape [3, 5], elements 4 to 4 of 15: tensor([]))"
    assert f"{nn.Parameter(part)}".startswith("Parameter LocalPart('layers.0.weight'")
    assert not ranks.axes[1].issued


@pytest.mark.parametrize("save", [pickle.dumps, lambda v: torch.save({"model": v}, io.BytesIO())])
def test_a_part_cannot_be_saved_as_if_it_were_the_whole(ranks: Ranks, save: Callable[[object], object]) -> None:
    with pytest.raises(EngineError, match=r"torch\.distributed\.checkpoint\.save .*full_state_dict\(model\)"):
        save(nn.Parameter(ranks.parts(values())[2]))


def test_a_copy_is_a_part_of_its_own(ranks: Ranks) -> None:
    parameter = nn.Parameter(ranks.parts(values())[2])
    parameter.is_bias = True  # type: ignore[attr-defined]
    parameter.grad = torch.ones_like(parameter)
    average = copy.deepcopy(parameter)
    assert isinstance(average, nn.Parameter)
    assert average.is_bias  # type: ignore[attr-defined]
    with torch.no_grad():
        average.lerp_(parameter + 1, 0.5)
    torch.testing.assert_close(local_of(average), local_of(parameter).detach() + 0.5)
    assert average.grad is None


@contextmanager
def replicated(ranks: Ranks) -> Iterator[None]:
    for axis in ranks.axes:
        axis.replicas = 2
    yield


def test_noise_is_drawn_by_each_rank_for_its_elements_unless_replicas_would_differ(ranks: Ranks) -> None:
    part = ranks.parts(values())[2]
    for made in (torch.rand_like(part), torch.randn_like(part), part.clone().normal_(), part.clone().bernoulli_(0.5)):
        assert local_of(made).shape == (9,)
    dropped = nn.functional.dropout(nn.Parameter(part), 0.5)
    assert dropped.shape == SHAPE
    with replicated(ranks), pytest.raises(EngineError, match="each replica would draw other numbers"):
        part.normal_()


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    **{
        f"{kind.__name__} {flag}": lambda p, kind=kind, flag=flag: kind(p, lr=0.02, **{flag: True})  # type: ignore[misc]
        for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
        for flag in ("fused", "foreach")
    },
    **{
        kind.__name__: lambda p, kind=kind: kind(p, foreach=False)  # type: ignore[misc]
        for kind in (
            torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
            torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.ASGD,
        )
    },
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_for_the_whole(ranks: Ranks, name: str) -> None:
    whole = nn.Parameter(values(1))
    parameters = [nn.Parameter(part) for part in ranks.parts(values(1))]
    optimizers = [OPTIMIZERS[name]([p]) for p in (whole, *parameters)]
    for step in range(3):
        whole.grad = values(10 + step)
        for parameter, part in zip(parameters, ranks.parts(values(10 + step))):
            parameter.grad = part
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ranks.gathered([p.detach() for p in parameters]), whole.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "way",
    [{"fused": True}, *(pytest.param({"foreach": each}, marks=pytest.mark.full) for each in (False, True))],
    ids=str,
)
@pytest.mark.processes
def test_a_step_can_be_compiled(ranks: Ranks, way: dict[str, Any]) -> None:
    parameters, others = ([nn.Parameter(p) for p in ranks.parts(values(1))] for _ in range(2))
    optimizer, other = (torch.optim.AdamW(p, lr=0.1, **way) for p in (parameters, others))
    torch._dynamo.reset()
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    before = [local_of(p)._version for p in parameters]
    for step in range(2):
        for held in (parameters, others):
            for parameter, part in zip(held, ranks.parts(values(10 + step))):
                parameter.grad = part
        compiled()
        other.step()
    torch.testing.assert_close([local_of(p) for p in parameters], [local_of(p) for p in others])
    assert all(local_of(p)._version > version for p, version in zip(parameters, before))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_over_complex_parts(ranks: Ranks, kind: Any) -> None:
    start, gradient = torch.complex(values(1), values(2)), torch.complex(values(3), values(4))
    whole = nn.Parameter(start.clone())
    parameters = [nn.Parameter(part) for part in ranks.parts(start)]
    whole.grad = gradient
    for parameter, part in zip(parameters, ranks.parts(gradient)):
        parameter.grad = part
    for p in (whole, *parameters):
        kind([p], lr=0.1).step()
    torch.testing.assert_close(ranks.gathered([p.detach() for p in parameters]), whole.detach())


def test_an_infinity_in_one_part_makes_all_ranks_skip(ranks: Ranks) -> None:
    gradient = values(1)
    gradient[0, 0] = math.inf
    parts = ranks.parts(gradient)

    def unscale(rank: int) -> float:
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_([parts[rank].clone()], found, torch.tensor([0.5]))
        return found.item()

    assert ranks.collectively(unscale) == [1.0] * 4
