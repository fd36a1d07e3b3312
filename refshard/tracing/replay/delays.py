"""What the dependencies of a trace's spans cost: as much as they usually do, or more where a span was late."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.events.timeline import UNKNOWN, Nanoseconds, Spans

Rows = npt.NDArray[np.int64]

ORDINARY = 10
"""A dependency may cost so many times as much as usual before the rest is called unexplained."""
LONGEST_ORDINARY_NS = 100_000
"""No dependency of streams, and no launch into an empty queue, ordinarily costs more."""
NEVER = -(2**62)
"""The delay of a dependency that does not exist."""
_FEW = 5
_BEFORE, _LAUNCH, _WAIT = range(3)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delays:
    """What the dependencies of spans cost, so that each starts when it did."""

    before: Nanoseconds
    launch: Nanoseconds
    waits: Nanoseconds
    holds: Nanoseconds

    @classmethod
    def of(
        cls, spans: Spans, queued: Nanoseconds, before: Rows, launched: npt.NDArray[np.bool_], waits: tuple[Rows, Rows]
    ) -> "Delays":
        """``queued`` are times, ``before`` the spans before, ``waits`` pairs of a span and one that it waits for."""
        starts, first = spans.starts, before == UNKNOWN
        free = np.where(first, NEVER, spans.ends[before])
        queued = np.where(launched, queued, NEVER)
        met = np.full(len(spans), NEVER)
        np.maximum.at(met, waits[0], spans.ends[waits[1]])
        after_launch, after_before, after_waits = starts - queued, starts - free, starts - met
        latency = usual(after_launch[launched & (queued >= free) & (queued >= met)], after_launch[launched])
        gap = usual(
            after_before[(free >= queued + latency) & (met == NEVER) & ~first & (after_before >= 0)],
            after_before[~first & (after_before >= 0)],
        )
        after_each = starts[waits[0]] - spans.ends[waits[1]]
        bound = (met >= free + gap) & (met >= queued + latency)
        wait = usual(after_waits[bound & (after_waits >= 0)], after_each[after_each >= 0])
        launch = np.minimum(after_launch, latency)
        follow = np.minimum(after_before, gap)
        each = np.clip(np.minimum(after_each, wait), 0, None)
        ready_waits = np.full(len(spans), NEVER)
        np.maximum.at(ready_waits, waits[0], spans.ends[waits[1]] + each)
        ready = np.stack(
            (np.where(first, NEVER, free + follow), np.where(launched, queued + launch, NEVER), ready_waits)
        )
        last, late = ready.argmax(axis=0), np.clip(starts - ready.max(axis=0), 0, None)
        ordinary = ORDINARY * np.array([gap, latency, wait])[last]
        given = np.stack((follow, launch, np.zeros_like(launch)))[last, np.arange(len(spans))]
        more = np.minimum(late, np.clip(np.minimum(ordinary, LONGEST_ORDINARY_NS) - given, 0, None))
        latest = spans.ends[waits[1]] + each == ready_waits[waits[0]]
        each += np.where((last[waits[0]] == _WAIT) & latest, more[waits[0]], 0)
        return cls(
            before=follow + np.where(last == _BEFORE, more, 0),
            launch=launch + np.where(last == _LAUNCH, more, 0),
            waits=each,
            holds=late - more,
        )


def usual(bound: Nanoseconds, any_of: Nanoseconds) -> int:
    """The median of those that were bound by such a dependency; of too few, the least of any."""
    few = int(any_of.min()) if len(any_of) else 0
    return min(LONGEST_ORDINARY_NS, int(np.median(bound)) if len(bound) >= _FEW else few)
