"""What collectives and kernels take: each law against values worked by hand, and what holds whatever the numbers."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.costs import (
    GroupShape,
    attention_seconds,
    bus_bandwidth,
    collective_cost,
    first_touch_seconds,
    group_shape,
    move_seconds,
    product_seconds,
)
from refshard.specs.cluster import (
    COLLECTIVES,
    ClusterSpec,
    CollectiveOp,
    LinkSpec,
    MeasuredCollective,
    QuickProtocol,
)
from refshard.specs.hardware import AttentionPoint, HardwareSpec, Rate, load_hardware

REDUCING: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter", "all_reduce")
SOURCES = dict.fromkeys(
    ("ranks_per_node", "within", "between", "launch_s", "quick", "compute_beside_communication"), "made up"
)


def hardware(**changes: Any) -> HardwareSpec:
    """1000 FLOP/s of which half is reached, 100 bytes a second, 1 s for any kernel."""
    fields: dict[str, Any] = {
        "device": "cuda",
        "memory_bytes": 1000,
        "memory_bytes_per_s": 100.0,
        "matmul": {"bf16": Rate(peak=1000, efficiency=0.5, overhead_s=2.0)},
        "attention": {"bf16": Rate(peak=1000, efficiency=0.25)},
        "kernel_s": 1.0,
        "host_s": 0.0,
    }
    fields |= changes
    return HardwareSpec(**fields, sources=dict.fromkeys(fields.keys() - {"device"}, "made up"))


def cluster(**changes: Any) -> ClusterSpec:
    """Two nodes of four: 100 bytes a second and 1 s a hop within, 40 bytes a second for a node and 10 s between."""
    fields: dict[str, Any] = {
        "hardware": hardware(),
        "library": "nccl",
        "ranks_per_node": 4,
        "nodes": 2,
        "within": LinkSpec(bytes_per_s=100, latency_s=1),
        "between": LinkSpec(bytes_per_s=40, latency_s=10),
        "launch_s": 0.5,
    }
    return ClusterSpec(**fields | changes, sources=SOURCES)


INSIDE, WHOLE, ACROSS = GroupShape(4, 1), GroupShape(8, 2), GroupShape(2, 2)


@pytest.mark.parametrize(
    ("op", "shape", "transfer_s", "latency_s"),
    [
        # 800 bytes: three quarters of them over 100 bytes/s, three hops of 1 s.
        ("all_gather", INSIDE, 800 * 3 / 4 / 100, 0.5 + 3),
        ("reduce_scatter", INSIDE, 800 * 3 / 4 / 100, 0.5 + 3),
        ("all_reduce", INSIDE, 2 * 800 * 3 / 4 / 100, 0.5 + 6),
        ("broadcast", INSIDE, 800 / 100, 0.5 + 3),
        # 200 bytes straight to each of three others.
        ("all_to_all", INSIDE, 3 * 200 / 100, 0.5 + 1),
        ("exchange", INSIDE, 3 * 200 / 100, 0.5 + 1),
        # Seven eighths over the node's 40 bytes/s; one hop between nodes, six within.
        ("all_gather", WHOLE, 800 * 7 / 8 / 40, 0.5 + 10 + 6),
        ("reduce_scatter", WHOLE, 800 * 7 / 8 / 40, 0.5 + 10 + 6),
        ("all_reduce", WHOLE, 2 * 800 * 7 / 8 / 40, 0.5 + 2 * (10 + 6)),
        ("broadcast", WHOLE, 800 / 40, 0.5 + 10 + 6),
        # Four ranks send 100 bytes to each of the four on the other node; inside, 100 bytes to each of three.
        ("all_to_all", WHOLE, max(4 * 4 * 100 / 40, 3 * 100 / 100), 0.5 + 10),
        # One rank a node has a quarter of what joins nodes: the other three groups of its kind have the rest.
        ("all_reduce", ACROSS, 2 * 800 / 2 / 10, 0.5 + 2 * 10),
        ("all_gather", ACROSS, 800 / 2 / 10, 0.5 + 10),
        ("exchange", ACROSS, 400 / 10, 0.5 + 10),
    ],
)
def test_a_ring_and_straight_exchanges(
    op: CollectiveOp, shape: GroupShape, transfer_s: float, latency_s: float
) -> None:
    cost = collective_cost(cluster(), op, 800, shape)
    assert [cost.transfer_s, cost.latency_s] == pytest.approx([transfer_s, latency_s])
    assert cost.seconds == pytest.approx(transfer_s + latency_s)
    assert cost.link == ("within" if shape.nodes == 1 else "between")
    assert cost.algorithm == ("straight" if op in ("all_to_all", "exchange") else "ring")


def test_a_tree_takes_small_all_reduces_and_a_ring_large_ones() -> None:
    many = cluster(algorithms=("ring", "tree"), nodes=8)
    shape = GroupShape(32, 8)
    small = collective_cost(many, "all_reduce", 40, shape)
    # Up and down: 2 log2(8) hops between nodes, 2 * 3 within; everything twice over the slower link.
    assert (small.algorithm, small.latency_s, small.transfer_s) == ("tree", 0.5 + 6 * 10 + 6, 2 * 40 / 40)
    assert collective_cost(many, "all_reduce", 1_000_000, shape).algorithm == "ring"
    assert collective_cost(many, "all_gather", 40, shape).algorithm == "ring"


def test_a_hierarchy_saves_hops_and_pays_in_bytes() -> None:
    layered = cluster(algorithms=("ring", "hierarchical"), nodes=16)
    shape = GroupShape(64, 16)
    few = collective_cost(layered, "all_gather", 64, shape)
    assert few.algorithm == "hierarchical"
    assert few.latency_s == 0.5 + 15 * 10 + 3
    assert few.transfer_s == pytest.approx(64 * 15 / 16 / 40 + 64 * 3 / 4 / 100)
    assert collective_cost(layered, "all_gather", 10**7, shape).algorithm == "ring"


def test_the_quick_protocol_takes_what_is_small() -> None:
    protocol = QuickProtocol(part=0.5, within_latency_s=0.1, between_latency_s=1.0, launch_s=0.2)
    both = cluster(quick=protocol)
    small, large = (collective_cost(both, "all_gather", size, WHOLE) for size in (80, 80_000))
    assert [small.transfer_s, small.latency_s] == pytest.approx([70 / 20, 0.2 + 1 + 0.6])
    assert large == collective_cost(cluster(), "all_gather", 80_000, WHOLE)


def test_a_group_of_one_costs_nothing() -> None:
    for op in COLLECTIVES:
        cost = collective_cost(cluster(), op, 10**9, GroupShape(1, 1))
        assert (cost.seconds, cost.algorithm) == (0.0, "none")


def test_a_group_lies_on_the_nodes_of_its_ranks() -> None:
    made = cluster(nodes=4)
    assert group_shape(made, range(16)) == GroupShape(16, 4)
    assert group_shape(made, range(4, 8)) == GroupShape(4, 1)
    assert group_shape(made, [1, 5, 9, 13]) == GroupShape(4, 4)
    assert group_shape(made, [0, 1, 4]) == GroupShape(4, 2), "as if both nodes had as many as the fuller one"


def test_replicate_groups_share_the_adapters_of_their_node() -> None:
    """Eight groups of one rank a node move as much as one group of eight ranks a node, in the same time."""
    big = cluster(ranks_per_node=8, nodes=16)
    one_of_eight = collective_cost(big, "all_reduce", 10**6, GroupShape(16, 16))
    alone = msgspec.structs.replace(big, ranks_per_node=1)
    with_all_to_itself = collective_cost(alone, "all_reduce", 10**6, GroupShape(16, 16))
    assert one_of_eight.transfer_s == pytest.approx(8 * with_all_to_itself.transfer_s)


def measured(*points: tuple[int, float], op: CollectiveOp = "all_gather") -> ClusterSpec:
    return cluster(
        measured=tuple(MeasuredCollective(op=op, ranks=8, nodes=2, bytes=size, seconds=s) for size, s in points)
    )


def test_measurements_go_first_and_are_interpolated() -> None:
    told = measured((1000, 6.0), (100, 2.0), (200, 3.0))
    found = {size: collective_cost(told, "all_gather", size, WHOLE) for size in (1, 100, 150, 600, 1000, 3000)}
    assert {size: cost.seconds for size, cost in found.items()} == pytest.approx(
        {1: 2.0, 100: 2.0, 150: 2.5, 600: 4.5, 1000: 6.0, 3000: 14.0}
    )
    assert {cost.latency_s for cost in found.values()} == {2.0}
    assert {cost.algorithm for cost in found.values()} == {"measured"}
    # Neither another operation nor another group was measured.
    assert collective_cost(told, "all_reduce", 100, WHOLE).algorithm == "ring"
    assert collective_cost(told, "all_gather", 100, INSIDE).algorithm == "ring"


def test_noise_makes_no_small_size_slower_than_a_large_one() -> None:
    noisy = measured((100, 9.0), (200, 3.0), (1000, 6.0))
    assert [collective_cost(noisy, "all_gather", size, WHOLE).seconds for size in (100, 200, 1000)] == [3.0, 3.0, 6.0]


def test_bus_bandwidth_is_what_nccl_tests_report() -> None:
    """Factors of nccl-tests' PERFORMANCE.md for eight ranks, on a size of 8 GB in two seconds."""
    factors = {op: bus_bandwidth(op, 8 * 10**9, 8, 2.0) / 4e9 for op in COLLECTIVES}
    assert factors == pytest.approx(
        {
            "all_gather": 7 / 8,
            "reduce_scatter": 7 / 8,
            "all_reduce": 14 / 8,
            "broadcast": 1,
            "all_to_all": 7 / 8,
            "exchange": 7 / 8,
        }
    )
    assert {bus_bandwidth(op, 100, 1, 1.0) for op in COLLECTIVES} == {0.0}
    assert bus_bandwidth("all_gather", 100, 2, 0.0) == 0.0


