"""The collectives of a trace: what the host announced, and what ran for it.

Arguments of events come from outside, in any shape: what is not as the profiler writes it tells nothing.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from refshard.analysis.labels import Labels
from refshard.analysis.names import PEER_COPY, custom_operation, dtype_named
from refshard.analysis.owners import innermost_on
from refshard.analysis.spans import Launches, device_order
from refshard.analysis.windows import step_at
from refshard.events.table import ANNOTATION, EMULATED, GLOO, TraceFile, whole
from refshard.events.timeline import UNKNOWN, Collective, Kind, Spans, Window

Args = dict[str, Any]

OPERATORS = {
    # c10d operator: (operation, argument that holds the unsharded tensor)
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}
"""torch's operators that communicate, without ``c10d::``; barriers move nothing and are left out."""

OF_SHARDS = frozenset(("allgather_", "reduce_scatter_"))
"""Operators whose unsharded tensors are lists within a list, which traces leave out: the argument holds the shards."""
BARRIERS = frozenset(("barrier", "monitored_barrier_"))
_GLOO_RUNS_AS = {"reduce_scatter": "all_reduce"}
"""What gloo calls the run of an operation, where that is another."""

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
_RANK = re.compile(r"\d{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group as far as it is known: a name with its ranks, how many and which these are, what it is for."""

    name: str | None = None
    size: int | None = None
    ranks: tuple[int, ...] = ()
    description: str | None = None


_C10D, _NCCL = "c10d::", "nccl:"
_NAME = "Collective name"
_SEQUENCE = "Seq"
"""The number of a collective in its group, alike on all ranks (pytorch pull request 177148, kineto 1296; in 2.13)."""
_UNDESCRIBED = frozenset(("", "undefined"))


@dataclass(slots=True, kw_only=True)
class _Announced:
    """A collective as the host's own operators tell of it, and the spans that ran for it.

    ``shapes`` are those of the unsharded tensors, or ``of_shards``: each of the group's ranks has as many elements.
    """

    op: str
    rows: list[int]
    shapes: list[tuple[int | None, Any]]
    of_shards: bool = False
    spans: list[int] = field(default_factory=list)


def find_collectives(
    trace: TraceFile, spans: Spans, labels: Labels, windows: tuple[Window, ...], launches: Launches | None
) -> tuple[Collective, ...]:
    """Every collective that the host announced or that ran, in the order of announcement.

    ``launches`` are those of a device's events, in the order of ``spans``; None for a CPU trace.
    """
    announced = _announced(trace)
    ran = np.flatnonzero(spans.of_kind(Kind.COMM))
    annotations = _Annotations(trace)
    args: _CpuArgs | _DeviceArgs
    if launches is None:
        args = _CpuArgs(trace, spans)
        alone = _match_in_order(trace, spans, ran, announced)
    else:
        args = _DeviceArgs(trace, launches, annotations)
        alone = _match_by_launch(trace, launches, ran, announced)
        alone = _match_coalesced(trace, launches, alone, announced, args)
        announced = [one for one in announced if one.rows]
    describe = _Describe(trace, spans, labels, windows, args, annotations)
    found = [*describe.announced(announced), *(describe.unannounced(row) for row in alone)]
    return tuple(sorted(found, key=lambda c: c.start if c.launched is None else c.launched))  # type: ignore[arg-type,return-value]


def _announced(trace: TraceFile) -> list[_Announced]:
    host = trace.host
    name_of = {row: trace.names[host.names[row]].removeprefix(_C10D) for row in trace.host_args
               if trace.names[host.names[row]].startswith(_C10D)}  # fmt: skip
    found = []
    for row in sorted(name_of, key=lambda row: host.starts[row]):
        name = name_of[row]
        if name in BARRIERS:
            continue
        # One that is not known must not vanish: it goes by its own name, with its first tensor's bytes.
        op, argument = OPERATORS.get(name, (_C10D + name, 0))
        shapes = [shape_of(trace.host_args[row], argument)]
        found.append(_Announced(op=op, rows=[row], shapes=shapes, of_shards=name in OF_SHARDS))
    return found


def _match_by_launch(
    trace: TraceFile, launches: Launches, ran: npt.NDArray[np.int64], announced: Sequence[_Announced]
) -> list[int]:
    """Give each kernel to the innermost operator of its thread during which it was launched; return the others."""
    host, rows = trace.host, np.array([one.rows[0] for one in announced], np.int64)
    places = innermost_on(
        host.threads[rows], host.starts[rows], host.ends[rows], launches.threads[ran], launches.points[ran]
    )
    for row, place in zip(ran.tolist(), places.tolist()):
        if place != UNKNOWN:
            announced[place].spans.append(row)
    return ran[places == UNKNOWN].tolist()  # type: ignore[no-any-return]


def _match_coalesced(
    trace: TraceFile, launches: Launches, alone: list[int], announced: Sequence[_Announced], args: "_DeviceArgs"
) -> list[int]:
    """Give a coalesced kernel to the operators of its thread that wait for one: together they are one collective."""
    waiting = _by_thread(trace, [one for one in reversed(announced) if not one.spans])
    left = []
    for row in sorted(alone, key=lambda row: launches.points[row]):
        queue, members = waiting.get(int(launches.threads[row]), []), list[_Announced]()
        if "coalesced" in str(args.of(row).get(_NAME)):
            while queue and trace.host.starts[queue[-1].rows[0]] <= launches.points[row]:
                members.append(queue.pop())
        if not members:
            left.append(row)
            continue
        members[0].spans.append(row)
        for other in members[1:]:
            members[0].shapes += other.shapes
            other.rows = []
    return left


def _by_thread(trace: TraceFile, announced: Sequence[_Announced]) -> dict[int, list[_Announced]]:
    found: dict[int, list[_Announced]] = defaultdict(list)
    for one in announced:
        found[int(trace.host.threads[one.rows[0]])].append(one)
    return found


def _match_in_order(
    trace: TraceFile, spans: Spans, ran: npt.NDArray[np.int64], announced: Sequence[_Announced]
) -> list[int]:
    """Give the first of each kind that ran to the first announced: queues are first in, first out, on a CPU.

    What ran before the first of its kind was announced was announced before the trace began.
    """
    names = [spans.name_table[name] for name in spans.names[ran].tolist()]
    emulated = any(name.startswith(EMULATED) for name in names)
    waiting: dict[str, list[_Announced]] = defaultdict(list)
    for one in reversed(announced):
        waiting[run_of(one.op, emulated=emulated)].append(one)
    alone = []
    for row, name in zip(ran.tolist(), names):
        queue = waiting[name]
        if queue and trace.host.starts[queue[-1].rows[0]] <= spans.starts[row]:
            queue.pop().spans.append(row)
        else:
            alone.append(row)
    return alone


class _CpuArgs:
    """Arguments of the spans in which collectives run on a CPU."""

    def __init__(self, trace: TraceFile, spans: Spans) -> None:
        host = trace.host
        rows = np.array(
            [r for r in trace.host_args if trace.names[host.names[r]].startswith((GLOO, EMULATED))], np.int64
        )
        rows = rows[host.categories[rows] == ANNOTATION]
        self._rows = np.full(len(spans), UNKNOWN, np.int64)
        self._rows[spans.of_kind(Kind.COMM)] = rows[np.lexsort((host.ends[rows], host.starts[rows]))]
        self._args = trace.host_args

    def of(self, row: int) -> Args:
        return self._args[int(self._rows[row])]


class _Annotations:
    """The host's annotations of collectives: ``record_param_comms`` and ``nccl:*`` of torch, ``emulated:*``."""

    def __init__(self, trace: TraceFile) -> None:
        host = trace.host
        rows = [
            row for row, args in trace.host_args.items()
            if _NAME in args or trace.names[host.names[row]].startswith((_NCCL, EMULATED))
        ]  # fmt: skip
        rows.sort(key=lambda row: host.starts[row])
        self._args = [{_NAME: trace.names[host.names[row]].removeprefix(_NCCL), **trace.host_args[row]} for row in rows]
        self._starts, self._ends, self._threads = host.starts[rows], host.ends[rows], host.threads[rows]
        self._host = host

    def around(self, point: int) -> Args:
        """The arguments of the innermost annotation at a point in time."""
        place = int(np.searchsorted(self._starts, point, side="right")) - 1
        return self._args[place] if place >= 0 and point < self._ends[place] else {}

    def within(self, row: int) -> Args:
        """The arguments of the first annotation inside an operator of the host."""
        first, last = np.searchsorted(self._starts, [self._host.starts[row], self._host.ends[row]])
        own = np.flatnonzero(self._threads[first:last] == self._host.threads[row])
        return self._args[first + own[0]] if len(own) else {}


class _DeviceArgs:
    """Arguments of kernels that communicate: their own, or those of the host's annotation around their launch."""

    def __init__(self, trace: TraceFile, launches: Launches, annotations: _Annotations) -> None:
        self._annotations = annotations
        self._points = launches.points
        self._rows = device_order(trace)
        self._own = trace.device_args

    def of(self, row: int) -> Args:
        own = self._own.get(int(self._rows[row]))
        return self._annotations.around(int(self._points[row])) if own is None else own


class _Describe:
    """Joins what host and device tell of one collective."""

    def __init__(
        self, trace: TraceFile, spans: Spans, labels: Labels, windows: tuple[Window, ...],
        args: _CpuArgs | _DeviceArgs, annotations: _Annotations,
    ) -> None:  # fmt: skip
        self._trace, self._spans, self._labels, self._windows = trace, spans, labels, windows
        self._args, self._annotations = args, annotations
        self._groups = groups_of(trace.metadata.get("distributedInfo"))

    def announced(self, every: Sequence[_Announced]) -> list[Collective]:
        host, rows = self._trace.host, [one.rows[0] for one in every]
        units = self._labels.unit_at(host.threads[rows], host.starts[rows]).tolist()
        steps = step_at(host.starts[rows], self._windows).tolist()
        dtype_at = {
            numel: dtype_of(self._args.of(one.spans[0])) for one in every for numel, _ in one.shapes if one.spans
        }
        found = []
        for one, unit, step, launched in zip(every, units, steps, host.starts[rows].tolist()):
            # NCCL launches no kernel for a group of one rank: the annotation is all there is.
            args = self._args.of(one.spans[0]) if one.spans else self._annotations.within(one.rows[0])
            size = _bytes(one, dtype_of(args) or dtype_at.get(one.shapes[0][0]))
            if one.of_shards and size is not None:
                ranks = group_of(args, self._groups).size
                size = None if ranks is None else size * ranks
            collective = self._described(one.op, args, one.spans, unit=unit, step=step, launched=launched, size=size)
            found.append(collective)
        return found

    def unannounced(self, row: int) -> Collective:
        args, spans = self._args.of(row), self._spans
        name = args.get(_NAME)
        kernel = spans.name_table[spans.names[row]]
        op = operation_of(name) if isinstance(name, str) and name else custom_operation(kernel) or operation_of(kernel)
        unit, step, launched = int(spans.units[row]), int(spans.steps[row]), int(spans.launches[row])
        size = whole(args.get("bytes")) if op == PEER_COPY else None
        return self._described(op, args, [row], unit=unit, step=step, launched=launched, size=size, announced=False)

    def _described(
        self, op: str, args: Args, rows: list[int], *, unit: int, step: int, launched: int,
        size: int | None = None, announced: bool = True,
    ) -> Collective:  # fmt: skip
        group = group_of(args, self._groups)
        spans = self._spans
        return Collective(
            op=op, bytes=bytes_of_message(op, args) if size is None else size, step=None if step == UNKNOWN else step,
            group=group.name, group_size=group.size, dtype=dtype_of(args),
            unit=None if unit == UNKNOWN else self._labels.unit_names[unit],
            lane=spans.lane_names[spans.lanes[rows[0]]] if rows else None,
            launched=None if launched == UNKNOWN else launched, start=int(spans.starts[rows].min()) if rows else None,
            end=int(spans.ends[rows].max()) if rows else None, announced=announced, rows=tuple(rows),
            group_ranks=group.ranks, group_description=group.description, sequence=whole(args.get(_SEQUENCE)),
        )  # fmt: skip


def _bytes(one: _Announced, dtype: str | None) -> int | None:
    """Bytes of the unsharded tensors; what runs tells the dtype that a list of tensors hides."""
    total = 0
    for numel, own in one.shapes:
        element = dtype_named(own) or dtype_named(dtype)
        if numel is None or element is None:
            return None
        total += numel * element[1]
    return total


def operation_of(name: str) -> str:
    """The operation of a kernel or annotation.

    >>> operation_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)"), operation_of("_allgather_base")
    ('reduce_scatter', 'all_gather')
    """
    plain = name.lower().replace("_", "").partition("(")[0]
    return next((op for part, op in _NAMES if part in plain), _identifier(name))


def _identifier(name: str) -> str:
    """The name of a function without its result, namespaces, template and arguments.

    >>> _identifier("void (anonymous namespace)::ring::exchange<float, 4>(float*, int)"), _identifier("what")
    ('exchange', 'what')
    """
    plain = name.replace("(anonymous namespace)::", "").partition("(")[0].partition("<")[0]
    return plain.rpartition("::")[2].rpartition(" ")[2] or name


def run_of(op: str, *, emulated: bool) -> str:
    """The name of the span in which an operation runs on a CPU.

    >>> run_of("reduce_scatter", emulated=False), run_of("reduce_scatter", emulated=True)
    ('gloo:all_reduce', 'emulated:reduce_scatter')
    """
    return EMULATED + op if emulated else GLOO + _GLOO_RUNS_AS.get(op, op)


def shape_of(args: Args, argument: int) -> tuple[int | None, Any]:
    """Elements of an operator's argument, over all tensors of a list, and its dtype; None where that is not recorded.

    A list hides its tensors' dtype.
    """
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not (isinstance(dims, list) and isinstance(types, list) and min(len(dims), len(types)) > argument):
        return None, None
    shapes = dims[argument] if types[argument] == "TensorList" else [dims[argument]]
    return _elements(shapes), types[argument]


def sent_and_received(args: Args) -> tuple[int | None, int | None]:
    """Elements of the message, as NCCL's annotation gives them; of gloo's, its first tensor for both."""
    sent, received = (whole(args.get(key)) for key in ("In msg nelems", "Out msg nelems"))
    if sent is None and received is None:
        sent, _ = shape_of(args, 0)
    return sent, received


def dtype_of(args: Args) -> str | None:
    """The elements' type."""
    dtype = args.get("dtype")
    if not isinstance(dtype, str):
        types = args.get("Input type")
        dtype = types[0] if isinstance(types, list) and types else None
    return dtype if isinstance(dtype, str) and dtype != "TensorList" else None


def bytes_of_message(op: str, args: Args) -> int | None:
    """Size of the unsharded tensor: the larger of what goes in and what comes out; None if only a shard is known."""
    sent, received = sent_and_received(args)
    element, counts = dtype_named(dtype_of(args)), [n for n in (sent, received) if n is not None]
    if element is None or not counts or (op in ("all_gather", "gather") and received is None):
        return None
    return element[1] * max(counts)


def groups_of(info: Any) -> dict[str, list[int]]:
    """Ranks of the process groups by name, as the trace's distributed metadata gives them."""
    config = info.get("pg_config") if isinstance(info, dict) else None
    found = {}
    for group in config if isinstance(config, list) else ():
        if isinstance(group, dict) and isinstance(group.get("ranks"), list):
            found[str(group.get("pg_name"))] = [rank for rank in group["ranks"] if whole(rank) is not None]
    return found


def group_of(args: Args, groups: dict[str, list[int]]) -> Group:
    """The process group that a collective's arguments name; its ranks come from them or from the metadata.

    Where all groups hold the same ranks, one that is not named has as many.
    """
    name, listed = args.get("Process Group Name"), str(args.get("Process Group Ranks") or "")
    members = _ranks_in(listed) if "..." not in listed else ()
    if not members and isinstance(name, str):
        members = tuple(groups.get(name, ()))
    size = whole(args.get("Group size")) or len(members) or None
    if size is None and len({tuple(every) for every in groups.values()}) == 1:
        size = len(next(iter(groups.values()))) or None
    about = args.get("Process Group Description")
    about = about if isinstance(about, str) and about not in _UNDESCRIBED else None
    if not isinstance(name, str):
        return Group(size=size, ranks=members, description=about)
    full = f"{name} [{_ranges(members)}]" if members else name
    return Group(name=full, size=size, ranks=members, description=about)


@lru_cache(maxsize=256)
def _ranks_in(listed: str) -> tuple[int, ...]:
    """The ranks in a list as text; the collectives of a group share one tuple."""
    return tuple(int(n) for n in _RANK.findall(listed))


def _elements(shapes: Any) -> int | None:
    if not isinstance(shapes, list) or not shapes:
        return None
    counts = [_product(shape) for shape in shapes]
    return None if None in counts else sum(n for n in counts if n is not None)


def _product(shape: Any) -> int | None:
    if not isinstance(shape, list) or not all(whole(n) is not None for n in shape):
        return None
    return math.prod(shape)


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
