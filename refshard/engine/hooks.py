"""Turns what autograd and the modules report into the schedule's markers.

A unit's forward begins when the first of its modules is called and ends when each has been called once. Its backward
begins when the gradient of one of its outputs is there, and ends when the last of its parameters' gradients has
arrived, which :class:`~refshard.engine.unit.Unit` counts. Frozen parameters send no gradient, and what reads them may
come after the last one that does: a unit that has some ends when the gradients of its inputs are there too.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from refshard.engine.executor import Executor
from refshard.engine.precision import Precision
from refshard.engine.unit import Unit
from refshard.errors import EngineError
from refshard.plan.schedule import Op, OpKind

_NONE = -1
"""What autograd knows a backward by while it runs none."""


class Hooks:
    """The hooks on one sharded model, for as long as it lives."""

    def __init__(self, root: nn.Module, units: tuple[Unit, ...], executor: Executor, precision: Precision) -> None:
        self._executor = executor
        self._precision = precision
        self._called: dict[int, set[nn.Module]] = {unit.index: set() for unit in units}
        self._in_backward: set[int] = set()
        self._backward = _NONE
        self._forward = _Forward()
        self._forwards: set[_Forward] = set()
        root.register_forward_pre_hook(torch.compiler.disable(self._begin_pass), prepend=True)
        # Called even where forward raised, so that the model does not go on showing unsharded parameters.
        root.register_forward_hook(torch.compiler.disable(self._end_forward), always_call=True)
        for unit in units:
            for module in unit.modules:
                self._hook_module(unit, module)

    def _hook_module(self, unit: Unit, module: nn.Module) -> None:
        called = self._called[unit.index]
        begin, end = (Op(kind, unit.index, "forward") for kind in (OpKind.BEGIN, OpKind.END))

        casts = self._precision.parameters is not None
        watches_inputs = any(not flat.trained for flat in unit.flats)

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if _in_recomputation():
                _require_resident(unit)
            else:
                first = not called
                called.add(module)
                if first:
                    self._executor.mark(begin)
            if casts:
                args, kwargs = tree_map_only(torch.Tensor, self._precision.cast, (args, kwargs))
            if watches_inputs and torch.is_grad_enabled() and not _in_recomputation():
                args, kwargs = self._watch_inputs(unit, (args, kwargs))
            return (args, kwargs) if casts or watches_inputs else None

        def after(_: nn.Module, __: Any, output: Any) -> None:
            if _in_recomputation():
                return
            self._watch_output(unit, output)
            if len(called) == len(unit.modules):
                called.clear()
                self._executor.mark(end)

        # Compiled code must call these, not swallow them: they change storage under its feet.
        module.register_forward_pre_hook(torch.compiler.disable(before), with_kwargs=True)
        module.register_forward_hook(torch.compiler.disable(after))

    def _begin_pass(self, _: nn.Module, __: Any) -> None:
        if _in_recomputation():
            return
        self._abandon_backward()
        self._forward = _Forward()
        for called in self._called.values():
            called.clear()
        self._executor.begin_pass(self._forward, training=torch.is_grad_enabled())

    def _end_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        if _in_recomputation():
            return
        if output is None:  # forward raised
            self._executor.abandon_forward(self._forward)
        elif not torch.is_grad_enabled():
            self._executor.end_evaluation()

    def _watch_inputs(self, unit: Unit, inputs: Any) -> Any:
        """Let the unit's backward go on until the gradients of this call's inputs are there."""
        leaves, structure = tree_flatten(inputs)
        watched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if watched:
            through: Callable[..., tuple[torch.Tensor, ...]] = _Passage.apply
            passed = through(lambda: self._inputs_done(unit), *(leaves[i] for i in watched))
            for i, tensor in zip(watched, passed):
                leaves[i] = tensor
            self._forward.watched[unit.index] += 1
        return tree_unflatten(leaves, structure)

    def _inputs_done(self, unit: Unit) -> None:
        unit.inputs_awaited -= 1
        if unit.in_backward and unit.complete:
            self._executor.mark(Op(OpKind.END, unit.index, "backward"))

    def _watch_output(self, unit: Unit, output: Any) -> None:
        """Let the unit's backward begin with the gradient of whichever of its outputs comes first."""
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        _refuse_parameters(unit, tensors)
        if not torch.is_grad_enabled():
            return
        if not tensors:
            raise EngineError(
                f"the output of unit '{unit.name}' ({type(output).__name__}) holds no tensor that backward could start "
                "from; return tensors, or a container known to torch.utils._pytree"
            )

        version, forward = unit.version, self._forward

        def begin_backward(_: torch.Tensor) -> None:
            if torch.is_grad_enabled():
                raise EngineError(
                    "backward with create_graph=True needs the weights after backward has given them up; "
                    "gradients of gradients cannot be had of a sharded model"
                )
            unit.check_version(version)
            self._begin_backward(unit, forward)

        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(begin_backward)

    def _begin_backward(self, unit: Unit, forward: "_Forward") -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            if self._backward != _NONE:  # one that raised: nothing has ended it
                self._abandon_backward()
                self._executor.abandon_pass()
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._forwards.add(forward)
        if unit.index not in self._in_backward:
            self._in_backward.add(unit.index)
            unit.inputs_awaited = forward.watched[unit.index]
            self._executor.mark(Op(OpKind.BEGIN, unit.index, "backward"))

    def _end_backward(self) -> None:
        forwards = frozenset(self._forwards)
        self._abandon_backward()
        self._executor.end_backward(forwards)

    def _abandon_backward(self) -> None:
        self._backward = _NONE
        self._in_backward.clear()
        self._forwards.clear()


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """One forward pass; ``watched`` counts, by unit, its calls whose inputs' gradients backward has to await."""

    watched: Counter[int] = field(default_factory=Counter)


class _Passage(torch.autograd.Function):
    """Passes tensors through, and calls back when the gradients of all of them are there."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors, as views."""
        ctx.call = call
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The gradients as they came."""
        ctx.call()
        return (None, *gradients)


def _in_recomputation() -> bool:
    """Whether autograd is running now: a forward call then is activation checkpointing's, whose hooks are not the
    schedule's business (the post-hook does not even fire, since recomputation stops early).
    """
    return torch._C._current_graph_task_id() != _NONE


def _refuse_parameters(unit: Unit, outputs: list[torch.Tensor]) -> None:
    storages = {flat.untyped_storage().data_ptr() for flat in unit.slot.flats}
    if any(_address(output) in storages for output in outputs if output.numel()):
        raise EngineError(
            f"unit '{unit.name}' returns a parameter of its own, or a view of it, which lives no longer than the "
            "unit's forward; return a clone, or name the module around it among the blocks"
        )


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's storage lies; a wrapper's, such as a DTensor's or a pending collective's, is that within."""
    inner: Any = tensor
    while is_traceable_wrapper_subclass(inner):
        inner = getattr(inner, inner.__tensor_flatten__()[0][0])
    address: int = inner.untyped_storage().data_ptr()
    return address


def _require_resident(unit: Unit) -> None:
    if not unit.resident:
        raise EngineError(
            f"unit '{unit.name}' is recomputed before its own backward began; checkpoint each block by itself and with "
            "use_reentrant=False"
        )
