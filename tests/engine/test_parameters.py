"""What becomes of a model's parameter objects: kept with their attributes, put in place, or refused by name."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import refshard
from refshard.engine import checkpoint
from refshard.engine.local_part import local_of, whole_of
from refshard.engine.optim import local_parameters
from refshard.engine.placement import MODES
from refshard.errors import EngineError, SpecError
from tests.engine.fakes import LateCollectives, Net, loss_of, make_batch, make_net, train
from tests.engine.test_local_part import OneOfSeveral


def shard(model: nn.Module, mode: str = "fsdp", collectives: LateCollectives | None = None) -> nn.Module:
    return refshard.shard(model, mode=mode, collectives=collectives or LateCollectives())


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_parameter_keeps_its_attributes_and_shape(world_size: int) -> None:
    model = make_net()
    shapes = [p.shape for p in model.parameters()]
    for parameter in model.parameters():
        parameter.is_bias = parameter.ndim == 1  # type: ignore[attr-defined]
    shard(model, collectives=OneOfSeveral(world_size - 1, world_size))
    assert [p.shape for p in model.parameters()] == shapes
    assert all(p.is_bias == (p.ndim == 1) for p in model.parameters())  # type: ignore[attr-defined]
    assert all((whole_of(p) is not None) == (world_size > 1) for p in model.parameters())


@pytest.mark.parametrize("mode", list(MODES))
def test_decay_can_be_grouped_by_dimensions_after_sharding(mode: str) -> None:
    bare, model = make_net(), make_net()
    shard(model, mode)
    for m in (bare, model):
        decayed, others = ([p for p in m.parameters() if (p.ndim >= 2) == many] for many in (True, False))
        groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.5}, {"params": others}]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        for step in range(2):
            loss_of(m, make_batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(bare.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in refshard.full_parameters(model))


class Scaled(torch.Tensor):
    """A tensor that is not what it looks like, as float8 and NF4 weights are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def of_a_subclass(model: Net) -> None:
    model.layers[1].down.weight = nn.Parameter(torch.zeros(6, 13).as_subclass(Scaled))  # type: ignore[union-attr]


def of_float8(model: Net) -> None:
    model.layers[1].down.weight = nn.Parameter(torch.zeros(6, 13).to(torch.float8_e4m3fn))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            of_a_subclass,
            r"parameter 'layers\.1\.down\.weight' must be a plain nn\.Parameter to be trained, got Scaled",
        ),
        (of_float8, r"parameter 'layers\.1\.down\.weight' is of torch\.float8_e4m3fn, which collectives cannot reduce"),
    ],
)
def test_what_cannot_be_flattened_is_refused_before_anything_changes(
    change: Callable[[Net], None], message: str
) -> None:
    model = make_net()
    change(model)
    before = list(model.parameters())
    with pytest.raises(EngineError, match=message):
        shard(model, collectives=OneOfSeveral(0, 2))
    assert all(mine is theirs and whole_of(mine) is None for mine, theirs in zip(model.parameters(), before))


def weakly(model: Net) -> object:
    return weakref.ref(model.head.weight)


def by_an_output(model: Net) -> object:
    return model(make_batch(0)[0])


@pytest.mark.parametrize("hold", [weakly, by_an_output])
def test_a_parameter_that_somebody_holds_on_to_is_refused_by_name(hold: Callable[[Net], object]) -> None:
    model = make_net()
    held = hold(model)
    with pytest.raises(EngineError, match=r"parameter '[a-z0-9.]+' cannot be put in place: a weak reference .* output"):
        shard(model)
    assert held is not None


def test_local_parameters_are_plain_and_share_memory_and_gradients() -> None:
    """For optimizers that address memory themselves; bitsandbytes' and torchao's are refused otherwise."""
    model = make_net()
    shard(model, collectives=OneOfSeveral(0, 2))
    elements = local_parameters(model.parameters())
    assert all(p.ndim == 1 and local_of(p) is p and p.is_leaf for p in elements)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [local_of(p).clone() for p in model.parameters()]
    versions = [local_of(p)._version for p in model.parameters()]
    optimizer = torch.optim.SGD(elements, lr=0.5)
    optimizer.step()
    for parameter, value, version in zip(model.parameters(), before, versions):
        assert torch.equal(local_of(parameter), value - 0.5)
        assert local_of(parameter)._version > version
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_optimizers_that_address_memory_are_refused_over_parts() -> None:
    model = make_net()
    shard(model, collectives=OneOfSeveral(0, 2))
    kind = type("AdamW8bit", (torch.optim.SGD,), {"__module__": "torchao.optim.adam"})
    with pytest.raises(EngineError, match=r"AdamW8bit takes plain tensors only; .* refshard\.local_parameters"):
        kind(model.parameters(), lr=0.1).step()


