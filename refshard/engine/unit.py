"""One unit: parameters that are gathered, computed with and reduced together, sharded and unsharded.

Between steps a module's parameters are this rank's parts of the master shard; inside forward and backward they are
views of the unit's slot. Both exist as ``nn.Parameter`` objects; exposing one or the other swaps references in the
modules and touches no data.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from refshard.engine.buffers import Slot
from refshard.engine.collectives import Pending
from refshard.errors import EngineError
from refshard.plan.layout import ParameterLayout, UnitLayout


@dataclass(slots=True, eq=False)
class UnitParameter:
    """One parameter: every place in the model that holds it (several when it is tied), and its two forms.

    ``sharded`` is 1-D, this rank's part, possibly empty: elements ``[start, stop)`` of the unit's shard, which lie at
    ``address``. ``unsharded`` and ``gradient`` have the parameter's shape; they are views of the unit's slots.
    """

    layout: ParameterLayout
    holders: tuple[tuple[nn.Module, str], ...]
    sharded: nn.Parameter
    start: int
    stop: int
    address: int
    unsharded: nn.Parameter = field(init=False)
    gradient: torch.Tensor = field(init=False)

    def expose(self, parameter: nn.Parameter) -> None:
        """Put ``parameter`` in every place that holds this one."""
        for module, name in self.holders:
            # nn.Module.__setattr__ would search four dictionaries, hundreds of times a step.
            module._parameters[name] = parameter


@dataclass(slots=True, eq=False, weakref_slot=True)
class Unit:
    """A unit and its state.

    ``shard`` is the 1-D master of ``layout.shard_numel`` elements, ``gradient_shard`` the same for gradients.
    ``modules`` are those whose calls make up the unit's forward. ``resident`` says that the slot holds the gathered
    parameters, ``computing`` that it is between BEGIN and END; ``gathering`` and ``reducing`` are under way.
    """

    index: int
    name: str
    modules: tuple[nn.Module, ...]
    layout: UnitLayout
    parameters: tuple[UnitParameter, ...]
    shard: torch.Tensor
    gradient_shard: torch.Tensor
    slot: Slot = field(init=False)
    gradient_slot: Slot = field(init=False)
    resident: bool = False
    computing: bool = False
    gathering: Pending | None = None
    generation: int = 0
    arrived: set[str] = field(default_factory=set)
    reducing: Pending | None = None
    reduce_target: torch.Tensor | None = None

    def bind(self, slot: Slot, gradient_slot: Slot, on_gradients: Callable[["Unit"], None]) -> None:
        """Make the unit live in these slots; ``on_gradients``, a method, is called when its last gradient arrived."""
        self.slot, self.gradient_slot = slot, gradient_slot
        places = self.layout.parameters
        for parameter, view, gradient in zip(self.parameters, slot.views(places), gradient_slot.views(places)):
            parameter.unsharded = nn.Parameter(view)
            parameter.gradient = gradient
            parameter.unsharded.register_post_accumulate_grad_hook(_taker(self, parameter, on_gradients))

    @property
    def in_backward(self) -> bool:
        """Whether the unit's backward has begun and its gradients have not all arrived."""
        return self.gradient_slot.owner == self.name and self.reducing is None

    def expose_unsharded(self) -> None:
        """Let the modules see the unsharded parameters."""
        for parameter in self.parameters:
            parameter.expose(parameter.unsharded)

    def expose_sharded(self) -> None:
        """Let the modules see this rank's parts."""
        for parameter in self.parameters:
            parameter.expose(parameter.sharded)

    def check_parameters(self) -> None:
        """Check that the model still holds the parameters that the engine trains.

        Raises:
            EngineError: one was moved, replaced or frozen since ``shard``; what was done to it would have no effect.
        """
        for parameter in self.parameters:
            known = (parameter.sharded, parameter.unsharded)
            moved = parameter.sharded.data_ptr() != parameter.address or not all(
                any(module._parameters[name] is form for form in known) for module, name in parameter.holders
            )
            if moved or not parameter.sharded.requires_grad:
                raise EngineError(
                    f"parameter '{parameter.layout.name}' was {'replaced or moved' if moved else 'frozen'} after "
                    "sharding, which the engine cannot follow; convert, load and freeze before refshard.shard, or copy "
                    "values in place"
                )

    def check_version(self, version: int) -> None:
        """Check that the weights are those that a forward saw, whose version was ``version``.

        Raises:
            EngineError: they were written to since.
        """
        if version != self.shard._version:
            raise EngineError(
                f"the weights of unit '{self.name}' changed between forward and backward; "
                "call backward before optimizer.step()"
            )

    def zero_missing_gradients(self) -> None:
        """Zero the gradients of parameters that took no part in this step, so that no stale ones are reduced."""
        for parameter in self.parameters:
            if parameter.layout.name not in self.arrived:
                parameter.gradient.zero_()

    def open_reduce_target(self) -> torch.Tensor:
        """The 1-D tensor for the reduce-scatter to write: the gradient shard itself, or scratch where gradients of an
        earlier microbatch are there to be added to.
        """
        accumulate = any(p.sharded.grad is not None for p in self.parameters)
        self.reduce_target = torch.empty_like(self.gradient_shard) if accumulate else self.gradient_shard
        return self.reduce_target

    def take_reduced(self) -> None:
        """Give each sharded parameter its part of the reduced gradient."""
        assert self.reduce_target is not None
        for parameter in self.parameters:
            part = self.reduce_target[parameter.start : parameter.stop]
            if parameter.sharded.grad is None:
                parameter.sharded.grad = part
            else:
                parameter.sharded.grad += part
        self.reduce_target = None

    def take_gradient(self, parameter: UnitParameter) -> bool:
        """Move the parameter's fresh gradient into the gradient slot; True once the unit's last one is there.

        The first gradient is copied as it comes and later ones are added: a preset ``.grad`` view would cost a zeroing
        and an addition instead.

        Raises:
            EngineError: nobody would reduce it, since the unit's backward has not begun or has ended.
        """
        name, gradient = parameter.layout.name, parameter.unsharded.grad
        parameter.unsharded.grad = None
        if not self.in_backward:
            raise EngineError(
                f"a gradient of '{name}' came before backward reached the output of its unit '{self.name}', or "
                "after its gradients were reduced; name the module that computes with it among the blocks"
            )
        assert gradient is not None
        if name in self.arrived:
            parameter.gradient.add_(gradient)
        else:
            parameter.gradient.copy_(gradient)
            self.arrived.add(name)
        return len(self.arrived) == len(self.parameters)


def _taker(
    unit: Unit, parameter: UnitParameter, on_gradients: Callable[[Unit], None]
) -> Callable[[torch.Tensor], None]:
    """The hook for a parameter's gradient. It holds nothing strongly: autograd keeps it where no collector looks."""
    unit_ref, index = weakref.ref(unit), unit.parameters.index(parameter)
    notify = weakref.WeakMethod(on_gradients)

    def take(_: torch.Tensor) -> None:
        alive, callback = unit_ref(), notify()
        assert alive is not None
        assert callback is not None
        if alive.take_gradient(alive.parameters[index]):
            callback(alive)

    return take
