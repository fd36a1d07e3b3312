"""A calibrated profile as an answer."""

from collections.abc import Mapping
from typing import Any

import msgspec

from refshard.costs import bus_bandwidth
from refshard.quantities import format_seconds
from refshard.report.blocks import Answer, Notes, Quantity, Row, Table, Text, table
from refshard.specs.cluster import ClusterSpec
from refshard.specs.hardware import Rate


def profile_answer(cluster: ClusterSpec, more: str, status: int = 0) -> Answer:
    """What computes, each collective as nccl-tests reports it, and what is missing; ``more`` is a last line."""
    return Answer(
        data={"profile": msgspec.to_builtins(cluster)},
        rows=_collective_rows(cluster),
        columns=("collective", "ranks", "nodes", "bytes", "seconds", "algbw_bytes_per_s", "busbw_bytes_per_s"),
        blocks=[
            Text(text=cluster.about), _rates(cluster), _others(cluster), _collectives(cluster), _missing(cluster),
            Text(text=more),
        ],
        status=status,
    )  # fmt: skip


def changed_profile_answer(shipped: ClusterSpec, cluster: ClusterSpec, more: str) -> Answer:
    """The numbers that a trace changed, beside the shipped ones, and what was kept; ``more`` is a last line."""
    old, new = _numbers(shipped), _numbers(cluster)
    rows: list[Row] = [
        {"number": name, "shipped": old.get(name, "-"), "from the trace": value}
        for name, value in new.items()
        if old.get(name) != value
    ]
    return Answer(
        data={"profile": msgspec.to_builtins(cluster)}, rows=[dict(row) for row in rows],
        blocks=[Text(text=cluster.about), table(rows), _missing(cluster, "Kept as shipped:"), Text(text=more)],
    )  # fmt: skip


def _numbers(cluster: ClusterSpec) -> dict[str, str]:
    """The numbers that a trace can tell, by their place in a profile."""
    hardware = cluster.accelerator
    found = {f"matmul.{dtype}.efficiency": f"{rate.efficiency:.4g}" for dtype, rate in hardware.matmul.items()}
    for dtype, rate in hardware.matmul_burst.items():
        found[f"matmul_burst.{dtype}.efficiency (not used)"] = f"{rate.efficiency:.4g}"
    for point in hardware.attention_points:
        where = f"{point.kernel or 'any kernel'}, {point.dtype}, {point.head_dim} x {point.seq_len}"
        found[f"attention, {where}: forward, ps per score"] = f"{point.forward_s * 1e12:.4g}"
        found[f"attention, {where}: backward, ps per score"] = f"{point.backward_s * 1e12:.4g}"
    found["memory_bytes_per_s"] = f"{hardware.memory_bytes_per_s:.4g}"
    found["within.bytes_per_s"] = f"{cluster.within.bytes_per_s:.4g}"
    return found


def _rates(cluster: ClusterSpec) -> Table:
    hardware = cluster.accelerator
    kinds: tuple[tuple[str, Mapping[Any, Rate], Mapping[Any, Rate]], ...] = (
        ("matrix products", hardware.matmul, hardware.matmul_burst),
        ("attention, the longest", hardware.attention, hardware.attention_burst),
    )
    rows: list[Row] = []
    for kind, sustained, bursts in kinds:
        for dtype, rate in sustained.items():
            burst = bursts.get(dtype)
            rows.append({
                "TFLOPS": f"{dtype} {kind}",
                "sustained": f"{rate.flops_per_s / 1e12:.4g}",
                "in bursts": None if burst is None else f"{burst.flops_per_s / 1e12:.4g}",
                "sustained / bursts": None if burst is None else f"{rate.flops_per_s / burst.flops_per_s:.0%}",
            })  # fmt: skip
    return table(rows)


def _others(cluster: ClusterSpec) -> Table:
    hardware = cluster.accelerator
    rows = [
        (label, f"{value / 1e9:.4g} GB/s", "")
        for label, value in (
            ("elementwise", hardware.memory_bytes_per_s),
            ("optimizer", hardware.optimizer_bytes_per_s),
            ("new memory", hardware.first_touch_bytes_per_s),
        )
        if value
    ]
    if hardware.transcendental_per_s:
        rows.append(("exponentials", f"{hardware.transcendental_per_s / 1e9:.4g} G/s", ""))
    rows.append(("per operation", format_seconds(hardware.kernel_s), "minimum"))
    if cluster.sources.keys() & {"compute_beside_communication", "communication_beside_compute"}:
        both = f"{cluster.compute_beside_communication:.0%} and {cluster.communication_beside_compute:.0%}"
        rows.append(("compute, collective overlapped", both, "of their rates alone"))
    for label, link in (("link within a node", cluster.within), ("link between nodes", cluster.between)):
        if link is not None and cluster.world_size > 1:
            rows.append((label, f"{link.bytes_per_s / 1e9:.4g} GB/s", f"{format_seconds(link.latency_s)} per hop"))
    return table([{"rate": label, "measured": value, "note": note} for label, value, note in rows])


def _collective_rows(cluster: ClusterSpec) -> list[dict[str, Any]]:
    return [
        {
            "collective": m.op, "ranks": m.ranks, "nodes": m.nodes, "bytes": m.bytes, "seconds": m.seconds,
            "algbw_bytes_per_s": m.bytes / m.seconds,
            "busbw_bytes_per_s": bus_bandwidth(m.op, m.bytes, m.ranks, m.seconds),
        }
        for m in cluster.measured
    ]  # fmt: skip


def _collectives(cluster: ClusterSpec) -> Table:
    rows: list[Row] = [
        {
            "collective": row["collective"], "ranks": row["ranks"], "nodes": row["nodes"],
            "size": Quantity(row["bytes"], "B"), "time": Quantity(row["seconds"], "s"),
            "algbw (GB/s)": f"{row['algbw_bytes_per_s'] / 1e9:.3f}",
            "busbw (GB/s)": f"{row['busbw_bytes_per_s'] / 1e9:.3f}",
        }
        for row in _collective_rows(cluster)
    ]  # fmt: skip
    return table(rows)


def _missing(cluster: ClusterSpec, title: str = "Not measured:") -> Notes:
    """Pieces with the same reason on one line."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in cluster.not_measured.items():
        by_reason.setdefault(reason, []).append(name)
    return Notes(title=title, sentences=[f"{', '.join(names)}: {why}" for why, names in by_reason.items()])
