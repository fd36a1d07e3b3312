"""A calibration from the options to the cluster's profile: what to measure, launched, read back and fitted.

Pieces that are missing are named in the profile, with the reason.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import torch
from scipy.optimize import nnls

from refshard.costs import BACKWARD_PRODUCTS
from refshard.errors import LaunchError, SpecError
from refshard.measure.calibration.collectives import traffic
from refshard.measure.calibration.kernels import pace, shapes
from refshard.measure.calibration.rank import pieces_of
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
    samples_file,
)
from refshard.measure.launchers.base import Launcher, Program, last_line
from refshard.measure.launchers.torchrun import Place
from refshard.measure.worker import request_file
from refshard.resources import available_cores
from refshard.specs.case import Device
from refshard.specs.cluster import ClusterSpec, Library, LinkSpec, MeasuredCollective
from refshard.specs.hardware import AttentionPoint, Dtype, HardwareSpec, Rate
from refshard.specs.suite import NetworkSpec

_SWEEP_LIMIT_S = 1200.0
_MOST_SWEEPS = 99
_DIGITS = 4
_IDLE = 0.95
"""A rank that had its core for a smaller share of the time shared it with other work."""
_SUSTAINED = "sustained until three windows agree within 1 %"
S = TypeVar("S", bound=Sample)


def plan_calibration(
    *,
    ranks: int | None,
    threads: int,
    network: NetworkSpec | None,
    device: Device,
    quick: bool,
    sweeps: int | None = None,
    place: Place | None = None,
    elsewhere: bool = False,
) -> Calibration:
    """What to measure: in three sweeps, or a quick one.

    By default all ranks that torchrun started take part (``place`` is this process's among them), or as many as there
    are GPUs, or as the cores support. If ranks run ``elsewhere``, their number and device must be given.

    Raises:
        SpecError: the device is missing, or the ranks cannot be spread over the hosts.
    """
    gpus = torch.cuda.device_count()
    if threads < 1:
        raise SpecError(f"threads_per_rank must be >= 1, got {threads}")
    if sweeps is not None and not 1 <= sweeps <= _MOST_SWEEPS:
        raise SpecError(f"rounds must be from 1 to {_MOST_SWEEPS}, got {sweeps}")
    if ranks is not None and ranks < 1:
        raise SpecError(f"ranks must be >= 1, got {ranks}")
    if elsewhere and (ranks is None or device == "auto"):
        raise SpecError(
            "launcher 'slurm' starts ranks on nodes that are unknown here; give --gpus, and --device cpu or cuda"
        )
    if device == "cuda" and not gpus and not elsewhere:
        raise SpecError("device: 'cuda' asked for, but torch sees no GPU; ask for 'cpu' or 'auto'")
    if device == "cuda" and network is not None and not elsewhere:
        raise SpecError("device must be 'cpu' with --network, got 'cuda': NCCL would bypass it; use --device cpu")
    chosen: Literal["cpu", "cuda"] = "cpu"
    if device == "cuda" or (device == "auto" and gpus and network is None):
        chosen = "cuda"
    hosts = network.hosts if network is not None else 1
    here = gpus if chosen == "cuda" else max(available_cores() // threads, 1)
    wanted = ranks or (place.world_size if place else max(here // hosts, 1) * hosts)
    if place and wanted > place.world_size:
        raise SpecError(f"ranks: {wanted} asked for, torchrun started {place.world_size}; lower it, or start more")
    on_host = min(wanted, place.local_world_size) if place else wanted
    if chosen == "cuda" and on_host > gpus and not elsewhere:
        raise SpecError(f"ranks: {on_host} ranks need {on_host} GPUs, found {gpus}; lower it")
    if wanted % hosts:
        raise SpecError(f"ranks must be a multiple of the network's {hosts} hosts, got {wanted}; change either")
    return Calibration(
        ranks=wanted,
        threads=threads,
        device=chosen,
        sweeps=sweeps or (1 if quick else 3),
        cpu_clock=chosen == "cpu" and threads == 1 and (elsewhere or on_host <= available_cores()),
        nodes_here=hosts,
        shapes=shapes(chosen, quick=quick),
        traffic=traffic(chosen, quick=quick),
        pace=pace(chosen, quick=quick),
        command=shlex.join(["refshard", *sys.argv[1:]]),
        when=datetime.now(UTC).date().isoformat(),
    )


def measure(
    calibration: Calibration, launcher: Launcher, folder: Path, on_progress: Callable[[str], None]
) -> str | None:
    """Have the ranks leave their samples in ``folder``; why they did not finish, if so.

    Raises:
        KeyboardInterrupt: it was cut short; the samples until then are there.
    """
    request_file(folder, "calibration").write_bytes(msgspec.json.encode(calibration))
    limit_s = _SWEEP_LIMIT_S * (1 + calibration.sweeps)
    program = Program(name="calibration", processes=calibration.ranks, time_limit_s=limit_s)
    try:
        launch = launcher.launch(program, folder, on_progress)
    except LaunchError as error:
        return str(error)
    if launch.timed_out:
        stood = f" ({launch.error})" if launch.error else ""
        return f"the ranks did not finish within {limit_s:g} s and were killed{stood}"
    return f"{launch.error} ({last_line(launch)})" if launch.error else None


def is_begun(folder: Path) -> bool:
    """Whether the ranks left any samples there."""
    return any(folder.glob(samples_file(folder, 0).name.replace("0", "*")))


def read_profile(folder: Path, ended: str | None = None) -> ClusterSpec:
    """The profile from the samples in ``folder``; ``ended`` says why the ranks did not finish, if so.

    Raises:
        SpecError: there is no calibration in the folder.
        LaunchError: what was measured is too little for a profile.
    """
    try:
        calibration = msgspec.json.decode(request_file(folder, "calibration").read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError) as error:
        raise SpecError(f"from: {folder} has no calibration ({error}); name a NAME.toml.samples folder") from None
    paths = [samples_file(folder, rank) for rank in range(calibration.ranks)]
    if lost := [rank for rank, path in enumerate(paths) if not path.exists()]:
        ranks = f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost[:8]))}"
        raise LaunchError(f"calibrate: {ended or 'it ended early'}; {ranks} measured nothing; correct that")
    try:
        samples = [msgspec.json.decode(path.read_bytes(), type=RankSamples) for path in paths]
        return build_profile(calibration, samples, ended or "")
    except TooLittleError as error:
        raise LaunchError(
            f"calibrate: {f'{ended}; ' if ended else ''}{error}; correct that, and measure again"
        ) from None


class TooLittleError(Exception):
    """The samples make no profile; the message says what is missing, and why."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The samples of all ranks and sweeps together, by piece."""

    pieces: Pieces

    def of(self, name: str, kind: type[S]) -> list[S]:
        """The samples of a piece."""
        return [s for s in self.pieces[name].samples if isinstance(s, kind)] if name in self.pieces else []


def build_profile(calibration: Calibration, ranks: Sequence[RankSamples], ended: str = "") -> ClusterSpec:
    """The profile from the samples of all ranks; ``ended`` says why the ranks did not finish, if so.

    Raises:
        TooLittleError: not enough was measured.
    """
    first = ranks[0]
    found = _Found(of_ranks([of_sweeps(rank.sweeps) for rank in ranks]))
    source = f"measured on {first.machine}, {calibration.when}, torch {first.torch}: {calibration.command}"
    missing = {}
    for name in pieces_of(calibration, first.nodes):
        piece = found.pieces.get(name)
        if piece is None:
            missing[name] = ended or "the calibration ended before"
        elif piece.failure:
            missing[name] = f"{f'only {len(piece.samples)} measured; ' if piece.samples else ''}{piece.failure}"
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
        about=_about(calibration, ranks),
        compute_beside_communication=compute,
        communication_beside_compute=communication,
        not_measured=missing,
        sources={"ranks_per_node": "as asked for", **sources},
    )


