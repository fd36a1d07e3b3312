"""A replayed recording as the text of a Kineto trace: it opens in Perfetto, and refshard reads it like any other.

The host's side shows each operator, its launch at its end, what the host waits for, the labels under which work was
launched, and what the allocator holds; the device's side has a row per stream. Names of collectives, their sizes and
groups stand where NCCL's annotations have them.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from refshard.dryrun.as_timeline import DTYPES, Chosen, chosen_rows, dtype_of, group_of, lane_name
from refshard.dryrun.purposes import LABELS, LEAVE, Purposes, purposes
from refshard.dryrun.recording import NO_STREAM, Flag, Kind, Recording
from refshard.dryrun.replay import Replayed
from refshard.dryrun.steps import Step, host_windows, steps_of
from refshard.timeline import UNKNOWN, Meaning

_OPERATORS = {
    "all_gather": ("_allgather_base_", 0), "reduce_scatter": ("_reduce_scatter_base_", 1),
    "all_reduce": ("allreduce_", 0), "all_to_all": ("alltoall_base_", 1), "broadcast": ("broadcast_", 0),
    "reduce": ("reduce_", 0), "gather": ("gather_", 0), "scatter": ("scatter_", 1), "send": ("send", 0),
    "recv": ("recv_", 0), "barrier": ("barrier", 0),
}  # fmt: skip
"""torch's operator of each collective, and which of its arguments holds the unsharded tensor."""
_TYPES = {
    "bf16": "c10::BFloat16", "fp16": "c10::Half", "fp32": "float", "fp64": "double", "int64": "long int",
    "int32": "int", "int16": "short int", "int8": "signed char", "uint8": "unsigned char", "bool": "bool",
    "fp8e4m3": "c10::Float8_e4m3fn", "fp8e5m2": "c10::Float8_e5m2",
}  # fmt: skip
_HOST, _DEVICE = 1, 0
"""Process ids of the two sides."""


def as_kineto(recording: Recording, replayed: Replayed, *, steps: Sequence[Step] | None = None) -> str:
    """The trace of these steps, by default of all."""
    steps = steps_of(recording) if steps is None else steps
    writer = _Writer(recording, replayed, steps)
    about = {"rank": recording.rank, "world_size": recording.world_size, "backend": "nccl"}
    head = json.dumps({"schemaVersion": 1, "distributedInfo": about, "refshard": "dry run"})
    return f'{head[:-1]}, "traceEvents": [\n' + ",\n".join(writer.events()) + "\n]}\n"


