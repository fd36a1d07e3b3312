"""Adapters, optimizers and one GPU: closed forms beside arithmetic by hand; dry runs hold the whole
(tests/dryrun/test_closed_forms.py).
"""

import pytest
import torch

from refshard.errors import SpecError
from refshard.flops import adapter_count
from refshard.plan.adapters import NF4_BYTES
from refshard.plan.cost_models import STATE_BYTES
from refshard.specs.cluster import load_cluster
from refshard.specs.model import load_model
from refshard.specs.tuning import Lora
from tests.plan.made import cluster, estimated, job

MODEL = load_model("llama3-8b")
ONE = {"strategy": "single", "seq_len": 8192}


def test_bytes_in_nf4_are_those_of_the_layer_that_strategies_shard() -> None:
    pytest.importorskip("bitsandbytes", reason="QLoRA needs the extra 'peers'")
    from refshard.models.nf4 import Nf4Linear

    packed = Nf4Linear(torch.zeros(512, 1024)).weight
    assert packed.nbytes == pytest.approx(512 * 1024 * NF4_BYTES, rel=1e-3)


def test_what_is_frozen_has_neither_gradients_nor_state() -> None:
    """bf16 adapters have bf16 gradients and averages; the base has 2 bytes an element, or half a byte in its blocks."""
    found = estimated(job(**ONE, tuning="lora"), job(**ONE, tuning="qlora"), job(**ONE, tuning="lora", lora_rank=16))
    adapters = adapter_count(MODEL, Lora())
    assert found.memory.optimizer.tolist() == [4 * adapters, 4 * adapters, 8 * adapters]
    assert found.memory.gradients.tolist() == [2 * adapters, 2 * adapters, 4 * adapters]
    assert found.memory.masters[0] == pytest.approx(2 * (MODEL.params + adapters))
    blocks = MODEL.params - 2 * MODEL.vocab * MODEL.dim - MODEL.dim
    ends = MODEL.params - blocks
    assert found.memory.masters[1] == pytest.approx(2 * (ends + adapters) + NF4_BYTES * blocks)


def test_fewer_targets_save_less_for_backward() -> None:
    rows = [job(**ONE, tuning="lora", lora_targets=targets) for targets in ("q_proj,v_proj", "all-linear")]
    few, all_ = estimated(*rows).memory.activations
    # Each of the other five keeps its input behind dropout, a mask of one byte, and what comes of its first product.
    widths, rank = 4 * MODEL.dim + MODEL.ffn_dim, Lora().rank
    masks = MODEL.dim * 8192  # k_proj's of the first layer, whose input needs no gradient
    assert all_ - few == pytest.approx(32 * 8192 * (3 * widths + 5 * 2 * rank) - masks, rel=1e-3)


def test_backward_computes_no_gradients_of_frozen_weights() -> None:
    some = {"lora_targets": "q_proj,v_proj"}
    rows = [job(**ONE), job(**ONE, tuning="lora", **some), job(**ONE, tuning="qlora", **some)]
    full, lora, qlora = estimated(*rows).compute_s
    assert lora < 0.85 * full
    assert lora < qlora, "which also dequantises each weight in each pass"


def test_adapters_beyond_data_parallelism_and_of_experts_are_refused() -> None:
    with pytest.raises(SpecError, match="closed forms of data parallelism alone; leave tp, cp, pp, ep at 1"):
        estimated(job(tp=2, tuning="lora"))
    with pytest.raises(SpecError, match="adapters of a mixture of experts have no closed form"):
        estimated(job(tuning="lora"), model="mixtral-8x7b")


@pytest.mark.parametrize(
    ("optimizer", "state", "moved"), [("adamw", 8, 28), ("adamw-8bit", 2 + 1 / 32, 16), ("sgd", 4, 32)]
)
def test_an_optimizers_state_and_what_it_moves(optimizer: str, state: float, moved: int) -> None:
    found = estimated(job(**ONE, optimizer=optimizer), cluster=cluster())
    assert found.memory.optimizer[0] == pytest.approx(state * MODEL.params)
    assert found.optimizer_s[0] == pytest.approx((moved + 12) * MODEL.params / 1e12)
    assert STATE_BYTES[optimizer] == state


def test_muon_has_one_average_of_the_blocks_matrices_and_adamw_two_of_all_else() -> None:
    found = estimated(job(**ONE, optimizer="muon"), cluster=cluster())
    ends = 2 * MODEL.vocab * MODEL.dim
    assert found.memory.optimizer[0] == pytest.approx(4 * MODEL.params + 4 * ends, rel=1e-3)
    assert found.optimizer_s[0] > estimated(job(**ONE), cluster=cluster()).optimizer_s[0]


def test_adafactor_has_an_average_of_each_row_and_column() -> None:
    found = estimated(job(**ONE, optimizer="adafactor"), cluster=cluster())
    assert 4 * 2 * MODEL.vocab < found.memory.optimizer[0] < 0.01 * 4 * MODEL.params
    tuned = estimated(job(**ONE, tuning="lora", optimizer="adafactor"), cluster=cluster())
    assert 0 < tuned.memory.optimizer[0] < estimated(job(**ONE, tuning="lora"), cluster=cluster()).memory.optimizer[0]


def test_one_gpu_gathers_and_reduces_nothing() -> None:
    one, two = (estimated(job(**ONE, microbatches=count)) for count in (1, 2))
    assert one.exchange_s[0] == 0
    blocks = MODEL.params - 2 * MODEL.vocab * MODEL.dim
    added = blocks * (2 + 4 + 4) / load_cluster("dgx-h100").accelerator.as_in_closed_forms.memory_bytes_per_s
    assert two.exchange_s[0] == pytest.approx(2 * added, rel=0.01), "each microbatch's gradients are added to the sum"
