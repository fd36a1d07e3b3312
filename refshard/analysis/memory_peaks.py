"""What an allocator holds at the peak of a trace: by operator, purpose and unit.

A trace recorded with ``profile_memory=True`` has an event for each allocation and free. A block's purpose follows from
what the host was doing on that thread, and from the block's lifetime: a block made in forward that is still there in
backward is an activation. Blocks from before the trace have no event; their bytes follow from the allocator's total.
"""

import re
from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np

from refshard.analysis.figures import Category, Holder, MemoryPeak, Phase
from refshard.analysis.labels import Labels, find_labels, innermost_on, named, outermost_of
from refshard.analysis.windows import host_steps, step_at
from refshard.events.table import ANNOTATION, HOST, MemoryEvents, TraceFile
from refshard.events.timeline import UNKNOWN, Intervals, Ints, Mask, Meaning, Nanoseconds, Rows, Window

MOST_HOLDERS = 500
"""Most holders that are listed; the others are summed by category."""
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|^(?!aten::).*Backward\d*$|^aten::\w*_backward")
_COLLECTIVE = re.compile(r"^(?:c10d|_c10d_functional)::(\w+)")
_NO_UNIT = re.compile(
    r"^(?:ProfilerStep#|Optimizer\.|nccl:|gloo:|emulated:|autograd::|## Call CompiledFxGraph|Torch-Compiled Region)"
)
"""Annotations of torch's own, which name no part of the model."""
_COMMUNICATES = re.compile(r"^(?:c10d|_c10d_functional|fsdp)::|^record_param_comms")
_SHARDING = Meaning.ALL_GATHER | Meaning.REDUCE | Meaning.COPY_IN | Meaning.COPY_OUT | Meaning.WAIT
"""Labels of work that is neither forward nor backward."""
_NEVER = np.iinfo(np.int64).max
_Key = tuple[Category, str | None, str | None]


def memory_peaks(trace: TraceFile) -> tuple[MemoryPeak, ...]:
    """The peak of each allocator of the trace, GPUs first, the largest first."""
    if not len(trace.memory.times):
        return ()
    host = _Host(trace)
    peaks = [_peak(trace.memory, code, name, host) for code, name in enumerate(trace.memory_devices)]
    return tuple(sorted(peaks, key=lambda peak: (peak.device == "cpu", -(peak.allocated_bytes or peak.risen_bytes))))


