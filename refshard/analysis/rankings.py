"""Which strategy to use, per setting and world size: one decision, for sentences and tables.

A *ranking* compares the strategies whose launches all ended ok, without the unsharded reference, which runs on a
different number of GPUs. A measured strategy needs three launches to be ranked by time; a calculated time always
repeats, so one is enough.

The *fastest* are the winner and those before the first one that is slower (:mod:`refshard.analysis.ratios`), in the
order of their ratios to the winner. So whatever takes longer than a slower strategy is out too, however wide its
interval. Among the fastest, memory decides (:func:`~refshard.specs.choice.leanest`).
"""

from dataclasses import dataclass
from itertools import takewhile

from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence, Setting
from refshard.analysis.ratios import Ratio, ratio_of
from refshard.analysis.sample import MIN_LAUNCHES
from refshard.specs.case import REPEATING
from refshard.specs.choice import equal_memory, leanest
from refshard.specs.job import REFERENCE_STRATEGY

_SPEED = ("step_time_s", "tokens_per_s_gpu", "tflops", "mfu")
"""Metrics that the step time decides, because the cases share their tokens and FLOPs."""


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
    rivals: tuple[Ratio, ...]
    memory_metric: str
    peaks: dict[CaseResult, float]

    @property
    def unbeaten(self) -> tuple[Ratio, ...]:
        """The rivals before the first that is slower: those that tie, and those that are not decided."""
        return tuple(takewhile(lambda rival: rival.outcome != "slower", self.rivals))

    @property
    def undecided(self) -> tuple[Ratio, ...]:
        """The unbeaten whose difference to the winner is not decided."""
        return tuple(rival for rival in self.unbeaten if rival.outcome == "not decided")

    @property
    def runner_up(self) -> Ratio | None:
        """The fastest rival that is beaten."""
        return next(iter(self.rivals[len(self.unbeaten) :]), None)

    @property
    def fastest(self) -> tuple[CaseResult, ...]:
        """The winner and the rivals that it does not beat; empty if nothing is ranked."""
        return () if self.winner is None else (self.winner, *(rival.case for rival in self.unbeaten))

    @property
    def choices(self) -> tuple[CaseResult, ...]:
        """The strategy to use: the one that memory favours among the winner and those that tie with it. A second one if
        that would need less memory, but whether it is slower is not decided. Empty if nothing is ranked, or if one
        with too few launches to be ranked seems faster than the winner.
        """
        if self.winner is None:
            return self.candidates if len(self.candidates) == 1 else ()
        if any(step_time(case) < step_time(self.winner) for case in self.candidates if case not in self.ranked):
            return ()
        unclear = {rival.case for rival in self.undecided}
        known = [case for case in self.fastest if case not in unclear]
        best, other = (leanest(cases, self.peaks.get, lambda case: case.strategy) for cases in (known, self.fastest))
        return (best,) if best in equal_memory(self.fastest, self.peaks.get) else (best, other)

    @property
    def lowest_memory(self) -> tuple[CaseResult, ...]:
        """The candidates that need the least memory, ties included."""
        return tuple(equal_memory(list(self.peaks), self.peaks.get))

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
    winner, rivals = None, tuple[Ratio, ...]()
    if ranked:
        first = min(ranked, key=step_time)
        # The smallest median, unless the ratio within rounds favours another one.
        winner = min(ranked, key=lambda case: 1.0 if case is first else _times(ratio_of(first, case)))
        rivals = tuple(sorted((ratio_of(winner, case) for case in ranked if case is not winner), key=_times))
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


def _times(rival: Ratio) -> float:
    assert rival.time is not None, "candidates have a step time"
    return rival.time
