"""The steps of a recording: which rows belong to which step, and when the host runs them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refshard.dryrun.recording import Flag, Kind, Recording
from refshard.dryrun.replay import Replayed
from refshard.events.timeline import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The events ``[first, end)`` of a recording are those of step ``number``."""

    number: int
    first: int
    end: int


def steps_of(recording: Recording, says: str | None = None) -> tuple[Step, ...]:
    """A step ends with each mark (with each that says ``says``); the first begins with the recording.

    What comes after the last mark is no step's. Without marks all is one step.
    """
    marks = recording.kinds == Kind.MARK
    if says is not None:
        marks &= np.array([name == says for name in recording.name_table], np.bool_)[recording.names]
    ends = (np.flatnonzero(marks) + 1).tolist() or [len(recording)]
    firsts = [0, *ends[:-1]]
    return tuple(
        Step(number=n, first=first, end=end) for n, (first, end) in enumerate(zip(firsts, ends)) if first < end
    )


def settled(recording: Recording, steps: Sequence[Step]) -> Sequence[Step]:
    """The steps after those that set up what later ones reuse: the first one, and all up to the last one that captures
    a CUDA graph. Where nothing comes after the captures, all but the first one; of a single step, that one.
    """
    captures = np.flatnonzero(recording.flags & Flag.CAPTURED)
    last = captures[-1] if len(captures) else -1
    return [step for step in steps[1:] if step.first > last] or steps[1:] or steps


def host_windows(steps: Sequence[Step], replayed: Replayed) -> tuple[Window, ...]:
    """From when the host issued a step's first event until it was free after the last one."""
    return tuple(
        Window(
            step=step.number,
            start=int(replayed.host_starts[step.first]),
            end=int(replayed.host_ends[step.end - 1]),
        )
        for step in steps
    )
