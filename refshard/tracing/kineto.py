"""A Kineto trace file of one rank becomes a :class:`~refshard.timeline.Timeline`.

What a span is spent on follows the definitions in ``docs/metrics.md``. A trace with device events (kernels, copies) is
read by those; one without is a CPU trace, where gloo's run-loop threads communicate and the thread that holds the steps
computes.
"""

import gzip
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from refshard.errors import TraceError
from refshard.timeline import Collective, Kind, Span, Timeline, Window


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: Decimal = Decimal(0)
    dur: Decimal = Decimal(0)
    args: dict[str, Any] = {}

    @property
    def start(self) -> int:
        """Nanoseconds. Kineto writes microseconds with up to three decimals; a float would round them."""
        return int(self.ts * 1000)

    @property
    def end(self) -> int:
        return int((self.ts + self.dur) * 1000)


class _DistributedInfo(msgspec.Struct, frozen=True):
    rank: int = 0


class _Trace(msgspec.Struct, rename={"events": "traceEvents", "distributed": "distributedInfo"}):
    events: list[_Event]
    distributed: _DistributedInfo = _DistributedInfo()


DEVICE_CATEGORIES = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_COMM_KERNEL = re.compile(r"nccl|rccl|nvshmem|deep_ep", re.IGNORECASE)
_COMPUTE_OP = re.compile(r"^(aten::|fsdp::|## Call CompiledFxGraph|Torch-Compiled Region)")
_WAITING = re.compile(r"^refshard::(reduce_scatter|wait)\(")
_STEP = re.compile(r"^ProfilerStep#(\d+)$")
_ELEMENT_BYTES = {
    "double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "int": 4, "unsigned char": 1,
    "signed char": 1, "bool": 1, "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Byte": 1,
}  # fmt: skip
_COLLECTIVE_OPS = {
    # c10d op: (what it is called here, index of the argument that holds the unsharded tensor)
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::allgather_": ("all_gather_list", 0),
}
_NO_COLLECTIVES = frozenset(("c10d::barrier", "c10d::monitored_barrier_"))


def read_timeline(path: Path) -> Timeline:
    """Read one rank's trace (``.json`` or ``.json.gz``).

    Raises:
        TraceError: the file is missing, damaged, no trace, or holds no step.
    """
    trace = _decode(path)
    events = [e for e in trace.events if e.ph == "X"]
    windows, main = _steps(events)
    if not windows:
        raise TraceError(f"{path}: holds no ProfilerStep; call profiler.step() after every training step")
    device = [e for e in events if e.cat.lower() in DEVICE_CATEGORIES]
    spans = _device_spans(device) if device else _cpu_spans(events, main)
    return Timeline(
        rank=trace.distributed.rank,
        windows=windows,
        spans=tuple(sorted(spans, key=lambda s: (s.start, s.end))),
        collectives=tuple(_collectives(events, windows)),
    )


def _decode(path: Path) -> _Trace:
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        return msgspec.json.decode(data, type=_Trace)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (EOFError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise TraceError(f"{path}: truncated or damaged gzip ({error})") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: not a Kineto trace ({error})") from None


def _steps(events: Iterable[_Event]) -> tuple[tuple[Window, ...], tuple[int | str, int | str] | None]:
    """The step windows, and the (process, thread) that they were recorded on."""
    found: dict[int, _Event] = {}
    for event in events:
        # A GPU trace repeats the annotation on the device's side; the host's is the step.
        if (match := _STEP.match(event.name)) and event.cat == "user_annotation":
            found[int(match[1])] = event
    windows = tuple(Window(step=n, start=e.start, end=e.end) for n, e in sorted(found.items()))
    first = next(iter(found.values()), None)
    return windows, None if first is None else (first.pid, first.tid)


def _device_spans(events: Iterable[_Event]) -> Iterable[Span]:
    for event in events:
        yield Span(
            kind=_device_kind(event),
            lane=f"stream {event.args.get('stream', event.tid)}",
            name=event.name,
            start=event.start,
            end=event.end,
        )


def _device_kind(event: _Event) -> Kind:
    if "Collective name" in event.args or _COMM_KERNEL.search(event.name):
        return Kind.COMM
    if event.cat.lower() in ("gpu_memcpy", "gpu_memset"):
        return Kind.COPY
    return Kind.COMPUTE if event.name else Kind.UNCLASSIFIED


def _cpu_spans(events: list[_Event], main: tuple[int | str, int | str] | None) -> Iterable[Span]:
    """Communication: ``gloo:*`` spans. Compute: the main thread's operators outside of waits.

    Autograd's and the hooks' wrappers enclose waits, so only the operators themselves count.
    """
    on_main = sorted((e for e in events if (e.pid, e.tid) == main), key=lambda e: (e.start, -e.end))
    waiting_until = -1
    for event in on_main:
        if _WAITING.match(event.name):
            waiting_until = max(waiting_until, event.end)
        elif event.start >= waiting_until and _COMPUTE_OP.match(event.name):
            yield Span(kind=Kind.COMPUTE, lane="main", name=event.name, start=event.start, end=event.end)
    for event in events:
        if event.name.startswith("gloo:"):
            yield Span(kind=Kind.COMM, lane=f"gloo {event.tid}", name=event.name, start=event.start, end=event.end)


def _collectives(events: list[_Event], windows: tuple[Window, ...]) -> Iterable[Collective]:
    """The collectives that the host issued in each step, in order."""
    element_of = _element_bytes_by_size(events)
    issued = (e for e in events if e.name.startswith("c10d::") and e.name not in _NO_COLLECTIVES)
    for event in sorted(issued, key=lambda e: e.start):
        step = next((w.step for w in windows if w.start <= event.start < w.end), None)
        if step is None:
            continue
        # One that this table does not know must not vanish: it goes by its own name, with its first tensor's bytes.
        op, argument = _COLLECTIVE_OPS.get(event.name, (event.name, 0))
        yield Collective(op=op, bytes=_bytes(event, argument, element_of), step=step)


def _bytes(event: _Event, argument: int, element_of: dict[int, int]) -> int | None:
    dims, types = event.args.get("Input Dims"), event.args.get("Input type")
    if not dims or not types:
        return None
    shapes = dims[argument] if types[argument] == "TensorList" else [dims[argument]]
    numel: int = sum(math.prod(shape) for shape in shapes)
    return numel * (_ELEMENT_BYTES.get(types[argument]) or element_of.get(numel, 4))


def _element_bytes_by_size(events: Iterable[_Event]) -> dict[int, int]:
    """A tensor list hides its dtype: the run loop's span over the same number of elements tells it."""
    found = {}
    for event in events:
        dims, types = event.args.get("Input Dims"), event.args.get("Input type")
        if event.name.startswith("gloo:") and dims and types:
            numel = sum(math.prod(shape) for shape in dims)
            found[numel] = _ELEMENT_BYTES.get(types[0], 4)
    return found
