"""Train one cell of the parity matrix: on the engine, on torch's DDP or FSDP2, or on one unsharded rank."""

import math
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import refshard
from refshard.engine.api import engine_of
from refshard.engine.local_part import local_of
from tests.distributed.parity_features import FEATURES, STEPS, Feature
from tests.distributed.parity_models import Net, loss_of, make_batch

CLIPPING = ((1.0, 1.0), (2.0, 0.05), (math.inf, 0.01))
"""By which p-norm the steps clip in turn, to a limit small enough to do so every time."""
INFINITE_LOSS, INFINITE_GRADIENT = 4, 9
"""Steps in which one rank's loss, and one element of a reduced gradient, become infinite."""


@dataclass
class Trace:
    """What training left on one rank: per parameter the steps that gave it a gradient, and this rank's parts of them,
    as rows; what was read beside the losses by name; the masters, whole.
    """

    losses: list[float] = field(default_factory=list)
    steps: dict[str, list[int]] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    order: str = ""


class Side(ABC):
    """One way to train. ``net`` is the model itself, ``model`` what is called."""

    net: Net
    model: nn.Module
    rank = 0
    world_size = 1

    def microbatch(self, *, last: bool) -> AbstractContextManager[object]:
        """What a microbatch runs in."""
        return nullcontext()

    def clip(self, max_norm: float, p: float) -> torch.Tensor:
        """Clip by torch; the 2-norm tensor by tensor, the others of all at once."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, p, foreach=p != 2)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter or gradient, to be read and written."""
        return tensor.detach()

    @property
    def plants(self) -> bool:
        """Whether this rank is one whose gradient becomes infinite: all where all have it, the last otherwise."""
        return True

    @abstractmethod
    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of all parameters, whole or this rank's parts."""


class Alone(Side):
    """One unsharded rank, in fp32."""

    def __init__(self, feature: Feature) -> None:
        self.net = make(feature)
        self.model = self.net

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.net.named_parameters()


class Ddp(Side):
    """torch's DDP."""

    def __init__(self, feature: Feature) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.net = make(feature)
        self.ddp = DistributedDataParallel(self.net, find_unused_parameters=feature.order is not None)
        self.model = self.ddp
        self._unsharded = feature.accumulation == "unsharded"

    def microbatch(self, *, last: bool) -> AbstractContextManager[object]:
        return self.ddp.no_sync() if self._unsharded and not last else nullcontext()

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.net.named_parameters()


class Fsdp2(Side):
    """torch's FSDP2."""

    def __init__(self, feature: Feature) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.net = make(feature)
        parameters, reduction = feature.precision or (None, None)
        policy = MixedPrecisionPolicy(param_dtype=parameters, reduce_dtype=reduction)
        for module in (*self.net.layers, self.net):
            fully_shard(module, mesh=mesh_of(feature), mp_policy=policy)
        self.model = self.net
        self._unsharded = feature.accumulation == "unsharded"

    @property
    def plants(self) -> bool:
        return self.rank == self.world_size - 1

    def microbatch(self, *, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.model, FSDPModule)
        if self._unsharded:
            self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def clip(self, max_norm: float, p: float) -> torch.Tensor:
        norm = super().clip(max_norm, p)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(tensor, DTensor)
        part: torch.Tensor = tensor.to_local()
        return part.detach()

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for module in (*self.net.layers, self.net):
            assert isinstance(module, FSDPModule)
            module.reshard()  # an evaluation leaves the root gathered
        for name, parameter in self.net.named_parameters():
            assert isinstance(parameter, DTensor)
            yield name, parameter.full_tensor()


