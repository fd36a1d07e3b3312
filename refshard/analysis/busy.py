"""Whether the machine drifted by more than the difference between two cases: its compute probe, and other processes."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from refshard.analysis.cases import CaseResult
from refshard.analysis.compare import RELEVANT
from refshard.records import Load

Kind = Literal["within a launch", "between the sides", "other processes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A relative change of the machine, from ``before`` to ``after``: a ``size`` of 0.1 is 10 %.

    Within a launch of ``case``, these are the probe's times, s; between the sides, the probe's times in the other case
    and in ``case``; for other processes, the cores that they kept busy, and the size is a share of all ``cores``.
    """

    kind: Kind
    case: CaseResult
    before: float
    after: float
    size: float
    cores: int


def drift_over(a: CaseResult, b: CaseResult, effect: float) -> Drift | None:
    """The largest drift of the machine between ``a`` and ``b``, or within a launch of either; None unless it exceeds
    ``effect``, the relative difference of their step times, and :data:`~refshard.analysis.compare.RELEVANT`.
    """
    found = [drift for case in (a, b) if (drift := within_launch(case))]
    mine, its = loads(a), loads(b)
    # In one run only common rounds count: the machine may differ in others.
    rounds = (mine.keys() & its.keys() if a.header is b.header else set()) or mine.keys() | its.keys()

    def sides(of: Callable[[Load], float | None]) -> tuple[float, float] | None:
        known = [
            [x for key, load in side.items() if key in rounds and (x := of(load)) is not None] for side in (mine, its)
        ]
        return (statistics.median(known[0]), statistics.median(known[1])) if all(known) else None

    if ends := sides(lambda load: (load.probe_before_s + load.probe_after_s) / 2):
        found.append(_drift("between the sides", b, *ends))
    if ends := sides(lambda load: load.other_cores):
        found.append(_drift("other processes", b, *ends))
    largest = max(found, key=lambda drift: drift.size, default=None)
    return largest if largest and largest.size > max(abs(effect), RELEVANT) else None


def within_launch(case: CaseResult) -> Drift | None:
    """The largest change of the probe from before the timed steps of a launch to after them."""
    ends = ((load.probe_before_s, load.probe_after_s) for load in loads(case).values())
    drifts = (_drift("within a launch", case, before, after) for before, after in ends)
    return max(drifts, key=lambda drift: drift.size, default=None)


def loads(case: CaseResult) -> dict[int, Load]:
    """The load of each launch that ended ok and recorded one, by round."""
    return {launch.round: launch.load for launch in case.ok_launches if launch.load}


def _drift(kind: Kind, case: CaseResult, before: float, after: float) -> Drift:
    cores = next(iter(loads(case).values())).cores
    size = abs(after - before) / cores if kind == "other processes" else max(before, after) / min(before, after) - 1
    return Drift(kind=kind, case=case, before=before, after=after, size=size, cores=cores)
