"""Spans row by row: made for tests, and read back."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from refshard.events.timeline import KINDS, UNKNOWN, Kind, Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One event: ``kind`` of work on ``lane`` (a stream or a thread) over ``[start, end)`` nanoseconds."""

    kind: Kind
    lane: str
    name: str
    start: int
    end: int


def listed(spans: Spans) -> list[Span]:
    """The rows, in order."""
    return [
        Span(kind=KINDS[kind], lane=spans.lane_names[lane], name=spans.name_table[name], start=int(start), end=int(end))
        for start, end, kind, lane, name in zip(spans.starts, spans.ends, spans.kinds, spans.lanes, spans.names)
    ]


def spans_of(given: Iterable[Span]) -> Spans:
    """Columns of spans in any order, with only the fields of a :class:`Span`."""
    rows = sorted(given, key=lambda s: (s.start, s.end))
    lane_names = tuple(dict.fromkeys(s.lane for s in rows))
    name_table = tuple(dict.fromkeys(s.name for s in rows))
    names = np.array([name_table.index(s.name) for s in rows], np.int32)
    unknown = np.full(len(rows), UNKNOWN)
    return Spans(
        starts=np.array([s.start for s in rows], np.int64), ends=np.array([s.end for s in rows], np.int64),
        kinds=np.array([KINDS.index(s.kind) for s in rows], np.int8),
        lanes=np.array([lane_names.index(s.lane) for s in rows], np.int32), names=names, operators=names,
        launches=unknown.astype(np.int64), queued=unknown.astype(np.int64), steps=unknown.astype(np.int32),
        units=unknown.astype(np.int32), under=np.zeros(len(rows), np.int16), signatures=names,
        lane_names=lane_names, name_table=name_table, signature_names=name_table,
    )  # fmt: skip
