"""Observes what the device cannot see of a script: which module runs, what a tensor is for, and where a step ends.

It uses torch's hooks for all modules and all optimizers; the script is not changed.
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from refshard.analysis.mismatch import ROOT
from refshard.dryrun.recording import Category
from refshard.dryrun.request import Pool

_NOTHING = Pool(allocated=0, active=0, reserved=0, requested=0)


class Peaks:
    """Remembers what torch's statistics of each GPU said before each reset. ``likely`` is the GPU that has the rank's
    number on its node; a process may see and use another one only.
    """

    def __init__(self, likely: int) -> None:
        self._likely = likely
        self._before: dict[int, Pool] = {}

    def install(self) -> None:
        """Read the statistics before every reset, until this process ends."""
        reset = torch._C._cuda_resetPeakMemoryStats

        def keep_and_reset(device: int) -> None:
            self._before[device] = self._of(device)
            reset(device)

        torch._C._cuda_resetPeakMemoryStats = keep_and_reset

    def reserved(self) -> dict[int, int]:
        """The highest number of reserved bytes of each GPU that the process sees."""
        torch.cuda.init()  # before which there are no statistics
        return {device: self._of(device).reserved for device in range(torch.cuda.device_count())}

    def device(self) -> int:
        """The GPU that held most."""
        found = self.reserved()
        return max(found, key=lambda device: (found[device], device == self._likely))

    def highest(self) -> Pool:
        """The highest of each, in bytes, of that GPU."""
        return self._of(self.device())

    def _of(self, device: int) -> Pool:
        now, before = pool(device, "peak"), self._before.get(device, _NOTHING)
        return Pool(**{name: max(getattr(before, name), getattr(now, name)) for name in Pool.__struct_fields__})


def pool(device: int, which: str) -> Pool:
    """The "current" or "peak" bytes of torch's statistics."""
    torch.cuda.init()  # before which there are none
    stats = torch.cuda.memory_stats(device)
    return msgspec.convert({name: stats[f"{name}_bytes.all.{which}"] for name in Pool.__struct_fields__}, Pool)


ALIKE_STEPS, VARIED_STEPS = 2, 8
"""Steps without a higher peak after which it counts as stable: of batches of one shape, and of different shapes."""
_SHARING_AXES = frozenset({"tp", "cp", "sp", "pp", "tensor", "context", "pipeline", "tensor_parallel"})


class StepsDone(BaseException):
    """Ends a script after the requested optimizer steps; no ``except Exception`` of its own stops it."""


