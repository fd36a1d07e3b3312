"""Traces made by hand: an FSDP-like step on a GPU, and one of gloo on a CPU, with their figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from refshard.analysis.analyse import Analysis
from refshard.analysis.collectives import collective_figures, unit_figures
from refshard.analysis.figures import (
    CopyOverhead,
    GiveWay,
    MemoryPoint,
    MessageFigures,
    RankWait,
    ReduceWait,
    StepFigures,
    TraceFigures,
    TraceWarning,
)
from refshard.analysis.jobs import Identity
from refshard.analysis.overlap import breakdowns
from refshard.events.timeline import KINDS, UNKNOWN, Collective, Kind, Meaning, Spans, Timeline, Window
from refshard.report.page import as_page
from refshard.report.trace.answer import trace_answer

US, MS = 1000, 1_000_000
WAITS = ((3, 4200, 17), (1, 900, 4))
FEW = "Few steps were recorded: trace 5 or more."
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_tn_align8>(Params)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
PREP = "void at::native::chunk_cat_cuda_kernel<float, c10::BFloat16>(c10::BFloat16**)"
HOSTILE = "</script><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>\x00\x1f"
"""A name that attacks whoever shows it."""


@dataclass
class Maker:
    """Rows of a timeline in the making."""

    rows: list[tuple[int, int, Kind, str, str, int, int, int, int]] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    units: list[str] = field(default_factory=list)

    def add(
        self, kind: Kind, lane: str, name: str, start: int, end: int, *,
        launch: int = UNKNOWN, step: int = UNKNOWN, unit: str | None = None, under: int = 0,
    ) -> int:  # fmt: skip
        """One span; its end."""
        if unit is not None and unit not in self.units:
            self.units.append(unit)
        code = UNKNOWN if unit is None else self.units.index(unit)
        self.rows.append((start, end, kind, lane, name, launch, step, code, int(under)))
        return end

    def collective(
        self, op: str, lane: str, name: str, start: int, end: int, *, step: int, unit: str | None = None
    ) -> int:
        """One collective, with its span; its end."""
        under = Meaning.REDUCE if op == "reduce_scatter" else Meaning.ALL_GATHER
        launch = start - 40 * US
        self.add(Kind.COMM, lane, name, start, end, launch=launch, step=step, unit=unit, under=under)
        self.collectives.append(Collective(
            op=op, bytes=436_207_616, step=step, group="default_pg", group_size=8, dtype="bf16", unit=unit, lane=lane,
            launched=launch, start=start, end=end,
        ))  # fmt: skip
        return end

    def timeline(self, windows: tuple[Window, ...], rank: int, *, on_device: bool) -> Timeline:
        """What was added, as columns."""
        rows = sorted(self.rows, key=lambda row: row[:2])
        lanes = {name: place for place, name in enumerate(dict.fromkeys(row[3] for row in rows))}
        names = {name: place for place, name in enumerate(dict.fromkeys(row[4] for row in rows))}
        starts, ends, launches = (np.array([row[i] for row in rows], np.int64) for i in (0, 1, 5))
        code = np.array([names[row[4]] for row in rows], np.int32)
        spans = Spans(
            starts=starts, ends=ends, launches=launches, queued=launches, names=code, operators=code, signatures=code,
            kinds=np.array([KINDS.index(row[2]) for row in rows], np.int8),
            lanes=np.array([lanes[row[3]] for row in rows], np.int32),
            steps=np.array([row[6] for row in rows], np.int32),
            units=np.array([row[7] for row in rows], np.int32),
            under=np.array([row[8] for row in rows], np.int16),
            lane_names=tuple(lanes), name_table=tuple(names), unit_names=tuple(self.units),
        )  # fmt: skip
        collectives = tuple(sorted(self.collectives, key=lambda c: c.start or 0))
        return Timeline(rank=rank, windows=windows, spans=spans, collectives=collectives, on_device=on_device)


def gpu(*, rank: int = 0, layers: int = 24, kernels: int = 12, steps: int = 3, slow_comm: float = 1.0) -> Timeline:
    """FSDP-like: compute on stream 7, collectives on stream 20, prefetched by one; ``kernels`` per layer and pass."""
    maker, windows, now = Maker(), [], 1_000_000_000_000
    for step in range(steps):
        begin = now
        end = _gpu_step(maker, step, begin + 900 * US, layers, kernels, slow_comm * (1 + 0.1 * step))
        now = end + 150 * US
        windows.append(Window(step=step, start=begin, end=now))
    return maker.timeline(tuple(windows), rank, on_device=True)


def _gpu_step(maker: Maker, step: int, now: int, layers: int, kernels: int, slow_comm: float) -> int:
    gather, reduce = int(700 * US * slow_comm), int(1100 * US * slow_comm)
    names, comm, ready = [f"model.layers.{n}" for n in range(layers)], now, dict[str, int]()

    def gathered(unit: str, after: int) -> int:
        nonlocal comm
        begin = max(comm, after) + 6 * US
        comm = maker.collective("all_gather", "stream 20", GATHER, begin, begin + gather, unit=unit, step=step)
        return comm

    ready[names[0]] = gathered(names[0], now)
    for place, unit in enumerate(names):
        now = max(now, ready[unit])
        if place + 1 < layers:
            ready[names[place + 1]] = gathered(names[place + 1], now)
        now = _compute(maker, step, unit, now, kernels, 800 * US // kernels, Meaning.FORWARD)
    ready = {names[-1]: now}
    for place in range(layers - 1, -1, -1):
        unit = names[place]
        now = max(now, ready[unit])
        if place:
            ready[names[place - 1]] = gathered(names[place - 1], now)
        now = _compute(maker, step, unit, now, 2 * kernels, 1700 * US // (2 * kernels), Meaning.BACKWARD)
        prepared = maker.add(
            Kind.PREP, "stream 7", PREP, now + 5 * US, now + 65 * US,
            launch=now - 30 * US, step=step, unit=unit, under=Meaning.REDUCE | Meaning.BACKWARD,
        )  # fmt: skip
        begin = max(comm, prepared) + 8 * US
        comm = maker.collective("reduce_scatter", "stream 20", REDUCE, begin, begin + reduce, unit=unit, step=step)
        now = prepared
    now = max(now, comm) + 20 * US
    for _ in range(8):
        now = maker.add(
            Kind.COMPUTE, "stream 7", ELEMENTWISE, now, now + 120 * US,
            launch=now - 100 * US, step=step, under=Meaning.OPTIMIZER,
        ) + 4 * US  # fmt: skip
    return maker.add(Kind.COPY, "stream 7", "Memcpy DtoH (Device -> Pageable)", now, now + 3 * US, launch=now - 5 * US)


def _compute(maker: Maker, step: int, unit: str, now: int, kernels: int, each: int, phase: Meaning) -> int:
    for n in range(kernels):
        small = n % 3 == 2
        name = ELEMENTWISE if small else GEMM
        # Every eighth layer's first kernel is launched late: the device waits for the host there.
        late = n == 0 and unit.endswith(("4", "2"))
        begin = now + (180 * US if late else 1 * US if each > 8 * US else each // 8)
        length = each // 4 if small else each
        launch = begin - (5 * US if late else 300 * US)
        now = maker.add(
            Kind.COMPUTE, "stream 7", name, begin, begin + length, launch=launch, step=step, unit=unit, under=phase
        )
    return now


def cpu(*, rank: int = 0, layers: int = 6, steps: int = 2) -> Timeline:
    """Like gloo: operators that call others on the main thread, collectives on run-loop threads, no launches."""
    maker, windows, now = Maker(), [], 5_000_000_000
    for step in range(steps):
        begin = now
        for phase, meaning in (("forward", Meaning.FORWARD), ("backward", Meaning.BACKWARD)):
            order = range(layers) if phase == "forward" else range(layers - 1, -1, -1)
            for layer in order:
                unit = f"layers.{layer}"
                known: dict[str, Any] = {"step": step, "unit": unit, "under": meaning}
                lane, length = f"gloo {4 + layer % 2}", (700 + 90 * layer) * US
                if phase == "forward":
                    maker.collective("all_gather", lane, "gloo:all_gather", now, now + length, unit=unit, step=step)
                for n in range(4):
                    start = now + (100 if n or phase == "backward" else 400) * US
                    now = start + 320 * US
                    maker.add(Kind.COMPUTE, "main", "aten::linear", start, now, **known)
                    maker.add(Kind.COMPUTE, "main", "aten::addmm", start + 20 * US, now - 20 * US, **known)
                if phase == "backward":
                    maker.collective("all_to_all", lane, "gloo:all_to_all", now, now + length, unit=unit, step=step)
        now += 1500 * US
        windows.append(Window(step=step, start=begin, end=now))
    maker.rows = [(*row[:5], UNKNOWN, *row[6:]) for row in maker.rows]
    return maker.timeline(tuple(windows), rank, on_device=False)


def figures(timeline: Timeline, *, file: str = "rank0.json.gz", job: int = 0, world_size: int = 8) -> TraceFigures:
    """What an analysis would find in a made timeline."""
    spans = timeline.spans
    starts = np.array([spans.starts.min(), *(w.start for w in timeline.windows)], np.int64)
    ends = np.array([spans.ends.max(), *(w.end for w in timeline.windows)], np.int64)
    whole, *parts = breakdowns(timeline, starts, ends)
    giveway = GiveWay(index=0.012, lost_ns=400 * US, stretch=1.7, reduces=24, samples=12, baseline="calibration")
    if not timeline.on_device:
        giveway = GiveWay(reason="no preparatory kernels")
    copies = CopyOverhead(copy_in_ns=300 * US, copy_out_ns=0, exposed_ns=100 * US, hidden_ns=200 * US)
    wait = ReduceWait(count=24, host_ns=5000 * US, device_ns=900 * US if timeline.on_device else None)
    return TraceFigures(
        file=file, job=job, rank=timeline.rank, world_size=world_size,
        backend="nccl" if timeline.on_device else "gloo",
        device="NVIDIA H100 80GB HBM3" if timeline.on_device else "cpu",
        events=len(spans), whole=whole, giveway=giveway, copies=copies, reduce_wait=wait,
        steps=tuple(
            StepFigures(step=w.step, start_ns=w.start, breakdown=part, giveway=giveway, copies=copies, reduce_wait=wait)
            for w, part in zip(timeline.windows, parts)
        ),
        units=unit_figures(timeline), collectives=collective_figures(timeline),
        waits_for=tuple(RankWait(rank=r, waited_ns=us * US, collectives=n) for r, us, n in WAITS),
        memory=_memory(timeline),
        warnings=(TraceWarning(code="few-steps", message=FEW, count=len(timeline.windows)),),
    )  # fmt: skip


def made(
    *, span: int = 100, compute: int = 60, comm: int = 50, exposed: int = 20, host: int | None = 5,
    dependency: int | None = 10, call: int = 0, lost: int = 1, copies: int = 0, lone: int = 0, **others: Any,
) -> TraceFigures:  # fmt: skip
    """Two equal steps, times in ms; 5 ms of other work next to compute, communication and 15 ms of idle."""
    base = figures(SMALL)
    part = msgspec.structs.replace(
        base.whole, span_ns=span * MS, busy_ns=(span - 15) * MS, compute_ns=compute * MS, comm_ns=comm * MS,
        exposed_ns=exposed * MS, idle_ns=15 * MS, idle_launch_ns=None if host is None else host * MS,
        idle_call_ns=None if host is None else call * MS, idle_back_to_back_ns=None if host is None else 0,
        idle_dependency_ns=None if dependency is None else dependency * MS,
        idle_unknown_ns=(15 - (host or 0) - call - (dependency or 0)) * MS, lone_copy_ns=lone * MS,
    )  # fmt: skip
    step = msgspec.structs.replace(
        base.steps[0], breakdown=part, giveway=msgspec.structs.replace(base.giveway, lost_ns=lost * MS),
        copies=msgspec.structs.replace(base.copies, exposed_ns=copies * MS),
    )  # fmt: skip
    return msgspec.structs.replace(base, **{"steps": (step, step), "whole": part, "waits_for": (), **others})


def message(**others: Any) -> MessageFigures:
    """Six all-reduces of 16 MiB inside a node."""
    known = {
        "op": "all_reduce", "group": "3 [0-7]", "description": "mesh_tp", "group_size": 8, "nodes": 1, "count": 6,
        "bytes": 96 * 2**20, "least_bytes": 2**24, "most_bytes": 2**24, "exposed_ns": 18 * MS, "waiting_ns": None,
        "bus_bandwidth": 3.5e9, "transfer_bandwidth": None, "largest_bandwidth": 4e9, "link_bandwidth": 300e9,
        "is_latency_bound": False,
    }  # fmt: skip
    return MessageFigures(**{**known, **others})


def _memory(timeline: Timeline) -> tuple[MemoryPoint, ...]:
    first, gib = timeline.windows[0].start, 2**30
    return tuple(
        MemoryPoint(device="cuda:0", ns=first + n * 500 * US, bytes=int((20 + 8 * abs((n % 80) - 40) / 40) * gib))
        for n in range(200)
    )


def trace(
    folder: Path, timeline: Timeline, *, file: str | None = None, job: int = 0, content: bytes | None = None
) -> Analysis:
    """A made timeline with its figures and a file that stands for its trace."""
    name = file or f"rank{timeline.rank}.json.gz"
    path = folder / name.replace("/", "_")
    path.write_bytes(content if content is not None else bytes.fromhex("1f8b") + name.encode() * 500)
    return analysis(figures(timeline, file=name, job=job), timeline, path)


def analysis(figures: TraceFigures, timeline: Timeline | None = None, path: Path = Path("trace.json")) -> Analysis:
    """An analysis with these figures."""
    identity = Identity(
        path=path, rank=figures.rank, world_size=figures.world_size, backend=figures.backend, start=0, end=0, facts=""
    )
    return Analysis(figures=figures, identity=identity, kept=timeline)


def page(analyses: Sequence[Analysis]) -> str:
    """The page about these traces."""
    return "".join(as_page(trace_answer(analyses), product="trace", command="refshard trace"))


def renamed(timeline: Timeline, name: str) -> Timeline:
    """The same with every span, unit, lane and group of that name."""
    spans = replace(
        timeline.spans,
        name_table=tuple(name for _ in timeline.spans.name_table),
        unit_names=tuple(f"{name}{n}" for n in range(len(timeline.spans.unit_names))),
        lane_names=tuple(f"{name}{n}" for n in range(len(timeline.spans.lane_names))),
    )
    collectives = tuple(
        replace(c, lane=f"{name}{timeline.spans.lane_names.index(c.lane or '')}", group=name, op=name, unit=f"{name}0")
        for c in timeline.collectives
    )
    return replace(timeline, spans=spans, collectives=collectives)


SMALL = gpu(layers=4)
