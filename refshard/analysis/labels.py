"""Annotations of refshard and of its peers, mapped to one meaning; and the operator and the annotation around a moment.

Peers are not labelled, which would slow them: they are recognised by names that they write themselves (torch 2.11 to
2.13). A kernel belongs to the innermost operator around its launch, found by the launch's time and thread. Kineto's
external id gives the same only if the recorder numbers operators with it, which it did not in 2022.
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.analysis.names import GRAPH_LAUNCHES
from refshard.events.table import ANNOTATION, EMULATED, HOST, HostEvents, TraceFile
from refshard.events.timeline import UNKNOWN, Intervals, Ints, Label, Mask, Meaning, Nanoseconds, Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nesting:
    """Intervals of one thread, ordered by start and the longer first; of two that overlap, one must enclose the
    other. None is empty.

    ``keys`` sort them by depth and then by order, so that the innermost at depth d is found by bisection: the last
    that began at that depth.
    """

    starts: Nanoseconds
    ends: Nanoseconds
    closed: Nanoseconds
    keys: Rows

    @classmethod
    def of(cls, starts: Nanoseconds, ends: Nanoseconds) -> "Nesting":
        """Intervals that are ordered already; see :func:`nested_order`."""
        closed, order = np.sort(ends), np.arange(len(starts))
        depth = order - np.searchsorted(closed, starts, side="right")
        return cls(starts=starts, ends=ends, closed=closed, keys=np.sort(depth * len(starts) + order))

    def innermost(self, points: Nanoseconds) -> Rows:
        """The place of the innermost interval that holds at each point, :data:`UNKNOWN` where none does."""
        begun = np.searchsorted(self.starts, points, side="right")
        return self._at_depth(begun - 1, begun - np.searchsorted(self.closed, points, side="right") - 1, points)

    def parents(self) -> Rows:
        """The place of the interval that encloses each most closely, :data:`UNKNOWN` for the outermost."""
        order = np.arange(len(self.starts))
        depth = order - np.searchsorted(self.closed, self.starts, side="right")
        return self._at_depth(order - 1, depth - 1, self.starts)

    def own(self) -> Nanoseconds:
        """Duration of each without the labels that it encloses."""
        parents, lengths = self.parents(), self.ends - self.starts
        inner = np.zeros(len(lengths), np.int64)
        enclosed = parents != UNKNOWN
        np.add.at(inner, parents[enclosed], lengths[enclosed])
        return np.asarray(np.maximum(0, lengths - inner), np.int64)

    def _at_depth(self, last: Rows, depth: Rows, points: Nanoseconds) -> Rows:
        """The last label at ``depth`` up to ``last``, if it covers the point."""
        count = len(self.starts)
        if not count:
            return np.full(len(points), UNKNOWN, np.int64)
        place = np.searchsorted(self.keys, depth * count + last, side="right") - 1
        found = self.keys[np.maximum(place, 0)]
        row = found % count
        good = (place >= 0) & (depth >= 0) & (found // count == depth) & (points >= self.starts[row])
        return np.where(good & (points < self.ends[row]), row, UNKNOWN)


def nested_order(starts: Nanoseconds, ends: Nanoseconds) -> Rows:
    """The order that :meth:`Nesting.of` wants."""
    return np.lexsort((-ends, starts))


def outermost_of(host: HostEvents, rows: Rows) -> Rows:
    """Those of one thread's events that no other of them encloses, by start."""
    rows = rows[nested_order(host.starts[rows], host.ends[rows])]
    kept = np.ones(len(rows), np.bool_)
    kept[1:] = host.ends[rows][1:] > np.maximum.accumulate(host.ends[rows])[:-1]
    return rows[kept]