def _about(calibration: Calibration, ranks: Sequence[RankSamples]) -> str:
    """The machine, how it was measured, and what may be wrong with the times."""
    nodes, threads = ranks[0].nodes, calibration.threads
    text = "1 rank" if calibration.ranks == 1 else f"{calibration.ranks} ranks"
    text += f" on {nodes} hosts" if nodes > 1 else ""
    text += f" of {threads} thread{'s' if threads > 1 else ''}" if calibration.device == "cpu" else ""
    text += f", medians of {calibration.sweeps} sweeps" if calibration.sweeps > 1 else ""
    machines = list(dict.fromkeys(rank.machine for rank in ranks))
    text += f"; the ranks ran on different machines: {', '.join(machines)}" if len(machines) > 1 else ""
    if threads == 1 and (busy := min(rank.busy for rank in ranks)) < _IDLE:
        counted = "excluded from compute times only" if calibration.cpu_clock else "included in the times"
        text += f"; a rank got its core only {busy:.0%} of the time (other processes; {counted})"
    return f"{machines[0]}: {text}"


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
    memory = median(s.bytes / max(s.seconds - kernel_s, 1e-9) for s in moves if not s.transcendentals)
    silu = [sample for sample in moves if sample.transcendentals]
    rates: dict[str, dict[Dtype, Rate]] = {}
    errors: dict[Dtype, float] = {}
    for suffix, how in (("", ""), ("_burst", IN_BURSTS)):
        matmul, attention = rates.setdefault(f"matmul{suffix}", {}), rates.setdefault(f"attention{suffix}", {})
        for dtype in dtypes:
            products = found.of(f"{dtype} products{how}", Timed)
            attended = found.of(f"{dtype} attention{how}", TimedAttention)
            if products and attended:
                fitted = fit_products(products, kernel_s)
                errors.setdefault(dtype, fitted.typical_error)
                matmul[dtype] = fitted.rate
                attention[dtype] = attention_rate(attended, fitted.rate.peak)

    def bytes_per_s(name: str) -> float:
        """The rate of the only sample; 0 without one, or if it took no time: then it does not bind."""
        samples = found.of(name, Timed)
        return rounded(samples[0].bytes / samples[0].seconds) if samples and samples[0].seconds else 0.0

    first = ranks[0]
    fields: dict[str, Any] = {
        "memory_bytes": first.memory_bytes,
        "memory_bytes_per_s": rounded(memory),
        "kernel_s": rounded(kernel_s),
        "host_s": rounded(operation.host_s),
        "multiprocessors": first.multiprocessors,
        "attention_points": tuple(
            AttentionPoint(
                dtype=dtype,
                head_dim=point.head_dim,
                seq_len=point.seq_len,
                forward_s=rounded(point.forward_s),
                backward_s=rounded(point.backward_s),
            )
            for dtype in dtypes
            for point in found.of(f"{dtype} attention", TimedAttention)
        ),
        **rates,
        "transcendental_per_s": rounded(transcendental_per_s(silu, kernel_s, memory)) if silu else 0.0,
        "optimizer_bytes_per_s": bytes_per_s(OPTIMIZER),
        "first_touch_bytes_per_s": bytes_per_s(NEW_MEMORY),
    }
    within = ", ".join(f"{dtype} {error:.0%}" for dtype, error in errors.items())
    tiny = f"{source}: a decoder layer too small to compute anything, per kernel"
    sources = {
        "memory_bytes": "the system's, a rank's share of it",
        "memory_bytes_per_s": f"{source}: additions, scalings and copies, all ranks at once, {_SUSTAINED}",
        "matmul": f"{source}: products of a linear layer, forward and backward, {_SUSTAINED}; half of them within "
        f"{within}{_clocks(ranks, 'products')}",
        "matmul_burst": f"{source}: the same products, in bursts",
        "attention": f"{source}: the longest and widest of attention_points",
        "attention_burst": f"{source}: the same, in bursts",
        "attention_points": f"{source}: scaled_dot_product_attention, {_SUSTAINED}{_clocks(ranks, 'attention')}",
        "kernel_s": tiny,
        "host_s": tiny,
        "transcendental_per_s": f"{source}: SiLU",
        "optimizer_bytes_per_s": f"{source}: fused AdamW",
        "first_touch_bytes_per_s": f"{source}: 64 MiB allocated and written, less 64 MiB written again",
        "multiprocessors": "the device's properties",
    }
    return HardwareSpec(
        device=calibration.device,
        device_name=first.machine if calibration.device == "cuda" else "",
        capability=first.capability,
        about=first.machine,
        sources={field: sources[field] for field, value in fields.items() if value},
        **fields,
    )