class Observer:
    """Tells the device's extension ``ext`` in which module and phase the host is, and ends the script after ``steps``
    optimizer steps, or where ``peaks`` are given once these are stable, if that is earlier.

    A step is one of the optimizer that stepped first: a script with several takes them in turn. What steps within
    another optimizer's step is a part of that. If an optimizer steps in backward, as others of single parameters will,
    the step ends with backward. ``stepped`` is how many elements of this rank's have a gradient in the last step.
    Peaks are stable after :data:`ALIKE_STEPS` steps without a rise, and after :data:`VARIED_STEPS` if ``batches``, the
    shapes of token ids that the model was given, differ.
    """

    def __init__(self, ext: ModuleType, steps: int, peaks: Peaks | None = None) -> None:
        self._ext, self._steps, self._peaks = ext, steps, peaks
        self._highest = self._highest_since = 0
        self._depth = 0
        self._uncounted = False
        self._codes: dict[int, int] = {}
        self._roots: dict[int, nn.Module] = {}
        self._leading: Any = None
        self._outermost: Any = None
        self.stepped = 0
        self.steps_taken = 0
        self.tokens: list[int] = []
        self.batches: dict[tuple[int, ...], None] = {}

    def install(self) -> None:
        """Hook into torch until this process ends."""
        warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")  # these
        self._follow_compiled()
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._follow_graphs()

    def _follow_graphs(self) -> None:
        """Count steps and tokens of what a CUDA graph captured when it is replayed."""
        replay, make = torch.cuda.CUDAGraph.replay, torch.cuda.make_graphed_callables

        def counted(graph: torch.cuda.CUDAGraph) -> None:
            replay(graph)
            if not self._depth:  # else the module that replays it has counted them
                self.tokens += getattr(graph, "captured_tokens", ())
            for _ in range(getattr(graph, "captured_steps", 0)):
                self._end_step()

        def made(*args: Any, **options: Any) -> Any:
            before = len(self.tokens)
            graphed = make(*args, **options)
            del self.tokens[before:]  # it runs the modules a few times first
            return graphed

        torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign, assignment]
        torch.cuda.make_graphed_callables = made

    def _follow_compiled(self) -> None:
        """A module that is compiled in place is called without its hooks: torch traces them with its forward."""
        compile_in_place = nn.Module.compile

        def compile_and_follow(module: nn.Module, *args: Any, **options: Any) -> None:
            compile_in_place(module, *args, **options)
            compiled: Any = module._compiled_call_impl

            def call(*args: Any, **kwargs: Any) -> Any:
                self._enter(module, args)
                try:
                    return compiled(*args, **kwargs)
                finally:
                    self._leave()

            module._compiled_call_impl = call

        nn.Module.compile = compile_and_follow  # type: ignore[assignment,method-assign]

    @property
    def parameters(self) -> int:
        """Number of trainable elements over all modules that ran as the outermost, as if none were sharded."""
        each = {id(p): p for p in self._parameters()}.values()  # a part may have run as the outermost too
        return sum(getattr(p, "ds_numel", p.numel()) for p in each if p.requires_grad)

    @property
    def sharing(self) -> int:
        """How many ranks work on the same tokens: those along mesh axes that are named as tensor, context or pipeline
        parallelism's, on any parameter's mesh.
        """
        degrees = {1}
        for parameter in self._parameters():
            if (mesh := getattr(parameter, "device_mesh", None)) is not None:
                axes = zip(mesh.mesh_dim_names or (), mesh.shape)
                degrees.add(math.prod(size for name, size in axes if name in _SHARING_AXES))
        return max(degrees)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():  # a hook that Dynamo cannot trace would let it run the module uncompiled
            return
        if id(module) not in self._codes:
            self._name(module)
        if self._depth == 0:
            is_loss = next(module.parameters(), None) is None  # a module without parameters, which is given the labels
            self._uncounted = module.training and id(module) in self._roots and not is_loss
            inputs = (*inputs, _ids_by_name(sys._getframe(1)))
        if self._uncounted and (self._depth == 0 or isinstance(module, nn.Embedding)):
            self._count_tokens(inputs)
        self._depth += 1
        self._ext.push_module(self._codes[id(module)])

    def _leave(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        self._ext.pop_module()

    def _name(self, root: nn.Module) -> None:
        """Number a model's modules by their paths within it, when its outermost module first runs."""
        self._roots[id(root)] = root
        for path, module in root.named_modules():
            self._codes.setdefault(id(module), self._ext.module_code(_uncompiled(path) or ROOT))
        self._label_parameters()

    def _count_tokens(self, inputs: tuple[Any, ...]) -> None:
        """Token ids are what a language model's outermost module is given: integers, of (sequences, tokens). Where it
        was given them by a name other than Hugging Face's, they are what its first embedding is given.
        """
        for value in inputs:
            if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() == 2:
                tokens = _local(value).numel() * _split_by(value)
                self.batches[tuple(_local(value).shape)] = None
                if (graph := self._captured_into()) is None:
                    self.tokens.append(tokens)
                else:
                    graph.captured_tokens = [*getattr(graph, "captured_tokens", ()), tokens]
                self._uncounted = False
                return

    def _label_parameters(self) -> None:
        for parameter in self._parameters():
            self._label(getattr(parameter, "ds_tensor", parameter), Category.PARAMETERS)  # ZeRO-3 keeps its part there

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, named: dict[str, Any]) -> Any:
        if self._outermost is not None and self._outermost is not optimizer:
            return None
        self._outermost = optimizer
        self._ext.in_optimizer(True)
        self._label_optimized(optimizer)
        if callable(closure := named.get("closure")):
            return args, {**named, "closure": self._outside(optimizer, closure)}
        if len(args) == 2 and callable(args[1]):  # the optimizer, and the closure
            return (optimizer, self._outside(optimizer, args[1])), named
        return None

    def _outside(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A step's closure runs forward and backward: no work of the optimizer."""

        def call() -> Any:
            self._ext.in_optimizer(False)
            try:
                return closure()
            finally:
                self._ext.in_optimizer(True)
                self._label_optimized(optimizer)

        return call

    def _label_optimized(self, optimizer: torch.optim.Optimizer) -> None:
        if self._leading in (None, optimizer):
            self._label_parameters()
        self.stepped = sum(_local(p).numel() for p in _optimized(optimizer) if p.grad is not None)
        for parameter in _optimized(optimizer):
            self._label(parameter, Category.PARAMETERS)
            self._label(parameter.grad, Category.GRADIENTS)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                self._label(value, Category.OPTIMIZER)
        if optimizer is not self._outermost:
            return
        self._outermost = None
        self._ext.in_optimizer(False)
        if self._leading is None:
            self._leading = optimizer
        if optimizer is not self._leading:
            return
        if (graph := self._captured_into()) is not None:
            graph.captured_steps = getattr(graph, "captured_steps", 0) + 1
        elif torch._C._current_graph_task_id() >= 0:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_step)
        else:
            self._end_step()

    def _end_step(self) -> None:
        self.steps_taken += 1
        self._ext.mark("step")
        if self.steps_taken >= self._steps or (self._peaks is not None and self._stable(self._peaks.highest())):
            raise StepsDone

    def _stable(self, peak: Pool) -> bool:
        if (sum_of_peaks := peak.allocated + peak.reserved) > self._highest:
            self._highest, self._highest_since = sum_of_peaks, self.steps_taken
        return self.steps_taken - self._highest_since >= (VARIED_STEPS if len(self.batches) > 1 else ALIKE_STEPS)

    def _captured_into(self) -> Any:
        """The CUDA graph that is being captured; None if none is."""
        return torch.cuda.CUDAGraph.get_currently_capturing_graph() if self._ext.is_capturing() else None

    def _parameters(self) -> Iterator[torch.Tensor]:
        for root in list(self._roots.values()):
            yield from nn.Module.parameters(root)
            yield from nn.Module.buffers(root)  # where Megatron's own wrapper has a list of that name

    def _label(self, value: Any, category: Category) -> None:
        for part in _parts(value):
            if part.device.type == "cuda" and _has_storage(part) and (address := part.untyped_storage().data_ptr()):
                self._ext.categorise(part.device.index, address, int(category))


