"""How far streams have come when the allocator asks: as the host knew while the script ran, or as on a GPU by a replay.

``record_stream()`` holds a freed block back until other streams have passed what they had been asked when it was freed.
torch records a CUDA event on each of them, and queries the events at every allocation. A dry run has no GPU to query:
while the script runs, a stream has passed something only once the host has waited for it, which is later.
"""

from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from refshard.dryrun.recording import NO_STREAM, Flag, Kind, Recording
from refshard.dryrun.replay import Replayed

ON_STREAM = (Kind.LAUNCH, Kind.COLLECTIVE, Kind.RECORD, Kind.WAIT)
"""What a stream has to pass."""


class Follower(ABC):
    """Follows the host through a recording; ``progress`` is what an allocator asks then (the extension's own class)."""

    progress: Any

    @abstractmethod
    def ask(self, row: int) -> None:
        """The host asks for event ``row``."""


class AsHostKnew(Follower):
    """The device's own rule while the script ran: a stream has passed what the host has waited for."""

    def __init__(self, recording: Recording, ext: ModuleType) -> None:
        self.progress = ext.Streams()
        self._kinds: list[int] = recording.kinds.tolist()
        self._streams: list[int] = recording.streams.tolist()
        self._subjects: list[int] = recording.subjects.tolist()
        self._on_stream: list[bool] = on_stream(recording).tolist()

    def ask(self, row: int) -> None:
        """Tell the streams of it."""
        kind, stream, subject = self._kinds[row], self._streams[row], self._subjects[row]
        if kind == Kind.SYNCHRONISE and subject:
            self.progress.host_waits_for_event(subject)
        elif kind == Kind.SYNCHRONISE and stream != NO_STREAM:
            self.progress.host_waits_for_stream(stream)
        elif kind == Kind.SYNCHRONISE:
            self.progress.synchronise()
        elif kind == Kind.RECORD:
            self.progress.record(stream, subject)
        elif kind == Kind.WAIT:
            self.progress.wait(stream, subject)
        elif self._on_stream[row]:
            self.progress.launched(stream)


class AsReplayed(Follower):
    """A GPU's answers: a stream has passed an event if that is over when the host gets to the one at hand.

    What the allocator itself waits for, to give memory back, has been passed too. The wait takes none of the host's
    time here: that needs another replay.
    """

    def __init__(self, recording: Recording, replayed: Replayed, ext: ModuleType) -> None:
        self.progress = _replayed_progress(self, ext)
        self.row = 0
        self.known = -1  # the last event that the allocator has waited for
        self.last: dict[int, int] = {}  # event asked of each stream
        self.now: list[int] = replayed.host_starts.tolist()
        self.finished: list[int] = finish_times(recording, replayed).tolist()
        self._streams: list[int] = recording.streams.tolist()
        self._on_stream: list[bool] = on_stream(recording).tolist()

    def ask(self, row: int) -> None:
        """Remember it."""
        self.row = row
        if self._on_stream[row]:
            self.last[self._streams[row]] = row


def _replayed_progress(follower: AsReplayed, ext: ModuleType) -> Any:
    class Replay(ext.Progress):  # type: ignore[name-defined, misc]
        """Tickets are rows of the recording."""

        def position(self, stream: int) -> int:
            return follower.last.get(stream, -1)

        def passed(self, stream: int, ticket: int) -> bool:
            return ticket <= follower.known or follower.finished[ticket] <= follower.now[follower.row]

        def synchronise(self) -> None:
            follower.known = follower.row

    return Replay()


def on_stream(recording: Recording) -> npt.NDArray[np.bool_]:
    """Which events a stream has to pass."""
    found: npt.NDArray[np.bool_] = (
        np.isin(recording.kinds, ON_STREAM)
        & (recording.streams != NO_STREAM)
        & (recording.flags & Flag.HOST_ONLY == 0)
    )  # fmt: skip
    return found


def finish_times(recording: Recording, replayed: Replayed) -> npt.NDArray[np.int64]:
    """When a stream has passed each event, in nanoseconds of the replay; for what no stream passes, when the host has.

    Streams run in order, so a stream has then passed all that it was asked before.
    """
    found = replayed.host_ends.copy()
    passed: dict[int, int] = {}
    recorded: dict[int, int] = {}
    for row in np.flatnonzero(on_stream(recording)).tolist():
        kind, stream, subject = int(recording.kinds[row]), int(recording.streams[row]), int(recording.subjects[row])
        awaited = recorded.get(subject, 0) if kind == Kind.WAIT else 0
        end = max(int(found[row]), int(replayed.ends[row]), awaited, passed.get(stream, 0))
        found[row] = passed[stream] = end
        if kind == Kind.RECORD:
            recorded[subject] = end
    return found
