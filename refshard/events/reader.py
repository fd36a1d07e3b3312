"""A trace file becomes columns.

The typed decoder takes eight fields of every event; arguments are decoded only for events that need them, a
block at a time. Times come from the decimal text: a float of microseconds since 1970 is off by up to 125 ns.
"""

import gc
import json
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

import msgspec
import numpy as np
import numpy.typing as npt

from refshard.errors import TraceError
from refshard.events.decimals import nanoseconds
from refshard.events.nsys import is_nsys, read_nsys
from refshard.events.selection import without_far_events
from refshard.events.stream import EventStream
from refshard.events.table import (
    ANNOTATION,
    CATEGORIES,
    CATEGORY,
    EMULATED,
    GLOO,
    HOST,
    KERNEL,
    LAUNCH,
    MEMCPY,
    MEMSET,
    SYNC,
    SYNC_KINDS,
    UNREAD,
    UNUSED,
    Codes,
    DeviceEvents,
    Frames,
    Growing,
    HostEvents,
    MemoryEvents,
    Operands,
    SyncEvents,
    TraceFile,
    is_own,
    is_peer_copy,
)

_DEVICE = frozenset((KERNEL, MEMCPY, MEMSET))
_TELLING = ("c10d::", GLOO, EMULATED, "nccl:", "record_param_comms")
_MEMORY, _CPU = "[memory]", "cpu"
_VIEWS = (
    "empty|empty_like|empty_strided|new_empty|view|_unsafe_view|reshape|_reshape_alias|as_strided|transpose|t|permute|"
    "expand|expand_as|select|slice|narrow|split|split_with_sizes|chunk|unbind|squeeze|unsqueeze|unflatten|flatten|"
    "detach|detach_|alias|resize_|set_|item|_local_scalar_dense|result_type|is_nonzero|to|contiguous|lift_fresh|view_as"
)
_SHAPED = re.compile(
    rf"(?!aten::(?:{_VIEWS})$|autograd::|c10d::|record_param_comms|nccl:|ProfilerStep#|Optimizer\.|\w+Backward\d*$)"
)
"""Operators that may compute: the sizes of the others, which are most in number, tell nothing."""
_VALUED = re.compile(r"aten::(?:convolution|_scaled_dot_product_)")
"""Operators with FLOPs that depend on non-tensor arguments: strides of a convolution, a causal mask."""
_MOST_OPERANDS = 100_000
"""So many distinct ones are kept of a trace; each takes some hundred bytes."""
_FIELD = re.compile(r"`\$\.(.+?)`$")


class _Complete(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """An event with a duration."""

    cat: str = ""
    name: str = ""
    pid: int | float | str = 0
    tid: int | float | str = 0
    ts: msgspec.Raw = msgspec.Raw(b"")
    dur: msgspec.Raw = msgspec.Raw(b"")
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Instant(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    """A moment: the allocator's events among them."""

    name: str = ""
    pid: int | float | str = 0
    tid: int | float | str = 0
    ts: msgspec.Raw = msgspec.Raw(b"")
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Begin(msgspec.Struct, gc=False, tag_field="ph", tag="B"):
    """The begin of what ends in another event, which Kineto does not write."""

    cat: str = ""


# The other phases of the format are not read: flows, metadata, counters, samples and the like.
_OTHERS = (
    msgspec.defstruct(f"_Phase_{tag}", (), gc=False, tag_field="ph", tag=tag) for tag in "sftMCEbneIPRcNODSTpFvV"
)
_EVENT: Any = Union[(_Complete, _Instant, _Begin, *_OTHERS)]


_Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _DeviceArgs(msgspec.Struct, gc=False):
    stream: int | str | None = None
    device: int | str | None = None
    correlation: _Id = -1
    external: _Id = msgspec.field(name="External id", default=-1)
    external_2021: _Id = msgspec.field(name="external id", default=-1)
    grid: msgspec.Raw = msgspec.Raw(b"")
    block: msgspec.Raw = msgspec.Raw(b"")
    collective: str | None = msgspec.field(name="Collective name", default=None)


class _LaunchArgs(msgspec.Struct, gc=False):
    correlation: _Id = -1


class _HostArgs(msgspec.Struct, gc=False):
    external: _Id = msgspec.field(name="External id", default=-1)


class _OperandArgs(msgspec.Struct, gc=False):
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))
    dims_2021: msgspec.Raw = msgspec.field(name="Input dims", default=msgspec.Raw(b""))
    strides: msgspec.Raw = msgspec.field(name="Input Strides", default=msgspec.Raw(b""))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b""))
    values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw(b""))


