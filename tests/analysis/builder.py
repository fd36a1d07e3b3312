"""Synthetic traces of a GPU rank, made of parameters from which every figure follows on paper.

:class:`Trace` holds kernels, collectives, labels and steps, and makes of them both a Kineto file and the
:class:`Timeline` that a reader should make of that file. :class:`Training` lays a training run out
in it. All times are nanoseconds.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from refshard.events.timeline import KINDS, UNKNOWN, Collective, Kind, Label, Meaning, Spans, Timeline, Window

BASE_NS = 1_790_857_026_000_000_000
"""A real trace's order of magnitude, where a float would lose nanoseconds."""

COMPUTE_STREAM, GATHER_STREAM, REDUCE_STREAM = 7, 20, 22
NO_MEANING = Meaning(0)
HOST = {"pid": 4242, "tid": 4242}
REDUCE_WAIT = Meaning.REDUCE_WAIT | Meaning.WAIT
PHASES = {
    Meaning.ALL_GATHER: "all_gather", Meaning.COPY_OUT: "all_gather_copy_out", Meaning.REDUCE: "post_backward_reduce",
    REDUCE_WAIT: "post_backward_rs_wait", Meaning.FORWARD: "pre_forward", Meaning.BACKWARD: "pre_backward",
    Meaning.LEAVE: "post_forward",
}  # fmt: skip
"""What FSDP2 calls a phase of this meaning."""
CALL_NS = 2
"""How long a launch takes."""
OPERATIONS = {
    # op: (Kineto's "Collective name", c10d's operator)
    "all_gather": ("_allgather_base", "c10d::_allgather_base_"),
    "reduce_scatter": ("_reduce_scatter_base", "c10d::_reduce_scatter_base_"),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One kernel; with an ``op`` a collective of ``numel`` fp32 elements unsharded."""

    kind: Kind
    name: str
    operator: str
    stream: int
    start: int
    ns: int
    launch: int
    step: int
    unit: str | None = None
    under: Meaning = NO_MEANING
    blocks: int = 1
    op: str | None = None
    numel: int = 0


@dataclass(kw_only=True)
class Trace:
    """What one rank of ``world_size`` did; times count from :data:`BASE_NS`."""

    rank: int = 0
    world_size: int = 2
    works: list[Work] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)

    def timeline(self) -> Timeline:
        works = sorted(self.works, key=lambda w: (w.start, w.start + w.ns))
        names = _codes(n for w in works for n in (w.name, w.operator))
        lanes = _codes(f"stream {w.stream}" for w in works)
        units = _codes(w.unit for w in works if w.unit)
        signatures = _codes(f"{w.name} {w.blocks}" for w in works)
        spans = Spans(
            starts=np.array([BASE_NS + w.start for w in works], np.int64),
            ends=np.array([BASE_NS + w.start + w.ns for w in works], np.int64),
            kinds=np.array([KINDS.index(w.kind) for w in works], np.int8),
            lanes=np.array([lanes[f"stream {w.stream}"] for w in works], np.int32),
            names=np.array([names[w.name] for w in works], np.int32),
            operators=np.array([names[w.operator] for w in works], np.int32),
            launches=np.array([BASE_NS + w.launch for w in works], np.int64),
            queued=np.array([BASE_NS + min(w.launch + CALL_NS, w.start) for w in works], np.int64),
            steps=np.array([w.step for w in works], np.int32),
            units=np.array([units[w.unit] if w.unit else UNKNOWN for w in works], np.int32),
            under=np.array([w.under for w in works], np.int16),
            signatures=np.array([signatures[f"{w.name} {w.blocks}"] for w in works], np.int32), lane_names=tuple(lanes),
            name_table=tuple(names), unit_names=tuple(units), signature_names=tuple(signatures),
        )  # fmt: skip
        return Timeline(
            rank=self.rank,
            windows=tuple(Window(step=w.step, start=BASE_NS + w.start, end=BASE_NS + w.end) for w in self.windows),
            spans=spans,
            collectives=tuple(self._collective(row, work) for row, work in enumerate(works) if work.op),
            labels=tuple(
                Label(meaning=x.meaning, unit=x.unit, start=BASE_NS + x.start, end=BASE_NS + x.end) for x in self.labels
            ),
            on_device=True,
        )

    def _collective(self, row: int, work: Work) -> Collective:
        assert work.op is not None
        return Collective(
            op=work.op, bytes=4 * work.numel, step=work.step, group="0", group_size=self.world_size, dtype="Float",
            unit=work.unit, lane=f"stream {work.stream}", launched=BASE_NS + work.launch, start=BASE_NS + work.start,
            end=BASE_NS + work.start + work.ns, rows=(row,),
        )  # fmt: skip

    def write(self, path: Path) -> Path:
        """The same as Kineto writes it: microseconds with three decimals."""
        events = [_event("user_annotation", f"ProfilerStep#{w.step}", w.start, w.end - w.start) for w in self.windows]
        for x in self.labels:
            name = f"FSDP::{PHASES[x.meaning]} ({x.unit})"
            events.append(_event("user_annotation", name, x.start, x.end - x.start))
        for correlation, work in enumerate(self.works, start=1):
            events += self._events(work, correlation)
        about = {"rank": self.rank, "world_size": self.world_size, "backend": "nccl"}
        head = json.dumps({"schemaVersion": 1, "distributedInfo": about})[:-1]
        path.write_text(f'{head}, "traceEvents": [\n' + ",\n".join(events) + "]}")
        return path

    def _events(self, work: Work, correlation: int) -> list[str]:
        """The operator, the launch within it, and the kernel."""
        link: dict[str, Any] = {"External id": correlation, "correlation": correlation}
        message: dict[str, Any] = {}
        shapes: dict[str, Any] = {}
        if work.op is not None:
            shard = work.numel // self.world_size
            sent, received = (shard, work.numel) if work.op == "all_gather" else (work.numel, shard)
            message = {
                "Collective name": OPERATIONS[work.op][0], "In msg nelems": sent, "Out msg nelems": received,
                "Group size": self.world_size, "dtype": "Float", "Process Group Name": "0",
                "Process Group Description": "default_pg", "Process Group Ranks": str(list(range(self.world_size))),
            }  # fmt: skip
            shapes = {"Input Dims": [[received], [sent]], "Input type": ["float", "float"]}
        device = {**link, "device": 0, "context": 1, "stream": work.stream, "grid": [work.blocks, 1, 1]}
        device |= {"block": [128, 1, 1], **message}
        return [
            _event("cpu_op", work.operator, work.launch - 1, 4, External_id=correlation, **shapes),
            _event("cuda_runtime", "cudaLaunchKernel", work.launch, CALL_NS, **link),
            _event("kernel", work.name, work.start, work.ns, where={"pid": 0, "tid": work.stream}, **device),
        ]


def _codes(names: Iterable[str]) -> dict[str, int]:
    return {name: code for code, name in enumerate(dict.fromkeys(names))}


def _event(cat: str, name: str, start: int, ns: int, where: dict[str, int] = HOST, **args: Any) -> str:
    args = {key.replace("External_id", "External id"): value for key, value in args.items()}
    text = json.dumps({"ph": "X", "cat": cat, "name": name, **where, "args": args})[:-1]
    return f'{text}, "ts": {_microseconds(BASE_NS + start)}, "dur": {_microseconds(ns)}}}'


def _microseconds(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


@dataclass(frozen=True, kw_only=True)
class Training:
    """Steps of a sharded model of ``layers`` equal units, each stretch of time a parameter.

    A step: ``delay`` until the first kernel starts; the first unit's ``gather``; per unit ``copy`` (copy-out) and
    ``forward``, with the next unit's ``gather`` beside it; ``stall``, in which the device waits though all is launched;
    per unit ``backward``, after it two preparatory kernels of ``prep`` each and its ``reduce``, beside the backward of
    the next. There the preparatory kernels take ``stretch`` times as long. Those of the last run alone. Then
    ``optimizer``, and ``tail`` of nothing.
    """

    layers: int = 4
    steps: int = 5
    delay: int = 2000
    gather: int = 3000
    copy: int = 500
    forward: int = 8000
    stall: int = 1500
    rs_wait: int = 5
    backward: int = 20_000
    prep: int = 1000
    stretch: int = 3
    reduce: int = 6000
    optimizer: int = 4000
    tail: int = 700
    numel: int = 1 << 20
    world_size: int = 2

    def __post_init__(self) -> None:
        assert self.gather <= self.forward, "a gather must hide beside one forward"
        assert 2 * self.prep * self.stretch + self.reduce <= self.backward, "so must preparation and reduction"

    @property
    def step_ns(self) -> int:
        """Length of one step; each part named once."""
        forward = self.delay + self.gather + self.layers * (self.copy + self.forward)
        backward = self.layers * self.backward + 2 * self.prep + self.reduce
        return forward + self.stall + backward + self.optimizer + self.tail

    def trace(self, rank: int = 0) -> Trace:
        trace = Trace(rank=rank, world_size=self.world_size)
        for step in range(self.steps):
            _Step(self, trace, step).lay_out()
        return trace


class _Step:
    """One step of a :class:`Training`; everything is launched, 10 ns apart, before the first kernel starts."""

    def __init__(self, plan: Training, trace: Trace, step: int) -> None:
        self.plan, self.trace, self.step = plan, trace, step
        self.begin = step * plan.step_ns
        self.clock = self.begin + plan.delay // 2

    def lay_out(self) -> None:
        plan, units = self.plan, [f"layers.{i}" for i in range(self.plan.layers)]
        forward_at = at = self.begin + plan.delay
        for i, unit in enumerate(units):
            # The first gather is waited for, the others run beside the forward of the unit before.
            gather_at, gathered = (at, at + plan.gather) if i == 0 else (forward_at, at)
            self.collective("all_gather", GATHER_STREAM, gather_at, plan.gather, unit, Meaning.ALL_GATHER)
            self.kernel(Kind.COPY, "split_with_sizes_copy", gathered, plan.copy, unit, Meaning.COPY_OUT)
            self.label(Meaning.FORWARD, unit)
            forward_at = gathered + plan.copy
            self.kernel(Kind.COMPUTE, "gemm_forward", forward_at, plan.forward, unit, phase=Meaning.FORWARD)
            self.label(Meaning.LEAVE, unit)
            at = forward_at + plan.forward
        self.label(REDUCE_WAIT, units[-1], plan.rs_wait)
        at += plan.stall
        for unit in reversed(units):
            self.label(Meaning.BACKWARD, unit)
            self.kernel(Kind.COMPUTE, "gemm_backward", at, plan.backward, unit, phase=Meaning.BACKWARD)
            self.label(Meaning.LEAVE, unit)
            at += plan.backward
            prep = plan.prep * (1 if unit == units[0] else plan.stretch)
            self.kernel(Kind.PREP, "cast", at, prep, unit, Meaning.REDUCE, REDUCE_STREAM)
            self.kernel(Kind.PREP, "chunk_cat", at + prep, prep, unit, Meaning.REDUCE, REDUCE_STREAM)
            self.collective("reduce_scatter", REDUCE_STREAM, at + 2 * prep, plan.reduce, unit, Meaning.REDUCE)
        at += 2 * plan.prep + plan.reduce
        self.kernel(Kind.COMPUTE, "adam", at, plan.optimizer)
        end = self.begin + plan.step_ns
        assert at + plan.optimizer + plan.tail == end
        self.trace.windows.append(Window(step=self.step, start=self.begin, end=end))

    def label(self, meaning: Meaning, unit: str, ns: int = 4) -> None:
        self.trace.labels.append(Label(meaning=meaning, unit=unit, start=self.clock, end=self.clock + ns))
        self.clock += 10

    def kernel(
        self, kind: Kind, name: str, start: int, ns: int, unit: str | None = None, under: Meaning = NO_MEANING,
        stream: int = COMPUTE_STREAM, phase: Meaning = NO_MEANING, **collective: Any,
    ) -> None:  # fmt: skip
        """Launch a kernel now, within a label of its own where it is ``under`` one, to run at ``start``.

        ``phase`` is the unit's forward or backward, which began before.
        """
        operator = collective.pop("operator", f"aten::{name}")
        if under and unit:
            self.trace.labels.append(Label(meaning=under, unit=unit, start=self.clock, end=self.clock + 9))
        self.trace.works.append(
            Work(kind=kind, name=f"{name}_kernel", operator=operator, stream=stream, start=start, ns=ns, unit=unit,
                 launch=self.clock + 2, step=self.step, under=under | phase, **collective)
        )  # fmt: skip
        self.clock += 10

    def collective(self, op: str, stream: int, start: int, ns: int, unit: str, under: Meaning) -> None:
        self.kernel(Kind.COMM, f"nccl_{op}", start, ns, unit, under, stream, op=op, numel=self.plan.numel,
                    operator=OPERATIONS[op][1])  # fmt: skip
