"""One unit: parameters that are gathered, computed with and reduced together, sharded and unsharded.

A unit holds one *flat parameter* per dtype and per ``requires_grad``. Between steps a module's parameters are local
parts of the flat parameters' master shards; inside forward and backward they are views of the unit's slot. Both
exist as ``nn.Parameter`` objects; exposing one or the other swaps references in the modules and touches no data.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from refshard.engine.buffers import Places, Sizes, Slot
from refshard.engine.collectives import Collectives, Pending
from refshard.engine.layout import ParameterLayout, UnitLayout
from refshard.engine.local_part import AsPart, UnreducedPart, local_of, whole_of
from refshard.engine.placement import Mode
from refshard.engine.precision import Precision
from refshard.engine.schedule import Phase, Presence, UnitFacts
from refshard.engine.split import Split
from refshard.engine.whole import Master
from refshard.errors import EngineError

UNSHARDED_IN = "_refshard_unit"
"""An attribute of unsharded parameters: the name of the unit that computes with them."""


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
    in, list and index (the weights of an ``nn.LSTM``).
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
        return _users_of(self.whole_gradient) > self.users + own

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
                unclaimed.append(Unclaimed(self, parameter, part.clone() if foreign else part))
        return unclaimed

    def accept(self, parameter: "UnitParameter", part: torch.Tensor, *, foreign: bool) -> None:
        """Add ``part`` to the parameter's gradient; one that is ``foreign`` must not become the gradient itself.

        The user's hooks on the parameter run here, as they do when autograd accumulates a gradient.
        """
        sharded = parameter.sharded
        if not sharded.requires_grad:  # frozen since forward
            return
        held, hooks = sharded.grad, _users(sharded._backward_hooks)
        if foreign and (held is None or hooks):
            part = torch.empty_like(self.shard[parameter.start : parameter.stop]).copy_(part)
        gradient = parameter.as_part(part.to(self.shard.device) if self.offloaded else part)
        for hook in hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if held is None or self.holds(held, parameter):
            sharded.grad = gradient
        elif self.whole_gradient is not None and _users_of(held) == 1:
            sharded.grad = gradient.add_(held)  # which nobody else has, and which lay there before
        else:
            held += gradient
        for hook in _users(sharded._post_accumulate_grad_hooks):
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


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Unit:
    """A unit and its state, which its own methods alone change.

    The calls of ``modules`` make up the unit's forward; they compute on ``device``. ``trained`` are the parameters that
    have a place for gradients; ``frozen`` says that some parameters get none now. ``aliased`` says that the shards are
    whole and are themselves what the modules see. ``presence`` says where the parameters are: gathered ones were taken
    from masters of version ``gathered_version``. ``ahead`` says that the user requested them and that no pass has
    needed them yet. ``computing`` says that the unit is between BEGIN and END, ``in_backward`` that it is so in a
    backward, ``recomputed`` that activation checkpointing has begun it there, ``ended`` that it has ended there.
    ``gathering`` and ``reducing`` are under way. ``arrived`` names the parameters whose gradient has come in this
    backward, ``filled`` those with a gradient in the slot, from this backward or an earlier microbatch's; ``unclaimed``
    are reduced gradients of the others, until it is known whether another rank has used them. ``partial`` says that
    some parameter may take no part in a backward, so that autograd must be asked which still have a gradient to come.
    ``shown`` is what :meth:`show_unreduced` has put in their place. ``read_outside`` says that one came to a sharded
    parameter itself. ``inputs_awaited`` counts calls of a unit with frozen parameters whose inputs' gradients are still
    to come. ``on_listed`` is called before anybody lists the modules' parameters. ``computes`` tells the lanes that
    compute is on the current stream too: autograd calls hooks on those that forward ran on. ``lasts`` says that
    something of the unit was seen to run after its last gradient: from then on it stays gathered until the backward has
    ended.

    **Versions.** A slot is written to unseen by autograd, whose version counters are set here instead: to one number
    while the slot holds what was gathered from masters of ``gathered_version``, to another when it does not. What
    autograd saved in forward it therefore accepts in backward if and only if the slot holds the same values again.
    """

    index: int
    name: str
    modules: tuple[nn.Module, ...]
    flats: tuple[FlatParameter, ...]
    mode: Mode
    precision: Precision
    collectives: Collectives
    device: torch.device
    read_in_backward: bool = True
    aliased: bool = False
    facts: UnitFacts = field(init=False)
    slot: Slot = field(init=False)
    gradient_slot: Slot = field(init=False)
    on_early_gradient: Callable[["Unit"], None] = field(init=False)
    on_gradients: Callable[["Unit"], None] = field(init=False)
    computes: Callable[[], None] = field(init=False)
    trained: tuple[UnitParameter, ...] = field(init=False)
    trained_flats: tuple[FlatParameter, ...] = field(init=False)
    frozen: bool = field(init=False)
    _places: list[tuple[Any, str | int, nn.Parameter, nn.Parameter]] = field(init=False)
    _views: tuple[torch.Tensor, ...] = field(init=False)
    _plain: bool = field(init=False)
    presence: Presence = Presence.SHARDED
    computing: bool = False
    in_backward: bool = False
    recomputed: bool = False
    ended: bool = False
    ahead: bool = False
    lasts: bool = False
    gathering: Pending | None = None
    gathered_version: int = -1
    arrived: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)
    unclaimed: list[Unclaimed] = field(default_factory=list)
    partial: bool = True
    shown: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    read_outside: bool = False
    inputs_awaited: int = 0
    on_listed: Callable[[], None] | None = None
    reducing: Pending | None = None

    def __post_init__(self) -> None:
        self._list_trained()

    def _list_trained(self) -> None:
        self.trained_flats = tuple(flat for flat in self.flats if flat.trained)
        self.trained = tuple(p for flat in self.trained_flats for p in flat.parameters)
        self.frozen = not all(p.sharded.requires_grad for p in self.parameters)
        sizes = ((flat.layout.numel, str(flat.dtype), str(flat.reduce_dtype), flat.trained) for flat in self.flats)
        self.facts = UnitFacts(
            self.mode, tuple(sizes), bool(self.trained), self.read_in_backward, self.collectives.legs
        )

    @property
    def trains(self) -> bool:
        """Whether some parameter gets gradients now."""
        return bool(self.trained) and any(p.unsharded.requires_grad for p in self.trained)

    @property
    def parameters(self) -> tuple[UnitParameter, ...]:
        """All parameters."""
        return tuple(p for flat in self.flats for p in flat.parameters)

    @property
    def parameter_sizes(self) -> Sizes:
        """Elements and dtypes of its unsharded flat parameters."""
        return [(flat.layout.numel, flat.dtype) for flat in self.flats]

    @property
    def gradient_sizes(self) -> Sizes:
        """Elements and dtypes of their unsharded gradients."""
        return [(flat.layout.numel, flat.reduce_dtype) for flat in self.trained_flats]

    @property
    def scratch_sizes(self) -> Sizes:
        """Elements and dtypes of what their reductions need besides; none if they need nothing."""
        sizes = [(flat.scratch_numel, flat.reduce_dtype) for flat in self.trained_flats]
        return sizes if any(numel for numel, _ in sizes) else []

    @property
    def places(self) -> Places:
        """Where its parameters lie in them."""
        return [flat.layout.parameters for flat in self.flats]

    @property
    def gradient_places(self) -> Places:
        """Where their gradients lie."""
        return [flat.layout.parameters for flat in self.trained_flats]

    @property
    def gradients_aliased(self) -> bool:
        """Whether gradients arrive in the gradient shards themselves."""
        return all(flat.whole_gradient is not None for flat in self.trained_flats)

    @property
    def version(self) -> int:
        """Rises with every change of the masters."""
        return sum(flat.shard._version for flat in self.flats)

    @property
    def current(self) -> bool:
        """Whether the slot holds the masters' values, or will when the gather under way is done."""
        return self.aliased or (self.presence is not Presence.SHARDED and self.gathered_version == self.version)

    @property
    def complete(self) -> bool:
        """Whether this backward has nothing more to bring."""
        if self.lasts or self.inputs_awaited:
            return False
        if len(self.arrived) == len(self.trained):
            return True
        # Reentrant checkpointing recomputes in one backward, and computes gradients in another, within it.
        in_this_backward = self.arrived or not self.recomputed
        return bool(self.partial and in_this_backward) and not any(map(_is_due, self._missing()))

    def may_end(self, phase: Phase) -> bool:
        """Whether this phase has nothing more to compute, though no gradient may have said so."""
        if phase == "forward":
            return not self.computing
        self.partial = True
        return not self.in_backward or self.complete

    def _missing(self) -> Iterator[UnitParameter]:
        """The parameters whose gradient has not come in this backward, without those that are frozen now."""
        return (p for p in self.trained if p.layout.name not in self.arrived and p.unsharded.requires_grad)

    def expect_reads_in_backward(self) -> None:
        """From now on backward may read the parameters, though that of the modules' forward does not."""
        self.read_in_backward = True
        self._list_trained()

    def bind(self, slot: Slot, gradient_slot: Slot, on_gradients: Callable[["Unit"], None]) -> None:
        """Make the unit live in these slots; ``on_gradients`` is called when its last gradient arrived.

        It must hold none yet. What autograd saved of the slots before is stale from now on.
        """
        self.slot = slot
        self.place_gradients(gradient_slot)
        for flat, views_of_flat in zip(self.flats, slot.views):
            for parameter, view in zip(flat.parameters, views_of_flat):
                seen = view if parameter.split is None else parameter.split.wrap(view)
                parameter.unsharded = nn.Parameter(seen, requires_grad=flat.trained)
                setattr(parameter.unsharded, UNSHARDED_IN, self.name)
            for parameter in flat.parameters if flat.trained else ():
                parameter.unsharded.register_post_accumulate_grad_hook(_Taker(self, flat, parameter))
                trained = parameter.sharded.requires_grad
                if flat.reduces and type(parameter.sharded) is nn.Parameter and parameter.outside is None:
                    parameter.outside = _Outside(self, flat, parameter)
                    parameter.sharded.requires_grad_()  # which hooks ask for
                    parameter.sharded.register_hook(parameter.outside.before)
                    parameter.sharded.register_post_accumulate_grad_hook(parameter.outside)
                    parameter.sharded.requires_grad_(trained)
                parameter.unsharded.requires_grad_(trained)
        for module in {module for p in self.parameters for module, _ in p.holders}:
            if type(module._parameters) is dict:
                module.__dict__["_parameters"] = _Listed(self, module._parameters)
        self.on_gradients = on_gradients
        self._views = tuple(p.unsharded for p in self.parameters)
        self._plain = any(type(p.sharded) is nn.Parameter for p in self.parameters)
        self._places = [
            (container, key, p.sharded, p.unsharded)
            for p in self.parameters
            for container, key in (*_attributes(p), *p.listed)
        ]
        self.presence = Presence.UNSHARDED if self.aliased else Presence.SHARDED
        self._set_versions()

    def place_gradients(self, slot: Slot) -> None:
        """Let gradients from now on lie in ``slot``; none may be on their way."""
        self.gradient_slot = slot
        for flat, views in zip(self.trained_flats, slot.views):
            for parameter, view in zip(flat.parameters, views):
                parameter.gradient = view
            if flat.whole_gradient is not None:
                flat.users = _users_of(flat.whole_gradient)

    def start_gather(self, pending: Pending) -> None:
        """The slot, which is the unit's, is being written to."""
        self.gathering, self.presence, self.gathered_version = pending, Presence.GATHERING, self.version

    def finish_gather(self) -> None:
        """The slot holds the unit's parameters."""
        self.gathering, self.presence = None, Presence.UNSHARDED
        self._set_versions()

    def release(self) -> None:
        """Give the parameter slot up."""
        self.gathering, self.presence, self.ahead = None, Presence.SHARDED, False
        self._set_versions()
        self.slot.release()

    def begin(self, phase: Phase) -> None:
        """Start to compute: let the modules see the unsharded parameters.

        In backward too: what is recomputed there reads the modules' parameters again.
        """
        if phase == "backward":
            self._begin_backward()
            if self.presence is not Presence.UNSHARDED and not self.facts.read_in_backward:
                return
        assert self.presence is Presence.UNSHARDED
        assert self.slot.owner == self.name
        self.ahead = False
        if self.aliased and self.gathered_version != self.version:
            self.gathered_version = self.version
            self._set_versions()
        self.computing = True
        self._expose(unsharded=True)

    def _begin_backward(self) -> None:
        self._drop_cleared()
        if self.trained and self.gradient_slot.accumulates:
            self._take_gradient_slot()
        self.in_backward, self.ended = True, False

    def _take_gradient_slot(self) -> None:
        """Have the gradient slot, which may hold gradients of earlier microbatches."""
        if self.gradient_slot.owner != self.name:
            self.gradient_slot.acquire(self.name)
            kept = [flat for flat in self.trained_flats if flat.kept_by_others()]
            if kept:
                self._leave_gradients(kept)
            for flat in self.trained_flats:
                flat.set_gradients_aside(self.filled)

    def _leave_gradients(self, kept: Sequence[FlatParameter]) -> None:
        """Let gradients of ``kept`` from now on arrive in new memory: others hold on to what is in the present one."""
        for flat in kept:
            assert flat.whole_gradient is not None
            flat.whole_gradient = torch.empty_like(flat.whole_gradient)
        whole = [flat.whole_gradient for flat in self.trained_flats if flat.whole_gradient is not None]
        self.gradient_slot.pool.memory = whole[0]
        self.gradient_slot.lay(whole, self.gradient_places)
        self.place_gradients(self.gradient_slot)

    def end(self, phase: Phase) -> None:
        """Stop computing.

        Raises:
            EngineError: a parameter was written to, which the next gather would undo.
        """
        if phase == "backward":
            self.in_backward = self.recomputed = False
            self.ended = True
        if self.computing:
            self.computing = False
            self._expose(unsharded=False)
            self._check_unwritten()

    def abandon(self, *, keep_gradients: bool, keep_ahead: bool) -> None:
        """Stop work in progress; unsharded gradients stay only with ``keep_gradients``, unless they are being
        reduced; what was gathered ahead only with ``keep_ahead``.
        """
        self.ahead = self.ahead and keep_ahead
        if self.presence is Presence.GATHERING and not self.ahead:
            self.release()
        if self.computing:
            self._expose(unsharded=False)
        self.computing = self.in_backward = self.recomputed = self.ended = False
        self.inputs_awaited = 0
        self.unclaimed.clear()
        if self.reducing is None and keep_gradients:
            return
        self.reducing = None
        for flat in self.trained_flats:
            flat.target = None
        if not self.gradient_slot.accumulates:
            for parameter in self.trained:
                parameter.unsharded.grad = None
        self.filled.clear()
        if self.gradient_slot.owner == self.name:
            self.gradient_slot.release()

    def _expose(self, *, unsharded: bool) -> None:
        """Let the modules see the unsharded parameters, or this rank's parts."""
        # nn.Module.__setattr__ would search four dictionaries, hundreds of times a step.
        for held, name, part, whole in self._places:
            held[name] = whole if unsharded else part

    def _set_versions(self) -> None:
        number = self._expected_version()
        torch._C._autograd._unsafe_set_version_counter(self._views, (number,) * len(self._views))

    def _expected_version(self) -> int:
        return 2 * (self.gathered_version + 1) + (self.presence is not Presence.UNSHARDED)

    def _check_unwritten(self) -> None:
        number = self._expected_version()
        if any(view._version != number for view in self._views):
            written = next(p.layout.name for p in self.parameters if p.unsharded._version != number)
            self._set_versions()
            raise EngineError(
                f"parameter '{written}' was written to in place while unit '{self.name}' computed, and the next gather "
                "would undo it; write to it between steps, under torch.no_grad()"
            )

    def doubt(self) -> None:
        """A pass begins: where what is computed with is a copy, a cast or of masters on the host, take it for old.

        A write through ``.data`` of a plain parameter leaves no trace; that of a local part raises the version.
        """
        if self._plain and not (self.aliased or self.computing):
            self.gathered_version = -1

    @property
    def handed_out(self) -> bool:
        """Whether the masters may be written to at any time without a trace: through what ``to_local()`` returned."""
        return any(flat.master.handed_out for flat in self.flats)

    def check_parameters(self) -> bool:
        """Check that the model still holds the parameters that the engine trains; whether some were frozen or unfrozen.

        Raises:
            EngineError: one was moved or replaced since ``shard``; what was done to it would have no effect.
        """
        changed = False
        for parameter in self.parameters:
            sharded, unsharded = parameter.sharded, parameter.unsharded
            moved = local_of(sharded).data_ptr() != parameter.address
            for module, name in parameter.holders:
                held = module._parameters[name]
                moved = moved or (held is not sharded and held is not unsharded)
            if moved:
                raise EngineError(
                    f"parameter '{parameter.layout.name}' was replaced or moved after sharding, which the engine "
                    "cannot follow; convert and load before refshard.shard, or copy values in place"
                )
            changed = changed or sharded.requires_grad != unsharded.requires_grad
        return changed

    def take_over_freezing(self) -> list[FlatParameter]:
        """Take over which parameters are frozen now, and return the flat parameters that are trained for the first
        time: the unit has to be bound again.

        Raises:
            EngineError: one was unfrozen that only a cast is kept of.
        """
        begun = []
        for flat in self.flats:
            if not flat.trained and any(p.sharded.requires_grad for p in flat.parameters):
                if flat.narrowed:
                    name = next(p.layout.name for p in flat.parameters if p.sharded.requires_grad)
                    raise EngineError(
                        f"parameter '{name}' was unfrozen after sharding, but of frozen parameters only a cast to "
                        f"{flat.dtype} is kept; freeze it after refshard.shard instead of before"
                    )
                flat.trained = True
                begun.append(flat)
            for parameter in flat.parameters:
                parameter.unsharded.requires_grad_(parameter.sharded.requires_grad)
        self._list_trained()
        return begun

    def check_version(self, version: int) -> None:
        """Check that the weights are the ones that a forward saw at ``version``.

        Raises:
            EngineError: they were written to since.
        """
        if version != self.version:
            raise EngineError(
                f"the weights of unit '{self.name}' changed between forward and backward; "
                "call backward before optimizer.step()"
            )

    def take_gradient(self, flat: FlatParameter, parameter: UnitParameter) -> None:
        """Move the parameter's fresh gradient into the gradient slot, and tell once the unit's backward is complete.

        A slot that accumulates is there already. Any other is acquired by :meth:`complete_gradients`, and until then
        the gradient stays where autograd has put it, so that the slot may lie where the parameters do now.
        """
        self.computes()
        if not self.in_backward:
            self.on_early_gradient(self)
        self.arrived.add(parameter.layout.name)
        if self.gradient_slot.accumulates:
            self._move_gradients(flat, [parameter])
        if self.complete:
            self.on_gradients(self)

    def show_unreduced(self) -> None:
        """Give parameters with gradients that are not reduced yet a ``.grad``, to see whether it is cleared.

        It is the unreduced gradient itself where that is where gradients are kept; else NaN, since this rank's part is
        not known yet.
        """
        for flat in self.trained_flats:
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

    def _drop_cleared(self) -> None:
        """Forget the unreduced gradients that were cleared since they were shown.

        Raises:
            EngineError: one was written to, which has no effect.
        """
        for flat in self.trained_flats if self.shown else ():
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

    def expect_outside(self, parameter: UnitParameter) -> None:
        """A gradient is about to be added to that of the sharded parameter itself: keep that apart."""
        self.computes()
        if not self.in_backward:
            self.on_early_gradient(self)
        parameter.kept, parameter.sharded.grad = parameter.sharded.grad, None

    def take_outside(self, flat: FlatParameter, parameter: UnitParameter) -> None:
        """Move the gradient that has come to the sharded parameter itself into the gradient slot, as any other."""
        fresh, parameter.sharded.grad, parameter.kept = parameter.sharded.grad, parameter.kept, None
        assert fresh is not None
        self.read_outside = True
        if parameter.unsharded.grad is not None:  # where the slot is not there yet
            parameter.unsharded.grad += fresh
            return
        parameter.unsharded.grad = fresh
        if self.gradient_slot.accumulates:
            self._move_gradients(flat, [parameter])

    def complete_gradients(self) -> None:
        """Have all gradients in the slot. Those of parameters that took no part in this step are zero, not stale."""
        self._drop_cleared()
        self._take_gradient_slot()
        if not self.gradient_slot.accumulates:
            for flat in self.trained_flats:
                self._move_gradients(flat, [p for p in flat.parameters if p.unsharded.grad is not None])
        self.partial = len(self.filled) < len(self.trained)
        for parameter in self.trained if self.partial else ():
            if parameter.layout.name not in self.filled:
                parameter.gradient.zero_()

    def _move_gradients(self, flat: FlatParameter, parameters: Sequence[UnitParameter]) -> None:
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


