"""Parameters of tensor subclasses: what is gathered, held between steps, saved, and refused."""

import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import refshard
from refshard.engine import checkpoint
from refshard.engine.api import engine_of
from refshard.engine.local_part import LocalPart, local_of
from refshard.engine.placement import MODES
from refshard.errors import CheckpointError, EngineError
from tests.distributed.cases.models import Stack
from tests.distributed.cases.sides import DIM, whole_of
from tests.distributed.cases.subclasses import Coded, Low, Master, Rows, quantised
from tests.engine.fakes import LateCollectives
from tests.engine.test_local_part import OneOfSeveral


def sharded(kind: Any, mode: str = "fsdp", collectives: LateCollectives | None = None, seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    model = quantised(kind)
    refshard.shard(model, mode=mode, collectives=collectives or LateCollectives())
    return model


def step(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(torch.linspace(-1, 1, 4 * DIM).view(4, DIM))
    out.square().mean().backward()
    return out


@pytest.mark.parametrize(("kind", "computes"), [(Coded, Coded), (Rows, Rows), (Master, Low)])
@pytest.mark.parametrize("mode", ["zero2", "fsdp", "yafsdp"])
def test_a_layer_computes_with_the_class_over_one_byte_an_element(kind: Any, computes: Any, mode: str) -> None:
    collectives = LateCollectives()
    model, seen = sharded(kind, mode, collectives), []
    model.layers[0].register_forward_pre_hook(lambda module, _: seen.append(type(module.weight)))
    for _ in range(3):
        collectives.issued.clear()
        step(model)
    assert seen == [computes] * 3
    units = engine_of(model).units
    flats = [flat for unit in units for flat in unit.flats]
    gathers = Counter(nbytes for op, nbytes in collectives.issued if op == "all_gather")
    assert gathers.keys() == {flat.layout.numel * flat.dtype.itemsize for flat in flats}
    weight = next(flat for flat in flats if flat.dtype.itemsize == 1)
    assert 2 * DIM * DIM <= weight.layout.numel < 2 * DIM * DIM + 8
    assert gathers[weight.layout.numel] >= (3 if mode == "zero2" else 5)  # the last layer may be kept for backward


@pytest.mark.parametrize(("kind", "within"), [(Rows, lambda w: w.pair.codes), (Master, lambda w: w.eighths)])
def test_a_version_within_says_what_the_slot_holds(kind: Any, within: Callable[[Any], torch.Tensor]) -> None:
    """Autograd may save what a wrapper consists of."""
    model, seen = sharded(kind), list[Any]()
    model.layers[0].register_forward_pre_hook(lambda module, _: seen.append(within(module.weight)))
    model.layers[0].register_forward_pre_hook(lambda *_: seen.append(seen[-1]._version))
    for _ in range(2):
        model(torch.ones(2, DIM))
        given_up = seen[0]._version != seen[1]
        assert given_up  # pytest would print a tensor that is freed
    assert seen[1] == seen[3]


@pytest.mark.parametrize("kind", [Coded, Rows, Master])
def test_between_steps_a_rank_holds_a_part(kind: Any) -> None:
    model = quantised(kind)
    weight: Any = model.layers[0].weight
    whole = weakref.ref(
        {Coded: lambda: weight.record.table, Rows: lambda: weight.pair, Master: lambda: weight.master}[kind]()
    )
    refshard.shard(model, mode="fsdp", collectives=OneOfSeveral(0, 2))
    assert model.layers[0].weight is weight
    assert type(weight) is LocalPart
    assert (whole() is None) == (kind is not Coded), "the whole is kept, or the attribute is not"
    assert weight.dtype is {Coded: torch.uint8, Rows: torch.int8, Master: torch.float32}[kind]
    assert weight.shape == (2 * DIM, DIM)
    assert 0 < local_of(weight).numel() <= 2 * DIM * DIM
    assert weight.requires_grad == (kind is Master)
    assert hasattr(weight, "record") == (kind is Coded)


@pytest.mark.parametrize("kind", [Coded, Rows])
def test_where_nothing_is_sharded_a_quantised_parameter_stays_what_it_was(kind: Any) -> None:
    torch.manual_seed(0)
    bare, model = quantised(kind), sharded(kind, "replicate")
    state = {**bare.state_dict()}
    assert all(type(value) is type(state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.layers[1].weight.value(), bare.layers[1].weight.value())
    assert torch.equal(step(model), step(bare))


@pytest.mark.parametrize("kind", [Coded, Rows, Master])
def test_wholes_are_those_of_the_bare_model(kind: Any) -> None:
    torch.manual_seed(0)
    bare, model = quantised(kind), sharded(kind)
    found = {name: whole_of(value) for name, value in refshard.full_parameters(model)}
    for name, value in bare.named_parameters():
        assert torch.equal(found[name], whole_of(value)), name
    assert checkpoint.full_state_dict(model).keys() == bare.state_dict().keys()


@pytest.mark.parametrize("kind", [Coded, Rows, Master])
def test_a_checkpoint_holds_everything_and_any_mode_reads_it(kind: Any, tmp_path: Path) -> None:
    model = sharded(kind)
    if kind is Coded:
        model.layers[1].weight.record.table.mul_(3)
    out = step(model)
    checkpoint.save(tmp_path / "saved", model)
    for mode in MODES:
        other = sharded(kind, mode, seed=1)
        checkpoint.load(tmp_path / "saved", other)
        assert torch.equal(step(other), out)
    with pytest.raises(CheckpointError, match=r"lacks parameter|lacks buffer|holds 'layers\.0\.weight"):
        checkpoint.load(tmp_path / "saved", sharded(Rows if kind is Coded else Coded))


def test_one_tensor_of_several_is_not_saved_in_the_place_of_all() -> None:
    part = sharded(Rows, collectives=OneOfSeveral(0, 2)).state_dict()["layers.0.weight"]
    with pytest.raises(EngineError, match=r"'model\.layers\.0\.weight' .* this is '[a-z0-9.]+\.pair\.codes'"):
        part.__create_write_items__("model.layers.0.weight", part)


class Opaque(torch.Tensor):
    """Has operators of its own, and does not tell what it consists of."""

    @staticmethod
    def __new__(cls: Any, like: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls(args[0])


class Packing(Master):
    """Gathers two elements as one."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.master[::2],), None


class Failing(Master):
    """Needs rows."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.master / self.master.amax(1, keepdim=True),), None


class Allocating(Master):
    """Computes with a copy."""

    def fsdp_post_all_gather(self, outputs: Any, scale: torch.Tensor, dtype: torch.dtype, *, out: Any = None) -> Any:
        value = Low(outputs[0], scale, dtype=dtype).value()
        return value, (value,)


def part_of(_: torch.Tensor) -> nn.Parameter:
    part: nn.Parameter = sharded(Coded, collectives=OneOfSeveral(0, 2)).layers[0].weight
    return part


def rows_of(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(Rows(value.to(torch.int8), value[:, :1], dtype=value.dtype), requires_grad=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda v: Rows.of(v).requires_grad_(),
            r"must be a plain nn\.Parameter to be trained, got Rows",
        ),
        (lambda v: nn.Parameter(Opaque(v), requires_grad=False), "is of Opaque, which does not tell what it cons"),
        (lambda v: rows_of(v.T.contiguous().T), r"\(Rows\): 'layers\.0\.weight\.pair' is not contiguous; quantise a"),
        (lambda v: rows_of(v.to("meta")), r"\(Rows\) has no values yet; quantise it before refshard\.shard"),
        (lambda v: part_of(v), r" is a part of a sharded model's; put its full_tensor\(\) here"),
        (lambda v: Packing.of(v), r"\(Packing\): .* must return one tensor .* got \[\(32,\)\] for 64 elements"),
        (
            lambda v: Failing.of(v),
            r"\(Failing\): its fsdp_pre_all_gather failed, given .* as a 1-D tensor: Dimension",
        ),
        (lambda v: Allocating.of(v), r"\(Allocating\): its fsdp_post_all_gather allocates tensors, which the engine"),
    ],
)
def test_what_cannot_be_put_together_again_is_refused_by_name(
    make: Callable[[torch.Tensor], nn.Parameter], message: str
) -> None:
    weight = make(torch.randn(2 * DIM, DIM))
    model = quantised(Coded).to(weight.device)
    model.layers[0].weight = weight
    with pytest.raises(EngineError, match=rf"parameter 'layers\.0\.weight'.*{message}"):
        refshard.shard(model, collectives=OneOfSeveral(0, 2))
