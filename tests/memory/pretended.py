"""One rank of a world whose other ranks are pretended, which trains a small Llama with a real strategy.

Collectives return at once, with whatever was there: what a strategy allocates around them is real.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel

from refshard.engine.api import no_sync, shard
from refshard.engine.placement import MODES
from refshard.engine.precision import Precision
from refshard.models.activation import checkpoint_layers
from refshard.models.llama import Block, Llama, next_token_loss
from refshard.specs.model import ModelSpec
from tests.memory.live import LiveBytes

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def wrap(model: Llama, strategy: str, mesh: DeviceMesh, *, bf16: bool) -> nn.Module:
    """The model as a strategy trains it; in bf16, with fp32 masters and reductions."""
    if strategy.startswith("refshard-"):
        mode = strategy.removeprefix("refshard-")
        return shard(model, mesh, mode=mode, precision=Precision(parameters=BF16 if bf16 else None))
    if strategy.startswith("fsdp1"):
        mixed = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32) if bf16 else None
        ends = () if strategy == "fsdp1-root" or model.spec.tied else (model.model.embed_tokens,)
        policy = CustomPolicy(lambda module: isinstance(module, Block) or module in ends)
        return FullyShardedDataParallel(
            model, process_group=mesh.get_group(), auto_wrap_policy=policy, mixed_precision=mixed, device_id=CPU
        )
    if strategy.startswith("fsdp2"):
        policy2 = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
        fully = partial(fully_shard, mesh=mesh, mp_policy=policy2)
        if strategy == "fsdp2-tuned" and not model.spec.tied:
            fully(model.model.embed_tokens).set_unshard_in_backward(False)
            fully([model.model.norm, model.lm_head], reshard_after_forward=False)
        for layer in model.model.layers:
            fully(layer)
        fully(model)
        return model
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, _reduced_at_once)
    return wrapped


def _reduced_at_once(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def levels_of_a_step(
    spec: ModelSpec,
    strategy: str,
    *,
    sequences: int,
    seq_len: int,
    microbatches: int = 1,
    policy: str = "none",
    bf16: bool = False,
    replicas: int = 1,
) -> list[int]:
    """What :class:`LiveBytes` sees in the third step, of all that was made since there was no model."""
    world = dist.get_world_size()
    sizes = (world,) if replicas == 1 else (replicas, world // replicas)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])
    live = LiveBytes(watching=False)
    with live:
        model = Llama(spec)
        model.tie_weights()
        checkpoint_layers(model, policy)
        module = model if strategy == "single" else wrap(model, strategy, mesh, bf16=bf16)
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        autocast = bf16 and strategy in ("single", "ddp")
        computing = partial(torch.autocast, "cpu", BF16) if autocast else nullcontext
        own = {f"refshard-{mode}": partial(no_sync, module) for mode in MODES}
        pause = {"ddp": getattr(module, "no_sync", nullcontext), **own}
        for index in range(3):
            live.watching = index == 2
            tokens = torch.zeros(2, microbatches, sequences, seq_len, dtype=torch.int64)
            step(module, optimizer, tokens, pause.get(strategy, nullcontext), computing)
            del tokens
        live.levels.append(live.total())
    return live.levels


def step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    pause: Callable[[], AbstractContextManager[object]],
    computing: Callable[[], AbstractContextManager[object]],
) -> None:
    """One optimizer step over all microbatches, as the harness takes it; all but the last within ``pause``, and each
    forward with its loss within ``computing``.
    """
    for index, (inputs, targets) in enumerate(zip(*tokens)):
        with nullcontext() if index == len(tokens[0]) - 1 else pause():
            with computing():
                loss = next_token_loss(module(inputs), targets)
            (loss / len(tokens[0])).backward()
    optimizer.step()
    optimizer.zero_grad()
