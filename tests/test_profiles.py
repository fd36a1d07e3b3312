"""Profiles of hardware and clusters: those that ship, what is refused and in which words, and writing them."""

import itertools
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard import resources
from refshard.commands import listing
from refshard.costs import bus_bandwidth, collective_cost, group_shape
from refshard.errors import SpecError
from refshard.specs.cluster import ClusterSpec, LinkSpec, MeasuredCollective, cluster_name, load_cluster
from refshard.specs.hardware import AttentionPoint, HardwareSpec, Rate, load_hardware, profile_of_device
from refshard.specs.names import Kind, profile_called, spelled_alike
from refshard.specs.reading import convert
from refshard.specs.writing import to_toml

HARDWARE = sorted(resources.hardware_profiles())
CLUSTERS = sorted(resources.cluster_profiles())
WANTED = {
    "dgx-a100", "dgx-h100", "hgx-h200", "gb200-nvl72", "mi300x", "h100-roce", "h100-eth100", "torchtitan-h100",
    "yafsdp-a100", "lab-2x2gbit", "gb300-nvl72", "hgx-b200", "h100-pcie", "h100-nvl", "l40s", "mi325x",
    "rtx-4090", "rtx-5090", "mi355x", "gh200", "hgx-h20", "rtx-pro-6000", "l4", "a10g", "rtx-3090", "dgx1-v100",
}  # fmt: skip


def test_the_clusters_that_the_documentation_names_are_there() -> None:
    assert set(CLUSTERS) >= WANTED


OF_ONE_MACHINE = ("b200-simumax",)
"""As others measured one machine: no device's name leads to it."""


def test_they_are_listed() -> None:
    assert sorted(row["cluster"] for row in listing.listing("clusters").rows) == CLUSTERS
    assert sorted(row["hardware"] for row in listing.listing("hardware").rows) == HARDWARE


@pytest.mark.parametrize("name", HARDWARE)
def test_an_accelerators_numbers_are_of_a_plausible_order(name: str) -> None:
    found = load_hardware(name)
    assert found.about
    assert 20 * 2**30 < found.memory_bytes < 300 * 2**30
    assert 0.25e12 < found.memory_bytes_per_s < 8e12
    assert 45e12 < found.matmul["bf16"].flops_per_s < 2000e12
    assert 14e12 < found.matmul["fp32"].flops_per_s < 120e12
    # Attention is slower than a product, and not by an order of magnitude.
    assert found.attention.keys() == {"bf16", "fp32"}
    for dtype, rate in found.attention.items():
        assert 0.2 < rate.flops_per_s / found.matmul[dtype].flops_per_s < 1
    if name not in OF_ONE_MACHINE:
        assert 1e-6 < found.kernel_s <= found.host_s < 1e-4
    assert 50 < found.multiprocessors < 320


@pytest.mark.parametrize(
    ("device", "name", "bf16", "fp32", "tf32"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb", 989, 67, 494.5),
        ("NVIDIA H100 PCIe", "h100-pcie", 756, 51, 378),
        ("NVIDIA H100 NVL", "h100-nvl", 835.5, 60, 417.5),
        ("NVIDIA H100", "h100-96gb-500w", 989, 67, 494.5),
        ("NVIDIA H200", "h200-sxm", 989, 67, 494.5),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", 312, 19.5, 156),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb", 312, 19.5, 156),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb", 312, 19.5, 156),
        ("NVIDIA A100 80GB PCIe", "a100-sxm-80gb", 312, 19.5, 156),
        ("NVIDIA B200", "b200", 2250, 75, 1125),
        ("NVIDIA GB200", "gb200", 2500, 80, 1250),
        ("NVIDIA GB300", "gb300", 2500, 80, 1250),
        ("NVIDIA B300 SXM6 AC", "b300", 2250, 75, 1125),
        ("NVIDIA H800", "h800-sxm", 989, 67, 494.5),
        ("NVIDIA L40S", "l40s", 362, 91.6, 183),
        ("NVIDIA GeForce RTX 4090", "rtx-4090", 165.2, 82.6, 82.6),
        ("NVIDIA GeForce RTX 5090", "rtx-5090", 209.5, 104.8, 104.8),
        ("AMD Instinct MI300X", "mi300x", 1307, 163.4, 653.7),
        ("AMD Instinct MI325X", "mi325x", 1307, 163.4, 653.7),
        ("AMD Instinct MI355X", "mi355x", 2516.6, 157.3, 0),  # CDNA 4 has no TF32
        ("NVIDIA GH200 480GB", "gh200", 989, 67, 494.5),
        ("NVIDIA H20", "h20", 148, 44, 74),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000", 503.8, 126, 251.9),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000", 503.8, 126, 251.9),
        ("NVIDIA L4", "l4", 121, 30.3, 60),
        ("NVIDIA A10G", "a10g", 70, 35, 35),
        ("NVIDIA GeForce RTX 3090", "rtx-3090", 71, 35.6, 35.6),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb", 125, 15.7, 0),  # fp16 in place of bf16; no TF32
    ],
)
def test_a_devices_name_leads_to_its_dense_peaks(device: str, name: str, bf16: float, fp32: float, tf32: float) -> None:
    """TFLOPS of the vendors' data sheets without sparsity."""
    assert profile_of_device(device) == name
    found = load_hardware(name)
    assert (found.matmul["bf16"].peak, found.matmul["fp32"].peak, found.tf32_peak) == (
        bf16 * 1e12, fp32 * 1e12, tf32 * 1e12,
    )  # fmt: skip