def innermost_on(
    threads: Ints, starts: Nanoseconds, ends: Nanoseconds,
    at_threads: Ints, points: Nanoseconds,
) -> Rows:  # fmt: skip
    """For each point the place of the innermost interval of its thread that holds then, or :data:`UNKNOWN`."""
    found = np.full(len(points), UNKNOWN, np.int64)
    for thread in np.unique(at_threads).tolist():
        there = np.flatnonzero(at_threads == thread)
        rows = _with_points(threads == thread, starts, ends, np.sort(points[there]))
        rows = rows[nested_order(starts[rows], ends[rows])]
        place = Nesting.of(starts[rows], ends[rows]).innermost(points[there])
        found[there[place != UNKNOWN]] = rows[place[place != UNKNOWN]]
    return found


def _with_points(mine: Mask, starts: Nanoseconds, ends: Nanoseconds, points: Nanoseconds) -> Rows:
    """The ``mine`` rows that contain a point: most contain none, and dropping them saves memory."""
    rows = np.flatnonzero(mine).astype(np.int32)
    before = np.searchsorted(points, starts[rows]).astype(np.int32)
    return rows[before < np.searchsorted(points, ends[rows])].astype(np.int64)


_NO_OPERATOR = re.compile(
    r"^(?:autograd::engine::evaluate_function|Optimizer\.|Torch-Compiled|CompiledFunction|TorchDynamo|"
    r"torch::autograd::(?!CppNode)|DistributedDataParallel|DataParallel|FullyShardedDataParallel|enumerate\(|"
    r"PyTorchProfiler|nn\.Module:|record_param_comms|Pregraph|AOTDispatcher|inductor::)|#"
)
"""Operators, by the profiler's category, that only hold others: what they launch is known by its own name. With a #,
those of 2021 for steps and the user's phases, and compiled graphs' (``## Call CompiledFxGraph``).
"""
_WHOLE = re.compile(
    r"^aten::(?:convolution(?:_backward)?|"
    r"_scaled_dot_product_(?:flash|efficient|cudnn|fused)_attention(?:_\w+)?)$"
)
"""Operators that say best what the operators do that they call: these have other arguments, or fewer."""


def innermost_of(trace: TraceFile, candidates: Rows, rows: Rows) -> Rows:
    """The innermost of the host's events ``candidates`` where each of the events ``rows`` begins, on its thread."""
    host = trace.host
    place = innermost_on(
        host.threads[candidates], host.starts[candidates], host.ends[candidates], host.threads[rows], host.starts[rows]
    )
    return np.where(place == UNKNOWN, UNKNOWN, candidates[place]) if len(candidates) else place


def operators_of(trace: TraceFile, calls: Rows) -> Rows:
    """The row of :class:`HostEvents` of the operator that each of these of its rows belongs to; or :data:`UNKNOWN`.

    It is the innermost that holds on the row's thread when the row begins (an operator belongs to itself), except for
    convolutions and attention: there the one that got the whole problem. What launches a graph belongs to none: its
    kernels are many operators', which called nothing now.
    """
    host = trace.host
    found = np.full(len(calls), UNKNOWN, np.int64)
    if not len(host.starts):
        return found
    there = np.flatnonzero((calls != UNKNOWN) & ~named(trace, GRAPH_LAUNCHES)[calls])
    rows = calls[there]
    is_operator = (host.categories == HOST) & ~named(trace, _NO_OPERATOR)
    around = innermost_of(trace, np.flatnonzero(is_operator), rows)
    whole = whole_problems(trace, rows)
    found[there] = np.select((whole != UNKNOWN, is_operator[rows]), (whole, rows), around)
    return found


def whole_problems(trace: TraceFile, rows: Rows) -> Rows:
    """The convolution or attention that got the whole problem, which each row is part of, or :data:`UNKNOWN`."""
    is_whole = (trace.host.categories == HOST) & named(trace, _WHOLE)
    return innermost_of(trace, np.flatnonzero(is_whole), rows)


def column_at(column: Ints, rows: Rows) -> Ints:
    """A column of the host's events at some rows; :data:`UNKNOWN` at rows of that."""
    known = rows != UNKNOWN
    found = np.full(len(rows), UNKNOWN, np.int32)
    found[known] = column[rows[known]]
    return found


