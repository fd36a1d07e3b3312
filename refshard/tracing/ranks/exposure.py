"""When communication is exposed, through which collective, and what of that is waiting for another rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.events.timeline import UNKNOWN, Intervals, Kind, Nanoseconds, Timeline
from refshard.tracing.collectives import ran
from refshard.tracing.idle import knows_launches
from refshard.tracing.ranks.exposure_figures import ExposedSplit, PeerWait
from refshard.tracing.ranks.stragglers import Entered

NO_HOST = "nothing is launched on a CPU"
NO_LAUNCHES = "the trace has no launches; record CPU activities too"
_EVER = np.iinfo(np.int64)
SOME_LAUNCHES = "some collectives have no launch in the trace"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Disjoint intervals ``[starts[i], ends[i])`` of exposed communication, in order.

    ``owners`` are the numbers of the collectives that they belong to, in the order of the trace's figures: of several
    that run, the one that started first.
    """

    starts: Nanoseconds
    ends: Nanoseconds
    owners: npt.NDArray[np.int64]

    def within(self, start: int, end: int) -> "Pieces":
        """What lies in one window."""
        first, last = np.searchsorted(self.ends, start, side="right"), np.searchsorted(self.starts, end, side="left")
        rows = slice(int(first), max(int(first), int(last)))
        return Pieces(
            starts=np.maximum(self.starts[rows], start),
            ends=np.minimum(self.ends[rows], end),
            owners=self.owners[rows],
        )

    def waited(self, until: Nanoseconds) -> Nanoseconds:
        """Nanoseconds of each piece before ``until[owner]``."""
        return np.maximum(0, np.minimum(self.ends, until[self.owners]) - self.starts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exposure:
    """The exposed communication of a trace, and the windows that figures are told of: the whole trace, then its steps.

    ``launch`` is the time of each window in which nothing ran because the next collective was launched late; None, and
    ``no_launch`` says why, where that is unknown.
    """

    pieces: Pieces
    steps: tuple[int | None, ...]
    starts: Nanoseconds
    ends: Nanoseconds
    launch: tuple[int | None, ...]
    no_launch: str | None


def exposure_of(timeline: Timeline, steps: Sequence[int | None], starts: Nanoseconds, ends: Nanoseconds) -> Exposure:
    """Find the exposed communication of a timeline; windows are ``[starts[i], ends[i])``, of ``steps[i]``."""
    launch, why = _launch(timeline, starts, ends)
    return Exposure(
        pieces=_exposed(_owned(timeline), timeline.busy(Kind.COMPUTE)),
        steps=tuple(steps), starts=starts, ends=ends, launch=tuple(launch), no_launch=why,
    )  # fmt: skip


def _owned(timeline: Timeline) -> Pieces:
    """Every nanosecond of communication, by the collective whose span of it started first."""
    spans = timeline.spans
    owner_of = np.full(len(spans), UNKNOWN, np.int64)
    for number, (collective, *_) in enumerate(ran(timeline)):
        owner_of[list(collective.rows)] = number
    rows = np.flatnonzero((owner_of != UNKNOWN) & spans.of_kind(Kind.COMM))
    reach = np.maximum.accumulate(spans.ends[rows])
    starts = spans.starts[rows].copy()
    starts[1:] = np.maximum(starts[1:], reach[:-1])
    kept = spans.ends[rows] > starts
    return Pieces(starts=starts[kept], ends=spans.ends[rows][kept], owners=owner_of[rows][kept])


def _exposed(owned: Pieces, compute: Intervals) -> Pieces:
    """Without what compute hides."""
    free_starts = np.concatenate(([_EVER.min], compute.ends))
    free_ends = np.concatenate((compute.starts, [_EVER.max]))
    first = np.searchsorted(free_ends, owned.starts, side="right")
    counts = np.maximum(0, np.searchsorted(free_starts, owned.ends, side="left") - first)
    mine = np.repeat(np.arange(len(first)), counts)
    rows = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts) + first[mine]
    return Pieces(
        starts=np.maximum(free_starts[rows], owned.starts[mine]),
        ends=np.minimum(free_ends[rows], owned.ends[mine]),
        owners=owned.owners[mine],
    )