# TFLOPS of the vendors' data sheets, dense, with fp32 accumulation. Ampere and Volta have no fp8.
FP8 = {
    "h100-sxm-80gb": 1979, "h100-pcie": 1513, "h100-nvl": 1671, "h100-96gb-500w": 1979, "h200-sxm": 1979, "b200": 4500,
    "gb200": 5000, "gb300": 5000, "b300": 4500, "h800-sxm": 1979, "mi300x": 2614.9, "mi325x": 2614.9, "l40s": 733,
    "rtx-4090": 330.3, "rtx-5090": 419, "mi355x": 5033.2, "gh200": 1979, "h20": 296, "rtx-pro-6000": 1007.6, "l4": 242,
}  # fmt: skip


@pytest.mark.parametrize("name", HARDWARE)
def test_fp8_is_for_products_only_at_the_data_sheets_rate(name: str) -> None:
    found = load_hardware(name)
    if name not in FP8:
        assert "fp8" not in found.matmul
        return
    fp8, bf16 = found.matmul["fp8"], found.matmul["bf16"]
    assert fp8.peak == FP8[name] * 1e12
    assert fp8.peak == pytest.approx(2 * bf16.peak, rel=0.02)
    assert 1.4 < fp8.flops_per_s / bf16.flops_per_s < 2.5
    assert "fp8" in found.sources["matmul"]


@pytest.mark.parametrize("name", HARDWARE)
def test_narrower_products_are_known_of_blackwell_in_data_centres_alone(name: str) -> None:
    found, nvfp4 = load_hardware(name), {"b200": 9000, "gb200": 10_000, "gb300": 15_000, "b300": 13_125}
    assert found.matmul.keys() & {"mxfp8", "nvfp4"} == ({"mxfp8", "nvfp4"} if name in nvfp4 else set())
    if name in nvfp4:
        assert found.matmul["mxfp8"].peak == found.matmul["fp8"].peak
        assert found.matmul["nvfp4"].peak == nvfp4[name] * 1e12
        assert found.matmul["mxfp8"].efficiency <= found.matmul["fp8"].efficiency


def test_no_two_profiles_claim_one_device() -> None:
    general = [name for name in HARDWARE if name not in OF_ONE_MACHINE]
    names = [n for one in map(load_hardware, general) for n in (one.device_name, *one.also_named)]
    assert len(names) == len(set(names))
    assert all(names)


def test_a_device_that_no_profile_names_has_none() -> None:
    assert profile_of_device("NVIDIA H100 80GB") is None
    assert profile_of_device("") is None


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_clusters_numbers_are_of_a_plausible_order(name: str) -> None:
    found = load_cluster(name)
    assert found.about
    assert found.between is not None, "nodes are to be joined by something"
    for nodes in (1, 8, 256, 2048):
        made = found.of_nodes(nodes)
        assert load_cluster(f"{name}x{nodes}") == made
        cost = collective_cost(made, "all_gather", 2**28, group_shape(made, range(made.world_size)))
        assert 1e-4 < cost.seconds < 20 or made.world_size == 1
    if found.library == "gloo":
        return
    over_pcie = name in (
        "h100-pcie", "h100-nvl", "l40s", "l4", "a10g", "rtx-3090", "rtx-4090", "rtx-5090", "rtx-pro-6000",
    )  # fmt: skip
    older = {"hgx-h800": 150e9, "dgx1-v100": 100e9}
    if found.ranks_per_node > 1:
        least, most = (15e9, 60e9) if over_pcie else (older.get(name, 200e9), 900e9)
        assert least < found.within.bytes_per_s < most
    assert 1e9 < found.between.bytes_per_s / found.ranks_per_node < (100e9 if "b300" in name else 50e9)
    assert 0.5 < min(found.compute_beside_communication, found.communication_beside_compute) <= 1


