"""Databases as Nsight Systems exports them, made of the events of a Kineto trace.

Schemas: version 2.9.1 as Nsight Systems 2022.2 exports it, and 3.28.1 as the "SQLite Schema Reference" of 2026.4 in
NVIDIA's Analysis Guide (https://docs.nvidia.com/nsight-systems/) documents it; of each the columns that matter here. A
trace made by :mod:`tests.analysis.builder` is told again, so that both recorders saw the same.
"""

import json
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

SESSION_NS = 7_000_000_000
"""When in a session the trace began."""
VM = 1 << 56
PID = 4242
_KERNEL = "start end deviceId contextId streamId correlationId globalPid demangledName shortName"
_SHAPE = "registersPerThread gridX gridY gridZ blockX blockY blockZ"
_RANGE = "start end eventType rangeId category color text globalTid endGlobalTid textId domainId"
_COPY = "start end deviceId contextId streamId correlationId globalPid bytes copyKind"

SCHEMAS = {
    "2022.2": {
        "StringIds": "id value",
        "CUPTI_ACTIVITY_KIND_KERNEL": f"{_KERNEL} mangledName launchType cacheConfig {_SHAPE} gridId graphNodeId",
        "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_COPY} deprecatedSrcId srcKind dstKind graphNodeId",
        "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue callchainId",
        "NVTX_EVENTS": f"{_RANGE} uint64Value jsonTextId jsonText",
        "TARGET_INFO_GPU": "vmId id name cuDevice",
        "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime localTime",
    },
    "2026.4": {
        "StringIds": "id value",
        "CUPTI_ACTIVITY_KIND_KERNEL": f"{_KERNEL} mangledName launchType cacheConfig {_SHAPE} graphNodeId graphId",
        "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_COPY} greenContextId srcKind dstKind copyCount",
        "CUPTI_ACTIVITY_KIND_MEMSET": "start end deviceId contextId streamId correlationId globalPid bytes memKind",
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start end deviceId streamId correlationId globalPid graphId graphExecId",
        "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue callchainId",
        "NVTX_EVENTS": f"{_RANGE} uint64Value jsonTextId jsonText binaryData eventId",
        "TARGET_INFO_GPU": "vmId id name cuDevice",
        "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime localTime systemClockNs",
        "META_DATA_EXPORT": "name value",
    },
}
"""Tables and their columns; what is left out of a row is NULL."""


def global_id(pid: int, tid: int = 0) -> int:
    return VM | pid << 24 | tid


@dataclass
class Export:
    """A database in the making."""

    version: str
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    strings: dict[str, int] = field(default_factory=dict)

    def add(self, table: str, **values: Any) -> None:
        columns = SCHEMAS[self.version][table].split()
        self.rows.setdefault(table, []).append({name: values.get(name) for name in columns})

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 100)

    def kernel(
        self, name: str, start: int, end: int, correlation: int, *, stream: int = 7, pid: int = PID, device: int = 0,
        grid: Sequence[int] = (1, 1, 1), block: Sequence[int] = (1, 1, 1),
    ) -> None:  # fmt: skip
        code = self.string(name)
        self.add(
            "CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, deviceId=device, contextId=1, streamId=stream,
            correlationId=correlation, globalPid=global_id(pid), demangledName=code, shortName=code, mangledName=code,
            gridX=grid[0], gridY=grid[1], gridZ=grid[2], blockX=block[0], blockY=block[1], blockZ=block[2],
        )  # fmt: skip

    def call(self, name: str, start: int, end: int, correlation: int, *, pid: int = PID) -> None:
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, globalTid=global_id(pid, 9),
            correlationId=correlation, nameId=self.string(name), returnValue=0, eventClass=0,
        )  # fmt: skip

    def range(
        self, name: str, start: int, end: int | None, *, kind: int = 59, registered: bool = False, domain: int = 0,
        pid: int = PID,
    ) -> None:  # fmt: skip
        text = {"textId": self.string(name)} if registered else {"text": name}
        self.add(
            "NVTX_EVENTS", start=start, end=end, eventType=kind, globalTid=global_id(pid, 9), domainId=domain,
            eventId=len(self.rows.get("NVTX_EVENTS", ())), **text,
        )  # fmt: skip

    def write(self, path: Path) -> Path:
        path.unlink(missing_ok=True)
        self.rows["StringIds"] = [{"id": code, "value": text} for text, code in self.strings.items()]
        with closing(sqlite3.connect(path)) as database:
            for table, rows in self.rows.items():  # tables without rows are not made
                names = SCHEMAS[self.version][table].split()
                quoted = ", ".join(f'"{name}"' for name in names)
                database.execute(f"CREATE TABLE {table} ({quoted})")
                values = [[row[name] for name in names] for row in rows]
                database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", values)
            database.commit()
        return path


def retold(trace: Path, version: str) -> Export:
    """The events of a Kineto trace, as nsys with ``emit_nvtx`` would have recorded them."""
    export = Export(version)
    export.add("TARGET_INFO_GPU", vmId=VM, id=0, name="NVIDIA H100", cuDevice=0)
    events = json.loads(trace.read_text(), parse_float=Decimal)["traceEvents"]
    origin = min(_ns(event["ts"]) for event in events) - SESSION_NS
    export.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=origin)
    for number, event in enumerate(events):
        start = _ns(event["ts"]) - origin
        end, args = start + _ns(event["dur"]), event["args"]
        if event["cat"] == "kernel":
            grid, block = args["grid"], args["block"]
            export.kernel(event["name"], start, end, args["correlation"], stream=args["stream"], grid=grid, block=block)
        elif event["cat"] == "cuda_runtime":
            export.call(f"{event['name']}_v7000", start, end, args["correlation"])
        else:  # what emit_nvtx writes of operators and of record_function
            suffix = "" if re.match("ProfilerStep", event["name"]) else f", op_id = {number}"
            export.range(event["name"] + suffix, start, end, registered=number % 2 == 0)
    return export


def _ns(microseconds: Decimal | int) -> int:
    return int(Decimal(microseconds) * 1000)
