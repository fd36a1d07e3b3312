"""What the host was doing when each span was launched: the operator that the span is part of, and its arguments."""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.timeline import UNKNOWN, Timeline
from refshard.tracing.cpu import COMPUTE_OP, IN_GRAPH, main_thread
from refshard.tracing.device import device_order
from refshard.tracing.files.events import ANNOTATION, HOST, LAUNCH, TraceFile
from refshard.tracing.host.runtime import GRAPH_LAUNCHES
from refshard.tracing.operators.nesting import Nesting, Rows, innermost_on, nested_order
from refshard.tracing.steps import host_steps, step_at

_NO_OPERATOR = re.compile(
    r"^(?:autograd::engine::evaluate_function|ProfilerStep#|Optimizer\.|## Call|Torch-Compiled|CompiledFunction|"
    r"TorchDynamo|torch::autograd::|DistributedDataParallel|DataParallel|FullyShardedDataParallel|enumerate\(|"
    r"PyTorchProfiler|nn\.Module:|record_param_comms|Pregraph|AOTDispatcher|inductor::)"
)
"""Operators, by the profiler's category, that only hold others: what they launch is known by its own name."""
_WHOLE = re.compile(
    r"^aten::(?:convolution(?:_backward)?|"
    r"_scaled_dot_product_(?:flash|efficient|cudnn|fused)_attention(?:_\w+)?)$"
)
"""Operators that say best what the operators do that they call: these have other arguments, or fewer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launched:
    """A row for each piece of work: a span of a device, or an operator of a CPU less those that it calls.

    ``spans`` are rows of :class:`~refshard.timeline.Spans` (on a CPU :data:`UNKNOWN`), ``calls`` the rows of
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
    """All work of a trace, and the operator that each piece is for.

    The operator is the innermost that held on the thread that launched, when it launched, but for convolutions and
    attention: there the one that was given the whole problem.
    """
    return _on_device(trace, timeline) if timeline.on_device else _on_cpu(trace, timeline)


def _on_device(trace: TraceFile, timeline: Timeline) -> Launched:
    spans, host = timeline.spans, trace.host
    calls = _launching_operators(trace, spans.launches)
    known = calls != UNKNOWN
    # Without the call that launched it, an id that the recorder gave it may still name the operator.
    named = np.where(spans.launches == UNKNOWN, spans.operators, spans.names)
    return Launched(
        spans=np.arange(len(spans)),
        ns=spans.ends - spans.starts,
        calls=calls,
        names=np.where(known, _column(host.names, calls), named).astype(np.int32),
        operands=np.where(known, _column(host.operands, calls), UNKNOWN).astype(np.int32),
        steps=spans.steps,
        at=spans.launches,
    )


def _launching_operators(trace: TraceFile, points: npt.NDArray[np.int64]) -> Rows:
    """The row of the operator of each device event, by the call that launched it."""
    host, order = trace.host, device_order(trace)
    found = np.full(len(points), UNKNOWN, np.int64)
    calls = np.flatnonzero((host.categories == LAUNCH) & (host.correlations > 0) & ~_named(trace, GRAPH_LAUNCHES))
    if not len(calls):
        return found
    calls = calls[np.lexsort((host.starts[calls], host.correlations[calls]))]
    ids, wanted = host.correlations[calls], trace.device.correlations[order]
    place = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    is_launched = (ids[place] == wanted) & (points != UNKNOWN)
    threads = np.where(is_launched, host.threads[calls[place]], UNKNOWN).astype(np.int32)
    there = np.flatnonzero(is_launched)
    for pattern in (None, _WHOLE):  # the innermost, and where there is one that says more, that
        rows = _operators(trace, pattern)
        at = innermost_on(host.threads[rows], host.starts[rows], host.ends[rows], threads[there], points[there])
        found[there[at != UNKNOWN]] = rows[at[at != UNKNOWN]]
    return found


def _operators(trace: TraceFile, pattern: "re.Pattern[str] | None") -> Rows:
    host = trace.host
    is_operator = host.categories == HOST
    is_operator &= ~_named(trace, _NO_OPERATOR) if pattern is None else _named(trace, pattern)
    return np.flatnonzero(is_operator)


def _on_cpu(trace: TraceFile, timeline: Timeline) -> Launched:
    """The main thread's operators, each less the time of those that it calls, and of collectives that it issues.

    They are those that count as compute, so that their sum is the union of these.
    """
    host, main = trace.host, main_thread(trace, host_steps(trace)[1])
    computes = _named(trace, COMPUTE_OP)
    is_mine = np.isin(host.categories, (HOST, ANNOTATION)) & (host.threads == main)
    rows = np.flatnonzero(is_mine & (computes | _named(trace, IN_GRAPH)) & (host.ends > host.starts))
    rows = rows[nested_order(host.starts[rows], host.ends[rows])]
    own = Nesting.of(host.starts[rows], host.ends[rows]).own()
    rows, own = rows[computes[rows]], own[computes[rows]]
    calls = rows.copy()
    whole = _operators(trace, _WHOLE)
    at = innermost_on(host.threads[whole], host.starts[whole], host.ends[whole], host.threads[rows], host.starts[rows])
    calls[at != UNKNOWN] = whole[at[at != UNKNOWN]]
    return Launched(
        spans=np.full(len(rows), UNKNOWN, np.int64),
        ns=own,
        calls=calls,
        names=host.names[calls],
        operands=host.operands[calls],
        steps=step_at(host.starts[rows], timeline.host_windows),
        at=host.starts[rows],
    )


def _column(column: npt.NDArray[np.int32], rows: Rows) -> npt.NDArray[np.int32]:
    """A column of the host's events at some rows; of :data:`UNKNOWN` anything."""
    return column[rows] if len(column) else np.full(len(rows), UNKNOWN, np.int32)


def _named(trace: TraceFile, pattern: "re.Pattern[str]") -> npt.NDArray[np.bool_]:
    matching = np.array([bool(pattern.search(name)) for name in trace.names] or [False], np.bool_)
    return np.asarray(matching[trace.host.names], np.bool_)