def _clocks(ranks: Sequence[RankSamples], kind: str) -> str:
    """Clocks and power of the GPUs during the sustained pieces of this kind."""
    found = []
    for dtype in DTYPES:
        uses = [use for rank in ranks for use in rank.gpu_use.get(f"{dtype} {kind}", ())]
        clocks = [use.sm_clock_mhz for use in uses if use.sm_clock_mhz is not None]
        powers = [use.power_w for use in uses if use.power_w is not None]
        held = {reason for use in uses for reason in use.throttled}
        parts = [f"{fmean(clocks):.0f} MHz"] if clocks else []
        parts += [f"{fmean(powers):.0f} W"] if powers else []
        parts += [f"clocks held down by {', '.join(sorted(held))}"] if held else []
        found += [f"{dtype} at {', '.join(parts)}"] if parts else []
    return f"; {'; '.join(found)}" if found else ""


def rounded(value: float) -> float:
    """To four digits: more would be false precision."""
    return float(f"{value:.{_DIGITS}g}")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A rate, and the median relative error of its law."""

    rate: Rate
    typical_error: float


def least_relative(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Factors >= 0 of the columns with the least relative error of their sum from ``seconds``; and those errors."""
    scaled = np.array(columns, dtype=float).T / np.array(seconds)[:, None]
    # Columns are scaled, so that the solver's tolerance means the same for each.
    sizes = np.abs(scaled).max(axis=0)
    sizes[sizes == 0] = 1.0
    factors, _ = nnls(scaled / sizes, np.ones(len(seconds)))
    errors = (scaled / sizes) @ factors - 1
    return list(factors / sizes), list(errors)