def test_large_collectives_reach_the_links_bus_bandwidth() -> None:
    for op in (*REDUCING, "broadcast"):
        for shape, reached in ((INSIDE, 100), (WHOLE, 40)):
            cost = collective_cost(cluster(), op, 10**9, shape)
            assert bus_bandwidth(op, 10**9, shape.ranks, cost.seconds) == pytest.approx(reached, rel=1e-4)


links = st.builds(
    LinkSpec, bytes_per_s=st.floats(1e6, 1e13), latency_s=st.floats(0, 1e-3) | st.just(0.0)
)  # fmt: skip
clusters = st.builds(
    cluster,
    within=links,
    between=links,
    ranks_per_node=st.integers(1, 72),
    nodes=st.integers(1, 2048),
    algorithms=st.sampled_from(
        [("ring",), ("ring", "tree"), ("ring", "hierarchical"), ("ring", "tree", "hierarchical")]
    ),
    quick=st.none()
    | st.builds(
        QuickProtocol,
        part=st.floats(0.1, 1),
        within_latency_s=st.floats(0, 1e-3),
        between_latency_s=st.floats(0, 1e-3),
        launch_s=st.floats(0, 1e-3),
    ),
)


@st.composite
def placed(draw: st.DrawFn) -> tuple[ClusterSpec, GroupShape]:
    """A cluster and a group on it: of as many ranks on each node as it has on any."""
    made = draw(clusters)
    nodes, per_node = draw(st.integers(1, made.nodes)), draw(st.integers(1, made.ranks_per_node))
    return made, GroupShape(nodes * per_node, nodes)


