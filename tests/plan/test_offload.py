"""Masters and optimizer state in the host's memory: what their copies add to a step."""

import msgspec
import pytest

from refshard.errors import SpecError
from refshard.plan.search import search
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.model import load_model
from tests.plan.made import cluster, columns, estimated, hardware, job

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
    count, and the host steps the optimizer instead of the GPU.
    """
    fields = {"dp_shard": 8, "microbatches": microbatches, "reduce_each": each}
    there, here = estimated(job(offload=True, **fields), job(**fields), cluster=linked()).step_s
    found = estimated(job(offload=True, **fields), cluster=linked())
    copies = copied * MODEL.params / 8 / LINK
    optimizer = estimated(job(**fields), cluster=linked()).optimizer_s[0]
    assert there == pytest.approx(here + found.optimizer_s[0] - optimizer + copies - found.compute_s[0])


def test_a_quick_link_hides_beside_compute() -> None:
    fields = {"dp_shard": 8, "checkpointing": "full"}
    there, here = (estimated(job(offload=flag, **fields), cluster=linked(1e12)) for flag in (True, False))
    assert there.exchange_s[0] == here.exchange_s[0]
    assert there.step_s[0] == pytest.approx(here.step_s[0] + there.optimizer_s[0] - here.optimizer_s[0])
    assert there.optimizer_s[0] > here.optimizer_s[0], "so it is slower, never faster"


def test_all_ranks_of_a_node_share_the_rate_and_the_size_of_its_memory() -> None:
    """28 bytes of each element for AdamW, and 12 for clipping, at the node's rate; 16 bytes are held."""
    on = cluster(hardware=hardware(host_link_bytes_per_s=1e12))
    for ranks in (4, 8):
        found = estimated(job(dp_shard=ranks, offload=True), cluster=on.of_world_size(ranks))
        assert found.optimizer_s[0] == pytest.approx((28 + 12) * MODEL.params / on.host_memory_bytes_per_s)
        assert found.host_bytes[0] == pytest.approx(16 * MODEL.params)
    rows = columns(job(dp_shard=8, offload=True), job(dp_shard=8))
    small = msgspec.structs.replace(on, host_memory_bytes=int(15 * MODEL.params))
    assert search(MODEL, on, 8192, rows, 2**40).fits.tolist() == [True, True]
    assert search(MODEL, small, 8192, rows, 2**40).fits.tolist() == [False, True]


def test_without_the_rate_of_the_hosts_memory_it_is_refused() -> None:
    on = cluster(hardware=hardware(host_link_bytes_per_s=1e12), host_memory_bytes_per_s=0.0)
    with pytest.raises(SpecError, match="host_memory_bytes_per_s must be known, got 0; add it to the profile"):
        estimated(job(dp_shard=8, offload=True), cluster=on)


def test_without_the_links_rate_it_is_refused() -> None:
    with pytest.raises(SpecError, match="host_link_bytes_per_s must be known, got 0; add it to the profile"):
        estimated(job(dp_shard=8, offload=True), cluster=linked(0.0))


def test_adamw_moves_28_bytes_of_each_element_and_clipping_12() -> None:
    """fp32: weight, gradient and two moments are read, all but the gradient written; the norm reads, scaling reads and
    writes.
    """
    found = estimated(job(dp_shard=8), cluster=cluster())
    assert found.optimizer_s[0] == pytest.approx((28 + 12) * load_model("llama3-8b").params / 8 / 1e12)
