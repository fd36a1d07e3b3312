"""An SQLite file that Nsight Systems exported becomes the same columns as a Kineto trace.

Tables are made only where a report has such events, and columns differ between versions (2022.2 to 2026.4; NVIDIA's
Analysis Guide, https://docs.nvidia.com/nsight-systems/, has the "SQLite Schema Reference"), so that what a file has is
asked first. NVTX ranges stand for annotations, and runtime and driver calls for launches; reports have neither shapes
nor external ids.
"""

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from refshard.errors import TraceError
from refshard.events.table import (
    ANNOTATION,
    HOST,
    KERNEL,
    LAUNCH,
    MEMCPY,
    MEMSET,
    Codes,
    DeviceEvents,
    Growing,
    HostEvents,
    MemoryEvents,
    SyncEvents,
    TraceFile,
)

_MAGIC = b"SQLite format 3\0"
_REPORTS = (".nsys-rep", ".qdrep")
_ROWS = 1 << 16
"""Rows that are Python objects at once."""
_KERNELS, _MEMCPY, _MEMSET, _GRAPHS = (
    f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
)
_CALLS, _RANGES = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
_MOST_PARAMETERS = 500
_PUSH_POP, _START_END = 59, 60
"""Event types of ranges: of one thread, and of a process."""
_PROCESS_BITS = 24
"""Lowest bits of a global id that hold the thread; those above tell the process."""
_LARGEST_TIME = 2**62
_API_VERSION = re.compile(r"(_pt[ds][sz])?_v\d{4,5}$")
"""What nsys adds to the name of a runtime call: the version of CUDA that it came with."""
_OPERATOR = re.compile(r"[a-z_0-9]+::")
_NCCL_RANGE = re.compile(r"nccl(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|AlltoAll|Gather|Scatter|Send|Recv)$")
_C10D, _NCCL = "c10d::", "nccl:"
_COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH",
           10: "PtoP"}  # fmt: skip
_MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static",
             6: "Managed Static"}  # fmt: skip

Column = npt.NDArray[np.int64]
Block = tuple[npt.NDArray[Any], ...]
"""Some rows of :class:`HostEvents` or :class:`DeviceEvents`, a column each."""


def is_nsys(path: Path) -> bool:
    """Whether a file is an SQLite database, or a report that has yet to be exported to one."""
    if path.name.endswith(_REPORTS):
        return True
    if not os.path.isfile(path):  # noqa: PTH113 -- never raises; opening a pipe would wait for its writer
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_nsys(path: Path) -> TraceFile:
    """Read an export of one report, which is opened for reading only.

    Raises:
        TraceError: the file is a report that was not exported, no export of Nsight Systems, holds no work of a GPU, or
            is damaged.
    """
    if path.name.endswith(_REPORTS):
        raise TraceError(f"{path}: a report of Nsight Systems; export it first: nsys export --type sqlite {path.name}")
    try:
        size = path.stat().st_size
        with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)) as database:
            database.text_factory = lambda text: text.decode("utf-8", "replace")
            return _Export(path, database).read(size)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
    except sqlite3.Error as error:
        raise TraceError(f"{path}: damaged or truncated SQLite file ({error}); export the report again") from None


