"""Seconds of kernels from a trace of the same job, recorded on the same number of GPUs or another.

A call of an operator in the trace, with all kernels that it launched, is matched with launches of the recording by its
name and the shapes and dtypes of its tensors. If steps of the trace and of the recording have equally many such calls,
they are paired in order, which also tells apart launches of one shape in different phases, layouts or modules. A launch
takes the median of its instances in the trace: of those with nothing else on the GPU if there are at least
:data:`ENOUGH`, since a replay adds what concurrent work costs; else of all.

Calls without known shapes (a trace without ``record_shapes=True``, lists of over 30, generated kernels) match by
name and order, and only in a trace of as many ranks, since shards have other shapes on other numbers. The dtypes of
lists are unknown, so these match in order only. Collectives, copies to and from the host and the host's time stay
modelled: in a trace, they include waits for other ranks and the cost of profiling.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.analysis import analyse as tracing
from refshard.analysis.kineto import device_order
from refshard.analysis.labels import innermost_on, outermost_of
from refshard.analysis.names import dtype_named
from refshard.dryrun.recording import Flag, Kind, Recording
from refshard.dryrun.steps import Step
from refshard.dryrun.work import TRITON, parse
from refshard.errors import SpecError, TraceError
from refshard.events.reader import read_events
from refshard.events.table import HOST, MEMCPY, Operands, TraceFile
from refshard.events.timeline import KINDS, UNKNOWN
from refshard.events.timeline import Kind as SpanKind
from refshard.specs.hardware import HardwareSpec

ENOUGH = 3
"""So many undisturbed instances stand for all."""
_LEAST_SHARE = 0.1
_NO_KERNEL = Flag.HOST_ONLY | Flag.HOST_TO_DEVICE | Flag.DEVICE_TO_HOST
_MOST_RESULTS = 3
Tensors = tuple[str, ...]
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredTrace:
    """A trace and its analysis."""

    trace: TraceFile
    analysis: tracing.Analysis

    @property
    def world_size(self) -> int:
        """Ranks of the job; a trace that names none is of one."""
        return self.analysis.figures.world_size or 1

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, the mean of those in the trace; None if it shows none."""
        steps = [step for step in self.analysis.figures.steps if step.step is not None]
        return sum(step.breakdown.span_ns for step in steps) / len(steps) / 1e9 if steps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of an operator in a step (:data:`UNKNOWN`: in none). Its kernels took ``ns``; ``alone``: nothing else ran
    then. ``tensors`` are its inputs, as in ``bf16[2,8]``, without dtypes if some are in lists; None if unknown.
    """

    name: str
    tensors: Tensors | None
    ns: int
    alone: bool = True
    step: int = 0


@lru_cache(maxsize=1)
def read_measured(path: Path) -> MeasuredTrace:
    """Read a trace.

    Raises:
        TraceError: the file is damaged, no trace, or shows no kernels of a GPU.
    """
    trace = read_events(path)
    if not len(trace.device.starts):
        raise TraceError(
            f"prices: {path} must show kernels of a GPU, got none; record it with ProfilerActivity.CPU and CUDA"
        )
    return MeasuredTrace(trace=trace, analysis=tracing.analyse(trace, keep_graph=False))


def check_device(measured: MeasuredTrace, hardware: HardwareSpec) -> None:
    """Refuse a trace of another GPU than the cluster's, if both have names.

    Raises:
        SpecError: the names differ.
    """
    named, known = measured.analysis.figures.device, (hardware.device_name, *hardware.also_named, hardware.about)
    if hardware.device_name and named != "gpu" and named not in known:
        raise SpecError(
            f"prices: the trace must be of the cluster's GPU, {hardware.device_name}, got one of {named}: "
            f"{measured.trace.path}; choose a cluster of that GPU"
        )


def check_share(share: float, path: Path) -> None:
    """Refuse the trace ``path`` if it shows too small a ``share`` of a step's compute time.

    Raises:
        TraceError: it is of another job.
    """
    if share < _LEAST_SHARE:
        raise TraceError(
            f"prices: the trace must be of the same job, got one with {100 * share:.0f} % of its compute time: {path}; "
            "record the same model, batch and sequence length, with record_shapes=True"
        )


def measured_seconds(recording: Recording, step: Step, calls: Sequence[Call], *, same_size: bool) -> Seconds:
    """Seconds of each event, NaN where the trace does not tell.

    ``step`` is the one to match; other steps take its prices. ``same_size``: the trace is of as many ranks.
    """
    groups: dict[tuple[str, Tensors | None], list[Call]] = defaultdict(list)
    for call in calls:
        groups[call.name, call.tensors].append(call)
    columns = (recording.names, recording.signatures, recording.flags, recording.phases)
    launches = _launches(recording)
    keys = dict(zip(launches.tolist(), zip(*(column[launches].tolist() for column in columns))))
    kinds = {(name, signature) for name, signature, *_ in keys.values()}
    group_of = {
        (name, signature): next(
            (key for key in _keys(recording.name_table[name], recording.signature_table[signature]) if key in groups),
            None,
        )
        for name, signature in kinds
    }
    rows_of: dict[tuple[str, Tensors | None], list[int]] = defaultdict(list)
    for row, (name, signature, *_) in keys.items():
        if (group := group_of[name, signature]) is not None and step.first <= row < step.end:
            rows_of[group].append(row)
    exact: dict[tuple[int, ...], list[Call]] = defaultdict(list)
    for group, rows in rows_of.items():
        for one in _steps(groups[group]) if same_size or group[1] is not None else ():
            for row, call in zip(rows, one) if len(one) == len(rows) else ():
                exact[keys[row]].append(call)
    by_launch = {key: _typical(found) for key, found in exact.items()}
    by_shape = {group: _typical(found) for group, found in groups.items() if _is_typed(group[1])}
    seconds = np.full(len(recording), np.nan)
    for row, key in keys.items():
        group = group_of[key[:2]]
        seconds[row] = by_launch.get(key, by_shape.get(group, np.nan) if group is not None else np.nan)
    return seconds


def _keys(name: str, signature: str) -> Iterator[tuple[str, Tensors | None]]:
    """How a trace may show a launch: with dtypes, without (lists), without shapes.

    Only some signatures mark their results. In others the last tensors may be results, which a trace shows only if the
    caller gave them.
    """
    found = parse(signature)
    count, results = len(found.inputs), _MOST_RESULTS if not found.results and not name.endswith("_") else 0
    tensors = [(t.dtype, "[" + ",".join(map(str, t.shape)) + "]") if t.shape else None for t in found.inputs]
    for left_out in (*range(1, min(results, count - 1) + 1), 0):
        shown = [tensor for tensor in tensors[: count - left_out] if tensor is not None]
        yield name, tuple(dtype + shape for dtype, shape in shown)
        yield name, tuple(shape for _, shape in shown)
    yield name, None


def _is_typed(tensors: Tensors | None) -> bool:
    return tensors is not None and not any(one.startswith("[") for one in tensors)


def _steps(calls: Sequence[Call]) -> list[list[Call]]:
    steps: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        steps[call.step].append(call)
    return list(steps.values())


def _typical(calls: Sequence[Call]) -> float:
    alone = [call.ns for call in calls if call.alone]
    return median(alone if len(alone) >= ENOUGH else [call.ns for call in calls]) / 1e9


def calls_of(measured: MeasuredTrace, names: Collection[str]) -> list[Call]:
    """The calls in the trace of operators with these ``names``, in the order of the host's calls.

    A kernel belongs to the outermost such operator that it was launched in; a generated one is a call of its own.
    """
    trace, timeline = measured.trace, measured.analysis.timeline
    host, spans, launches = trace.host, timeline.spans, timeline.calls
    assert launches is not None, "the trace of a GPU"
    wanted = [code for code, name in enumerate(trace.names) if name in names]
    rows = np.flatnonzero((host.categories == HOST) & np.isin(host.names, wanted))
    rows = np.concatenate(
        [rows[:0], *(outermost_of(host, rows[host.threads[rows] == one]) for one in np.unique(host.threads[rows]))]
    )
    place = innermost_on(host.threads[rows], host.starts[rows], host.ends[rows], launches.threads, spans.launches)
    generated = {name.removeprefix(kind): name for name in names for kind in TRITON if name.startswith(kind)}
    alone = spans.alone()
    kernels_of: dict[tuple[str, int], list[int]] = defaultdict(list)
    for span in np.argsort(spans.launches, kind="stable").tolist():
        own = trace.names[spans.names[span]]
        if own in generated:
            kernels_of[generated[own], span].append(span)
        elif place[span] != UNKNOWN and spans.kinds[span] != KINDS.index(SpanKind.COMM):
            kernels_of[trace.names[host.names[rows[place[span]]]], int(rows[place[span]])].append(span)
    to_host, tensors = _to_or_from_host(trace), dict(enumerate(map(_tensors, trace.operands)))
    return [
        Call(
            name=name, tensors=None if name.startswith(TRITON) else tensors.get(int(host.operands[row])),
            ns=int((spans.ends - spans.starts)[kernels].sum()), alone=bool(alone[kernels].all()),
            step=int(spans.steps[kernels[0]]),
        )
        for (name, row), kernels in kernels_of.items()
        if not to_host[kernels].all()
    ]  # fmt: skip


def _to_or_from_host(trace: TraceFile) -> npt.NDArray[np.bool_]:
    """Which spans are copies to or from the host."""
    order, within = device_order(trace), np.array(["(Device -> Device)" in name for name in trace.names], np.bool_)
    found: npt.NDArray[np.bool_] = (trace.device.categories == MEMCPY) & ~within[trace.device.names]
    return found[order]


class _Arguments(msgspec.Struct):
    dims: list[list[int | list[int]]]
    types: list[str]


def _tensors(operands: Operands) -> Tensors | None:
    """The tensors as :class:`Call` has them; those without dimensions are left out, since numbers look like them."""
    try:
        text = b'{"dims":' + operands.dims + b',"types":' + (operands.types or b"[]") + b"}"
        found = msgspec.json.decode(text, type=_Arguments)
    except msgspec.DecodeError:
        return None
    shown: list[tuple[str, list[int]]] = []
    for dims, kind in zip(found.dims, found.types):
        if kind == "TensorList" and not dims:
            return None
        nested = [one for one in dims if isinstance(one, list)]
        known = dtype_named(kind)
        shown += [("", one) for one in nested] if nested else [(known[0].replace("_", "") if known else "", dims)]  # type: ignore[list-item]
    shown = [(dtype, dims) for dtype, dims in shown if dims]
    typed = all(dtype for dtype, _ in shown)
    return tuple((dtype if typed else "") + "[" + ",".join(map(str, dims)) + "]" for dtype, dims in shown)


def seconds_of(recording: Recording, step: Step, measured: MeasuredTrace) -> Seconds:
    """As :func:`measured_seconds`, from a trace."""
    calls = calls_of(measured, set(recording.name_table))
    return measured_seconds(recording, step, calls, same_size=measured.world_size == recording.world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much of a step the trace priced: ``matched`` of its ``launches``, which take ``share`` of the time of all.
    ``unmatched`` are seconds by operator, the longest first.
    """

    launches: int
    matched: int
    share: float
    unmatched: tuple[tuple[str, float], ...]


def coverage(recording: Recording, step: Step, seconds: Seconds, measured: Seconds) -> Coverage:
    """What part of ``seconds``, the prices of all events, is ``measured``."""
    rows = _launches(recording)
    rows = rows[(step.first <= rows) & (rows < step.end)]
    known, total = ~np.isnan(measured[rows]), float(seconds[rows].sum())
    unmatched = Counter[str]()
    for row in rows[~known].tolist():
        unmatched[recording.name_table[recording.names[row]]] += seconds[row]
    return Coverage(
        launches=len(rows), matched=int(known.sum()),
        share=float(seconds[rows][known].sum()) / total if total else 0.0,
        unmatched=tuple((name, float(each)) for name, each in unmatched.most_common()),
    )  # fmt: skip


def _launches(recording: Recording) -> npt.NDArray[np.int64]:
    return np.flatnonzero((recording.kinds == Kind.LAUNCH) & (recording.flags & _NO_KERNEL == 0))
