"""What the model of a Llama's layers says, held against the layers as torch runs them, to the byte and in order."""

from collections.abc import Iterator

import pytest
import torch

from refshard.models.activation import checkpoint_layers
from refshard.models.llama import Llama, next_token_loss
from refshard.simulate.activations import block_call, embedding_call, head_call, loss_call
from refshard.simulate.kernels import Batch
from refshard.simulate.tape import Change, climb, net
from refshard.simulate.tensors import Tensors
from refshard.specs.hardware import Dtype
from refshard.specs.model import ModelSpec
from tests.simulate.live import LiveBytes, turns

LAYERS = 3


def spec(*, kv_heads: int = 2, tied: bool = False) -> ModelSpec:
    return ModelSpec(
        dim=64, n_layers=LAYERS, n_heads=4, n_kv_heads=kv_heads, ffn_dim=160, vocab=96, norm_eps=1e-5,
        rope_theta=1e4, tied=tied, params=1, source="a test",
    )  # fmt: skip


def changes(t: Tensors, checkpointed: frozenset[int]) -> Iterator[Change]:
    """A whole pass, from the first block on."""
    blocks = [block_call(t, recompute="all" if i in checkpointed else "nothing", first=i == 0) for i in range(LAYERS)]
    head, loss, embedding = head_call(t), loss_call(t), embedding_call(t)
    for part in (*(b.forward for b in blocks), head.forward, loss.forward, loss.backward, head.backward):
        yield from part
    for block in reversed(blocks):
        yield from block.backward
    yield from embedding.backward


def predicted(t: Tensors, checkpointed: frozenset[int]) -> list[int]:
    """Levels as :class:`LiveBytes` takes them, where each parameter keeps its gradient."""
    levels = [net(embedding_call(t).forward)]
    for change in changes(t, checkpointed):
        levels.append(levels[-1] + (0 if change.arrived else change.nbytes))
    return levels


def measured(model: ModelSpec, sequences: int, seq_len: int, dtype: torch.dtype, policy: str) -> list[int]:
    torch.manual_seed(0)
    llama = Llama(model).to(dtype)
    llama.tie_weights()
    checkpoint_layers(llama, policy)
    tokens = torch.randint(model.vocab, (sequences, seq_len))
    started: list[int] = []
    llama.model.layers[0].register_forward_pre_hook(lambda *_: started.append(len(live.levels)))
    with LiveBytes() as live:
        next_token_loss(llama(tokens), tokens).backward()
        live.levels.append(live.total())
    return live.levels[started[0] :]


@pytest.mark.parametrize("policy", ["none", "full", "every-2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("kv_heads", "tied", "sequences"), [(2, False, 1), (4, False, 2), (2, True, 2)])
def test_a_pass_rises_and_falls_as_torch_has_it(
    kv_heads: int, tied: bool, sequences: int, dtype: Dtype, policy: str
) -> None:
    model = spec(kv_heads=kv_heads, tied=tied)
    checkpointed = {"none": frozenset[int](), "full": frozenset(range(LAYERS)), "every-2": frozenset({1})}[policy]
    t = Tensors(model, Batch(sequences=sequences, seq_len=24, dtype=dtype), "cpu")
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    assert turns(predicted(t, checkpointed)) == turns(measured(model, sequences, 24, torch_dtype, policy))
