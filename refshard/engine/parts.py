"""What a checkpoint needs to know of a sharded model: its parameters, each with all of its names."""

from dataclasses import dataclass

import torch
from torch import nn

from refshard.engine.api import engine_of


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
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute in module._parameters:
            names.setdefault((module, attribute), []).append(f"{prefix}.{attribute}" if prefix else attribute)
    held = [(parameter.holders, parameter.sharded) for unit in engine.units for parameter in unit.parameters]
    held += [(member.holders, member.parameter) for member in engine.ignored]
    return tuple(Named(tuple(name for h in holders for name in names[h]), parameter) for holders, parameter in held)
