"""Programs of one host thread and some streams, run by rules so simple that every what-if can be run too.

:func:`run` plays a program; :func:`events` writes down what happened as Kineto does. All times are nanoseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

CALL, LATENCY, GAP, CROSS, RETURN = 2_000, 5_000, 1_000, 1_500, 3_000
"""What a call takes, a launch into an empty queue, a stream from one kernel to the next, an event from one stream to
another, and the device's end to the return of a call that waited for it.
"""
MAIN, SIDE = 7, 20


class Launch(msgspec.Struct, frozen=True):
    """A kernel of ``ns``."""

    stream: int
    ns: int
    name: str = "small"

    @property
    def communicates(self) -> bool:
        return self.name.startswith("nccl")


class Cpu(msgspec.Struct, frozen=True):
    """The host computes."""

    ns: int


class Wait(msgspec.Struct, frozen=True):
    """``stream`` waits for what ``source`` holds now."""

    source: int
    stream: int


class Sync(msgspec.Struct, frozen=True):
    """The host waits for the device."""


Program = Sequence[Launch | Cpu | Wait | Sync]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is otherwise in a what-if. No kernel starts before ``since``."""

    communication_free: bool = False
    launches_free: bool = False
    host_fast: bool = False
    no_sync: bool = False
    fast: str = ""
    since: int = 0


@dataclass(kw_only=True)
class Course:
    """What happened: kernels with their launch's number, calls, and which call waited for which record."""

    kernels: list[tuple[Launch, int, int, int]] = field(default_factory=list)
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    waits: list[tuple[int, Wait, int]] = field(default_factory=list)

    @property
    def start(self) -> int:
        return min(start for _, _, start, _ in self.kernels)

    @property
    def end(self) -> int:
        return max(end for _, _, _, end in self.kernels)


def run(program: Program, rules: Rules = Rules()) -> Course:
    """Play a program."""
    course, host = Course(), 0
    share = 0 if rules.launches_free else 0.5 if rules.host_fast else 1
    call, latency = round(share * CALL), round(share * LATENCY)
    free: dict[int, int] = {}
    awaited: dict[int, list[int]] = {}
    for op in program:
        begin, number = host, len(course.calls)
        if isinstance(op, Cpu):
            host += round(share * op.ns) if course.calls else op.ns  # a trace begins with the first call
            continue
        host += call
        if isinstance(op, Launch):
            ready = [rules.since, host + latency, *(end + CROSS for end in awaited.pop(op.stream, ()))]
            start = max(ready + ([free[op.stream] + GAP] if op.stream in free else []))
            free[op.stream] = start + _length(op, rules)
            course.kernels.append((op, number, start, free[op.stream]))
            course.calls.append(("cudaLaunchKernel", begin, host))
        elif isinstance(op, Wait):
            course.calls += [("cudaEventRecord", begin, host), ("cudaStreamWaitEvent", host, host + call)]
            host += call
            course.waits.append((number + 1, op, number))
            if op.source in free:
                awaited.setdefault(op.stream, []).append(free[op.source])
        else:
            if free and not rules.no_sync:
                host = max(host, max(free.values()) + RETURN)
            course.calls.append(("cudaDeviceSynchronize", begin, host))
    return course


def _length(op: Launch, rules: Rules) -> int:
    if op.communicates and rules.communication_free:
        return 0
    return op.ns - op.ns // 2 if op.name == rules.fast else op.ns


def events(course: Course, *, recorded: bool = True) -> list[dict[str, Any]]:
    """As Kineto writes it; with ``recorded``, what waits for what too."""
    made = [
        _event("cuda_runtime", name, begin, end, tid=1, correlation=number + 1)
        for number, (name, begin, end) in enumerate(course.calls)
    ]
    made += [
        _event("kernel", op.name, start, end, tid=op.stream, device=0, stream=op.stream, correlation=number + 1)
        for op, number, start, end in course.kernels
    ]
    if not recorded:
        return made
    for number, op, record in course.waits:
        _, begin, end = course.calls[number]
        made.append(
            _event("cuda_sync", "Stream Wait Event", begin, end, tid=op.stream, device=0, stream=op.stream,
                   correlation=number + 1, wait_on_stream=op.source, wait_on_cuda_event_record_corr_id=record + 1)
        )  # fmt: skip
    for number, (name, begin, end) in enumerate(course.calls):
        if name == "cudaDeviceSynchronize":
            made.append(
                _event("cuda_sync", "Context Sync", begin, end, tid=-1, device=0, stream=-1, correlation=number + 1)
            )
    return made


def _event(cat: str, name: str, start: int, end: int, *, tid: int, **args: Any) -> dict[str, Any]:
    ns = {"ts": f"+{start / 1000}", "dur": (end - start) / 1000}
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 7 if cat == "cuda_runtime" else 0, "tid": tid, **ns, "args": args,
    }  # fmt: skip


PRELUDE: Program = (
    *(op for _ in range(6) for op in (Cpu(50_000), Launch(MAIN, 10_000))), *(Launch(MAIN, 100_000) for _ in range(7)),
    Sync(), *(op for _ in range(6) for op in (Launch(MAIN, 200_000), Wait(MAIN, SIDE), Launch(SIDE, 10_000))), Sync(),
    *(op for _ in range(6) for op in (Launch(MAIN, 100_000), Sync())),
)  # fmt: skip
"""Shows what each kind of dependency costs often enough to be told by the median."""
