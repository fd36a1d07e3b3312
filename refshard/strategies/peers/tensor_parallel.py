"""torch's tensor parallelism: every block's matrices, the embedding and the head are split over ranks.

By :func:`split` also in composition: FSDP2 and the engine then shard what each rank has.
"""

from collections.abc import Iterator
from typing import final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from refshard.errors import UnsupportedError
from refshard.models.llama import Llama
from refshard.plan.checkpointing import checkpointing_of
from refshard.records import CollectiveCount
from refshard.strategies.base import Loop, Strategy, count_collectives
from refshard.strategies.deferred import fill
from refshard.strategies.loop import PlainLoop, autocast
from refshard.strategies.muon_over_dtensors import announce_muon, muon_over_dtensors
from refshard.strategies.world import World


@final
class TensorParallel(Strategy):
    """All ranks split the model and work on the same tokens; nothing else is sharded."""

    _model: Llama

    def wrap(self, model: Llama, world: World) -> Loop:
        """See :meth:`Strategy.wrap`."""
        self._model, self._world = model, world
        split(model, world.data)
        fill(model, world)
        return PlainLoop(model, world, computing=autocast(world), muon=muon_over_dtensors)

    def wrapped_units(self) -> tuple[str, ...]:
        """See :meth:`Strategy.wrapped_units`: the modules whose weight is split."""
        return tuple(n for n, m in self._model.named_modules() if isinstance(getattr(m, "weight", None), DTensor))

    def announced(self) -> tuple[CollectiveCount, ...]:
        """See :meth:`Strategy.announced`; one rank has nobody to sum with."""
        if self._world.shards == 1:
            return ()
        issued = [*announce_split(self._model, self._world, torch.float32)]
        return count_collectives([*issued, *announce_muon(self._model, self._world.case)])

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`Strategy.full_parameters`."""
        for name, parameter in self._model.named_parameters():
            yield name, (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def split(model: Llama, mesh: DeviceMesh) -> None:
    """Split ``model`` in place over the ranks of ``mesh``, as Megatron does: heads and feed-forward by columns, what
    follows them by rows, embedding and head by vocabulary. Norms are whole on every rank.

    Raises:
        UnsupportedError: the ranks do not divide the model.
    """
    spec, ranks = model.spec, mesh.size()
    if not all(parameter.requires_grad for parameter in model.parameters()):
        raise UnsupportedError("torch's parallelize_module splits plain linear layers, not adapted ones")
    if spec.query_norm:
        raise UnsupportedError(
            "norms of queries and keys see one rank's heads only, and nothing here sums their gradients, got "
            "query_norm = true"
        )
    for what in ("n_kv_heads", "ffn_dim", "vocab"):
        if getattr(spec, what) % ranks:
            raise UnsupportedError(f"{ranks} ranks cannot split {what} = {getattr(spec, what)} evenly")
    columns, rows = ColwiseParallel(), RowwiseParallel()
    # Queries, keys and values share one input, whose gradients are then summed before they are reduced.
    whole = Replicate()
    styles = {
        "self_attn": PrepareModuleInput(input_layouts=(whole, None, None), desired_input_layouts=(whole, None, None)),
        **{f"self_attn.{name}_proj": columns for name in "qkv"},
        "self_attn.o_proj": rows,
        "mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        **{f"mlp.{name}_proj": columns for name in ("gate", "up")},
        "mlp.down_proj": rows,
    }
    for block in model.model.layers:
        parallelize_module(block, mesh, styles)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole),
        "lm_head": ColwiseParallel(output_layouts=whole),
    }
    parallelize_module(model, mesh, ends)
    model.tie_weights()


def announce_split(model: Llama, world: World, residual: torch.dtype) -> Iterator[tuple[str, int]]:
    """``(op, bytes)`` of what :func:`split` communicates in a step, where the residual stream is of dtype ``residual``.

    Hidden states are summed after the embedding and after each product by rows, and in backward their gradients before
    each product by columns; logits are gathered. What is recomputed is summed again, but for a layer's last sum, which
    nothing in its backward needs.
    """
    case, layers = world.case, model.spec.n_layers
    tokens = case.global_batch // case.data_ranks // case.microbatches * case.seq_len
    products, residuals = 2 * layers, 1
    if case.workload == "training":
        products += len(checkpointing_of(case.checkpointing, layers).layers)
        residuals += 2 * layers + 1
    for _ in range(case.microbatches):
        yield from [("all_reduce", tokens * model.spec.dim * world.computed.itemsize)] * products
        yield from [("all_reduce", tokens * model.spec.dim * residual.itemsize)] * residuals
        yield "all_gather", tokens * model.spec.vocab * world.computed.itemsize
