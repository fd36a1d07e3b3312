"""From samples to the few numbers of a profile: pure functions, least squares on relative errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np
from scipy.optimize import nnls

from refshard.harness.calibration.samples import Timed, TimedCollective
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


def attention_rate(points: Sequence[AttentionPoint], peak: float) -> Rate:
    """The rate of the longest and widest attention that was measured, forward and backward together."""
    largest = max(points, key=lambda p: (p.seq_len, p.head_dim))
    reached = 4 * largest.head_dim * 3.5 / (largest.forward_s + largest.backward_s)
    return Rate(peak=rounded(max(peak, reached)), efficiency=min(rounded(reached / max(peak, reached)), 1.0))


def mean_points(ranks: Sequence[Sequence[AttentionPoint]]) -> tuple[AttentionPoint, ...]:
    """Each point as the mean of all ranks."""
    found = []
    for same in zip(*ranks):
        point = same[0]
        found.append(
            AttentionPoint(
                dtype=point.dtype,
                head_dim=point.head_dim,
                seq_len=point.seq_len,
                forward_s=rounded(mean(p.forward_s for p in same)),
                backward_s=rounded(mean(p.backward_s for p in same)),
            )
        )
    return tuple(found)


def mean_samples(ranks: Sequence[Sequence[Timed]]) -> list[Timed]:
    """Each sample as the mean of all ranks, which measured the same in the same order."""
    return [
        Timed(
            dtype=same[0].dtype,
            flops=same[0].flops,
            bytes=same[0].bytes,
            transcendentals=same[0].transcendentals,
            seconds=mean(s.seconds for s in same),
        )
        for same in zip(*ranks)
    ]


def bytes_per_s(samples: Sequence[Timed], kernel_s: float) -> float:
    """What elementwise kernels reach, the median of all."""
    return median(s.bytes / max(s.seconds - kernel_s, 1e-9) for s in samples)


def transcendental_per_s(samples: Sequence[Timed], kernel_s: float, memory_bytes_per_s: float) -> float:
    """Exponentials a second; 0 where memory alone explains what such kernels take, within a tenth."""
    seconds = [max(s.seconds - kernel_s, 1e-9) for s in samples]
    if median(t * memory_bytes_per_s / s.bytes for s, t in zip(samples, seconds)) < 1.1:
        return 0.0
    return median(s.transcendentals / t for s, t in zip(samples, seconds))


def slowest_ranks(ranks: Sequence[Sequence[TimedCollective]]) -> tuple[MeasuredCollective, ...]:
    """Of each collective the median over repeats of the slowest rank's seconds."""
    found = []
    for same in zip(*ranks):
        one = same[0]
        slowest = [max(repeat) for repeat in zip(*(s.seconds for s in same))]
        found.append(
            MeasuredCollective(
                op=one.op, ranks=one.ranks, nodes=one.nodes, bytes=one.bytes, seconds=rounded(median(slowest))
            )
        )
    return tuple(found)


def fit_link(measured: Sequence[MeasuredCollective], ranks: int, nodes: int) -> LinkSpec | None:
    """Latency of a hop and bandwidth from the all-gathers of a group: ``hops * latency + S (n-1)/n / bandwidth``.

    The smallest and the largest decide, between which a link may well go faster: where it lets bursts pass, say.
    """
    points = [m for m in measured if (m.op, m.ranks, m.nodes) == ("all_gather", ranks, nodes)]
    if not points:
        return None
    smallest, largest = (extreme(points, key=lambda p: p.bytes) for extreme in (min, max))
    carried = (largest.bytes - smallest.bytes) * (ranks - 1) / ranks
    bytes_per_s = carried / max(largest.seconds - smallest.seconds, 1e-9)
    latency = max(smallest.seconds - smallest.bytes * (ranks - 1) / ranks / bytes_per_s, 0.0) / (ranks - 1)
    return LinkSpec(bytes_per_s=rounded(bytes_per_s), latency_s=rounded(latency))