def test_the_hosts_of_the_lab_send_what_their_link_lets_through() -> None:
    lab = load_cluster("lab-2x2gbit")
    assert (lab.nodes, lab.ranks_per_node, lab.library, lab.accelerator.device) == (2, 1, "gloo", "cpu")
    exchanges = [m for m in lab.measured if m.op == "exchange" and m.bytes >= 16 * 2**20]
    assert exchanges
    for one in exchanges:
        assert 0.75 * 250e6 < bus_bandwidth(one.op, one.bytes, one.ranks, one.seconds) < 250e6
    assert 2e10 < lab.accelerator.matmul["fp32"].flops_per_s < 2e11


def plain_hardware(**changes: Any) -> dict[str, Any]:
    rate = {"peak": 1e12, "efficiency": 0.5}
    fields = {
        "device": "cuda", "memory_bytes": 10**9, "memory_bytes_per_s": 1e12, "matmul": {"bf16": rate},
        "attention": {"bf16": rate}, "kernel_s": 1e-6, "host_s": 1e-6,
    }  # fmt: skip
    fields |= changes
    return {**fields, "sources": dict.fromkeys(fields.keys() - {"device", "about"}, "made up")}


def plain_cluster(**changes: Any) -> dict[str, Any]:
    link = {"bytes_per_s": 1e9, "latency_s": 1e-6}
    fields = {"hardware": "a100-sxm-80gb", "library": "nccl", "ranks_per_node": 8, "within": link, "between": link}
    return {**fields, "sources": dict.fromkeys(("ranks_per_node", "within", "between"), "made up"), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes_per_s": 0}, "memory_bytes_per_s must be > 0 and finite, got 0"),
        ({"kernel_s": float("nan")}, "kernel_s must be >= 0 and finite, got nan"),
        ({"transcendental_per_s": -1.0}, "transcendental_per_s must be >= 0 and finite, got -1"),
        ({"matmul": {"bf16": {"peak": 1e12, "efficiency": 1.5}}}, "efficiency must lie in (0, 1], got 1.5"),
        ({"matmul": {"bf16": {"peak": -1, "efficiency": 0.5}}}, "peak must be > 0 and finite, got -1"),
        ({"matmul": {"fp4": {"peak": 1, "efficiency": 0.5}}}, "fp4"),
        ({"attention": {"fp8": {"peak": 1, "efficiency": 0.5}}}, "fp8"),
        (
            {"attention": {}},
            "the same dtypes, at least one, besides matmul's fp8, mxfp8 and nvfp4, got ['bf16'] and []",
        ),
        ({"matmul": {"fp8": {"peak": 1, "efficiency": 0.5}}, "attention": {}}, "got ['fp8'] and []"),
        ({"memory_byte": 1}, "unknown key 'memory_byte'; did you mean 'memory_bytes'?"),
        ({"sources": {}}, "sources must say where memory_bytes comes from, got nothing; add it"),
    ],
)
def test_wrong_hardware_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        convert({**plain_hardware(), **changes}, HardwareSpec, where="hardware test")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node must be >= 1, got 0"),
        ({"between": None, "nodes": 2}, "between must link the 2 nodes, got none; add the table [between]"),
        ({"algorithms": ["tree"]}, "algorithms must hold 'ring', which runs every collective, got ['tree']"),
        ({"within": {"bytes_per_s": 0, "latency_s": 0}}, "bytes_per_s must be > 0 and finite, got 0"),
        ({"compute_beside_communication": 0.0}, "compute_beside_communication must lie in (0, 1], got 0.0"),
        (
            {"quick": {"part": 2, "within_latency_s": 0, "between_latency_s": 0, "launch_s": 0}},
            "part must lie in (0, 1]",
        ),
        ({"measured": [{"op": "all_gather", "ranks": 1, "nodes": 1, "bytes": 1, "seconds": 1}]}, "ranks must be >= 2"),
        ({"launch_s": 1e-6}, "sources must say where launch_s comes from, got nothing; add it"),
    ],
)
def test_wrong_clusters_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        convert({**plain_cluster(), **changes}, ClusterSpec, where="cluster test")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("given_name", "message"),
    [
        ("dgx-a10", "cluster: no profile and no file 'dgx-a10'; did you mean 'dgx-a100'? (8xh100 has"),
        ("dgx-a100x0", "cluster: must have at least one node and one GPU, got 'dgx-a100x0'; write 1 or more"),
        ("rtx4091", "cluster: no profile and no file 'rtx4091'; did you mean 'rtx-4090'?"),
        ("8xh10", "cluster: no profile and no file '8xh10'; did you mean '8xh100'?"),
        ("none", "cluster: no profile and no file 'none'; refshard list clusters shows all"),
        ("h100x8", "cluster: 'h100x8' may mean 8 GPUs or 8 nodes; write 8xh100 or dgx-h100x8"),
        ("12xh100", "gpus: must be at most 8, or a multiple of it"),
        ("16xh100x", "cluster: no profile"),
        ("16xdgx-h100x4", "cluster: '16xdgx-h100x4' has 32 GPUs, not 16; leave one of the numbers out"),
        ("x" * 5000, f"cluster: no profile and no file '{'x' * 80}'; "),
    ],
)
def test_a_cluster_that_is_not_there(given_name: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        load_cluster(given_name)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "profile", "nodes", "ranks_per_node"),
    [
        ("h100", "dgx-h100", 1, 8),
        ("H100", "dgx-h100", 1, 8),
        ("8xH100", "dgx-h100", 1, 8),
        ("8 x H100", "dgx-h100", 1, 8),
        ("16xh100", "dgx-h100", 2, 8),
        ("4xh100", "dgx-h100", 1, 4),
        ("4xDGX_H100x2", "dgx-h100", 2, 4),
        ("dgx-h100x4", "dgx-h100", 4, 8),
        ("1x4090", "rtx-4090", 1, 1),
        ("4090", "rtx-4090", 1, 8),
        ("rtx4090", "rtx-4090", 1, 8),
        ("NVIDIA GeForce RTX 4090", "rtx-4090", 1, 8),
        ("a100-40gb", "dgx-a100-40gb", 1, 8),
        ("1xlab-2x2gbit", "lab-2x2gbit", 1, 1),
    ],
)
def test_names_of_clusters_that_people_type(name: str, profile: str, nodes: int, ranks_per_node: int) -> None:
    wanted = msgspec.structs.replace(load_cluster(profile), nodes=nodes, ranks_per_node=ranks_per_node)
    assert load_cluster(name) == wanted
    assert load_cluster(cluster_name(name)) == wanted
    assert cluster_name(cluster_name(name)) == cluster_name(name)


