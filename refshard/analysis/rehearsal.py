"""How often a gate errs on given noise: false alarms, and missed regressions."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from refshard.analysis.gate import LogRatios, Verdict, effect_of, judge, needs_fresh, smallest_visible
from refshard.specs.gate import TimeLimits

Rounds = tuple[LogRatios, LogRatios]
"""The rounds that screen a case, and the rounds that would confirm it."""
Draw = Callable[[np.random.Generator], Mapping[str, Rounds]]
"""Draws the rounds of every case of one gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """``gates`` rehearsed gates: how many had a regressed case, and how often each case got which verdict."""

    gates: int
    failing_gates: int
    verdicts: Mapping[str, Mapping[Verdict, int]]


def rehearse(draw: Draw, limits: TimeLimits, *, gates: int, seed: int = 0) -> Rehearsal:
    """Judge ``gates`` gates on rounds that ``draw`` invents or chooses, and count their verdicts."""
    drawn = np.random.default_rng(seed)
    failing, counts = 0, dict[str, Counter[Verdict]]()
    for _ in range(gates):
        rounds = draw(drawn)
        screened = {name: effect_of(screen) for name, (screen, _) in rounds.items()}
        fresh = [name for name, effect in screened.items() if needs_fresh(effect, limits)]
        verdicts = judge(screened, {name: effect_of(rounds[name][1]) for name in fresh}, limits)
        for name, found in verdicts.items():
            counts.setdefault(name, Counter())[found.verdict] += 1
        failing += any(found.verdict == "regressed" for found in verdicts.values())
    return Rehearsal(gates=gates, failing_gates=failing, verdicts=counts)


def relabelled(
    recorded: Mapping[str, LogRatios], limits: TimeLimits, *, slower: Mapping[str, float] | None = None
) -> Draw:
    """Draw rounds from ``recorded`` ones of A against A, with the labels of their two launches swapped at random.

    Cases in ``slower`` take that much longer in B: 0.05 is 5 %.

    Raises:
        ValueError: a case has fewer rounds than both stages need.
    """
    needed = limits.screen_rounds + limits.confirm_rounds
    for name, log_ratios in recorded.items():
        if len(log_ratios) < needed:
            raise ValueError(f"{name}: a gate needs {needed} rounds, {len(log_ratios)} are recorded; record more")

    def draw(drawn: np.random.Generator) -> Mapping[str, Rounds]:
        found = {}
        for name, log_ratios in recorded.items():
            chosen = drawn.choice(log_ratios, needed, replace=False) * drawn.choice((-1.0, 1.0), needed)
            chosen += math.log1p((slower or {}).get(name, 0.0))
            found[name] = (chosen[: limits.screen_rounds], chosen[limits.screen_rounds :])
        return found

    return draw


class CaseNoise(msgspec.Struct, frozen=True, kw_only=True):
    """One case in gates of A against A, from ``rounds`` recorded rounds.

    ``ratio`` is B over A as recorded, with its exact 95 % interval from ``low`` to ``high``; ``spread`` is the robust
    standard deviation of ln(B / A) of a round. ``false_alarms`` and ``inconclusive`` count verdicts with permuted
    labels. In ``tried`` gates this case alone was slower, by ``planted`` (relative); ``found`` of them saw it.
    ``smallest_visible`` is as in :class:`~refshard.analysis.gate.TimeVerdict`.
    """

    rounds: int
    ratio: float
    low: float
    high: float
    spread: float
    false_alarms: int
    inconclusive: int
    planted: float
    tried: int
    found: int
    smallest_visible: float


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Gates of one suite on a machine's own noise: ``failing_gates`` of ``gates`` with permuted labels failed.
    ``launches`` were recorded, each of several cases.
    """

    launches: int
    gates: int
    failing_gates: int
    cases: dict[str, CaseNoise]


def noise_of(
    recorded: Mapping[str, LogRatios], limits: TimeLimits, *, launches: int, gates: int, planted: float = 0.05
) -> Noise:
    """Rehearse gates on rounds of A against A.

    Raises:
        ValueError: a case has fewer rounds than a gate needs.
    """
    nothing = rehearse(relabelled(recorded, limits), limits, gates=gates)
    tried = -(-gates // len(recorded))
    cases = {}
    for seed, (name, log_ratios) in enumerate(recorded.items(), start=1):
        slower = rehearse(relabelled(recorded, limits, slower={name: planted}), limits, gates=tried, seed=seed)
        effect, verdicts = effect_of(log_ratios), nothing.verdicts[name]
        cases[name] = CaseNoise(
            rounds=len(log_ratios),
            ratio=effect.ratio,
            low=effect.low,
            high=effect.high,
            spread=effect.spread,
            false_alarms=verdicts.get("regressed", 0),
            inconclusive=verdicts.get("inconclusive", 0),
            planted=planted,
            tried=tried,
            found=slower.verdicts[name].get("regressed", 0),
            smallest_visible=smallest_visible(effect.spread, limits, cases=len(recorded)),
        )
    return Noise(launches=launches, gates=gates, failing_gates=nothing.failing_gates, cases=cases)
