"""Policies: modules that are sharded in another mode or precision, or over another mesh, than the rest of a model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from refshard.engine.precision import Precision
from refshard.errors import SpecError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How :func:`refshard.shard` treats a module and its submodules; None takes over the setting of the outer module.

    A module with a ``mode`` or a ``mesh`` becomes a unit of its own. ``precision`` applies to its parameters, to its
    inputs and, if it has an ``output``, to its outputs. ``mesh`` must have all ranks of the model's mesh or, with
    expert parallelism (parameters that are DTensors over a mesh of experts), the ranks that hold the same experts.
    """

    mode: str | None = None
    precision: Precision | None = None
    mesh: DeviceMesh | None = None

    def within(self, outer: "Policy") -> "Policy":
        """The policy of a module with this policy inside one with the policy ``outer``."""
        return Policy(
            mode=self.mode or outer.mode, precision=self.precision or outer.precision, mesh=self.mesh or outer.mesh
        )


Policies = Mapping[str, Policy] | Callable[[str, nn.Module], Policy | None]
"""Policies by patterns of module names, such as ``"layers.*.experts"``; the last matching pattern counts, and applies
to submodules too. Or a function of a module's name and the module, which returns its policy, or None if it has none.
"""
AS_AROUND = Policy()


@dataclass(frozen=True, slots=True)
class Resolved:
    """``given`` are the policies of modules by name, that of a list for each of its members; ``of`` is what holds for
    each module of the model.
    """

    given: Mapping[str, Policy]
    of: Mapping[nn.Module, Policy]

    def apart(self) -> list[str]:
        """The names of the modules that become units of their own."""
        return [name for name, policy in self.given.items() if policy.mode is not None or policy.mesh is not None]


def resolve(model: nn.Module, policies: Policies) -> Resolved:
    """What ``policies`` mean for each module of ``model``.

    Raises:
        SpecError: a pattern matches no module.
    """
    named = dict(model.named_modules())
    find = policies if callable(policies) else _by_pattern(policies, list(named))
    given: dict[str, Policy] = {}
    for name, module in named.items():
        if (policy := find(name, module)) is not None:
            given.update({member: policy.within(given.get(member, AS_AROUND)) for member in members_of(name, module)})
    of: dict[nn.Module, Policy] = {}
    for name, module in named.items():
        around = AS_AROUND if not name else of[named[name.rpartition(".")[0]]]
        of[module] = given[name].within(around) if name in given else around
    return Resolved(given, of)


def members_of(name: str, module: nn.Module) -> Iterator[str]:
    """The module's name; of a list or dictionary of modules, which is never called itself, those of its members."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield name
        return
    for child, member in module.named_children():
        yield from members_of(f"{name}.{child}", member)


def _by_pattern(policies: Mapping[str, Policy], names: list[str]) -> Callable[[str, nn.Module], Policy | None]:
    for pattern in policies:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SpecError(f"policies: no module's name matches '{pattern}'; {nearest(pattern, names)}")
    last_first = [*policies.items()][::-1]

    def find(name: str, _: nn.Module) -> Policy | None:
        pattern, policy = next(((p, policy) for p, policy in last_first if fnmatchcase(name, p)), ("", None))
        parts = name.split(".")
        around = (".".join(parts[:count]) for count in range(1, len(parts)))
        return None if any(fnmatchcase(outer, pattern) for outer in around) else policy

    return find
