"""Train a Llama or a Qwen3 as the published runs with a script did: a plain torch script.

It takes as options whatever their code did differently from one commit to the next, so that one script stands for all
of them. The order of operators and the life of each tensor follow that code, since both decide how much memory is
needed. Token ids are zeros.

On eight GPUs: torchrun --nproc-per-node 8 train.py --layers 32 --dim 4096 --heads 32 --kv-heads 8 --hidden 14336 \
    --vocab 128256 --dp-shard 8
"""

import argparse
import contextlib
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import KERNELS, Transformer, rotations
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor import parallel as tp
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.aten.max.default,
}
"""What selective checkpointing by operator keeps; of matrix products, every second. cuDNN's attention is not in it."""


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("layers", "dim", "heads", "kv-heads", "hidden", "vocab"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--head-dim", type=int, help="By default dim / heads.")
    parser.add_argument("--query-norm", action="store_true", help="Norms on queries and keys, as in Qwen3.")
    parser.add_argument("--rotary", choices=["complex", "halves"], default="complex")
    parser.add_argument("--positions", type=int, help="Length of the table of rotations [default: seq-len].")
    parser.add_argument("--norm", choices=["operators", "composite", "fused"], default="fused")
    parser.add_argument("--attention", choices=list(KERNELS), default="flash", help="The kernel that is asked first.")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1, help="Sequences on each data-parallel rank.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--strategy", choices=["fsdp1", "fsdp2"], default="fsdp2")
    parser.add_argument("--units", choices=["blocks", "parts"], default="parts", help="Whether all but blocks is one.")
    parser.add_argument("--reshard", choices=["all", "but-last", "none"], default="all", help="Blocks, after forward.")
    for name in ("dp-shard", "dp-replicate", "tp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--fold", action="store_true", help="Fold sequences into one dimension within the blocks.")
    parser.add_argument("--loss-parallel", action="store_true")
    parser.add_argument("--checkpoint", default="none", help="none, full, op, or a number: every so many blocks.")
    parser.add_argument("--loss", choices=["whole", "chunked"], default="whole")
    parser.add_argument("--logits-fp32", choices=["model", "loss"], default="loss")
    parser.add_argument("--keep-logits", action="store_true", help="Hold a reference to the logits through backward.")
    parser.add_argument("--optimizer", choices=["foreach", "fused"], default="fused")
    for name, default in (("parameter", "float32"), ("compute", "bfloat16"), ("reduce", "float32")):
        parser.add_argument(f"--{name}-dtype", type=partial(getattr, torch), default=getattr(torch, default))
    options = parser.parse_args()
    options.head_dim = options.head_dim or options.dim // options.heads
    options.positions = options.positions or options.seq_len
    return options


class Whole(tp.ParallelStyle):
    """Every rank has the module's parameters and its whole output, of an input that may be sharded."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, output_fn=self.gather)

    @staticmethod
    def gather(_: nn.Module, output: DTensor, __: DeviceMesh) -> DTensor:
        wanted = (Replicate(),)
        return output if output.placements == wanted else output.redistribute(placements=wanted, async_op=True)


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh, options: argparse.Namespace) -> None:
    """Tensor parallelism, with norms and the residual stream sharded along the sequence."""
    along: Placement = Shard(0 if options.fold else 1)
    sequence = tp.SequenceParallel(sequence_dim=0 if options.fold else 1)
    output = Shard(-1) if options.loss_parallel else Replicate()
    whole_model: dict[str, tp.ParallelStyle] = {
        "embedding": tp.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Replicate() if options.fold else along
        ),
        "head": tp.ColwiseParallel(
            input_layouts=along, output_layouts=output, use_local_output=not options.loss_parallel
        ),
        "norm": sequence,
    }  # fmt: skip
    if options.fold:
        whole_model["layers.0"] = tp.PrepareModuleInput(
            input_layouts=(Replicate(), None), desired_input_layouts=(along, None), use_local_output=True
        )
    tp.parallelize_module(model, mesh, whole_model)
    table = Replicate() if options.query_norm else None
    column = partial(tp.ColwiseParallel, use_local_output=not options.query_norm)
    for block in model.layers.values():
        plan: dict[str, tp.ParallelStyle] = {
            "attention_norm": sequence,
            "attention": tp.PrepareModuleInput(
                input_layouts=(along, table), desired_input_layouts=(Replicate(), table)
            ),
            "attention.q": column(),
            "attention.k": column(),
            "attention.v": column(),
            "attention.o": tp.RowwiseParallel(output_layouts=along),
            "feed_forward_norm": sequence,
            "feed_forward": tp.PrepareModuleInput(input_layouts=(along,), desired_input_layouts=(Replicate(),)),
            "feed_forward.gate": tp.ColwiseParallel(),
            "feed_forward.down": tp.RowwiseParallel(output_layouts=along),
            "feed_forward.up": tp.ColwiseParallel(),
        }  # fmt: skip
        if options.query_norm:
            plan |= {"attention.query_norm": Whole(), "attention.key_norm": Whole()}
        tp.parallelize_module(block, mesh, plan)


def keep_some() -> tuple[Any, Any]:
    """Contexts of selective checkpointing by operator, for one call of a block."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator == torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_checkpointing(model: Transformer, mode: str) -> None:
    for place, (name, block) in enumerate(model.layers.named_children(), start=1):
        if mode == "op":
            wrapped = checkpoint_wrapper(block, context_fn=keep_some, preserve_rng_state=False)
        elif mode == "full" or place % int(mode) == 0:
            wrapped = checkpoint_wrapper(block, preserve_rng_state=False)
        else:
            continue
        model.layers.register_module(name, wrapped)