class _Writer:
    def __init__(self, recording: Recording, replayed: Replayed, steps: Sequence[Step]) -> None:
        self._recording, self._replayed, self._steps = recording, replayed, steps
        self._chosen: Chosen = chosen_rows(replayed, steps)
        self._about: Purposes = purposes(recording, replayed.main_stream)
        self._names = [json.dumps(name) for name in recording.name_table]
        self._signatures = [json.dumps(signature) for signature in recording.signature_table]

    def events(self) -> Iterator[str]:
        """All events of the trace."""
        yield from self._tracks()
        for window in host_windows(self._steps, self._replayed):
            yield _event("user_annotation", f'"ProfilerStep#{window.step}"', window.start, window.end - window.start)
        yield from self._labels()
        yield from self._waits()
        yield from self._work()
        yield from self._memory()

    def _tracks(self) -> Iterator[str]:
        """Names of the rows that a viewer shows."""
        yield _named("process_name", _HOST, 1, f"rank {self._recording.rank}: host")
        yield _named("process_name", _DEVICE, 0, f"rank {self._recording.rank}: device")
        for stream in np.unique(self._recording.streams[self._chosen.rows]).tolist():
            main = " (computes most)" if stream == self._replayed.main_stream else ""
            yield _named("thread_name", _DEVICE, stream, lane_name(stream) + main)

    def _labels(self) -> Iterator[str]:
        """One annotation around each run of events of one label and unit."""
        rows = self._chosen.rows
        if not len(rows):
            return
        columns = self._about.labels[rows], self._about.units[rows], self._chosen.steps
        changes = np.any([column[1:] != column[:-1] for column in columns], axis=0)
        bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(rows)]
        starts, ends = self._replayed.host_starts[rows].tolist(), self._replayed.host_ends[rows].tolist()
        for first, after in pairwise(bounds):
            label = LABELS[columns[0][first]]
            if not label.name:
                continue
            unit = self._about.unit_names[columns[1][first]] if columns[1][first] != UNKNOWN else ""
            start, end = starts[first], ends[after - 1]
            yield _event("user_annotation", json.dumps(label.text(unit)), start, end - start)
            if label.meaning & (Meaning.FORWARD | Meaning.BACKWARD):
                yield _event("user_annotation", json.dumps(LEAVE.text(unit)), end, 0)

    def _waits(self) -> Iterator[str]:
        """What the host waits for, and where the script says so."""
        recording, replayed = self._recording, self._replayed
        for step in self._steps:
            of_step = np.flatnonzero(recording.kinds[step.first : step.end] == Kind.SYNCHRONISE) + step.first
            for row in of_step.tolist():
                call = (
                    "Event"
                    if recording.subjects[row]
                    else "Device"
                    if recording.streams[row] == NO_STREAM
                    else "Stream"
                )
                start, end = int(replayed.host_starts[row]), int(replayed.host_ends[row])
                why = recording.name_table[recording.names[row]]
                args = json.dumps({"why": why, "site": recording.site_table[recording.sites[row]]})
                yield _event("cuda_runtime", f'"cuda{call}Synchronize"', start, end - start, args)

    def _work(self) -> Iterator[str]:
        """Of each event its operator, its launch and what runs."""
        recording, replayed, rows = self._recording, self._replayed, self._chosen.rows
        columns = (
            rows, self._chosen.launches, replayed.host_starts[rows], replayed.host_ends[rows], replayed.starts[rows],
            replayed.ends[rows], recording.streams[rows], recording.flags[rows], recording.kinds[rows],
        )  # fmt: skip
        for row, launch, host, free, start, end, stream, flags, kind in zip(*(column.tolist() for column in columns)):
            name, operator = self._names[recording.names[row]], self._names[recording.names[row]]
            link = f'"External id": {row + 1}, "correlation": {row + 1}'
            about, category, asked = f'"grid": {self._signatures[recording.signatures[row]]}', "kernel", ""
            if kind == Kind.COLLECTIVE:
                operator, asked, about = self._message(row)
            elif flags & (Flag.HOST_TO_DEVICE | Flag.DEVICE_TO_HOST):
                category = "gpu_memcpy"
            yield _event("cpu_op", operator, host, max(1, free - host), f'{{"External id": {row + 1}{asked}}}')
            yield _event("cuda_runtime", '"cudaLaunchKernel"', launch, min(1, free - host), f"{{{link}}}")
            args = f'{{{link}, "device": 0, "context": 1, "stream": {stream}, {about}}}'
            yield _event(category, name, start, end - start, args, pid=_DEVICE, tid=stream)

    def _memory(self) -> Iterator[str]:
        """What the caching allocator hands out and takes back, with what is out and what is reserved after that."""
        recording, held, total = self._recording, dict[int, int](), 0
        reserved = np.cumsum(np.where(recording.kinds == Kind.SEGMENT, recording.sizes, 0))
        inside = np.zeros(len(recording), np.bool_)
        for step in self._steps:
            inside[step.first : step.end] = True
        for row in np.flatnonzero(np.isin(recording.kinds, (Kind.ALLOCATE, Kind.FREE))).tolist():
            block = int(recording.subjects[row])
            if recording.kinds[row] == Kind.ALLOCATE:
                change = held[block] = int(recording.sizes[row])
            else:
                change = -held.pop(block, 0)  # 0 if it was handed out before the recording began
            total += change
            if inside[row] and change:
                at, address = int(self._replayed.host_starts[row]), int(recording.reads[row])
                yield _allocation(at, change, total, int(reserved[row]), address)

    def _message(self, row: int) -> tuple[str, str, str]:
        """The operator of a collective, its arguments, and those of what runs."""
        recording = self._recording
        op = recording.name_table[recording.names[row]]
        group, ranks = group_of(recording, row)
        operator, unsharded = _OPERATORS.get(op, (op, 0))
        dtype = dtype_of(recording, row)
        whole = int(recording.sizes[row]) // DTYPES[dtype][1]
        part = whole // max(1, ranks)
        about = {
            "Collective name": op, "Group size": ranks, "Process Group Name": group, "dtype": DTYPES[dtype][0],
            "In msg nelems": part if op == "all_gather" else whole,
            "Out msg nelems": part if op == "reduce_scatter" else whole,
        }  # fmt: skip
        asked: dict[str, Any] = {}
        if op != "barrier":
            dims = [[whole], [part]] if unsharded == 0 else [[part], [whole]]
            asked = {"Input Dims": dims, "Input type": [_TYPES[dtype]] * 2}
        inner = ", " + json.dumps(asked)[1:-1] if asked else ""
        return json.dumps(f"c10d::{operator}"), inner, json.dumps(about)[1:-1]


def _event(category: str, name: str, start: int, ns: int, args: str = "{}", *, pid: int = _HOST, tid: int = 1) -> str:
    """A span; ``name`` and ``args`` are JSON already. Times are microseconds with three decimals."""
    return (
        f'{{"ph": "X", "cat": "{category}", "name": {name}, "pid": {pid}, "tid": {tid}, '
        f'"ts": {start // 1000}.{start % 1000:03d}, "dur": {ns // 1000}.{ns % 1000:03d}, "args": {args}}}'
    )


def _allocation(at: int, change: int, total: int, reserved: int, address: int) -> str:
    about = f'"Bytes": {change}, "Total Allocated": {total}, "Total Reserved": {reserved}, "Device Type": 1, '
    about += '"Device Id": 0' + (f', "Addr": {address}' if address else "")
    where = f'"ph": "i", "s": "t", "name": "[memory]", "pid": {_HOST}, "tid": 1'
    return f'{{{where}, "ts": {at // 1000}.{at % 1000:03d}, "args": {{{about}}}}}'


def _named(what: str, pid: int, tid: int, name: str) -> str:
    about = {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
    return json.dumps(about)
