"""Train a Llama, a Qwen3 or a DeepSeek-V3 as the published runs with a script did: a plain torch script.

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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from experts import Experts, Mixture, SparseBlock, balance
from model import KERNELS, Block, Documents, Transformer, rotations
from simple_fsdp import apply_simple_fsdp, compile_simple_fsdp
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor import parallel as tp
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _sac_storage_key,
    create_selective_checkpoint_contexts,
)

SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.aten.max.default,
}
"""What selective checkpointing by operator keeps; of matrix products, every second. cuDNN's attention is not in it."""
HOST = "copies to the host"


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("layers", "dim", "heads", "kv-heads", "hidden", "vocab"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--head-dim", type=int, help="By default dim / heads.")
    parser.add_argument("--query-norm", action="store_true", help="Norms on queries and keys, as in Qwen3.")
    parser.add_argument("--rotary", choices=["complex", "halves"], default="complex")
    parser.add_argument("--positions", type=int, help="Length of the table of rotations [default: seq-len].")
    parser.add_argument("--norm", choices=["operators", "composite", "fused"], default="fused")
    parser.add_argument("--attention", choices=[*KERNELS, "flex"], default="flash", help="What is asked first.")
    for name in ("experts", "active", "expert-hidden", "shared-experts", "dense", "latent", "rotated"):
        parser.add_argument(f"--{name}", type=int, default=0, help="Of a mixture of experts with latent attention.")
    parser.add_argument("--experts-by", choices=["grouped", "loop"], default="grouped", help="Products of matrices.")
    parser.add_argument("--code", default="2025-10-02", help="Of the mixture: the day on which it was so.")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1, help="Sequences on each data-parallel rank.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--strategy", choices=["fsdp1", "fsdp2", "simplefsdp"], default="fsdp2")
    parser.add_argument("--units", choices=["blocks", "parts"], default="parts", help="Whether all but blocks is one.")
    parser.add_argument("--reshard", choices=["all", "but-last", "none"], default="all", help="Blocks, after forward.")
    for name in ("dp-shard", "dp-replicate", "tp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--fold", action="store_true", help="Fold sequences into one dimension within the blocks.")
    parser.add_argument("--loss-parallel", action="store_true")
    parser.add_argument(
        "--checkpoint", default="none", help="none, full, op, parts, or a number: every so many blocks."
    )
    parser.add_argument("--also-saved", action="append", default=[], help="An operator that op and parts keep too.")
    parser.add_argument("--compile", action="append", default=[], choices=["blocks", "model", "loss"])
    parser.add_argument("--compile-backend", default="inductor")
    parser.add_argument("--float8", choices=["no", "tensor", "row"], default="no", help="Scales of torchao's float8.")
    parser.add_argument("--float8-gathered", action="store_true", help="Gather weights in float8.")
    parser.add_argument("--float8-recomputed", action="store_true", help="Cast weights again in backward.")
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


def keep_some(options: argparse.Namespace) -> tuple[Any, Any]:
    """Contexts of selective checkpointing by operator, for one call of a block."""
    products: Counter[bool] = Counter()
    saved = SAVED | {operator_of(name) for name in options.also_saved if name != HOST}

    def policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        if operator == torch.ops.aten._to_copy.default and str(keywords.get("device")) == "cpu":
            return CheckpointPolicy.MUST_SAVE if HOST in options.also_saved else CheckpointPolicy.PREFER_RECOMPUTE
        if operator == torch.ops.aten.mm.default:
            if options.experts and arguments[1].shape == (options.dim, options.experts):
                return CheckpointPolicy.PREFER_RECOMPUTE
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    forward, backward = create_selective_checkpoint_contexts(policy)
    if options.ep > 1:
        backward.__class__ = Lenient
    return forward, backward


class Lenient(_CachedTorchDispatchMode):
    """Recompute what forward has not run, as torch did until 2025: experts may be gathered within a block in backward
    alone. Today's torch refuses that.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = _sac_storage_key(func, args)
        if self.func_counter[key] not in (self.storage.get(key) or ()):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def operator_of(name: str) -> Any:
    """As ``aten.abs.default``, or a higher-order one."""
    if name == "flex_attention":
        return torch._higher_order_ops.flex_attention
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def apply_checkpointing(model: Transformer, options: argparse.Namespace) -> None:
    mode, whole = options.checkpoint, partial(checkpoint_wrapper, preserve_rng_state=False)
    selective = partial(whole, context_fn=partial(keep_some, options))
    for place, (name, block) in enumerate(model.layers.named_children(), start=1):
        if mode == "op":
            model.layers.register_module(name, selective(block))
        elif mode == "parts":
            block.attention, block.feed_forward = whole(block.attention), selective(block.feed_forward)
        elif mode == "full" or place % int(mode) == 0:
            model.layers.register_module(name, whole(block))


def apply_float8(model: Transformer, options: argparse.Namespace) -> None:
    """Let all linear layers but the last multiply in float8, by torchao."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if options.float8 == "row":
        config = Float8LinearConfig.from_recipe_name("rowwise")
    else:
        config = Float8LinearConfig(
            enable_fsdp_float8_all_gather=options.float8_gathered,
            force_recompute_fp8_weight_in_bwd=options.float8_recomputed,
        )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "head")