@given(placed(), st.sampled_from(COLLECTIVES), st.integers(0, 2**40), st.integers(0, 2**40))
def test_more_bytes_never_take_less(
    place: tuple[ClusterSpec, GroupShape], op: CollectiveOp, one: int, other: int
) -> None:
    few, many = sorted((one, other))
    assert collective_cost(place[0], op, few, place[1]).seconds <= collective_cost(place[0], op, many, place[1]).seconds


@given(placed(), st.sampled_from(COLLECTIVES), st.integers(0, 2**40))
def test_no_collective_is_faster_than_its_bandwidth_bound(
    place: tuple[ClusterSpec, GroupShape], op: CollectiveOp, nbytes: int
) -> None:
    """Each node must at least receive what the others hold (of a sum, one node's worth), over the group's share."""
    made, shape = place
    seconds = collective_cost(made, op, nbytes, shape).seconds
    if shape.ranks == 1:
        assert seconds == 0
        return
    others = 1 - 1 / shape.nodes
    if shape.nodes > 1 and made.between is not None:
        joined = made.between.bytes_per_s * shape.per_node / made.ranks_per_node
        incoming = {"all_to_all": shape.per_node * others, "exchange": shape.per_node * others}.get(op, others)
        assert seconds >= nbytes * incoming / joined * (1 - 1e-9)
    if shape.nodes == 1:
        assert seconds >= nbytes * (1 - 1 / shape.ranks) / made.within.bytes_per_s * (1 - 1e-9)


@given(placed(), st.sampled_from(REDUCING), st.integers(0, 2**40))
def test_a_library_with_more_algorithms_is_never_slower(
    place: tuple[ClusterSpec, GroupShape], op: CollectiveOp, nbytes: int
) -> None:
    made, shape = place
    ring = msgspec.structs.replace(made, algorithms=("ring",), quick=None)
    assert collective_cost(made, op, nbytes, shape).seconds <= collective_cost(ring, op, nbytes, shape).seconds


def test_a_product_takes_its_flops_or_its_bytes_and_an_overhead() -> None:
    # 1 s for any kernel and 2 s for any product; 1000 FLOPs at 500 a second, or 700 bytes at 100.
    assert product_seconds(hardware(), "bf16", 1000, 50) == 1 + 2 + 2
    assert product_seconds(hardware(), "bf16", 1000, 700) == 1 + 2 + 7
    fed = hardware(matmul={"bf16": Rate(peak=1000, efficiency=0.5, bytes_per_s=10)})
    assert product_seconds(fed, "bf16", 1000, 50) == 1 + 2 + 5, "operands that have to be brought in first add"


