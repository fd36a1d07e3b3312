"""What the device cannot see of a script: which module runs, what a tensor is for, and where a step ends.

All of it comes from hooks that torch offers for every module and every optimizer; nothing of the script is changed.
"""

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from refshard.dryrun.recording import ROOT, Category
from refshard.dryrun.request import Pool


class Peaks:
    """Remembers what torch's statistics of ``device`` said before each reset."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._before = Pool(allocated=0, active=0, reserved=0, requested=0)

    def install(self) -> None:
        """Read the statistics before every reset, until this process ends."""
        reset = torch._C._cuda_resetPeakMemoryStats

        def keep_and_reset(device: int) -> None:
            self._before = self.highest()
            reset(device)

        torch._C._cuda_resetPeakMemoryStats = keep_and_reset

    def highest(self) -> Pool:
        """The highest of each, in bytes."""
        now = pool(self._device, "peak")
        return Pool(**{name: max(getattr(self._before, name), getattr(now, name)) for name in Pool.__struct_fields__})


def pool(device: int, which: str) -> Pool:
    """The "current" or "peak" bytes of torch's statistics."""
    torch.cuda.init()  # before which there are none
    stats = torch.cuda.memory_stats(device)
    return msgspec.convert({name: stats[f"{name}_bytes.all.{which}"] for name in Pool.__struct_fields__}, Pool)


_SHARING_AXES = frozenset({"tp", "cp", "sp", "pp", "tensor", "context", "pipeline", "tensor_parallel"})


class StepsDone(BaseException):
    """Ends a script after the requested optimizer steps; no ``except Exception`` of its own stops it."""


class Observer:
    """Tells the device's extension ``ext`` in which module and phase the host is, and ends the script after ``steps``
    optimizer steps.

    A step is one of the optimizer that stepped first: a script with several takes them in turn. What steps within
    another optimizer's step is a part of that. ``stepped`` is how many elements of this rank's have a gradient in the
    last step.
    """

    def __init__(self, ext: ModuleType, steps: int) -> None:
        self._ext, self._steps = ext, steps
        self._depth = 0
        self._uncounted = False
        self._codes: dict[int, int] = {}
        self._roots: dict[int, nn.Module] = {}
        self._leading: Any = None
        self._outermost: Any = None
        self.stepped = 0
        self.steps_taken = 0
        self.tokens: list[int] = []

    def install(self) -> None:
        """Hook into torch until this process ends."""
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    @property
    def parameters(self) -> int:
        """Number of trainable elements over all modules that ran as the outermost, as if none were sharded."""
        return sum(getattr(p, "ds_numel", p.numel()) for p in self._parameters() if p.requires_grad)

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
            self._uncounted = module.training and id(module) in self._roots and _has_parameters(module)
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
            self._codes.setdefault(id(module), self._ext.module_code(path or ROOT))
        self._label_parameters()

    def _count_tokens(self, inputs: tuple[Any, ...]) -> None:
        """Token ids are what a language model's outermost module is given: integers, of (sequences, tokens). Where it
        was given them by name, which hooks do not see, they are what its first embedding is given.
        """
        for value in inputs:
            if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() == 2:
                self.tokens.append(value.numel())
                self._uncounted = False
                return

    def _label_parameters(self) -> None:
        for parameter in self._parameters():
            self._label(getattr(parameter, "ds_tensor", parameter), Category.PARAMETERS)  # ZeRO-3 keeps its part there

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._outermost is not None and self._outermost is not optimizer:
            return
        self._outermost = optimizer
        self._ext.in_optimizer(True)
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
        if optimizer is self._leading:
            self.steps_taken += 1
            self._ext.mark("step")
            if self.steps_taken >= self._steps:
                raise StepsDone

    def _parameters(self) -> Iterator[torch.Tensor]:
        for root in list(self._roots.values()):
            yield from nn.Module.parameters(root)
            yield from nn.Module.buffers(root)  # where Megatron's own wrapper has a list of that name

    def _label(self, value: Any, category: Category) -> None:
        local = _local(value)
        if isinstance(local, torch.Tensor) and local.device.type == "cuda" and _has_storage(local):
            address = local.untyped_storage().data_ptr()
            if address:
                self._ext.categorise(local.device.index, address, int(category))


def _has_parameters(module: nn.Module) -> bool:
    """A loss may be a module too, and is given the labels."""
    return next(module.parameters(), None) is not None


def _optimized(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _local(value: Any) -> Any:
    """What this rank has of a tensor that is a DTensor, a peer's own kind included."""
    return getattr(value, "_local_tensor", value)


def _has_storage(tensor: torch.Tensor) -> bool:
    """Some subclasses of tensors have no storage of their own, but parts that have."""
    try:
        return tensor.untyped_storage().nbytes() > 0
    except (NotImplementedError, RuntimeError):
        return False
