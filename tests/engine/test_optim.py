"""Optimizers, clipping and gradient scaling over sharded parameters, in one process."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

import refshard
from refshard.engine.api import engine_of
from refshard.engine.local_part import LocalPart, local_of
from refshard.engine.optim import clip_gradients
from refshard.engine.placement import MODES
from refshard.errors import EngineError
from tests.engine.fakes import LateCollectives, Net, loss_of, make_batch, make_net, train
from tests.engine.test_local_part import Ranks

NORMS = [0.5, 1.0, 2.0, 3.0, math.inf]


@pytest.fixture(params=list(MODES))
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class PartCollectives(LateCollectives):
    """One of several ranks, alone: gradients have parts, and some of them are empty. Counts reductions."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def reduce_over_shards(self, tensor: torch.Tensor, op: str) -> None:
        self.issued.append((op, tensor.nbytes))


def sharded(mode: str, collectives: LateCollectives | None = None) -> Net:
    model = make_net()
    refshard.shard(model, mode=mode, collectives=collectives or LateCollectives(), debug=True)
    return model


def norm_of(gradients: list[torch.Tensor], p: float) -> float:
    """The p-norm of all elements, in fp64."""
    elements = torch.cat([g.flatten() for g in gradients]).double().abs()
    return elements.max().item() if p == math.inf else elements.pow(p).sum().pow(1 / p).item()


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_clipping_scales_to_the_closed_form_of_the_norm(mode: str, p: float, factor: float) -> None:
    """A limit below the norm scales every gradient; one above it leaves them alone."""
    bare, model = make_net(), sharded(mode)
    for m in (bare, model):
        loss_of(m, make_batch(0)).backward()
    gradients = [q.grad for q in bare.parameters() if q.grad is not None]
    norm = norm_of(gradients, p)
    found = refshard.clip_grad_norm_(model, factor * norm, p)
    assert found.item() == pytest.approx(norm, rel=1e-5)
    assert found.dim() == 0
    for mine, theirs in zip(model.parameters(), gradients):
        assert mine.grad is not None
        assert torch.allclose(mine.grad, theirs * min(1.0, factor), rtol=1e-4, atol=0)


@pytest.mark.parametrize("p", NORMS)
def test_padding_takes_no_part_in_the_norm(mode: str, p: float) -> None:
    model = sharded(mode)
    loss_of(model, make_batch(0)).backward()
    expected = norm_of([q.grad for q in model.parameters() if q.grad is not None], p)
    padding = 0
    for unit in engine_of(model).units:
        for flat in unit.flats:
            gradient = flat.parameters[0].sharded.grad
            assert gradient is not None
            shard = torch.as_strided(local_of(gradient), (flat.layout.shard_numel,), (1,), 0)
            used = torch.zeros(shard.numel(), dtype=torch.bool)
            for parameter in flat.parameters:
                used[parameter.start : parameter.stop] = True
            shard[~used] = math.nan
            padding += int((~used).sum())
    assert padding > 0
    assert refshard.clip_grad_norm_(model, 1e-3, p).item() == pytest.approx(expected, rel=1e-5)
    assert not any(q.grad.isnan().any() for q in model.parameters() if q.grad is not None)


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_empty_parts_and_missing_gradients_count_nothing(p: float, dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (0, 3, 0, 2)]
    for parameter in parameters[:3]:
        parameter.grad = torch.arange(1.0, parameter.numel() + 1, dtype=dtype)
    norm = clip_gradients(parameters, [], LateCollectives(), 1e-4, p)
    exact = 1e-12 if dtype is torch.float64 else 1e-6
    assert norm.item() == pytest.approx(norm_of([torch.arange(1.0, 4.0)], p), rel=exact)
    assert parameters[3].grad is None


def test_without_any_gradient_the_norm_is_zero(mode: str) -> None:
    assert refshard.clip_grad_norm_(sharded(mode), 1.0).item() == 0


@pytest.mark.parametrize(("p", "op"), [(1.0, "sum"), (2.0, "sum"), (3.0, "sum"), (math.inf, "max")])
def test_clipping_takes_one_collective(p: float, op: str) -> None:
    collectives = PartCollectives(1, 3)
    model = sharded("fsdp", collectives)
    for unit in engine_of(model).units:
        for parameter in unit.parameters:
            parameter.sharded.grad = torch.ones_like(parameter.sharded)
    assert any(local_of(q).numel() == 0 for q in model.parameters())
    assert all(type(q.grad) is LocalPart for q in model.parameters())
    collectives.issued.clear()
    refshard.clip_grad_norm_(model, 1.0, p)
    assert [issued for issued, _ in collectives.issued] == [op]


