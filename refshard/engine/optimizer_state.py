"""An optimizer's state as named tensors of the parameters' shapes, over all of its groups and ranks.

Elementwise state (of the parameter's shape: AdamW's ``exp_avg``) is sharded like its parameter. State of whole tensors
may have any shape (Adafactor's ``row_var``): it is on the tensor's owner, or on every rank where the parameter is.
Scalars (0-d tensors and Python numbers: AdamW's ``step``) are the same on every rank, and rank 0's count.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from refshard.engine.dcp import Place
from refshard.engine.local_part import LocalPart, whole_of
from refshard.engine.parts import Named
from refshard.engine.whole_tensors import WholeTensors
from refshard.errors import CheckpointError

OPTIMIZER = "optimizer"
"""What the optimizer's places begin with; below it they are those of torch's ``get_optimizer_state_dict``."""
NOT_CARRIED = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Keys of a group that say how this process computes, not what: the optimizer at hand keeps its own."""


@dataclass(frozen=True, slots=True)
class State:
    """What an optimizer holds: tensors that may be split over ranks, 0-d tensors, and all else by its place."""

    tensors: dict[Place, torch.Tensor]
    scalars: dict[Place, torch.Tensor]
    values: dict[Place, Any]


def state_of(optimizers: Sequence[torch.optim.Optimizer], parts: Sequence[Named]) -> State:
    """What the optimizers hold, as views, ready to be written; collective.

    Raises:
        CheckpointError: they hold parameters that are not the model's, or of a part of a tensor state that is neither
            elementwise nor scalar.
    """
    part_of = _part_of_parameter(optimizers, parts)
    found = State({}, {}, {})
    for index, (_, group) in enumerate(_groups_of(optimizers)):
        group_place = (OPTIMIZER, "param_groups", index)
        found.values[*group_place, "params"] = [part_of[parameter].name for parameter in group["params"]]
        # All of them: torch's loaders ask for every key that the group at hand has.
        found.values.update({(*group_place, key): value for key, value in group.items() if key != "params"})
    for optimizer in optimizers:
        held = optimizer.everyones_state() if isinstance(optimizer, WholeTensors) else optimizer.state
        for parameter, state in held.items():
            for key, value in state.items():
                _add(found, optimizer, part_of[parameter], key, value)
    return found


def _add(found: State, optimizer: torch.optim.Optimizer, part: Named, key: str, value: Any) -> None:
    place = (OPTIMIZER, "state", part.name, key)
    if not isinstance(value, torch.Tensor):
        found.values[place] = value
    elif value.dim() == 0 and not isinstance(value, LocalPart):
        found.scalars[place] = value.detach()
    elif isinstance(value, LocalPart) or value.shape == part.shape or whole_of(part.parameter) is None:
        found.tensors[place] = value.detach()
    else:
        raise CheckpointError(
            f"'{key}' of parameter '{part.name}' in {kind_of(optimizer)} has the shape {tuple(value.shape)}; it must "
            f"be scalar or of the parameter's shape {tuple(part.shape)}: save with an elementwise optimizer, with one "
            "of refshard.whole_tensors, or without one"
        )


