"""How often a gate errs on given noise: false alarms where nothing changed, and misses where something did."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from refshard.specs.gate import TimeLimits
from refshard.stats.gate import LogRatios, effect_of, is_suspect, judge

Rounds = tuple[LogRatios, LogRatios]
"""The rounds that screen a case, and those that would confirm it."""
Draw = Callable[[np.random.Generator], Mapping[str, Rounds]]
"""Draws the rounds of every case of one gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What ``gates`` gates of ``cases`` cases each came to: gates with a regressed case, and cases by verdict."""

    gates: int
    cases: int
    failing_gates: int
    regressed: int
    improved: int
    inconclusive: int

    @property
    def judged(self) -> int:
        """Cases of all gates."""
        return self.gates * self.cases


def rehearse(draw: Draw, limits: TimeLimits, *, gates: int, seed: int = 0) -> Rehearsal:
    """Hold as many gates on rounds that ``draw`` invents or chooses, and count their verdicts."""
    drawn = np.random.default_rng(seed)
    failing, cases = 0, 0
    counts = {"regressed": 0, "improved": 0, "inconclusive": 0, "pass": 0}
    for _ in range(gates):
        rounds = draw(drawn)
        screened = {name: screen for name, (screen, _) in rounds.items()}
        confirmed = {name: fresh for name, (screen, fresh) in rounds.items() if is_suspect(effect_of(screen), limits)}
        verdicts = [verdict.verdict for verdict in judge(screened, confirmed, limits).values()]
        for verdict in verdicts:
            counts[verdict] += 1
        failing += "regressed" in verdicts
        cases = len(verdicts)
    return Rehearsal(
        gates=gates,
        cases=cases,
        failing_gates=failing,
        regressed=counts["regressed"],
        improved=counts["improved"],
        inconclusive=counts["inconclusive"],
    )


def relabelled(recorded: Mapping[str, LogRatios], limits: TimeLimits, *, slower: float = 0.0) -> Draw:
    """Rounds chosen from ``recorded`` ones of A against A, whose two launches change labels at random.

    With ``slower`` (0.05 is 5 %) B is made to take that much longer.

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
            chosen += math.log1p(slower)
            found[name] = (chosen[: limits.screen_rounds], chosen[limits.screen_rounds :])
        return found

    return draw
