"""A cluster's profile with the rates that a real trace shows, in place of those that ship with refshard.

Only what a trace shows without bias is taken, from kernels that ran alone: products and attention in steps that keep
the GPU busy (else they are bursts, since an idle GPU clocks higher), the memory's rate from large elementwise kernels,
and links from NCCL's large messages within a node. The host's time is not: a profiler slows the host down.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from refshard import resources
from refshard.analysis.analyse import analyse
from refshard.analysis.figures import OperatorFigures, TraceFigures
from refshard.analysis.operators import operator_report
from refshard.dryrun.price import TIMES
from refshard.errors import TraceError
from refshard.events.reader import read_events
from refshard.events.timeline import UNKNOWN, Timeline
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.hardware import (
    AttentionKernel,
    AttentionPoint,
    HardwareSpec,
    Rate,
    load_hardware,
    profile_of_device,
)

BUSY = 0.8
"""A GPU that works for less of a step than this runs at clocks that it cannot keep."""
LARGE = 2**26
"""Bytes that no cache of a GPU holds; also the least message that shows a link's bandwidth."""
_AS = {"fp16": "bf16"}
_KINDS = ("elementwise", "normalisation")


def profile_from_trace(path: Path) -> tuple[ClusterSpec, ClusterSpec]:
    """The shipped profile of the trace's device, and that with what the trace shows.

    ``sources`` says which numbers these are, and ``not_measured`` which were kept, and why.

    Raises:
        TraceError: the trace is damaged, its device has no profile, or it shows no rate.
    """
    trace = read_events(path)
    found = analyse(trace, keep_graph=False)
    if found.identity.is_dry_run:
        raise TraceError(f"{path}: is a prediction, which shows no rates; name a trace of real training")
    figures = found.figures
    name = profile_of_device(figures.device)
    base = None if name is None else _cluster_of(name)
    if name is None or base is None:
        raise TraceError(
            f"{path}: the trace must be of a device with a profile, got {figures.device}; see refshard list hardware"
        )
    report, old = operator_report(trace, _undisturbed(found.timeline), figures.device), load_hardware(name)
    hardware, missing = fitted(old, () if report is None else report.operators, path.name, _busy(figures))
    within, sources = _link(figures, base), dict(base.sources)
    changes: dict[str, Any] = {}
    if within is None:
        missing["within"] = "the trace has no large NCCL messages within a node"
    else:
        changes["within"] = msgspec.structs.replace(base.within, bytes_per_s=within[0])
        sources["within"] = f"bandwidth: {path.name}, {within[1]} messages; latency: {sources['within']}"
    if hardware == old and within is None:
        raise TraceError(f"{path}: shows no rate; record large steps with record_shapes=True")
    about = f"{base.about}; with rates of {path.name}"
    return base, msgspec.structs.replace(
        base, hardware=hardware, sources=sources, not_measured=missing, about=about, **changes
    )  # fmt: skip


def _undisturbed(timeline: Timeline) -> Timeline:
    """With kernels out of all steps whose call has one that ran beside something else: profiles are of kernels alone,
    and predictions add what concurrent work costs.
    """
    spans = timeline.spans
    alone = spans.alone()
    disturbed = ~alone | np.isin(spans.calls, np.setdiff1d(spans.calls[~alone], UNKNOWN))
    return replace(timeline, spans=replace(spans, steps=np.where(disturbed, UNKNOWN, spans.steps)))


def fitted(
    hardware: HardwareSpec, operators: Sequence[OperatorFigures], trace: str, busy: float
) -> tuple[HardwareSpec, dict[str, str]]:
    """The hardware with the rates of these operators, and which pieces were kept, and why.

    ``busy`` is the share of a step that the GPU works for.
    """
    changes: dict[str, Any] = {}
    sources = dict(hardware.sources)
    missing = {
        "host_s": "a profiler slows the host down; run refshard calibrate on the machine",
        "optimizer_bytes_per_s": "traces leave out the sizes of long lists of tensors",
    }
    products, points = _products(hardware, operators), _points(hardware, operators)
    if busy < BUSY:
        missing["matmul, attention"] = f"the GPU is busy for {busy:.0%} of a step: its clocks are those of bursts"
        if products:
            bursts = {dtype: rate for dtype, (rate, _) in products.items()}
            changes["matmul_burst"] = {**hardware.matmul_burst, **bursts}
            sources["matmul_burst"] = _source(trace, sum(count for _, count in products.values()))
    else:
        if products:
            changes["matmul"] = {**hardware.matmul, **{dtype: rate for dtype, (rate, _) in products.items()}}
            counts = ", ".join(f"{dtype} {_source(trace, count)}" for dtype, (_, count) in products.items())
            sources["matmul"] = f"efficiency: {counts}; else: {sources['matmul']}"
        if points:
            same = {_key(point) for point, _ in points}
            kept = [point for point in hardware.attention_points if _key(point) not in same]
            changes["attention_points"] = (*kept, *(point for point, _ in points))
            found = ", ".join(f"{p.kernel} {p.head_dim} x {p.seq_len}: {_source(trace, n)}" for p, n in points)
            sources["attention_points"] = "; ".join(filter(None, (found, sources.get("attention_points"))))
    if memory := _memory(hardware, operators):
        changes["memory_bytes_per_s"] = memory[0]
        sources["memory_bytes_per_s"] = f"elementwise kernels: {_source(trace, memory[1])}"
    return msgspec.structs.replace(hardware, sources=sources, **changes), missing