def _groups_of(
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    return ((optimizer, group) for optimizer in optimizers for group in optimizer.param_groups)


def _part_of_parameter(
    optimizers: Sequence[torch.optim.Optimizer], parts: Sequence[Named]
) -> dict[torch.Tensor, Named]:
    part_of: dict[torch.Tensor, Named] = {part.parameter: part for part in parts}
    seen: dict[torch.Tensor, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        held = {p: f"group {i}" for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for parameter, where in {**dict.fromkeys(optimizer.state, "state"), **held}.items():
            if parameter not in part_of:
                raise CheckpointError(
                    f"{kind_of(optimizer)}: {where} holds a parameter that is not the sharded model's; build the "
                    "optimizer over model.parameters() after refshard.shard"
                )
            if seen.setdefault(parameter, optimizer) is not optimizer:
                raise CheckpointError(
                    f"{kind_of(seen[parameter])} and {kind_of(optimizer)} both hold parameter "
                    f"'{part_of[parameter].name}', but a checkpoint has one state per parameter; give it to one of them"
                )
    return part_of


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What an optimizer is going to load: its groups, and state by the number of a parameter."""

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    state: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Restore:
    """What is to be read before optimizers can be given their state.

    ``tensors`` are read in place by their keys, ``values`` are keys to be read; ``finish`` puts all in the optimizers.
    """

    tensors: dict[str, torch.Tensor]
    values: tuple[str, ...]
    _loaded: tuple[_Loaded, ...]
    _places: Mapping[str, tuple[dict[str, Any], str]]

    def finish(self, values: Mapping[str, Any]) -> None:
        """Give the optimizers their state and hyper-parameters."""
        for key, (state, name) in self._places.items():
            state[name] = values[key]
        # torch decides by its own policy where `step` lives, and runs the optimizer's hooks.
        for loaded in self._loaded:
            loaded.optimizer.load_state_dict({"state": loaded.state, "param_groups": loaded.groups})


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer's class; that of the one which owners step, where there are owners."""
    return (optimizer.made if isinstance(optimizer, WholeTensors) else type(optimizer)).__name__


def kinds_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """The kind of optimizer that has each group, in the order that they are saved in."""
    return [kind_of(optimizer) for optimizer, _ in _groups_of(optimizers)]


def group_keys(metadata: Metadata) -> list[str]:
    """The keys under which optimizers' groups were saved, to be read before :func:`plan_restore`."""
    nesting: Mapping[str, Place] = metadata.planner_data or {}
    return [key for key, place in nesting.items() if place[:2] == (OPTIMIZER, "param_groups") and len(place) == 4]


def plan_restore(
    optimizers: Sequence[torch.optim.Optimizer],
    parts: Sequence[Named],
    metadata: Metadata,
    groups: Mapping[str, Any],
    kinds: Sequence[str],
    scalars: Sequence[str],
) -> Restore:
    """Match what was saved (``metadata``, and ``groups`` by key) with the optimizers at hand; changes nothing.

    State is read into the optimizers' own tensors where they fit, and into new ones where there are none yet.
    ``kinds`` are those of the saved groups, where they are known, ``scalars`` names the state that is scalar even where
    the parameter is, too.

    Raises:
        CheckpointError: they do not match.
    """
    if not groups:
        raise CheckpointError(
            "the checkpoint holds no optimizer state; load with optimizer=None to start with a fresh optimizer"
        )
    part_of = _part_of_parameter(optimizers, parts)
    matched = iter(_match_groups(optimizers, part_of, _nest_groups(metadata, groups), kinds))
    loaded = tuple(_described(optimizer, part_of, matched) for optimizer in optimizers)
    holder = {name: one for one in loaded for name in one.numbers}
    known = {name: part for part in part_of.values() for name in part.names}
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, tuple[dict[str, Any], str]] = {}
    for key, name, attribute in _saved_state(metadata):
        if name not in known or known[name].name not in holder:
            raise CheckpointError(
                f"the checkpoint holds '{attribute}' of parameter '{name}', which is in no group; load another one"
            )
        part, entry = known[name], metadata.state_dict_metadata[key]
        one = holder[part.name]
        mine = one.state.setdefault(one.numbers[part.name], {})
        if isinstance(entry, TensorStorageMetadata):
            scalar = entry.size == () and (part.shape != () or attribute in scalars)
            mine[attribute] = tensors[key] = _room(one.optimizer, part, attribute, entry, scalar=scalar)
        else:
            places[key] = (mine, attribute)
    return Restore(tensors, tuple(places), loaded, places)


def _described(
    optimizer: torch.optim.Optimizer, part_of: Mapping[torch.Tensor, Named], matched: Iterator[dict[str, Any]]
) -> _Loaded:
    """An optimizer's groups with the hyper-parameters that were saved, the next of ``matched``."""
    found = _Loaded(optimizer)
    for group, hyper in zip(optimizer.param_groups, matched):
        numbers = list(range(len(found.numbers), len(found.numbers) + len(group["params"])))
        found.numbers.update({part_of[p].name: i for i, p in zip(numbers, group["params"])})
        carried = {key: _like(group.get(key), value) for key, value in hyper.items()}
        found.groups.append({**group, **carried, "params": numbers})
    return found


def _like(mine: object, saved: Any) -> Any:
    """A hyper-parameter in the form that the group at hand has it in: a tensor on its device, or a number."""
    if isinstance(mine, torch.Tensor):
        return torch.as_tensor(saved, dtype=mine.dtype, device=mine.device)
    return saved.item() if isinstance(saved, torch.Tensor) and isinstance(mine, int | float) else saved


def _reuse(held: Any, fresh: torch.Tensor) -> torch.Tensor:
    """The tensor that is there, if it is alike: a second copy of all state might not fit."""
    if type(held) is type(fresh) and held.shape == fresh.shape and held.dtype == fresh.dtype:
        return held
    return fresh


def _room(
    optimizer: torch.optim.Optimizer, part: Named, attribute: str, entry: TensorStorageMetadata, *, scalar: bool
) -> torch.Tensor:
    """Where to read saved state to: what the optimizer holds already, or a new tensor.

    Raises:
        CheckpointError: its shape differs from the parameter's, and this rank holds a part.
    """
    parameter, shape, dtype = part.parameter, entry.size, entry.properties.dtype
    held = optimizer.state.get(parameter, {}).get(attribute)
    if scalar:
        return _reuse(held, torch.empty((), dtype=dtype))
    if isinstance(optimizer, WholeTensors):
        return optimizer.room(parameter, attribute, shape, dtype)
    if whole_of(parameter) is None:
        return _reuse(held, torch.empty(shape, dtype=dtype, device=parameter.device))
    if shape != parameter.shape:
        raise CheckpointError(
            f"the checkpoint holds '{attribute}' of parameter '{part.name}' with the shape {tuple(shape)}, but the "
            f"parameter's is {tuple(parameter.shape)}; build the model that was saved, or the optimizer by "
            "refshard.whole_tensors if it was saved with that"
        )
    return _reuse(held, torch.empty_like(parameter, dtype=dtype, requires_grad=False))


def _saved_state(metadata: Metadata) -> Iterator[tuple[str, str, str]]:
    """Key, parameter and attribute of all saved state."""
    for key, place in metadata.planner_data.items():
        if place[:2] == (OPTIMIZER, "state") and len(place) == 4:
            yield key, place[2], place[3]


def _nest_groups(metadata: Metadata, groups: Mapping[str, Any]) -> list[dict[str, Any]]:
    nested: dict[int, dict[str, Any]] = {}
    for key, value in groups.items():
        _, _, index, name = metadata.planner_data[key]
        nested.setdefault(int(index), {})[name] = value
    return [nested[index] for index in sorted(nested)]


def _match_groups(
    optimizers: Sequence[torch.optim.Optimizer],
    part_of: Mapping[torch.Tensor, Named],
    saved: Sequence[dict[str, Any]],
    kinds: Sequence[str],
) -> list[dict[str, Any]]:
    """For each of the optimizers' groups, the hyper-parameters that its parameters were saved with."""
    source = {name: i for i, group in enumerate(saved) for name in group["params"]}
    left = set(source)
    matched = []
    for index, (optimizer, group) in enumerate(_groups_of(optimizers)):
        sources: dict[int, str] = {}
        for parameter in group["params"]:
            names = part_of[parameter].names
            name = next((n for n in names if n in source), None)
            if name is None:
                raise CheckpointError(
                    f"the checkpoint holds no optimizer group with parameter '{names[0]}', which group {index} of the "
                    "optimizer has; build the optimizer over the parameters that were saved"
                )
            left.difference_update(names)
            sources.setdefault(source[name], name)
            if kinds and kinds[source[name]] != kind_of(optimizer):
                raise CheckpointError(
                    f"the checkpoint holds the state of {kinds[source[name]]}, not of {kind_of(optimizer)}, for "
                    f"parameter '{name}'; build that optimizer, or load with optimizer=None and let this one start "
                    "afresh"
                )
        matched.append(_one_setting(index, sources, saved))
    if left:
        raise CheckpointError(
            f"the checkpoint holds optimizer state of parameter '{min(left)}', which the optimizer does "
            "not have; build it over the parameters that were saved, or load with optimizer=None"
        )
    return matched


def _one_setting(index: int, sources: Mapping[int, str], saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    settings = [{k: v for k, v in saved[i].items() if k not in NOT_CARRIED} for i in sources]
    for (_, name), setting in zip(sources.items(), settings):
        for key, value in setting.items():
            if settings[0].get(key) != value:
                first = next(iter(sources.values()))
                raise CheckpointError(
                    f"the checkpoint was saved with {key} = {settings[0].get(key)} for parameter '{first}' and {value} "
                    f"for '{name}', but group {index} of the optimizer has both; group them as they were saved"
                )
    return settings[0] if settings else {}
