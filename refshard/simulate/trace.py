"""A simulated step as a :class:`~refshard.timeline.Timeline`, and as a Kineto trace that says the same.

The host is taken to run ahead: it launches everything, one item a microsecond, before the first item starts, and its
step begins at 0. Lanes become streams. All ranks do the same, so one rank stands for all.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from refshard.simulate.clock import Schedule
from refshard.simulate.pricing import Call
from refshard.simulate.program import Item, Lane
from refshard.specs.cluster import ClusterSpec
from refshard.specs.hardware import Dtype
from refshard.timeline import KINDS, UNKNOWN, Collective, Meaning, Spans, Timeline, Window

STREAMS: dict[Lane, int] = {"compute": 7, "gather": 20, "reduce": 22, "combine": 24}
LAUNCH_NS = 1000
_LABELS: dict[str, tuple[str, Meaning]] = {
    "all_gather": ("all_gather", Meaning.ALL_GATHER | Meaning.COPY_IN),
    "copy own part": ("all_gather", Meaning.ALL_GATHER | Meaning.COPY_IN),
    "reduce_scatter": ("reduce_scatter", Meaning.REDUCE | Meaning.WAIT),
    "divide": ("reduce_scatter", Meaning.REDUCE | Meaning.WAIT),
    "all_reduce": ("all_reduce", Meaning.REDUCE),
    "scale": ("all_reduce", Meaning.REDUCE),
    "copy in": ("copy_in", Meaning.REDUCE | Meaning.COPY_IN),
    "copy out": ("copy_out", Meaning.COPY_OUT),
    "local sum": ("copy_out", Meaning.COPY_OUT),
}
"""Under which label an item is launched, and what that means."""
_STAGES = {"forward": Meaning.FORWARD, "backward": Meaning.BACKWARD, "optimizer": Meaning(0)}
_DTYPES: dict[Dtype, str] = {"fp32": "Float", "bf16": "BFloat16"}
_KINETO = {"all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base", "all_reduce": "allreduce"}
_OPERATOR_DTYPES: dict[Dtype, str] = {"fp32": "float", "bf16": "c10::BFloat16"}


def as_timeline(items: Sequence[Item], times: Schedule) -> Timeline:
    """One step, numbered 0; the device's part of it begins when the host has launched everything."""
    lead = len(items) * LAUNCH_NS
    order = np.lexsort((times.ends, times.starts))
    rows = [items[i] for i in order]
    names, units = _codes(item.name for item in rows), _codes(item.unit for item in rows if item.unit)
    lanes = _codes(_lane_name(item) for item in rows)
    name_codes = np.array([names[item.name] for item in rows], np.int32)
    spans = Spans(
        starts=lead + times.starts[order],
        ends=lead + times.ends[order],
        kinds=np.array([KINDS.index(item.kind) for item in rows], np.int8),
        lanes=np.array([lanes[_lane_name(item)] for item in rows], np.int32),
        names=name_codes,
        operators=name_codes,
        launches=order * LAUNCH_NS,
        steps=np.zeros(len(rows), np.int32),
        units=np.array([units[item.unit] if item.unit else UNKNOWN for item in rows], np.int32),
        under=np.array([_meaning(item) for item in rows], np.int16),
        signatures=name_codes,
        lane_names=tuple(lanes),
        name_table=tuple(names),
        unit_names=tuple(units),
        signature_names=tuple(names),
    )
    collectives = (_collective(spans, row, item) for row, item in enumerate(rows) if item.call)
    return Timeline(
        rank=0,
        windows=(Window(step=0, start=lead, end=lead + times.length),),
        host_windows=(Window(step=0, start=0, end=lead + times.length),),
        spans=spans,
        collectives=tuple(sorted(collectives, key=lambda one: one.launched or 0)),
        on_device=True,
    )


