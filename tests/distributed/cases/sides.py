"""The ways to train that a case is run in: bare, FSDP2, and the engine in one of its modes.

A case is written once, against :class:`Side`. The bare side is one process with the rows of all ranks: a mean over its
rows is the mean over the ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

import refshard

ROWS = 6
"""Rows of a batch, of all ranks together."""
DIM = 5
VOCAB = 11

Model = TypeVar("Model", bound=nn.Module)
Blocks = Sequence[str | type[nn.Module]]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """``evaluated``: an evaluation comes before the first step. ``checkpointed``: blocks are recomputed in backward."""

    evaluated: bool = False
    checkpointed: bool = False

    @property
    def name(self) -> str:
        """As tables show it."""
        return "+".join(name for name in ("evaluated", "checkpointed") if getattr(self, name)) or "plain"


@dataclass(frozen=True)
class Sharding:
    """How to shard a model. With ``replicas`` the axis to shard over is of one rank; ``options`` are refshard's own.

    ``used_by_some_ranks``: ranks use different parameters, of which FSDP2 has to be told.
    """

    blocks: Blocks | None
    precision: refshard.Precision | None
    initialise: Callable[[nn.Module], None] | None
    replicas: bool
    used_by_some_ranks: bool
    options: dict[str, Any]


class Side(ABC):
    """One way to train. What a case logs is compared with what it logs on the bare side, in order."""

    rank = 0
    world_size = 1

    def __init__(self, variant: Variant, folder: Path, device: torch.device) -> None:
        self.variant = variant
        self.folder = folder
        self.device = device
        self.models: list[nn.Module] = []
        self.shapes: dict[int, dict[str, torch.Size]] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self._log: list[tuple[str, str, torch.Tensor]] = []

    def shard(
        self,
        model: Model,
        *sample: Any,
        blocks: Blocks | None = None,
        precision: refshard.Precision | None = None,
        initialise: Callable[[nn.Module], None] | None = None,
        replicas: bool = False,
        used_by_some_ranks: bool = False,
        **options: Any,
    ) -> Model:
        """Shard ``model`` (see :class:`Sharding`), turn on what the variant asks for, and restart the random numbers.

        ``sample`` is what the evaluation before the first step calls the model with.
        """
        self.shapes[id(model)] = {name: p.shape for name, p in model.named_parameters()}
        if self.device.type != "cpu":
            model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.device))
        self._shard(model, Sharding(blocks, precision, initialise, replicas, used_by_some_ranks, options))
        self.models.append(model)
        if self.variant.checkpointed:
            able = [module for module in model.modules() if hasattr(module, "checkpointing")]
            assert able, "the model cannot checkpoint its blocks: name the case's variants"
            for module in able:
                module.checkpointing = True  # type: ignore[assignment]
        if self.variant.evaluated:
            assert sample, "no sample to evaluate: name the case's variants"
            with torch.no_grad():
                model(*sample)
            self.after_evaluation(model)
        torch.manual_seed(1)
        return model

    @abstractmethod
    def _shard(self, model: nn.Module, how: Sharding) -> None: ...

    def after_evaluation(self, model: nn.Module) -> object:
        """Have the model show its sharded parameters."""
        return None

    # What a case feeds its model.

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This side's rows of a batch: all of them where there is one process."""
        return whole.chunk(self.world_size)[self.rank]

    def x(self, step: int = 0) -> torch.Tensor:
        """Rows of numbers, the same for the same step."""
        whole = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return self.put(self.rows(whole.to(torch.get_default_dtype())))

    def tokens(self, step: int = 0, length: int = 4) -> torch.Tensor:
        """Rows of tokens."""
        whole = torch.randint(0, VOCAB, (ROWS, length), generator=torch.Generator().manual_seed(step))
        return self.put(self.rows(whole))

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """Values from the host, on this side's device. The host does not wait, so that no wait hides a race."""
        return values if self.device.type == "cpu" else values.pin_memory().to(self.device, non_blocking=True)

    # What a case reports.

    def log(self, name: str, value: torch.Tensor | float) -> None:
        """Log what is the same on all ranks; of a sharded value the whole."""
        self._log.append((name, "same", _plain(value)))

    def log_mean(self, name: str, value: torch.Tensor | float) -> None:
        """Log a number; what counts is its mean over the ranks."""
        self._log.append((name, "mean", _plain(value)))

    def log_rows(self, name: str, value: torch.Tensor) -> None:
        """Log one row or more for each of this side's rows."""
        self._log.append((name, "rows", _plain(value)))

    def log_gradients(self, model: nn.Module) -> None:
        """Log each parameter's gradient, whole, or that it has none."""
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            self.log(f"has gradient {name}", float(gradient is not None))
            if gradient is not None:
                self.log(f"gradient {name}", self.whole(gradient, self.shapes[id(model)][name]))

    def log_parameters(self, model: nn.Module) -> None:
        """Log each parameter of a sharded model, whole."""
        for name, value in sorted(self.parameters(model)):
            self.log(f"parameter {name}", value)

    @abstractmethod
    def parameters(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole values of a sharded model's parameters."""

    @abstractmethod
    def whole(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The whole of what is held like a parameter."""

    def microbatch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """What a microbatch runs in: unless it is the last, its gradients need not be reduced."""
        return nullcontext()

    def unshard(self, module: nn.Module, *, wait: bool = False) -> object:
        """Begin to gather the parameters of a module of a sharded model; with ``wait``, until they are there."""
        return None

    def reshard(self, module: nn.Module) -> object:
        """Give them up."""
        return None

    def register_method(self, module: nn.Module, name: str) -> object:
        """Treat calls of a method of a sharded model's module as its forward."""
        return None

    def own_clip(self, model: nn.Module, max_norm: float, p: float = 2.0) -> torch.Tensor:
        """Clip as the side's own documentation says."""
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, p)

    def whole_tensors(
        self, make: Callable[..., torch.optim.Optimizer], model: nn.Module, parameters: Any, **options: Any
    ) -> torch.optim.Optimizer:
        """An optimizer that needs whole tensors."""
        return make(parameters, **options)

    @property
    def engine(self) -> bool:
        """Whether this is refshard."""
        return False

    def finish(self) -> list[tuple[str, torch.Tensor]]:
        """Everything that was logged, and the final parameters and buffers of all models, joined over ranks, on the
        host.
        """
        for index, model in enumerate(self.models):
            for name, value in sorted(self.parameters(model)):
                self.log(f"model {index} parameter {name}", value)
            for name, buffer in model.named_buffers():
                self.log(f"model {index} buffer {name}", buffer)
        return self._join([(name, how, value.cpu()) for name, how, value in self._log])

    def _join(self, log: list[tuple[str, str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        if self.world_size == 1:
            return [(name, value) for name, _, value in log]
        logs: list[Any] = [None] * self.world_size
        dist.all_gather_object(logs, [value if how != "same" else None for _, how, value in log])
        joined = []
        for index, (name, how, value) in enumerate(log):
            values = [found[index] for found in logs]
            whole = value if how == "same" else torch.cat(values) if how == "rows" else sum(values) / len(values)
            joined.append((name, whole))
        return joined


def _plain(value: torch.Tensor | float) -> torch.Tensor:
    """A copy that later steps leave alone."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor(float(value))
    return whole_of(value.detach()).clone()


def whole_of(value: Any) -> torch.Tensor:
    """The whole of a tensor that knows it, such as a DTensor; any other as it is."""
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    while hasattr(whole, "wait") and type(whole) is not torch.Tensor:
        whole = whole.wait()
    return whole if isinstance(whole, nn.Parameter) else whole.as_subclass(torch.Tensor)


class Bare(Side):
    """One process, unsharded, with the rows of all ranks."""

    def _shard(self, model: nn.Module, how: Sharding) -> None:
        _materialise(model, how.initialise, self.device)

    def parameters(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        yield from model.named_parameters()

    def whole(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return part


class Ranks(Side):
    """A side that runs on several ranks."""

    def __init__(self, variant: Variant, folder: Path, device: torch.device) -> None:
        super().__init__(variant, folder, device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def mesh(self, model: nn.Module, replicas: bool) -> DeviceMesh | None:
        """All ranks on one axis, or each a replica. None where the model's device says enough."""
        if replicas:
            return init_device_mesh(self.device.type, (self.world_size, 1), mesh_dim_names=("replicate", "shard"))
        if any(p.is_meta for p in model.parameters()):
            return init_device_mesh(self.device.type, (self.world_size,))
        return None


class Fsdp2(Ranks):
    """torch's ``fully_shard``, on blocks and root."""

    def _shard(self, model: nn.Module, how: Sharding) -> None:
        policy = MixedPrecisionPolicy(
            param_dtype=how.precision.parameters if how.precision else None,
            reduce_dtype=how.precision.reduction if how.precision else None,
        )
        mesh = self.mesh(model, how.replicas)
        ignored = {p for name, p in model.named_parameters() if name in how.options.get("ignored", ())}
        for module in (*_blocks(model, how.blocks), model):
            fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)
        _materialise(model, how.initialise, self.device)
        if how.used_by_some_ranks:
            assert isinstance(model, FSDPModule)
            model.set_reduce_scatter_unused_params(True)
        if (factor := how.options.get("gradient_divide_factor")) is not None:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(factor)
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no other sums

    def after_evaluation(self, model: nn.Module) -> object:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation leaves the root gathered
        return None

    def parameters(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        self.after_evaluation(model)
        for name, parameter in model.named_parameters():
            yield name, whole_of(parameter)

    def whole(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return whole_of(part)

    def microbatch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)
        return nullcontext()

    def unshard(self, module: nn.Module, *, wait: bool = False) -> None:
        assert isinstance(module, FSDPModule)
        module.unshard(async_op=not wait)

    def reshard(self, module: nn.Module) -> None:
        assert isinstance(module, FSDPModule)
        module.reshard()

    def register_method(self, module: nn.Module, name: str) -> None:
        register_fsdp_forward_method(module, name)


class Engine(Ranks):
    """refshard, in one of its modes."""

    def __init__(self, variant: Variant, folder: Path, device: torch.device, mode: str) -> None:
        super().__init__(variant, folder, device)
        self.mode = mode

    @property
    def engine(self) -> bool:
        return True

    def _shard(self, model: nn.Module, how: Sharding) -> None:
        refshard.shard(
            model,
            self.mesh(model, how.replicas),
            mode=self.mode,
            blocks=how.blocks,
            precision=how.precision,
            initialise=how.initialise,
            **how.options,
        )

    def parameters(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        yield from refshard.full_parameters(model)

    def whole(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if hasattr(part, "full_tensor"):
            return whole_of(part)
        plain = part.detach().as_subclass(torch.Tensor)
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, plain.clone())
        replicated = sum(part.numel() for part in parts) > shape.numel()
        return (plain if replicated else torch.cat(parts)).view(shape)

    def microbatch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else refshard.no_sync(model)

    def unshard(self, module: nn.Module, *, wait: bool = False) -> None:
        handle = refshard.unshard(module)
        if wait:
            handle.wait()

    def reshard(self, module: nn.Module) -> None:
        refshard.reshard(module)

    def register_method(self, module: nn.Module, name: str) -> None:
        refshard.register_forward_method(module, name)

    def whole_tensors(
        self, make: Callable[..., torch.optim.Optimizer], model: nn.Module, parameters: Any, **options: Any
    ) -> torch.optim.Optimizer:
        return refshard.whole_tensors(make, model, parameters, **options)

    def own_clip(self, model: nn.Module, max_norm: float, p: float = 2.0) -> torch.Tensor:
        return refshard.clip_grad_norm_(model, max_norm, p)


def _blocks(model: nn.Module, blocks: Blocks | None) -> list[nn.Module]:
    """Modules that ``refshard.shard`` would make units of."""
    from refshard.engine.grouping import find_blocks

    return list(find_blocks(model, blocks).values())


def _materialise(model: nn.Module, initialise: Callable[[nn.Module], None] | None, device: torch.device) -> None:
    if any(p.is_meta for p in model.parameters()):
        held = [(module, name, p) for module in model.modules() for name, p in module.named_parameters(recurse=False)]
        first = {p: (module, name) for module, name, p in reversed(held)}
        model.to_empty(device=device)
        for module, name, p in held:  # ties are lost on the way
            setattr(module, name, getattr(*first[p]))
        with torch.no_grad():
            for module in model.modules():
                if initialise is not None:
                    initialise(module)
                elif callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