def _launch(timeline: Timeline, starts: Nanoseconds, ends: Nanoseconds) -> tuple[list[int | None], str | None]:
    """Idle time that a collective ends whose launch returned after that time began, per window."""
    nothing: list[int | None] = [None] * len(starts)
    spans = timeline.spans
    if not timeline.on_device:
        return nothing, NO_HOST
    if not knows_launches(spans):
        return nothing, NO_LAUNCHES
    gaps, queued = _gaps_before_collectives(timeline)
    late, doubtful = queued > gaps.starts, queued == UNKNOWN
    found = Intervals(gaps.starts[late], gaps.ends[late]).within(starts, ends).tolist()
    doubts = Intervals(gaps.starts[doubtful], gaps.ends[doubtful]).within(starts, ends).tolist()
    told = [None if doubt else ns for ns, doubt in zip(found, doubts)]
    return told, SOME_LAUNCHES if None in told else None


def _gaps_before_collectives(timeline: Timeline) -> tuple[Intervals, Nanoseconds]:
    """Maximal intervals in which nothing runs, of those that a collective ends; and when its launch had returned."""
    spans, busy = timeline.spans, timeline.busy(*Kind)
    rows = np.flatnonzero(spans.of_kind(Kind.COMM) & (spans.ends > spans.starts))
    place = np.searchsorted(busy.starts, spans.starts[rows])
    ending = (place > 0) & (busy.starts[np.minimum(place, len(busy.starts) - 1)] == spans.starts[rows])
    rows, place = rows[ending], place[ending]
    # Of several that start at once, the one launched first; one of unknown launch may have been.
    order = np.lexsort((spans.queued[rows], place))
    place, first = np.unique(place[order], return_index=True)
    return Intervals(busy.ends[place - 1], busy.starts[place]), spans.queued[rows[order][first]]


def split(exposure: Exposure, begins: Nanoseconds, entered: Mapping[int, Entered]) -> tuple[ExposedSplit, ...]:
    """Divide the exposed communication of each window.

    ``begins`` are the starts of the trace's collectives, ``entered`` what other ranks' traces tell of them, by number.
    """
    windows = zip(exposure.steps, exposure.starts.tolist(), exposure.ends.tolist(), exposure.launch)
    until = begins.copy()
    peers = np.full(len(begins), UNKNOWN, np.int64)
    is_complete = np.zeros(len(begins), np.bool_)
    if not entered:
        return tuple(
            _undivided(exposure.pieces.within(start, end), step, launch) for step, start, end, launch in windows
        )
    for number, one in entered.items():
        until[number] += one.waited_ns
        peers[number] = UNKNOWN if one.rank is None else one.rank
        is_complete[number] = one.is_complete
    return tuple(
        _split(exposure.pieces.within(start, end), (until, peers, is_complete), step, launch)
        for step, start, end, launch in windows
    )


def _undivided(pieces: Pieces, step: int | None, launch: int | None) -> ExposedSplit:
    exposed = int((pieces.ends - pieces.starts).sum())
    return ExposedSplit(
        step=step, exposed_ns=exposed, transfer_ns=None, waiting_ns=None, undivided_ns=exposed, launch_ns=launch
    )


def _split(
    pieces: Pieces,
    told: tuple[Nanoseconds, npt.NDArray[np.int64], npt.NDArray[np.bool_]],
    step: int | None,
    launch: int | None,
) -> ExposedSplit:
    until, peers, is_complete = told
    lengths, waited = pieces.ends - pieces.starts, pieces.waited(until)
    exposed, waiting = int(lengths.sum()), int(waited.sum())
    transfer = int((lengths - waited)[is_complete[pieces.owners]].sum())
    of_peer = [(int(peer), int(waited[peers[pieces.owners] == peer].sum())) for peer in np.unique(peers[pieces.owners])]
    found = [PeerWait(rank=peer, waited_ns=ns) for peer, ns in of_peer if peer != UNKNOWN and ns]
    return ExposedSplit(
        step=step,
        exposed_ns=exposed,
        transfer_ns=transfer if is_complete.any() else None,
        waiting_ns=waiting,
        undivided_ns=exposed - waiting - transfer,
        launch_ns=launch,
        waits_for=tuple(sorted(found, key=lambda one: (-one.waited_ns, one.rank))),
    )
