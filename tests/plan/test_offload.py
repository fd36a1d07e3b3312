"""Masters and optimizer state in the host's memory: what their copies add to a step."""

import msgspec
import pytest

from refshard.errors import SpecError
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.model import load_model
from tests.plan.made import cluster, estimated, job

MODEL = load_model("llama3-8b")
LINK = 1e9


def linked(bytes_per_s: float = LINK) -> ClusterSpec:
    """8 H100s of which a link to the host carries so much."""
    on = load_cluster("dgx-h100")
    sources = {**on.accelerator.sources, "host_link_bytes_per_s": "made for a test"}
    hardware = msgspec.structs.replace(on.accelerator, host_link_bytes_per_s=bytes_per_s, sources=sources)
    return msgspec.structs.replace(on, hardware=hardware)


@pytest.mark.parametrize(("microbatches", "each", "copied"), [(1, True, 12), (2, True, 24), (2, False, 20)])
def test_a_slow_link_copies_masters_for_each_gather_and_gradients_for_each_reduction(
    microbatches: int, each: bool, copied: int
) -> None:
    """4 bytes each: two gathers a microbatch, and a reduction a microbatch or a step. What compute hides does not
    count, and the GPU's optimizer does nothing.
    """
    fields = {"dp_shard": 8, "microbatches": microbatches, "reduce_each": each}
    there, here = estimated(job(offload=True, **fields), job(**fields), cluster=linked()).step_s
    found = estimated(job(offload=True, **fields), cluster=linked())
    copies = copied * MODEL.params / 8 / LINK
    optimizer = estimated(job(**fields), cluster=linked()).optimizer_s[0]
    assert found.optimizer_s[0] == 0
    assert there == pytest.approx(here - optimizer + copies - found.compute_s[0])


def test_a_quick_link_hides_beside_compute() -> None:
    fields = {"dp_shard": 8, "checkpointing": "full"}
    there, here = (estimated(job(offload=flag, **fields), cluster=linked(1e12)) for flag in (True, False))
    assert there.exchange_s[0] == here.exchange_s[0]
    assert there.step_s[0] == pytest.approx(here.step_s[0] - here.optimizer_s[0])


def test_without_the_links_rate_it_is_refused() -> None:
    with pytest.raises(SpecError, match="host_link_bytes_per_s must be known, got 0; add it to the profile"):
        estimated(job(dp_shard=8, offload=True), cluster=linked(0.0))


def test_adamw_moves_28_bytes_of_each_element_and_clipping_12() -> None:
    """fp32: weight, gradient and two moments are read, all but the gradient written; the norm reads, scaling reads and
    writes.
    """
    found = estimated(job(dp_shard=8), cluster=cluster())
    assert found.optimizer_s[0] == pytest.approx((28 + 12) * load_model("llama3-8b").params / 8 / 1e12)
