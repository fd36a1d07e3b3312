"""Prices: FLOPs against torch's own counts, seconds against the laws of costs.py, and what is refused."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from refshard.costs import attention_seconds, collective_cost, group_shape, move_seconds, product_seconds
from refshard.dryrun.price import (
    BETWEEN,
    NO_LINK,
    RECEIVING,
    SENDING,
    WITHIN,
    Prices,
    peer_of,
    price,
)
from refshard.dryrun.recording import Flag
from refshard.dryrun.work import element_bytes, parse, work_of
from refshard.errors import SpecError
from refshard.specs.cluster import ClusterSpec, LinkSpec, load_cluster
from refshard.specs.hardware import HardwareSpec, Rate
from tests.dryrun.made import Made

H100 = load_cluster("dgx-h100x4")


def priced(made: Made, cluster: ClusterSpec = H100) -> Prices:
    return price(made.recording(), cluster)


def seconds_of(name: str, signature: str, cluster: ClusterSpec = H100, **about: Any) -> float:
    made = Made()
    row = made.launch(name, signature=signature, **about)
    return float(priced(made, cluster).seconds[row])


def hardware(**changes: Any) -> HardwareSpec:
    """1 TFLOP/s and 1 GB/s of everything, and nothing takes time for being launched."""
    rate = Rate(peak=1e12, efficiency=1.0)
    fields: dict[str, Any] = {
        "device": "cuda", "memory_bytes": 10**9, "memory_bytes_per_s": 1e9, "kernel_s": 0.0, "host_s": 1e-6,
        "matmul": {"bf16": rate, "fp32": rate}, "attention": {"bf16": rate, "fp32": rate},
    }  # fmt: skip
    fields |= changes
    return HardwareSpec(**fields, sources=dict.fromkeys([name for name in fields if name != "device"], "made"))


def cluster(on: HardwareSpec, between: LinkSpec | None = None) -> ClusterSpec:
    link = LinkSpec(bytes_per_s=1e9, latency_s=0.0)
    sources = dict.fromkeys(("ranks_per_node", "within", "between"), "made")
    return ClusterSpec(hardware=on, library="nccl", ranks_per_node=4, within=link, between=between, sources=sources)


def test_a_signature_is_read_as_it_is_written() -> None:
    found = parse("bf16[2,8] int64[] fp32[0] -> Float8_e4m3fnuz[4]")
    assert [(t.dtype, t.shape, t.numel * element_bytes(t.dtype)) for t in found.inputs] == [
        ("bf16", (2, 8), 32), ("int64", (), 8), ("fp32", (0,), 0)
    ]  # fmt: skip
    assert [(t.dtype, t.numel * element_bytes(t.dtype)) for t in found.results] == [("Float8_e4m3fnuz", 4)]
    assert parse("").inputs == parse("").results == ()


PRODUCTS = [
    ("mm", "bf16[16,8] bf16[8,4] -> bf16[16,4]", 2 * 16 * 8 * 4),
    ("mm", "bf16[16,8] bf16[8,4] bf16[16,4]", 2 * 16 * 8 * 4),  # into a given tensor
    ("addmm", "bf16[4] bf16[16,8] bf16[8,4] -> bf16[16,4]", 2 * 16 * 8 * 4),
    ("_addmm_activation", "bf16[4] bf16[16,8] bf16[8,4] -> bf16[16,4]", 2 * 16 * 8 * 4),
    ("bmm", "bf16[3,16,8] bf16[3,8,4] -> bf16[3,16,4]", 2 * 3 * 16 * 8 * 4),
    ("baddbmm", "bf16[1] bf16[3,16,8] bf16[3,8,4] -> bf16[3,16,4]", 2 * 3 * 16 * 8 * 4),
    ("linear", "bf16[3,16,8] bf16[4,8] bf16[4] -> bf16[3,16,4]", 2 * 3 * 16 * 8 * 4),
    ("mv", "bf16[16,8] bf16[8] -> bf16[16]", 2 * 16 * 8),
    ("_scaled_mm", "fp8e4m3[16,8] fp8e4m3[8,4] fp32[] fp32[] -> bf16[16,4]", 2 * 16 * 8 * 4),
    ("_int_mm", "int8[16,8] int8[8,4] -> int32[16,4]", 2 * 16 * 8 * 4),
    ("gemm_4bit", "bf16[16,8] uint8[16] fp32[1] -> bf16[16,4]", 2 * 16 * 8 * 4),
    ("gemv_4bit", "bf16[1,8] uint8[16] fp32[1] fp32[16] -> bf16[1,4]", 2 * 8 * 4),
    ("int8_linear_matmul", "int8[16,8] int8[4,8] -> int32[16,4]", 2 * 16 * 8 * 4),
    # Tokens of five experts; the same with the experts' rows on the other side; weight gradients; padded.
    ("_grouped_mm", "bf16[16,8] bf16[5,8,4] int32[5] -> bf16[16,4]", 2 * 16 * 8 * 4),
    ("_grouped_mm", "bf16[5,4,8] bf16[8,16] int32[5] -> bf16[4,16]", 2 * 16 * 8 * 4),
    ("_grouped_mm", "bf16[8,16] bf16[16,4] int32[5] -> bf16[5,8,4]", 2 * 16 * 8 * 4),
    ("_grouped_mm", "bf16[5,16,8] bf16[5,8,4] -> bf16[5,16,4]", 2 * 5 * 16 * 8 * 4),
]


@pytest.mark.parametrize(("op", "signature", "flops"), PRODUCTS)
def test_flops_of_matrix_products(op: str, signature: str, flops: int) -> None:
    work = work_of(f"aten::{op}", signature)
    assert (work.kind, work.flops, work.doubt) == ("product", flops, "")


CONVOLUTIONS: list[dict[str, Any]] = [
    {"given": (2, 6, 9), "weight": (4, 6, 3), "stride": [1]},
    {"given": (2, 6, 9, 11), "weight": (4, 6, 3, 3), "stride": [2, 2], "padding": [1, 1]},
    {"given": (2, 6, 9, 11), "weight": (6, 6, 3, 3), "stride": [2, 2]},
    {"given": (2, 6, 9, 11), "weight": (9, 2, 3, 3), "groups": 3},
    {"given": (2, 6, 9, 11), "weight": (6, 1, 3, 3), "groups": 6},
    {"given": (2, 6, 9, 11), "weight": (6, 4, 3, 3), "stride": [2, 2], "transposed": True},
    {"given": (2, 6, 9, 11), "weight": (6, 6, 3, 3), "stride": [2, 2], "transposed": True},
    {"given": (2, 6, 5, 5, 5), "weight": (4, 6, 2, 2, 2)},
]


def spelled(*shapes: tuple[int, ...]) -> str:
    return " ".join(f"bf16[{','.join(map(str, shape))}]" for shape in shapes)


@pytest.mark.parametrize("about", CONVOLUTIONS)
def test_flops_of_convolutions_are_those_that_torch_counts(about: dict[str, Any]) -> None:
    given, weight = (torch.empty(about[name], device="meta") for name in ("given", "weight"))
    width = len(about["given"]) - 2
    places = [about.get(name, [default] * width) for name, default in (("stride", 1), ("padding", 0))]
    rest = [[1] * width, about.get("transposed", False), [0] * width, about.get("groups", 1)]
    with FlopCounterMode(display=False) as counter:
        result = torch.ops.aten.convolution(given, weight, None, *places, *rest)
    shapes = tuple(given.shape), tuple(weight.shape), tuple(result.shape)
    forward = work_of("aten::cudnn_convolution", f"{spelled(*shapes[:2])} -> {spelled(shapes[2])}")
    assert (forward.kind, forward.flops) == ("product", counter.get_total_flops())
    # Each gradient takes what forward takes; torch counts groups of them as if there were one.
    gradients = f"{spelled(shapes[2], *shapes[:2])} -> {spelled(*shapes[:2])} bf16[4]"
    assert work_of("aten::convolution_backward", gradients).flops == 2 * forward.flops
    only = f"{spelled(shapes[2], *shapes[:2])} -> {spelled(shapes[1])}"
    assert work_of("aten::convolution_backward", only).flops == forward.flops


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("heads", [8, 2])
def test_flops_of_attention_are_torchs_and_half_of_them_under_a_causal_mask(kernel: str, heads: int) -> None:
    q, kv, out = [3, 8, 64, 16], [3, heads, 64, 16], [3, 8, 64, 24]
    v = [3, heads, 64, 24]
    given = f"{spelled(tuple(q), tuple(kv), tuple(v))}"
    for backward, name in ((False, f"_scaled_dot_product_{kernel}_attention"),
                           (True, f"_scaled_dot_product_{kernel}_attention_backward")):  # fmt: skip
        counted = flop_registry[getattr(torch.ops.aten, name)](*([out] if backward else []), q, kv, v, out_val=out)
        signature = f"{spelled(tuple(out))} {given}" if backward else given
        whole = work_of(f"aten::{name}", f"{signature} fp32[3,8,64] -> {spelled(tuple(out))}")
        causal = work_of(f"aten::{name}", signature, Flag.CAUSAL)
        assert (whole.kind, whole.flops, causal.flops) == ("attention", counted, counted / 2)
        assert whole.scores is not None
        assert (whole.scores.length, whole.scores.head_dim, whole.scores.backward) == (64, 20, backward)
        assert whole.scores.kernel == kernel


def test_attention_in_other_layouts() -> None:
    dense = work_of("aten::_scaled_dot_product_flash_attention", "bf16[2,8,64,16] bf16[2,4,64,16] bf16[2,4,64,16]", 1)
    for op, signature in [
        ("_flash_attention_forward", "bf16[2,64,8,16] bf16[2,64,4,16] bf16[2,64,4,16] -> bf16[2,64,8,16]"),
        ("_efficient_attention_forward", "bf16[2,64,8,16] bf16[2,64,4,16] bf16[2,64,4,16] -> bf16[2,64,8,16]"),
        ("_cudnn_attention_forward", "bf16[2,8,64,16] bf16[2,4,64,16] bf16[2,4,64,16] -> bf16[2,8,64,16]"),
        ("_flash_attention_forward", "bf16[128,8,16] bf16[128,4,16] bf16[128,4,16] int32[3] int32[3]"),
        ("_efficient_attention_forward", "bf16[1,128,8,16] bf16[1,128,4,16] bf16[1,128,4,16] int32[3] int32[3]"),
    ]:
        assert work_of(f"aten::{op}", signature, Flag.CAUSAL).flops == dense.flops, op
    packed = work_of("aten::_flash_attention_forward", "bf16[128,8,16] bf16[128,4,16] bf16[128,4,16] int32[3] int32[3]")
    assert packed.doubt == "sequences of one packed batch are taken to be equally long"
    backward = (
        "bf16[128,8,16] bf16[128,8,16] bf16[128,4,16] bf16[128,4,16] bf16[128,8,16] fp32[8,128] int32[3] int32[3]"
    )
    assert work_of("aten::_flash_attention_backward", backward, 1).flops == 2.5 * dense.flops


@pytest.mark.parametrize(("queries", "keys", "pairs"), [(64, 64, 2048), (32, 64, 512), (64, 32, 512 + 32 * 32)])
def test_a_causal_mask_leaves_each_query_the_keys_up_to_its_place(queries: int, keys: int, pairs: int) -> None:
    shapes = spelled((1, 1, queries, 16), (1, 1, keys, 16), (1, 1, keys, 16))
    assert work_of("aten::_scaled_dot_product_flash_attention", shapes, Flag.CAUSAL).flops == 4 * 16 * pairs


def test_recurrent_networks_meet_each_weight_once_per_token() -> None:
    signature = "fp32[7,3,16] fp32[32,16] fp32[32,8] fp32[32] fp32[1,3,8] -> fp32[7,3,8]"
    assert work_of("aten::_cudnn_rnn", signature).flops == 2 * 7 * 3 * 32 * (16 + 8)


def test_an_operator_that_its_author_gave_a_formula_is_a_product() -> None:
    library = torch.library.Library("refshard_test_price", "DEF")
    library.define("twice(Tensor a) -> Tensor")
    packet = torch.ops.refshard_test_price.twice
    made = Made()
    for _ in range(3):
        made.launch("refshard_test_price::twice", signature="bf16[8] -> bf16[8]", reads=16, writes=16)
    (doubt,) = priced(made).doubts
    assert (doubt.name, doubt.count) == ("refshard_test_price::twice", 3)
    assert doubt.seconds == pytest.approx(3 * move_seconds(H100.accelerator, 32))
    assert "register_flop_formula" in doubt.reason
    flop_registry[packet] = lambda shape, **_: 1000 * shape[0]
    try:
        assert work_of("refshard_test_price::twice", "bf16[8] -> bf16[8]").flops == 8000
        assert priced(made).doubts == ()
    finally:
        del flop_registry[packet]


@pytest.mark.parametrize(
    ("name", "doubted"),
    [("aten::add", False), ("aten::linalg_eigh", True), ("aten::linalg_vector_norm", False),
     ("aten::_thnn_fused_lstm_cell", False), ("mine::op", True),
     ("aten::conv_tbc", True), ("aten::_convert_indices", False), ("fsdp::chunk_cat", False), ("aten::comm", False)],
)  # fmt: skip
def test_what_is_heavy_and_has_no_formula_is_said(name: str, doubted: bool) -> None:
    work = work_of(name, "bf16[8,8] -> bf16[8,8]")
    assert (work.kind, bool(work.doubt)) == ("move", doubted)


def test_a_product_takes_what_its_law_says_in_each_dtype() -> None:
    def product(dtype: str, cluster: ClusterSpec = H100) -> float:
        return seconds_of("aten::mm", f"{dtype}[4096,4096] {dtype}[4096,4096]", cluster, reads=6 * 2**24, writes=2**24)

    flops, nbytes = 2.0 * 4096**3, 7 * 2**24
    device = H100.accelerator
    assert product("bf16") == product_seconds(device, "bf16", flops, nbytes)
    assert product("fp16") == product("bf16")
    assert product("int8") == product_seconds(device, "bf16", flops / 2, nbytes)
    assert product("fp8e4m3") == product("fp8e5m2") == product("Float8_e4m3fnuz")
    assert product("fp8e4m3") == product_seconds(device, "fp8", flops, nbytes) != product("int8")
    older = cluster(hardware(matmul={"bf16": device.matmul["bf16"]}, attention={"bf16": device.attention["bf16"]}))
    assert product("fp8e4m3", older) == product("int8", older)
    assert product("fp32") == product("fp64") == product_seconds(device, "fp32", flops, nbytes)
    only = cluster(
        hardware(matmul={"fp32": Rate(peak=1e12, efficiency=1)}, attention={"fp32": Rate(peak=1, efficiency=1)})
    )
    with pytest.raises(
        SpecError, match=r"must have a rate for aten::mm of bf16, got rates for fp32; add \[matmul.bf16\]"
    ):
        product("bf16", only)


def test_attention_takes_what_its_law_says_and_twice_the_scores_without_a_mask() -> None:
    q, kv = "bf16[2,32,8192,128]", "bf16[2,8,8192,128]"
    forward, backward = (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_backward",
    )
    device = H100.accelerator
    expected = attention_seconds(device, "bf16", heads=64, seq_len=8192, head_dim=128)
    assert seconds_of(forward, f"{q} {kv} {kv} -> {q}", flags=Flag.CAUSAL) == expected
    low = forward, f"{q} {kv} {kv} -> {q}".replace("bf16", "fp8e4m3")
    assert seconds_of(*low, flags=Flag.CAUSAL) == expected, "attention stays bf16"
    doubled = attention_seconds(device, "bf16", heads=128, seq_len=8192, head_dim=128)
    assert seconds_of(forward, f"{q} {kv} {kv} -> {q}") == doubled
    back = attention_seconds(device, "bf16", heads=64, seq_len=8192, head_dim=128, backward=True)
    assert seconds_of(backward, f"{q} {q} {kv} {kv} {q} -> {q}", flags=Flag.CAUSAL) == back
    other = attention_seconds(device, "bf16", heads=64, seq_len=8192, head_dim=128, backward=True, kernel="cudnn")
    assert (
        seconds_of(
            "aten::_scaled_dot_product_cudnn_attention_backward", f"{q} {q} {kv} {kv} {q} -> {q}", flags=Flag.CAUSAL
        )
        == other
        < back
    )
    # One query reads all keys and values: that takes longer than its scores.
    one = seconds_of(forward, "bf16[8,32,1,128] bf16[8,32,8192,128] bf16[8,32,8192,128]", reads=2**30)
    assert one == move_seconds(device, 2**30)


def test_everything_else_takes_what_its_bytes_take() -> None:
    device = H100.accelerator
    assert seconds_of("aten::sub", "bf16[8] bf16[8] -> bf16[8]", reads=2**20, writes=2**19) == move_seconds(
        device, 3 * 2**19
    )
    assert seconds_of("aten::fill_", "bf16[]") == device.kernel_s
    assert seconds_of("aten::nll_loss_backward", "fp32[] fp32[9,9]", reads=2**30, writes=2**20) == move_seconds(
        device, 2**20
    )


def test_a_fused_optimizer_writes_no_gradients_and_goes_at_its_own_rate() -> None:
    # Four tensors of one million bytes are read. A schema says that all are written; the gradient is not.
    signature = " ".join(["fp32[250000]"] * 4)
    adamw = {"reads": 4 * 10**6, "writes": 4 * 10**6}
    plain = cluster(hardware())
    assert seconds_of("aten::_fused_adamw_", signature, plain, **adamw) == pytest.approx(7e6 / 1e9)
    fast = cluster(hardware(optimizer_bytes_per_s=2e9))
    assert seconds_of("aten::_fused_adamw_", signature, fast, **adamw) == pytest.approx(7e6 / 2e9)
    assert seconds_of("aten::_fused_sgd_", signature, plain, reads=3 * 10**6, writes=3 * 10**6) == pytest.approx(
        5e6 / 1e9
    )
    assert seconds_of("aten::_foreach_mul_", signature, fast, reads=10**6, writes=10**6) == pytest.approx(2e6 / 1e9)


def test_copies_to_and_from_the_host_go_by_its_link() -> None:
    there: dict[str, Any] = {"flags": Flag.HOST_TO_DEVICE, "reads": 51_000_000, "writes": 51_000_000}
    assert seconds_of("aten::copy_", "bf16[8] bf16[8]", **there) == pytest.approx(1e-3 + H100.accelerator.kernel_s)
    back: dict[str, Any] = {"flags": Flag.DEVICE_TO_HOST, "reads": 51_000_000}
    assert seconds_of("aten::copy_", "bf16[8] bf16[8]", **back) == pytest.approx(1e-3 + H100.accelerator.kernel_s)
    with pytest.raises(SpecError, match="host_link_bytes_per_s must be known where a step copies to or from the host"):
        seconds_of("aten::copy_", "bf16[8] bf16[8]", cluster(hardware()), **there)


def test_an_operator_of_the_host_alone_takes_nothing_of_the_device() -> None:
    made = Made()
    launch = made.launch()
    only = made.launch("aten::record_stream", flags=Flag.HOST_ONLY, reads=2**30)
    found = priced(made)
    assert (found.seconds[launch], found.seconds[only]) == (H100.accelerator.kernel_s, 0)


def test_collectives_take_what_their_law_says() -> None:
    made = Made(world_size=32)
    node, world, own = made.group(range(8)), made.group(range(32)), made.group([3])
    nbytes = 2**28
    asked = [("all_gather", node), ("reduce_scatter", world), ("all_reduce", node), ("all_to_all", world)]
    rows = [made.collective(op, group, nbytes=nbytes, stream=9) for op, group in asked]
    rows.append(made.collective("all_gather", own, nbytes=nbytes, stream=9))
    found = priced(made)
    for row, (op, group) in zip(rows, asked):
        shape = group_shape(H100, range(8) if group == node else range(32))
        cost = collective_cost(H100, op, nbytes, shape)  # type: ignore[arg-type]
        link = BETWEEN if group == world else WITHIN
        assert (found.links[row], found.seconds[row], found.latencies[row]) == (link, cost.transfer_s, cost.latency_s)
    assert (found.links[rows[-1]], found.seconds[rows[-1]], found.latencies[rows[-1]]) == (NO_LINK, 0, 0)


@pytest.mark.parametrize(
    ("op", "like"),
    [("reduce", "broadcast"), ("gather", "all_gather"), ("scatter", "all_gather"), ("barrier", "all_reduce")],
)
def test_what_has_no_law_takes_what_moves_the_same_bytes(op: str, like: str) -> None:
    made = Made()
    group = made.group(range(8))
    rows = [made.collective(name, group, nbytes=2**24, stream=9) for name in (op, like)]
    found = priced(made)
    assert found.seconds[rows[0]] == found.seconds[rows[1]] > 0
    assert found.latencies[rows[0]] == found.latencies[rows[1]] > 0


def test_messages_take_one_hop() -> None:
    made = Made(rank=2, world_size=16)
    stages = made.group([2, 10, 3])  # of rank 2, rank 10 is on another node
    far = made.collective("send", stages, nbytes=10**9, stream=9, peer=1)
    near = made.collective("recv", stages, nbytes=10**9, stream=9, peer=2)
    own = made.collective("send", stages, nbytes=10**9, stream=9, peer=0)
    found = priced(made)
    assert H100.between is not None
    assert found.links[[far, near, own]].tolist() == [SENDING, RECEIVING, NO_LINK]
    assert found.seconds[far] == pytest.approx(1e9 / (H100.between.bytes_per_s / 8))
    assert found.seconds[near] == pytest.approx(1e9 / H100.within.bytes_per_s)
    assert found.latencies[far] == pytest.approx(H100.launch_s + H100.between.latency_s)
    assert found.seconds[own] == found.latencies[own] == 0
    recording = made.recording()
    assert [peer_of(recording, int(recording.subjects[row])) for row in (far, near, own)] == [10, 3, 2]


def test_what_cannot_be_priced_is_refused() -> None:
    made = Made()
    made.collective("all_gathr", made.group([0, 1]), nbytes=1, stream=9)
    with pytest.raises(SpecError, match="collective: 'all_gathr' has no price; did you mean 'all_gather'"):
        priced(made)
    wide = Made()
    wide.collective("all_gather", wide.group(range(8)), nbytes=1, stream=9)
    with pytest.raises(
        SpecError, match=r"needs a \[between\] table, since a group spans 2 nodes \(4 ranks each\); add"
    ):
        priced(wide, cluster(hardware()))
