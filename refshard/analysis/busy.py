"""Whether the machine drifted by more than the difference between two cases: its compute probe, and other processes."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from refshard.analysis.cases import CaseResult
from refshard.analysis.compare import RELEVANT
from refshard.records import Load


@dataclass(frozen=True, slots=True)
class Drift:
    """A relative change of the machine, by its compute probe or by the share of its cores that other processes kept
    busy: a ``size`` of 0.1 is 10 %.
    """

    of: Literal["speed", "other processes"]
    size: float


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
        found.append(_of_probe(*ends))
    if shares := sides(lambda load: None if load.other_cores is None else load.other_cores / load.cores):
        found.append(Drift("other processes", abs(shares[1] - shares[0])))
    largest = max(found, key=lambda drift: drift.size, default=None)
    return largest if largest and largest.size > max(abs(effect), RELEVANT) else None


def within_launch(case: CaseResult) -> Drift | None:
    """The largest change of the probe from before the timed steps of a launch to after them."""
    drifts = [_of_probe(load.probe_before_s, load.probe_after_s) for load in loads(case).values()]
    return max(drifts, key=lambda drift: drift.size, default=None)


def loads(case: CaseResult) -> dict[int, Load]:
    """The load of each launch that ended ok and recorded one, by round."""
    return {launch.round: launch.load for launch in case.ok_launches if launch.load}


def _of_probe(before_s: float, after_s: float) -> Drift:
    return Drift("speed", max(before_s, after_s) / min(before_s, after_s) - 1)