@pytest.mark.parametrize("kind", ["clusters", "models"])
def test_each_name_stands_for_one_profile(kind: Kind) -> None:
    profiles = {"clusters": resources.cluster_profiles, "models": resources.model_profiles}[kind]()
    aliases = tomllib.loads(resources.aliases().read_text())[kind]
    assert aliases.keys() <= profiles.keys()
    spellings = [spelled_alike(kind, name) for name in (*profiles, *itertools.chain(*aliases.values()))]
    assert len(set(spellings)) == len(spellings)
    for name in (name for names in aliases.values() for name in names):
        assert profile_called(kind, name, profiles) == next(of for of, names in aliases.items() if name in names)


def test_a_cluster_from_a_file_and_how_many_of_its_nodes(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(convert(plain_cluster(), ClusterSpec, where="cluster")))
    assert load_cluster(str(path)).nodes == 1
    assert load_cluster(f"{path}x3").world_size == 24
    path.write_text(path.read_text().replace("a100-sxm-80gb", "a100"))
    with pytest.raises(SpecError, match="hardware: no profile 'a100'"):
        load_cluster(str(path))


def test_a_world_fills_nodes_or_a_part_of_one() -> None:
    made = load_cluster("dgx-a100x32")
    assert (made.of_world_size(4).ranks_per_node, made.of_world_size(4).nodes) == (4, 1)
    assert made.of_world_size(64).nodes == 8
    with pytest.raises(SpecError, match="gpus: must be at most 8, or a multiple of it"):
        made.of_world_size(12)
    alone = convert(plain_cluster(between=None), ClusterSpec, where="cluster")
    with pytest.raises(SpecError, match=r"2 nodes need the table \[between\], which the profile lacks"):
        alone.of_world_size(16)


rates = st.builds(Rate, peak=st.floats(1, 1e18), efficiency=st.floats(0.001, 1), overhead_s=st.floats(0, 1))
texts = st.text(min_size=1).filter(lambda text: text.strip())


@given(rates, texts, st.lists(st.floats(1e-12, 1e3), max_size=3), st.integers(1, 2**40))
def test_a_profile_reads_back_as_it_was_written(rate: Rate, words: str, seconds: list[float], size: int) -> None:
    point = AttentionPoint(dtype="fp32", head_dim=64, seq_len=128, forward_s=0.1, backward_s=1e-9)
    fields = plain_hardware(matmul={"fp32": rate}, attention={"fp32": rate}, attention_points=(point,), about=words)
    made = ClusterSpec(
        hardware=HardwareSpec(**fields),
        library="gloo",
        ranks_per_node=2,
        within=LinkSpec(bytes_per_s=1.0, latency_s=0.0),
        measured=tuple(MeasuredCollective(op="exchange", ranks=2, nodes=1, bytes=size, seconds=s) for s in seconds),
        about=words,
        sources={"ranks_per_node": words, "within": words},
    )
    written = tomllib.loads(to_toml(made))
    assert convert(written, ClusterSpec, where="cluster") == made
    assert "launch_s" not in written, "what is as by default need not be said"
