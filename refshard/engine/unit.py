"""One unit: parameters that are gathered, used and reduced together, in both states, sharded and unsharded.

A unit holds one *flat parameter* per dtype and per ``requires_grad``. Between steps a module's parameters are local
parts of the flat parameters' master shards; inside forward and backward they are views of the unit's slot. Both
exist as ``nn.Parameter`` objects; exposing one or the other swaps references in the modules and touches no data.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain
from typing import Any, final

import msgspec
import torch
from torch import nn

from refshard.engine.buffers import Places, Sizes, Slot
from refshard.engine.collectives import Collectives, Pending
from refshard.engine.flat import FlatParameter, OwnHook, UnitParameter
from refshard.engine.gradients import Gradients
from refshard.engine.local_part import local_of, whole_of
from refshard.engine.placement import Mode
from refshard.engine.schedule import Phase, Presence, UnitFacts
from refshard.engine.subclasses import Packed, tensors_in
from refshard.errors import EngineError

UNSHARDED_IN = "_refshard_unit"
"""An attribute of unsharded parameters: the name of the unit that computes with them."""
_OURS = frozenset({"_local_tensor", "_whole", "_is_param", "_refshard_sharded"})
"""Attributes of sharded parameters that are not the user's."""


class Activity(Enum):
    """What a unit is doing in a pass."""

    REST = auto()
    FORWARD = auto()
    BACKWARD = auto()
    RECOMPUTED = auto()
    """Backward, in which activation checkpointing has run its forward again."""
    ENDED = auto()
    """Its backward has ended, and the pass has not."""


