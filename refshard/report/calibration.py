"""A calibrated profile in tables for a terminal."""

from tabulate import tabulate

from refshard.costs import bus_bandwidth
from refshard.quantities import format_bytes, format_seconds
from refshard.specs.cluster import ClusterSpec


def terminal_profile(cluster: ClusterSpec) -> str:
    """What computes, and each collective as nccl-tests reports it."""
    parts = [cluster.about, _compute(cluster), _collectives(cluster)]
    return "\n\n".join(part for part in parts if part)


def _compute(cluster: ClusterSpec) -> str:
    hardware = cluster.accelerator
    rows = [
        [f"{dtype} matrix products", f"{rate.flops_per_s / 1e12:.4g} TFLOPS", f"of {rate.peak / 1e12:.4g}"]
        for dtype, rate in hardware.matmul.items()
    ]
    rows += [
        [f"{dtype} attention", f"{rate.flops_per_s / 1e12:.4g} TFLOPS", "the longest"]
        for dtype, rate in hardware.attention.items()
    ]
    for label, value in (
        ("elementwise", hardware.memory_bytes_per_s),
        ("optimizer", hardware.optimizer_bytes_per_s),
        ("new memory", hardware.first_touch_bytes_per_s),
    ):
        if value:
            rows.append([label, f"{value / 1e9:.4g} GB/s", ""])
    if hardware.transcendental_per_s:
        rows.append(["exponentials", f"{hardware.transcendental_per_s / 1e9:.4g} G/s", ""])
    rows.append(["an operation", format_seconds(hardware.kernel_s), "however small"])
    if cluster.measured:
        beside = f"{cluster.compute_beside_communication:.0%} and {cluster.communication_beside_compute:.0%}"
        rows.append(["compute and a collective", beside, "of their rates beside each other"])
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
