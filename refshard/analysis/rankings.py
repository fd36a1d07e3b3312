"""Who is fastest and who needs the least memory, per setting and world size: one decision, for sentences and tables.

A *ranking* compares the strategies whose launches all ended ok, without the unsharded reference, which runs on a
different number of GPUs. A measured strategy needs three launches to be ranked by time; a calculated time always
repeats, so one is enough.
"""

from dataclasses import dataclass

from refshard.analysis.cases import CaseResult
from refshard.analysis.compare import Comparison
from refshard.analysis.evidence import Evidence, Setting
from refshard.analysis.ratios import compared
from refshard.analysis.sample import MIN_LAUNCHES
from refshard.specs.case import REPEATING
from refshard.specs.job import REFERENCE_STRATEGY

_SPEED = ("step_time_s", "tokens_per_s_gpu", "tflops", "mfu")
"""Metrics that the step time decides, because the cases share their tokens and FLOPs."""
ALIKE = 0.03
"""Relative difference of step times under which a model cannot rank two strategies."""
RELEVANT = 0.01
"""Difference of step times under which a significant one is called small."""
EQUAL_MEMORY = 0.03
"""Relative difference of peak memories under which two strategies need equally much: between two launches of one case
the figure varies by about 3 % on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A ranked candidate other than the winner: its step time over the winner's, with an interval if measured."""

    case: CaseResult
    comparison: Comparison | None
    ratio: float

    @property
    def tied(self) -> bool:
        """Whether the winner's lead does not count: the interval includes 1, or it is within the model's error."""
        if self.comparison is None:
            return self.case.fidelity in REPEATING and self.ratio < 1 + ALIKE
        return not self.comparison.significant


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """One setting at one world size: ``cases`` are all of its cases, ``candidates`` the competing ones.

    ``ranked`` are the candidates that may be ranked by time; it is empty if only one of several may. ``rivals`` are the
    ranked ones without the ``winner``, fastest first. ``peaks`` has the memory of each candidate, B, least first:
    reserved memory if it is known for all, since it decides whether a case fits, else the peak of memory in use.
    """

    setting: Setting
    world_size: int
    cases: tuple[CaseResult, ...]
    candidates: tuple[CaseResult, ...]
    ranked: tuple[CaseResult, ...]
    winner: CaseResult | None
    rivals: tuple[Rival, ...]
    memory_metric: str
    peaks: dict[CaseResult, float]

    @property
    def tied(self) -> tuple[Rival, ...]:
        """The rivals that the winner does not beat."""
        return tuple(rival for rival in self.rivals if rival.tied)

    @property
    def runner_up(self) -> Rival | None:
        """The fastest rival that is beaten."""
        return next((rival for rival in self.rivals if not rival.tied), None)

    @property
    def fastest(self) -> tuple[CaseResult, ...]:
        """The winner and those tied with it; empty if nothing is ranked."""
        return () if self.winner is None else (self.winner, *(rival.case for rival in self.tied))

    @property
    def lowest_memory(self) -> tuple[CaseResult, ...]:
        """The candidates that need the least memory, ties included."""
        least = min(self.peaks.values(), default=0.0)
        return tuple(case for case, peak in self.peaks.items() if peak <= least * (1 + EQUAL_MEMORY))

    @property
    def leaders(self) -> dict[str, tuple[CaseResult, ...]]:
        """The cases that lead each metric, ties included; none if there is one candidate only."""
        if len(self.candidates) < 2:
            return {}
        return dict.fromkeys(_SPEED, self.fastest) | {self.memory_metric: self.lowest_memory}


def rankings(evidence: Evidence) -> tuple[Ranking, ...]:
    """One ranking per setting and world size, in the order of the settings; world sizes ascend, 1 only if it is the
    only one.
    """
    return tuple(
        ranking_of(setting, size)
        for setting in evidence.ranked
        for size in ([n for n in setting.world_sizes if n > 1] or setting.world_sizes)
    )


def ranking_of(setting: Setting, world_size: int) -> Ranking:
    """The ranking of the setting's cases of this world size."""
    here = [case for case in setting.cases if case.spec.job.gpus == world_size]
    entered = [case for case in here if case.strategy != REFERENCE_STRATEGY] or here
    candidates = tuple(case for case in entered if case.ok and case.metrics["step_time_s"] is not None)
    ranked = tuple(
        case for case in candidates if case.fidelity in REPEATING or len(case.samples) >= MIN_LAUNCHES
    )  # fmt: skip
    if len(candidates) > 1 == len(ranked):  # nothing to rank it against
        ranked = ()
    winner, rivals = None, tuple[Rival, ...]()
    if ranked:
        first = min(ranked, key=step_time)
        # The smallest median, unless the ratio within rounds favours another one.
        winner = min(ranked, key=lambda case: 1.0 if case is first else _rival(first, case).ratio)
        others = (_rival(winner, case) for case in ranked if case is not winner)
        rivals = tuple(sorted(others, key=lambda rival: rival.ratio))
    knows_reserved = all(case.metrics["peak_reserved_bytes"] for case in candidates)
    metric = "peak_reserved_bytes" if knows_reserved else "peak_memory_bytes"
    peaks = {case: peak for case in candidates if (peak := case.metrics[metric])}
    return Ranking(
        setting=setting, world_size=world_size, cases=tuple(here), candidates=candidates, ranked=ranked, winner=winner,
        rivals=rivals, memory_metric=metric, peaks=dict(sorted(peaks.items(), key=lambda item: item[1])),
    )  # fmt: skip


def step_time(case: CaseResult) -> float:
    """A candidate's step time, s."""
    seconds = case.metrics["step_time_s"]
    assert seconds is not None, "candidates have a step time"
    return seconds


def _rival(winner: CaseResult, case: CaseResult) -> Rival:
    comparison = compared(winner, case)
    ratio = comparison.ratio if comparison else step_time(case) / step_time(winner)
    return Rival(case=case, comparison=comparison, ratio=ratio)
