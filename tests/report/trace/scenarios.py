"""Traces with known figures, and what a report says about each: ``tests/goldens`` holds the text."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from refshard.analysis import figures as f
from refshard.analysis.attribution import Attribution, Owner, Work
from refshard.analysis.difference import Unlike, difference
from refshard.commands.trace import memory_snapshots
from refshard.quantities import GIB
from refshard.report import forms
from refshard.report.blocks import Answer, Section
from refshard.report.trace import sections
from refshard.report.trace.difference import Compared, difference_answer
from refshard.report.trace.findings import bound_of, findings
from refshard.report.trace.lanes import drawn_windows, rows_of
from tests.analysis.snapshots import Allocator, write
from tests.report import traces
from tests.report.traces import MS, made, message


def idle(cause: f.Cause, what: str, ms: int, count: int = 1) -> tuple[f.IdleFigures, ...]:
    return (f.IdleFigures(cause=cause, what=what, ns=ms * MS, count=count, longest_ns=9 * MS),)


def split(step: int | None = None, **given: Any) -> f.ExposedSplit:
    known = {
        "exposed_ns": 10 * MS, "transfer_ns": None, "waiting_ns": None, "undivided_ns": 10 * MS, "launch_ns": 2 * MS,
    }  # fmt: skip
    return f.ExposedSplit(step=step, **{**known, **given})


def communicating(
    bound: Any, *messages: f.MessageFigures, steps: int = 2, device: str = "H100", **given: Any
) -> f.TraceFigures:
    known = {
        "whole": split(), "steps": tuple(split(step) for step in range(steps)), "messages": messages or (message(),),
        "bound": bound, "profile": "mi300x", "missing": "the traces of the other ranks are not here", "no_launch": None,
    }  # fmt: skip
    return made(communication=f.CommunicationFigures(**{**known, **given}), device=device)


def exposing(ms: int, waits: dict[int, int], **given: Any) -> f.CommunicationFigures:
    """The exposed communication of two equal steps, with the waiting for each rank, in ms over both."""
    peers = tuple(f.PeerWait(rank=rank, waited_ns=total * MS // 2) for rank, total in waits.items())
    waiting = sum(peer.waited_ns for peer in peers)
    step = split(
        0, exposed_ns=ms * MS, transfer_ns=ms * MS - waiting, waiting_ns=waiting, undivided_ns=0, waits_for=peers
    )
    known = {"messages": (), "bound": None, "profile": None, "missing": None, "no_launch": None, **given}
    return f.CommunicationFigures(whole=step, steps=(step, step), **known)


def collective(**changes: Any) -> Any:
    return replace(made().collectives[0], step=0, exposed_ns=40 * MS, **changes)


def uneven(*lengths: int, rank: int = 0) -> f.TraceFigures:
    """Steps of these lengths in ms; what one is longer than 100 ms by is blocked calls."""
    base, steps = made(exposed=3, rank=rank), []
    for number, length in enumerate(lengths, 4):
        part, more = base.steps[0].breakdown, (length - 100) * MS
        longer = {"span_ns": part.span_ns + more, "idle_ns": part.idle_ns + more, "idle_call_ns": more}
        steps.append(replace(base.steps[0], step=number, breakdown=replace(part, **longer)))
    return replace(base, steps=tuple(steps))


def copied(name: str, ms: int = 100) -> list[f.TraceFigures]:
    return [made(exposed=3, lone=60, lone_copies=(f.LoneCopy(name=name, ns=ms * MS, count=4),))]


def late(*parts: tuple[f.LateCause, int], ranks: int = 2, device: str = "H100", **ratios: Any) -> list[f.TraceFigures]:
    """Ranks of which the others wait 16 of 30 exposed ms for rank 0, for these causes in ms over both steps."""
    found = {
        rank: f.Lateness(
            last=0 if rank else 9, collectives=10, cost_ns=0 if rank else 32 * MS,
            steps=(0, 0) if rank else (16 * MS, 16 * MS), leads=0 if rank else 2, grows=False,
            parts=() if rank else tuple(f.LatePart(cause=cause, ns=ms * MS) for cause, ms in parts),
            **({} if rank else ratios),
        )
        for rank in range(ranks)
    }  # fmt: skip
    first = made(rank=0, lateness=found[0], device=device)
    waiting: dict[str, Any] = {"exposed": 30, "collectives": (), "device": device}
    communication = exposing(30, {0: 32})
    return [first, *(
        made(rank=rank, lateness=found[rank], communication=communication, **waiting) for rank in range(1, ranks)
    )]  # fmt: skip


def mm(**others: Any) -> f.OperatorFigures:
    known: dict[str, Any] = {
        "name": "aten::mm", "kind": "GEMM", "shapes": "[64, 32], [32, 16]", "dtype": "bf16", "calls": 4, "ns": 120 * MS,
        "share": 0.6, "flops": 10**13, "bytes": 10**9, "flops_per_s": 333e12, "of_peak": 0.337, "of_roofline": 0.337,
        "bound": "compute",
    }  # fmt: skip
    return f.OperatorFigures(**{**known, **others})


def worked(device: str = "H100", **others: Any) -> f.TraceFigures:
    """Two steps of 100 ms of work each: 60 % of it GEMMs."""
    known: dict[str, Any] = {
        "steps": 2, "work_ns": 200 * MS, "classes": (
            f.ClassFigures(name="GEMM", count=4, ns=120 * MS, share=0.6),
            f.ClassFigures(name="communication", count=2, ns=50 * MS, share=None),
        ),
        "totals": (f.OperatorTotal(name="aten::mm", kind="GEMM", calls=4, shapes=1, ns=120 * MS, share=0.6),),
        "total_count": 1, "operator_count": 2, "kernel_count": 9, "contention": None, "hardware": "h100-sxm-80gb",
        "operators": (mm(), mm(name="my::op", shapes=None, dtype=None, ns=80 * MS, of_roofline=None, bound=None)),
        "kernels": (f.KernelFigures(name="x" * 300, short="x", kind="GEMM", count=4, ns=120 * MS, share=0.6),),
        "has_shapes": True,
    }  # fmt: skip
    return made(operators=f.OperatorReport(**{**known, **others}), device=device)


def hosted(input_ms: int = 0, **replay: Any) -> f.TraceFigures:
    """Two steps of 100 ms with 30 ms of launch-bound idle time; a host that takes no time gains 25 of them."""
    gains = ((f.LAUNCHES, 25), (f.FAST_HOST, 20), (f.NO_MODES, 6), (f.NO_SYNC, 0))
    what_ifs = tuple(f.WhatIf(what=what, step_ns=(100 - ms) * MS, gain_ns=ms * MS) for what, ms in gains)
    parts = (
        f.HostPart(kind="operators", ns=100 * MS, count=800, most=(("aten::mm", 60 * MS), ("aten::to", 2 * MS))),
        f.HostPart(kind="modes", ns=60 * MS, count=400, most=(("PythonDispatchMode", 60 * MS),)),
        f.HostPart(kind="python", ns=36 * MS, count=0, most=(("train.py(12): step", 36 * MS),)),
        f.HostPart(kind="waits", ns=4 * MS, count=2, most=()),
    )  # fmt: skip
    found = f.WhatIfFigures(
        steps=2, step_ns=100 * MS, replay_error=0.0, waits_recorded=0, waits_inferred=0, only_launches=False,
        what_ifs=what_ifs, order=(), path=f.CriticalPath(parts=(), owners=()),
    )  # fmt: skip
    return made(
        exposed=3, host=30, dependency=5, idle=idle(f.Cause.LAUNCH, "aten::mm", 20, 40),
        what_if=replace(found, **replay),
        host_time=f.HostTime(steps=2, span_ns=200 * MS, launches=400, input_ns=input_ms * MS, parts=parts),
    )  # fmt: skip


def rated() -> f.TraceFigures:
    """Two steps of 100 ms, 95 of them compute: products at 75 % of the roofline, norms at 40 %."""
    classes = (
        f.ClassFigures(name="GEMM", count=4, ns=160 * MS, share=0.8, known_ns=160 * MS, gain_ns=40 * MS,
                       good_gain_ns=2 * MS),
        f.ClassFigures(name="normalisation", count=4, ns=20 * MS, share=0.1, known_ns=20 * MS, gain_ns=12 * MS,
                       good_gain_ns=10 * MS),
        f.ClassFigures(name="optimizer", count=4, ns=10 * MS, share=0.05),
    )  # fmt: skip
    return made(compute=95, exposed=0, copies=4, operators=worked(classes=classes).operators)


SMALL: Mapping[str, Any] = {"exposed": 3, "collectives": ()}
TWO = tuple(collective(op="all_gather", unit=unit) for unit in ("layers.0", "layers.1"))
FINDINGS: Mapping[str, Sequence[f.TraceFigures]] = {
    "communication": [made(collectives=())],
    "waiting for a stream": [made(**SMALL)],
    "launch-bound": [made(**SMALL, host=10, dependency=5)],
    "launch-bound in 40 gaps: launches one by one": [
        made(exposed=3, host=10, dependency=5, idle=idle(f.Cause.LAUNCH, "aten::mm", 20, 40))
    ],
    "launch-bound in 4 gaps: the host does something else": [
        made(exposed=3, host=10, dependency=5, idle=idle(f.Cause.LAUNCH, "aten::mm", 20, 4))
    ],
    "launch-bound without steps": [made(
        steps=(replace(made(exposed=3, host=10, dependency=5).steps[0], step=None),),
        idle=idle(f.Cause.LAUNCH, "aten::mm", 20, 40),
    )],
    "host-bound": [hosted()],
    "input-bound": [hosted(input_ms=25)],
    "launch-bound, and the replay is uncertain": [hosted(replay_error=0.05)],
    "compute-bound, with rooflines": [rated()],
    "between operators of a CPU": [made(**SMALL, host=10, dependency=5, device="cpu")],
    "blocking calls": [made(exposed=3, host=2, dependency=1, call=9, idle=idle(f.Cause.CALL, "cudaFree", 18))],
    "one stream for another": [made(exposed=3, idle=idle(f.Cause.DEPENDENCY, "stream 0 waits for stream 4", 18))],
    "unknown cause": [made(exposed=3, host=2, dependency=1, idle=idle(f.Cause.UNKNOWN, "aten::mm", 18))],
    "unknown without launches": [made(**SMALL, host=None, dependency=None)],
    "give-way": [made(**SMALL, lost=30)],
    "copies of buffers": [made(**SMALL, copies=30)],
    "copies to the device": copied("Memcpy HtoD (Pageable -> Device)"),
    "copies to the host": copied("CopyDeviceToHost"),
    "concurrent fills": copied("Memset (Device)", 130),
    "copies within the device": copied("Memcpy DtoD (Device -> Device)"),
    "compute-bound over two ranks": [made(compute=85), made(compute=95)],
    "small losses": [made(span=10_000, exposed=3, lost=1)],
    "a late rank without a reason": late(),
    "a late rank has slower kernels": late(("slower", 32), ranks=3, same_work=1.3, products=1.3, rest=1.3, flops=1.0),
    "a late rank has a lower clock": late(("slower", 20), ("host", 12), same_work=1.2, products=1.3, rest=1.02),
    "a late rank on a slower CPU": late(("slower", 32), same_work=1.2, device="cpu"),
    "a late rank has more work": late(("work", 30), ("slower", 2), same_work=1.01, flops=1.8),
    "a late rank has more work, of unknown FLOPs": late(("work", 32)),
    "a late rank computes longer": late(("compute", 32)),
    "a late rank's host": late(("host", 32)),
    **{
        f"a late rank: {cause}": late((cause, 32))
        for cause in ("input", "allocator", "copies", "communication", "idle")
    },
    "two late ranks, not here": [made(rank=1, exposed=30, communication=exposing(30, {5: 30, 3: 10}))],
    "less than half is waiting": [made(rank=1, exposed=30, communication=exposing(30, {0: 28}))],
    "concurrent collectives": [made(exposed=30, collectives=TWO)],
    "messages count each nanosecond once": [made(
        exposed=30, collectives=TWO, communication=exposing(30, {}, messages=(message(op="all_gather"),))
    )],
    "one rank of eight": [made(
        exposed=30, collectives=(collective(op="all_reduce", unit=None),),
        communication=communicating("below").communication,
    )],
    **{
        f"{op}{' of shards' if unit else ''}": [made(collectives=(collective(op=op, unit=unit),))]
        for op, unit in (
            ("all_reduce", None), ("all_gather", "layers.0"), ("reduce_scatter", "layers.0"), ("all_to_all", None),
            ("all_to_all", "layers.0"), ("send_recv", None), ("broadcast", None), ("dispatch", None),
            ("exchange", None),
        )
    },
    "a step that warms up": [uneven(400, 100, 100)],
    "long steps in the middle": [uneven(100, 400, 100, 200, 100)],
    "too few steps": [uneven(400, 100)],
    "steps that hardly differ": [uneven(140, 100, 100)],
    "a step that is long on one rank": [uneven(400, 100, 100), uneven(100, 100, 100, rank=1)],
    "several devices": [made(**SMALL, warnings=(
        f.TraceWarning(code="several_devices", message="events of 2 devices are counted together", count=2),
    ))],
}  # fmt: skip
WAITED: Mapping[str, Any] = {
    "transfer_ns": 3 * MS, "waiting_ns": 6 * MS, "undivided_ns": MS,
    "waits_for": (f.PeerWait(rank=5, waited_ns=4 * MS), f.PeerWait(rank=3, waited_ns=2 * MS)),
}  # fmt: skip
BOUNDS = {
    "below the link": communicating("below"),
    "bandwidth": communicating("bandwidth", message(transfer_bandwidth=280e9, nodes=2, description=None)),
    "no profile": communicating("unknown", message(link_bandwidth=None), profile=None),
    "a CPU": communicating("unknown", message(link_bandwidth=None), profile=None, device="cpu"),
    "no rate": communicating("unknown", message(bus_bandwidth=None, group=None, group_size=None, nodes=None)),
    "latency": communicating("latency", message(exposed_ns=5 * MS), message(exposed_ns=15 * MS, is_latency_bound=True)),
    "skew": communicating("skew", steps=0, whole=split(**WAITED)),
    "nothing exposed": communicating(None),
}
STALL = f.HostStall(
    kind=f.Stall.ITEM, call="cudaMemcpyAsync", line=None, operator="aten::_local_scalar_dense", unit=None, thread="7/7",
    copied=None, count=8, host_ns=40 * MS, idle_ns=20 * MS, followed_ns=30 * MS,
)  # fmt: skip


def stalled(*changes: dict[str, Any], steps: int | None = 4, **others: Any) -> f.TraceFigures:
    """Four steps of 100 ms."""
    places = tuple(replace(STALL, **change) for change in changes)
    return made(host_stalls=f.HostStalls(places=places, steps=steps, span_ns=400 * MS, idle_ns=50 * MS), **others)


def freed(calls: int) -> f.TraceFigures:
    """Four steps of 25 kernels each, and memory given back so often."""
    counts = {"hipFree": (20, calls - 20), "hipMalloc": (90,)}
    places = [{"kind": f.Stall.ALLOCATOR, "call": call, "count": n} for call, of in counts.items() for n in of]
    work = f.ClassFigures(name="GEMM", count=100, ns=300 * MS, share=1.0)
    return stalled(*places, operators=worked(steps=4, classes=(work,)).operators)


def slowdown(kind: Any, during: int, alone: int, name: str = "x") -> f.Slowdown:
    return f.Slowdown(name=name, kind=kind, runs=8, beside_ns=during * MS, alone_ns=alone * MS, slower=during > alone)


SLOWED = f.Contention(
    classes=(slowdown("elementwise", 40, 20), slowdown("GEMM", 118, 100), slowdown("copies", 9, 10)),
    kernels=(slowdown("GEMM", 118, 100, "nvjet"),), compared_ns=167, beside_ns=334, shapeless_ns=100,
)  # fmt: skip
REPLAYS = f.WhatIfFigures(
    steps=3, step_ns=100 * MS, replay_error=0.002, waits_recorded=0, waits_inferred=1234, only_launches=False,
    what_ifs=(f.WhatIf(what=f.LAUNCHES, step_ns=60 * MS, gain_ns=40 * MS),),
    order=(
        f.WhatIf(what=f.LAUNCHES, step_ns=80 * MS, gain_ns=20 * MS),
        f.WhatIf(what=f.KERNEL, step_ns=65 * MS, gain_ns=15 * MS, detail="gemm"),
        f.WhatIf(what=f.OVERLAPPED, step_ns=64_900_000, gain_ns=100_000),
    ),
    path=f.CriticalPath(
        parts=tuple(f.PathPart(kind=of, ns=ns) for of, ns in (("host", 70 * MS), ("compute", 29_800_000), ("copy", 9))),
        owners=(f.PathPart(kind="host", ns=60 * MS, name="before aten::add"), f.PathPart(kind="compute", ns=9)),
    ),
)  # fmt: skip


def replayed(**changes: Any) -> f.TraceFigures:
    return made(what_if=replace(REPLAYS, **changes))


def overlapped(gain: float, kind: str, comm: int) -> f.TraceFigures:
    """30 of 100 ms are exposed, and overlapping them gains so many."""
    one = f.WhatIf(what=f.OVERLAPPED, step_ns=int((100 - gain) * MS), gain_ns=int(gain * MS))
    path = f.CriticalPath(parts=tuple(f.PathPart(kind=of, ns=50 * MS) for of in ("communication", kind)), owners=())
    return made(comm=comm, exposed=30, what_if=replace(REPLAYS, what_ifs=(one,), order=(), path=path))


def unblocked(gain: int, error: float = 0.0) -> f.TraceFigures:
    """A wait of 10 ms that ends before the queue does idles nothing, and yet delays all launches after it."""
    one = f.WhatIf(what=f.NO_SYNC, step_ns=(100 - gain) * MS, gain_ns=gain * MS)
    found = replace(REPLAYS, what_ifs=(one,), order=(), replay_error=error)
    return stalled({"idle_ns": MS, "kind": f.Stall.SYNC}, what_if=found)


def holder(category: f.Category, gib: int, unit: str | None = None, operator: str | None = None) -> f.Holder:
    return f.Holder(category=category, unit=unit, operator=operator, bytes=gib * GIB, blocks=gib)


def held(*holders: f.Holder, **changes: Any) -> f.TraceFigures:
    """20 of 40 GiB reserved are allocated at the peak."""
    peak = f.MemoryPeak(
        device="device 0", ns=5, step=3, phase="backward", operator="aten::mm", unit="layers.1",
        allocated_bytes=20 * GIB, risen_bytes=16 * GIB, reserved_bytes=40 * GIB, most_reserved_bytes=41 * GIB,
        holders=holders,
    )  # fmt: skip
    return made(memory_peaks=(replace(peak, **changes),))


LAYERS = (holder("activations", 12, "layers.0", "aten::linear"), holder("backward", 8, "layers.1"))
SECTIONS: Sequence[tuple[Callable[[f.TraceFigures], Section | None], Mapping[str, f.TraceFigures]]] = (
    (sections.exposed_communication, {
        "not divided": communicating("below"),
        "mostly divided": communicating("skew", steps=0, whole=split(**WAITED), no_launch="no host"),
        "divided but for what lies outside the steps": made(
            communication=exposing(10, {5: 8, 3: 4}, missing="a rank is not here")
        ),
    }),
    (sections.messages, {"in two sizes": communicating("below", message(nodes=2, least_bytes=2**10), message())}),
    (sections.host_stalls, {
        "values": stalled({}, {"kind": f.Stall.COPY, "idle_ns": 8 * MS}),
        "a known line": stalled({"line": "/a/b/project/models/net.py(7): forward"}),
        "a line without an operator": stalled({"line": "train.py(7): main", "operator": None}),
        "an operator in a layer": stalled({"operator": "x" * 60, "unit": "layers.3", "kind": f.Stall.SHAPE}),
        "a thread": stalled({"operator": None, "kind": f.Stall.SYNC}),
        "copies to the device": stalled({"kind": f.Stall.COPY, "copied": "Memcpy HtoD (Pageable -> Device)"}),
        "copies to the host": stalled({"kind": f.Stall.COPY, "copied": "Memcpy DtoH (Device -> Pageable)"}),
        "CUDA loads": stalled({"kind": f.Stall.LOADING}), "other calls": stalled({"kind": f.Stall.OTHER}),
        "HIP loads": stalled({"kind": f.Stall.LOADING, "call": "hipLaunchKernel"}),
        "memory is not cached": freed(25), "memory is cached": freed(24),
        "small": stalled({"idle_ns": 3 * MS}), "none": stalled(),
        "small, together large": stalled(*({"idle_ns": 3 * MS, "call": name} for name in "abc")),
        "a full queue": stalled({"kind": f.Stall.QUEUE, "call": "cudaLaunchKernel", "idle_ns": 0}),
        "without steps": stalled({}, steps=None),
        "the host would gain": unblocked(28), "the host would gain nothing": unblocked(0),
        "the replay is off": unblocked(28, error=0.5),
        "no calls": made(host_stalls=f.HostStalls(places=None, reason="the trace holds no calls")),
    }),
    (sections.work_by_class, {
        "the operator that could gain most": worked(
            operators=(mm(name="fast", of_roofline=0.95), mm(name="slow", ns=60 * MS, of_roofline=0.1, bound="memory"))
        ),
        "no shapes": worked(has_shapes=False, operators=()), "no hardware profile": worked(hardware=None, operators=()),
        "an unknown GPU": worked(hardware=None, operators=(), device="gpu"),
        "a CPU": worked(hardware=None, operators=(), device="cpu"),
    }),
    (sections.operators_by_shape, {
        "all columns": worked(), "no rates": worked(operators=(mm(flops_per_s=None, of_peak=None),)),
        "no shapes": worked(operators=(mm(shapes=None),)),
    }),
    (sections.kernels, {"the first": worked()}),
    (sections.contention, {
        "GEMMs first": worked(contention=SLOWED),
        "nothing to compare": worked(contention=replace(SLOWED, classes=(), kernels=())),
    }),
    (sections.what_ifs, {
        "the host": replayed(), "nothing": replayed(order=()), "off": replayed(replay_error=0.11, order=()),
        "far off": replayed(replay_error=0.97, order=()), "only launches": replayed(only_launches=True),
        "a host on the path": replayed(what_ifs=(f.WhatIf(what=f.LAUNCHES, step_ns=80 * MS, gain_ns=20 * MS),)),
        "overlap gains nothing": overlapped(0, "host", 40), "overlap is bound": overlapped(10, "host", 90),
        "overlap waits for others": overlapped(10, "compute", 40), "overlap gains more": overlapped(40, "compute", 40),
        "overlap gains what is exposed": overlapped(29.6, "host", 40), "a CPU": made(device="cpu"),
    }),
    (sections.memory_at_peak, {
        "activations": held(*LAYERS),
        "spread evenly": held(*(holder(of, 4) for of in ("gradients", "backward")), reserved_bytes=21 * GIB),
        "a CPU": held(device="cpu"),
        "no addresses": held(allocated_bytes=None, reserved_bytes=None, step=None, unit=None),
    }),
    (sections.memory_by_unit, {"two layers": held(*LAYERS), "no units": held(holder("gradients", 4))}),
)  # fmt: skip


def findings_text() -> str:
    """The finding of each scenario, and the sentence on what bounds communication."""
    lines = []
    for name, figures in FINDINGS.items():
        (found,) = findings(figures)
        lines += [f"# {name}", found.lead, *(f"* {sentence}" for sentence in found.more), ""]
    return "\n".join([*lines, "# bounds", *(f"{name}: {bound_of(one) or '-'}" for name, one in BOUNDS.items()), ""])


def sections_text() -> str:
    """The section of each scenario."""
    lines = []
    for make, scenarios in SECTIONS:
        for name, figures in scenarios.items():
            section = make(figures)
            blocks = () if section is None else (Section(title=section.title, blocks=section.blocks),)
            text = forms.as_text(Answer(data={}, rows=(), blocks=blocks), forms.Paper())
            where = "" if section is None else f" ({section.where})"
            lines += [f"# {make.__name__}: {name}{where}", text or "nothing", ""]
    return "\n".join(lines)


def lanes_text() -> str:
    """The blocks of a small step, in us, with what pointing at them shows."""
    timeline = traces.gpu(layers=2, kernels=3, steps=1)
    figures = traces.figures(timeline)
    (window,) = drawn_windows(figures, timeline)
    lines = [window.label]
    for row in rows_of(timeline, figures, window.begin, window.close)[0]:
        lines += ["", f"{row.label or '-'}{' (narrow)' if row.narrow else ''}"]
        for blocks in row.blocks:
            for start, end, note in zip(blocks.starts, blocks.ends, blocks.notes):
                at = f"{(start - window.begin) / 1000:.0f} to {(end - window.begin) / 1000:.0f}"
                lines.append(f"{blocks.style} {at}: {'; '.join(note)}")
    return "\n".join([*lines, ""])


def fragmented() -> Allocator:
    """Four blocks of 2 KiB at line 5 fill a segment; every other one is freed; 100 bytes at line 6."""
    allocator = Allocator()
    blocks = [allocator.allocate(2048, 5) for _ in range(4)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(100, 6)
    return allocator


def snapshots() -> Mapping[str, dict[str, Any]]:
    """Snapshots of allocators, by what is special about them."""
    failed, limited, ended, bare = fragmented(), Allocator(), fragmented(), fragmented().snapshot(entries=0)
    failed.fail(3072, 100, 8)
    once = failed.snapshot()
    failed.fail(1 << 20, 100, 8)
    expandable = failed.snapshot()
    expandable["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    for _ in range(4):
        limited.free(limited.allocate(100, 1))
        limited.empty_cache()
    recorded = len(ended.entries)
    ended.free(next(part for part in ended.segments[min(ended.segments)] if part.line == 5))
    early = ended.snapshot()
    early["device_traces"] = [trace[:recorded] for trace in early["device_traces"]]
    for block in bare["segments"][0]["blocks"]:
        block["frames"] = []
    return {
        "out of memory by fragmentation": once, "out of memory twice, with expandable segments": expandable,
        "near the limit": limited.snapshot(), "the history ends early": early, "no history, no stacks": bare,
    }  # fmt: skip


def snapshot_text() -> str:
    """The answer about each snapshot."""
    lines = []
    with TemporaryDirectory() as folder:
        for name, snapshot in snapshots().items():
            answer = memory_snapshots([write(Path(folder) / "s.pickle", snapshot)])
            lines += [f"# {name}", forms.as_text(answer, forms.Paper(), verbose=True), ""]
    return "\n".join(lines)


MM = Work(kind="compute", operator="aten::mm", phase="forward")
GATHER = Work(kind="comm", operator="all_gather", phase="forward")
IDLE = Work(kind="idle", operator="aten::mm", phase="forward", bound="launch")


def side(*rows: tuple[Work, int], kernel: str = "k") -> Attribution:
    """Steps of one nanosecond per unit."""
    owners = tuple(Owner(work=work, ns=ns, count=1, kernels=((kernel, ns),)) for work, ns in rows)
    return Attribution(step_ns=(sum(ns for _, ns in rows),), owners=owners)


def compared(a: list[Attribution], b: list[Attribution], ranks: tuple[int, ...] = (), **others: Any) -> Compared:
    return Compared(names=("a", "b"), steps=(1, 1), difference=difference(a, b, ranks), **others)


def changed(a: Sequence[int], b: Sequence[int], works: Sequence[Work] = (MM, GATHER, IDLE), **others: Any) -> Compared:
    return compared([side(*zip(works, a))], [side(*zip(works, b))], **others)


BACKWARD, REST, NAMELESS = replace(MM, phase="backward"), replace(MM, phase=None), replace(MM, by_name=True)
OPERATORS = [replace(MM, operator=f"op{n}") for n in range(40)]
DIFFERENCES = {
    "more": changed((60_000, 30_000, 10_000), (90_000, 40_000, 11_000), interval=(500.0, 1500.0)),
    "less": changed((90_000, 40_000, 11_000), (60_000, 30_000, 10_000)),
    "shares over 100 % or below 0 are left out": changed((60_000, 30_000), (90_000, 20_000)),
    "parts that cancel": changed((60_000, 30_000), (50_000, 40_000)),
    "within variation": changed((60_000,), (61_000,), interval=(-500.0, 2500.0)),
    "nothing": changed((60_000,), (60_000,)),
    "not like for like": changed((60_000,), (90_000,), unlike=(
        Unlike(what="device", a="H100", b="MI300X"), Unlike(what="world size", a="8", b="2"),
        Unlike(what="batch size", a="aten::mm [8,4]x[4,2]", b="aten::mm [16,4]x[4,2]"),
    )),
    "three ranks": compared(
        [side((MM, 60_000))] * 3, [side((MM, ns)) for ns in (61_000, 50_000, 63_000)], (4, 5, 6),
        interval=(500.0, 1500.0),
    ),
    "only on one side": compared([side((MM, 60_000))], [side((replace(MM, operator="fused"), 40_000))]),
    "operators unknown": changed((60_000,), (40_000,), (NAMELESS,)),
    "phases": changed((1_000, 2_000, 50), (1_100, 2_300, 50), (MM, BACKWARD, REST)),
    "many changes": changed([1_000] * 40, [1_000 + 100 * n for n in range(40)], OPERATORS),
}  # fmt: skip


def differences_text() -> str:
    """The answer about each difference."""
    answers = {name: difference_answer(found) for name, found in DIFFERENCES.items()}
    return "\n".join(f"# {name}\n{forms.as_text(one, forms.Paper())}\n" for name, one in answers.items())
