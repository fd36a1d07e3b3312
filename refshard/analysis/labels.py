"""What the host announced: the annotations of refshard and of its peers, mapped to one meaning.

No peer is slowed to be labelled; each is read by the names that it writes itself (torch 2.11 to 2.13).
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.analysis.owners import innermost_on
from refshard.events.table import ANNOTATION, EMULATED, HOST, TraceFile
from refshard.events.timeline import UNKNOWN, Intervals, Label, Meaning

ROOT = "(root)"
"""Name of the unit that FSDP2 leaves without one: the model itself, less its wrapped parts."""

_REFSHARD = re.compile(r"^refshard::(\w+)\((.*)\)$")
_FSDP2 = re.compile(r"^(?:Ya)?FSDP::(\w+)(?: for (.*)| \((.*)\))?$")
_OF_REFSHARD = {
    # A shard that has to be cast is copied to its place first.
    "all_gather": Meaning.ALL_GATHER | Meaning.COPY_IN,
    "copy_in": Meaning.REDUCE | Meaning.COPY_IN,
    "copy_out": Meaning.COPY_OUT,
    # Of whole tensors, in an optimizer's step: what is sent is put together first.
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
    "all_gather": Meaning.ALL_GATHER,
    "all_gather_copy_out": Meaning.COPY_OUT,
    "post_backward_reduce": Meaning.REDUCE,
    "post_backward_rs_wait": Meaning.REDUCE_WAIT | Meaning.WAIT,
    "pre_forward": Meaning.FORWARD,
    "post_forward": Meaning.LEAVE,
    "pre_backward": Meaning.BACKWARD,
    "post_backward_accumulate": Meaning.LEAVE,
}
_BY_NAME = {
    "fsdp::all_gather_copy_in": Meaning.COPY_IN,
    "fsdp::split_with_sizes_copy": Meaning.COPY_OUT,
    "fsdp::chunk_cat": Meaning.REDUCE | Meaning.COPY_IN,
    "FullyShardedDataParallel._post_backward_hook": Meaning.REDUCE,
}


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

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    threads: npt.NDArray[np.int32]
    meanings: npt.NDArray[np.int16]
    units: npt.NDArray[np.int32]
    unit_names: tuple[str, ...]

    def as_labels(self) -> tuple[Label, ...]:
        """One object each."""
        columns = (self.starts.tolist(), self.ends.tolist(), self.meanings.tolist(), self.units.tolist())
        return tuple(
            Label(meaning=Meaning(meaning), unit=None if unit < 0 else self.unit_names[unit], start=start, end=end)
            for start, end, meaning, unit in zip(*columns)
        )

    def under(self, threads: npt.NDArray[np.int32], points: npt.NDArray[np.int64]) -> npt.NDArray[np.int16]:
        """Meanings of all labels on ``threads[i]`` that hold at ``points[i]``."""
        found = np.zeros(len(points), np.int16)
        for thread in np.unique(self.threads):
            mine, there = self.threads == thread, np.flatnonzero(threads == thread)
            if not len(there):
                continue
            for meaning in Meaning:
                rows = mine & (self.meanings & meaning > 0)
                if rows.any():
                    inside = Intervals.union(self.starts[rows], self.ends[rows]).within(
                        points[there], points[there] + 1
                    )
                    found[there] |= np.where(inside > 0, meaning, 0)
        return found

    def unit_at(self, threads: npt.NDArray[np.int32], points: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The unit of the innermost label on ``threads[i]`` that has one and holds at ``points[i]``."""
        rows = np.flatnonzero(self.units >= 0)
        place = innermost_on(self.threads[rows], self.starts[rows], self.ends[rows], threads, points)
        return np.append(self.units[rows], np.int32(UNKNOWN))[place]

    def computing(self, points: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int16]]:
        """The unit whose forward or backward was the last begun, and not left, at ``points[i]``, and which of the two.

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

    def of_work(
        self, threads: npt.NDArray[np.int32], points: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int16]]:
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
