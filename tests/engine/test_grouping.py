"""Which parameters form a unit."""

import pytest
from torch import nn

from refshard.engine.grouping import blocks_argument, group_units
from refshard.engine.policy import Policy, resolve
from refshard.errors import SpecError
from tests.engine.fakes import Block, Net, make_net


def described(model: nn.Module, blocks: list[str | type[nn.Module]] | None = None) -> dict[str, list[str]]:
    return {group.name: [m.name for m in group.parameters] for group in group_units(model, blocks)}


def block_parameters(index: int) -> list[str]:
    return [f"layers.{index}.{p}" for p in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight")]


def test_blocks_are_units_and_what_lies_around_them_too() -> None:
    assert described(make_net()) == {
        "embed": ["embed.weight"],
        **{f"layers.{i}": block_parameters(i) for i in range(4)},
        "norm+head": ["norm.weight", "norm.bias", "head.weight"],
    }


def test_tied_parameters_bring_their_groups_together() -> None:
    groups = described(make_net(tied=True))
    assert list(groups) == ["embed+norm+head", "layers.0", "layers.1", "layers.2", "layers.3"]
    assert groups["embed+norm+head"] == ["embed.weight", "norm.weight", "norm.bias"]


def test_a_tied_parameter_is_replaced_wherever_it_is_held() -> None:
    model = make_net(tied=True)
    member = next(m for g in group_units(model, None) for m in g.parameters if m.name == "embed.weight")
    assert set(member.holders) == {(model.embed, "weight"), (model.head, "weight")}


@pytest.mark.parametrize("blocks", [["layers"], [Block], [f"layers.{i}" for i in range(4)]])
def test_blocks_can_be_named_by_list_class_or_name(blocks: list[str | type[nn.Module]]) -> None:
    assert described(make_net(), blocks) == described(make_net())


def test_a_module_around_the_blocks_is_a_unit_by_itself() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(nn.init.ones_(nn.Linear(1, 1).weight.data))

    groups = described(Scaled())
    assert groups["Scaled"] == ["scale"]
    assert groups["embed"] == ["embed.weight"]


def test_every_parameter_is_in_exactly_one_unit() -> None:
    for tied in (False, True):
        model = make_net(tied=tied)
        grouped = [m.parameter for g in group_units(model, ["layers.1", "layers.2.up"]) for m in g.parameters]
        assert len(grouped) == len({id(p) for p in grouped}) == len(list(model.parameters()))


def test_unknown_blocks_are_refused() -> None:
    with pytest.raises(SpecError, match=r"blocks: the model has no module 'layer'; did you mean 'layers'\?"):
        group_units(make_net(), ["layer"])
    with pytest.raises(SpecError, match="blocks: the model holds no module of class LSTM"):
        group_units(make_net(), [nn.LSTM])


def test_a_model_without_blocks_is_one_unit() -> None:
    assert described(nn.Linear(2, 2)) == {"Linear": ["weight", "bias"]}
    assert described(nn.Sequential(nn.Linear(2, 2), nn.Tanh())) == {"Sequential": ["0.weight", "0.bias"]}
    (names,) = described(make_net(), []).values()
    assert names == [name for name, _ in make_net().named_parameters()]


def test_what_is_never_called_serves_the_module_around_it() -> None:
    model = make_net()
    model.extra = nn.ParameterList([nn.Parameter(model.head.weight[0].detach().clone())])
    model.lists = nn.ModuleList([nn.ParameterList([nn.Parameter(model.head.weight[0].detach().clone())])])
    model.heads = nn.MultiheadAttention(4, 2)
    model.heads.extra = nn.ParameterDict({"a": nn.Parameter(model.norm.weight.detach().clone())})
    groups = described(model)
    assert groups["Net"] == ["extra.0", "lists.0.0"]
    assert groups["norm+head+heads"][-2:] == ["heads.out_proj.bias", "heads.extra.a"]
    assert groups["layers.0"] == block_parameters(0)


def test_blocks_as_an_argument() -> None:
    model = make_net()
    layers = [f"layers.{i}" for i in range(4)]
    assert blocks_argument(model, layers) == ""
    assert blocks_argument(model, ["embed", *layers]) == ", blocks=[Embedding, Block]"
    assert blocks_argument(model, layers[:2]) == ", blocks=['layers.0', 'layers.1']"


def test_lists_and_dictionaries_of_modules_stand_for_their_members() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList(
        [nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})]
    )
    parts = ["stages.0.0", "stages.0.1", "stages.1.a", "stages.1.b"]
    assert list(described(model)) == parts
    assert list(described(model, ["stages"])) == parts
    assert list(described(model, ["stages.1"])) == ["stages.0.0+stages.0.1", "stages.1.a", "stages.1.b"]


def test_a_pattern_is_of_the_outermost_modules_that_it_matches() -> None:
    """``*`` matches dots too; what lies within ``layers.0`` is no unit of its own."""
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))})
    kept = Policy(mode="zero2")
    assert resolve(model, {"layers.*": kept}).apart() == ["layers.0", "layers.1"]
    assert resolve(model, {"layers.*": kept, "*.1": Policy(mode="fsdp")}).apart() == [
        "layers.0", "layers.0.1", "layers.1",
    ]  # fmt: skip
