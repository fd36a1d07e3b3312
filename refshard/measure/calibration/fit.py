"""From samples to the few numbers of a profile: pure functions, least squares on relative errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from scipy.optimize import nnls

from refshard.costs import BACKWARD_PRODUCTS
from refshard.measure.calibration.samples import Timed, TimedAttention, TimedCollective
from refshard.specs.cluster import LinkSpec, MeasuredCollective
from refshard.specs.hardware import AttentionPoint, Rate

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
