"""A unit's gradients before they are reduced: which have arrived, which are missing, and what the slot holds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import get_gradient_edge

from refshard.engine.buffers import Places, Sizes, Slot
from refshard.engine.collectives import Pending
from refshard.engine.flat import FlatParameter, Unclaimed, UnitParameter, users_of
from refshard.engine.local_part import UnreducedPart, whole_of
from refshard.errors import EngineError


@dataclass(slots=True, eq=False, repr=False)
class Gradients:
    """The gradients of the ``flats`` of the unit ``name`` that are trained, and of their ``parameters``.

    They arrive in ``slot``, or where autograd puts them until the slot is there. ``arrived`` names the parameters whose
    gradient has come in this backward, ``filled`` those with a gradient in the slot, from this backward or an earlier
    microbatch's; ``reducing`` is the reduction under way. ``unclaimed`` are reduced gradients of the others, until it
    is known whether another rank has used them. ``partial`` says that some parameter may take no part in a backward,
    so that autograd must be asked which still have a gradient to come. ``shown`` is what :meth:`show_unreduced` has put
    in the place of gradients. ``read_outside`` says that one came to a sharded parameter itself.
    """

    name: str
    flats: tuple[FlatParameter, ...] = ()
    parameters: tuple[UnitParameter, ...] = ()
    slot: Slot = field(init=False)
    arrived: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)
    unclaimed: list[Unclaimed] = field(default_factory=list)
    partial: bool = True
    shown: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    read_outside: bool = False
    reducing: Pending | None = None

    def train(self, flats: tuple[FlatParameter, ...]) -> None:
        """From now on be those of ``flats``."""
        self.flats, self.parameters = flats, tuple(p for flat in flats for p in flat.parameters)

    @property
    def sizes(self) -> Sizes:
        """Elements and dtypes of their unsharded gradients."""
        return [(flat.layout.numel, flat.reduce_dtype) for flat in self.flats]

    @property
    def scratch_sizes(self) -> Sizes:
        """Elements and dtypes of what their reductions need besides; none if they need nothing."""
        sizes = [(flat.scratch_numel, flat.reduce_dtype) for flat in self.flats]
        return sizes if any(numel for numel, _ in sizes) else []

    @property
    def places(self) -> Places:
        """Where their gradients lie."""
        return [flat.layout.parameters for flat in self.flats]

    @property
    def aliased(self) -> bool:
        """Whether gradients arrive in the gradient shards themselves."""
        return all(flat.whole_gradient is not None for flat in self.flats)

    @property
    def wanted(self) -> bool:
        """Whether some parameter gets gradients now."""
        return any(p.unsharded.requires_grad for p in self.parameters)

    @property
    def all_arrived(self) -> bool:
        """Whether every parameter's gradient has come."""
        return len(self.arrived) == len(self.parameters)

    def arrive(self, flat: FlatParameter, parameter: UnitParameter) -> None:
        """A parameter's gradient has come. A slot that accumulates takes it at once. Any other is taken by
        :meth:`complete`, and until then the gradient stays where autograd has put it, so that the slot may lie where
        the parameters do now.
        """
        self.arrived.add(parameter.layout.name)
        if self.slot.accumulates:
            self.move(flat, [parameter])

    def take_outside(self, flat: FlatParameter, parameter: UnitParameter) -> None:
        """Move the gradient that has come to the sharded parameter itself to where any other goes."""
        fresh, parameter.sharded.grad, parameter.kept = parameter.sharded.grad, parameter.kept, None
        assert fresh is not None
        self.read_outside = True
        if parameter.unsharded.grad is not None:  # where the slot is not there yet
            parameter.unsharded.grad += fresh
            return
        parameter.unsharded.grad = fresh
        if self.slot.accumulates:
            self.move(flat, [parameter])

    def any_due(self) -> bool:
        """Whether autograd has yet to accumulate one of them in the backward under way."""
        missing = (p for p in self.parameters if p.layout.name not in self.arrived and p.unsharded.requires_grad)
        return any(torch._C._will_engine_execute_node(get_gradient_edge(p.unsharded).node) for p in missing)

    def place(self, slot: Slot) -> None:
        """Let gradients from now on lie in ``slot``; none may be on their way."""
        self.slot = slot
        for flat, views in zip(self.flats, slot.views):
            for parameter, view in zip(flat.parameters, views):
                parameter.gradient = view
            if flat.whole_gradient is not None:
                flat.users = users_of(flat.whole_gradient)

    def take_slot(self) -> None:
        """Have the gradient slot, which may hold gradients of earlier microbatches."""
        if self.slot.owner != self.name:
            self.slot.acquire(self.name)
            kept = [flat for flat in self.flats if flat.kept_by_others()]
            if kept:
                self._leave(kept)
            for flat in self.flats:
                flat.set_gradients_aside(self.filled)

    def _leave(self, kept: Sequence[FlatParameter]) -> None:
        """Let gradients of ``kept`` from now on arrive in new memory: others hold on to what is in the present one."""
        for flat in kept:
            assert flat.whole_gradient is not None
            flat.whole_gradient = torch.empty_like(flat.whole_gradient)
        whole = [flat.whole_gradient for flat in self.flats if flat.whole_gradient is not None]
        self.slot.pool.memory = whole[0]
        self.slot.lay(whole, self.places)
        self.place(self.slot)

    def move(self, flat: FlatParameter, parameters: Sequence[UnitParameter]) -> None:
        """Into the slot. The first gradient is written and later ones are added: a preset ``.grad`` view would cost a
        zeroing and an addition instead. Scaling to the mean is part of the write. If the collective averages, one call
        writes all.
        """
        together: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in parameters:
            name, gradient = parameter.layout.name, parameter.unsharded.grad
            parameter.unsharded.grad = None
            assert gradient is not None
            if parameter.split is not None:
                gradient = parameter.split.part_of(gradient)
            if name in self.filled:
                parameter.gradient.add_(gradient, alpha=flat.scale)
            elif flat.scale == 1:
                together.append((parameter.gradient, gradient))
            elif flat.dtype == flat.reduce_dtype:
                torch.mul(gradient, flat.factor, out=parameter.gradient)
            else:
                parameter.gradient.copy_(gradient).mul_(flat.scale)
            self.filled.add(name)
        if together:
            torch._foreach_copy_([place for place, _ in together], [gradient for _, gradient in together])

    def complete(self) -> None:
        """Have all gradients in the slot. Those of parameters that took no part in this step are zero, not stale."""
        self.drop_cleared()
        self.take_slot()
        if not self.slot.accumulates:
            for flat in self.flats:
                self.move(flat, [p for p in flat.parameters if p.unsharded.grad is not None])
        self.partial = len(self.filled) < len(self.parameters)
        for parameter in self.parameters if self.partial else ():
            if parameter.layout.name not in self.filled:
                parameter.gradient.zero_()

    def show_unreduced(self) -> None:
        """Give parameters with gradients that are not reduced yet a ``.grad``, to see whether it is cleared.

        It is the unreduced gradient itself where that is where gradients are kept; else NaN, since this rank's part is
        not known yet.
        """
        for flat in self.flats:
            for parameter in flat.parameters:
                if parameter.layout.name not in self.filled:
                    continue
                if parameter.sharded.grad is None:
                    place = slice(parameter.start, parameter.stop)
                    if flat.whole_gradient is not None:
                        parameter.sharded.grad = parameter.as_part(flat.whole_gradient[place])
                    else:
                        parameter.sharded.grad = parameter.unknown = _unknown(parameter.sharded, flat.shard[place])
                gradient = parameter.sharded.grad
                self.shown[parameter.layout.name] = (gradient, gradient._version)

    def drop_cleared(self) -> None:
        """Forget the unreduced gradients that were cleared since they were shown.

        Raises:
            EngineError: one was written to, which has no effect.
        """
        for flat in self.flats if self.shown else ():
            for parameter in flat.parameters:
                gradient, version = self.shown.pop(parameter.layout.name, (None, 0))
                if gradient is None:
                    continue
                same = parameter.sharded.grad is gradient
                if isinstance(gradient, UnreducedPart):
                    written, cleared = False, gradient.cleared
                else:
                    written = same and gradient._version != version and not flat.holds(gradient, parameter)
                    cleared = written and not bool((gradient != 0).any())
                if written and not cleared:
                    raise EngineError(
                        f"the gradient of '{parameter.layout.name}' was written to before it was reduced, which has no "
                        "effect on it; leave no_sync first, or clear it"
                    )
                if cleared or not same:
                    self.filled.discard(parameter.layout.name)
                if parameter.sharded.grad is parameter.unknown:
                    parameter.sharded.grad = None
                parameter.unknown = None

    def begin_backward(self) -> None:
        """None has come yet."""
        self.arrived.clear()
        self.read_outside = False

    def abandon(self, *, keep: bool) -> None:
        """Stop work in progress; what is not reduced stays only with ``keep``, unless it is being reduced."""
        self.unclaimed.clear()
        if self.reducing is None and keep:
            return
        self.reducing = None
        for flat in self.flats:
            flat.target = None
        for parameter in self.parameters if not self.slot.accumulates else ():
            parameter.unsharded.grad = None
        self.filled.clear()
        if self.slot.owner == self.name:
            self.slot.release()


def _unknown(parameter: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """What stands for a gradient that is not reduced yet; NaN where the parameter is plain."""
    whole = whole_of(parameter)
    return torch.full_like(parameter, math.nan) if whole is None else UnreducedPart(elements, whole)
