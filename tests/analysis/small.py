"""Small timelines for property tests, and what they hold counted point by point on a ruler of integers."""

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from refshard.analysis.figures import Cause
from refshard.events.timeline import KINDS, UNKNOWN, Kind, Meaning, Nanoseconds, Spans, Timeline, Window

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

    return Timeline(rank=0, windows=windows, spans=Spans(
        starts=column([r.start for r in rows], np.int64), ends=column([r.end for r in rows], np.int64),
        kinds=column([KINDS.index(r.kind) for r in rows], np.int8), lanes=column([r.lane for r in rows], np.int32),
        names=column([r.name for r in rows], np.int32), operators=column([r.operator for r in rows], np.int32),
        launches=column([r.launch for r in rows], np.int64), queued=column([r.launch for r in rows], np.int64),
        steps=column([UNKNOWN for _ in rows], np.int32), units=column([r.unit for r in rows], np.int32),
        under=column([r.under for r in rows], np.int16), signatures=column([r.name for r in rows], np.int32),
        lane_names=LANES, name_table=NAMES, unit_names=("layers.0", "layers.1"), signature_names=NAMES,
    ), on_device=True)  # fmt: skip


def _row(
    kind: Kind, lane: int, start: int, ns: int, ahead: int, under: int, operator: int, unit: int, name: int
) -> Row:
    launch = UNKNOWN if ahead == 0 else max(0, start + 2 - ahead)
    meaning = (Meaning(0), Meaning.COPY_IN, Meaning.COPY_OUT, Meaning.COPY_IN | Meaning.COPY_OUT)[under]
    return Row(kind=kind, lane=lane, start=start, end=start + ns, launch=launch, under=meaning, operator=operator,
               unit=unit, name=name)  # fmt: skip


def _rows(kinds: tuple[Kind, ...], latest: int) -> st.SearchStrategy[list[Row]]:
    return st.lists(st.builds(
        _row, st.sampled_from(kinds), st.integers(0, 2), st.integers(0, latest), st.integers(0, 8), st.integers(0, 14),
        st.integers(0, 3), st.integers(UNKNOWN, 1), st.integers(UNKNOWN, 1), st.integers(2, 3),
    ), max_size=10).map(lambda found: sorted(found, key=lambda r: (r.start, r.end)))  # fmt: skip


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
    """A run of idle points, the row that ends it (None at the end of all), and why nothing ran."""

    start: int
    end: int
    follower: int | None
    cause: Cause


def runs(found: list[Row], start: int, end: int) -> list[tuple[int, int]]:
    """Maximal runs of idle points."""
    busy, gaps, t = points(found, *Kind), [], start
    while t < end:
        begin = t
        while t < end and t not in busy:
            t += 1
        if t > begin:
            gaps.append((begin, t))
        t += 1
    return gaps


def idle_gaps(found: list[Row], start: int, end: int, first: int, last: int) -> list[Gap]:
    """The parts in ``[start, end)`` of the gaps between all rows since ``first`` and until ``last``."""
    busy = points(found, *Kind)
    first, last = min([first, *busy]), max([last, *(t + 1 for t in busy)])
    whole = [(gap, follower_of(found, gap[1])) for gap in runs(found, first, last)]
    before_all = min(busy, default=last)
    latencies = [
        gap[1] - launched_by(found, row)
        for gap, row in whole
        if row is not None and gap[1] != before_all and gap[0] < launched_by(found, row) <= gap[1]
    ]
    latency = median(latencies) if latencies else 0.0
    gaps = [
        Gap(start=max(a, start), end=min(b, end), follower=row, cause=_cause(found, a, b, row, latency))
        for (a, b), row in whole
    ]
    return [gap for gap in gaps if gap.start < gap.end]


def follower_of(found: list[Row], at: int) -> int | None:
    """Of the rows that begin next, the one launched first, then the one on the first lane."""
    later = [i for i, row in enumerate(found) if row.start >= at and row.points]
    first = [i for i in later if found[i].start == min(found[j].start for j in later)]
    return min(first, key=lambda i: (launched_by(found, i), found[i].lane, i), default=None)


def _cause(found: list[Row], begin: int, close: int, follower: int | None, latency: float) -> Cause:
    """As the docs define it; every gap here is shorter than any distance between two kernels."""
    if all(row.launch == UNKNOWN for row in found):
        return Cause.UNKNOWN
    if follower is None:
        return Cause.LAUNCH
    launched = launched_by(found, follower)
    if launched > begin or close - launched <= 1.5 * latency:
        return Cause.LAUNCH
    ended = [row.lane for row in found if row.points and row.end == begin]
    if not ended:
        return Cause.UNKNOWN
    return Cause.BACK_TO_BACK if found[follower].lane in ended else Cause.DEPENDENCY
