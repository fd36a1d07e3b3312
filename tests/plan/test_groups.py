"""Where groups lie, against the ranks that they have."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.costs import collective_cost, group_shape
from refshard.plan.collectives import Groups, group_of
from refshard.specs.cluster import CollectiveOp, load_cluster
from tests.plan.made import cluster, columns, job

POWERS = st.sampled_from([1, 2, 4, 8, 16])


@given(per_node=st.sampled_from([1, 2, 4, 8, 16]), size=POWERS, stride=POWERS, first=st.integers(0, 7))
def test_a_group_lies_on_nodes_as_its_ranks_do(per_node: int, size: int, stride: int, first: int) -> None:
    """Sizes that are powers of two; the group begins at a multiple of its span, or within one stride of it."""
    on = cluster(ranks_per_node=per_node, nodes=1024)
    begin = first * size * stride + min(first, stride - 1)
    ranks = [begin + place * stride for place in range(size)]
    assert group_of(on, size, stride) == group_shape(on, ranks)


@given(per_node=st.integers(1, 72), size=st.integers(1, 100), stride=st.integers(1, 100))
def test_an_uneven_group_has_all_of_its_ranks_and_is_never_taken_to_lie_closer(
    per_node: int, size: int, stride: int
) -> None:
    shape = group_of(cluster(ranks_per_node=per_node, nodes=1024), size, stride)
    assert shape.ranks == size == shape.nodes * shape.per_node
    assert shape.nodes >= len({place * stride // per_node for place in range(size)})


MESHES = [
    job(dp_shard=8), job(dp_shard=4, dp_replicate=4), job(dp_shard=16, dp_replicate=2, tp=4),
    job(dp_shard=2, dp_replicate=2, tp=2, cp=2), job(dp_shard=4, tp=8, pp=2),
    job(strategy="ddp", dp_shard=16),
]  # fmt: skip


def groups_of(sizes: Sequence[int], axes: Sequence[int]) -> list[int]:
    """The ranks of the first group along ``axes`` of a mesh, innermost axis first."""
    ranks = np.arange(np.prod(sizes)).reshape(sizes[::-1])
    chosen = tuple(slice(None) if axis in axes else 0 for axis in reversed(range(len(sizes))))
    return [int(rank) for rank in ranks[chosen].ravel()]


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_collectives_take_what_they_take_over_their_ranks(op: CollectiveOp) -> None:
    """The mesh is tensor, context, shard, replicate and pipeline from the inside out."""
    on = load_cluster("dgx-h100x16")
    nbytes = 123_456_789.0
    groups, rows = Groups(on, columns(*MESHES)), np.full(len(MESHES), nbytes)
    found = {
        (1, 2): groups.seconds("shards", op, rows), (3,): groups.seconds("replicas", op, rows),
        (1, 2, 3): groups.seconds("all", op, rows),
    }  # fmt: skip
    for axes, seconds in found.items():
        for one, taken in zip(MESHES, seconds):
            shard, replicate = (1, one.data_ranks) if one.strategy == "ddp" else (one.dp_shard, one.dp_replicate)
            ranks = groups_of([one.tp, one.cp, shard, replicate, one.pp], axes)
            expected = collective_cost(on, op, round(nbytes), group_shape(on, ranks))
            assert taken == pytest.approx(expected.seconds), (one, axes)
    latency = groups.latency("shards", op, rows)
    assert (latency <= found[1, 2]).all()
    assert latency[0] > 0
    assert latency[-1] == found[1, 2][-1] == 0
