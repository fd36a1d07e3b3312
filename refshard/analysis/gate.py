"""Whether B is slower than A, decided from paired rounds so that neither chance nor drift fails a build.

A round launches A and B one after the other, in random order; its sample is d = ln(B / A), each side the median over
steps of the slowest rank's time. What the machine does to both sides of a round cancels. Under the null hypothesis d is
symmetric about 0 for any distribution, so Wilcoxon's signed-rank test is exact; the estimate of the effect is the
Hodges-Lehmann median of all pairwise means, and its interval inverts that test (Hollander, Wolfe, Chicken:
"Nonparametric Statistical Methods", 2014, chapter 3).

If many cases are tested, some look slow by chance. So a cheap screening finds suspects, and fresh rounds, which the
screening has not selected by their noise, decide. Holm's procedure limits the probability that any unchanged case fails
to ``significance``. A pass needs evidence too: if noise could hide a slow-down, the case gets fresh rounds as well.
They can only clear it; otherwise it is inconclusive.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.special import ndtri

from refshard.specs.gate import TimeLimits

LogRatios: TypeAlias = npt.NDArray[np.float64]
"""ln(B / A) of each round, [rounds]."""
Verdict = Literal["pass", "regressed", "improved", "inconclusive", "new", "removed", "not comparable"]
CONFIDENCE = 0.95
_POWER = 0.95
_OF_A_STAGE = _POWER**0.5
"""Both stages must find it."""
_EFFICIENCY = 3 / math.pi
"""Efficiency of the Hodges-Lehmann estimate relative to the mean for normal noise; above 1 for heavier tails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """B over A: 1.05 means that B takes 5 % longer.

    ``low`` and ``high`` bound the exact 95 % interval, 0 and infinity where rounds are too few for one. ``p_slower``
    and ``p_faster`` are one-sided: the chance of a sample at least as extreme if B took as long as A. ``spread`` is the
    robust standard deviation of a round's ln(B / A), infinite for a single round.
    """

    ratio: float
    low: float
    high: float
    p_slower: float
    p_faster: float
    spread: float
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeVerdict:
    """The verdict on one case's time, and the effect that decided: of the fresh rounds where there were some.

    ``smallest_visible`` is the relative slow-down that this gate finds with a probability of 95 % at this noise.
    """

    verdict: Verdict
    effect: Effect
    smallest_visible: float
    suspect: bool


def effect_of(log_ratios: LogRatios) -> Effect:
    """Estimate, interval and p-values from paired rounds.

    Raises:
        ValueError: there is no round, or one that is not finite.
    """
    if not len(log_ratios) or not np.isfinite(log_ratios).all():
        raise ValueError("rounds must be finite, at least one; leave out rounds in which a side did not end ok")
    means = _pairwise_means(log_ratios)
    outside = _outside(len(log_ratios), CONFIDENCE)
    low, high = (means[outside], means[-1 - outside]) if outside >= 0 else (-math.inf, math.inf)
    return Effect(
        ratio=math.exp(np.median(means)),
        low=math.exp(low),
        high=math.exp(high),
        p_slower=_p(log_ratios),
        p_faster=_p(-log_ratios),
        spread=_spread(log_ratios),
        rounds=len(log_ratios),
    )


def is_suspect(effect: Effect, limits: TimeLimits) -> bool:
    """Whether a screened case deserves fresh rounds: it may have become slower, or faster."""
    beyond = 1 + limits.screen_effect
    slower = effect.ratio > beyond and effect.p_slower < limits.screen_p
    faster = effect.ratio < 1 / beyond and effect.p_faster < limits.screen_p
    return slower or faster


def is_unclear(effect: Effect, limits: TimeLimits) -> bool:
    """Whether a slow-down that must be visible lies within the interval."""
    return effect.high >= 1 + limits.visible


def needs_fresh(screened: Effect, limits: TimeLimits) -> bool:
    """Whether a case's screening leaves something to decide."""
    return is_suspect(screened, limits) or is_unclear(screened, limits)