def fit_products(samples: Sequence[Timed], kernel_s: float) -> Fitted:
    """``flops / rate + bytes / bytes_per_s + overhead``, on top of the time of the smallest kernel."""
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
    """The rate of the longest and widest attention, forward and backward together."""
    largest = max(samples, key=lambda s: (s.seq_len, s.head_dim))
    reached = 4 * largest.head_dim * (1 + BACKWARD_PRODUCTS) / (largest.forward_s + largest.backward_s)
    return Rate(peak=rounded(max(peak, reached)), efficiency=min(rounded(reached / max(peak, reached)), 1.0))


def transcendental_per_s(samples: Sequence[Timed], kernel_s: float, memory_bytes_per_s: float) -> float:
    """Exponentials a second; 0 if memory alone explains the time of such kernels, within a tenth."""
    seconds = [max(s.seconds - kernel_s, 1e-9) for s in samples]
    if median(t * memory_bytes_per_s / s.bytes for s, t in zip(samples, seconds)) < 1.1:
        return 0.0
    return median(s.transcendentals / t for s, t in zip(samples, seconds))


def median_collectives(samples: Sequence[TimedCollective]) -> tuple[MeasuredCollective, ...]:
    """The median over repeats of each collective."""
    return tuple(
        MeasuredCollective(op=s.op, ranks=s.ranks, nodes=s.nodes, bytes=s.bytes, seconds=rounded(median(s.seconds)))
        for s in samples
    )


def fit_link(measured: Sequence[MeasuredCollective], ranks: int, nodes: int) -> LinkSpec | None:
    """Latency of a hop and bandwidth from the all-gathers of a group: ``hops * latency + S (n-1)/n / bandwidth``.

    The smallest and the largest size decide. Between them a link may be faster, such as one that lets bursts pass.
    """
    points = [m for m in measured if (m.op, m.ranks, m.nodes) == ("all_gather", ranks, nodes)]
    if len(points) < 2:
        return None
    smallest, largest = (extreme(points, key=lambda p: p.bytes) for extreme in (min, max))
    carried = (largest.bytes - smallest.bytes) * (ranks - 1) / ranks
    bytes_per_s = carried / max(largest.seconds - smallest.seconds, 1e-9)
    latency = max(smallest.seconds - smallest.bytes * (ranks - 1) / ranks / bytes_per_s, 0.0) / (ranks - 1)
    return LinkSpec(bytes_per_s=rounded(bytes_per_s), latency_s=rounded(latency))


def _links(
    calibration: Calibration, nodes: int, measured: Sequence[MeasuredCollective], source: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """The links between nodes and within one, with how many ranks and nodes they join; and their sources."""
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