def test_a_whole_gradient_or_state_that_was_given_becomes_a_part() -> None:
    bare, model = make_net(), make_net()
    theirs = torch.optim.AdamW(bare.parameters(), lr=0.1)
    gradients = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(bare.parameters())
    ]
    for parameter, gradient in zip(bare.parameters(), gradients):
        parameter.grad = gradient.clone()
    theirs.step()
    shard(model, collectives=OneOfSeveral(0, 2))
    model.load_state_dict(bare.state_dict())
    mine = torch.optim.AdamW(model.parameters(), lr=0.7)
    mine.load_state_dict(theirs.state_dict())
    for parameter, gradient in zip(model.parameters(), gradients):
        parameter.grad = gradient.clone()
    theirs.step()
    mine.step()
    for parameter, whole in zip(model.parameters(), bare.parameters()):
        assert isinstance(parameter, nn.Parameter)
        start, stop = parameter._whole.start, parameter._whole.stop  # type: ignore[attr-defined]
        torch.testing.assert_close(local_of(parameter).detach(), whole.detach().flatten()[start:stop])


class Rotary(nn.Module):
    """Holds a buffer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x * self.get_buffer("frequencies").sum()
        return out


class Normed(nn.Module):
    """Blocks with statistics of their own."""

    def __init__(self, *, rotary: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3))
        self.rotary = Rotary() if rotary else nn.Identity()


def test_buffers_from_the_meta_device_get_their_values() -> None:
    with torch.device("meta"):
        model = Normed()
    shard(model)
    statistics = dict(model.named_buffers())
    assert torch.equal(statistics["layers.2.1.running_var"], torch.ones(6))
    assert statistics["layers.2.1.num_batches_tracked"].item() == 0


def test_a_buffer_from_the_meta_device_that_nothing_fills_is_refused() -> None:
    with torch.device("meta"):
        model = Normed(rotary=True)
    with pytest.raises(EngineError, match=r"Rotary 'rotary' is on the meta device and has no reset_parameters\(\)"):
        shard(model)
    with torch.device("meta"):
        model = Normed(rotary=True)

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.BatchNorm1d):
            module.reset_parameters()

    with pytest.raises(EngineError, match="leaves the buffer 'frequencies' without a value"):
        refshard.shard(model, mode="fsdp", collectives=LateCollectives(), initialise=initialise)
    half = Normed()
    half.get_submodule("layers.0.1")._buffers["running_mean"] = torch.empty(6, device="meta")
    with pytest.raises(EngineError, match=r"buffer 'layers\.0\.1\.running_mean' is on the meta device"):
        shard(half)


def test_ignored_parameters_are_left_alone_and_saved_with_the_rest(tmp_path: Path) -> None:
    def sharded(collectives: LateCollectives) -> Net:
        model = make_net()
        refshard.shard(model, ignored=["layers.1.up.bias", model.norm.weight], collectives=collectives)
        return model

    model, bare = sharded(LateCollectives()), make_net()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, bare)]
    assert train(model, 3, optimizer=optimizers[0]) == train(bare, 3, optimizer=optimizers[1])
    divided = {name for name, p in sharded(OneOfSeveral(1, 2)).named_parameters() if whole_of(p)}
    assert divided == {name for name, _ in bare.named_parameters()} - {"layers.1.up.bias", "norm.weight"}
    assert dict(refshard.full_parameters(model)).keys() == dict(bare.named_parameters()).keys()
    checkpoint.save(tmp_path / "saved", model, optimizers[0])
    other = sharded(LateCollectives())
    checkpoint.load(tmp_path / "saved", other, optimizer := torch.optim.AdamW(other.parameters(), lr=1e-2))
    found, expected = checkpoint.full_state_dict(other), bare.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    state = optimizer.state[other.norm.weight]
    assert torch.equal(state["exp_avg"], optimizers[1].state[bare.norm.weight]["exp_avg"])


def test_an_ignored_parameter_must_be_the_models() -> None:
    for wanted, message in (
        ("layers.1.up.bios", "did you mean 'layers.1.up.bias'"),
        (nn.Parameter(torch.ones(1)), "that is this tensor"),
    ):
        with pytest.raises(SpecError, match=f"ignored: the model has no parameter .*{message}"):
            refshard.shard(make_net(), ignored=[wanted], collectives=LateCollectives())
