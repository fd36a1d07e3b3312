"""What the model of a Llama's layers says, held against the layers as torch runs them, to the byte and in order."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from refshard.memory.activations import block_call, embedding_call, head_call, loss_call
from refshard.memory.tape import Change
from refshard.memory.tensors import Batch, Tensors
from refshard.models.activation import checkpoint_layers
from refshard.models.llama import Llama, next_token_loss
from refshard.specs.hardware import Dtype
from refshard.specs.layers import Recompute
from refshard.specs.model import ModelSpec
from tests.memory.fused import computes_as_on_cuda
from tests.memory.live import LiveBytes, turns

LAYERS = 3


def spec(*, kv_heads: int = 2, tied: bool = False, vocab: int = 96) -> ModelSpec:
    return ModelSpec(
        dim=64, n_layers=LAYERS, n_heads=4, n_kv_heads=kv_heads, ffn_dim=160, vocab=vocab, norm_eps=1e-5,
        rope_theta=1e4, tied=tied, params=1, source="a test",
    )  # fmt: skip


RECOMPUTES: dict[str, tuple[Recompute, ...]] = {
    "none": ("nothing", "nothing", "nothing"),
    "full": ("all", "all", "all"),
    "every-2": ("nothing", "all", "nothing"),
    "by op": ("some", "some", "some"),
}
"""What of each layer is computed again, by policy."""


def changes(t: Tensors, policy: str) -> Iterator[Change]:
    """A whole pass, from the first block on."""
    blocks = [block_call(t, recompute=what, first=i == 0) for i, what in enumerate(RECOMPUTES[policy])]
    head, loss, embedding = head_call(t), loss_call(t), embedding_call(t)
    for part in (*(b.forward for b in blocks), head.forward, loss.forward, loss.backward, head.backward):
        yield from part
    for block in reversed(blocks):
        yield from block.backward
    yield from embedding.backward


def predicted(t: Tensors, policy: str) -> list[int]:
    """Levels as :class:`LiveBytes` takes them, where each parameter keeps its gradient."""
    levels = [sum(change.nbytes for change in embedding_call(t).forward)]
    for change in changes(t, policy):
        levels.append(levels[-1] + (0 if change.arrived else change.nbytes))
    return levels


def measured(
    model: ModelSpec, sequences: int, seq_len: int, dtype: torch.dtype, policy: str, *, cuda: bool = False
) -> list[int]:
    llama = Llama(model).to(dtype)
    llama.tie_weights()
    for module in (*llama.model.layers, llama.model.norm) if cuda else ():
        computes_as_on_cuda(module)
    if policy == "by op":
        checkpoint_by_op(llama)
    else:
        checkpoint_layers(llama, policy)
    tokens = torch.randint(model.vocab, (sequences, seq_len))
    live, started = LiveBytes(), list[int]()
    llama.model.layers[0].register_forward_pre_hook(lambda *_: started.append(len(live.levels)))
    with live:
        next_token_loss(llama(tokens), tokens).backward()
        live.levels.append(live.total())
    return live.levels[started[0] :]


def checkpoint_by_op(model: Llama) -> None:
    """As torchtitan does, keep what attention and every second matrix product return."""
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=_kept_by_op)


def _kept_by_op() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    product, products = torch.ops.aten.mm.default, Counter[bool]()
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def policy(context: Any, op: object, *_: object, **__: object) -> CheckpointPolicy:
        products[context.is_recompute] += op is product
        kept = op is attention or (op is product and products[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[AbstractContextManager[object], AbstractContextManager[object]]
    contexts = create_selective_checkpoint_contexts(policy)
    return contexts


@pytest.mark.parametrize("policy", RECOMPUTES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("kv_heads", "tied", "sequences"), [(2, False, 1), (4, False, 2), (2, True, 2)])
def test_a_pass_rises_and_falls_as_torch_has_it(
    kv_heads: int, tied: bool, sequences: int, dtype: Dtype, policy: str
) -> None:
    model = spec(kv_heads=kv_heads, tied=tied)
    t = Tensors(model, Batch(sequences=sequences, seq_len=24, dtype=dtype), "cpu")
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    assert turns(predicted(t, policy)) == turns(measured(model, sequences, 24, torch_dtype, policy))


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_pass_with_cudas_kernels_rises_and_falls_as_they_make_and_save(kv_heads: int, policy: str) -> None:
    """Sizes are multiples of what CUDA's allocator rounds to, and of what its kernels do."""
    model = msgspec.structs.replace(spec(kv_heads=kv_heads), dim=256, ffn_dim=640, head_dim=0)
    t = Tensors(model, Batch(sequences=2, seq_len=128, dtype="bf16"), "cuda")
    assert turns(predicted(t, policy)) == turns(measured(model, 2, 128, torch.bfloat16, policy, cuda=True))
