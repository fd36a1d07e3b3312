"""torch's tensor parallelism: every block's matrices, the embedding and the head are split over ranks.

By :func:`split` also in composition: FSDP2 and the engine then shard what each rank has.
"""

from collections.abc import Iterator
from typing import final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, parallel

from refshard.errors import UnsupportedError
from refshard.models.llama import Llama
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.context import splitting
from refshard.strategies.deferred import fill
from refshard.strategies.loop import PlainLoop, autocast
from refshard.strategies.optimizer import announce_muon, muon_over_dtensors
from refshard.strategies.stages import Stage, layers_of, recomputed
from refshard.strategies.world import World


@final
class TensorParallel(Strategy):
    """All ranks split the model and work on the same tokens; nothing else is sharded."""

    _model: Llama

    def wrap(self, model: Llama, world: World) -> Loop:
        self._model, self._world = model, world
        split(model, world.data, by_sequence=world.case.job.sequence_parallel)
        fill(model, world)
        return PlainLoop(
            model, world, computing=autocast(world), stepping=splitting(model, world), whole=muon_over_dtensors
        )

    def wrapped_units(self) -> tuple[str, ...]:
        return tuple(n for n, m in self._model.named_modules() if isinstance(getattr(m, "weight", None), DTensor))

    def announced(self) -> tuple[CollectiveCount, ...]:
        if self._world.shards == 1:
            return ()
        issued = announce_split(self._model, self._world, torch.float32)
        return count_collectives([*issued, *announce_muon(self._model, self._world.case)])

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield name, (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def split(part: Llama | Stage, mesh: DeviceMesh, *, by_sequence: bool = False) -> None:
    """Split a model, or a stage of it, in place over the ranks of ``mesh``, as Megatron does: heads and feed-forward by
    columns, the next matrices by rows, embedding and head by vocabulary. Norms are whole on every rank.

    ``by_sequence`` splits norms and the residual stream along the sequence, as torchtitan does, and leaves logits split
    by vocabulary: a loss must then be computed within torch's ``loss_parallel()``.

    Raises:
        UnsupportedError: the ranks do not divide the model.
    """
    spec, ranks = part.spec, mesh.size()
    if not all(parameter.requires_grad for parameter in part.parameters()):
        raise UnsupportedError("torch's parallelize_module splits plain linear layers, not adapted ones")
    if spec.query_norm:
        raise UnsupportedError(
            "norms of queries and keys see one rank's heads only, and nothing here sums their gradients, got "
            "query_norm = true"
        )
    for what in ("n_kv_heads", "ffn_dim", "vocab"):
        if getattr(spec, what) % ranks:
            raise UnsupportedError(f"{ranks} ranks cannot split {what} = {getattr(spec, what)} evenly")
    # Queries, keys and values share one input, so its gradients are summed before they are reduced.
    whole = Replicate()
    outside: Placement = Shard(1) if by_sequence else whole
    columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel(output_layouts=outside)
    norms = ("input_layernorm", "post_attention_layernorm") if by_sequence else ()
    styles: dict[str, parallel.ParallelStyle] = {
        **dict.fromkeys(norms, parallel.SequenceParallel()),
        "self_attn": parallel.PrepareModuleInput(
            input_layouts=(outside, None, None), desired_input_layouts=(whole, None, None)
        ),
        **{f"self_attn.{name}_proj": columns for name in "qkv"}, "self_attn.o_proj": rows,
        "mlp": parallel.PrepareModuleInput(input_layouts=outside, desired_input_layouts=whole),
        **{f"mlp.{name}_proj": columns for name in ("gate", "up")}, "mlp.down_proj": rows,
    }  # fmt: skip
    for block in layers_of(part):
        parallel.parallelize_module(block, mesh, styles)
    ends = {
        "model.embed_tokens": parallel.RowwiseParallel(input_layouts=whole, output_layouts=outside),
        "model.norm": parallel.SequenceParallel() if by_sequence else None,
        "lm_head": parallel.ColwiseParallel(
            input_layouts=outside, output_layouts=Shard(-1) if by_sequence else whole, use_local_output=not by_sequence
        ),
    }
    held = {name for name, _ in part.named_modules()}
    parallel.parallelize_module(part, mesh, {name: style for name, style in ends.items() if style and name in held})
    if isinstance(part, Llama):
        part.tie_weights()


def announce_split(part: Llama | Stage, world: World, residual: torch.dtype) -> Iterator[tuple[str, int]]:
    """``(op, bytes)`` of the collectives of :func:`split` in a step, with a residual stream of dtype ``residual``."""
    first, last = (True, True) if isinstance(part, Llama) else (part.first, part.last)
    announce = _of_sequences if world.case.job.sequence_parallel else _of_sums
    for _ in range(world.case.job.microbatches):
        yield from announce(part, world, residual, first, last)
    if world.case.job.sequence_parallel and world.case.job.workload == "training":
        # Gradients of norms. A pipeline adds them up before FSDP2 takes them, in what it reduces in.
        times, dtype = (world.case.job.microbatches, residual) if world.pipeline is None else (1, world.reduced)
        yield from [("all_reduce", part.spec.dim * dtype.itemsize)] * (2 * len(layers_of(part)) + last) * times


def _of_sums(
    part: Llama | Stage, world: World, residual: torch.dtype, first: bool, last: bool
) -> Iterator[tuple[str, int]]:
    """Hidden states are summed after the embedding and after each product by rows, and in backward their gradients
    before each product by columns; logits are gathered. Recomputation repeats a layer's sums, except the last, which
    its backward does not need.
    """
    layers, tokens = len(layers_of(part)), world.case.job.microbatch * world.tokens
    products, residuals = 2 * layers, int(first)
    if world.case.job.workload == "training":
        products += recomputed(part, world.case)
        residuals += 2 * layers + last
    yield from [("all_reduce", tokens * part.spec.dim * world.computed.itemsize)] * products
    yield from [("all_reduce", tokens * part.spec.dim * residual.itemsize)] * residuals
    if last:
        yield "all_gather", tokens * part.spec.vocab * world.computed.itemsize


def _of_sequences(
    part: Llama | Stage, world: World, residual: torch.dtype, first: bool, last: bool
) -> Iterator[tuple[str, int]]:
    """As :func:`_of_sums`, but a sum leaves each rank its part of the sequence, which is gathered before each product
    by columns, and in backward the other way round. The loss reduces three numbers of each token.
    """
    layers, tokens = len(layers_of(part)), world.case.job.microbatch * world.tokens
    computed, kept = (tokens * part.spec.dim * dtype.itemsize for dtype in (world.computed, residual))
    yield from [("all_gather", kept)] * (2 * layers + last) + [("reduce_scatter", kept)] * first
    yield from [("reduce_scatter", computed)] * 2 * layers
    yield from [("all_reduce", tokens * torch.float32.itemsize)] * 3 * last
    if world.case.job.workload == "training":
        again = recomputed(part, world.case)
        yield from [("all_gather", computed)] * 2 * layers + [("all_gather", kept)] * (first + 2 * again)
        yield from [("reduce_scatter", kept)] * (2 * layers + last) + [("reduce_scatter", computed)] * again
