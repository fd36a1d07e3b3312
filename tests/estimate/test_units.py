"""Units and recipes as data: against the real model's parameters, and torch's real units."""

import pytest
import torch

from refshard.engine.grouping import group_units
from refshard.engine.placement import MODES
from refshard.estimate.recipe import RECIPES
from refshard.estimate.units import model_units
from refshard.models.llama import Llama
from refshard.specs.model import load_model, parameter_count
from refshard.strategies.table import ROWS

TIED, APART, NORMED = "llama3.2-1b", "llama-mini", "qwen3-0.6b"


def on_meta(model: str) -> Llama:
    with torch.device("meta"):
        return Llama(load_model(model))


@pytest.mark.parametrize("model", [APART, TIED, NORMED])
@pytest.mark.parametrize("grouping", ["ends", "root", "buckets"])
def test_units_hold_every_parameter_once_under_its_own_name(model: str, grouping: str) -> None:
    units = model_units(load_model(model), grouping)  # type: ignore[arg-type]
    listed = [parameter for unit in units for parameter in unit.parameters]
    assert len(dict(listed)) == len(listed)
    assert dict(listed) == {name: tuple(p.shape) for name, p in on_meta(model).named_parameters()}
    assert sum(unit.numel for unit in units) == parameter_count(load_model(model))


@pytest.mark.parametrize("model", [APART, TIED, NORMED])
def test_the_engines_units_are_those_that_it_makes(model: str) -> None:
    made = group_units(on_meta(model), None)
    units = model_units(load_model(model), "ends")
    assert [[m.name for m in group.parameters] for group in made] == [[n for n, _ in unit.parameters] for unit in units]


def test_roles_tell_what_computes_when() -> None:
    roles = {g: [u.role for u in model_units(load_model(APART), g)] for g in ("ends", "root")}
    blocks = ["block"] * load_model(APART).n_layers
    assert roles == {"ends": ["embedding", *blocks, "head"], "root": ["around", *blocks]}
    assert next(u.role for u in model_units(load_model(TIED), "ends")) == "around"
    assert [u.role for u in model_units(load_model(TIED), "buckets")][::17] == ["embedding", "head"]


def test_padding_is_by_unit_where_that_is_flat_and_by_parameter_where_not() -> None:
    block = model_units(load_model(APART), "ends")[1]
    # 7 ranks divide neither 512 nor 1280: per parameter whole rows are added, of a flat unit but its end.
    rows = {512: 518, 256: 259, 1280: 1281}
    expected = sum(rows[shape[0]] * (shape[1] if len(shape) > 1 else 1) for _, shape in block.parameters)
    assert block.gathered_numel(RECIPES["fsdp2"], 7) == expected
    assert 0 <= block.gathered_numel(RECIPES["refshard-fsdp"], 7) - block.numel < 8 * 7 + 64 * 9


def test_every_recipe_is_a_strategy_that_runs_and_every_mode_is_one() -> None:
    assert RECIPES.keys() <= ROWS.keys()
    engine = {name: recipe.mode for name, recipe in RECIPES.items() if name.startswith("refshard-")}
    assert engine == {f"refshard-{name}": mode for name, mode in MODES.items()}
    assert all(recipe.name == name for name, recipe in RECIPES.items())