def _uncompiled(path: str) -> str:
    """A module's path without the wrappers that ``torch.compile(module)`` puts around modules."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def _ids_by_name(caller: FrameType) -> Any:
    """Hooks for all modules are not given what a module is given by name; torch's frame that calls them has it. In a
    compiled module no other hook sees token ids.
    """
    return caller.f_locals.get("kwargs", {}).get("input_ids")


def _optimized(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _local(value: Any) -> Any:
    """What this rank has of a tensor that is a DTensor, a peer's own kind included."""
    return getattr(value, "_local_tensor", value)


def _split_by(value: Any) -> int:
    """How many ranks that share tokens each hold an own part of a DTensor's."""
    if (mesh := getattr(value, "device_mesh", None)) is None:
        return 1
    axes = zip(value.placements, mesh.mesh_dim_names or (), mesh.shape)
    return math.prod(size for how, name, size in axes if name in _SHARING_AXES and how.is_shard())


def _parts(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that hold a value's memory on this rank: itself, or what a quantised tensor is packed into."""
    value = _local(value)
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _parts(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value
        state = vars(value).get("quant_state")  # bitsandbytes keeps scales and codes of 4-bit weights there
        while state is not None:
            yield from (tensor for tensor in vars(state).values() if isinstance(tensor, torch.Tensor))
            state = state.state2


def _has_storage(tensor: torch.Tensor) -> bool:
    """Some subclasses of tensors have no storage, and none of their own parts is known."""
    try:
        return tensor.untyped_storage().nbytes() > 0
    except (NotImplementedError, RuntimeError):
        return False
