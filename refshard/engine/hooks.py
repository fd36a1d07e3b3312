"""Turns what autograd and the modules report into the schedule's markers.

A unit's forward begins when the first of its modules is called and ends when each has been called once, or with the
model's own forward. Its backward begins when the gradient of one of its outputs is there, and ends when the last of its
parameters' gradients has arrived, which :class:`~refshard.engine.unit.Unit` counts. Frozen parameters get no gradient,
and backward may read them after the last gradient has arrived: a unit with frozen parameters ends when the gradients of
its inputs are there too.

If a call's graph is new, backward's reads of weights are watched (:mod:`refshard.engine.reads`). If a unit's weights
are read before its backward has begun, it is gathered at once, and its calls stay watched. If they are read after its
backward has ended, it is gathered again and stays gathered until the whole backward ends, in this and all later steps.
"""

import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn
from torch._compile import _disable_dynamo

from refshard.engine.executor import Executor
from refshard.engine.precision import Precision
from refshard.engine.reads import watch_reads
from refshard.engine.schedule import Op, OpKind
from refshard.engine.subclasses import address
from refshard.engine.transforms import in_transform
from refshard.engine.trees import leaves_of, tensors_of, with_leaves
from refshard.engine.unit import Unit
from refshard.errors import EngineError


@dataclass(slots=True, eq=False)
class _Module:
    """One of a unit's modules, or a method of one that is called like a forward, and the call that is under way.

    ``precision`` is the module's own. ``running`` says that a call is under way, and ``method`` that it is another
    method's, which has its own record. ``forward`` is its pass.

    Calls that make the same number of autograd nodes are taken to be alike. ``known`` is the number in calls whose
    backward was watched. ``start`` is how many nodes there were when the call under way began.
    """

    unit: Unit
    module: nn.Module
    precision: Precision
    hook: int = 0
    running: bool = False
    method: bool = False
    forward: "_Forward" = field(default_factory=lambda: _Forward())
    known: set[int] = field(default_factory=set)
    start: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """One forward pass. ``inputs`` counts, by unit, the inputs of its calls that backward has to bring the gradients of
    before the unit may end. Where it does not bring one, the unit ends with the backward.
    """

    inputs: Counter[int] = field(default_factory=Counter)


_HOOKS: weakref.WeakKeyDictionary[nn.Module, weakref.ref["Hooks"]] = weakref.WeakKeyDictionary()
"""The hooks of the sharded model that a module is part of; the modules' own hooks keep them alive."""


def hooks_of(module: nn.Module) -> "Hooks":
    """The hooks of the sharded model that ``module`` is, or is part of.

    Raises:
        EngineError: no sharded model holds ``module``.
    """
    within = list(module.modules())
    known = (_HOOKS.get(m) for m in within)  # one that wraps modules of a model may have come later
    ref = next((ref for ref in known if ref is not None), None)
    hooks = ref() if ref is not None else None
    if hooks is None or (module not in _HOOKS and hooks.root() in within):
        raise EngineError(
            f"the {type(module).__name__} is no part of a sharded model; call refshard.shard(model, mesh) first"
        )
    return hooks


