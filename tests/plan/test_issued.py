"""What a rank issues in a step, by hand; dry runs hold it to the real code in ``tests/dryrun/test_closed_forms.py``."""

import pytest

from refshard.plan.kernels import Share
from refshard.plan.layers import around_products
from refshard.specs.model import load_model
from tests.plan.issued import issued_by_rank
from tests.plan.made import job

MODEL, SEQ_LEN = load_model("llama3-8b"), 8192
HIDDEN = 2 * SEQ_LEN * MODEL.dim


def test_fsdp_gathers_each_layer_twice_and_reduces_it_once() -> None:
    """What lies around the layers stays gathered."""
    found = issued_by_rank(MODEL, job(dp_shard=8))
    assert set(found) == {"all_gather", "reduce_scatter"}
    assert found["all_gather"][0] == 2 * MODEL.n_layers + 1
    assert found["reduce_scatter"] == pytest.approx((MODEL.n_layers + 1, 4 * MODEL.params))


def test_replicas_sum_their_shards() -> None:
    found = issued_by_rank(MODEL, job(dp_shard=8, dp_replicate=2))
    assert found["all_reduce"] == pytest.approx((MODEL.n_layers + 1, 4 * MODEL.params / 8))


def test_ddp_reduces_once_a_step() -> None:
    found = issued_by_rank(MODEL, job(strategy="ddp", dp_shard=8, microbatches=4))
    assert found == {"all_reduce": pytest.approx((1, 4 * MODEL.params))}


def test_a_layers_last_sum_is_not_computed_again() -> None:
    share = Share(sequences=1, seq_len=SEQ_LEN, tp=4)
    for which, scatters in (("forward", 2), ("backward", 2), ("again", 1)):
        gather, scatter = around_products(MODEL, share, which)  # type: ignore[arg-type]
        assert (gather.count, gather.nbytes) == (2, HIDDEN)
        assert (scatter.count, scatter.nbytes) == (scatters, HIDDEN)


def test_each_end_of_a_pipeline_has_one_neighbour() -> None:
    """A message each way for each microbatch."""
    one = job(dp_shard=8, pp=4, microbatches=8)
    sent = [issued_by_rank(MODEL, one, rank)["send"] for rank in range(4)]
    assert sent == [(8 * n, 8 * n * HIDDEN) for n in (1, 2, 2, 1)]
    assert all(issued_by_rank(MODEL, one, rank)["recv"] == sent[rank] for rank in range(4))


def test_context_parallel_ranks_gather_keys_and_values_and_pass_gradients_on() -> None:
    found = issued_by_rank(MODEL, job(cp=2, checkpointing="full"))
    both = 2 * SEQ_LEN / 2 * MODEL.n_kv_heads * MODEL.head_dim
    assert found["all_to_all"] == pytest.approx((2 * MODEL.n_layers, 2 * MODEL.n_layers * 4 * both))
    gathered = 3 * MODEL.n_layers * 2 * 2 * both
    plain = issued_by_rank(MODEL, job(dp_shard=2, checkpointing="full"))
    assert found["all_gather"][1] - plain["all_gather"][1] == pytest.approx(gathered)