class _SyncArgs(msgspec.Struct, gc=False):
    correlation: _Id = -1
    device: _Id = -1
    stream: _Id = -1
    source: _Id = msgspec.field(name="wait_on_stream", default=-1)
    record: _Id = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=-1)


class _MemoryArgs(msgspec.Struct, gc=False):
    bytes: _Id = msgspec.field(name="Bytes", default=0)
    address: _Id = msgspec.field(name="Addr", default=-1)
    allocated: _Id = msgspec.field(name="Total Allocated", default=-1)
    reserved: _Id = msgspec.field(name="Total Reserved", default=-1)
    device_type: int = msgspec.field(name="Device Type", default=0)
    device: int = msgspec.field(name="Device Id", default=-1)


def read_events(path: Path) -> TraceFile:
    """Read the trace of one rank, ``.json`` or gzipped, or what Nsight Systems exported to SQLite.

    Memory stays far below the file's size.

    Raises:
        TraceError: the file cannot be read, is no trace, is damaged or truncated.
    """
    if is_nsys(path):
        return read_nsys(path)
    reader = _Reader()
    was_enabled = gc.isenabled()
    gc.disable()  # it would look at millions of new objects again and again; none of them is garbage
    try:
        with EventStream(path, msgspec.json.Decoder(list[_EVENT]), reader.salvage) as stream:
            for block in stream:
                reader.take(block)
            reader.count("not_numbers", stream.not_numbers)
            reader.count("trailing_commas", stream.trailing_commas)
            reader.count("unclosed_array", int(stream.is_unclosed))
            return without_far_events(reader.finish(path, stream.size, stream.metadata))
    finally:
        if was_enabled:
            gc.enable()


T = TypeVar("T")


class _Categories(dict[str, int]):
    """Codes by the name that a trace uses."""

    def __missing__(self, name: str) -> int:
        """The first that is used of several categories, separated by commas."""
        several = (CATEGORIES.get(one.strip(), UNUSED) for one in name.lower().split(","))
        self[name] = code = next((one for one in several if one != UNUSED), UNUSED)
        return code


