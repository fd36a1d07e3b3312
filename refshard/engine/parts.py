"""What a checkpoint needs to know of a sharded model: which part of which parameter this rank holds."""

from dataclasses import dataclass

from torch import nn

from refshard.engine.api import engine_of


@dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """This rank's part of one parameter.

    ``names`` are all fully-qualified names that the parameter has in the bare model, the canonical one first; a tied
    parameter has several. ``shape`` is the whole parameter's. ``parameter`` is 1-D and possibly empty; its first
    element is number ``first`` of the flattened parameter.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    first: int
    parameter: nn.Parameter

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.names[0]


def local_parts(model: nn.Module) -> tuple[LocalPart, ...]:
    """This rank's part of every distinct parameter, in the registration order of the units.

    Raises:
        EngineError: the model is not sharded.
    """
    engine = engine_of(model)
    rank = engine.collectives.rank
    names: dict[tuple[nn.Module, str], list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute in module._parameters:
            names.setdefault((module, attribute), []).append(f"{prefix}.{attribute}" if prefix else attribute)
    parts = []
    for flat in (flat for unit in engine.units for flat in unit.flats):
        for parameter in flat.parameters:
            start, stop = flat.layout.local_range(parameter.layout, rank)
            first = rank * flat.layout.shard_numel + start - parameter.layout.offset if stop > start else 0
            known_as = tuple(name for holder in parameter.holders for name in names[holder])
            parts.append(LocalPart(known_as, parameter.layout.shape, first, parameter.sharded))
    return tuple(parts)
