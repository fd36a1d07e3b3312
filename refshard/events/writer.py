"""The events of a trace as a Kineto file, which :mod:`~refshard.events.reader` reads back unchanged."""

import json
from collections.abc import Iterator

from refshard.events.table import ANNOTATION, HOST, LAUNCH, MEMCPY, MEMSET, SYNC_KINDS, TraceFile

_HOST_CATEGORIES = {HOST: "cpu_op", ANNOTATION: "user_annotation", LAUNCH: "cuda_runtime"}
_COPIES = {MEMCPY: "gpu_memcpy", MEMSET: "gpu_memset"}


def as_kineto(trace: TraceFile) -> str:
    """The JSON text. The columns keep no times of waits (``cuda_sync``): each is a moment where its call begins."""
    head = json.dumps(trace.metadata)
    events = (*_tracks(trace), *_host(trace), *_frames(trace), *_device(trace), *_syncs(trace), *_memory(trace))
    return f'{head[:-1]}, "traceEvents": [\n' + ",\n".join(events) + "\n]}\n"


def _tracks(trace: TraceFile) -> Iterator[str]:
    """Names of the rows that a viewer shows."""
    rank = trace.metadata.get("distributedInfo", {}).get("rank")
    for pid, tid in trace.threads[:1]:
        yield _named("process_name", pid, tid, f"rank {rank}: host")
    for device, stream in trace.lanes:
        yield _named("process_name", device, stream, f"rank {rank}: device {device}")
        yield _named("thread_name", device, stream, f"stream {stream}")


def _named(what: str, pid: str, tid: str, name: str) -> str:
    args = json.dumps({"name": name})
    return f'{{"ph": "M", "name": "{what}", "pid": {_id(pid)}, "tid": {_id(tid)}, "ts": 0, "args": {args}}}'


def _host(trace: TraceFile) -> Iterator[str]:
    host, names = trace.host, [json.dumps(name) for name in trace.names]
    threads = [f'"pid": {_id(pid)}, "tid": {_id(tid)}' for pid, tid in trace.threads]
    columns = (host.starts, host.ends, host.categories, host.names, host.threads, host.correlations, host.externals,
               host.operands)  # fmt: skip
    for row, (start, end, category, name, thread, correlation, external, operands) in enumerate(
        zip(*(column.tolist() for column in columns))
    ):
        if row in trace.host_args:
            args = json.dumps(trace.host_args[row])
        else:
            known = [f'"External id": {external}'] if external >= 0 else []
            known += [f'"correlation": {correlation}'] if correlation >= 0 else []
            if operands >= 0:
                one = trace.operands[operands]
                found = (("Dims", one.dims), ("Strides", one.strides), ("type", one.types))
                known += [f'"Input {key}": {text.decode()}' for key, text in found if text]
                known += [f'"Concrete Inputs": {one.values.decode()}'] if one.values else []
            args = f"{{{', '.join(known)}}}"
        yield _event(_HOST_CATEGORIES[category], names[name], threads[thread], start, end, args)


def _frames(trace: TraceFile) -> Iterator[str]:
    frames = trace.frames
    columns = (frames.starts, frames.ends, frames.names, frames.threads)
    for start, end, name, thread in zip(*(column.tolist() for column in columns)):
        pid, tid = trace.threads[thread]
        where = f'"pid": {_id(pid)}, "tid": {_id(tid)}'
        yield _event("python_function", json.dumps(frames.name_table[name]), where, start, end, "{}")


def _device(trace: TraceFile) -> Iterator[str]:
    device, names = trace.device, [json.dumps(name) for name in trace.names]
    columns = (device.starts, device.ends, device.categories, device.names, device.lanes, device.correlations,
               device.externals, device.signatures)  # fmt: skip
    for row, (start, end, category, name, lane, correlation, external, signature) in enumerate(
        zip(*(column.tolist() for column in columns))
    ):
        number, stream = trace.lanes[lane]
        where = f'"pid": {_id(number)}, "tid": {_id(stream)}'
        if row in trace.device_args:
            args = json.dumps(trace.device_args[row])
        else:
            args = f'{{"External id": {external}, "correlation": {correlation}, "device": {_id(number)}, '
            args += f'"stream": {_id(stream)}{_geometry(trace.signatures[signature], trace.names[name])}}}'
        yield _event(_COPIES.get(category, "kernel"), names[name], where, start, end, args)


def _syncs(trace: TraceFile) -> Iterator[str]:
    host, syncs, names = trace.host, trace.syncs, list(SYNC_KINDS)
    calls = host.categories == LAUNCH
    begins = dict(zip(host.correlations[calls].tolist(), host.starts[calls].tolist()))
    columns = (syncs.kinds, syncs.correlations, syncs.devices, syncs.streams, syncs.sources, syncs.records)
    for kind, correlation, device, stream, source, record in zip(*(column.tolist() for column in columns)):
        known = {
            "correlation": correlation, "device": device, "stream": stream, "wait_on_stream": source,
            "wait_on_cuda_event_record_corr_id": record,
        }  # fmt: skip
        at = begins.get(correlation, int(host.starts[0]) if len(host.starts) else 0)
        args = json.dumps({key: value for key, value in known.items() if value != -1 or key == "stream"})
        yield _event("cuda_sync", json.dumps(names[kind]), f'"pid": {device}, "tid": {stream}', at, at, args)


def _geometry(signature: str, name: str) -> str:
    """The grid and the block of a launch, each JSON or empty, from a kernel's signature: ``name grid block``."""
    text = signature.removeprefix(name)[1:]
    if not text.strip():
        return ""
    _, end = json.JSONDecoder().raw_decode(text)
    block = text[end + 1 :]
    return f', "grid": {text[:end]}' + (f', "block": {block}' if block else "")


def _memory(trace: TraceFile) -> Iterator[str]:
    memory = trace.memory
    columns = (memory.times, memory.changes, memory.addresses, memory.allocated, memory.reserved, memory.devices,
               memory.threads)  # fmt: skip
    for at, change, address, allocated, reserved, device, thread in zip(*(column.tolist() for column in columns)):
        pid, tid = trace.threads[thread]
        name = trace.memory_devices[device]
        kind = '"Device Type": 0' if name == "cpu" else f'"Device Type": 1, "Device Id": {name.removeprefix("device ")}'
        known = {"Addr": address, "Total Allocated": allocated, "Total Reserved": reserved}
        found = "".join(f', "{key}": {value}' for key, value in known.items() if value != -1)
        yield (
            f'{{"ph": "i", "s": "t", "name": "[memory]", "pid": {_id(pid)}, "tid": {_id(tid)}, "ts": {_us(at)}, '
            f'"args": {{"Bytes": {change}, {kind}{found}}}}}'
        )


def _event(category: str, name: str, where: str, start: int, end: int, args: str) -> str:
    return (
        f'{{"ph": "X", "cat": "{category}", "name": {name}, {where}, "ts": {_us(start)}, "dur": {_us(end - start)}, '
        f'"args": {args}}}'
    )


def _us(ns: int) -> str:
    """Microseconds with three decimals."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _id(text: str) -> str:
    """A process, thread, device or stream: a number where it is one."""
    return text if text.isdecimal() else json.dumps(text)
