"""A trace without device events: gloo's run-loop threads communicate, or those of an emulated backend, and the thread
that holds the steps computes.
"""

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from refshard.events.table import ANNOTATION, EMULATED, GLOO, HOST, TraceFile
from refshard.events.timeline import KINDS, UNKNOWN, Intervals, Kind, Meaning, Nanoseconds, Spans, Window
from refshard.tracing.device import in_autograd
from refshard.tracing.difference.inputs import input_table
from refshard.tracing.labels import Labels
from refshard.tracing.steps import step_at

_COMPILED = re.compile(r"^(## Call CompiledFxGraph|Torch-Compiled Region)")
"""What torch.compile made into one: what is fused there has no operators, so it computes wherever it does not wait."""
COMPUTE_OP = re.compile(rf"^(aten::|fsdp::)|{_COMPILED.pattern}")
IN_GRAPH = re.compile(r"^_c10d_functional::")
"""Operators by which compiled graphs and DTensors issue collectives, and wait for them."""


def cpu_spans(trace: TraceFile, labels: Labels, windows: tuple[Window, ...], main: int) -> Spans:
    """Communication and the main thread's outermost operators, ordered by start.

    Autograd's and the hooks' wrappers enclose waits, so only operators count, and not under a wait: there they are part
    of a collective's own arithmetic, and stand as preparation. What is compiled, or an operator on DTensors, is cut
    where it issues a collective or waits for one, and is a span for each piece.
    """
    host = trace.host
    is_run = _named(trace, lambda name: name.startswith((GLOO, EMULATED))) & (host.categories == ANNOTATION)
    computes = _named(trace, lambda name: bool(COMPUTE_OP.match(name))) & (host.threads == main)
    computes &= np.isin(host.categories, (HOST, ANNOTATION))
    outermost = _outermost(host.starts, host.ends, np.flatnonzero(computes))
    is_cut = _named(trace, lambda name: bool(IN_GRAPH.match(name))) & (host.threads == main)
    encloses = _enclose(host.starts[outermost], host.ends[outermost], np.sort(host.starts[is_cut]))
    whole = np.concatenate((np.flatnonzero(is_run), outermost[~encloses]))
    pieces, cut_starts, cut_ends = _pieces(host.starts, host.ends, outermost[encloses], is_cut)
    rows = np.concatenate((whole, pieces))
    starts, ends = np.concatenate((host.starts[whole], cut_starts)), np.concatenate((host.ends[whole], cut_ends))
    order = np.lexsort((ends, starts))
    rows, starts, ends = rows[order], starts[order], ends[order]
    communicates = is_run[rows]
    units, under = labels.of_work(host.threads[rows], starts)
    kinds = np.where(
        communicates,
        KINDS.index(Kind.COMM),
        np.where(under & Meaning.WAIT > 0, KINDS.index(Kind.PREP), KINDS.index(Kind.COMPUTE)),
    )
    lanes = np.where(communicates, host.threads[rows], main)
    inputs = input_table(trace.operands)
    emulated = set(host.threads[is_run & _named(trace, lambda name: name.startswith(EMULATED))].tolist())
    return Spans(
        starts=starts,
        ends=ends,
        kinds=kinds.astype(np.int8),
        lanes=lanes.astype(np.int32),
        names=host.names[rows],
        operators=host.names[rows],
        launches=np.where(communicates, UNKNOWN, starts),
        queued=np.where(communicates, UNKNOWN, starts),
        steps=step_at(starts, windows),
        units=np.where(communicates, UNKNOWN, units).astype(np.int32),
        under=under,
        signatures=host.names[rows],
        lane_names=tuple(
            "main" if place == main else f"{'emulated' if place in emulated else 'gloo'} {tid}"
            for place, (_, tid) in enumerate(trace.threads)
        ),
        name_table=trace.names,
        unit_names=labels.unit_names,
        signature_names=trace.names,
        calls=np.where(communicates, UNKNOWN, rows).astype(np.int32),
        inputs=inputs.at(host.operands, np.where(communicates, UNKNOWN, rows)),
        in_autograd=in_autograd(trace, starts, host.threads[rows]),
        input_names=inputs.names,
    )


def main_thread(trace: TraceFile, step_rows: npt.NDArray[np.int64]) -> int:
    """The thread that holds the steps; without steps, the one with most operators; :data:`UNKNOWN` without either."""
    if len(step_rows):
        return int(trace.host.threads[step_rows[0]])
    computes = _named(trace, lambda name: bool(COMPUTE_OP.match(name))) & (trace.host.categories == HOST)
    return int(np.argmax(np.bincount(trace.host.threads[computes]))) if computes.any() else UNKNOWN


def _outermost(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Those of one thread's operators that no other of them encloses."""
    rows = rows[np.lexsort((-ends[rows], starts[rows]))]
    reach = np.maximum.accumulate(ends[rows]) if len(rows) else ends[rows]
    is_outermost = np.ones(len(rows), np.bool_)
    is_outermost[1:] = ends[rows][1:] > reach[:-1]
    return np.asarray(rows[is_outermost], np.int64)


def _enclose(starts: Nanoseconds, ends: Nanoseconds, points: Nanoseconds) -> npt.NDArray[np.bool_]:
    """Which of the intervals have one of the ordered ``points`` in them."""
    return np.asarray(np.searchsorted(points, starts) < np.searchsorted(points, ends), np.bool_)


def _pieces(
    starts: Nanoseconds, ends: Nanoseconds, rows: npt.NDArray[np.int64], is_cut: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], Nanoseconds, Nanoseconds]:
    """What is left of ``rows``, which do not overlap, without what is cut: of each piece its row, start and end."""
    left = Intervals.union(starts[rows], ends[rows]) - Intervals.union(starts[is_cut], ends[is_cut])
    return rows[np.searchsorted(starts[rows], left.starts, side="right") - 1], left.starts, left.ends


def _named(trace: TraceFile, test: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
    matching = np.array([test(name) for name in trace.names] or [False], np.bool_)
    return np.asarray(matching[trace.host.names], np.bool_)