def _users_of(tensor: torch.Tensor) -> int:
    """How many tensors, in Python and in C++, lie in the memory of this one."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _is_due(parameter: UnitParameter) -> bool:
    """Whether the backward under way has yet to accumulate a gradient of the parameter."""
    return will_run(get_gradient_edge(parameter.unsharded).node)


def will_run(node: Node) -> bool:
    """Whether autograd runs ``node`` in the backward under way, or has run it."""
    return bool(torch._C._will_engine_execute_node(node))


def _attributes(parameter: UnitParameter) -> Iterator[tuple[Any, str | int]]:
    return ((module._parameters, name) for module, name in parameter.holders)


class _Listed(dict[str, nn.Parameter | None]):
    """A module's parameters. Before they are listed (``parameters()``, ``zero_grad()``, ``state_dict()``), a backward
    that has raised is brought to an end: it left some of the modules showing unsharded ones.
    """

    def __init__(self, unit: Unit, held: dict[str, nn.Parameter | None]) -> None:
        super().__init__(held)
        self._unit = weakref.ref(unit)

    def items(self) -> Any:
        """Names and parameters."""
        unit = self._unit()
        if unit is not None and unit.on_listed is not None:
            unit.on_listed()
        return super().items()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class _Hook:
    """A hook for a parameter's gradient. It holds nothing strongly: autograd keeps it where no collector looks."""

    def __init__(self, unit: Unit, flat: FlatParameter, parameter: UnitParameter) -> None:
        self._refs = weakref.ref(unit), weakref.ref(flat), weakref.ref(parameter)

    def held(self) -> tuple[Unit, FlatParameter, UnitParameter]:
        """What it is for."""
        unit, flat, parameter = self._refs[0](), self._refs[1](), self._refs[2]()
        assert unit is not None
        assert flat is not None
        assert parameter is not None
        return unit, flat, parameter