def named(trace: TraceFile, pattern: "re.Pattern[str]", names: Ints | None = None) -> Mask:
    """Which of the host's events, or of these ``names``, match the pattern."""
    matching = np.array([bool(pattern.search(name)) for name in trace.names] or [False], np.bool_)
    return np.asarray(matching[trace.host.names if names is None else names], np.bool_)


def when_named(trace: TraceFile, pattern: "re.Pattern[str]", *categories: int) -> Intervals:
    """When the host stands in events of these categories that match the pattern, on any thread."""
    rows = named(trace, pattern) & np.isin(trace.host.categories, categories)
    return Intervals.union(trace.host.starts[rows], trace.host.ends[rows])


ROOT = "(root)"
"""Name of the unit that FSDP2 leaves without one: the model itself, less its wrapped parts."""

_REFSHARD = re.compile(r"^refshard::(\w+)\((.*)\)$")
_FSDP2 = re.compile(r"^(?:Ya)?FSDP::(\w+)(?: for (.*)| \((.*)\))?$")
_OF_REFSHARD = {
    # A shard that has to be cast is copied to its place first.
    "all_gather": Meaning.ALL_GATHER | Meaning.COPY_IN,
    "copy_in": Meaning.REDUCE | Meaning.COPY_IN,
    "copy_out": Meaning.COPY_OUT,
    # Exchanges whole tensors in an optimizer's step: what is sent is put together first.
    "all_to_all": Meaning.COPY_IN,
    # Over gloo it may wait for a place in which to receive.
    "reduce_scatter": Meaning.REDUCE | Meaning.WAIT,
    "all_reduce": Meaning.REDUCE,
    "wait": Meaning.WAIT,
    "forward": Meaning.FORWARD,
    "backward": Meaning.BACKWARD,
    "leave": Meaning.LEAVE,
}
_OF_FSDP2 = {
    "all_gather": Meaning.ALL_GATHER, "all_gather_copy_out": Meaning.COPY_OUT, "post_backward_reduce": Meaning.REDUCE,
    "post_backward_rs_wait": Meaning.REDUCE_WAIT | Meaning.WAIT, "pre_forward": Meaning.FORWARD,
    "post_forward": Meaning.LEAVE, "pre_backward": Meaning.BACKWARD, "post_backward_accumulate": Meaning.LEAVE,
}  # fmt: skip
_BY_NAME = {
    "fsdp::all_gather_copy_in": Meaning.COPY_IN, "fsdp::split_with_sizes_copy": Meaning.COPY_OUT,
    "fsdp::chunk_cat": Meaning.REDUCE | Meaning.COPY_IN, "FullyShardedDataParallel._post_backward_hook": Meaning.REDUCE,
}  # fmt: skip