def allocated_over_time(events: MemoryEvents, rows: Rows) -> tuple[Rows, bool]:
    """Bytes allocated after each of one device's events, and whether the trace tells them.

    One that does not tells what each event adds; what was there when it began is not known then.
    """
    known = events.allocated[rows]
    return (known, True) if (known >= 0).all() else (np.cumsum(events.changes[rows]), False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Blocks:
    """Blocks of one device: the places among its events at which each was ``made`` and ``freed``, :data:`_NEVER` if it
    was not. ``early`` are the places at which blocks from before the trace were freed.
    """

    made: Rows
    freed: Rows
    early: Rows
    unmatched: int


def blocks_of(changes: Rows, addresses: Rows) -> _Blocks:
    """Pair what is handed out with what is taken back, by address."""
    places = np.flatnonzero(changes != 0)
    order = places[np.argsort(addresses[places], kind="stable")]
    is_made, same = changes[order] > 0, addresses[order][1:] == addresses[order][:-1]
    follower = np.where(np.append(same, False), np.append(order[1:], _NEVER), _NEVER)
    follows_made = np.concatenate(([False], same & is_made[:-1]))
    return _Blocks(
        made=order[is_made], freed=follower[is_made], early=order[~is_made & ~follows_made],
        unmatched=int(np.sum(is_made & follows_made)),
    )  # fmt: skip


def _peak(events: MemoryEvents, device: int, name: str, host: "_Host") -> MemoryPeak:
    rows = np.flatnonzero(events.devices == device)
    allocated, is_told = allocated_over_time(events, rows)
    at = int(np.argmax(allocated))
    base = int(allocated[0] - events.changes[rows[0]])
    reserved = events.reserved[rows] if name != "cpu" else np.full(len(rows), -1)
    where = host.at(events.threads[rows[at : at + 1]], events.times[rows[at : at + 1]])
    found = MemoryPeak(
        device=name, ns=int(events.times[rows[at]]), step=None if where.steps[0] == UNKNOWN else int(where.steps[0]),
        phase=where.phase(0), operator=where.operators[0], unit=where.units[0],
        allocated_bytes=int(allocated[at]) if is_told else None, risen_bytes=int(allocated[at]) - base,
        reserved_bytes=int(reserved[at]) if reserved[at] >= 0 else None,
        most_reserved_bytes=int(reserved.max()) if (reserved >= 0).all() else None,
    )  # fmt: skip
    if not is_told or (events.addresses[rows] < 0).any():
        return found
    blocks = blocks_of(events.changes[rows], events.addresses[rows])
    # What was made in the trace and is held at the peak, by what it is for, its unit and its operator.
    alive = (blocks.made <= at) & (blocks.freed > at)
    made, freed = rows[blocks.made[alive]], blocks.freed[alive]
    ends = np.where(freed == _NEVER, _NEVER, events.times[rows[np.minimum(freed, len(rows) - 1)]])
    where = host.at(events.threads[made], events.times[made])
    keys = list(zip(host.categories(where, events.times[made], ends), where.units, where.operators))
    sizes, counts = Counter[_Key](), Counter[_Key](keys)
    for key, size in zip(keys, events.changes[made].tolist()):
        sizes[key] += size
    kept = dict(sizes.most_common(MOST_HOLDERS))
    for key, size in sizes.items():
        if key not in kept:
            rest = (key[0], None, None)
            kept[rest] = kept.get(rest, 0) + size
            counts[rest] += counts[key]
    holders = [Holder(category=c, unit=u, operator=o, bytes=n, blocks=counts[c, u, o]) for (c, u, o), n in kept.items()]
    # What is held since before the trace: what was freed later, and what it kept to its end.
    later = rows[blocks.early[blocks.early > at]]
    freed_later = int(-events.changes[later].sum())
    before = int(allocated[at]) - int(events.changes[made].sum()) - freed_later
    since: tuple[tuple[Category, int, int | None], ...] = (
        ("before, freed later", freed_later, len(later)), ("before, kept", before, None),
    )  # fmt: skip
    holders += [Holder(category=c, unit=None, operator=None, bytes=n, blocks=b) for c, n, b in since if n > 0]
    ordered = tuple(sorted(holders, key=lambda holder: -holder.bytes))
    return msgspec.structs.replace(found, holders=ordered, unmatched=blocks.unmatched)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Where:
    """What the host was doing at some moments: columns of one length."""

    steps: Ints
    units: list[str | None]
    operators: list[str | None]
    under: Rows
    in_backward: Mask

    def phase(self, row: int) -> Phase:
        if self.under[row] & Meaning.OPTIMIZER:
            return "optimizer"
        return "backward" if self.in_backward[row] else "forward"


class _Host:
    """What a trace's host events say about a moment, and where its phases begin and end."""

    def __init__(self, trace: TraceFile) -> None:
        self._trace = trace
        self._labels: Labels = find_labels(trace)
        self._windows: tuple[Window, ...] = host_steps(trace)[0]
        host = trace.host
        is_operator = host.categories == HOST
        is_backward = is_operator & named(self._trace, _BACKWARD)
        by_label = self._labels.meanings & Meaning.BACKWARD > 0
        self._backward = Intervals.union(
            np.concatenate((host.starts[is_backward], self._labels.starts[by_label])),
            np.concatenate((host.ends[is_backward], self._labels.ends[by_label])),
        )
        is_optimizer = self._labels.meanings & Meaning.OPTIMIZER > 0
        self._optimizer = Intervals.union(self._labels.starts[is_optimizer], self._labels.ends[is_optimizer])
        outside = is_operator & ~_covers(self._backward, host.starts) & ~_covers(self._optimizer, host.starts)
        outside &= ~named(self._trace, _COMMUNICATES) & (self._labels.under(host.threads, host.starts) & _SHARDING == 0)
        threads = host.threads[outside]
        self._main = int(np.argmax(np.bincount(threads))) if len(threads) else UNKNOWN
        forward = np.sort(host.starts[outside & (host.threads == self._main)])
        # Where a phase that follows backward begins.
        self._breaks = np.sort(np.concatenate((forward, self._optimizer.starts)))

    def at(self, threads: Ints, points: Nanoseconds) -> _Where:
        """What these threads were doing at these moments."""
        units, under = self._labels.of_work(threads, points)
        notes = self._annotations(threads, points)
        # While one of autograd's threads works, the main thread waits under the annotations that hold.
        on_main = self._annotations(np.full(len(points), self._main, np.int32), points)
        names = (self._labels.unit_names, self._trace.names)
        found = zip(units.tolist(), np.where(notes >= 0, notes, on_main).tolist())
        operators = self._operators(threads, points).tolist()
        return _Where(
            steps=step_at(points, self._windows),
            units=[names[0][unit] if unit >= 0 else names[1][note] if note >= 0 else None for unit, note in found],
            operators=[names[1][code] if code >= 0 else None for code in operators],
            under=under.astype(np.int64),
            in_backward=_covers(self._backward, points) | (under & Meaning.BACKWARD > 0),
        )

    def categories(self, where: _Where, points: Nanoseconds, ends: Nanoseconds) -> list[Category]:
        """What blocks are for that were made at ``points`` and freed at ``ends``, :data:`_NEVER` if they were not."""
        after_backward, backward_begins = _next(self._breaks, points), _next(self._backward.starts, points)
        call = np.searchsorted(self._optimizer.starts, points, side="right") - 1
        call_end = np.append(self._optimizer.ends, _NEVER)[call]
        collectives = [_COLLECTIVE.match(name or "") for name in where.operators]
        ops = [match[1].replace("_", "") if match else "" for match in collectives]
        gathers = (where.under & (Meaning.ALL_GATHER | Meaning.COPY_OUT) > 0) | np.array(
            ["allgather" in op for op in ops], np.bool_
        )
        is_hook = where.under & Meaning.REDUCE > 0
        reduces = is_hook | np.array(["reduce" in op for op in ops], np.bool_)
        optimizer = where.under & Meaning.OPTIMIZER > 0
        backward = where.in_backward
        nowhere = np.array([name is None for name in where.operators], np.bool_) & (where.under == 0) & ~backward
        conditions = (
            gathers, (is_hook | backward) & ~optimizer & (ends > after_backward), reduces,
            np.array([bool(op) for op in ops], np.bool_), optimizer & (ends > call_end), optimizer, backward, nowhere,
            ends > _next(np.sort(self._optimizer.ends), backward_begins), ends > backward_begins,
        )  # fmt: skip
        names: tuple[Category, ...] = (
            "all-gather", "gradients", "reduction", "collective", "optimizer state", "optimizer", "backward", "other",
            "kept", "activations",
        )  # fmt: skip
        chosen = np.select(conditions, range(len(names)), len(names))
        return [(*names, "forward")[code] for code in chosen.tolist()]

    def _annotations(self, threads: Ints, points: Nanoseconds) -> Rows:
        """The name of the innermost annotation of the user's that holds, or -1."""
        host = self._trace.host
        rows = np.flatnonzero((host.categories == ANNOTATION) & ~named(self._trace, _NO_UNIT))
        place = innermost_on(host.threads[rows], host.starts[rows], host.ends[rows], threads, points)
        return np.append(host.names[rows], UNKNOWN)[place].astype(np.int64)

    def _operators(self, threads: Ints, points: Nanoseconds) -> Rows:
        """The name of the outermost operator that holds, or -1."""
        host = self._trace.host
        labels = named(self._trace, re.compile(r"^(?:ProfilerStep#|Optimizer\.)"))  # which were operators in 2021
        found = np.full(len(points), -1, np.int64)
        for thread in np.unique(threads).tolist():
            rows = np.flatnonzero((host.categories == HOST) & ~labels & (host.threads == thread))
            outermost, there = outermost_of(host, rows), np.flatnonzero(threads == thread)
            if len(rows):
                place = np.searchsorted(host.starts[outermost], points[there], side="right") - 1
                holds = (place >= 0) & (points[there] <= host.ends[outermost][place])
                found[there] = np.where(holds, host.names[outermost[place]], -1)
        return found


def _covers(intervals: Intervals, points: Nanoseconds) -> Mask:
    """Which points lie within, the ends included: a recorder's clock may have whole microseconds."""
    return intervals.within(points - 1, points + 1) > 0


def _next(marks: Nanoseconds, points: Nanoseconds) -> Nanoseconds:
    """The first mark after each point; :data:`_NEVER` after the last."""
    return np.append(marks, _NEVER)[np.searchsorted(marks, points, side="right")]