class _Columns(msgspec.Struct, gc=False):
    """What host and device events have in common."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    codes: npt.NDArray[np.int8]
    names: npt.NDArray[np.int32]

    @property
    def all(self) -> tuple[npt.NDArray[Any], ...]:
        return (self.starts, self.ends, self.codes, self.names)

    def at(self, rows: npt.NDArray[np.int64]) -> "_Columns":
        return _Columns(*(column[rows] for column in self.all))


class _Reader:
    """Turns blocks of events into columns."""

    def __init__(self) -> None:
        self.skipped: dict[str, int] = {}
        self._names: Codes[str] = Codes()
        self._telling: set[int] = set()
        self._shaped: set[int] = set()
        self._valued: set[int] = set()
        self._operands: Codes[tuple[bytes, bytes, bytes, bytes]] = Codes()
        self._threads: Codes[tuple[int | float | str, int | float | str]] = Codes()
        self._lanes: Codes[tuple[Any, Any]] = Codes()
        self._signatures: Codes[tuple[str, bytes, bytes]] = Codes()
        self._categories = _Categories()
        self._host = Growing(HostEvents)
        self._device = Growing(DeviceEvents)
        self._syncs = Growing(SyncEvents)
        self._rows = [0, 0]
        self._host_args: dict[int, dict[str, Any]] = {}
        self._device_args: dict[int, dict[str, Any]] = {}
        self._memory = Growing(MemoryEvents)
        self._memory_devices: Codes[int | str] = Codes()
        self._memory_threads: Codes[tuple[int | float | str, int | float | str]] = Codes()
        self._frames = Growing(Frames)
        self._frame_names: Codes[str] = Codes()
        self._count = 0

    def salvage(self, array: bytes) -> list[msgspec.Struct]:
        """The usable events of a block with malformed ones."""
        decoder, found = msgspec.json.Decoder(_EVENT), []
        for text in msgspec.json.decode(array, type=list[msgspec.Raw]):
            try:
                found.append(decoder.decode(text))
            except (msgspec.ValidationError, UnicodeDecodeError, RecursionError, OverflowError):
                self.count("unusable_events", 1)
        return found

    def take(self, block: list[msgspec.Struct]) -> None:
        """Add a block of events."""
        self._count += len(block)
        categories = self._categories
        if moments := [e for e in block if type(e) is _Instant and e.name == _MEMORY]:
            self._take_memory(moments)
        self._take_frames([e for e in block if type(e) is _Complete and e.cat == CATEGORY and is_own(e.name)])
        pairs = sum(type(e) is _Begin and categories[e.cat] != UNUSED for e in block)
        self.count("begin_and_end_pairs", pairs)
        used = [e for e in block if type(e) is _Complete and categories[e.cat] != UNUSED]
        if "" in categories:
            self.count("without_category", sum(type(e) is _Complete and not e.cat for e in block))
        if any(categories[name] == UNREAD for name in categories):
            unread = [e.cat == "hpu_op" for e in used if categories[e.cat] == UNREAD]
            self.count("unread_hpu_events", sum(unread))
            self.count("unread_device_events", len(unread) - sum(unread))
            used = [e for e in used if categories[e.cat] != UNREAD]
        starts, known = nanoseconds([e.ts for e in used])
        lengths, known_too = nanoseconds([e.dur for e in used])
        good = known & known_too & (lengths >= 0)
        if not good.all():
            self.count("without_times", int(np.sum(~(known & known_too))))
            self.count("negative_durations", int(np.sum(known & known_too & (lengths < 0))))
            used = [e for e, is_good in zip(used, good) if is_good]
            starts, lengths = starts[good], lengths[good]
        codes = np.array([categories[e.cat] for e in used], np.int8)
        on_device = np.isin(codes, tuple(_DEVICE))
        known_names = len(self._names)
        names = np.fromiter(map(self._names.__getitem__, [e.name for e in used]), np.int32, len(used))
        new_names = list(islice(self._names.items(), known_names, None))
        self._telling.update(code for name, code in new_names if name.startswith(_TELLING))
        self._shaped.update(code for name, code in new_names if _SHAPED.match(name))
        self._valued.update(code for name, code in new_names if _VALUED.match(name))
        columns = _Columns(starts=starts, ends=starts + lengths, codes=codes, names=names)
        is_sync = codes == SYNC
        for mine, take in (
            (on_device, self._take_device),
            (is_sync, self._take_syncs),
            (~(on_device | is_sync), self._take_host),
        ):
            rows = np.flatnonzero(mine)
            take([used[row] for row in rows.tolist()], columns.at(rows))

    def finish(self, path: Path, size: int, metadata: bytes) -> TraceFile:
        """All blocks together.

        Raises:
            TraceError: there are elements, but none is an event.
        """
        if not self._count and (others := self.skipped.get("unusable_events")):
            raise TraceError(f"{path}: not a Kineto trace (none of its {others} elements is an event)")
        return TraceFile(
            path=path, size=size, host=HostEvents(**self._host.columns()),
            device=DeviceEvents(**self._device.columns()), syncs=SyncEvents(**self._syncs.columns()),
            names=tuple(self._names), threads=tuple((str(pid), str(tid)) for pid, tid in self._threads),
            lanes=tuple((str(device), str(stream)) for device, stream in self._lanes),
            signatures=tuple(f"{name} {grid.decode()} {block.decode()}" for name, grid, block in self._signatures),
            host_args=self._host_args, device_args=self._device_args,
            operands=tuple(Operands(*found) for found in self._operands), memory=self._all_memory(),
            memory_devices=tuple(_CPU if one == _CPU else f"device {one}" for one in self._memory_devices),
            metadata=self._metadata(metadata), count=self._count, skipped=self.skipped,
            frames=Frames(**self._frames.columns(), name_table=tuple(self._frame_names)),
        )  # fmt: skip

    def _metadata(self, text: bytes) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(text)  # which takes a number of any size
        except (ValueError, RecursionError):
            self.count("unusable_metadata", 1)
            return {}
        return found

    def _take_frames(self, events: list[_Complete]) -> None:
        starts, known = nanoseconds([e.ts for e in events])
        lengths, known_too = nanoseconds([e.dur for e in events])
        good = known & known_too & (lengths >= 0)
        names = np.fromiter(map(self._frame_names.__getitem__, [e.name for e in events]), np.int32, len(events))
        threads = np.fromiter(map(self._threads.__getitem__, [(e.pid, e.tid) for e in events]), np.int32, len(events))
        self._frames.append(tuple(column[good] for column in (starts, starts + lengths, names, threads)))

    def _take_host(self, events: list[_Complete], columns: "_Columns") -> None:
        threads = np.fromiter(map(self._threads.__getitem__, [(e.pid, e.tid) for e in events]), np.int32, len(events))
        correlations = np.full(len(events), -1, np.int64)
        externals = correlations.copy()
        is_launch = columns.codes == LAUNCH
        launches = self._args([events[row].args for row in np.flatnonzero(is_launch).tolist()], _LaunchArgs)
        correlations[is_launch] = [args.correlation for args in launches]
        is_operator = (columns.codes == HOST) | (columns.codes == ANNOTATION)
        operators = self._args([events[row].args for row in np.flatnonzero(is_operator).tolist()], _HostArgs)
        externals[is_operator] = [args.external for args in operators]
        first = self._rows[0]
        for row in np.flatnonzero(np.isin(columns.names, list(self._telling))).tolist():
            self._host_args[first + row] = self._json_object(events[row].args)
        self._rows[0] += len(events)
        self._host.append((*columns.all, threads, correlations, externals, self._operands_of(events, columns)))

    def _operands_of(self, events: list[_Complete], columns: "_Columns") -> npt.NDArray[np.int32]:
        """The number of the operands of each operator that may compute; -1 if unknown."""
        found = np.full(len(events), -1, np.int32)
        rows = np.flatnonzero(np.isin(columns.names, list(self._shaped)) & (columns.codes == HOST))
        args = self._args([events[row].args for row in rows.tolist()], _OperandArgs)
        for row, name, one in zip(rows.tolist(), columns.names[rows].tolist(), args):
            dims = bytes(one.dims) or bytes(one.dims_2021)
            if not dims:
                continue
            values = bytes(one.values) if name in self._valued else b""
            key = (dims, bytes(one.strides), bytes(one.types), values)
            if key in self._operands or len(self._operands) < _MOST_OPERANDS:
                found[row] = self._operands[key]
        return found

    def _take_device(self, events: list[_Complete], columns: "_Columns") -> None:
        found = self._args([e.args for e in events], _DeviceArgs)
        count, first = len(events), self._rows[1]
        lanes = np.fromiter(
            (
                self._lanes[(e.pid if a.device is None else a.device, e.tid if a.stream is None else a.stream)]
                for e, a in zip(events, found)
            ),
            np.int32,
            count,
        )
        externals = [a.external if a.external >= 0 else a.external_2021 for a in found]
        signatures = (self._signatures[e.name, bytes(a.grid), bytes(a.block)] for e, a in zip(events, found))
        for row, (event, args) in enumerate(zip(events, found)):
            if args.collective or is_peer_copy(event.name):
                self._device_args[first + row] = self._json_object(event.args)
        self._rows[1] += count
        self._device.append(
            (
                *columns.all, lanes, np.array([a.correlation for a in found], np.int64), np.array(externals, np.int64),
                np.fromiter(signatures, np.int32, count), np.array([bool(a.collective) for a in found], np.bool_),
            )
        )  # fmt: skip

    def _take_syncs(self, events: list[_Complete], columns: "_Columns") -> None:
        known = [event for event in events if event.name in SYNC_KINDS]
        found = self._args([event.args for event in known], _SyncArgs)
        self._syncs.append(
            (
                np.array([SYNC_KINDS[event.name] for event in known], np.int8),
                *(
                    np.array([getattr(args, field) for args in found], np.int64)
                    for field in ("correlation", "device", "stream", "source", "record")
                ),
            )
        )

    def _take_memory(self, events: list[_Instant]) -> None:
        times, known = nanoseconds([e.ts for e in events])
        args = self._args([e.args for e in events], _MemoryArgs)
        devices, threads = self._memory_devices, self._memory_threads
        columns = (
            np.array([(a.bytes, a.address, a.allocated, a.reserved) for a in args], np.int64).reshape(-1, 4).T,
            np.array([devices[a.device if a.device_type else _CPU] for a in args], np.int32),
            np.array([threads[e.pid, e.tid] for e in events], np.int32),
        )
        self._memory.append((times[known], *columns[0][:, known], columns[1][known], columns[2][known]))

    def _all_memory(self) -> MemoryEvents:
        """In the order of time, which the file's is not where several threads allocate."""
        columns: dict[str, Any] = self._memory.columns()
        order = np.argsort(columns["times"], kind="stable")
        place = {(str(pid), str(tid)): code for code, (pid, tid) in enumerate(self._threads)}
        # The profiler once wrote one thread as a number here and as text there.
        threads = np.array([place.get((str(pid), str(tid)), -1) for pid, tid in self._memory_threads], np.int32)
        columns["threads"] = threads[columns["threads"]] if len(order) else columns["threads"]
        return MemoryEvents(**{name: column[order] for name, column in columns.items()})

    def _args(self, raw: Sequence[msgspec.Raw], kind: type[T]) -> list[T]:
        """The arguments of some events, decoded together, or one by one if some are odd."""
        try:
            return msgspec.json.decode(b"[" + b",".join(raw) + b"]", type=list[kind])  # type: ignore[valid-type]
        except (msgspec.ValidationError, UnicodeDecodeError, RecursionError, OverflowError):
            return [self._odd_args(text, kind) for text in raw]

    def _odd_args(self, raw: msgspec.Raw, kind: type[T]) -> T:
        """Arguments that are partly not as the profiler writes them: numbers as strings, null, and worse."""
        known = self._json_object(raw)
        while True:
            try:
                return msgspec.json.decode(msgspec.json.encode(known), type=kind, strict=False)
            except (msgspec.ValidationError, OverflowError) as error:
                field = _FIELD.search(str(error))
                self.count("unusable_arguments", 1)
                if field is None or known.pop(field[1], None) is None:
                    return kind()

    def _json_object(self, raw: msgspec.Raw) -> dict[str, Any]:
        try:
            return msgspec.json.decode(bytes(raw).decode("utf-8", "replace"), type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            self.count("unusable_arguments", 1)
            return {}

    def count(self, reason: str, count: int) -> None:
        """Count things that could not be used."""
        if count:
            self.skipped[reason] = self.skipped.get(reason, 0) + count
