"""What the host was doing when each span was launched: the operator that the span is part of, and its arguments."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.events.table import ANNOTATION, HOST, TraceFile
from refshard.events.timeline import UNKNOWN, Timeline
from refshard.tracing.cpu import COMPUTE_OP, IN_GRAPH, main_thread
from refshard.tracing.operators.nesting import Nesting, Rows, nested_order
from refshard.tracing.operators.owners import column_at, named, whole_problems
from refshard.tracing.steps import host_steps, step_at


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launched:
    """A row for each piece of work: a span of a device, or an operator of a CPU less those that it calls.

    ``spans`` are rows of :class:`~refshard.events.timeline.Spans` (on a CPU :data:`UNKNOWN`), ``calls`` the rows of
    :class:`HostEvents` of the operator that the work is for, or :data:`UNKNOWN`. ``names``
    index :attr:`TraceFile.names`, the work's own name where there is no operator, ``operands``
    :attr:`TraceFile.operands`.
    ``at`` is when the host was there, ``steps`` in which step, each :data:`UNKNOWN` where the trace does not say.
    """

    spans: Rows
    ns: npt.NDArray[np.int64]
    calls: Rows
    names: npt.NDArray[np.int32]
    operands: npt.NDArray[np.int32]
    steps: npt.NDArray[np.int32]
    at: npt.NDArray[np.int64]

    def of(self, rows: npt.NDArray[np.bool_]) -> "Launched":
        """Some of them."""
        return Launched(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})


def launched_work(trace: TraceFile, timeline: Timeline) -> Launched:
    """All work of a trace, and the operator that each piece is for, as :mod:`~.owners` tells it."""
    return _on_device(trace, timeline) if timeline.on_device else _on_cpu(trace, timeline)


def _on_device(trace: TraceFile, timeline: Timeline) -> Launched:
    spans = timeline.spans
    calls = spans.calls.astype(np.int64)
    return Launched(
        spans=np.arange(len(spans)),
        ns=spans.ends - spans.starts,
        calls=calls,
        names=spans.operators,
        operands=column_at(trace.host.operands, calls),
        steps=spans.steps,
        at=spans.launches,
    )


def _on_cpu(trace: TraceFile, timeline: Timeline) -> Launched:
    """The main thread's operators, each less the time of those that it calls, and of collectives that it issues.

    They are those that count as compute, so that their sum is the union of these.
    """
    host, main = trace.host, main_thread(trace, host_steps(trace)[1])
    computes = named(trace, COMPUTE_OP)
    is_mine = np.isin(host.categories, (HOST, ANNOTATION)) & (host.threads == main)
    rows = np.flatnonzero(is_mine & (computes | named(trace, IN_GRAPH)) & (host.ends > host.starts))
    rows = rows[nested_order(host.starts[rows], host.ends[rows])]
    own = Nesting.of(host.starts[rows], host.ends[rows]).own()
    rows, own = rows[computes[rows]], own[computes[rows]]
    whole = whole_problems(trace, rows)
    calls = np.where(whole == UNKNOWN, rows, whole)
    return Launched(
        spans=np.full(len(rows), UNKNOWN, np.int64),
        ns=own,
        calls=calls,
        names=host.names[calls],
        operands=host.operands[calls],
        steps=step_at(host.starts[rows], timeline.host_windows),
        at=host.starts[rows],
    )