class Engine(Side):
    """refshard; ranks but the first start from other weights."""

    def __init__(self, feature: Feature, mode: str) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.net = make(feature, seed=self.rank, device="meta" if feature.meta else "cpu")
        torch.manual_seed(self.rank)
        self.model = refshard.shard(
            self.net,
            mesh_of(feature),
            mode=mode,
            precision=refshard.Precision(parameters=feature.precision[0], reduction=feature.precision[1])
            if feature.precision
            else None,
            accumulation=feature.accumulation,
            offload=feature.offload,
            debug=True,
        )
        self._clip_by_torch = feature.clip == "torch"
        self._replicated = engine_of(self.net).mode.optimizer == "replicate"

    @property
    def plants(self) -> bool:
        return self._replicated or self.rank == self.world_size - 1

    def microbatch(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else refshard.no_sync(self.net)

    def clip(self, max_norm: float, p: float) -> torch.Tensor:
        return super().clip(max_norm, p) if self._clip_by_torch else refshard.clip_grad_norm_(self.net, max_norm, p)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return local_of(tensor).detach()

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from refshard.full_parameters(self.net)


def make(feature: Feature, seed: int = 0, device: str = "cpu") -> Net:
    """The feature's model; the same weights for the same seed."""
    torch.manual_seed(seed)
    with torch.device(device):
        return feature.make()


def mesh_of(feature: Feature) -> DeviceMesh | None:
    """The feature's mesh; by default all ranks on one axis."""
    return init_device_mesh("cpu", feature.mesh, mesh_dim_names=("replicate", "shard")) if feature.mesh else None


def train(side: Side, feature: Feature) -> Trace:
    """Train for ``STEPS`` steps and write down what happens."""
    trace, rows = Trace(), dict[str, list[torch.Tensor]]()
    optimizer = torch.optim.AdamW(list(groups_of(side.net, feature)), lr=1e-2, weight_decay=0.1, foreach=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4, enabled=feature.scaled)
    if feature.compiled:
        for layer in side.net.layers:
            layer.compile(backend="aot_eager")
    for step in range(STEPS):
        if feature.order is not None:
            side.net.order = feature.order(step)
        trace.losses.append(forward_and_backward(side, feature, step, scaler))
        planted = feature.scaled and step in (INFINITE_LOSS, INFINITE_GRADIENT)
        if feature.scaled and step == INFINITE_GRADIENT:
            plant(side)
        scaler.unscale_(optimizer)
        if feature.clip is not None:
            p, max_norm = CLIPPING[step % len(CLIPPING)]
            trace.norms.append(side.clip(max_norm, p).item())
        for name, parameter in side.net.named_parameters():
            if parameter.grad is not None and not planted:
                trace.steps.setdefault(name, []).append(step)
                rows.setdefault(name, []).append(side.local(parameter.grad).flatten().clone())
        scaler.step(optimizer)
        scaler.update()
        if feature.scaled:
            trace.scales.append(scaler.get_scale())
        optimizer.zero_grad()
        if feature.evaluates:
            with torch.no_grad() if step % 2 else torch.inference_mode():
                trace.logits.append(side.model(make_batch(-1 - step)[0]).clone())
    trace.gradients = {name: torch.stack(found) for name, found in rows.items()}
    trace.masters = {name: value.detach().clone() for name, value in side.masters()}
    return trace


def forward_and_backward(side: Side, feature: Feature, step: int, scaler: torch.amp.GradScaler) -> float:
    """Run the microbatches of one step on this rank's rows; return the mean loss over all of them."""
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in range(feature.microbatches):
        with side.microbatch(last=microbatch == feature.microbatches - 1):
            inputs, targets = (t.chunk(side.world_size)[side.rank] for t in make_batch(step, microbatch))
            loss = loss_of(side.model, (inputs, targets)) / feature.microbatches
            total += loss.detach().double() / side.world_size
            if feature.scaled and step == INFINITE_LOSS and side.rank == 0:
                loss = loss * math.inf
            scaler.scale(loss).backward()
    if side.world_size > 1:
        dist.all_reduce(total)
    return total.item()


def plant(side: Side) -> None:
    """Make one element of a reduced gradient infinite."""
    if side.plants:
        parts = (side.local(p.grad) for p in side.net.parameters() if p.grad is not None)
        next(part for part in parts if part.numel()).view(-1)[-1] = math.inf


def groups_of(net: Net, feature: Feature) -> Iterator[dict[str, Any]]:
    """One group of parameters, or two with other learning rates and decays."""
    named = list(net.named_parameters())
    if not feature.groups:
        yield {"params": [p for _, p in named]}
        return
    undecayed = [p for name, p in named if "norm" in name or name.endswith("bias")]
    yield {"params": undecayed, "weight_decay": 0.0, "lr": 3e-3}
    yield {"params": [p for _, p in named if not any(p is other for other in undecayed)]}


def train_or_tell(way: str, name: str) -> Trace | str:
    """In every rank: train a mode or a peer with the feature of that name; the traceback where that raises."""
    feature = FEATURES[name]
    torch._dynamo.reset()
    peers = {"ddp": Ddp, "fsdp2": Fsdp2}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            side = peers[way](feature) if way in peers else Engine(feature, way)
            trace = train(side, feature)
    except Exception:
        return traceback.format_exc()
    trace.warned = [str(w.message) for w in caught if str(w.message).startswith("refshard")]
    if isinstance(side, Engine):
        trace.order = engine_of(side.net).executor.order.name
    return trace