_FOLLOWS = {
    Activity.REST: {Activity.REST, Activity.FORWARD, Activity.BACKWARD, Activity.ENDED},
    Activity.FORWARD: {Activity.FORWARD, Activity.REST, Activity.BACKWARD},
    Activity.BACKWARD: {Activity.RECOMPUTED, Activity.ENDED, Activity.REST},
    Activity.RECOMPUTED: {Activity.RECOMPUTED, Activity.ENDED, Activity.REST},
    Activity.ENDED: {Activity.BACKWARD, Activity.FORWARD, Activity.ENDED, Activity.REST},
}
"""What may follow what. A unit that a pass leaves out only ends in it; a backward may run within a forward; and one may
have several parts, or be given up.
"""


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Unit:
    """A unit and its state, which its own methods alone change.

    **What it is.** The calls of ``modules`` make up the unit's forward; they compute on ``device``. ``trained`` are the
    parameters that have a place for gradients; ``frozen`` says that some parameters get none now. ``aliased`` says that
    the shards are whole and are themselves what the modules see.

    **Its parameters.** ``presence`` says where they are: gathered ones, which ``gathering`` may still bring, were taken
    from masters of version ``gathered_version``. ``ahead`` says that the user requested them and that no pass has
    needed them yet. ``exposed`` says that the modules see them.

    **Its pass.** ``activity`` says what it is doing. Its ``gradients`` know which have come. ``inputs_awaited`` counts
    the inputs whose gradients are still to come before it may end. ``lasts`` says that something of the unit was seen
    to run after its last gradient: from then on it stays gathered until the backward has ended.

    **Whom it calls.** ``on_early_gradient`` and ``on_gradients`` where a gradient comes out of turn, and where the last
    one has come. ``on_listed`` before anybody lists the modules' parameters. ``computes`` tells the lanes that compute
    is on the current stream too: autograd calls hooks on those that forward ran on.

    **Versions.** A slot is written to unseen by autograd, whose version counters are set here instead: to one number
    while the slot holds what was gathered from masters of ``gathered_version``, to another when it does not. What
    autograd saved in forward it therefore accepts in backward if and only if the slot holds the same values again.
    """

    index: int
    name: str
    modules: tuple[nn.Module, ...]
    flats: tuple[FlatParameter, ...]
    mode: Mode
    collectives: Collectives
    device: torch.device
    read_in_backward: bool = True
    aliased: bool = False
    facts: UnitFacts = field(init=False)
    parameters: tuple[UnitParameter, ...] = field(init=False)
    trained: tuple[UnitParameter, ...] = field(init=False)
    frozen: bool = field(init=False)

    slot: Slot = field(init=False)
    presence: Presence = Presence.SHARDED
    gathering: Pending | None = None
    gathered_version: int = -1
    ahead: bool = False
    exposed: bool = False
    _places: list[tuple[Any, str | int, nn.Parameter, nn.Parameter]] = field(init=False)
    _views: tuple[torch.Tensor, ...] = field(init=False)
    _formed: tuple[UnitParameter, ...] = field(init=False)
    _within: tuple[tuple[UnitParameter, torch.Tensor], ...] = field(init=False)
    _plain: bool = field(init=False)

    activity: Activity = Activity.REST
    gradients: Gradients = field(init=False)
    inputs_awaited: int = 0
    lasts: bool = False

    on_early_gradient: Callable[["Unit"], None] = field(init=False)
    on_gradients: Callable[["Unit"], None] = field(init=False)
    on_listed: Callable[[], None] | None = None
    computes: Callable[[], None] = field(init=False)

    def __post_init__(self) -> None:
        self.gradients = Gradients(self.name)
        self.parameters = tuple(p for flat in self.flats for p in flat.parameters)
        self._list_trained()

    def _list_trained(self) -> None:
        self.gradients.train(tuple(flat for flat in self.flats if flat.trained))
        self.trained = self.gradients.parameters
        self.frozen = not all(p.sharded.requires_grad for p in self.parameters)
        sizes = ((flat.layout.numel, str(flat.dtype), str(flat.reduce_dtype), flat.trained) for flat in self.flats)
        self.facts = UnitFacts(
            self.mode, tuple(sizes), bool(self.trained), self.read_in_backward, self.collectives.legs
        )

    @property
    def parameter_sizes(self) -> Sizes:
        """Elements and dtypes of its unsharded flat parameters."""
        return [(flat.layout.numel, flat.dtype) for flat in self.flats]

    @property
    def places(self) -> Places:
        """Where its parameters lie in them."""
        return [flat.layout.parameters for flat in self.flats]

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
        if self.gradients.all_arrived:
            return True
        # Reentrant checkpointing recomputes in one backward, and computes gradients in another, within it.
        in_this_backward = self.gradients.arrived or self.activity is not Activity.RECOMPUTED
        return bool(self.gradients.partial and in_this_backward) and not self.gradients.any_due()

    def may_end(self, phase: Phase) -> bool:
        """Whether this phase has nothing more to compute, though no gradient may have said so."""
        if phase == "forward":
            return not self.exposed
        self.gradients.partial = True
        return not self.in_backward or self.complete

    def expect_reads_in_backward(self) -> None:
        """From now on backward may read the parameters, though that of the modules' forward does not."""
        self.read_in_backward = True
        self._list_trained()

    def keep_until_backward(self) -> bool:
        """From now on keep the parameters gathered from forward to backward; whether this is new."""
        if self.mode.storage == "persistent":
            return False
        self.mode = msgspec.structs.replace(self.mode, storage="persistent")
        self._list_trained()
        return True

    def bind(self, slot: Slot, gradient_slot: Slot, on_gradients: Callable[["Unit"], None]) -> None:
        """Make the unit live in these slots; ``on_gradients`` is called when its last gradient arrived.

        It must hold none yet. What autograd saved of the slots before is stale from now on.
        """
        self.slot = slot
        self.gradients.place(gradient_slot)
        views = {p.layout.name: view for p, view in zip(self.parameters, chain.from_iterable(slot.views))}
        for flat, views_of_flat in zip(self.flats, slot.views):
            for parameter, view in zip(flat.parameters, views_of_flat):
                seen = view if parameter.split is None else parameter.split.wrap(view)
                if parameter.form is None or not parameter.holders:
                    parameter.unsharded = nn.Parameter(seen, requires_grad=flat.trained)
                else:
                    within = {name: views[name] for name in parameter.form.suffixes}
                    parameter.unsharded = parameter.form.bind(within, trained=flat.trained)
                if parameter.form is None:
                    own = (key for key in vars(parameter.sharded) if key not in _OURS)
                    vars(parameter.unsharded).update({key: getattr(parameter.sharded, key) for key in own})
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
        memory = {flat.untyped_storage()._cdata for flat in slot.flats}
        self._formed = tuple(p for p in self.parameters if p.form is not None and p.holders)
        self._within = tuple(
            (p, tensor)
            for p in self._formed
            for tensor in tensors_in(p.layout.name, p.unsharded).values()
            if tensor.untyped_storage()._cdata in memory
        )
        self._views = (*(p.unsharded for p in self.parameters), *(tensor for _, tensor in self._within))
        self._plain = any(whole_of(p.sharded) is None for p in self.parameters)
        self._places = [
            (container, key, p.sharded, p.unsharded)
            for p in self.parameters
            for container, key in (*_attributes(p), *p.listed)
        ]
        self.presence = Presence.UNSHARDED if self.aliased else Presence.SHARDED
        self._set_versions()

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
            self.gradients.drop_cleared()
            if self.trained and self.gradients.slot.accumulates:
                self.gradients.take_slot()
            self._turn(Activity.BACKWARD)
            if self.presence is not Presence.UNSHARDED and not self.facts.read_in_backward:
                return
        else:
            self._turn(Activity.FORWARD)
        assert self.presence is Presence.UNSHARDED
        assert self.slot.owner == self.name
        self.ahead = False
        if self.aliased and self.gathered_version != self.version:
            self.gathered_version = self.version
            self._set_versions()
        for parameter in self._formed:
            assert parameter.form is not None
            parameter.form.ready(parameter.unsharded)
        if self._formed:
            self._set_versions()  # which a class's own hook may have raised
        self.exposed = True
        self._expose(unsharded=True)

    @property
    def in_backward(self) -> bool:
        """Whether its backward has begun and not ended."""
        return self.activity in (Activity.BACKWARD, Activity.RECOMPUTED)

    def recompute(self) -> None:
        """Activation checkpointing runs its forward again, in its backward."""
        self._turn(Activity.RECOMPUTED)

    def _turn(self, activity: Activity) -> None:
        assert activity in _FOLLOWS[self.activity], f"unit '{self.name}': {self.activity} to {activity}"
        self.activity = activity

    def end(self, phase: Phase) -> None:
        """Stop computing.

        Raises:
            EngineError: a parameter was written to, which the next gather would undo.
        """
        if phase == "backward":
            self._turn(Activity.ENDED)
        elif self.activity is Activity.FORWARD:
            self._turn(Activity.REST)
        if self.exposed:
            self.exposed = False
            self._expose(unsharded=False)
            self._check_unwritten()
            if phase == "forward":
                self._check_objects()

    def abandon(self, *, keep_gradients: bool, keep_ahead: bool) -> None:
        """Stop work in progress; unsharded gradients stay only with ``keep_gradients``, unless they are being
        reduced; what was gathered ahead only with ``keep_ahead``.
        """
        self.ahead = self.ahead and keep_ahead
        if self.presence is Presence.GATHERING and not self.ahead:
            self.release()
        if self.exposed:
            self.exposed = False
            self._expose(unsharded=False)
        self._turn(Activity.REST)
        self.inputs_awaited = 0
        self.gradients.abandon(keep=keep_gradients)

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
            seen = (*((p, p.unsharded) for p in self.parameters), *self._within)
            written = next(p.layout.name for p, view in seen if view._version != number)
            self._set_versions()
            raise EngineError(
                f"parameter '{written}' was written to in place while unit '{self.name}' computed, and the next gather "
                "would undo it; write to it between steps, under torch.no_grad()"
            )

    def _check_objects(self) -> None:
        """Check that the forward has left alone what a gathered parameter is, apart from its values.

        Raises:
            EngineError: it was frozen, unfrozen or hooked, which the parameter that stays does not see.
        """
        for parameter in self.parameters:
            seen, hooks = parameter.unsharded, parameter.unsharded._post_accumulate_grad_hooks
            frozen = seen.requires_grad != parameter.sharded.requires_grad
            if frozen or seen._backward_hooks or (hooks and len(hooks) > 1):
                done = "requires_grad was changed" if frozen else "a hook was registered"
                raise EngineError(
                    f"'{parameter.layout.name}': {done} while unit '{self.name}' computed, which is lost with the "
                    "gathered parameter; do it between steps"
                )

    @property
    def written_unseen(self) -> bool:
        """Whether a write to the masters may leave no trace: through what ``to_local()`` returned, and, where what is
        computed with is a copy, through ``.data`` of a plain parameter (that of a local part raises the version).
        """
        copied = self._plain and not self.aliased and not self.collectives.gathers
        return copied or any(flat.master.handed_out for flat in self.flats)

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
                name = next(p.layout.name for p in flat.parameters if p.sharded.requires_grad)
                if isinstance(flat.parameters[0].form, Packed):
                    raise EngineError(
                        f"parameter '{name}' was unfrozen after sharding, but it is packed data of a tensor subclass; "
                        "keep it frozen"
                    )
                if flat.narrowed:
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
        """A parameter's gradient has come; tell once the unit's backward is complete."""
        self.computes()
        if not self.in_backward:
            self.on_early_gradient(self)
        self.gradients.arrive(flat, parameter)
        if self.complete:
            self.on_gradients(self)

    def expect_outside(self, parameter: UnitParameter) -> None:
        """A gradient is about to be added to that of the sharded parameter itself: keep that apart."""
        self.computes()
        if not self.in_backward:
            self.on_early_gradient(self)
        parameter.kept, parameter.sharded.grad = parameter.sharded.grad, None


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


class _Hook(OwnHook):
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
        unit.gradients.take_outside(flat, parameter)
