"""A replayed recording as the events of a trace, so that one code analyses traces and dry runs.

The host's side has each operator, its launch at its end, the host's waits, the labels under which work was launched,
and the memory that the allocator holds; the device's side has a lane per stream. Names, sizes and groups of collectives
are in the fields that NCCL's annotations use.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from refshard.analysis.operators import CAUSAL
from refshard.dryrun.price import graph_launches
from refshard.dryrun.recording import GRAPH_LAUNCH, GROUP, NO_STREAM, Flag, Kind, Phase, Recording, host_copies
from refshard.dryrun.replay import NEVER, Replayed
from refshard.dryrun.steps import Step, host_windows, steps_of
from refshard.dryrun.work import Tensor, parse
from refshard.events.table import (
    ANNOTATION,
    CONTEXT_SYNC,
    DRY_RUN,
    EVENT_SYNC,
    HOST,
    KERNEL,
    LAUNCH,
    MEMCPY,
    STREAM_SYNC,
    STREAM_WAIT,
    TYPES,
    WRITER,
    Codes,
    DeviceEvents,
    Frames,
    HostEvents,
    MemoryEvents,
    Operands,
    SyncEvents,
    TraceFile,
)
from refshard.events.timeline import UNKNOWN, Meaning

ROOT = "(root)"
"""The unit of parameters of no module that is known: the model itself, less its wrapped parts."""


@dataclass(frozen=True, slots=True)
class Label:
    """A phase that a trace announces by ``name``, and what that means; ``of_unit`` if it names a unit."""

    name: str
    meaning: Meaning
    of_unit: bool = True

    def text(self, unit: str) -> str:
        """As a trace spells it."""
        return f"{self.name}({unit})" if self.of_unit else self.name


NONE, FORWARD, BACKWARD, OPTIMIZER, GATHER, REDUCE, COPY_IN, COPY_OUT = range(8)
LABELS = (
    Label("", Meaning(0), of_unit=False),
    Label("refshard::forward", Meaning.FORWARD),
    Label("refshard::backward", Meaning.BACKWARD),
    Label("Optimizer.step#step", Meaning.OPTIMIZER, of_unit=False),
    Label("refshard::all_gather", Meaning.ALL_GATHER | Meaning.COPY_IN),
    Label("refshard::reduce_scatter", Meaning.REDUCE | Meaning.WAIT),
    Label("refshard::copy_in", Meaning.REDUCE | Meaning.COPY_IN),
    Label("refshard::copy_out", Meaning.COPY_OUT),
)
"""Labels by code, with the engine's names, which every reader of traces here knows."""
LEAVE = Label("refshard::leave", Meaning.LEAVE)
_BY_OPERATOR = {
    "all_gather_copy_in": GATHER, "chunk_cat": COPY_IN, "_chunk_cat": COPY_IN, "split_with_sizes_copy": COPY_OUT,
}  # fmt: skip
"""Kernels that FSDP2 moves parameters and gradients with, on any stream."""
_BY_PHASE = {
    Phase.OTHER: NONE, Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD, Phase.RECOMPUTE: FORWARD,
    Phase.OPTIMIZER: OPTIMIZER,
}  # fmt: skip
_WRAPPERS = frozenset(("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"))
_GATHERS, _REDUCES = ("all_gather",), ("reduce_scatter", "all_reduce", "reduce")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Purposes:
    """Columns over all events: ``labels`` (int64) are codes of :data:`LABELS`; ``units`` (int32) index ``unit_names``
    or are :data:`~refshard.events.timeline.UNKNOWN`.
    """

    labels: npt.NDArray[np.int64]
    units: npt.NDArray[np.int32]
    unit_names: tuple[str, ...]


