"""Training in miniature, the same on CPUs over gloo and on fake GPUs over what stands in NCCL's place."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import refshard
from refshard.engine.placement import MODES

VOCAB, DIM, LENGTH, ROWS, STEPS = 24, 16, 6, 8, 5


class Block(nn.Module):
    """A residual block."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.checkpointed = checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return x + out


class Net(nn.Module):
    """A language model of an embedding, three blocks, a norm and a head."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(checkpointed=checkpointed) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def _net(device: torch.device, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).to(device)


def _batch(step: int, device: torch.device, part: int, parts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return tokens.chunk(parts)[part].pin_memory().to(device, non_blocking=True) if device.type == "cuda" else (
        tokens.chunk(parts)[part]
    )  # fmt: skip


def _ddp(device: torch.device, **_: Any) -> nn.Module:
    return DistributedDataParallel(_net(device), device_ids=[device.index] if device.type == "cuda" else None)


def _fsdp1(device: torch.device, **_: Any) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    on = device.index if device.type == "cuda" else None
    return FullyShardedDataParallel(_net(device), auto_wrap_policy=policy, device_id=on, use_orig_params=True)


def _fsdp2(
    device: torch.device, *, shape: tuple[int, ...] = (), bf16: bool = False, offload: bool = False,
    checkpointed: bool = False,
) -> nn.Module:  # fmt: skip
    net = _net(device, checkpointed=checkpointed)
    names = ("replicate", "shard")[-len(shape) :] if shape else None
    mesh = init_device_mesh(device.type, shape or (dist.get_world_size(),), mesh_dim_names=names)
    options: dict[str, Any] = {"mesh": mesh}
    if bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for layer in net.layers:
        fully_shard(layer, **options)
    fully_shard(net, **options)
    return net


def _tensor_parallel(device: torch.device, *, fsdp: bool = False, **_: Any) -> nn.Module:
    """Each block's two products over two ranks; with ``fsdp``, FSDP2 over the others."""
    net = _net(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    for layer in net.layers:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if fsdp:
            fully_shard(layer, mesh=mesh["data"])
    if fsdp:
        fully_shard(net, mesh=mesh["data"])
    return net


def _engine(device: torch.device, *, mode: str, shape: tuple[int, ...] = (), **options: Any) -> nn.Module:
    mesh = init_device_mesh(device.type, shape) if shape else None
    return refshard.shard(_net(device), mesh, mode=mode, **options)


Way = tuple[Callable[..., nn.Module], dict[str, Any]]
ON_TWO: dict[str, Way] = {
    "ddp": (_ddp, {}),
    "fsdp1": (_fsdp1, {}),
    "fsdp2": (_fsdp2, {}),
    "fsdp2 checkpointed": (_fsdp2, {"checkpointed": True}),
    "fsdp2 bf16": (_fsdp2, {"bf16": True}),
    "fsdp2 offload": (_fsdp2, {"offload": True}),
    "tensor parallel": (_tensor_parallel, {}),
    **{f"refshard-{mode}": (_engine, {"mode": mode}) for mode in MODES},
    "refshard-fsdp offload": (_engine, {"mode": "fsdp", "offload": True}),
}
ON_EIGHT: dict[str, Way] = {
    "ddp": (_ddp, {}),
    "hsdp": (_fsdp2, {"shape": (2, 4)}),
    "tensor parallel fsdp2": (_tensor_parallel, {"fsdp": True}),
    "refshard-yafsdp hybrid": (_engine, {"mode": "yafsdp", "shape": (2, 4)}),
}

ON_THE_HOST = {"fsdp1": "ddp", "fsdp2 offload": "fsdp2", "refshard-fsdp offload": "refshard-fsdp"}
"""What cannot run without a GPU, and what trains alike."""


def losses(way: Way, device_type: str) -> list[float]:
    """The mean loss over all ranks, per step. Ranks that split a matrix between them take the same rows."""
    make, options = way
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = world_size // 2 if make is _tensor_parallel else world_size
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    model = make(device, **options)
    fused = make is not _tensor_parallel and not options.get("offload")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=False)
    found = []
    for step in range(STEPS):
        tokens = _batch(step, device, rank * parts // world_size, parts)
        logits = model(tokens[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        found.append(total.item() / world_size)
    return found
