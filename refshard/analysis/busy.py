"""Whether the machine changed by more than what is said of two cases: its compute probe, and what others took of it."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from refshard.analysis.cases import CaseResult
from refshard.analysis.rankings import RELEVANT
from refshard.records import Load

Kind = Literal["within a launch", "between the sides", "other processes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How much the machine changed, relative: 0.1 is 10 %, of ``before`` to ``after``.

    Within a launch of ``case`` these are the probe's times, s; between the sides they are those of the other case and
    of ``case``; of other processes they are the cores that these kept busy, and the size is their share of all
    ``cores``.
    """

    kind: Kind
    case: CaseResult
    before: float
    after: float
    size: float
    cores: int


def drift_over(a: CaseResult, b: CaseResult, effect: float) -> Drift | None:
    """The largest drift of the machine between ``a`` and ``b``, or within a launch of either, if it exceeds ``effect``,
    the relative difference of their step times, and is :data:`~refshard.analysis.rankings.RELEVANT`; else None.
    """
    found = [drift for case in (a, b) if (drift := within_launch(case))]
    if sides := _sides(a, b, probe_s):
        found.append(_drift("between the sides", b, *sides, _relative(*sides)))
    if sides := _sides(a, b, lambda load: load.other_cores):
        found.append(_drift("other processes", b, *sides, abs(sides[1] - sides[0]) / _cores(b)))
    largest = max(found, key=lambda drift: drift.size, default=None)
    return largest if largest and largest.size > max(abs(effect), RELEVANT) else None


def within_launch(case: CaseResult) -> Drift | None:
    """The largest change of the probe from before the timed steps of a launch to after them."""
    drifts = [
        _drift("within a launch", case, before, after, _relative(before, after))
        for load in loads(case).values()
        for before, after in [(load.probe_before_s, load.probe_after_s)]
    ]
    return max(drifts, key=lambda drift: drift.size, default=None)


def loads(case: CaseResult) -> dict[int, Load]:
    """By round, of the launches that ended ok and recorded one."""
    return {launch.round: launch.load for launch in case.launches if launch.state == "ok" and launch.load}


def probe_s(load: Load) -> float:
    """The mean of both probes, s."""
    return (load.probe_before_s + load.probe_after_s) / 2


def _sides(a: CaseResult, b: CaseResult, of: Callable[[Load], float | None]) -> tuple[float, float] | None:
    """A figure's median on each side, over common rounds if they are of one run; None if a side has none."""
    mine, its = loads(a), loads(b)
    rounds = mine.keys() & its.keys() if a.header is b.header else set()
    sides = [
        [value for key, load in side.items() if (key in rounds or not rounds) and (value := of(load)) is not None]
        for side in (mine, its)
    ]
    if not all(sides):
        return None
    before, after = map(statistics.median, sides)
    return before, after


def _drift(kind: Kind, case: CaseResult, before: float, after: float, size: float) -> Drift:
    return Drift(kind=kind, case=case, before=before, after=after, size=size, cores=_cores(case))


def _cores(case: CaseResult) -> int:
    return next(iter(loads(case).values())).cores


def _relative(before: float, after: float) -> float:
    return max(before, after) / min(before, after) - 1
