"""Which operator a kernel belongs to: the one rule, for all figures.

Kineto's external id, where the recorder numbers operators with it, names the innermost operator around the launch. So
the time and thread of the launch tell the same, and tell it too where the ids have another numbering, as in 2022.
"""

import re

import numpy as np
import numpy.typing as npt

from refshard.events.table import HOST, TraceFile
from refshard.events.timeline import UNKNOWN
from refshard.tracing.host.runtime import GRAPH_LAUNCHES
from refshard.tracing.operators.nesting import Rows, innermost_on

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


def operators_of(trace: TraceFile, calls: Rows) -> Rows:
    """The row of :class:`HostEvents` of the operator that each of these of its rows belongs to; or :data:`UNKNOWN`.

    It is the innermost that holds on the row's thread when the row begins (an operator belongs to itself), but for
    convolutions and attention: there the one that was given the whole problem. What launches a graph belongs to none:
    its kernels are many operators', which called nothing now.
    """
    host = trace.host
    found = np.full(len(calls), UNKNOWN, np.int64)
    if not len(host.starts):
        return found
    there = np.flatnonzero((calls != UNKNOWN) & ~named(trace, GRAPH_LAUNCHES)[calls])
    rows = calls[there]
    is_operator = (host.categories == HOST) & ~named(trace, _NO_OPERATOR)
    around = _innermost(trace, np.flatnonzero(is_operator), rows)
    whole = whole_problems(trace, rows)
    found[there] = np.select((whole != UNKNOWN, is_operator[rows]), (whole, rows), around)
    return found


def whole_problems(trace: TraceFile, rows: Rows) -> Rows:
    """The convolution or attention that was given the whole problem of which each row is part, or :data:`UNKNOWN`."""
    is_whole = (trace.host.categories == HOST) & named(trace, _WHOLE)
    return _innermost(trace, np.flatnonzero(is_whole), rows)


def column_at(column: npt.NDArray[np.int32], rows: Rows) -> npt.NDArray[np.int32]:
    """A column of the host's events at some rows; :data:`UNKNOWN` at rows of that."""
    known = rows != UNKNOWN
    found = np.full(len(rows), UNKNOWN, np.int32)
    found[known] = column[rows[known]]
    return found


def named(trace: TraceFile, pattern: "re.Pattern[str]") -> npt.NDArray[np.bool_]:
    """Which of the host's events have the pattern in their names."""
    matching = np.array([bool(pattern.search(name)) for name in trace.names] or [False], np.bool_)
    return np.asarray(matching[trace.host.names], np.bool_)


def _innermost(trace: TraceFile, operators: Rows, rows: Rows) -> Rows:
    """Which of the operators is innermost where each row begins."""
    host = trace.host
    place = innermost_on(
        host.threads[operators], host.starts[operators], host.ends[operators], host.threads[rows], host.starts[rows]
    )
    return np.where(place == UNKNOWN, UNKNOWN, operators[place]) if len(operators) else place
