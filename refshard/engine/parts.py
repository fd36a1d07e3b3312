"""What a checkpoint needs to know of a sharded model: its parameters, each with all of its names."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from refshard.engine.api import engine_of
from refshard.engine.subclasses import Packed

_WRAPPERS = frozenset({"", "_checkpoint_wrapped_module", "_orig_mod"})
"""What the modules that torch wraps others in call them: no part of names, as in torch's ``get_state_dict``."""


def bare_name(name: str) -> str:
    """The name in the bare model of a module, a parameter or a buffer."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def prefixes(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its names, with a dot at the end if there is a name."""
    for name, module in model.named_modules(remove_duplicate=False):
        yield bare_name(name) + "." * bool(bare_name(name)), module


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


def names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The names of each parameter in the bare model, by the one that the engine knows it by.

    Raises:
        EngineError: the model is not sharded, a parameter was replaced or moved since, or other ranks have another one
            of its name.
    """
    engine = engine_of(model)
    for unit in engine.units:
        unit.check_parameters()
        for flat in unit.flats:
            for parameter in flat.parameters:
                flat.master.check_known(parameter.layout.name, parameter.split)
    names: dict[tuple[nn.Module, str], list[str]] = {}
    for prefix, module in prefixes(model):
        for attribute in module._parameters:
            names.setdefault((module, attribute), []).append(prefix + attribute)
    parameters = [p for unit in engine.units for p in unit.parameters if p.holders]
    held = {p.form.name if p.form else p.layout.name: p.holders for p in parameters}
    held |= {member.name: member.holders for member in engine.ignored}
    return {known: tuple(name for h in holders for name in names[h]) for known, holders in held.items()}


def kept_beside(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What packed parameters keep beside their data, such as scales: alike on all ranks."""
    names = names_of(model)
    packed = [p.form for u in engine_of(model).units for p in u.parameters if p.holders and isinstance(p.form, Packed)]
    return [(names[form.name][0] + suffix, tensor) for form in packed for suffix, tensor in form.state()]


def named_parts(model: nn.Module) -> tuple[Named, ...]:
    """Every distinct parameter, in the registration order of the units, and last the ignored ones; of one that consists
    of several tensors, each.

    Raises:
        EngineError: as of :func:`names_of`.
    """
    engine, names = engine_of(model), names_of(model)
    found = []
    for unit in engine.units:
        for flat in unit.flats:
            for parameter in flat.parameters:
                name, form = parameter.layout.name, parameter.form
                if isinstance(form, Packed):
                    known = tuple(of_whole + form.suffixes[name] for of_whole in names[form.name])
                    found.append(Named(known, nn.Parameter(flat.part_of(parameter), requires_grad=False)))
                else:
                    found.append(Named(names[name], parameter.sharded))
    return (*found, *(Named(names[member.name], member.parameter) for member in engine.ignored))