class _Export:
    """Turns the tables of one database into columns."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self._path, self._database = path, database
        names = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        self._columns = {
            str(name): [str(row[1]) for row in database.execute(f'PRAGMA table_info("{quoted}")')]
            for (name,) in names
            for quoted in (str(name).replace('"', '""'),)
        }
        if "StringIds" not in self._columns:
            raise TraceError(f"{path}: an SQLite file, but no export of Nsight Systems (it has no table StringIds)")
        self._names, self._signatures = Codes[str](), Codes[str]()
        self._strings: dict[Any, str] = {}
        self._lanes: dict[tuple[str, str], int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        self._processes: dict[int, int] = {}
        self._skipped: dict[str, int] = {}
        self._count = 0
        self._shared = self._is_shared()

    def read(self, size: int) -> TraceFile:
        devices, hosts = Growing(DeviceEvents), Growing(HostEvents)
        for block in chain(self._kernels(), self._copies(), self._memsets(), self._graphs()):
            devices.append(block)
        device = devices.columns()
        if not len(device["starts"]):
            raise TraceError(
                f"{self._path}: holds no kernels and copies of a GPU; record it with nsys profile --trace=cuda,nvtx"
            )
        for block in chain(self._calls(), self._ranges()):
            hosts.append(block)
        host = hosts.columns()
        names = tuple(self._names)
        telling = [code for code, name in enumerate(names) if name.startswith((_C10D, _NCCL))]
        return TraceFile(
            path=self._path, size=size, host=HostEvents(**host), device=DeviceEvents(**device),
            syncs=SyncEvents(**Growing(SyncEvents).columns()), names=names, threads=tuple(self._threads),
            lanes=tuple(self._lanes), signatures=tuple(self._signatures),
            host_args={row: {} for row in np.flatnonzero(np.isin(host["names"], telling)).tolist()}, device_args={},
            operands=(), memory=MemoryEvents(**Growing(MemoryEvents).columns()), memory_devices=(),
            metadata=self._metadata(), count=self._count, skipped=self._skipped,
        )  # fmt: skip

    def _kernels(self) -> Iterator[Block]:
        shape = [f"{part}{axis}" for part in ("grid", "block") for axis in "XYZ"]
        name = next((n for n in ("demangledName", "shortName", "mangledName") if n in self._has(_KERNELS)), "name")
        for table in self._timed(_KERNELS, ("deviceId", "streamId", "correlationId", "globalPid", *shape, name)):
            codes = self._named(table[12])
            distinct, which = _distinct([codes, *table[6:12]])
            names = dict(zip(codes.tolist(), table[12].tolist()))
            signatures = [
                self._signatures[f"{self._strings[names[code]]} [{x}, {y}, {z}] [{a}, {b}, {c}]"]
                for code, x, y, z, a, b, c in zip(*(column.tolist() for column in distinct))
            ]
            yield self._device(KERNEL, table, codes, np.array(signatures, np.int32)[which])

    def _copies(self) -> Iterator[Block]:
        wanted = ("deviceId", "streamId", "correlationId", "globalPid", "copyKind", "srcKind", "dstKind")
        for table in self._timed(_MEMCPY, wanted):
            distinct, which = _distinct(table[6:9])
            names = [
                f"Memcpy {_COPIES.get(kind, 'Unknown')} ({_MEMORIES.get(source, 'Unknown')} -> "
                f"{_MEMORIES.get(target, 'Unknown')})"
                for kind, source, target in zip(*(column.tolist() for column in distinct))
            ]
            yield self._alike(MEMCPY, table, names, which)

    def _memsets(self) -> Iterator[Block]:
        for table in self._timed(_MEMSET, ("deviceId", "streamId", "correlationId", "globalPid", "memKind")):
            (kinds,), which = _distinct(table[6:7])
            names = [f"Memset ({_MEMORIES.get(kind, 'Device')})" for kind in kinds.tolist()]
            yield self._alike(MEMSET, table, names, which)

    def _graphs(self) -> Iterator[Block]:
        """CUDA graphs that were traced as a whole; what ran in one is not known, so that it bears no name."""
        for table in self._timed(_GRAPHS, ("deviceId", "streamId", "correlationId", "globalPid")):
            self._skip("graphs_as_a_whole", len(table[0]))
            yield self._alike(KERNEL, table, [""], np.zeros(len(table[0]), np.int64))

    def _alike(self, category: int, table: Sequence[Column], names: Sequence[str], which: Column) -> Block:
        """Device events of few names, distinguished only by name."""
        codes = np.array([self._names[name] for name in names], np.int32)[which]
        signatures = np.array([self._signatures[name] for name in names], np.int32)[which]
        return self._device(category, table, codes, signatures)

    def _device(
        self, category: int, table: Sequence[Column], names: npt.NDArray[np.int32], signatures: npt.NDArray[np.int32]
    ) -> Block:
        starts, ends, devices, streams, correlations, processes = table[:6]
        places, which = _distinct([devices, processes, streams])
        lanes = []
        for device, process, stream in zip(*(column.tolist() for column in places)):
            # CUDA's number; with the process where several count theirs from 0, as ranks of a job may.
            name = f"{device}/{_pid_and_tid(process)[0]}" if self._shared else str(device)
            lanes.append(self._lanes.setdefault((name, str(stream)), len(self._lanes)))
        return (
            starts, ends, np.full(len(starts), category, np.int8), names, np.array(lanes, np.int32)[which],
            self._correlated(correlations, processes), np.full(len(starts), -1, np.int64), signatures,
            np.zeros(len(starts), np.bool_),
        )  # fmt: skip

    def _is_shared(self) -> bool:
        """Whether several processes use devices of one number."""
        if not {"globalPid", "deviceId"} <= set(self._has(_KERNELS)):
            return False
        users = f'SELECT count(DISTINCT "globalPid") AS users FROM {_KERNELS} GROUP BY "deviceId"'
        row = self._database.execute(f"SELECT max(users) > 1 FROM ({users})").fetchone()
        return bool(row[0])

    def _calls(self) -> Iterator[Block]:
        for table in self._timed(_CALLS, ("globalTid", "correlationId", "nameId")):
            names = self._named(table[4], _API_VERSION)
            yield self._host(LAUNCH, table[0], table[1], table[2], names, self._correlated(table[3], table[2]))

    def _ranges(self) -> Iterator[Block]:
        """NVTX ranges; one that was open at the end of the report is left out."""
        if not {"start", "end", "eventType"} <= set(self._has(_RANGES)):
            return
        columns = [*(self._column(_RANGES, name) for name in ("globalTid", "domainId", "textId")),
                   self._column(_RANGES, "text", "NULL")]  # fmt: skip
        of_type = f'FROM {_RANGES} WHERE "eventType" IN ({_PUSH_POP}, {_START_END})'
        (open_ranges,) = self._database.execute(f'SELECT count(*) {of_type} AND "end" IS NULL').fetchone()
        self._skip("ranges_without_end", open_ranges)
        rows = self._database.execute(f'SELECT "start", "end", {", ".join(columns)} {of_type} AND "end" IS NOT NULL')
        while block := rows.fetchmany(_ROWS):
            self._look_up({row[4] for row in block if row[5] is None})
            texts = [self._strings[row[4]] if row[5] is None else str(row[5]) for row in block]
            table = self._whole(_RANGES, [row[:4] for row in block])
            names = [_plain(text, domain) for text, domain in zip(texts, table[3].tolist())]
            codes = np.fromiter(map(self._names.__getitem__, names), np.int32, len(names))
            good = self._usable(table)
            found = self._host(ANNOTATION, table[0][good], table[1][good], table[2][good], codes[good])
            is_operator = np.array([bool(_OPERATOR.match(name)) for name in names], np.bool_)[good]
            found[2][is_operator] = HOST
            yield found

    def _host(
        self, category: int, starts: Column, ends: Column, global_tids: Column, names: npt.NDArray[np.int32],
        correlations: Column | None = None,
    ) -> Block:  # fmt: skip
        (tids,), which = _distinct([global_tids])
        threads = [self._threads.setdefault(_pid_and_tid(tid), len(self._threads)) for tid in tids.tolist()]
        unknown = np.full(len(starts), -1, np.int64)
        return (
            starts, ends, np.full(len(starts), category, np.int8), names, np.array(threads, np.int32)[which],
            unknown if correlations is None else correlations, unknown, unknown.astype(np.int32),
        )  # fmt: skip

    def _correlated(self, correlations: Column, global_ids: Column) -> Column:
        """Correlation ids, which are unique within a process, with the process in their upper bits; -1 for none.

        Where kernels do not name their process there is but one.
        """
        if "globalPid" not in self._has(_KERNELS):
            return np.where(correlations > 0, correlations, -1)
        (processes,), which = _distinct([global_ids >> _PROCESS_BITS])
        numbers = [self._processes.setdefault(process, len(self._processes)) for process in processes.tolist()]
        upper = np.array(numbers, np.int64)[which] << 40
        return np.where(correlations > 0, correlations + upper, -1)

    def _named(self, ids: Column, less: "re.Pattern[str] | None" = None) -> npt.NDArray[np.int32]:
        """Codes of the names that ``ids`` of StringIds stand for, without what ``less`` matches."""
        (unique,), which = _distinct([ids])
        self._look_up(set(unique.tolist()))
        names = [self._strings[key] for key in unique.tolist()]
        codes = [self._names[name if less is None else less.sub("", name)] for name in names]
        return np.array(codes, np.int32)[which]

    def _look_up(self, ids: set[Any]) -> None:
        """Fetch strings that are not known yet; one that is not there is empty."""
        missing = [key for key in ids if key not in self._strings]
        for first in range(0, len(missing), _MOST_PARAMETERS):
            some = missing[first : first + _MOST_PARAMETERS]
            self._strings.update(dict.fromkeys(some, ""))
            question = f"SELECT id, value FROM StringIds WHERE id IN ({', '.join('?' * len(some))})"
            self._strings.update((key, str(value)) for key, value in self._database.execute(question, some))

    def _timed(self, table: str, wanted: Sequence[str]) -> Iterator[list[Column]]:
        """Start, end and other columns of a table, -1 for what is missing; rows without usable times are left out."""
        has = self._has(table)
        if not has:
            return
        if not {"start", "end"} <= set(has):
            raise TraceError(f"{self._path}: table {table} has no columns start and end; export the report again")
        times = [self._column(table, name, str(_LARGEST_TIME)) for name in ("start", "end")]
        select = ", ".join([*times, *(self._column(table, name) for name in wanted)])
        rows = self._database.execute(f"SELECT {select} FROM {table}")
        while block := rows.fetchmany(_ROWS):
            columns = self._whole(table, block)
            good = self._usable(columns)
            if good.any():
                yield [column[good] for column in columns]

    def _whole(self, table: str, rows: Sequence[Sequence[Any]]) -> list[Column]:
        """Columns of rows that must hold integers."""
        self._count += len(rows)
        try:
            return list(np.array(rows, np.int64).T)
        except (TypeError, ValueError, OverflowError):
            raise TraceError(
                f"{self._path}: damaged: table {table} holds what is no integer; export the report again"
            ) from None

    def _usable(self, columns: Sequence[Column]) -> npt.NDArray[np.bool_]:
        starts, ends = columns[:2]
        known = (np.abs(starts) < _LARGEST_TIME) & (np.abs(ends) < _LARGEST_TIME)
        self._skip("without_times", int((~known).sum()))
        self._skip("negative_durations", int((known & (ends < starts)).sum()))
        return np.asarray(known & (ends >= starts), np.bool_)

    def _has(self, table: str) -> list[str]:
        return self._columns.get(table, [])

    def _column(self, table: str, name: str, missing: str = "-1") -> str:
        """SQL for a column that some versions lack, and that may be NULL."""
        if name not in self._has(table):
            return missing
        return f'"{name}"' if missing == "NULL" else f'coalesce("{name}", {missing})'

    def _skip(self, reason: str, count: int) -> None:
        if count:
            self._skipped[reason] = self._skipped.get(reason, 0) + count

    def _metadata(self) -> dict[str, Any]:
        """What Kineto calls the same: the names of devices, and when time 0 was."""
        table, devices = "TARGET_INFO_GPU", list[dict[str, Any]]()
        if {"id", "name"} <= set(self._has(table)):  # by CUDA's number where the report gives it, else by its own
            number = 'coalesce("cuDevice", "id")' if "cuDevice" in self._has(table) else '"id"'
            rows = self._database.execute(f'SELECT {number}, "name" FROM {table}')
            devices = [{"id": number, "name": name} for number, name in rows if name]
        found: dict[str, Any] = {"deviceProperties": devices, "recorder": "Nsight Systems"}
        if "utcEpochNs" in self._has("TARGET_INFO_SESSION_START_TIME"):
            row = self._database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
            if row is not None and isinstance(row[0], int):
                found["baseTimeNanoseconds"] = row[0]
        return found


def _distinct(columns: Sequence[npt.NDArray[Any]]) -> tuple[list[npt.NDArray[Any]], Column]:
    """The rows that differ, as columns, and which of them each row is."""
    which = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        if len(values) > 1:
            _, which = np.unique(which * len(values) + place.reshape(-1), return_inverse=True)
    _, first, which = np.unique(which, return_index=True, return_inverse=True)
    return [column[first] for column in columns], which.reshape(-1)


def _pid_and_tid(global_tid: int) -> tuple[str, str]:
    """A serialized global id: 24 bits of the thread under 24 of the process."""
    mask = (1 << _PROCESS_BITS) - 1
    return str(global_tid >> _PROCESS_BITS & mask), str(global_tid & mask)


def _plain(text: str, domain: int) -> str:
    """A range's name without what ``torch.autograd.profiler.emit_nvtx`` adds, and NCCL's own ranges as torch's.

    >>> _plain("aten::mm, op_id = 7, sizes = [[2, 3], [3, 4]]", 0), _plain("ncclAllReduce", 1)
    ('aten::mm', 'nccl:AllReduce')
    """
    for part in (", seq = ", ", op_id = ", ", sizes = ", ", input_op_ids = "):
        text = text.partition(part)[0]
    match = _NCCL_RANGE.match(text) if domain > 0 else None
    return text if match is None else _NCCL + match[1]
