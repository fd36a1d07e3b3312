"""Small timelines for property tests, and what they hold counted point by point on a ruler of integers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from refshard.timeline import KINDS, UNKNOWN, Kind, Meaning, Nanoseconds, Spans, Timeline, Window

END = 40
LANES = ("stream 7", "stream 20", "stream 22")
NAMES = ("gemm", "adam", "nccl", "cast")


NO_MEANING = Meaning(0)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One span; ``launch`` may be UNKNOWN."""

    kind: Kind
    lane: int
    start: int
    end: int
    launch: int
    under: Meaning = NO_MEANING
    operator: int = 0
    unit: int = UNKNOWN
    name: int = 0

    @property
    def points(self) -> set[int]:
        return set(range(self.start, self.end))


def timeline_of(rows: list[Row], *, windows: tuple[Window, ...] = ()) -> Timeline:
    """A device's timeline of these rows, which must be in the order of spans."""

    def column(values: list[int], dtype: type) -> npt.NDArray[Any]:
        return np.array(values, dtype)

    spans = Spans(
        starts=column([r.start for r in rows], np.int64),
        ends=column([r.end for r in rows], np.int64),
        kinds=column([KINDS.index(r.kind) for r in rows], np.int8),
        lanes=column([r.lane for r in rows], np.int32),
        names=column([r.name for r in rows], np.int32),
        operators=column([r.operator for r in rows], np.int32),
        launches=column([r.launch for r in rows], np.int64),
        queued=column([r.launch for r in rows], np.int64),
        steps=column([UNKNOWN for _ in rows], np.int32),
        units=column([r.unit for r in rows], np.int32),
        under=column([r.under for r in rows], np.int16),
        signatures=column([r.name for r in rows], np.int32),
        lane_names=LANES,
        name_table=NAMES,
        unit_names=("layers.0", "layers.1"),
        signature_names=NAMES,
    )
    return Timeline(rank=0, windows=windows, spans=spans, on_device=True)


def _row(
    kind: Kind, lane: int, start: int, ns: int, ahead: int, under: int, operator: int, unit: int, name: int
) -> Row:
    launch = UNKNOWN if ahead == 0 else max(0, start + 2 - ahead)
    meaning = (Meaning(0), Meaning.COPY_IN, Meaning.COPY_OUT, Meaning.COPY_IN | Meaning.COPY_OUT)[under]
    return Row(kind=kind, lane=lane, start=start, end=start + ns, launch=launch, under=meaning, operator=operator,
               unit=unit, name=name)  # fmt: skip


def _rows(kinds: tuple[Kind, ...], latest: int) -> st.SearchStrategy[list[Row]]:
    one = st.builds(
        _row,
        st.sampled_from(kinds),
        st.integers(0, 2),
        st.integers(0, latest),
        st.integers(0, 8),
        st.integers(0, 14),
        st.integers(0, 3),
        st.integers(UNKNOWN, 1),
        st.integers(UNKNOWN, 1),
        st.integers(2, 3),
    )
    return st.lists(one, max_size=10).map(lambda found: sorted(found, key=lambda r: (r.start, r.end)))


rows = _rows(tuple(Kind), END) | _rows((Kind.COMPUTE, Kind.COMM), END // 3)
"""Spans in order, far apart or crowded; some empty, some launched late, some of unknown launch."""

windows = st.lists(
    st.tuples(st.integers(0, END + 10), st.integers(0, 30)).map(lambda w: (w[0], w[0] + w[1])), min_size=1, max_size=5
)
"""Windows that may overlap each other."""

steps = st.lists(st.integers(0, END + 15), max_size=8).map(
    lambda cuts: tuple(Window(step=i, start=a, end=b) for i, (a, b) in enumerate(zip(*[iter(sorted(cuts))] * 2)))
)
"""Steps that do not overlap, some of which touch."""


def bounds(found: list[tuple[int, int]]) -> tuple[Nanoseconds, Nanoseconds]:
    table = np.array(found, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def points(found: list[Row], *kinds: Kind) -> set[int]:
    return {t for row in found if row.kind in kinds for t in row.points}


def launched_by(found: list[Row], index: int) -> float:
    """When a span was launched at the latest: when it was, or the next on its lane of which that is known."""
    lane = [row for row in found[index:] if row.lane == found[index].lane]
    return next((row.launch for row in lane if row.launch != UNKNOWN), float("inf"))


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A run of idle points in one window, the row that ends it (None at the end of all) and whom to blame."""

    start: int
    end: int
    follower: int | None
    host: bool


def idle_gaps(found: list[Row], start: int, end: int) -> list[Gap]:
    busy, gaps, t = points(found, *Kind), [], start
    while t < end:
        if t in busy:
            t += 1
            continue
        begin = t
        while t < end and t not in busy:
            t += 1
        later = [i for i, row in enumerate(found) if row.start >= t and row.points]
        first = [i for i in later if found[i].start == min(found[j].start for j in later)]
        follower = min(first, key=lambda i: (launched_by(found, i), found[i].lane, i), default=None)
        host = follower is None or launched_by(found, follower) > begin
        gaps.append(Gap(start=begin, end=t, follower=follower, host=host))
    return gaps