def meaning_of(name: str) -> tuple[Meaning, str | None] | None:
    """What an annotation or operator of this name announces, and for which unit; None for any other.

    >>> meaning_of("FSDP::all_gather_copy_out (layers.0)")
    (<Meaning.COPY_OUT: 8>, 'layers.0')
    """
    if match := _REFSHARD.match(name):
        meaning, unit = _OF_REFSHARD.get(match[1]), match[2]
        return None if meaning is None else (meaning, unit)
    if match := _FSDP2.match(name):
        meaning = _OF_FSDP2.get(match[1])
        return None if meaning is None else (meaning, match[3] if match[3] not in (None, "", "None") else ROOT)
    if name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")):
        return Meaning.OPTIMIZER, None
    if name.startswith(EMULATED):
        return Meaning.COLLECTIVE, None
    return (_BY_NAME[name], None) if name in _BY_NAME else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Labels:
    """The labels of a trace as columns, ordered by start; ``units`` index ``unit_names`` or are :data:`UNKNOWN`."""

    starts: Rows
    ends: Rows
    threads: Ints
    meanings: npt.NDArray[np.int16]
    units: Ints
    unit_names: tuple[str, ...]

    def as_labels(self) -> tuple[Label, ...]:
        """One object each."""
        columns = (self.starts.tolist(), self.ends.tolist(), self.meanings.tolist(), self.units.tolist())
        return tuple(
            Label(meaning=Meaning(meaning), unit=None if unit < 0 else self.unit_names[unit], start=start, end=end)
            for start, end, meaning, unit in zip(*columns)
        )

    def under(self, threads: Ints, points: Rows) -> npt.NDArray[np.int16]:
        """Meanings of all labels on ``threads[i]`` that hold at ``points[i]``."""
        found = np.zeros(len(points), np.int16)
        for thread in np.unique(self.threads):
            mine, there = self.threads == thread, np.flatnonzero(threads == thread)
            for meaning in Meaning if len(there) else ():
                rows = mine & (self.meanings & meaning > 0)
                if rows.any():
                    held = Intervals.union(self.starts[rows], self.ends[rows])
                    found[there] |= np.where(held.within(points[there], points[there] + 1) > 0, meaning, 0)
        return found

    def unit_at(self, threads: Ints, points: Rows) -> Ints:
        """The unit of the innermost label on ``threads[i]`` that has one and holds at ``points[i]``."""
        rows = np.flatnonzero(self.units >= 0)
        place = innermost_on(self.threads[rows], self.starts[rows], self.ends[rows], threads, points)
        return np.append(self.units[rows], np.int32(UNKNOWN))[place]

    def computing(self, points: Rows) -> tuple[Ints, npt.NDArray[np.int16]]:
        """The unit whose forward or backward began last and has not ended at ``points[i]``, and which of the two.

        On any thread: backward runs on one of autograd's while the main thread waits for it, so there is but one such
        unit. Between an optimizer's labels and the next forward there is none.
        """
        begin, leave = Meaning.FORWARD | Meaning.BACKWARD, Meaning.LEAVE
        is_mark = (self.meanings & (begin | leave) > 0) & (self.units >= 0)
        marks = np.flatnonzero(is_mark | (self.meanings & Meaning.OPTIMIZER > 0))
        inside, found = list[tuple[int, int]](), [(UNKNOWN, 0)]
        for meaning, unit in zip(self.meanings[marks].tolist(), self.units[marks].tolist()):
            if meaning & Meaning.OPTIMIZER:
                inside.clear()
            elif meaning & begin:
                inside.append((unit, meaning & begin))
            elif any(unit == other for other, _ in inside):
                while inside.pop()[0] != unit:
                    pass
            found.append(inside[-1] if inside else (UNKNOWN, 0))
        at = np.searchsorted(self.starts[marks], points, side="right")
        units, phases = zip(*found)
        return np.array(units, np.int32)[at], np.array(phases, np.int16)[at]

    def of_work(self, threads: Ints, points: Rows) -> tuple[Ints, npt.NDArray[np.int16]]:
        """The unit and the meanings of all that the host launched, or ran, on ``threads[i]`` at ``points[i]``.

        The unit of the innermost label, else the one that computes then; with its forward or backward.
        """
        units, (computing, phases) = self.unit_at(threads, points), self.computing(points)
        return np.where(units == UNKNOWN, computing, units), self.under(threads, points) | phases


def find_labels(trace: TraceFile) -> Labels:
    """The labels among a trace's annotations and operators."""
    known = {code: found for code, name in enumerate(trace.names) if (found := meaning_of(name)) is not None}
    host = trace.host
    rows = np.flatnonzero(np.isin(host.names, list(known)) & np.isin(host.categories, (ANNOTATION, HOST)))
    rows = rows[np.argsort(host.starts[rows], kind="stable")]
    unit_names = tuple(dict.fromkeys(unit for _, unit in known.values() if unit is not None))
    number = {unit: place for place, unit in enumerate(unit_names)}
    codes = host.names[rows].tolist()
    return Labels(
        starts=host.starts[rows], ends=host.ends[rows], threads=host.threads[rows],
        meanings=np.array([known[code][0] for code in codes], np.int16),
        units=np.array([number.get(known[code][1] or "", UNKNOWN) for code in codes], np.int32),
        unit_names=unit_names,
    )  # fmt: skip
