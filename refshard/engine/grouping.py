"""Groups parameters into units: each block, the modules before the blocks, and those after them; groups with tied
parameters are merged. A model without blocks is one unit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from refshard.engine.policy import AS_AROUND, Policy, Resolved, members_of, resolve
from refshard.errors import EngineError, SpecError, nearest


@dataclass(frozen=True, slots=True)
class Member:
    """One physical parameter, the name it is known by, and every (module, attribute) that holds it."""

    name: str
    parameter: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """The parameters of a future unit, and the modules whose calls make up its forward."""

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[Member, ...]
    policy: Policy = AS_AROUND


def group_units(
    model: nn.Module,
    blocks: Sequence[str | type[nn.Module]] | None,
    ignored: Sequence[Member] = (),
    policies: Resolved | None = None,
) -> tuple[UnitGroup, ...]:
    """Partition the parameters of ``model``, except ``ignored`` ones, into units, in registration order.

    Each block is a unit; without blocks, the model is. A module with a mode or a mesh of its own by ``policies`` is one
    too, also within a block. The other modules that own parameters form one unit per stretch between blocks (an
    embedding before them, a norm and a head after them); one that contains blocks is a unit by itself, as it computes
    around them. Groups that share a tied parameter become one unit.

    Raises:
        SpecError: a named block does not exist.
        EngineError: a unit cannot be flattened, or has parameters of several policies.
    """
    policies = policies or resolve(model, {})
    named = dict(model.named_modules())
    apart = {*policies.apart()}
    chosen = find_blocks(model, blocks) or {"": model}
    chosen = {name: module for name, module in named.items() if name in chosen or name in apart}
    stretches = _stretches(model, chosen, policies)
    owners: dict[nn.Module, list[int]] = {}
    for index, (_, held) in enumerate(stretches):
        for module in held:
            owners.setdefault(module, []).append(index)
    left_out = {member.parameter for member in ignored}
    members = [
        (member, [index for module, _ in member.holders for index in owners[module]])
        for member in _members(model)
        if member.parameter not in left_out
    ]
    merged = _merge_tied(len(stretches), [touched for _, touched in members])
    groups = []
    for root in dict.fromkeys(merged):
        parts = [stretches[i] for i in range(len(stretches)) if merged[i] == root]
        parameters = tuple(member for member, touched in members if merged[touched[0]] == root)
        if parameters:
            name = "+".join(name for names, _ in parts for name in names)
            modules = tuple(named[name] for names, _ in parts for name in names)
            group = UnitGroup(name or type(model).__name__, modules, parameters, policies.of[modules[0]])
            if len({_place(policies.of[module]) for module in modules}) > 1:
                raise EngineError(
                    f"modules of unit '{group.name}' share parameters and have policies of different modes or meshes; "
                    "give them the same"
                )
            groups.append(group)
    for group in groups:
        _check_flattenable(group)
    return tuple(groups)


def find_blocks(model: nn.Module, blocks: Sequence[str | type[nn.Module]] | None) -> dict[str, nn.Module]:
    """The modules that become units, by name: as requested, or the members of the outermost ``nn.ModuleList``.

    A list or dictionary of modules among them stands for its members. A list of parameters is no block.
    """
    named = {name: module for name, module in model.named_modules() if name}
    lists = [name for name, module in named.items() if isinstance(module, nn.ModuleList)]
    found = {member for block in (lists if blocks is None else blocks) for member in _resolve(block, named)}
    wanted = {name for name in found if not isinstance(named[name], nn.ParameterList | nn.ParameterDict)}
    return {n: m for n, m in named.items() if n in wanted and not any(_lies_in(n, o) for o in wanted)}


def blocks_argument(model: nn.Module, names: Sequence[str]) -> str:
    """The argument that has ``shard`` make units of the modules of these names, as source; nothing by default."""
    kinds = dict.fromkeys(type(model.get_submodule(name)) for name in names)
    if [*find_blocks(model, None)] == [*names]:
        return ""
    if [*find_blocks(model, [*kinds])] == [*names]:
        return f", blocks=[{', '.join(kind.__name__ for kind in kinds)}]"
    return f", blocks={[*names]}"


def _resolve(block: str | type[nn.Module], named: dict[str, nn.Module]) -> list[str]:
    if isinstance(block, type):
        found = [name for name, module in named.items() if isinstance(module, block)]
        if not found:
            raise SpecError(f"blocks: the model holds no module of class {block.__name__}; name one that it holds")
        return found
    if block not in named:
        raise SpecError(f"blocks: the model has no module '{block}'; {nearest(block, list(named))}")
    return list(members_of(block, named[block]))


def _stretches(
    model: nn.Module, blocks: dict[str, nn.Module], policies: Resolved
) -> list[tuple[list[str], list[nn.Module]]]:
    """In registration order, per group: names of the modules that make up its forward, and all modules in it, without
    those of blocks within it.
    """
    groups: list[tuple[list[str], list[nn.Module]]] = []
    open_stretch = False
    owned = _owned(model, blocks)
    for name, module in model.named_modules():
        if name in blocks:
            inner = [block for block in blocks if block != name and _lies_in(block, name)]
            held = dict(module.named_modules(prefix=name))
            groups.append(([name], [m for n, m in held.items() if not any(n == b or _lies_in(n, b) for b in inner)]))
            open_stretch = False
        elif name in owned and not any(_lies_in(name, block) for block in blocks):
            around_blocks = any(_lies_in(block, name) for block in blocks)
            follows = open_stretch and _place(policies.of[module]) == _place(policies.of[groups[-1][1][0]])
            if around_blocks or not follows:
                groups.append(([name], owned[name]))
            else:
                names, of_names = groups[-1]
                of_names += owned[name]
                if not any(_lies_in(name, around) for around in names):
                    names.append(name)  # else its calls lie within those of the module around it
            open_stretch = not around_blocks
    return groups


def _place(policy: Policy) -> tuple[object, object]:
    """What the modules of a unit must have in common."""
    return policy.mode, policy.mesh


def _owned(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, list[nn.Module]]:
    """The modules with parameters, by the name of the one that computes with them: a module without a forward, such as
    a list of parameters, is never called, and serves the module around it.
    """
    named, owned = dict(model.named_modules()), dict[str, list[nn.Module]]()
    for name, module in named.items():
        owner = name
        while owner and owner not in blocks and getattr(named[owner].forward, "__func__", None) is nn.Module.forward:
            owner = owner.rpartition(".")[0]
        if module._parameters:
            owned.setdefault(owner, []).append(module)
    return owned


def _lies_in(name: str, around: str) -> bool:
    """Whether the module of this name is within the other one."""
    return name.startswith(f"{around}." if around else "")


def find_ignored(model: nn.Module, ignored: Sequence[str | nn.Parameter]) -> tuple[Member, ...]:
    """The parameters that are named, or given.

    Raises:
        SpecError: one is not in the model.
    """
    of_parameter = {member.parameter: member for member in _members(model)}
    names = {name: of_parameter[parameter] for name, _, _, parameter in _held(model)}
    found: dict[str, Member] = {}
    for wanted in ignored:
        member = names.get(wanted) if isinstance(wanted, str) else of_parameter.get(wanted)
        if member is None:
            what = f"'{wanted}'; {nearest(wanted, list(names))}" if isinstance(wanted, str) else "that is this tensor"
            raise SpecError(f"ignored: the model has no parameter {what}")
        found[member.name] = member
    return tuple(found.values())


def _members(model: nn.Module) -> list[Member]:
    """Every physical parameter once."""
    holders: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for name, module, attribute, parameter in _held(model):
        holders.setdefault(parameter, []).append((name, module, attribute))
    return [
        Member(held[0][0], parameter, tuple((module, attribute) for _, module, attribute in held))
        for parameter, held in holders.items()
    ]


def _held(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{attribute}" if prefix else attribute, module, attribute, parameter


def _merge_tied(n_groups: int, touched: list[list[int]]) -> list[int]:
    """For each group the first group that it is tied to, directly or through others."""
    root = list(range(n_groups))
    for group_indices in touched:
        target = min(root[i] for i in group_indices)
        sources = {root[i] for i in group_indices}
        root = [target if r in sources else r for r in root]
    return root


def _check_flattenable(group: UnitGroup) -> None:
    devices = {member.parameter.device for member in group.parameters}
    if len(devices) > 1:
        raise EngineError(
            f"parameters of unit '{group.name}' are on {' and '.join(sorted(map(str, devices)))}; "
            "move them to one device"
        )
    for member in group.parameters:
        parameter = member.parameter
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise EngineError(f"parameter '{member.name}' has hooks, which sharding would silence; remove them")
        if parameter.is_quantized or parameter.is_sparse:
            raise EngineError(
                f"parameter '{member.name}' is sparse or quantised, and cannot be flattened; make it dense"
            )
        if parameter.requires_grad and any(isinstance(m, nn.Embedding) and m.sparse for m, _ in member.holders):
            raise EngineError(f"parameter '{member.name}' has sparse gradients; set sparse=False on its nn.Embedding")