@final
class _Taker(_Hook):
    """For an unsharded parameter."""

    def __call__(self, _: torch.Tensor) -> None:
        unit, flat, parameter = self.held()
        unit.take_gradient(flat, parameter)


@final
class _Outside(_Hook):
    """For a sharded parameter that is whole on each of several ranks. A loss may read it as it is, between the calls of
    its unit, and what comes to it then is one rank's, and has to be reduced like any other gradient.
    """

    def before(self, _: torch.Tensor) -> None:
        """Before autograd adds to ``.grad``."""
        unit, _flat, parameter = self.held()
        unit.expect_outside(parameter)

    def __call__(self, _: torch.Tensor) -> None:
        unit, flat, parameter = self.held()
        unit.take_outside(flat, parameter)


def _unknown(parameter: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """What stands for a gradient that is not reduced yet; NaN where the parameter is plain."""
    whole = whole_of(parameter)
    return torch.full_like(parameter, math.nan) if whole is None else UnreducedPart(elements, whole)


_OWN_HOOKS = frozenset({AsPart, _Taker, _Outside})


def _users(hooks: dict[int, Any] | None) -> list[Any]:
    """The hooks that are not the engine's own."""
    if not hooks:
        return []
    return [h for h in hooks.values() if type(getattr(h, "__self__", h)) not in _OWN_HOOKS]