def as_kineto(items: Sequence[Item], times: Schedule, cluster: ClusterSpec) -> str:
    """The same step as the text of a Kineto trace."""
    lead = len(items) * LAUNCH_NS
    events = [_event("user_annotation", "ProfilerStep#0", 0, lead + times.length)]
    for index, item in enumerate(items):
        events += _events(item, index, lead + int(times.starts[index]), int(times.ends[index] - times.starts[index]))
    about = {"rank": 0, "world_size": cluster.world_size, "backend": cluster.library}
    trace = {"schemaVersion": 1, "distributedInfo": about, "refshard": "simulated", "traceEvents": events}
    return msgspec.json.encode(trace).decode()


def _events(item: Item, index: int, start: int, ns: int) -> Iterator[dict[str, Any]]:
    """The label, the operator, the launch within both, and the kernel."""
    launch = index * LAUNCH_NS
    link: dict[str, Any] = {"External id": index + 1, "correlation": index + 1}
    if item.name in _LABELS:
        yield _event("user_annotation", f"refshard::{_LABELS[item.name][0]}({item.unit})", launch, 400)
    elif item.stage != "optimizer":
        yield _event("user_annotation", f"refshard::{item.stage}({item.unit})", launch, 1)
        yield _event("user_annotation", f"refshard::leave({item.unit})", launch + 500, 1)
    shapes, message = ({}, {}) if item.call is None else _message(item.call)
    operator = f"c10d::{_KINETO[item.call.op]}_" if item.call else item.name
    yield _event("cpu_op", operator, launch, 200, {"External id": index + 1, **shapes})
    yield _event("cuda_runtime", "cudaLaunchKernel", launch, 100, link)
    name, stream = f"refshard_simulated_{item.name}" if item.call else item.name, STREAMS[item.lane]
    about = {**link, "device": 0, "context": 1, "stream": stream, **message}
    yield {**_event("kernel", name, start, ns, about), "pid": 0, "tid": stream}


def _message(call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
    """A collective's arguments as its operator has them, and as its kernel has them."""
    part = call.numel // call.ranks
    sent = part if call.op == "all_gather" else call.numel
    received = part if call.op == "reduce_scatter" else call.numel
    shapes = {"Input Dims": [[received], [sent]], "Input type": [_OPERATOR_DTYPES[call.dtype]] * 2}
    return shapes, {
        "Collective name": _KINETO[call.op], "In msg nelems": sent, "Out msg nelems": received,
        "Group size": call.ranks, "dtype": _DTYPES[call.dtype], "Process Group Name": _group(call),
    }  # fmt: skip


def _collective(spans: Spans, row: int, item: Item) -> Collective:
    call = item.call
    assert call is not None
    return Collective(
        op=call.op, bytes=call.bytes, step=0, group=_group(call), group_size=call.ranks, dtype=_DTYPES[call.dtype],
        unit=item.unit, lane=_lane_name(item), launched=int(spans.launches[row]), start=int(spans.starts[row]),
        end=int(spans.ends[row]), rows=(row,),
    )  # fmt: skip


def _event(cat: str, name: str, start: int, ns: int, args: dict[str, Any] | None = None) -> dict[str, Any]:
    where = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1}
    return {**where, "ts": _microseconds(start), "dur": _microseconds(ns), "args": args or {}}


def _microseconds(ns: int) -> msgspec.Raw:
    """Kineto's unit with three decimals, of which no float takes any away."""
    return msgspec.Raw(b"%d.%03d" % divmod(ns, 1000))


def _meaning(item: Item) -> Meaning:
    return _LABELS[item.name][1] if item.name in _LABELS else _STAGES[item.stage]


def _group(call: Call) -> str:
    return "replicas" if call.op == "all_reduce" else "shards"


def _lane_name(item: Item) -> str:
    return f"stream {STREAMS[item.lane]}"


def _codes(names: Iterable[str]) -> dict[str, int]:
    return {name: code for code, name in enumerate(dict.fromkeys(names))}
