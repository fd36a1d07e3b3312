"""What the ranks measured becomes a cluster's profile. Pieces that are missing are named in it, with the reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from refshard.measure.calibration import fit
from refshard.measure.calibration.fit import rounded
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
from refshard.specs.hardware import Dtype, HardwareSpec, Rate

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
    measured = fit.median_collectives([s for name in found.pieces for s in found.of(name, TimedCollective)])
    links = _links(calibration, first.nodes, measured, source)
    library: Library = "nccl" if first.backend == "nccl" else "gloo"
    sources = dict(links.sources)
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
        ranks_per_node=links.ranks_per_node,
        nodes=links.nodes,
        within=links.within,
        between=links.between,
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
    memory = fit.bytes_per_s([s for s in moves if not s.transcendentals], kernel_s)
    rates = _rates(found, dtypes, kernel_s)
    points = [point for dtype in dtypes for point in found.of(f"{dtype} attention", TimedAttention)]
    silu = [sample for sample in moves if sample.transcendentals]
    binding = {
        "transcendental_per_s": rounded(fit.transcendental_per_s(silu, kernel_s, memory)) if silu else 0.0,
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
        "attention_points": fit.attention_points(points),
        **rates.fields,
        **binding,
    }
    said = _sources(source, rates.errors, _clocks(ranks))
    return HardwareSpec(
        device=calibration.device,
        device_name=first.machine if on_gpus else "",
        capability=first.capability,
        about=first.machine,
        sources={field: said[field] for field, value in fields.items() if value},
        **fields,
    )


@dataclass(frozen=True, slots=True)
class _Rates:
    """Fields of the hardware by name, and in words by how much the law of products misses the samples."""

    fields: dict[str, dict[Dtype, Rate]]
    errors: str


def _rates(found: _Found, dtypes: Sequence[Dtype], kernel_s: float) -> _Rates:
    fields: dict[str, dict[Dtype, Rate]] = {}
    errors: dict[Dtype, float] = {}
    for suffix, pace in (("", ""), ("_burst", IN_BURSTS)):
        matmul, attention = fields.setdefault(f"matmul{suffix}", {}), fields.setdefault(f"attention{suffix}", {})
        for dtype in dtypes:
            products = found.of(f"{dtype} products{pace}", Timed)
            attended = found.of(f"{dtype} attention{pace}", TimedAttention)
            if products and attended:
                fitted = fit.fit_products(products, kernel_s)
                errors.setdefault(dtype, fitted.typical_error)
                matmul[dtype] = fitted.rate
                attention[dtype] = fit.attention_rate(attended, fitted.rate.peak)
    words = ", ".join(f"{dtype} {error:.0%}" for dtype, error in errors.items())
    return _Rates(fields, words)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    """What joins ranks, and as many ranks and nodes as anything is known to join."""

    within: LinkSpec
    between: LinkSpec | None = None
    ranks_per_node: int = 1
    nodes: int = 1
    sources: dict[str, str]


def _links(calibration: Calibration, nodes: int, measured: Sequence[MeasuredCollective], source: str) -> _Links:
    """What joins nodes, and what joins ranks within one, with their sources."""
    fitted = f"{source}: latency and bandwidth fitted to all-gathers"
    per_node = calibration.ranks // nodes
    within = fit.fit_link(measured, per_node, 1) if per_node > 1 else None
    between = _between(measured, nodes, per_node) if nodes > 1 else None
    sizes = {"ranks_per_node": per_node, "nodes": nodes if between else 1}
    said = {"between": f"{fitted} of all ranks; latency of those of one rank a node"} if between else {}
    if within is not None:
        return _Links(within=within, between=between, **sizes, sources={**said, "within": fitted})
    if between is not None:
        why = "no two ranks share a host" if per_node == 1 else "all-gathers within a node were not measured"
        return _Links(within=between, between=between, **sizes, sources={**said, "within": f"as between: {why}"})
    why = "a single rank talks to no other" if calibration.ranks == 1 else "no all-gather was measured"
    return _Links(within=LinkSpec(bytes_per_s=1e9, latency_s=0.0), sources={"within": f"a placeholder: {why}"})


def _between(measured: Sequence[MeasuredCollective], nodes: int, per_node: int) -> LinkSpec | None:
    """The bandwidth of a node's adapters together, and the latency of a hop between nodes."""
    whole = fit.fit_link(measured, nodes * per_node, nodes)
    if per_node == 1:
        return whole
    across = fit.fit_link(measured, nodes, nodes)  # as many such groups at once as a node has ranks
    if whole is None and across is not None:
        return msgspec.structs.replace(across, bytes_per_s=rounded(across.bytes_per_s * per_node))
    return whole if whole is None or across is None else msgspec.structs.replace(whole, latency_s=across.latency_s)
