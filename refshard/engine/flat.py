"""A flat parameter: parameters of one dtype in one buffer, their master shard, and their reduced gradients."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from refshard.engine.layout import ParameterLayout, UnitLayout
from refshard.engine.local_part import AsPart, local_of
from refshard.engine.split import Split
from refshard.engine.subclasses import Extended, Packed
from refshard.engine.whole import Master


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class UnitParameter:
    """One parameter: every place in the model that holds it (several when it is tied), and its two forms.

    ``sharded`` holds elements ``[start, stop)`` of the flat parameter's shard, possibly none, which lie at ``address``:
    a :class:`~refshard.engine.local_part.LocalPart`, or a view of the true shape where nothing is sharded.
    ``unsharded`` and ``gradient`` have the parameter's shape; they are views of the unit's slots. Of a parameter that
    tensor parallelism has ``split``, these are of this rank's part, and ``unsharded`` is a DTensor. ``as_part`` makes
    elements of a flat shard or gradient what ``sharded`` is. ``unknown`` is the gradient of one that is not reduced
    yet; ``outside`` is the hook for one that is read outside of its unit, and ``kept`` its gradient meanwhile.
    ``holders`` are the modules that have the parameter as that attribute; ``listed`` are other places that it is kept
    in, list and index (the weights of an ``nn.LSTM``). ``form`` is what makes ``unsharded`` of views of the slot where
    it is of a tensor subclass. One may consist of several tensors, each with an object like this; the first has the
    ``holders``.
    """

    layout: ParameterLayout
    holders: tuple[tuple[nn.Module, str], ...]
    sharded: nn.Parameter
    start: int
    stop: int
    address: int
    split: Split | None
    as_part: Callable[[torch.Tensor], torch.Tensor]
    listed: tuple[tuple[list[Any], int], ...] = ()
    form: Packed | Extended | None = None
    unsharded: nn.Parameter = field(init=False)
    gradient: torch.Tensor = field(init=False)
    unknown: torch.Tensor | None = None
    outside: Callable[[torch.Tensor], None] | None = None
    kept: torch.Tensor | None = None


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class FlatParameter:
    """All parameters of a unit of one dtype that are trained, or all that are frozen, end to end.

    ``master`` holds ``shard``, 1-D and of ``layout.shard_numel`` elements; that of a frozen one is of the dtype that is
    computed with. ``dtype`` is that of the unsharded parameters, ``reduce_dtype`` that of their unsharded gradients.
    ``own`` is where this rank's part lies in the unsharded buffer. ``reduced_over`` is how many ranks' gradients are
    reduced, and ``scratch_numel`` how many more elements that needs. Gradients are multiplied by ``scale`` before the
    reduction, so that its result is the mean, and the mean by ``rescale``, if the user sets another divisor.
    ``offloaded`` says that masters and gradients are in the host's memory, which copies go to and from, ``narrowed``
    that the master of a frozen one is a cast of the parameters that were given.

    Between steps no gradient shard exists: a reduction makes a new one where the parameters have no ``.grad``, and adds
    to it where they have. ``whole_gradient`` is the exception, where the shard is the whole: it is kept, and is itself
    the slot that gradients arrive in. ``users`` is how many tensors of the engine's lie in it.
    """

    layout: UnitLayout
    parameters: tuple[UnitParameter, ...]
    master: Master
    trained: bool
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    own: slice
    reduced_over: int
    scratch_numel: int
    scale: float
    rescale: float = 1.0
    offloaded: bool = False
    narrowed: bool = False
    whole_gradient: torch.Tensor | None = None
    users: int = 0
    target: torch.Tensor | None = None
    shard: torch.Tensor = field(init=False)
    cuts: list[int] = field(init=False)
    factor: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        """``cuts`` are the lengths of what lies before the first parameter's part, that part, what lies between, ...

        ``factor`` is ``scale`` as a tensor: torch would wrap a number anew, hundreds of times a step.
        """
        self.shard = self.master.shard
        bounds = [0, *(bound for p in self.parameters for bound in (p.start, p.stop)), self.layout.shard_numel]
        self.cuts = [after - before for before, after in pairwise(bounds)]
        self.factor = torch.tensor(self.scale, dtype=torch.float64)

    @property
    def reduces(self) -> bool:
        """Whether a reduced gradient differs from this rank's own."""
        return self.reduced_over != 1 or self.rescale != 1

    def part_of(self, parameter: UnitParameter) -> torch.Tensor:
        """What this rank has of the parameter's tensor: a part, or the whole."""
        return parameter.as_part(self.shard[parameter.start : parameter.stop])

    @property
    def extended(self) -> bool:
        """Whether its parameters say themselves what to gather of their masters."""
        return isinstance(self.parameters[0].form, Extended)

    def pack(self, own: torch.Tensor) -> None:
        """Write what they say to ``own``, this rank's part of the unsharded buffer."""
        for parameter in self.parameters:
            assert isinstance(parameter.form, Extended)
            place = slice(parameter.start, parameter.stop)
            parameter.form.pack(self.shard[place], own[place])

    def has_gradients(self) -> bool:
        """Whether gradients of an earlier reduction are there, to be added to."""
        return any(p.sharded.grad is not None for p in self.parameters)

    def kept_by_others(self) -> bool:
        """Whether somebody holds on to gradients of an earlier backward, which the coming one would write over: to a
        parameter's ``.grad`` that is no longer its own, or to a view of one.
        """
        if self.whole_gradient is None:
            return False
        own = sum(self.holds(parameter.sharded.grad, parameter) for parameter in self.parameters)
        return users_of(self.whole_gradient) > self.users + own

    def set_gradients_aside(self, pending: set[str]) -> None:
        """Copy reduced gradients out of the slot that the coming backward writes to; they stay each parameter's
        ``.grad``. Those in ``pending`` are not reduced yet: the backward adds to them where they are.
        """
        for parameter in self.parameters if self.whole_gradient is not None else ():
            if parameter.layout.name not in pending and self.holds(parameter.sharded.grad, parameter):
                assert parameter.sharded.grad is not None
                parameter.sharded.grad = parameter.sharded.grad.clone()

    def open_target(self, full: torch.Tensor, *, needs_slot_free: bool) -> torch.Tensor:
        """The 1-D tensor for a reduction of ``full`` to write: the new gradient itself if it has the masters' dtype and
        device and does not exist yet; else this rank's part of ``full``, or scratch if the slot must be free before the
        reduction has ended.
        """
        alike = full.dtype == self.shard.dtype and not self.offloaded
        if self.whole_gradient is not None:
            self.target = self.whole_gradient
        elif needs_slot_free or (alike and not self.has_gradients()):
            self.target = torch.empty_like(full[self.own])
        else:
            self.target = full[self.own]
        return self.target

    def take_reduced(self, full: torch.Tensor, filled: set[str]) -> list["Unclaimed"]:
        """Give each sharded parameter in ``filled`` its part of the reduced gradient; return the parts of the others,
        which another rank may have used.

        ``full`` is the unsharded buffer that was reduced: what was reduced in place there must not stay there.
        """
        assert self.target is not None
        target, self.target = self.target, None
        if self.rescale != 1:
            # Only now, and in the masters' dtype: a mean over ranks can neither overflow nor vanish in a narrow one.
            target = target.to(self.shard.dtype).mul_(self.rescale)
        in_slot = target.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        foreign = self.whole_gradient is None and (in_slot or self.offloaded or target.dtype != self.shard.dtype)
        if foreign and not self.has_gradients():
            # The host waits for its memory once, at the end of backward.
            kept = torch.empty_like(self.shard, pin_memory=self.shard.is_pinned())
            target, foreign = kept.copy_(target, non_blocking=True), False
        unclaimed = []
        parts = target.split_with_sizes(self.cuts)
        for parameter, part in zip(self.parameters, parts[1::2]):
            if parameter.layout.name in filled:
                self.accept(parameter, part, foreign=foreign)
            elif self.reduced_over != 1:
                unclaimed.append(
                    Unclaimed(self, parameter, part.clone() if foreign or self.whole_gradient is not None else part)
                )
        return unclaimed

    def accept(self, parameter: "UnitParameter", part: torch.Tensor, *, foreign: bool) -> None:
        """Add ``part`` to the parameter's gradient; one that is ``foreign`` must not become the gradient itself.

        The user's hooks on the parameter run here, as they do when autograd accumulates a gradient.
        """
        sharded = parameter.sharded
        if not sharded.requires_grad:  # frozen since forward
            return
        held, hooks = sharded.grad, _hooks_of_others(sharded._backward_hooks)
        if foreign and (held is None or hooks):
            part = torch.empty_like(self.shard[parameter.start : parameter.stop]).copy_(part)
        gradient = parameter.as_part(part.to(self.shard.device) if self.offloaded else part)
        for hook in hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if held is None or (self.holds(held, parameter) and self.holds(part, parameter)):
            sharded.grad = gradient
        elif self.whole_gradient is not None and users_of(held) == 1:
            sharded.grad = gradient.add_(held)  # which nobody else has, and which lay there before
        else:
            held += gradient
        for hook in _hooks_of_others(sharded._post_accumulate_grad_hooks):
            hook(sharded)

    def holds(self, gradient: torch.Tensor | None, parameter: "UnitParameter") -> bool:
        """Whether ``gradient`` is the parameter's place in the slot that gradients arrive in."""
        if gradient is None or self.whole_gradient is None:
            return False
        place, elements = self.whole_gradient[parameter.start : parameter.stop], local_of(gradient)
        return elements.data_ptr() == place.data_ptr() and elements.numel() == place.numel() > 0


class Unclaimed(NamedTuple):
    """A part of a reduced gradient of a parameter that this rank has not used."""

    flat: FlatParameter
    parameter: UnitParameter
    part: torch.Tensor


class OwnHook:
    """A hook that the engine puts on a parameter."""


_OWN_HOOKS = (AsPart, OwnHook)


def users_of(tensor: torch.Tensor) -> int:
    """How many tensors, in Python and in C++, lie in the memory of this one."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _hooks_of_others(hooks: dict[int, Any] | None) -> list[Any]:
    """The hooks that are not the engine's own."""
    return [h for h in hooks.values() if not isinstance(getattr(h, "__self__", h), _OWN_HOOKS)] if hooks else []
