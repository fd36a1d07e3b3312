"""Who is fastest and who needs the least memory, per setting and world size: one decision, for sentences and tables.

A *ranking* compares the strategies whose launches all ended ok. It leaves out the unsharded reference, which answers
another question on another number of GPUs. A measured strategy needs three launches to be ranked by time; a calculated
one always takes the same time, so one is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from refshard.analysis.cases import CaseResult
from refshard.analysis.compare import Comparison
from refshard.analysis.compared import compared
from refshard.analysis.evidence import Evidence, Setting
from refshard.analysis.sample import MIN_LAUNCHES
from refshard.specs.case import REPEATING
from refshard.specs.job import REFERENCE_STRATEGY

_SPEED = ("step_time_s", "tokens_per_s_gpu", "tflops", "mfu")
"""Metrics that the step time decides, where cases share their tokens and FLOPs."""
ALIKE = 0.03
"""Relative difference of step times under which a model cannot tell two strategies apart."""
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
        """Whether the winner's lead does not count: the interval includes 1, or the model cannot tell the two apart."""
        if self.comparison is None:
            return self.case.fidelity in REPEATING and self.ratio < 1 + ALIKE
        return not self.comparison.significant


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """One setting at one world size: ``cases`` are all of its cases, ``candidates`` those that compete.

    ``ranked`` are the candidates that may be ranked by time; it is empty if only one of several may. ``rivals`` are the
    ranked ones without the ``winner``, fastest first. ``peaks`` has the memory of each candidate, B, least first:
    reserved memory if it is known for all, since that is what must fit, else the peak of memory in use.
    """

    setting: Setting
    world_size: int
    cases: tuple[CaseResult, ...]
    candidates: tuple[CaseResult, ...]
    ranked: tuple[CaseResult, ...]
    winner: CaseResult | None
    rivals: tuple[Rival, ...]
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
    def memory_metric(self) -> str:
        """The metric of :attr:`peaks`."""
        return _memory_metric(self.candidates)


def rankings(evidence: Evidence) -> tuple[Ranking, ...]:
    """One ranking per setting and world size, in the order of the settings; world sizes ascend."""
    return tuple(ranking_of(setting, size) for setting in evidence.ranked for size in _ranked_sizes(setting))


def ranking_of(setting: Setting, world_size: int) -> Ranking:
    """The ranking of the setting's cases of this world size."""
    here = [case for case in setting.cases if case.spec.job.gpus == world_size]
    entered = [case for case in here if case.strategy != REFERENCE_STRATEGY] or here
    candidates = tuple(case for case in entered if case.ok and case.metrics["step_time_s"] is not None)
    ranked = tuple(filter(_has_interval, candidates))
    if len(candidates) > 1 == len(ranked):  # nobody to be ranked against
        ranked = ()
    winner = _winner(ranked) if ranked else None
    return Ranking(
        setting=setting, world_size=world_size, cases=tuple(here), candidates=candidates, ranked=ranked, winner=winner,
        rivals=_behind(winner, ranked), peaks=_peaks(candidates),
    )  # fmt: skip


def leaders(setting: Setting) -> dict[str, frozenset[CaseResult]]:
    """By metric, the cases that lead it at their world size, those tied included; one that is alone does not lead."""
    found = [ranking for size in setting.world_sizes if len((ranking := ranking_of(setting, size)).candidates) > 1]
    led_by: dict[str, frozenset[CaseResult]] = {}
    for ranking in found:
        led = dict.fromkeys(_SPEED, ranking.fastest) | {ranking.memory_metric: ranking.lowest_memory}
        led_by |= {metric: led_by.get(metric, frozenset()) | set(cases) for metric, cases in led.items()}
    return led_by


def step_time(case: CaseResult) -> float:
    """A candidate's step time, s."""
    seconds = case.metrics["step_time_s"]
    assert seconds is not None, "only cases with a step time contend"
    return seconds


def _has_interval(case: CaseResult) -> bool:
    return case.fidelity in REPEATING or len(case.samples) >= MIN_LAUNCHES


def _ranked_sizes(setting: Setting) -> tuple[int, ...]:
    sharded = tuple(n for n in setting.world_sizes if n > 1)
    return sharded or setting.world_sizes


def _rival(winner: CaseResult, case: CaseResult) -> Rival:
    comparison = compared(winner, case)
    ratio = comparison.ratio if comparison else step_time(case) / step_time(winner)
    return Rival(case=case, comparison=comparison, ratio=ratio)


def _winner(ranked: Sequence[CaseResult]) -> CaseResult:
    """The smallest median, unless the ratio within rounds favours another one."""
    first = min(ranked, key=step_time)
    return min(ranked, key=lambda case: 1.0 if case is first else _rival(first, case).ratio)


def _behind(winner: CaseResult | None, ranked: Sequence[CaseResult]) -> tuple[Rival, ...]:
    """All but the winner, fastest first."""
    if winner is None:
        return ()
    rivals = (_rival(winner, case) for case in ranked if case is not winner)
    return tuple(sorted(rivals, key=lambda rival: rival.ratio))


def _memory_metric(candidates: Sequence[CaseResult]) -> str:
    knows_reserved = all(case.metrics["peak_reserved_bytes"] for case in candidates)
    return "peak_reserved_bytes" if knows_reserved else "peak_memory_bytes"


def _peaks(candidates: Sequence[CaseResult]) -> dict[CaseResult, float]:
    metric = _memory_metric(candidates)
    found = {case: peak for case in candidates if (peak := case.metrics[metric])}
    return dict(sorted(found.items(), key=lambda item: item[1]))
