"""What the ranks measured becomes a cluster's profile."""

from collections.abc import Sequence
from statistics import mean

from refshard.costs import ADAMW_BYTES
from refshard.harness.calibration import fit
from refshard.harness.calibration.fit import rounded
from refshard.harness.calibration.samples import Calibration, RankSamples
from refshard.specs.cluster import ClusterSpec, Library, LinkSpec, MeasuredCollective
from refshard.specs.hardware import AttentionPoint, Dtype, HardwareSpec, Rate

_IDLE = 0.95
"""A rank that had its core for less of the time shared it with other work."""


def build_profile(calibration: Calibration, ranks: Sequence[RankSamples], machine: str, when: str) -> ClusterSpec:
    """The profile; ``machine`` and ``when`` say on what and when it was measured, with which command."""
    source = f"measured {when}"
    measured = fit.slowest_ranks([rank.collectives for rank in ranks])
    between, within, said = _links(calibration, measured, source)
    library: Library = "nccl" if ranks[0].backend == "nccl" else "gloo"
    sources = {"ranks_per_node": "as asked for", **said}
    compute = rounded(mean(rank.beside.compute for rank in ranks))
    communication = rounded(mean(rank.beside.communication for rank in ranks))
    for field, part in (("compute_beside_communication", compute), ("communication_beside_compute", communication)):
        if part != 1:
            sources[field] = f"{source}: matrix products beside collectives"
    if measured:
        sources["measured"] = f"{source}: medians over repeats of the slowest rank's time"
    return ClusterSpec(
        hardware=_hardware(ranks, machine, source),
        library=library,
        ranks_per_node=calibration.per_node,
        nodes=calibration.nodes,
        within=within,
        between=between,
        measured=measured,
        about=f"{machine}: {_words(calibration)}{_doubt(calibration, ranks)}",
        compute_beside_communication=compute,
        communication_beside_compute=communication,
        sources=sources,
    )


def _words(calibration: Calibration) -> str:
    ranks = "1 rank" if calibration.ranks == 1 else f"{calibration.ranks} ranks"
    nodes = f" on {calibration.nodes} hosts" if calibration.nodes > 1 else ""
    threads = f" of {calibration.threads} thread{'s' if calibration.threads > 1 else ''}"
    sweeps = f", medians of {calibration.sweeps} sweeps" if calibration.sweeps > 1 else ""
    return f"{ranks}{nodes}{threads if calibration.device == 'cpu' else ''}{sweeps}"


def _doubt(calibration: Calibration, ranks: Sequence[RankSamples]) -> str:
    busy = min(rank.busy for rank in ranks)
    if calibration.threads > 1 or busy >= _IDLE:
        return ""
    counted = "left out of computation, not of communication" if calibration.cpu_clock else "which counts"
    return f"; a rank had its core for {busy:.0%} of the time only: other work, {counted}"


def _hardware(ranks: Sequence[RankSamples], machine: str, source: str) -> HardwareSpec:
    first, kernel_s = ranks[0], mean(rank.kernel_s for rank in ranks)
    points = fit.mean_points([rank.attention for rank in ranks])
    memory = fit.bytes_per_s(fit.mean_samples([rank.moves for rank in ranks]), kernel_s)
    silu = fit.mean_samples([rank.transcendentals for rank in ranks])
    matmul, errors = _products(ranks, kernel_s)
    first_touch_s = mean(rank.first_touch_s_per_byte for rank in ranks)
    # Where one of these is 0, it does not bind, and needs no source.
    binding = {
        "transcendental_per_s": rounded(fit.transcendental_per_s(silu, kernel_s, memory)),
        "optimizer_bytes_per_s": rounded(ADAMW_BYTES / mean(rank.optimizer_s_per_parameter for rank in ranks)),
        "first_touch_bytes_per_s": rounded(1 / first_touch_s) if first_touch_s else 0.0,
    }
    said = {
        "memory_bytes": "the system's, a rank's share of it",
        "memory_bytes_per_s": f"{source}: additions, scalings and copies, all ranks at once",
        "matmul": f"{source}: products of a linear layer, forward and backward; half of them within {errors}",
        "attention": f"{source}: the longest and widest of attention_points",
        "attention_points": f"{source}: scaled_dot_product_attention",
        "kernel_s": f"{source}: a decoder layer too small to compute anything, per kernel",
        "host_s": f"{source}: a decoder layer too small to compute anything, per kernel",
        "transcendental_per_s": f"{source}: SiLU",
        "optimizer_bytes_per_s": f"{source}: fused AdamW",
        "first_touch_bytes_per_s": f"{source}: 64 MiB allocated and written, less 64 MiB written again",
        "multiprocessors": "the device's properties",
    }
    unbound = {field for field, value in {**binding, "multiprocessors": first.multiprocessors}.items() if not value}
    return HardwareSpec(
        device="cpu" if first.device == "cpu" else "cuda",
        memory_bytes=first.memory_bytes,
        memory_bytes_per_s=rounded(memory),
        matmul=matmul,
        attention=_attention(points, matmul),
        kernel_s=rounded(kernel_s),
        host_s=rounded(mean(rank.host_s for rank in ranks)),
        multiprocessors=first.multiprocessors,
        attention_points=points,
        about=machine,
        sources={field: words for field, words in said.items() if field not in unbound},
        transcendental_per_s=binding["transcendental_per_s"],
        optimizer_bytes_per_s=binding["optimizer_bytes_per_s"],
        first_touch_bytes_per_s=binding["first_touch_bytes_per_s"],
    )


def _products(ranks: Sequence[RankSamples], kernel_s: float) -> tuple[dict[Dtype, Rate], str]:
    """Rates by dtype, and in words by how much their law misses the samples."""
    samples = fit.mean_samples([rank.products for rank in ranks])
    dtypes = dict.fromkeys(sample.dtype for sample in samples)
    fitted = {dtype: fit.fit_products([s for s in samples if s.dtype == dtype], kernel_s) for dtype in dtypes}
    errors = ", ".join(f"{dtype} {one.typical_error:.0%}" for dtype, one in fitted.items())
    return {dtype: one.rate for dtype, one in fitted.items()}, errors


def _attention(points: Sequence[AttentionPoint], matmul: dict[Dtype, Rate]) -> dict[Dtype, Rate]:
    return {
        dtype: fit.attention_rate([p for p in points if p.dtype == dtype], rate.peak) for dtype, rate in matmul.items()
    }


def _links(
    calibration: Calibration, measured: Sequence[MeasuredCollective], source: str
) -> tuple[LinkSpec | None, LinkSpec, dict[str, str]]:
    """What joins nodes, and what joins ranks within one, with their sources."""
    fitted = f"{source}: latency and bandwidth fitted to all-gathers"
    ranks, nodes, per_node = calibration.ranks, calibration.nodes, calibration.per_node
    between = fit.fit_link(measured, ranks, nodes) if nodes > 1 else None
    within = fit.fit_link(measured, per_node, 1)
    said = {"between": fitted} if between else {}
    if within is not None:
        return between, within, {**said, "within": fitted}
    if between is not None:
        return between, between, {**said, "within": "as between: no two ranks share a host"}
    return None, LinkSpec(bytes_per_s=1e9, latency_s=0.0), {"within": "a placeholder: a single rank talks to no other"}
