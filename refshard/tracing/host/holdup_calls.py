"""The host's calls that may hold the GPU up: of which kind they are, and which code makes them."""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.events.table import ANNOTATION, HOST, LAUNCH, TraceFile
from refshard.events.timeline import UNKNOWN, Intervals, Nanoseconds, Spans
from refshard.tracing.device import Launches
from refshard.tracing.host.holdup_figures import Hold
from refshard.tracing.host.runtime import (
    ALLOCATES,
    COPIES,
    GRAPH_LAUNCHES,
    LAUNCHES,
    LOADS,
    LONG_NS,
    MAY_LOAD,
    SYNCHRONISES,
)
from refshard.tracing.labels import find_labels, innermost

TIMES_THE_MEDIAN = 20
"""A launch is long if it takes :data:`LONG_NS`, and so many times the median of all launches."""
HOLDS = tuple(Hold)
"""Kinds by their code in :attr:`Calls.kinds`."""

_STEPS = re.compile(r"ProfilerStep#")
_BY_OPERATOR = {
    Hold.ITEM: ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"),
    Hold.SHAPE: ("aten::nonzero", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim",
                  "aten::masked_select", "aten::repeat_interleave", "aten::bincount"),
    Hold.COPY: ("aten::copy_", "aten::_to_copy", "aten::to"),
}  # fmt: skip
"""What a wait or a copy is for, by the innermost operator around it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calls:
    """Calls of one trace, ordered by thread and start, none within another.

    ``rows`` are those of :class:`~refshard.events.table.HostEvents`. ``kinds`` index :data:`HOLDS`. ``names``,
    ``operators``, ``annotations`` and ``copies`` index :attr:`TraceFile.names`, ``frames`` the names of its frames,
    ``units`` :attr:`unit_names`; :data:`UNKNOWN` where there is none. ``occurrences`` are alike for the calls that one
    operator makes for one purpose.
    """

    rows: npt.NDArray[np.int64]
    starts: Nanoseconds
    ends: Nanoseconds
    threads: npt.NDArray[np.int32]
    kinds: npt.NDArray[np.int8]
    names: npt.NDArray[np.int32]
    operators: npt.NDArray[np.int32]
    annotations: npt.NDArray[np.int32]
    frames: npt.NDArray[np.int32]
    units: npt.NDArray[np.int32]
    copies: npt.NDArray[np.int32]
    occurrences: npt.NDArray[np.int64]
    unit_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.starts)


def find_calls(trace: TraceFile, spans: Spans, launches: Launches, starved: Intervals) -> Calls:
    """The calls that may hold the GPU up. ``starved`` is when nothing runs and nothing is queued."""
    host = trace.host
    copies = _copies(trace, spans, launches)
    kinds = _kinds(trace, copies, starved)
    rows = np.flatnonzero(kinds != UNKNOWN)
    rows = rows[np.lexsort((-host.ends[rows], host.starts[rows], host.threads[rows]))]
    rows = rows[_outermost(host.threads[rows], host.ends[rows])]
    threads, starts = host.threads[rows], host.starts[rows]
    is_step = _matching(trace, _STEPS)
    around = {
        category: enclosing(host.starts[of], host.ends[of], host.threads[of], threads, starts, of)
        for category in (HOST, ANNOTATION)
        for of in (np.flatnonzero((host.categories == category) & ~is_step),)
    }
    operators = _named(host.names, around[HOST])
    found = _for_operators(trace, kinds[rows], operators)
    frames, labels = trace.frames, find_labels(trace)
    frame = enclosing(frames.starts, frames.ends, frames.threads, threads, starts, np.arange(len(frames.starts)))
    merged = np.isin(found, [HOLDS.index(kind) for kind in _BY_OPERATOR]) & (around[HOST] != UNKNOWN)
    return Calls(
        rows=rows,
        starts=starts,
        ends=host.ends[rows],
        threads=threads,
        kinds=found,
        names=host.names[rows],
        operators=operators,
        annotations=_named(host.names, around[ANNOTATION]),
        frames=_named(frames.names, frame),
        units=labels.of_work(threads, starts)[0].astype(np.int32),
        copies=copies.names[rows],
        occurrences=np.where(merged, around[HOST], rows),
        unit_names=labels.unit_names,
    )


def enclosing(
    starts: Nanoseconds,
    ends: Nanoseconds,
    threads: npt.NDArray[np.int32],
    at_threads: npt.NDArray[np.int32],
    at: Nanoseconds,
    numbers: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """The number of the innermost interval on ``at_threads[i]`` around ``at[i]``; :data:`UNKNOWN` where there is none.

    Intervals of one thread are nested. Only those around any of the points are looked at one by one.
    """
    found = np.full(len(at), UNKNOWN, np.int64)
    for thread in np.unique(at_threads).tolist():
        there, rows = np.flatnonzero(at_threads == thread), np.flatnonzero(threads == thread)
        points = np.sort(at[there])
        rows = rows[np.searchsorted(points, starts[rows]) < np.searchsorted(points, ends[rows])]
        if len(rows):
            rows = rows[np.lexsort((-ends[rows], starts[rows]))]
            cuts, owners = innermost(starts[rows].tolist(), ends[rows].tolist())
            owner = owners[np.searchsorted(cuts, at[there], side="right")]
            found[there] = np.where(owner < 0, UNKNOWN, numbers[rows[owner]])
    return found


def _kinds(trace: TraceFile, copies: "_Copies", starved: Intervals) -> npt.NDArray[np.int8]:
    """Of each host event the kind of call as which it may hold the GPU up, or :data:`UNKNOWN`."""
    host = trace.host
    lengths, is_call = host.ends - host.starts, host.categories == LAUNCH
    is_launch, is_copy = is_call & _matching(trace, LAUNCHES), is_call & _matching(trace, COPIES)
    is_long = is_call & (lengths > LONG_NS)
    if is_launch.any():
        is_long &= ~is_launch | (lengths > TIMES_THE_MEDIAN * np.median(lengths[is_launch]))
    blocks = is_copy & (~is_launch | (copies.pageable & (is_long | copies.awaited)))
    starving = np.zeros(len(lengths), np.bool_)
    starving[is_long] = starved.within(host.starts[is_long], host.ends[is_long]) > 0
    conditions = (
        (is_call & _matching(trace, SYNCHRONISES), Hold.SYNC),
        (is_call & _matching(trace, ALLOCATES), Hold.ALLOCATOR),
        ((is_call & _matching(trace, LOADS)) | (is_long & _matching(trace, MAY_LOAD)), Hold.LOADING),
        (blocks, Hold.COPY),
        (is_long & is_launch & starving, Hold.LOADING),
        (is_long & is_launch, Hold.QUEUE),
        (is_long & ~_matching(trace, GRAPH_LAUNCHES), Hold.OTHER),
    )
    codes = [HOLDS.index(kind) for _, kind in conditions]
    return np.select([condition for condition, _ in conditions], codes, UNKNOWN).astype(np.int8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Copies:
    """Of each host event the name of the copy that it launched, whether that touches pageable memory of the host, and
    whether the call returned only after it.
    """

    names: npt.NDArray[np.int32]
    pageable: npt.NDArray[np.bool_]
    awaited: npt.NDArray[np.bool_]


def _copies(trace: TraceFile, spans: Spans, launches: Launches) -> _Copies:
    names = np.full(len(trace.host.starts), UNKNOWN, np.int32)
    is_copy = np.array([name.startswith("Memcpy") for name in trace.names] or [False])
    rows = np.flatnonzero(is_copy[spans.names] & (launches.calls != UNKNOWN))
    calls = launches.calls[rows]
    names[calls] = spans.names[rows]
    pageable, awaited = np.zeros(len(names), np.bool_), np.zeros(len(names), np.bool_)
    pageable[calls] = np.array(["Pageable" in name for name in trace.names] or [False])[spans.names[rows]]
    awaited[calls] = trace.host.ends[calls] >= spans.ends[rows]
    return _Copies(names=names, pageable=pageable, awaited=awaited)


def _for_operators(
    trace: TraceFile, kinds: npt.NDArray[np.int8], operators: npt.NDArray[np.int32]
) -> npt.NDArray[np.int8]:
    """The kinds, with the purpose of waits and copies by the operator around them."""
    found, waits = (
        kinds.copy(),
        np.isin(kinds, [HOLDS.index(kind) for kind in (Hold.SYNC, Hold.COPY)]),
    )
    for kind, names in _BY_OPERATOR.items():
        codes = [code for code, name in enumerate(trace.names) if name in names]
        found[waits & np.isin(operators, codes)] = HOLDS.index(kind)
    return found


def _outermost(threads: npt.NDArray[np.int32], ends: Nanoseconds) -> npt.NDArray[np.bool_]:
    """Which of some intervals, ordered by thread and start, do not lie within another on their thread."""
    kept = np.ones(len(ends), np.bool_)
    for thread in np.unique(threads).tolist():
        here = np.flatnonzero(threads == thread)
        kept[here[1:]] = ends[here[1:]] > np.maximum.accumulate(ends[here])[:-1]
    return kept


def _named(names: npt.NDArray[np.int32], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The names of some rows, :data:`UNKNOWN` where there is no row."""
    found = np.full(len(rows), UNKNOWN, np.int32)
    found[rows != UNKNOWN] = names[rows[rows != UNKNOWN]]
    return found


def _matching(trace: TraceFile, pattern: "re.Pattern[str]") -> npt.NDArray[np.bool_]:
    """Which host events have such a name."""
    matching = np.array([pattern.match(name) is not None for name in trace.names] or [False])
    return np.asarray(matching[trace.host.names], np.bool_)
