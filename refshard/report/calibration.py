"""A calibrated profile in tables for a terminal."""

from tabulate import tabulate

from refshard.costs import bus_bandwidth
from refshard.quantities import format_bytes, format_seconds
from refshard.specs.cluster import ClusterSpec
from refshard.specs.hardware import Dtype, Rate


def terminal_profile(cluster: ClusterSpec) -> str:
    """What computes, each collective as nccl-tests reports it, and what is missing."""
    parts = [cluster.about, _rates(cluster), _others(cluster), _collectives(cluster), _missing(cluster)]
    return "\n\n".join(part for part in parts if part)


def _rates(cluster: ClusterSpec) -> str:
    hardware = cluster.accelerator
    kinds = (
        ("matrix products", hardware.matmul, hardware.matmul_burst),
        ("attention, the longest", hardware.attention, hardware.attention_burst),
    )
    rows = [
        [f"{dtype} {kind}", _tflops(sustained.get(dtype)), _tflops(burst.get(dtype)), _part(dtype, sustained, burst)]
        for kind, sustained, burst in kinds
        for dtype in sustained
    ]
    headers = ["TFLOPS", "sustained", "in bursts", "sustained / bursts"]
    align = ("left", "right", "right", "right")
    return tabulate(rows, headers=headers, colalign=align, disable_numparse=True)


def _tflops(rate: Rate | None) -> str:
    return "-" if rate is None else f"{rate.flops_per_s / 1e12:.4g}"


def _part(dtype: Dtype, sustained: dict[Dtype, Rate], burst: dict[Dtype, Rate]) -> str:
    return f"{sustained[dtype].flops_per_s / burst[dtype].flops_per_s:.0%}" if dtype in burst else "-"


def _others(cluster: ClusterSpec) -> str:
    hardware = cluster.accelerator
    rows = [
        [label, f"{value / 1e9:.4g} GB/s", ""]
        for label, value in (
            ("elementwise", hardware.memory_bytes_per_s),
            ("optimizer", hardware.optimizer_bytes_per_s),
            ("new memory", hardware.first_touch_bytes_per_s),
        )
        if value
    ]
    if hardware.transcendental_per_s:
        rows.append(["exponentials", f"{hardware.transcendental_per_s / 1e9:.4g} G/s", ""])
    rows.append(["an operation", format_seconds(hardware.kernel_s), "however small"])
    if cluster.sources.keys() & {"compute_beside_communication", "communication_beside_compute"}:
        beside = f"{cluster.compute_beside_communication:.0%} and {cluster.communication_beside_compute:.0%}"
        rows.append(["compute and a collective", beside, "of their rates beside each other"])
    for label, link in (("link within a node", cluster.within), ("link between nodes", cluster.between)):
        if link is not None and cluster.world_size > 1:
            rows.append([label, f"{link.bytes_per_s / 1e9:.4g} GB/s", f"{format_seconds(link.latency_s)} a hop"])
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _collectives(cluster: ClusterSpec) -> str:
    rows = [
        [
            m.op, m.ranks, m.nodes, format_bytes(m.bytes), format_seconds(m.seconds),
            f"{m.bytes / m.seconds / 1e9:.3f}", f"{bus_bandwidth(m.op, m.bytes, m.ranks, m.seconds) / 1e9:.3f}",
        ]
        for m in cluster.measured
    ]  # fmt: skip
    headers = ["collective", "ranks", "nodes", "size", "time", "algbw\n(GB/s)", "busbw\n(GB/s)"]
    align = ("left", "right", "right", "right", "right", "right", "right")
    return tabulate(rows, headers=headers, colalign=align, disable_numparse=True) if rows else ""


def _missing(cluster: ClusterSpec) -> str:
    """Pieces with the same reason on one line."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in cluster.not_measured.items():
        by_reason.setdefault(reason, []).append(name)
    lines = [f"  {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return "\n".join(["Not measured:", *lines]) if lines else ""