def apply_fsdp2(model: Transformer, mesh: DeviceMesh, options: argparse.Namespace) -> nn.Module:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=options.compute_dtype, reduce_dtype=options.reduce_dtype)
    shard = partial(fsdp.fully_shard, mesh=mesh, mp_policy=policy)
    if options.units == "parts":
        shard(model.embedding, reshard_after_forward=options.reshard != "none")
    for name, block in model.layers.items():
        last = int(name) == len(model.layers) - 1
        shard(block, reshard_after_forward=options.reshard == "all" or (options.reshard == "but-last" and not last))
    if options.units == "parts":
        shard([model.norm, model.head], reshard_after_forward=False)
    shard(model)
    model.to_empty(device="cuda")
    model.initialise()
    return model


def apply_fsdp1(model: Transformer, mesh: DeviceMesh, options: argparse.Namespace) -> nn.Module:
    wrap = partial(
        fsdp.FullyShardedDataParallel, device_mesh=mesh, use_orig_params=True, param_init_fn=materialise,
        sharding_strategy=fsdp.ShardingStrategy.FULL_SHARD, backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=fsdp.MixedPrecision(param_dtype=options.compute_dtype, reduce_dtype=options.reduce_dtype),
    )  # fmt: skip
    for name, block in model.layers.named_children():
        model.layers.register_module(name, wrap(block))
    model.table = rotations(options)
    wrapped = wrap(model)
    model.initialise()
    return wrapped


@torch.no_grad()
def materialise(module: nn.Module) -> None:
    """Give parameters on the meta device memory, for FSDP1, which shards them from there."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            if not _is_fsdp_flattened(parameter) and parameter.is_meta:
                setattr(child, name, nn.Parameter(torch.randn_like(parameter, device=torch.device("cuda"))))


def make_model(options: argparse.Namespace) -> nn.Module:
    degrees = {"replicate": options.dp_replicate, "shard": options.dp_shard, "tensor": options.tp}
    used = {name: degree for name, degree in degrees.items() if degree > 1} or {"shard": 1}
    mesh = init_device_mesh("cuda", tuple(used.values()), mesh_dim_names=tuple(used))
    with torch.device("meta"):
        model = Transformer(options)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(options.parameter_dtype)
    if options.tp > 1:
        apply_tensor_parallel(model, mesh["tensor"], options)
    if options.checkpoint != "none":
        apply_checkpointing(model, options.checkpoint)
    data = tuple(name for name in used if name != "tensor")
    apply = apply_fsdp2 if options.strategy == "fsdp2" else apply_fsdp1
    return apply(model, mesh[data], options).train()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def chunked_loss_of(logits: Tensor, labels: Tensor, chunks: int = 8) -> Tensor:
    pieces = zip(list(logits.chunk(chunks, dim=1)), list(labels.chunk(chunks, dim=1)))
    del logits
    total: Any = 0.0
    for some_logits, some_labels in pieces:
        total += loss_of(some_logits, some_labels)
    return total / chunks


def clip(model: nn.Module) -> None:
    if isinstance(model, fsdp.FullyShardedDataParallel):
        model.clip_grad_norm_(1.0)
        return
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)


def batches(options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield (torch.zeros(options.batch, options.seq_len, dtype=torch.int64),) * 2


def train(model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> None:
    measure: Callable[[Tensor, Tensor], Tensor] = loss_of if options.loss == "whole" else chunked_loss_of
    for step, (tokens, labels) in zip(range(1, options.steps + 1), batches(options)):
        tokens, labels = tokens.to("cuda"), labels.to("cuda")
        optimizer.zero_grad()
        with tp.loss_parallel() if options.loss_parallel else contextlib.nullcontext():
            logits = model(tokens)
            loss = measure(logits, labels)
            if not options.keep_logits:
                del logits
            loss.backward()
        clip(model)
        optimizer.step()
        if step == 1 or step % options.log_every == 0:
            reserved = torch.cuda.memory_stats()["reserved_bytes.all.peak"]
            print(f"step {step}: loss {loss.item():.3f}, memory {reserved / 2**30:.2f} GiB", flush=True)
            torch.cuda.reset_peak_memory_stats()


def main() -> None:
    options = read_options()
    gc.disable()
    gc.collect(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = make_model(options)
    chosen = {"foreach": options.optimizer == "foreach", "fused": options.optimizer == "fused"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, **chosen)
    torch.cuda.reset_peak_memory_stats()
    train(model, optimizer, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