@pytest.mark.parametrize("p", NORMS)
def test_gradients_that_differ_by_rank_are_clipped_by_one_factor(p: float) -> None:
    """Those of ignored parameters, which one rank lacks, count by the mean of their powers, or the largest."""
    ranks, whole = Ranks((4,), (0, 1, 4)), torch.tensor([1.0, -2.0, 3.0, 0.5])
    own = torch.tensor([4.0, -1.0])

    def clip(rank: int) -> torch.Tensor:
        part = nn.Parameter(ranks.parts(torch.zeros(4))[rank])
        part.grad = ranks.parts(whole)[rank]
        ignored = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
        ignored[0].grad = own.clone() if rank == 0 else None
        norm = clip_gradients([part], ignored, ranks.axes[rank], 0.5, p)
        for gradient, before in ((ignored[0].grad, own), (local_of(part.grad), local_of(ranks.parts(whole)[rank]))):
            if gradient is not None:
                torch.testing.assert_close(gradient, before * 0.5 / norm, rtol=1e-5, atol=0)
        return norm

    powers = [norm_of([x], p) if p == math.inf else norm_of([x], p) ** p for x in (whole, own)]
    expected = max(powers) if p == math.inf else (powers[0] + powers[1] / 2) ** (1 / p)
    assert [norm.item() for norm in ranks.collectively(clip)] == pytest.approx([expected] * 2, rel=1e-5)
    assert all(len(axis.said) == 1 for axis in ranks.axes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0,), r"max_norm must be > 0, got 0\.0"),
        ((-1.0,), r"max_norm must be > 0, got -1\.0"),
        ((math.nan,), "max_norm must be > 0, got nan"),
        ((1.0, 0.0), r"norm_type must be > 0, got 0\.0"),
        ((1.0, -math.inf), "norm_type must be > 0, got -inf"),
    ],
)
def test_limits_and_norms_that_are_not_positive_are_refused(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        refshard.clip_grad_norm_(sharded("fsdp"), *arguments)


def test_clipping_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(EngineError, match="the model is not sharded"):
        refshard.clip_grad_norm_(make_net(), 1.0)


def whole_tensor_optimizers(matrices: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.Muon(matrices), torch.optim.Adafactor(matrices), torch.optim.LBFGS(matrices)]


class Fancier(torch.optim.LBFGS):
    """An optimizer's subclass needs what it needs."""


def test_optimizers_that_need_whole_tensors_are_refused_by_name() -> None:
    """Also those that were made before sharding, and subclasses; over other parameters they go on working."""
    model = make_net()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizers = [*whole_tensor_optimizers(matrices), Fancier(matrices)]
    refshard.shard(model, mode="fsdp", collectives=PartCollectives(1, 3))
    before = [local_of(p).clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for optimizer in optimizers:
        name = type(optimizer).__name__
        remedy = "use another" if isinstance(optimizer, torch.optim.LBFGS) else rf"refshard\.whole_tensors\({name}, "
        with pytest.raises(EngineError, match=f"{name} needs whole tensors, .* {remedy}"):
            optimizer.step(lambda: 0.0)
    assert all(torch.equal(value, local_of(p)) for value, p in zip(before, model.parameters()))
    other = nn.Parameter(torch.ones(4, 4))
    other.square().sum().backward()
    for optimizer in whole_tensor_optimizers([other]):
        optimizer.step(lambda: 0.0)


def test_where_nothing_is_sharded_they_are_right(mode: str) -> None:
    """Parameters are whole then, and of their true shapes."""
    bare, model = make_net(), sharded(mode)
    for m in (bare, model):
        optimizer = torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=0.02)
        for step in range(3):
            loss_of(m, make_batch(step)).backward()
            optimizer.step()
            m.zero_grad()
    expected = dict(bare.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in refshard.full_parameters(model))


VARIANTS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (kind, {"lr": 0.02, flag: True} if flag else {"lr": 0.02, "foreach": False, "fused": False})
    for kind, flag in itertools.product((torch.optim.AdamW, torch.optim.SGD), ("fused", "foreach", None))
]


@pytest.mark.parametrize(
    ("kind", "arguments"), VARIANTS, ids=lambda v: v.__name__ if isinstance(v, type) else list(v)[-1]
)
@pytest.mark.parametrize("early", [False, True], ids=["made after", "made before"])
def test_every_kind_of_step_raises_the_masters_version(
    mode: str, kind: type[torch.optim.Optimizer], arguments: dict[str, Any], early: bool
) -> None:
    """And so is seen by the next forward, wherever parameters stay gathered between steps."""
    bare, model = make_net(), make_net()
    optimizer = kind(model.parameters(), **arguments) if early else None
    refshard.shard(model, mode=mode, collectives=LateCollectives(), debug=True)
    optimizer = optimizer or kind(model.parameters(), **arguments)
    assert train(model, 2, optimizer=optimizer) == train(bare, 2, optimizer=kind(bare.parameters(), **arguments))
    units = engine_of(model).units
    loss_of(model, make_batch(0)).backward()
    before = [unit.version for unit in units]
    optimizer.step()
    assert all(unit.version > version for unit, version in zip(units, before))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_gradient_scaler_steps_and_skips_as_for_a_bare_model(mode: str, fused: bool, unscales: bool) -> None:
    bare, model = make_net(), sharded(mode)
    found = []
    for m in (bare, model):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        scales = []
        for step in range(6):
            scaler.scale(loss_of(m, make_batch(step))).backward()
            if step == 3:
                gradient = m.get_parameter("layers.1.up.weight").grad
                assert gradient is not None
                gradient.view(-1)[5] = math.inf
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        found.append(scales)
    assert found[0] == found[1] == [16.0, 32.0, 32.0, 16.0, 16.0, 32.0]
    expected = dict(bare.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in refshard.full_parameters(model))