def purposes(recording: Recording, main: int) -> Purposes:
    """What all events are for; ``main`` is the stream that computes."""
    modules = [unit_of(module) for module in recording.module_table]
    unit_names = tuple(dict.fromkeys((*(unit for unit in modules if unit), ROOT)))
    code = {unit: number for number, unit in enumerate(unit_names)}
    units = np.array([code.get(unit, UNKNOWN) for unit in modules] or [UNKNOWN], np.int32)[recording.modules]
    labels = _labels(recording, main)
    # A forward or backward of no unit says nothing; what moves parameters of no known module moves the root's.
    labels = np.where(np.isin(labels, (FORWARD, BACKWARD)) & (units == UNKNOWN), NONE, labels)
    units = np.where((labels >= GATHER) & (units == UNKNOWN), code[ROOT], units)
    units = np.where(np.isin(labels, (NONE, OPTIMIZER)), UNKNOWN, units).astype(np.int32)
    return Purposes(labels=labels, units=units, unit_names=unit_names)


def unit_of(module: str) -> str:
    """The layer that a module belongs to, which is what strategies wrap; itself where it is in none.

    Names that wrappers add are left out.

    >>> unit_of("layers.0.attention.wq"), unit_of("_orig_mod.model.layers.11"), unit_of("tok_embeddings")
    ('layers.0', 'model.layers.11', 'tok_embeddings')
    """
    plain = ".".join(part for part in module.split(".") if part not in _WRAPPERS)
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", plain)
    return found[0] if found else plain


def _labels(recording: Recording, main: int) -> npt.NDArray[np.int64]:
    """The label of each event, before units are looked at."""
    by_phase = np.array([_BY_PHASE[phase] for phase in Phase])[recording.phases]
    by_name = np.array([_BY_OPERATOR.get(name.rpartition("::")[2], NONE) for name in recording.name_table] or [NONE])
    collective = recording.kinds == Kind.COLLECTIVE
    gathers, reduces = (_named(recording, names) & collective for names in (_GATHERS, _REDUCES))
    reduces &= (recording.phases == Phase.BACKWARD) | _named(recording, ("reduce_scatter",))
    launch = recording.kinds == Kind.LAUNCH
    aside = launch & (recording.streams != main) & ~host_copies(recording)
    backward = np.isin(recording.phases, (Phase.BACKWARD, Phase.OTHER))
    for_gathers = aside & np.isin(recording.streams, _serving(recording, gathers, main))
    for_reduces = aside & np.isin(recording.streams, _serving(recording, reduces, main)) & (backward | ~for_gathers)
    conditions = (by_name[recording.names] * launch > 0, reduces | for_reduces, gathers | for_gathers)
    return np.select(conditions, (by_name[recording.names], REDUCE, GATHER), by_phase).astype(np.int64)


def _serving(recording: Recording, collectives: npt.NDArray[np.bool_], main: int) -> list[int]:
    """Streams of these collectives, and the streams that they wait for; never the main one."""
    carrying = set(recording.streams[collectives].tolist())
    recorded: dict[int, int] = {}
    feeding = set[int]()
    rows = np.flatnonzero(np.isin(recording.kinds, (Kind.RECORD, Kind.WAIT)))
    columns = (recording.kinds[rows].tolist(), recording.streams[rows].tolist(), recording.subjects[rows].tolist())
    for kind, stream, event in zip(*columns):
        if kind == Kind.RECORD:
            recorded[event] = stream
        elif stream in carrying and event in recorded:
            feeding.add(recorded[event])
    return sorted((carrying | feeding) - {main})