def test_attention_counts_the_causal_half_and_five_products_backward() -> None:
    # 3 heads, 10 tokens: 150 scores of 4 * 2 FLOPs at 250 a second.
    assert attention_seconds(hardware(), "bf16", heads=3, seq_len=10, head_dim=2) == pytest.approx(1 + 150 * 8 / 250)
    backward = attention_seconds(hardware(), "bf16", heads=3, seq_len=10, head_dim=2, backward=True)
    assert backward == pytest.approx(1 + 2.5 * 150 * 8 / 250)


def test_another_attention_kernel_runs_as_many_times_as_fast_as_its_profile_says() -> None:
    about: dict[str, Any] = {"heads": 3, "seq_len": 10, "head_dim": 2}
    made = hardware(attention_kernels={"cudnn": 2.0})
    flash = attention_seconds(made, "bf16", **about)
    assert attention_seconds(made, "bf16", **about, kernel="efficient") == flash
    assert attention_seconds(made, "bf16", **about, kernel="cudnn") - 1 == pytest.approx((flash - 1) / 2)


def test_a_narrower_head_takes_more_than_its_part() -> None:
    """In cuDNN's kernels: backward of 16 heads, 4,096 tokens, on RTX PRO 6000, 558.2 us at head dimension 64 and 920.7
    at 128 (NVIDIA/cudnn-frontend pull request 505).
    """

    def narrow(profile: str, *, backward: bool = True, kernel: Any = "cudnn") -> float:
        device = msgspec.structs.replace(load_hardware(profile), attention_points=(), kernel_s=0.0)
        about: dict[str, Any] = {"heads": 16, "seq_len": 4096, "backward": backward, "kernel": kernel}
        times = [attention_seconds(device, "bf16", head_dim=width, **about) for width in (64, 128)]
        return times[0] / times[1]

    assert narrow("rtx-5090") == pytest.approx(558.2 / 920.7, rel=0.15)
    # The faster products are, the more exponentials weigh; Blackwell Ultra has twice as many.
    assert 0.5 < narrow("rtx-5090") < narrow("a100-sxm-80gb") < narrow("b300") < narrow("b200") < 1
    assert narrow("h200-sxm") == pytest.approx(1.84 / 2.93, rel=0.01), "as measured"
    assert narrow("b200", kernel="flash") == pytest.approx(0.5)


def test_attention_in_fp8_halves_its_products_alone() -> None:
    device, about = load_hardware("gb300"), {"heads": 64, "seq_len": 4096, "head_dim": 128}
    for backward in (False, True):
        plain, fp8 = (
            attention_seconds(device, "bf16", **about, backward=backward, kernel="cudnn", fp8=low)
            for low in (False, True)
        )
        assert 0.5 < fp8 / plain < 0.75


def test_attention_is_read_between_what_was_measured() -> None:
    points = [
        AttentionPoint(dtype="bf16", head_dim=width, seq_len=length, forward_s=seconds, backward_s=2 * seconds)
        for width, length, seconds in ((64, 128, 4.0), (64, 512, 2.0), (128, 128, 8.0), (128, 512, 6.0))
    ]
    made = hardware(attention_points=tuple(points))

    def per_score(seq_len: int, head_dim: int, *, backward: bool = False) -> float:
        taken = attention_seconds(made, "bf16", heads=2, seq_len=seq_len, head_dim=head_dim, backward=backward)
        return (taken - 1) / seq_len**2

    assert per_score(128, 64) == pytest.approx(4.0)
    assert per_score(256, 64) == pytest.approx(3.0), "half way by its logarithm"
    assert per_score(256, 96) == pytest.approx(5.0)
    assert per_score(2048, 64) == pytest.approx(2.0), "beyond what was measured, as at the nearest length"
    assert per_score(128, 256) == pytest.approx(16.0), "beyond the head dimensions in proportion"
    assert per_score(128, 32, backward=True) == pytest.approx(4.0)


def test_elementwise_kernels_wait_for_memory_or_for_exponentials() -> None:
    assert move_seconds(hardware(), 300) == 1 + 3
    slow = hardware(transcendental_per_s=10.0, optimizer_bytes_per_s=280.0, first_touch_bytes_per_s=50.0)
    assert move_seconds(slow, 300, 20) == 1 + 3
    assert move_seconds(slow, 300, 50) == 1 + 5
    assert move_seconds(hardware(), 300, 50) == 1 + 3
    assert first_touch_seconds(slow, 100) == 2
    assert first_touch_seconds(hardware(), 100) == 0
