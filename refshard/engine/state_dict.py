"""What ``state_dict()`` of a sharded model holds: parts that torch's state-dict functions can gather."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from refshard.engine.local_part import gatherable
from refshard.engine.unit import Unit


def show_gatherable(units: Iterable[Unit]) -> None:
    """Have the modules that hold parameters of ``units`` put gatherable parts into state dicts."""
    for unit in units:
        for module in dict.fromkeys(m for p in unit.parameters for m, _ in p.holders):
            module.register_state_dict_post_hook(partial(_put_gatherable, unit))


def _put_gatherable(unit: Unit, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    unit.check_parameters()
    for name in module._parameters:
        value = state.get(prefix + name)
        if value is not None and not isinstance(value, nn.Parameter):  # as it is with keep_vars=True
            state[prefix + name] = gatherable(value)