def _source(trace: str, count: int) -> str:
    return f"{trace}, {count} kernels"


def _products(hardware: HardwareSpec, operators: Iterable[OperatorFigures]) -> dict[Any, tuple[Rate, int]]:
    """By dtype, the rate of products that compute longer than they move, and of how many calls it is."""
    work: dict[str, tuple[float, float, int]] = defaultdict(lambda: (0.0, 0.0, 0))
    for one in operators:
        dtype = _AS.get(one.dtype or "", one.dtype or "")
        rate = hardware.matmul.get(dtype)  # type: ignore[call-overload]
        if one.kind != "GEMM" or rate is None or not one.flops or not one.bytes:
            continue
        if one.flops / rate.flops_per_s > one.bytes / hardware.memory_bytes_per_s:
            flops, seconds, count = work[dtype]
            own = one.ns / 1e9 - one.calls * (hardware.kernel_s + rate.overhead_s)
            work[dtype] = (flops + one.calls * one.flops, seconds + own, count + one.calls)
    found: dict[Any, tuple[Rate, int]] = {}
    for dtype, (flops, seconds, count) in work.items():
        rate = hardware.matmul[dtype]  # type: ignore[index]
        if seconds > 0 and flops / seconds <= rate.peak:
            found[dtype] = msgspec.structs.replace(rate, efficiency=round(flops / seconds / rate.peak, 4)), count
    return found


def _points(hardware: HardwareSpec, operators: Iterable[OperatorFigures]) -> list[tuple[AttentionPoint, int]]:
    """Attention by kernel, dtype, width and length, where both directions are known; and of how many calls each is."""
    seconds: dict[tuple[Any, ...], dict[bool, tuple[float, int]]] = defaultdict(dict)
    for one in operators:
        sizes = re.match(r"\[\d+, \d+, (\d+), (\d+)\]", one.shapes or "")
        dtype = _AS.get(one.dtype or "", one.dtype or "")
        if one.kind != "attention" or not sizes or not one.flops or dtype not in hardware.attention:
            continue
        length, width, backward = int(sizes[1]), int(sizes[2]), "backward" in one.name
        kernel = next((name for name in get_args(AttentionKernel) if name in one.name), "flash")
        scores = one.flops / (2 * width * (5 if backward else 2))  # see refshard.analysis.operators
        each = (one.ns / 1e9 / one.calls - hardware.kernel_s) / scores
        seconds[kernel, dtype, width, length][backward] = each, one.calls
    return [
        (
            AttentionPoint(
                kernel=kernel, dtype=dtype, head_dim=width, seq_len=length, forward_s=float(f"{of[False][0]:.4g}"),
                backward_s=float(f"{of[True][0]:.4g}"),
            ),
            of[False][1] + of[True][1],
        )
        for (kernel, dtype, width, length), of in seconds.items()
        if len(of) == 2 and min(each for each, _ in of.values()) > 0
    ]  # fmt: skip


def _key(point: AttentionPoint) -> tuple[Any, ...]:
    return point.kernel, point.dtype, point.head_dim, point.seq_len


def _memory(hardware: HardwareSpec, operators: Iterable[OperatorFigures]) -> tuple[float, int] | None:
    """Bytes a second of large elementwise kernels, as :mod:`refshard.dryrun.price` counts them, and of how many calls.

    The median by time, since strided kernels are slower for another reason.
    """
    rates = [
        (one.bytes * TIMES.get(one.name.removeprefix("aten::"), 1.0) / (one.ns / 1e9 / one.calls - hardware.kernel_s),
         one.ns, one.calls)
        for one in operators
        if one.kind in _KINDS and one.bytes and one.bytes >= LARGE and one.ns / 1e9 / one.calls > hardware.kernel_s
    ]  # fmt: skip
    if not rates:
        return None
    rates.sort()
    half = np.cumsum([ns for _, ns, _ in rates])
    middle = rates[int(np.searchsorted(half, half[-1] / 2))][0]
    peak = hardware.memory_peak_bytes_per_s or middle
    return float(f"{min(middle, peak):.4g}"), sum(calls for *_, calls in rates)


def _busy(figures: TraceFigures) -> float:
    """The share of the steps in which something runs."""
    steps = [step.breakdown for step in figures.steps] or [figures.whole]
    return 1 - sum(step.idle_ns or 0 for step in steps) / sum(step.span_ns for step in steps)


def _link(figures: TraceFigures, cluster: ClusterSpec) -> tuple[float, int] | None:
    """The upper quartile of the bus bandwidth of large messages within a node, and of how many; waits make the rest."""
    if "nccl" not in (figures.backend or "") or (figures.world_size or 0) > cluster.ranks_per_node:
        return None
    found = [
        one.bus_bandwidth
        for one in figures.collectives
        if one.bus_bandwidth and (one.bytes or 0) >= LARGE and (one.group_size or 1) > 1
    ]
    return (float(f"{np.quantile(found, 0.75):.4g}"), len(found)) if found else None


def _cluster_of(hardware: str) -> ClusterSpec | None:
    """The first shipped cluster of this hardware, by name."""
    clusters = (load_cluster(name) for name in resources.cluster_profiles())
    return next((cluster for cluster in clusters if cluster.hardware == hardware), None)
