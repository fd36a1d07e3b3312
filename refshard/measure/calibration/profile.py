"""What the ranks measured becomes a cluster's profile. Pieces that are missing are named in it, with the reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import msgspec
import numpy as np
from scipy.optimize import nnls

from refshard.costs import BACKWARD_PRODUCTS
from refshard.measure.calibration.samples import (
    BESIDE,
    DTYPES,
    ELEMENTWISE,
    IN_BURSTS,
    NEW_MEMORY,
    OPERATIONS,
    OPTIMIZER,
    Beside,
    Calibration,
    Operations,
    Pieces,
    RankSamples,
    Sample,
    Timed,
    TimedAttention,
    TimedCollective,
    of_ranks,
    of_sweeps,
    piece_names,
)
from refshard.records import GpuUse
from refshard.specs.cluster import ClusterSpec, Library, LinkSpec, MeasuredCollective
from refshard.specs.hardware import AttentionPoint, Dtype, HardwareSpec, Rate

_DIGITS = 4


def rounded(value: float) -> float:
    """To four digits: more would pretend."""
    return float(f"{value:.{_DIGITS}g}")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A rate, and by what part its law misses the samples: half of them by no more than ``typical_error``."""

    rate: Rate
    typical_error: float


def least_relative(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Factors >= 0 of the columns whose sum comes closest to ``seconds``, as a part of each; and those errors."""
    scaled = np.array(columns, dtype=float).T / np.array(seconds)[:, None]
    # Columns of a size, so that the solver's tolerance means the same for each.
    sizes = np.abs(scaled).max(axis=0)
    sizes[sizes == 0] = 1.0
    factors, _ = nnls(scaled / sizes, np.ones(len(seconds)))
    errors = (scaled / sizes) @ factors - 1
    return list(factors / sizes), list(errors)


def fit_products(samples: Sequence[Timed], kernel_s: float) -> Fitted:
    """``flops / rate + bytes / bytes_per_s + overhead``, beside what any kernel takes."""
    seconds = [max(s.seconds - kernel_s, 1e-9) for s in samples]
    columns = [[s.flops for s in samples], [s.bytes for s in samples], [1.0] * len(samples)]
    (per_flop, per_byte, overhead), errors = least_relative(columns, seconds)
    best = max(s.flops / s.seconds for s in samples)
    reached = 1 / per_flop if per_flop else best
    peak = max(best, reached)
    rate = Rate(
        peak=rounded(peak),
        efficiency=min(rounded(reached / peak), 1.0),
        overhead_s=rounded(overhead),
        bytes_per_s=rounded(1 / per_byte) if per_byte else 0.0,
    )
    return Fitted(rate, median(map(abs, errors)))


def attention_rate(samples: Sequence[TimedAttention], peak: float) -> Rate:
    """The rate of the longest and widest attention that was measured, forward and backward together."""
    largest = max(samples, key=lambda s: (s.seq_len, s.head_dim))
    reached = 4 * largest.head_dim * (1 + BACKWARD_PRODUCTS) / (largest.forward_s + largest.backward_s)
    return Rate(peak=rounded(max(peak, reached)), efficiency=min(rounded(reached / max(peak, reached)), 1.0))


def attention_points(samples: Sequence[TimedAttention]) -> tuple[AttentionPoint, ...]:
    """The samples as a profile holds them."""
    return tuple(
        AttentionPoint(
            dtype=sample.dtype,
            head_dim=sample.head_dim,
            seq_len=sample.seq_len,
            forward_s=rounded(sample.forward_s),
            backward_s=rounded(sample.backward_s),
        )
        for sample in samples
    )


def bytes_per_s(samples: Sequence[Timed], kernel_s: float) -> float:
    """What elementwise kernels reach, the median of all."""
    return median(s.bytes / max(s.seconds - kernel_s, 1e-9) for s in samples)


def transcendental_per_s(samples: Sequence[Timed], kernel_s: float, memory_bytes_per_s: float) -> float:
    """Exponentials a second; 0 where memory alone explains what such kernels take, within a tenth."""
    seconds = [max(s.seconds - kernel_s, 1e-9) for s in samples]
    if median(t * memory_bytes_per_s / s.bytes for s, t in zip(samples, seconds)) < 1.1:
        return 0.0
    return median(s.transcendentals / t for s, t in zip(samples, seconds))


def median_collectives(samples: Sequence[TimedCollective]) -> tuple[MeasuredCollective, ...]:
    """Of each collective the median over repeats."""
    return tuple(
        MeasuredCollective(op=s.op, ranks=s.ranks, nodes=s.nodes, bytes=s.bytes, seconds=rounded(median(s.seconds)))
        for s in samples
    )


def fit_link(measured: Sequence[MeasuredCollective], ranks: int, nodes: int) -> LinkSpec | None:
    """Latency of a hop and bandwidth from the all-gathers of a group: ``hops * latency + S (n-1)/n / bandwidth``.

    The smallest and the largest decide, between which a link may well go faster: where it lets bursts pass, say.
    """
    points = [m for m in measured if (m.op, m.ranks, m.nodes) == ("all_gather", ranks, nodes)]
    if len(points) < 2:
        return None
    smallest, largest = (extreme(points, key=lambda p: p.bytes) for extreme in (min, max))
    carried = (largest.bytes - smallest.bytes) * (ranks - 1) / ranks
    bytes_per_s = carried / max(largest.seconds - smallest.seconds, 1e-9)
    latency = max(smallest.seconds - smallest.bytes * (ranks - 1) / ranks / bytes_per_s, 0.0) / (ranks - 1)
    return LinkSpec(bytes_per_s=rounded(bytes_per_s), latency_s=rounded(latency))


_IDLE = 0.95
"""A rank that had its core for less of the time shared it with other work."""
_SUSTAINED = "sustained until three windows agree within 1 %"
S = TypeVar("S", bound=Sample)


class TooLittleError(Exception):
    """What was measured makes no profile; the message says what is missing, and why."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The samples of all ranks and sweeps together, by piece."""

    pieces: Pieces

    def of(self, name: str, kind: type[S]) -> list[S]:
        """The samples of a piece; none if it was not measured."""
        return [s for s in self.pieces[name].samples if isinstance(s, kind)] if name in self.pieces else []


def build_profile(calibration: Calibration, ranks: Sequence[RankSamples], ended: str = "") -> ClusterSpec:
    """The profile of what all ranks measured; ``ended`` says why they did not come to the end, if so.

    Raises:
        TooLittleError: not enough was measured.
    """
    first = ranks[0]
    found = _Found(of_ranks([of_sweeps(rank.sweeps) for rank in ranks]))
    source = f"measured on {first.machine}, {calibration.when}, torch {first.torch}: {calibration.command}"
    missing = _missing(calibration, first.nodes, found.pieces, ended)
    measured = median_collectives([s for name in found.pieces for s in found.of(name, TimedCollective)])
    links, sources = _links(calibration, first.nodes, measured, source)
    library: Library = "nccl" if first.backend == "nccl" else "gloo"
    beside = next(iter(found.of(BESIDE, Beside)), Beside(compute=1.0, communication=1.0))
    compute, communication = rounded(beside.compute), rounded(beside.communication)
    for field, part in (("compute_beside_communication", compute), ("communication_beside_compute", communication)):
        if part != 1:
            sources[field] = f"{source}: matrix products beside collectives"
    if measured:
        sources["measured"] = f"{source}: medians over repeats of the slowest rank's time"
    return ClusterSpec(
        hardware=_hardware(calibration, ranks, found, source, missing),
        library=library,
        **links,
        measured=measured,
        about=f"{first.machine}: {_words(calibration, first.nodes)}{_doubt(calibration, ranks)}",
        compute_beside_communication=compute,
        communication_beside_compute=communication,
        not_measured=missing,
        sources={"ranks_per_node": "as asked for", **sources},
    )


def _missing(calibration: Calibration, nodes: int, pieces: Pieces, ended: str) -> dict[str, str]:
    """Why pieces are missing, in whole or in part, by their names."""
    found = {}
    for name in piece_names(calibration, nodes):
        piece = pieces.get(name)
        if piece is None:
            found[name] = ended or "the calibration ended before"
        elif piece.failure:
            found[name] = f"{f'only {len(piece.samples)} measured; ' if piece.samples else ''}{piece.failure}"
    return found


def _words(calibration: Calibration, nodes: int) -> str:
    ranks = "1 rank" if calibration.ranks == 1 else f"{calibration.ranks} ranks"
    on = f" on {nodes} hosts" if nodes > 1 else ""
    threads = f" of {calibration.threads} thread{'s' if calibration.threads > 1 else ''}"
    sweeps = f", medians of {calibration.sweeps} sweeps" if calibration.sweeps > 1 else ""
    return f"{ranks}{on}{threads if calibration.device == 'cpu' else ''}{sweeps}"


def _doubt(calibration: Calibration, ranks: Sequence[RankSamples]) -> str:
    machines = list(dict.fromkeys(rank.machine for rank in ranks))
    several = f"; the ranks ran on different machines: {', '.join(machines)}" if len(machines) > 1 else ""
    busy = min(rank.busy for rank in ranks)
    if calibration.threads > 1 or busy >= _IDLE:
        return several
    counted = "excluded from compute times only" if calibration.cpu_clock else "included in the times"
    return f"{several}; a rank got its core only {busy:.0%} of the time (other processes; {counted})"


def _hardware(
    calibration: Calibration, ranks: Sequence[RankSamples], found: _Found, source: str, missing: dict[str, str]
) -> HardwareSpec:
    operations, moves = found.of(OPERATIONS, Operations), found.of(ELEMENTWISE, Timed)
    lacking = [name for name, samples in ((OPERATIONS, operations), (ELEMENTWISE, moves)) if not samples]
    kinds: tuple[tuple[str, type[Sample]], ...] = (("products", Timed), ("attention", TimedAttention))
    dtypes = [dtype for dtype in DTYPES if all(found.of(f"{dtype} {name}", kind) for name, kind in kinds)]
    lacking += [] if dtypes else [f"{DTYPES[0]} {name}" for name, _ in kinds]
    if lacking:
        reasons = "; ".join(f"{name}: {missing.get(name, 'measured')}" for name in lacking)
        raise TooLittleError(f"a profile needs {', '.join(lacking)} ({reasons})")
    for dtype in DTYPES:
        if dtype not in dtypes and f"{dtype} products" not in missing:
            missing[f"{dtype} products"] = f"left out, since {dtype} attention was not measured"
    (operation,) = operations
    kernel_s = operation.kernel_s
    memory = bytes_per_s([s for s in moves if not s.transcendentals], kernel_s)
    rates, errors = _rates(found, dtypes, kernel_s)
    points = [point for dtype in dtypes for point in found.of(f"{dtype} attention", TimedAttention)]
    silu = [sample for sample in moves if sample.transcendentals]
    binding = {
        "transcendental_per_s": rounded(transcendental_per_s(silu, kernel_s, memory)) if silu else 0.0,
        "optimizer_bytes_per_s": _bytes_per_s(found.of(OPTIMIZER, Timed)),
        "first_touch_bytes_per_s": _bytes_per_s(found.of(NEW_MEMORY, Timed)),
    }
    first, on_gpus = ranks[0], calibration.device == "cuda"
    fields: dict[str, Any] = {
        "memory_bytes": first.memory_bytes,
        "memory_bytes_per_s": rounded(memory),
        "kernel_s": rounded(kernel_s),
        "host_s": rounded(operation.host_s),
        "multiprocessors": first.multiprocessors,
        "attention_points": attention_points(points),
        **rates,
        **binding,
    }
    said = _sources(source, ", ".join(f"{dtype} {error:.0%}" for dtype, error in errors.items()), _clocks(ranks))
    return HardwareSpec(
        device=calibration.device,
        device_name=first.machine if on_gpus else "",
        capability=first.capability,
        about=first.machine,
        sources={field: said[field] for field, value in fields.items() if value},
        **fields,
    )


def _rates(
    found: _Found, dtypes: Sequence[Dtype], kernel_s: float
) -> tuple[dict[str, dict[Dtype, Rate]], dict[Dtype, float]]:
    """Fields of the hardware by name, and by how much the law of products misses the samples."""
    fields: dict[str, dict[Dtype, Rate]] = {}
    errors: dict[Dtype, float] = {}
    for suffix, pace in (("", ""), ("_burst", IN_BURSTS)):
        matmul, attention = fields.setdefault(f"matmul{suffix}", {}), fields.setdefault(f"attention{suffix}", {})
        for dtype in dtypes:
            products = found.of(f"{dtype} products{pace}", Timed)
            attended = found.of(f"{dtype} attention{pace}", TimedAttention)
            if products and attended:
                fitted = fit_products(products, kernel_s)
                errors.setdefault(dtype, fitted.typical_error)
                matmul[dtype] = fitted.rate
                attention[dtype] = attention_rate(attended, fitted.rate.peak)
    return fields, errors


def _bytes_per_s(samples: Sequence[Timed]) -> float:
    """The rate of the only sample; 0 without one, or where it took no time: then it does not bind."""
    return rounded(samples[0].bytes / samples[0].seconds) if samples and samples[0].seconds else 0.0


def _clocks(ranks: Sequence[RankSamples]) -> dict[str, str]:
    """In words, at which clocks and power the GPUs were during a sustained piece, by its name."""
    uses: dict[str, list[GpuUse]] = {}
    for rank in ranks:
        for name, of_node in rank.gpu_use.items():
            uses.setdefault(name, []).extend(of_node)
    return {name: words for name, found in uses.items() if (words := _clock_words(found))}


def _clock_words(uses: Sequence[GpuUse]) -> str:
    clocks = [use.sm_clock_mhz for use in uses if use.sm_clock_mhz is not None]
    powers = [use.power_w for use in uses if use.power_w is not None]
    held = {reason for use in uses for reason in use.throttled}
    words = [f"{sum(clocks) / len(clocks):.0f} MHz"] if clocks else []
    words += [f"{sum(powers) / len(powers):.0f} W"] if powers else []
    words += [f"clocks held down by {', '.join(sorted(held))}"] if held else []
    return ", ".join(words)


def _sources(source: str, errors: str, clocks: Mapping[str, str]) -> dict[str, str]:
    at = {kind: "; ".join(f"{dtype} at {clocks[name]}" for dtype in DTYPES if (name := f"{dtype} {kind}") in clocks)
          for kind in ("products", "attention")}  # fmt: skip
    products, attention = (f"; {words}" if words else "" for words in at.values())
    operations = f"{source}: a decoder layer too small to compute anything, per kernel"
    return {
        "memory_bytes": "the system's, a rank's share of it",
        "memory_bytes_per_s": f"{source}: additions, scalings and copies, all ranks at once, {_SUSTAINED}",
        "matmul": f"{source}: products of a linear layer, forward and backward, {_SUSTAINED}; half of them within "
        f"{errors}{products}",
        "matmul_burst": f"{source}: the same products, in bursts",
        "attention": f"{source}: the longest and widest of attention_points",
        "attention_burst": f"{source}: the same, in bursts",
        "attention_points": f"{source}: scaled_dot_product_attention, {_SUSTAINED}{attention}",
        "kernel_s": operations,
        "host_s": operations,
        "transcendental_per_s": f"{source}: SiLU",
        "optimizer_bytes_per_s": f"{source}: fused AdamW",
        "first_touch_bytes_per_s": f"{source}: 64 MiB allocated and written, less 64 MiB written again",
        "multiprocessors": "the device's properties",
    }


def _links(
    calibration: Calibration, nodes: int, measured: Sequence[MeasuredCollective], source: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """What joins nodes, and what joins ranks within one, as many as anything is known to join; and their sources."""
    fitted = f"{source}: latency and bandwidth fitted to all-gathers"
    per_node = calibration.ranks // nodes
    within = fit_link(measured, per_node, 1) if per_node > 1 else None
    between = _between(measured, nodes, per_node) if nodes > 1 else None
    sizes = {"ranks_per_node": per_node, "nodes": nodes if between else 1}
    said = {"between": f"{fitted} of all ranks; latency of those of one rank a node"} if between else {}
    if within is not None:
        return {"within": within, "between": between, **sizes}, {**said, "within": fitted}
    if between is not None:
        why = "no two ranks share a host" if per_node == 1 else "all-gathers within a node were not measured"
        return {"within": between, "between": between, **sizes}, {**said, "within": f"as between: {why}"}
    why = "a single rank talks to no other" if calibration.ranks == 1 else "no all-gather was measured"
    within = LinkSpec(bytes_per_s=1e9, latency_s=0.0)
    return {"within": within, "between": None, "ranks_per_node": 1, "nodes": 1}, {"within": f"a placeholder: {why}"}


def _between(measured: Sequence[MeasuredCollective], nodes: int, per_node: int) -> LinkSpec | None:
    """The bandwidth of a node's adapters together, and the latency of a hop between nodes."""
    whole = fit_link(measured, nodes * per_node, nodes)
    if per_node == 1:
        return whole
    across = fit_link(measured, nodes, nodes)  # as many such groups at once as a node has ranks
    if whole is None and across is not None:
        return msgspec.structs.replace(across, bytes_per_s=rounded(across.bytes_per_s * per_node))
    return whole if whole is None or across is None else msgspec.structs.replace(whole, latency_s=across.latency_s)
