"""torch's context parallelism: ranks split every sequence, and attention passes keys and values around a ring."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.distributed.tensor.parallel import loss_parallel

from refshard.models.data import Batch, Tokens
from refshard.models.llama import Llama
from refshard.strategies.loop import StepContext
from refshard.strategies.stages import Stage, layers_of, recomputed
from refshard.strategies.world import World

_SEQUENCE = 2
"""The dimension of queries, keys and values (B, H, T, Q) that is split."""


def splitting(model: nn.Module, world: World) -> StepContext:
    """The context of a step: its batch split by sequence, its loss by vocabulary, if the case asks for it."""
    positions = list[Tensor]()
    if world.context is not None:
        assert isinstance(model, Llama)
        _attention.custom_ops.update(_FOR_CPU)
        positions.append(torch.arange(world.case.job.seq_len, device=world.device))
        model.model.positions = positions[0]

    def context(batch: Batch) -> AbstractContextManager[object]:
        stack = ExitStack()
        if world.context is not None:
            assert isinstance(batch, Tokens)
            split = [batch.inputs, batch.targets, *positions]
            stack.enter_context(context_parallel(world.context, buffers=split, buffer_seq_dims=[1, 1, 0]))
        if world.case.job.sequence_parallel:
            stack.enter_context(loss_parallel())
        return stack

    return context


def announce_rings(part: Llama | Stage, world: World) -> Iterator[tuple[str, int]]:
    """``(op, bytes)`` of a step's attention: each pass gathers keys and values, and their gradients go from rank to
    rank, in fp32.
    """
    case, layers = world.case, len(layers_of(part))
    numel = world.case.job.microbatch * world.tokens * 2 * part.spec.n_kv_heads // case.job.tp * part.spec.head_dim
    gathers = layers
    if case.job.workload == "training":
        gathers += layers + (0 if case.job.checkpointing == "selective" else recomputed(part, case))
        messages = layers * case.job.cp * case.job.microbatches
        yield from [("all_to_all", numel * torch.float32.itemsize)] * messages
    size = numel * case.job.cp * world.computed.itemsize
    yield from [("all_gather", size)] * (gathers * case.job.microbatches)


def _forward_on_cpu(_: Any, args: Any, kwargs: Any) -> tuple[DTensor, DTensor]:
    """As torch's own handlers of attention's other kernels; it has none for the CPU's."""
    query, key, value, *rest = args
    causal = rest[1] if len(rest) > 1 else kwargs.get("is_causal", False)
    out, logsumexp = _attention._templated_ring_attention(
        query.device_mesh.get_group(), _SEQUENCE, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        query.to_local(), key.to_local(), value.to_local(), is_causal=causal, scale=kwargs.get("scale"),
    )  # fmt: skip
    return _split(out, query.device_mesh), _split(logsumexp, query.device_mesh)


def _backward_on_cpu(_: Any, args: Any, kwargs: Any) -> tuple[DTensor, ...]:
    grad_out, query, key, value, out, logsumexp, dropout_p, causal = args
    names = {"query": query, "key": key, "value": value, "out": out, "logsumexp": logsumexp}
    grads = _attention._templated_ring_attention_backward(
        query.device_mesh.get_group(), _SEQUENCE,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        grad_out=grad_out.to_local(), grad_out_name="grad_out", is_causal=causal, dropout_p=dropout_p,
        scale=kwargs.get("scale"), **{name: tensor.to_local() for name, tensor in names.items()},
    )  # fmt: skip
    return tuple(_split(grad, query.device_mesh) for grad in grads)


def _split(local: Tensor, mesh: DeviceMesh) -> DTensor:
    made: DTensor = DTensor.from_local(local, mesh, [Shard(_SEQUENCE)], run_check=False)
    return made


_FOR_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _forward_on_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward_on_cpu,
}