def compile_blocks(model: Transformer, options: argparse.Namespace) -> None:
    for name, block in model.layers.named_children():
        compiled = torch.compile(block, backend=options.compile_backend, fullgraph=True)
        model.layers.register_module(name, compiled)


def apply_fsdp2(model: Transformer, mesh: DeviceMesh, options: argparse.Namespace) -> nn.Module:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=options.compute_dtype, reduce_dtype=options.reduce_dtype)
    shard = partial(fsdp.fully_shard, mesh=mesh, mp_policy=policy)
    if options.units == "parts":
        shard(model.embedding, reshard_after_forward=options.reshard != "none")
    for name, block in model.layers.items():
        last = int(name) == len(model.layers) - 1
        reshard = options.reshard == "all" or (options.reshard == "but-last" and not last)
        if options.ep > 1:
            for experts in experts_in(block):
                fsdp.fully_shard(experts, mesh=experts.rest, mp_policy=policy, reshard_after_forward=reshard)
                experts.set_gradient_divide_factor(options.dp_shard)
        shard(block, reshard_after_forward=reshard)
    if options.units == "parts":
        shard([model.norm, model.head], reshard_after_forward=False)
    shard(model)
    if options.ep > 1:
        prefetch_in_order(model)
    model.to_empty(device="cuda")
    model.initialise()
    for mixture in mixtures_in(model):
        mixture.bias.zero_()
        mixture.tokens.zero_()
    return model


def experts_in(module: nn.Module) -> list[Any]:
    return [child for child in module.modules() if isinstance(child, Experts)]


def mixtures_in(module: nn.Module) -> list[Mixture]:
    return [child for child in module.modules() if isinstance(child, Mixture)]


def prefetch_in_order(model: Any) -> None:
    """Name what is gathered next, since the exchanges of experts wait for the GPU."""
    units = [[model.embedding], *([block, *experts_in(block)] for block in model.layers.values())]
    units.append([model.norm, model.head])
    for unit, following in pairwise(units):
        unit[0].set_modules_to_forward_prefetch(following)
    model.head.set_modules_to_backward_prefetch(units[-2][:1])
    for unit, following in pairwise(reversed(units[:-1])):
        unit[0].set_modules_to_backward_prefetch(following)


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
    if options.ep > 1:
        used = {"rest": options.dp_shard // options.ep, "expert": options.ep}
    mesh = init_device_mesh("cuda", tuple(used.values()), mesh_dim_names=tuple(used))
    with torch.device("meta"):
        model = Transformer(options, SparseBlock if options.experts else Block)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(options.parameter_dtype)
    if options.float8 != "no":
        apply_float8(model, options)
    if options.tp > 1:
        apply_tensor_parallel(model, mesh["tensor"], options)
    for experts in experts_in(model) if options.ep > 1 else ():
        experts.shard(mesh["expert"], mesh["rest"])
    if options.checkpoint != "none":
        apply_checkpointing(model, options)
    if "blocks" in options.compile:
        compile_blocks(model, options)
    data = mesh[tuple(name for name in used if name != "tensor")]
    if options.ep > 1:
        data = mesh[("rest", "expert")]._flatten("data")
    apply = {"fsdp2": apply_fsdp2, "fsdp1": apply_fsdp1, "simplefsdp": apply_simple_fsdp}[options.strategy]
    whole = apply(model, data, options)
    if "model" in options.compile:
        whole = compile_simple_fsdp(whole)
    return whole.train()


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
    meshes: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        meshes[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    norms = []
    for parameters in meshes.values():
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    norm = norms[0] if len(norms) == 1 else torch.stack([norm**2 for norm in norms]).sum() ** 0.5
    for parameters in meshes.values():
        nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)


def batches(options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield (torch.zeros(options.batch, options.seq_len, dtype=torch.int64),) * 2


def train(model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> None:
    measure: Callable[[Tensor, Tensor], Tensor] = loss_of if options.loss == "whole" else chunked_loss_of
    if "loss" in options.compile:
        measure = torch.compile(measure, backend=options.compile_backend)
    mixtures = mixtures_in(model)
    for step, (tokens, labels) in zip(range(1, options.steps + 1), batches(options)):
        tokens, labels = tokens.to("cuda"), labels.to("cuda")
        optimizer.zero_grad()
        if options.attention == "flex":
            Documents.read(tokens)
        with tp.loss_parallel() if options.loss_parallel else contextlib.nullcontext():
            logits = model(tokens)
            loss = measure(logits, labels)
            if not options.keep_logits:
                del logits
            loss.backward()
        clip(model)
        if mixtures:
            balance(mixtures)
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
