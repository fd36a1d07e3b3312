"""What a checkpoint needs to know of a sharded model: its parameters, each with all of its names."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from refshard.engine.api import engine_of

_WRAPPERS = frozenset({"", "_checkpoint_wrapped_module", "_orig_mod"})
"""What the modules that torch wraps others in call them: no part of names, as in torch's ``get_state_dict``."""


def prefixes(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its names, with a dot at the end if there is a name."""
    for name, module in model.named_modules(remove_duplicate=False):
        yield "".join(f"{part}." for part in name.split(".") if part not in _WRAPPERS), module


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """One parameter as this rank has it: a local part, or plain where it is not sharded.

    ``names`` are all fully-qualified names that it has in the bare model, the canonical one first; a tied parameter has
    several.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.names[0]

    @property
    def shape(self) -> torch.Size:
        """The whole parameter's shape."""
        return self.parameter.shape


def named_parts(model: nn.Module) -> tuple[Named, ...]:
    """Every distinct parameter, in the registration order of the units, and last the ignored ones.

    Raises:
        EngineError: the model is not sharded, a parameter was replaced or moved since, or other ranks have another one
            of its name.
    """
    engine = engine_of(model)
    for unit in engine.units:
        unit.check_parameters()
        for flat in unit.flats:
            for parameter in flat.parameters:
                flat.master.check_saved(parameter.layout.name, parameter.split)
    names: dict[tuple[nn.Module, str], list[str]] = {}
    for prefix, module in prefixes(model):
        for attribute in module._parameters:
            names.setdefault((module, attribute), []).append(prefix + attribute)
    held = [(parameter.holders, parameter.sharded) for unit in engine.units for parameter in unit.parameters]
    held += [(member.holders, member.parameter) for member in engine.ignored]
    return tuple(Named(tuple(name for h in holders for name in names[h]), parameter) for holders, parameter in held)