class Hooks:
    """The hooks on one sharded model, for as long as it lives.

    ``unanswered`` says that no backward has come since the model's last forward, which had gradients enabled.
    """

    def __init__(
        self, root: nn.Module, units: tuple[Unit, ...], executor: Executor,
        precision_of: Callable[[nn.Module], Precision], casting: Mapping[nn.Module, Precision] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.executor = executor
        self._precision = precision_of(root)
        self._units = units
        self.root = weakref.ref(root)
        self._holds = {held: unit for unit in units for p in unit.parameters for held, _ in p.holders}
        self._called: dict[int, set[nn.Module]] = {unit.index: set() for unit in units}
        self._read_early: set[int] = set()
        self._in_root = False
        self.unanswered = False
        self._forward = _Forward()
        self._running: object = None
        self._lock = threading.RLock()
        self._begun: set[tuple[int, _Forward]] = set()
        self._modules = {m: _Module(unit, m, precision_of(m)) for unit in units for m in unit.modules}
        for unit in units:
            unit.on_early_gradient = self._take_up
            unit.on_listed = self._end_failed
        for called in self._modules.values():
            self._hook_module(called)
        for module, own in casting.items():
            module.register_forward_pre_hook(partial(_cast_inputs, own), with_kwargs=True)
            module.register_forward_hook(partial(_cast_outputs, own))
        self._root = self._modules.get(root)
        # Last, so that it comes before those of the root's own unit.
        root.register_forward_pre_hook(_Hook(self._begin_pass), prepend=True)
        # Called even where forward raised, so that the model does not go on showing unsharded parameters.
        root.register_forward_hook(_Hook(self._end_forward), always_call=True)
        _HOOKS.update(dict.fromkeys(root.modules(), weakref.ref(self)))

    def units_of(self, module: nn.Module) -> list[Unit]:
        """The units that hold parameters of ``module``, in registration order."""
        found = {unit for m in module.modules() if (unit := self._holds.get(m)) is not None}
        return sorted(found, key=lambda unit: unit.index)

    def _hook_module(self, called: _Module) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return None if called.method else self._begin(called, args, kwargs)

        def after(_: nn.Module, __: Any, output: Any) -> None:
            if not called.method:
                self._end(called, output)

        # The first comes before any hook of the user's, which may read weights; `_enter` sees to it that the second is
        # the last.
        called.module.register_forward_pre_hook(_Hook(before), with_kwargs=True, prepend=True)
        called.hook = called.module.register_forward_hook(_Hook(after), always_call=True).id

    def as_forward(self, module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method`` of ``module`` as a call of the unit's module that this is, or lies in: a plain call within one."""
        around = self._module_around(module)
        if around is None:
            return method
        if not around.unit.facts.read_in_backward:
            around.unit.expect_reads_in_backward()
            self.executor.replan()
        record = _Module(around.unit, around.module, around.precision, around.hook)
        begin, end = _Hook(partial(self._begin, record)), _Hook(partial(self._end, record))

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if around.running or around.method:
                return method(*args, **kwargs)
            args, kwargs = begin(args, kwargs) or (args, kwargs)
            around.method, output = True, None
            try:
                output = method(*args, **kwargs)
            finally:
                around.method = False
                end(output)
            return output

        return call

    def _module_around(self, module: nn.Module) -> _Module | None:
        """The unit's module that ``module`` is, or lies in; None if it has no parameters but those of several units."""
        units = [self._holds[module]] if module in self._holds else self.units_of(module)
        around = (c for c in self._modules.values() if [c.unit] == units and module in c.module.modules())
        return next(around, None)

    def _begin(self, called: _Module, args: Any, kwargs: Any) -> Any:
        """A call begins; return its arguments where they change."""
        unit, precision = called.unit, called.precision
        recomputing = _in_backward()
        if recomputing:
            self._recompute(unit)
        else:
            self._enter(called)
        changed = None
        casts = precision.parameters is not None and precision.cast_inputs
        awaits = not recomputing and torch.is_grad_enabled() and (unit.frozen or _hides_what_it_saves())
        if casts or awaits:
            leaves = leaves_of((args, kwargs))
            if casts:
                leaves = [precision.cast_input(leaf) for leaf in leaves]
            changed = with_leaves((args, kwargs), self._await_inputs(called, leaves) if awaits else leaves)
        if not recomputing:
            called.start = torch._C._autograd._get_sequence_nr()  # the call computes from here on
        called.running = True
        return changed

    def _end(self, called: _Module, output: Any) -> None:
        """It returns, or has raised."""
        called.running = False
        if not _in_backward():
            self._leave(called, output)

    def _begin_pass(self, _: nn.Module, __: Any) -> None:
        if _in_backward() or self._in_method():
            return
        self._end_failed()
        self._forward = _Forward()
        for modules in self._called.values():
            modules.clear()
        for called in self._modules.values():
            called.running = False  # of a forward that was interrupted, which no hook on modules sees
        self._in_root = True
        self.unanswered |= torch.is_grad_enabled()
        self.executor.begin_pass(self._forward, training=torch.is_grad_enabled())

    def _end_forward(self, _: nn.Module, __: Any, output: Any) -> Any:
        if not _in_backward() and not self._in_method():
            self._in_root = False
            if output is None and sys.exc_info()[0] is not None:
                self.executor.abandon_forward(self._forward)
                return None
            self._end_pass()
        return _cast_outputs(self._precision, _, __, output)

    def _in_method(self) -> bool:
        """Whether the model's own forward is called by a method of the model that is called like one."""
        return self._root is not None and self._root.method

    def _end_pass(self) -> None:
        for unit in self._units:
            if self._called[unit.index]:  # not all of its modules were called
                self._end_unit(unit)
        if torch.is_grad_enabled():
            self.executor.rest()
        else:
            self.executor.end_evaluation()

    def _enter(self, called: _Module) -> None:
        """A module of a unit is called."""
        unit = called.unit
        if not self._in_root:
            self._end_failed()
            self._forward = _Forward()
            self.executor.begin_call(unit, self._forward, training=torch.is_grad_enabled())
        called.forward = self._forward
        if not self._called[unit.index]:
            self.executor.mark(Op(OpKind.BEGIN, unit.index, "forward"))
        self._called[unit.index].add(called.module)
        hooks: Any = called.module._forward_hooks  # which torch orders
        if next(reversed(hooks)) != called.hook:
            hooks.move_to_end(called.hook)

    def _leave(self, called: _Module, output: Any) -> None:
        """A call of a module of a unit has ended."""
        unit = called.unit
        if output is None and sys.exc_info()[0] is not None:
            if not self._in_root:
                self._called[unit.index].clear()
                self.executor.abandon_forward(called.forward)
            return
        tensors = tensors_of(output)
        _refuse_parameters(unit, tensors)
        if torch.is_grad_enabled():
            self._await_gradients(called, tensors)
            hidden = not any(tensor.grad_fn is not None for tensor in tensors)
            if hidden and unit.gradients.wanted and unit.keep_until_backward():
                # No gradient of an output will tell that backward begins: in an iterator, say, none can be seen.
                self.executor.replan()
        if not self._in_root or len(self._called[unit.index]) == len(unit.modules):
            self._end_unit(unit)

    def _end_unit(self, unit: Unit) -> None:
        self._called[unit.index].clear()
        self.executor.mark(Op(OpKind.END, unit.index, "forward"))

    def _await_inputs(self, called: _Module, leaves: list[Any]) -> list[Any]:
        """Let the unit's backward go on until this call's inputs have their gradients; with frozen parameters, until
        the backward ends if there are none to wait for.
        """
        unit = called.unit
        awaited = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for i in awaited:
            leaves[i] = leaves[i].view_as(leaves[i])
            # Nothing that this hook reaches may hold the node, or the model is never let go.
            leaves[i].grad_fn.register_prehook(lambda _: self._input_done(unit))
        called.forward.inputs[unit.index] += len(awaited) or unit.frozen
        return leaves

    def _input_done(self, unit: Unit) -> None:
        """The gradient of an input is there, and with it all that this call computes in backward."""
        unit.inputs_awaited -= 1
        if unit.in_backward and unit.complete:
            self.executor.mark(Op(OpKind.END, unit.index, "backward"))

    def _await_gradients(self, called: _Module, outputs: list[torch.Tensor]) -> None:
        """Let the unit's backward begin with the gradient of whichever of its outputs comes first; what it reads is
        watched, unless such calls are known.
        """
        unit, forward = called.unit, called.forward
        made, version = torch._C._autograd._get_sequence_nr() - called.start, unit.version
        watched = made not in called.known or unit.index in self._read_early
        if watched:
            watch_reads(unit, outputs, called.start, lambda: self._read(unit, forward))
            _refuse_kept(unit, called.module)

        def begin_backward(_: torch.Tensor) -> None:
            if torch.is_grad_enabled() and not in_transform():  # whose backward always creates a graph
                raise EngineError(
                    "backward with create_graph=True needs the weights, which a sharded model frees during backward; "
                    "compute gradients of gradients on an unsharded model"
                )
            unit.check_version(version)
            if watched:
                called.known.add(made)
            self._begin_backward(unit, forward)

        for tensor in outputs:
            if tensor.grad_fn is not None:  # a leaf would keep the hook for good
                tensor.register_hook(begin_backward)

    def _begin_backward(self, unit: Unit, forward: _Forward) -> None:
        """A gradient of an output of the unit's is there."""
        unit.computes()
        self._open_backward()
        if (unit.index, forward) not in self._begun:
            self._begun.add((unit.index, forward))
            unit.inputs_awaited += forward.inputs[unit.index]
        elif unit.complete:
            return
        # It may have begun, and have made room for another unit before all of its calls' gradients came.
        if not unit.in_backward:
            self.executor.mark(Op(OpKind.BEGIN, unit.index, "backward"))

    def _read(self, unit: Unit, forward: _Forward) -> None:
        """Backward is about to read a weight of a watched call."""
        if unit.in_backward:
            return
        if (unit.index, forward) in self._begun:
            unit.lasts = True
            self.executor.replan()
        elif unit.index not in self._read_early:
            self._read_early.add(unit.index)
            self.executor.replan()
        self._take_up(unit)

    def _recompute(self, unit: Unit) -> None:
        """Activation checkpointing reruns a unit's forward: its weights are needed from here on."""
        if not unit.in_backward:
            self._take_up(unit)
            unit.recompute()

    def _take_up(self, unit: Unit) -> None:
        """Begin the unit's backward before a gradient of its outputs has come, or after it has ended.

        With frozen parameters, or if it has ended with some gradients, the unit cannot know whether all of its backward
        has run: it lasts until the backward ends.
        """
        self._open_backward()
        if unit.frozen or unit.gradients.arrived:
            unit.inputs_awaited += 1
        self.executor.mark(Op(OpKind.BEGIN, unit.index, "backward"))

    def _open_backward(self) -> None:
        """See to it that :meth:`end_backward` is called; a backward may run within another one."""
        if self._running is None:
            self._running = object()
            torch.autograd.Variable._execution_engine.queue_callback(_Ending(self, self._running))

    def end_backward(self, running: object, *, raised: bool) -> None:
        """Autograd has run all of the backward known as ``running``, or has given it up."""
        with self._lock:
            if running is None or running is not self._running:
                return
            forwards = frozenset(forward for _, forward in self._begun)
            self._running = None
            self._begun.clear()
            if raised:
                self.executor.abandon_pass()
            else:
                self.unanswered = False
                self.executor.end_backward(forwards, of_inputs=in_transform())

    def _end_failed(self) -> None:
        """Outside of any backward, one that has begun and not ended has raised. On a GPU autograd's own thread lets go
        of it, and whoever called it may be here first.
        """
        if self._running is not None and not _in_backward():
            with self._lock:
                self.end_backward(self._running, raised=True)


class _Hook:
    """A hook on a module. Compiled code must call it, not swallow it: it changes storage under that code's feet."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @_disable_dynamo  # this method, and not what it calls: dynamo would compile it anew for each hook
    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> NoReturn:
        """A copy's hooks would work on the original's storage.

        Raises:
            EngineError: always; ``copy.deepcopy`` and ``pickle`` of the model come here.
        """
        raise EngineError(
            "a sharded model cannot be copied or pickled; copy it before refshard.shard, or save it with "
            "refshard.checkpoint.save or torch.distributed.checkpoint"
        )


class _Ending:
    """What autograd calls at the end of a backward; it is let go without a call where that has raised."""

    def __init__(self, hooks: Hooks, running: object) -> None:
        self._hooks: Hooks | None = hooks
        self._running = running

    def __call__(self) -> None:
        hooks, self._hooks = self._hooks, None
        assert hooks is not None
        hooks.end_backward(self._running, raised=False)

    def __del__(self) -> None:
        if self._hooks is not None:
            self._hooks.end_backward(self._running, raised=True)


def _cast_inputs(precision: Precision, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """Arguments as the parameters of a module of this precision meet them; None where nothing changes."""
    if precision.parameters is None or not precision.cast_inputs:
        return None
    return with_leaves((args, kwargs), [precision.cast_input(leaf) for leaf in leaves_of((args, kwargs))])


def _cast_outputs(precision: Precision, _: nn.Module, __: Any, output: Any) -> Any:
    """What a module of this precision returns; None where nothing changes."""
    if precision.output is None:
        return None
    return with_leaves(output, [precision.cast_output(leaf) for leaf in leaves_of(output)])


def _in_backward() -> bool:
    """Whether autograd is running now: a forward call then is activation checkpointing's, and the schedule ignores its
    hooks (the post-hook does not even fire, since recomputation stops early).
    """
    return torch._C._current_graph_task_id() != -1


def _hides_what_it_saves() -> bool:
    """Whether what autograd saves goes through hooks, as in activation checkpointing: it then does not check that
    weights are still those of forward.
    """
    return bool(torch._C._autograd._top_saved_tensors_default_hooks(False))


def _refuse_kept(unit: Unit, module: nn.Module) -> None:
    """What lies in a ring moves after step 0, and other units' parameters come to lie where it was."""
    for held in module.modules() if unit.mode.storage == "ring" else ():
        for name, kept in vars(held).items():
            if isinstance(kept, torch.Tensor) and kept.numel() and unit.slot.holds(address(kept)):
                raise EngineError(
                    f"unit '{unit.name}' keeps a view of a parameter as '{name}' of a {type(held).__name__}, which is "
                    "another unit's memory later; keep a clone, or shard with mode='fsdp'"
                )


def _refuse_parameters(unit: Unit, outputs: list[torch.Tensor]) -> None:
    if any(unit.slot.holds(address(output)) for output in outputs if output.numel()):
        raise EngineError(
            f"unit '{unit.name}' returns a parameter of its own, or a view of it, which is freed after the "
            "unit's forward; return a clone, or make the module around it a block"
        )
