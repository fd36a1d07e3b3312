"""The collectives of a trace: what the host announced, and what ran for it."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from refshard.timeline import UNKNOWN, Collective, Kind, Spans, Window
from refshard.tracing.device import device_order
from refshard.tracing.events import ANNOTATION, HOST, TraceFile
from refshard.tracing.labels import Labels
from refshard.tracing.steps import step_at

ELEMENT_BYTES = {
    "double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "long": 8, "int": 4,
    "unsigned char": 1, "signed char": 1, "bool": 1, "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8,
    "Int": 4, "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
    "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1,
}  # fmt: skip
"""Bytes of an element, by the names that operators and NCCL's annotations use."""

_OPS = {
    # c10d op: (what it is called here, index of the argument that holds the unsharded tensor, how gloo runs it)
    "c10d::_allgather_base_": ("all_gather", 0, "gloo:all_gather"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, "gloo:all_reduce"),
    "c10d::allreduce_": ("all_reduce", 0, "gloo:all_reduce"),
    "c10d::alltoall_base_": ("all_to_all", 1, "gloo:all_to_all"),
    "c10d::broadcast_": ("broadcast", 0, "gloo:broadcast"),
    "c10d::allgather_": ("all_gather_list", 0, "gloo:all_gather"),
}
_NO_COLLECTIVES = frozenset(("c10d::barrier", "c10d::monitored_barrier_"))
_NAMES = (
    # What a kernel's name or "Collective name" contains, without underscores and in lower case; first match wins.
    ("allreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("dispatch", "dispatch"),
    ("combine", "combine"),
    ("send", "send"),
    ("recv", "recv"),
    ("barrier", "barrier"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
)
_LIST_OF_RANKS = re.compile(r"\d+")


@dataclass(slots=True, kw_only=True)
class _Announced:
    """A collective as the host's own operator tells of it, and the spans that ran for it."""

    row: int
    op: str
    runs_as: str
    bytes: int | None
    spans: list[int] = field(default_factory=list)


def find_collectives(
    trace: TraceFile, spans: Spans, labels: Labels, windows: tuple[Window, ...], *, on_device: bool
) -> tuple[Collective, ...]:
    """Every collective that the host announced or that ran, in the order of announcement."""
    announced = _announced(trace)
    ran = np.flatnonzero(spans.of_kind(Kind.COMM))
    match = _match_by_launch if on_device else _match_in_order
    alone = match(trace, spans, ran, announced)
    describe = _Describe(trace, spans, labels, windows, on_device=on_device)
    found = [describe.announced(one) for one in announced] + [describe.unannounced(row) for row in alone]
    return tuple(sorted(found, key=lambda c: c.start if c.launched is None else c.launched))  # type: ignore[arg-type,return-value]


def _announced(trace: TraceFile) -> list[_Announced]:
    host, args = trace.host, trace.host_args
    name_of = {row: trace.names[host.names[row]] for row in args}
    rows = [row for row, name in name_of.items() if name.startswith("c10d::") and name not in _NO_COLLECTIVES]
    element_of = _element_bytes_by_size(trace)
    found = []
    for row in sorted(rows, key=lambda row: host.starts[row]):
        # One that this table does not know must not vanish: it goes by its own name, with its first tensor's bytes.
        name = name_of[row]
        op, argument, runs_as = _OPS.get(name, (name, 0, f"gloo:{name.removeprefix('c10d::').strip('_')}"))
        size = _bytes_of_argument(args[row], argument, element_of)
        found.append(_Announced(row=row, op=op, runs_as=runs_as, bytes=size))
    return found


def _match_by_launch(
    trace: TraceFile, spans: Spans, ran: npt.NDArray[np.int64], announced: Sequence[_Announced]
) -> list[int]:
    """Give each kernel to the operator during which it was launched; return those that none announced."""
    if not announced:
        return [int(row) for row in ran]
    starts = trace.host.starts[[one.row for one in announced]]
    ends = trace.host.ends[[one.row for one in announced]]
    places = np.searchsorted(starts, spans.launches[ran], side="right") - 1
    inside = (places >= 0) & (spans.launches[ran] < ends[places])
    for row, place in zip(ran[inside].tolist(), places[inside].tolist()):
        announced[place].spans.append(row)
    return [int(row) for row in ran[~inside]]


def _match_in_order(
    trace: TraceFile, spans: Spans, ran: npt.NDArray[np.int64], announced: Sequence[_Announced]
) -> list[int]:
    """Give the first of each kind that ran to the first announced: gloo's queues are first in, first out.

    What ran before the first of its kind was announced was announced before the trace began.
    """
    waiting: dict[str, list[_Announced]] = defaultdict(list)
    for one in reversed(announced):
        waiting[one.runs_as].append(one)
    alone = []
    for row in ran.tolist():
        queue = waiting[spans.name_table[spans.names[row]]]
        if queue and trace.host.starts[queue[-1].row] <= spans.starts[row]:
            queue.pop().spans.append(row)
        else:
            alone.append(row)
    return alone


class _Describe:
    """Joins what host and device tell of one collective."""

    def __init__(
        self, trace: TraceFile, spans: Spans, labels: Labels, windows: tuple[Window, ...], *, on_device: bool
    ) -> None:
        self._trace, self._spans, self._labels, self._windows = trace, spans, labels, windows
        self._rows = device_order(trace) if on_device else _gloo_rows(trace, spans)
        self._on_device = on_device
        self._groups = _groups(trace.metadata.get("distributedInfo"))
        # Where all groups hold the same ranks, a collective that names none has as many.
        every = {tuple(ranks) for ranks in self._groups.values()}
        self._usual_size = len(next(iter(every))) if len(every) == 1 else None
        self._params = _param_comms(trace) if on_device else []

    def announced(self, one: _Announced) -> Collective:
        host = self._trace.host
        thread, launched = host.threads[one.row : one.row + 1], host.starts[one.row : one.row + 1]
        unit = int(self._labels.unit_at(thread, launched)[0]) if len(self._labels.starts) else UNKNOWN
        step = int(step_at(launched, self._windows)[0])
        facts = self._facts(one.spans[0]) if one.spans else {}
        return Collective(
            op=one.op,
            bytes=one.bytes if one.bytes is not None else _bytes_of_message(one.op, facts),
            step=None if step == UNKNOWN else step,
            **self._group(facts),
            unit=None if unit == UNKNOWN else self._labels.unit_names[unit],
            launched=int(launched[0]),
            **self._run(one.spans),
        )

    def unannounced(self, row: int) -> Collective:
        facts, spans = self._facts(row), self._spans
        op = _op_of(facts.get("Collective name") or spans.name_table[spans.names[row]])
        unit, launched, step = int(spans.units[row]), int(spans.launches[row]), int(spans.steps[row])
        return Collective(
            op=op,
            bytes=_bytes_of_message(op, facts),
            step=None if step == UNKNOWN else step,
            **self._group(facts),
            unit=None if unit == UNKNOWN else spans.unit_names[unit],
            launched=None if launched == UNKNOWN else launched,
            **self._run([row]),
            announced=False,
        )

    def _run(self, rows: list[int]) -> dict[str, Any]:
        if not rows:
            return {}
        starts, ends = self._spans.starts[rows], self._spans.ends[rows]
        lane = self._spans.lane_names[self._spans.lanes[rows[0]]]
        return {"row": rows[0], "start": int(starts.min()), "end": int(ends.max()), "lane": lane}

    def _facts(self, row: int) -> dict[str, Any]:
        """Arguments that tell of the message and the group: the span's own, or those of its host's annotation."""
        if not self._on_device:
            return _with_message(self._trace.host_args[int(self._rows[row])])
        own = self._trace.device_args.get(int(self._rows[row]))
        if own is not None:
            return own
        point = int(self._spans.launches[row])
        starts, ends, found = self._params or ([], [], [])
        place = int(np.searchsorted(starts, point, side="right")) - 1
        return found[place] if place >= 0 and point < ends[place] else {}

    def _group(self, facts: dict[str, Any]) -> dict[str, Any]:
        name, size = facts.get("Process Group Name"), facts.get("Group size")
        ranks = facts.get("Process Group Ranks")
        members = [int(n) for n in _LIST_OF_RANKS.findall(str(ranks))] if ranks and "..." not in str(ranks) else None
        if members is None and isinstance(name, str) and name in self._groups:
            members = self._groups[name]
        dtype = facts.get("dtype")
        return {
            "group": None if name is None else f"{name} [{_ranges(members)}]" if members else str(name),
            "group_size": size if isinstance(size, int) else len(members) if members else self._usual_size,
            "dtype": dtype if isinstance(dtype, str) else None,
        }


def _param_comms(trace: TraceFile) -> Any:
    """Starts, ends and arguments of the host's annotations of collectives, ordered by start."""
    rows = [
        row for row, args in trace.host_args.items()
        if "Collective name" in args or trace.names[trace.host.names[row]].startswith("nccl:")
    ]  # fmt: skip
    rows.sort(key=lambda row: trace.host.starts[row])
    found = []
    for row in rows:
        args = _with_message(trace.host_args[row])
        args.setdefault("Collective name", trace.names[trace.host.names[row]].removeprefix("nccl:"))
        found.append(args)
    return trace.host.starts[rows], trace.host.ends[rows], found


def _with_message(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an annotation with the size of its message, if they hold its shape."""
    dims, types = args.get("Input Dims"), args.get("Input type")
    if "In msg nelems" in args or not dims or not types:
        return dict(args)
    try:
        return {**args, "In msg nelems": math.prod(dims[0]), "dtype": types[0]}
    except (IndexError, TypeError):
        return dict(args)


def _gloo_rows(trace: TraceFile, spans: Spans) -> npt.NDArray[np.int64]:
    """The row of :attr:`TraceFile.host` of each span that communicates; elsewhere :data:`UNKNOWN`."""
    host = trace.host
    rows = np.array([r for r in trace.host_args if trace.names[host.names[r]].startswith("gloo:")], np.int64)
    rows = rows[host.categories[rows] == ANNOTATION]
    found = np.full(len(spans), UNKNOWN, np.int64)
    found[spans.of_kind(Kind.COMM)] = rows[np.lexsort((host.ends[rows], host.starts[rows]))]
    return found


def _groups(info: Any) -> dict[str, list[int]]:
    """Ranks of the process groups by name, as the trace's distributed metadata gives them."""
    config = info.get("pg_config") if isinstance(info, dict) else None
    found = {}
    for group in config if isinstance(config, list) else ():
        if isinstance(group, dict) and isinstance(group.get("ranks"), list):
            found[str(group.get("pg_name"))] = [rank for rank in group["ranks"] if isinstance(rank, int)]
    return found


def _ranges(ranks: Iterable[int]) -> str:
    """Ranks in few words.

    >>> _ranges([0, 1, 2, 3, 8])
    '0-3, 8'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _op_of(name: str) -> str:
    """The operation of a kernel or annotation.

    >>> _op_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)"), _op_of("_allgather_base")
    ('reduce_scatter', 'all_gather')
    """
    plain = name.lower().replace("_", "").partition("(")[0]
    return next((op for part, op in _NAMES if part in plain), name)


def _bytes_of_message(op: str, facts: dict[str, Any]) -> int | None:
    """Size of the unsharded tensor: the larger of what goes in and what comes out."""
    element = ELEMENT_BYTES.get(str(facts.get("dtype")))
    sent, received = facts.get("In msg nelems"), facts.get("Out msg nelems")
    counts = [n for n in (sent, received) if isinstance(n, int)]
    if element is None or not counts or (op in ("all_gather", "gather") and len(counts) < 2):
        return None
    return element * max(counts)


def _bytes_of_argument(args: dict[str, Any], argument: int, element_of: dict[int, int]) -> int | None:
    dims, types = args.get("Input Dims"), args.get("Input type")
    try:
        if not dims or not types:
            return None
        shapes = dims[argument] if types[argument] == "TensorList" else [dims[argument]]
        if not shapes:
            return None
        numel: int = sum(math.prod(shape) for shape in shapes)
        return numel * (ELEMENT_BYTES.get(types[argument]) or element_of.get(numel, 4))
    except (IndexError, TypeError):
        return None


def _element_bytes_by_size(trace: TraceFile) -> dict[int, int]:
    """A tensor list hides its dtype: the run loop's span over the same number of elements tells it."""
    found = {}
    for row, args in trace.host_args.items():
        name, dims, types = trace.names[trace.host.names[row]], args.get("Input Dims"), args.get("Input type")
        if name.startswith("gloo:") and trace.host.categories[row] != HOST and dims and types:
            try:
                found[sum(math.prod(shape) for shape in dims)] = ELEMENT_BYTES.get(types[0], 4)
            except TypeError:
                continue
    return found