def judge(
    screened: Mapping[str, Effect], confirmed: Mapping[str, Effect], limits: TimeLimits
) -> dict[str, TimeVerdict]:
    """The verdict on each case, by name: all were screened; cases that :func:`needs_fresh` names have fresh rounds in
    ``confirmed``. Only suspects can have become slower or faster.

    Raises:
        ValueError: a case that needs fresh rounds has none, or another case has some.
    """
    needed = {name for name, effect in screened.items() if needs_fresh(effect, limits)}
    if needed != confirmed.keys():
        raise ValueError(f"fresh rounds must be those of {sorted(needed)}, got {sorted(confirmed)}")
    decisive = {**screened, **confirmed}
    suspects = {name for name, effect in screened.items() if is_suspect(effect, limits)}
    p_slower = {name: effect.p_slower if name in suspects else 1.0 for name, effect in decisive.items()}
    p_faster = {name: effect.p_faster if name in suspects else 1.0 for name, effect in decisive.items()}
    slower, faster = (holm(p_values, limits.significance) for p_values in (p_slower, p_faster))
    return {
        name: TimeVerdict(
            verdict=_verdict(effect, name in slower, name in faster, limits),
            effect=effect,
            smallest_visible=smallest_visible(screened[name].spread, limits, cases=len(screened)),
            suspect=name in suspects,
        )
        for name, effect in decisive.items()
    }


def _verdict(effect: Effect, slower: bool, faster: bool, limits: TimeLimits) -> Verdict:
    if slower and effect.ratio > 1 + limits.relevant:
        return "regressed"
    if faster and effect.ratio < 1 / (1 + limits.relevant):
        return "improved"
    return "inconclusive" if is_unclear(effect, limits) else "pass"


def holm(p_values: Mapping[str, float], level: float) -> set[str]:
    """The hypotheses that Holm's step-down procedure rejects: the chance of any wrong one is at most ``level``."""
    rejected: set[str] = set()
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p > level / (len(p_values) - rank):
            break
        rejected.add(name)
    return rejected


def smallest_visible(spread: float, limits: TimeLimits, cases: int) -> float:
    """The relative slow-down that both stages find with a probability of about 95 %, if rounds scatter by ``spread``.

    By the normal approximation.
    """
    if spread == math.inf:
        return math.inf
    screen, confirm = (
        spread / math.sqrt(_EFFICIENCY * rounds) for rounds in (limits.screen_rounds, limits.confirm_rounds)
    )
    found, rare = ndtri(_OF_A_STAGE), -ndtri(limits.significance / cases)
    needed = (
        math.log1p(limits.screen_effect) + found * screen,
        (found - ndtri(limits.screen_p)) * screen,
        math.log1p(limits.relevant) + found * confirm,
        (found + rare) * confirm,
    )
    return math.expm1(max(needed))


def _spread(log_ratios: LogRatios) -> float:
    """1.4826 times the median absolute deviation: of a normal distribution, its standard deviation."""
    if len(log_ratios) < 2:
        return math.inf
    return float(np.median(np.abs(log_ratios - np.median(log_ratios))) / ndtri(0.75))


def _pairwise_means(values: LogRatios) -> LogRatios:
    """Means of all pairs, each value with itself included, ascending, [n (n + 1) / 2]."""
    first, second = np.triu_indices(len(values))
    means: LogRatios = np.sort((values[first] + values[second]) / 2)
    return means


def _p(log_ratios: LogRatios) -> float:
    """One-sided, that values lie above 0 by chance; 1 where all are 0."""
    if not log_ratios.any():
        return 1.0
    return float(stats.wilcoxon(log_ratios, alternative="greater").pvalue)


@lru_cache
def _outside(rounds: int, confidence: float) -> int:
    """How many pairwise means lie outside of the interval on either side; -1 where it has no bounds.

    From the exact distribution of the signed-rank statistic: each rank counts with probability one half.
    """
    probabilities = np.ones(1)
    for rank in range(1, rounds + 1):
        longer = np.zeros(len(probabilities) + rank)
        longer[: len(probabilities)] += probabilities / 2
        longer[rank:] += probabilities / 2
        probabilities = longer
    within = np.cumsum(probabilities) <= (1 - confidence) / 2
    return int(within.sum()) - 1 if within.any() else -1