def _named(recording: Recording, names: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = np.array([name in names for name in recording.name_table] or [False])[
        recording.names
    ]
    return found


_OPERATORS = {
    "all_gather": ("_allgather_base_", 0), "reduce_scatter": ("_reduce_scatter_base_", 1),
    "all_reduce": ("allreduce_", 0), "all_to_all": ("alltoall_base_", 1), "broadcast": ("broadcast_", 0),
    "reduce": ("reduce_", 0), "gather": ("gather_", 0), "scatter": ("scatter_", 1), "send": ("send", 0),
    "recv": ("recv_", 0), "barrier": ("barrier", 0),
}  # fmt: skip
"""torch's operator of each collective, and which of its arguments holds the unsharded tensor."""
_DTYPES = {
    "bf16": ("BFloat16", "c10::BFloat16", 2), "fp16": ("Half", "c10::Half", 2), "fp32": ("Float", "float", 4),
    "fp64": ("Double", "double", 8), "int64": ("Long", "long int", 8), "int32": ("Int", "int", 4),
    "int16": ("Short", "short int", 2), "int8": ("Char", "signed char", 1), "uint8": ("Byte", "unsigned char", 1),
    "bool": ("Bool", "bool", 1), "fp8e4m3": ("Float8_e4m3fn", "c10::Float8_e4m3fn", 1),
    "fp8e5m2": ("Float8_e5m2", "c10::Float8_e5m2", 1), "complex64": ("ComplexFloat", "c10::complex<float>", 8),
}  # fmt: skip
"""What NCCL's annotations and the profiler call the dtypes of signatures, and bytes of an element."""
_WAITING = {"item": "aten::_local_scalar_dense", "equal": "aten::equal"} | dict.fromkeys(
    ("copy from host", "copy to host"), "aten::copy_"
)
"""The operator in which the host waits, by the recording's reason; other reasons that are operators name themselves."""
_CALLS = {
    STREAM_WAIT: "cudaStreamWaitEvent", EVENT_SYNC: "cudaEventSynchronize", STREAM_SYNC: "cudaStreamSynchronize",
    CONTEXT_SYNC: "cudaDeviceSynchronize",
}  # fmt: skip
"""The driver's call for each kind of wait."""
_MOST_OPERANDS = 8
"""Operators of more tensors (foreach and fused ones) have no formula for their FLOPs, so their sizes are left out."""
_THREAD = ("1", "1")


def as_trace(
    recording: Recording, replayed: Replayed, *, device: str, steps: Sequence[Step] | None = None, name: str = "dry run"
) -> TraceFile:
    """The events of these steps, by default of all, on a GPU called ``device``; ``name`` stands for the file's path.

    Times are int64 nanoseconds since the first of these steps began, so that they do not depend on what the host did to
    start the job.
    """
    steps = steps_of(recording) if steps is None else steps
    if windows := host_windows(steps, replayed):
        replayed = replayed.since(windows[0].start)
    return _Builder(recording, replayed, steps).trace(device, name)


class _Builder:
    """Collects host events as rows of ``(start, end, category, name, correlation, external, operands)``."""

    def __init__(self, recording: Recording, replayed: Replayed, steps: Sequence[Step]) -> None:
        self._recording, self._replayed, self._steps = recording, replayed, steps
        inside = np.zeros(len(recording), np.bool_)
        for step in steps:
            inside[step.first : step.end] = True
        self._inside = inside
        self._ran = np.flatnonzero(inside & (replayed.starts != NEVER))
        self._names, self._signatures, self._sites = Codes[str](), Codes[str](), Codes[str]()
        self._operands, self._lanes = Codes[Operands](), Codes[int]()
        self._host: list[tuple[int, ...]] = []
        self._host_args: dict[int, dict[str, Any]] = {}
        self._device_args: dict[int, dict[str, Any]] = {}
        self._frames: list[tuple[int, int, int]] = []

    def trace(self, device: str, name: str) -> TraceFile:
        recording = self._recording
        for window in host_windows(self._steps, self._replayed):
            self._add(window.start, window.end, ANNOTATION, f"ProfilerStep#{window.step}")
        self._add_labels()
        syncs = self._add_waits()
        device_events = self._add_work()
        memory = self._memory()
        frames = Frames(**_columns(Frames, self._frames, threads=0), name_table=tuple(self._sites))
        return TraceFile(
            path=Path(name),
            size=0,
            host=HostEvents(**_columns(HostEvents, self._host, threads=0)),
            device=device_events,
            syncs=syncs,
            names=tuple(self._names),
            threads=(_THREAD,),
            lanes=tuple(("0", str(stream)) for stream in self._lanes),
            signatures=tuple(self._signatures),
            host_args=self._host_args,
            device_args=self._device_args,
            operands=tuple(self._operands),
            memory=memory,
            memory_devices=("device 0",) if len(memory.times) else (),
            metadata={
                "schemaVersion": 1,
                "distributedInfo": {
                    "rank": recording.rank, "world_size": recording.world_size, "backend": "nccl",
                },
                "deviceProperties": [{"id": 0, "name": device}],
                WRITER: DRY_RUN,
            },
            count=sum(len(one) for one in (self._host, device_events.starts, syncs.kinds, memory.times, self._frames)),
            frames=frames,
        )  # fmt: skip

    def _add(
        self, start: int, end: int, category: int, name: str, *, correlation: int = -1, external: int = -1,
        operands: int = -1,
    ) -> None:  # fmt: skip
        self._host.append((start, end, category, self._names[name], correlation, external, operands))

    def _add_labels(self) -> None:
        """One annotation around each run of events of one label and unit in one step."""
        rows, replayed = self._ran, self._replayed
        if not len(rows):
            return
        about = purposes(self._recording, replayed.main_stream)
        step = np.searchsorted([one.first for one in self._steps], rows, side="right")
        columns = about.labels[rows], about.units[rows], step
        changes = np.any([column[1:] != column[:-1] for column in columns], axis=0)
        bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(rows)]
        starts, ends = replayed.host_starts[rows].tolist(), replayed.host_ends[rows].tolist()
        for first, after in pairwise(bounds):
            label = LABELS[columns[0][first]]
            if not label.name:
                continue
            unit = about.unit_names[columns[1][first]] if columns[1][first] != UNKNOWN else ""
            start, end = starts[first], ends[after - 1]
            self._add(start, end, ANNOTATION, label.text(unit))
            if label.meaning & (Meaning.FORWARD | Meaning.BACKWARD):
                self._add(end, end, ANNOTATION, LEAVE.text(unit))

    def _add_waits(self) -> SyncEvents:
        """The driver's calls that record events and wait for them; what waits for what, which is returned.

        Around a call in which the host waits are the operator that waits, and the line of the script.
        """
        recording, replayed, recorded = self._recording, self._replayed, dict[int, int]()
        found: list[tuple[int, ...]] = []
        for row in np.flatnonzero(np.isin(recording.kinds, (Kind.RECORD, Kind.WAIT, Kind.SYNCHRONISE))).tolist():
            kind, stream, event = (int(one[row]) for one in (recording.kinds, recording.streams, recording.subjects))
            if kind == Kind.RECORD:
                recorded[event] = row
            if not self._inside[row]:
                continue
            start, end = int(replayed.host_starts[row]), int(replayed.host_ends[row])
            sync = STREAM_WAIT
            if kind == Kind.SYNCHRONISE:
                sync = EVENT_SYNC if event else CONTEXT_SYNC if stream == NO_STREAM else STREAM_SYNC
                why, site = recording.name_table[recording.names[row]], recording.site_table[recording.sites[row]]
                if operator := _WAITING.get(why, why if "::" in why else ""):
                    self._add(start, end, HOST, operator)
                if site:
                    self._frames.append((start, end, self._sites[_frame(site)]))
            else:  # the call is the last thing that the host does in this time
                start = max(start, end - 1)
            self._add(
                start, end, LAUNCH, "cudaEventRecord" if kind == Kind.RECORD else _CALLS[sync], correlation=row + 1
            )
            source = recorded.get(event, UNKNOWN)
            if kind != Kind.RECORD and (source != UNKNOWN or not event):
                ids = (int(recording.streams[source]), source + 1) if event else (-1, -1)
                found.append((sync, row + 1, 0, -1 if stream == NO_STREAM else stream, *ids))
        return SyncEvents(**_columns(SyncEvents, found))

    def _add_work(self) -> DeviceEvents:
        """Each operator and its launch on the host; what runs on the device, which is returned."""
        recording, replayed, rows = self._recording, self._replayed, self._ran
        columns = (
            rows, replayed.host_starts[rows], replayed.host_ends[rows], replayed.starts[rows], replayed.ends[rows],
            recording.names[rows], recording.signatures[rows], recording.streams[rows], recording.kinds[rows],
            recording.flags[rows],
        )  # fmt: skip
        graphs = _first_nodes(recording, rows)
        found: list[tuple[int, ...]] = []
        for at, (row, start, end, ran, until, code, signature, stream, kind, flags) in enumerate(
            zip(*(column.tolist() for column in columns))
        ):
            number, name, text = row + 1, recording.name_table[code], recording.signature_table[signature]
            operands, spelled = -1, f"{name} {json.dumps(text)} "
            if kind == Kind.COLLECTIVE:
                spelled = f"{name}  "
                operator, arguments, about = self._message(row)
                self._host_args[len(self._host)] = {"External id": number, **arguments}
                ids = {"External id": number, "correlation": number}
                self._device_args[at] = {**ids, "device": 0, "context": 1, "stream": stream, **about}
            else:
                operator, operands = name, self._operands_of(name, text, flags)
            # The launch is the last thing that an operator's host code does; an operator takes a nanosecond or more.
            free = max(end, start + 1)
            launch, call = max(start, end - 1), "cudaLaunchKernel"
            self._add(start, free, HOST, operator, external=number, operands=operands)
            if row in graphs:
                launch, call = int(replayed.host_starts[graphs[row]]), GRAPH_LAUNCH
            self._add(launch, max(launch, start) + min(1, end - start), LAUNCH, call, correlation=number)
            category = MEMCPY if flags & (Flag.HOST_TO_DEVICE | Flag.DEVICE_TO_HOST) else KERNEL
            is_collective = kind == Kind.COLLECTIVE
            category = KERNEL if is_collective else category
            lane, signature = self._lanes[stream], self._signatures[spelled]
            found.append((ran, until, category, self._names[name], lane, number, number, signature, is_collective))
        return DeviceEvents(**_columns(DeviceEvents, found))

    def _operands_of(self, name: str, signature: str, flags: int) -> int:
        """The number of an operator's arguments in the trace's table; -1 where they are left out."""
        found = parse(signature)
        tensors = found.inputs
        if not 0 < len(tensors) <= _MOST_OPERANDS:
            return -1
        if not found.results and len(tensors) > 1 and not name.endswith("_"):
            tensors = tensors[:-1]  # the last is where the result goes
        dims, types = _spelled(tensors)
        values: list[str] = []
        base = name.removeprefix("aten::")
        if base in CAUSAL:
            count = max(CAUSAL[base] + 1, len(dims))
            dims, types = dims + [[]] * (count - len(dims)), types + [""] * (count - len(types))
            values = [""] * count
            values[CAUSAL[base]] = str(bool(flags & Flag.CAUSAL))
        key = Operands(
            dims=json.dumps(dims).encode(), strides=b"", types=json.dumps(types).encode(),
            values=json.dumps(values).encode() if values else b"",
        )  # fmt: skip
        return self._operands[key]

    def _message(self, row: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The operator of a collective, its arguments, and those of what runs."""
        recording = self._recording
        op = recording.name_table[recording.names[row]]
        group = recording.groups[int(recording.subjects[row]) & GROUP]
        operator, unsharded = _OPERATORS.get(op, (op, 0))
        of_nccl, of_torch, size = _DTYPES[_dtype_of(recording, row)]
        whole = int(recording.sizes[row]) // size
        part = whole // max(1, len(group.ranks))
        about = {
            "Collective name": op, "Group size": len(group.ranks), "Process Group Name": group.name, "dtype": of_nccl,
            "In msg nelems": part if op == "all_gather" else whole,
            "Out msg nelems": part if op == "reduce_scatter" else whole,
        }  # fmt: skip
        arguments: dict[str, Any] = {}
        if op != "barrier":
            dims = [[whole], [part]] if unsharded == 0 else [[part], [whole]]
            arguments = {"Input Dims": dims, "Input type": [of_torch] * 2}
        return f"c10d::{operator}", arguments, about

    def _memory(self) -> MemoryEvents:
        """What the caching allocator hands out and takes back, with what is out and what is reserved after that."""
        recording, held, total = self._recording, dict[int, int](), 0
        reserved = np.cumsum(np.where(recording.kinds == Kind.SEGMENT, recording.sizes, 0))
        found: list[tuple[int, ...]] = []
        for row in np.flatnonzero(np.isin(recording.kinds, (Kind.ALLOCATE, Kind.FREE))).tolist():
            block = int(recording.subjects[row])
            if recording.kinds[row] == Kind.ALLOCATE:
                change = held[block] = int(recording.sizes[row])
            else:
                change = -held.pop(block, 0)  # 0 if it was handed out before the recording began
            total += change
            if self._inside[row] and change:
                at, address = int(self._replayed.host_starts[row]), int(recording.reads[row]) or -1
                found.append((at, change, address, total, int(reserved[row])))
        return MemoryEvents(**_columns(MemoryEvents, found, devices=0, threads=0))


def _first_nodes(recording: Recording, rows: npt.NDArray[np.int64]) -> dict[int, int]:
    """By the first of ``rows`` that is a node of a replayed CUDA graph, the row that launches the graph.

    A trace has one call for all of a graph. Here it launches the first node, and each further one has a call of its
    own, of a nanosecond, so that readers find the operator and the label of every node.
    """
    launches = np.flatnonzero(graph_launches(recording))
    places = np.searchsorted(rows, launches)
    launches, nodes = launches[places < len(rows)], rows[places[places < len(rows)]]
    of_graph = recording.flags[nodes] & Flag.OF_GRAPH != 0
    return dict(zip(nodes[of_graph].tolist(), launches[of_graph].tolist()))


def _columns(table: type, rows: Sequence[Sequence[int]], **same: int) -> dict[str, npt.NDArray[Any]]:
    """The columns of a table in the order of its fields, from rows without the fields that are the ``same`` in all."""
    names = [name for name in table.__dataclass_fields__ if name in TYPES and name not in same]  # type: ignore[attr-defined]
    columns = np.array(rows, np.int64).reshape(-1, len(names)).T
    found: dict[str, npt.NDArray[Any]] = {name: column.astype(TYPES[name]) for name, column in zip(names, columns)}
    return found | {name: np.full(len(rows), value, TYPES[name]) for name, value in same.items()}


def _frame(site: str) -> str:
    """A line of the script as the profiler names a Python function.

    >>> _frame("train.py:31 in step")
    'train.py(31): step'
    """
    place, _, function = site.partition(" in ")
    file, _, line = place.rpartition(":")
    return f"{file}({line}): {function}"


def _spelled(tensors: Sequence[Tensor]) -> tuple[list[list[int]], list[str]]:
    """Sizes and types of the elements, as the profiler has them."""
    return [list(one.shape) for one in tensors], [
        _DTYPES[one.dtype][1] if one.dtype in _DTYPES else "" for one in tensors
    ]


def _dtype_of(recording: Recording, row: int) -> str:
    """The dtype of all that a collective moves; ``uint8`` where there are several or none."""
    found = parse(recording.signature_table[recording.signatures[row]])
    dtypes = {tensor.dtype for tensor in (*found.inputs, *found.results)}
    known = dtypes.pop() if len(dtypes) == 1 else ""
    return known if known in _DTYPES and int(recording.sizes[row]) % _DTYPES[known][2] == 0 else "uint8"
