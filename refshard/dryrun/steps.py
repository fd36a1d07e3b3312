"""The steps of a recording: which rows belong to which step, and when host and device run them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refshard.dryrun.recording import Kind, Recording
from refshard.dryrun.replay import Replayed
from refshard.timeline import Spans, Window


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


def host_windows(steps: Sequence[Step], replayed: Replayed) -> tuple[Window, ...]:
    """From when the host asked for a step's first event until it was free after the last one."""
    return tuple(
        Window(
            step=step.number,
            start=int(replayed.host_starts[step.first]),
            end=int(replayed.host_ends[step.end - 1]),
        )
        for step in steps
    )


def device_windows(steps: Sequence[Step], spans: Spans) -> tuple[Window, ...]:
    """When the device runs each step; one follows the other without a gap.

    A step ends with the last span that it launched on the lane that computes most. The first begins with its first
    span, and the last ends with the last span of all. A step that launched nothing on that lane lasts until its last
    span ends, if that is before the next one begins there. A step that launched nothing has no window.
    """
    on_main = spans.lanes == spans.main_lane()
    windows: list[Window] = []
    following: int | None = None
    found = []
    for step in reversed(steps):
        mine = spans.steps == step.number
        main = mine & on_main
        if main.any():
            found.append((step, mine, int(spans.ends[main].max())))
            first = int(spans.starts[main].min())
            following = first if following is None else min(first, following)
        elif mine.any():
            last = int(spans.ends[mine].max())
            found.append((step, mine, last if following is None else min(last, following)))
    for step, mine, end in reversed(found):
        start = windows[-1].end if windows else int(spans.starts[mine].min())
        windows.append(Window(step=step.number, start=start, end=max(start, end)))
    if windows:
        last = max(windows[-1].end, int(spans.ends[spans.steps >= 0].max()))
        windows[-1] = Window(step=windows[-1].step, start=windows[-1].start, end=last)
    return tuple(windows)
