"""The sections of a trace's report: each is a table of figures with sentences, or None if the trace lacks them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from refshard.analysis import figures as whatif
from refshard.analysis.figures import (
    TOLERATED_ERROR,
    Category,
    Cause,
    CollectiveFigures,
    ExposedSplit,
    Holder,
    HostStall,
    MemoryPeak,
    Stall,
    TraceFigures,
    WhatIf,
    WhatIfFigures,
)
from refshard.analysis.names import name_in_words, operator_in_words
from refshard.events.timeline import Timeline
from refshard.outside_memory import EXPANDABLE_SEGMENTS
from refshard.quantities import format_bytes, format_ns, format_part, format_percent
from refshard.report.blocks import Cell, Fact, Facts, Part, Quantity, Row, Section
from refshard.report.trace.findings import (
    COMPUTE_BOUND,
    SMALL,
    WORK,
    exposed_waits,
    group_of,
    reach_of,
    short,
    size_of,
    unknown_waiting,
)
from refshard.report.trace.lanes import idle_by_cause
from refshard.report.trace.text import (
    HOST_WORK,
    IDLE,
    count_per,
    counted,
    cut,
    each,
    has_steps,
    idle_names,
    in_each,
    is_alone,
    mean,
    ns,
    of_each,
    parts,
    per,
    rate,
    section,
    share,
    who,
    whole,
)

MOST_UNITS = 400
_MOST_WAITS = 40
_LONGEST = 60


def windows(figures: TraceFigures) -> Section | None:
    """Mean times of each kind of window that a user chose in place of steps."""
    if (chosen := figures.windows) is None:
        return None
    classes = {"compute": "compute_ns", "comm.": "comm_ns", "exposed": "exposed_ns", "idle": "idle_ns"}
    rows: list[Row] = [
        {
            "window": cut(one.name, _LONGEST, middle=True), "count": one.count, "mean": ns(one.span_ns, one.count),
            "shortest": ns(one.shortest_ns), "longest": ns(one.longest_ns),
            **{head: Part(Quantity(getattr(one, key) / one.count, "ns"), one.span_ns / one.count)
               for head, key in classes.items()},
        }
        for one in chosen.groups
    ]  # fmt: skip
    return section(
        f"Windows of --window '{chosen.window}'", rows,
        "Means over the windows of a kind; # stands for numbers that differ. Percentages are of the window.",
        where="always", shown=20,
    )  # fmt: skip


def exposed_communication(figures: TraceFigures) -> Section | None:
    """Where exposed communication goes, per step."""
    found = figures.communication
    if found is None or not found.whole.exposed_ns:
        return None

    def row(one: ExposedSplit) -> Row:
        peers = [f"rank {peer.rank} {format_ns(peer.waited_ns)}" for peer in one.waits_for]
        return {
            "": "whole trace" if one.step is None else f"step {one.step}",
            "exposed": ns(one.exposed_ns), "transfer": ns(one.transfer_ns), "waiting": ns(one.waiting_ns),
            "waits for": ", ".join(peers[:2]) + (f" and {len(peers) - 2} more" if peers[2:] else "") or None,
            "transfer or waiting": ns(one.undivided_ns or None), "idle before late launch": ns(one.launch_ns),
        }  # fmt: skip

    every = found.steps or (found.whole,)
    some = "" if all(one.launch_ns is None for one in every) else " of some steps"
    late = f"Late launches{some} are unknown: {found.no_launch}." if found.no_launch else ""
    return section(
        "Exposed communication", [row(one) for one in every],
        "Transfer, waiting for a rank to enter, and what may be either. Besides: idle time before a collective that "
        "the host launched late",
        [text for text in (unknown_waiting(figures), late) if text], text=("waits for",),
    )  # fmt: skip


def messages(figures: TraceFigures) -> Section | None:
    """Bus bandwidths by operation, size and group, with the link's."""
    if (found := figures.communication) is None:
        return None
    steps, known = max(1, len(found.steps)), {True: "yes", False: "no"}
    bandwidths = {
        "GB/s": "bus_bandwidth", "without waiting": "transfer_bandwidth", "best GB/s": "largest_bandwidth",
        "link GB/s": "link_bandwidth",
    }  # fmt: skip
    rows: list[Row] = [
        {
            "collective": short(one.op), "size": size_of(one), "group": group_of(one) or None,
            "spans": reach_of(one) or None, "count in all": one.count,
            f"exposed {per(figures)}": ns(one.exposed_ns, steps), "waiting": ns(one.waiting_ns, steps),
            **{head: rate(getattr(one, key), 1e9) for head, key in bandwidths.items()},
            "latency-bound": None if one.is_latency_bound is None else known[one.is_latency_bound],
        }
        for one in found.messages
    ]  # fmt: skip
    caption = "Median bus bandwidths in GB/s; without waiting: measured on the rank that entered last"
    has_link = any(one.link_bandwidth is not None for one in found.messages)
    link = [f"The link's bandwidth is that of the cluster profile {found.profile}."] if has_link else []
    return section("Messages", rows, caption, link, text=("size", "group", "spans"))


def idle_time(figures: TraceFigures) -> Section | None:
    """What the device was waiting for."""
    steps, span = len(parts(figures)), sum(part.breakdown.span_ns for part in parts(figures))
    rows: list[Row] = [
        {
            "cause": idle_names(figures)[one.cause].removeprefix("idle, "), "what": name_in_words(one.what) or None,
            per(figures): ns(one.ns, steps), "share": share(one.ns / span),
            "gaps" if is_alone(figures) else f"gaps {per(figures)}": count_per(one.count, steps),
            "longest": ns(one.longest_ns),
        }
        for one in figures.idle
        if one.ns and not figures.host_only
    ]  # fmt: skip
    caption = (
        "Gaps in which neither an operator nor a collective runs. What: the operator that ends the gap"
        if figures.device == "cpu"
        else "Gaps in which nothing runs. What: the operator launched too late, the call that took most of the gap, or "
        "the streams; it gets the whole gap"
    )
    return section("Idle time by cause", rows, caption, text=("what",))


def lone_copies(figures: TraceFigures) -> Section | None:
    """The copies during which nothing else runs, by name."""
    steps = [part.breakdown for part in parts(figures)]
    span = sum(part.span_ns for part in steps)
    if figures.host_only or sum(part.lone_copy_ns for part in steps) < SMALL / 10 * span:
        return None
    rows: list[Row] = [
        {"copies": one.name, per(figures): ns(one.ns, len(steps)), "share": share(one.ns / span),
         "count in all": one.count}
        for one in figures.lone_copies
    ]  # fmt: skip
    return section("Copies alone", rows, "Copies and fills during which nothing else runs")


_CHANGES = {
    whatif.OVERLAPPED: "communication fully overlapped",
    whatif.ON_TIME: "every rank on time",
    whatif.LAUNCHES: "host and launches take no time",
    whatif.FAST_HOST: "host twice as fast, or half as many launches",
    whatif.NO_MODES: "no dispatch modes in Python",
    whatif.NO_SYNC: "no synchronisation with the host",
}
_PART = {
    whatif.OVERLAPPED: "communication", whatif.ON_TIME: "communication: waiting", whatif.FAST_HOST: IDLE[Cause.LAUNCH],
    whatif.NO_MODES: IDLE[Cause.LAUNCH], whatif.NO_SYNC: IDLE[Cause.CALL],
}  # fmt: skip
"""The part of the step that a change shortens."""
_ON_PATH = {"copy": "copies and preparation", "host": "host and launches", "between_kernels": "between kernels"}
_SMALL_GAIN = 0.005
"""A gain, or a part of the critical path, under this share of the step is not named."""


def what_ifs(figures: TraceFigures) -> Section | None:
    """The step that each change leads to, the order in which changes pay, and the critical path."""
    if (found := figures.what_if) is None:
        why = "a CPU trace records no launches, so it has no dependency graph to replay"
        return section("What if", (), sentences=[f"No what-if analysis: {why}."]) if figures.device == "cpu" else None
    what = each(figures)
    largest = max((one.gain_ns for one in found.what_ifs), default=0)
    # A large error of the replay hides gains that are smaller.
    is_telling = found.replay_error <= TOLERATED_ERROR or largest >= found.replay_error * found.step_ns
    gains = [one for one in found.what_ifs if is_telling and one.gain_ns >= _SMALL_GAIN * found.step_ns]
    rows: list[Row] = [
        {"what if": _change(one), f"{what} takes": ns(one.step_ns), "gain": ns(one.gain_ns),
         "share": share(one.gain_ns / found.step_ns)}
        for one in gains
    ]  # fmt: skip
    of = f"the mean of {counted(found.steps, what)}" if has_steps(figures) else "the whole trace"
    doubt = (
        "The trace holds no calls but launches: if the host waited for the device, that counts as its own time."
        if found.only_launches
        else ""
    )
    sentences = (
        _order(found, gains),
        _gain_of_overlap(figures, found) if is_telling else "",
        doubt,
        *_path(found, what),
    )
    return section(
        f"What if: the {what} replayed with one change", rows,
        f"Replays of the trace's dependency graph, over {of} ({format_ns(found.step_ns)}). "
        f"{counted(found.waits_recorded, 'wait')} between streams recorded, {found.waits_inferred:,} inferred.",
        [sentence for sentence in sentences if sentence], where="always",
    )  # fmt: skip


def paying(one: TraceFigures, chart: str, row: int) -> Facts:
    """The three changes that gain most: replays, and of a step bound by compute its kernels at good rates. The bar on
    ``row`` of ``chart`` has the parts that they shorten.
    """
    found, span = list[tuple[float, str, str, str]](), mean([one], lambda part: part.span_ns)
    if one.what_if is not None and one.what_if.replay_error <= TOLERATED_ERROR:
        found += [
            (
                what.gain_ns,
                _CHANGES[what.what],
                f"the {each(one)} would take {format_ns(what.step_ns)}",
                _PART.get(what.what, ""),
            )
            for what in one.what_if.what_ifs
            if what.what in _CHANGES and what.what != whatif.LAUNCHES
        ]
    if one.operators is not None and mean([one], lambda part: part.compute_ns) >= COMPUTE_BOUND * span:
        found += [
            (of.good_gain_ns / one.operators.steps, f"{WORK[of.name]} at rates that good kernels reach",
             f"now at {format_percent(of.of_roofline, 0)} of the roofline", WORK[of.name])
            for of in one.operators.classes
            if of.known_ns
        ]  # fmt: skip
    most = sorted(found, key=lambda fact: -fact[0])[:3]
    return Facts(facts=[
        Fact(label=label[:1].upper() + label[1:], value=f"-{format_ns(gain)} ({format_percent(gain / span)})",
             detail=text, chart=chart if part else "", part=part, row=row)
        for gain, label, text, part in most
        if gain >= _SMALL_GAIN * span
    ])  # fmt: skip


def _change(one: WhatIf) -> str:
    faster = {whatif.KERNEL: "twice as fast", whatif.ROOFLINE: "at its roofline"}.get(one.what)
    return _CHANGES[one.what] if faster is None else f"{name_in_words(one.detail or '')} {faster}"


def _order(found: WhatIfFigures, gains: Sequence[WhatIf]) -> str:
    """The order in which changes pay, or why it is unknown."""
    off = f"{format_percent(found.replay_error)} off"
    if found.replay_error > TOLERATED_ERROR:
        why = "because the trace does not show what the host or some work waited for"
        if not gains:
            return f"No gains: the replay is {off} the trace's own time, {why}."
        return f"The replay is {off} the trace's own time, {why}: the gains are uncertain, and no order is given."
    worth = [one for one in found.order if one.gain_ns >= _SMALL_GAIN * found.step_ns]
    if not worth:
        return "None of these would make a difference."
    steps = "; then also ".join(f"{_change(one)}, {format_ns(one.step_ns)}" for one in worth)
    return f"Best order: {steps}. Unchanged, the replay is {off}."


def _gain_of_overlap(figures: TraceFigures, found: WhatIfFigures) -> str:
    """Why overlapping communication gains more or less time than is exposed; empty if it does not."""
    one = next((one for one in found.what_ifs if one.what == whatif.OVERLAPPED), None)
    every = [part.breakdown for part in parts(figures)]
    exposed, comm = (sum(getattr(part, key) for part in every) / len(every) for key in ("exposed_ns", "comm_ns"))
    if one is None or abs(one.gain_ns - exposed) < _SMALL_GAIN * found.step_ns:
        return ""
    path = [part for part in found.path.parts if part.kind != whatif.COMMUNICATION]
    most = max(path, key=lambda part: part.ns, default=None)
    if one.gain_ns > exposed:
        why = "idle time before and after it goes too"
    elif one.step_ns <= 1.03 * comm:  # the step that is left is hardly more than communication
        why = f"communication itself takes {format_ns(comm)}"
    elif most is not None and most.kind == whatif.HOST:
        why = "the host launches what follows no sooner"
    else:
        why = "what follows waits for other work too"
    gain = format_ns(one.gain_ns) if one.gain_ns else "nothing"
    return (
        f"Communication is exposed for {format_ns(exposed)} {in_each(figures)}, but overlapping it gains {gain}: {why}."
    )


def _path(found: WhatIfFigures, what: str) -> Iterator[str]:
    """The classes of work on the critical path, and the kernels and host calls that take most of it."""
    least = _SMALL_GAIN * found.step_ns
    shares = [
        f"{_ON_PATH.get(part.kind, part.kind)} {format_percent(part.ns / found.step_ns, 0)}"
        for part in found.path.parts
        if part.ns >= least
    ]
    owners = [
        f"{'host code before ' if is_host else ''}{name_in_words((part.name or '').removeprefix('before '))} "
        f"{format_percent(part.ns / found.step_ns, 0)}"
        for part in found.path.owners[:3]
        if part.ns >= least
        for is_host in [(part.name or "").startswith("before ")]
    ]
    if shares:
        yield f"Critical path of the {what}: {', '.join(shares)}."
    if owners:
        yield f"Longest on it: {', '.join(owners)}."
    on_path = sum(part.ns for part in found.path.parts if part.kind == whatif.HOST)
    gain = next((one.gain_ns for one in found.what_ifs if one.what == whatif.LAUNCHES), None)
    if gain is not None and on_path >= 0.1 * found.step_ns and gain < on_path / 2:
        yield (
            f"For most of the {format_ns(on_path)} of host and launches on it the GPU is busy with what was launched "
            f"before: without them the {what} would be {format_ns(gain)} shorter."
        )


_STALLS = "What holds the GPU up"
_WARM_UP = "run some steps to warm up before those that count"
_STALL = {
    Stall.ITEM: (
        "value read by the host", "read values (.item(), .tolist(), if tensor:) only every n steps, or copy them into "
        "pinned memory with non_blocking=True and read them a step later",
    ),
    Stall.SHAPE: (
        "size that depends on values",
        "keep sizes independent of values: torch.where or a mask instead of nonzero and boolean indexing",
    ),
    Stall.COPY: (
        "blocking copy",
        "pin_memory=True in the DataLoader, non_blocking=True in .to() and .cuda(), and read results a step later",
    ),
    Stall.SYNC: (
        "", "take the wait out of the step; CUDA events and wait_stream order streams without stopping the host",
    ),
    Stall.ALLOCATOR: (
        "", "warm up before the steps that count; if it goes on, leave the allocator headroom: smaller batches, or "
        f"{EXPANDABLE_SEGMENTS} against fragmentation",
    ),
    Stall.LOADING: ("kernel loading", f"{_WARM_UP}; CUDA_MODULE_LOADING=EAGER loads all kernels at the start"),
    Stall.QUEUE: ("full launch queue", "nothing: the host is ahead of the GPU"),
    Stall.OTHER: ("", f"{_WARM_UP}: such calls mostly set up contexts, streams and graphs, once"),
}  # fmt: skip
"""What a stall is called, before its call, and its remedy."""
_UNCACHED = (
    "let torch cache memory: tensors are taken from the driver and given back to it all the time. Is "
    "PYTORCH_NO_CUDA_MEMORY_CACHING (on ROCm also PYTORCH_NO_HIP_MEMORY_CACHING) set?"
)


def host_stalls(figures: TraceFigures) -> Section | None:
    """The calls of the host that stall the GPU, the worst first."""
    if (found := figures.host_stalls) is None:
        return None
    if (places := found.places) is None:
        why = f"Unknown: {found.reason}. Record CPU and CUDA activities together."
        return section(_STALLS, (), sentences=[why])
    steps, least = found.steps or 1, SMALL * found.span_ns
    rows: list[Row] = [
        {
            "what": f"{name} ({one.call})" if (name := _STALL[one.kind][0]) else one.call, "where": _place(one),
            "GPU idle caused": ns(one.idle_ns, steps), "host time in calls": ns(one.host_ns, steps),
            "calls": f"{one.count / steps:,.4g}",
        }
        for one in places
        if max(one.idle_ns, one.host_ns) >= least / 10
    ]  # fmt: skip
    caused, is_large = sum(one.idle_ns for one in places), bool(places) and places[0].idle_ns >= least > 0
    sentences = [f"No blocking call itself idles the GPU for 1 % of {of_each(figures)} or more."]
    if is_large:
        of = format_percent(places[0].idle_ns / found.span_ns)
        sentences = [f"The first call idles the GPU for {of} of {of_each(figures)}. Try: {_unblock(places, figures)}"]
        if all(one.line is None for one in places):
            sentences.append("With with_stack=True in the profiler, the table names the Python functions.")
    if len(places) > 1 and caused >= least > 0:
        idle = f"{format_ns(caused / steps)} of {format_ns(found.idle_ns / steps)} of idle time {in_each(figures)}"
        sentences.append(f"All such calls cause {idle}.")
    # A wait idles the device longer than it lasts if the host has much to do after it.
    replay = figures.what_if
    if replay is not None and replay.replay_error <= TOLERATED_ERROR and not is_large:
        gain = next((one.gain_ns for one in replay.what_ifs if one.what == whatif.NO_SYNC), 0)
        if gain and gain >= SMALL * replay.step_ns:
            sentences.append(
                "But the host starts what follows later because it waits: if it never waited for the GPU, "
                f"{format_ns(gain)} {in_each(figures)} would be saved (see What if)."
            )
    if sum(one.host_ns for one in places if one.kind is Stall.QUEUE) >= least > 0:
        sentences.append("Launches that wait for a full queue are no problem: the host is ahead of the GPU.")
    return section(
        f"{_STALLS}, {per(figures)}", rows,
        "Calls of the host that wait, allocate or load. GPU idle caused: how much sooner the next kernel would have "
        "started without them.",
        sentences, text=("where",), where="always" if is_large else "detail", shown=8,
    )  # fmt: skip


def host_time(figures: TraceFigures) -> Section | None:
    """What the threads that launch spend their time on."""
    if (found := figures.host_time) is None:
        return None
    rows: list[Row] = [
        {"host": HOST_WORK[part.kind], per(figures): ns(part.ns, found.steps), "share": share(part.ns / found.span_ns),
         "count": count_per(part.count, found.steps) if part.count else None,
         "mostly": ", ".join(f"{cut(name, _LONGEST)} {format_ns(time / found.steps)}"
                             for name, time in part.most[:3] if name) or None}
        for part in found.parts
    ]  # fmt: skip
    caption = (
        "The threads that launch, by the innermost event; while one waits for another, only the other's time counts."
    )
    lines = "With with_stack=True in the profiler, the table names the Python functions outside of operators."
    unnamed = sum(ns for part in found.parts if part.kind == "python" for name, ns in part.most if not name)
    return section("Host time", rows, caption, [lines] if unnamed > 0.1 * found.span_ns else [], text=("mostly",))


def _place(one: HostStall) -> str:
    """The line and the operator; without a line the operator and its layer or annotation; else the thread."""
    most = 48
    if one.line is not None:
        path, bracket, rest = one.line.partition("(")
        line = "/".join(path.split("/")[-2:]) + bracket + rest  # the last two parts of the path will do
        return ", ".join(cut(name, most) for name in (line, one.operator) if name)
    return " in ".join(cut(name, most) for name in (one.operator, one.unit) if name) or f"thread {one.thread}"


def _unblock(places: Sequence[HostStall], figures: TraceFigures) -> str:
    """What to try against the first of these."""
    worst, copied = places[0], places[0].copied or ""
    frees = sum(one.count for one in places if one.kind is Stall.ALLOCATOR and one.call.endswith("Free"))
    kernels = 0 if figures.operators is None else sum(one.count for one in figures.operators.classes)
    # A first step takes memory, and keeps it; memory that is given back for every fourth kernel is not cached.
    if worst.kind is Stall.ALLOCATOR and worst.call.endswith("Free") and 0 < kernels <= 4 * frees:
        return _UNCACHED
    if worst.kind is Stall.COPY and copied.startswith("Memcpy DtoH"):
        return "copy results into pinned memory with non_blocking=True, and read them a step later."
    if worst.kind is Stall.COPY and copied.startswith("Memcpy HtoD"):
        return "pin_memory=True in the DataLoader, and non_blocking=True in .to() and .cuda()."
    if worst.kind is Stall.LOADING and worst.call.startswith("hip"):
        return f"{_WARM_UP}; HIP_ENABLE_DEFERRED_LOADING=0 loads all kernels at the start."
    return f"{_STALL[worst.kind][1]}."


_Works = list[tuple[dict[str, Cell], Any]]
_CELLS: dict[str, Callable[[Any], Cell]] = {
    "class": lambda one: one.kind,
    "dtype": lambda one: one.dtype,
    "per call": lambda one: ns(one.ns, one.calls),
    "each": lambda one: ns(one.ns, one.count),
    "share": lambda one: share(one.share),
    "TFLOPS": lambda one: rate(one.flops_per_s, 1e12),
    "of peak": lambda one: share(one.of_peak, 0),
    "of roofline": lambda one: share(one.of_roofline, 0),
    "bound by": lambda one: one.bound,
}
"""Cells about classes of work, operators and kernels."""


def _work(
    title: str, found: _Works, heads: Sequence[str], figures: TraceFigures, caption: str,
    count: int, sentences: Sequence[str] = (),
) -> Section | None:  # fmt: skip
    """A table of the first of ``count`` pieces of work, by name."""
    assert figures.operators is not None
    steps, rows = figures.operators.steps, list[Row]()
    of_step: dict[str, Callable[[Any], Cell]] = {
        "count": lambda one: count_per(one.count, steps), "calls": lambda one: count_per(one.calls, steps),
        "time": lambda one: ns(one.ns, steps),
        "gain at it": lambda one: ns(one.gain_ns if one.known_ns else None, steps),
        "gain at good rates": lambda one: ns(one.good_gain_ns if one.known_ns else None, steps),
    }  # fmt: skip
    for named, one in found:
        rows.append({**named, **{head: (_CELLS | of_step)[head](one) for head in heads}})
    first = f" The first {len(rows)} of {count:,}." if len(rows) < count else ""
    caption = f"{per(figures).capitalize()}{caption}{first}"
    return section(title, rows, caption, sentences, text=("class", "shapes", "dtype", "bound by"))


def work_by_class(figures: TraceFigures) -> Section | None:
    """The share of each class of work, and the operator that would gain most at its roofline."""
    report = figures.operators
    if report is None or not report.work_ns:
        return None
    sentences = []
    gains = [(one.ns * (1 - min(1.0, one.of_roofline)), one) for one in report.operators if one.of_roofline is not None]
    gain, worst = max(gains, key=lambda pair: pair[0], default=(0.0, None))
    if worst is not None and gain >= SMALL * report.work_ns:
        sentences.append(
            f"The operator that could gain most is {operator_in_words(worst)}: it takes "
            f"{format_ns(worst.ns / report.steps)} {in_each(figures)}, at {format_percent(worst.of_roofline, 0)} of "
            f"its roofline ({worst.bound}-bound), so at most {format_ns(gain / report.steps)} can be gained."
        )
    if not report.has_shapes:
        sentences.append("No FLOPs: the trace has no shapes; record it with record_shapes=True.")
    elif report.hardware is None:
        why = f"there is no hardware profile of {'this CPU' if figures.device == 'cpu' else figures.device}"
        why = "the trace does not name its GPU" if figures.device == "gpu" else why
        sentences.append(f"No shares of a peak: {why}.")
    caption = "; shares are of all work except communication. Durations add up: concurrent work counts twice."
    title = f"Work by class, {format_ns(report.work_ns / report.steps)} {in_each(figures)} without communication"
    found: _Works = [({"class": one.name}, one) for one in report.classes]
    heads = ("count", "time", "share", "of roofline", "gain at it", "gain at good rates")
    if report.hardware is not None:
        caption += f" Good rates: what good kernels reach, by the hardware profile {report.hardware}."
    return _work(title, found, heads, figures, caption, len(found), sentences)


def operators(figures: TraceFigures) -> Section | None:
    """The operators that take longest, over all shapes."""
    if (report := figures.operators) is None:
        return None
    found: _Works = [({"operator": cut(one.name, _LONGEST)}, one) for one in report.totals]
    heads = ("class", "calls", "time", "per call", "share", "TFLOPS", "of peak", "of roofline")
    caption = ": what the host called, and the time of the kernels that it launched for that."
    return _work("Operators", found, heads, figures, caption, report.total_count)


def operators_by_shape(figures: TraceFigures) -> Section | None:
    """The same by the shapes of their arguments, with the rate that each reaches."""
    report = figures.operators
    if report is None or not any(one.shapes for one in report.operators):
        return None
    found: _Works = [
        ({"operator": cut(one.name, _LONGEST), "shapes": cut(one.shapes or "-", _LONGEST)}, one)
        for one in report.operators
    ]
    heads = ("dtype", "calls", "time", "share", "TFLOPS", "of peak", "of roofline", "bound by")
    profile = f" Peaks: the hardware profile {report.hardware}." if report.hardware else ""
    caption = f"; bytes are the least that each must move.{profile}"
    return _work("Operators by shape", found, heads, figures, caption, report.operator_count)


def kernels(figures: TraceFigures) -> Section | None:
    """The kernels that take longest."""
    if (report := figures.operators) is None:
        return None
    found: _Works = [({"kernel": one.short}, one) for one in report.kernels]
    caption = ", without communication; names are shortened (--json has them whole)."
    return _work("Kernels", found, ("class", "count", "time", "each", "share"), figures, caption, report.kernel_count)


def contention(figures: TraceFigures) -> Section | None:
    """How much longer kernels take during communication than alone."""
    report = figures.operators
    if report is None or (found := report.contention) is None:
        return None
    classes = sorted(found.classes, key=lambda one: (one.kind != "GEMM", -one.lost_ns))
    rows: list[Row] = [
        {
            "kernels": name, "runs during": count_per(one.runs, report.steps),
            "time during": ns(one.beside_ns, report.steps), "time alone": ns(one.alone_ns, report.steps),
            "slower": "no" if one.times is None else f"{one.times:.2f}x",
            "lost": ns(one.lost_ns, report.steps) if one.slower else "none",
        }
        for name, one in (
            *((f"all {WORK.get(one.kind, one.kind)}", one) for one in classes),
            *((one.name, one) for one in found.kernels),
        )
    ]  # fmt: skip
    compared, shapeless = (
        format_percent(part / found.beside_ns if found.beside_ns else None, 0)
        for part in (found.compared_ns, found.shapeless_ns)
    )
    sentences = [
        f"Compared: {compared} of the time of kernels during communication."
        if classes
        else "No kernel can be compared: none did the same work 3 times during communication and 3 times without any."
    ]
    if found.shapeless_ns:
        sentences.append(
            f"For {shapeless} of that time the shapes are unknown, and nothing else tells which kernels do the same "
            "work; record the trace with record_shapes=True."
        )
    caption = (
        f"{per(figures).capitalize()}: kernels that ran at least 3 times mostly during communication and 3 times "
        "without any, and did the same work; medians are compared."
    )
    return section("Slowdown during communication", rows, caption if rows else "", sentences)


_HELD: dict[Category, tuple[str, str]] = {
    "before, kept": ("allocated before the trace, never freed in it", "before the trace"),
    "before, freed later": ("allocated before the trace, freed in it", "before the trace"),
    "kept": ("allocated in forward, alive after an optimizer step", "kept"),
    "activations": ("activations (made in forward, alive in backward)", "activations"),
    "gradients": ("gradients (made in backward, outlive it)", "gradients"),
    "optimizer state": ("optimizer state (made in a step, outlives it)", "optimizer state"),
    "all-gather": ("unsharded parameters and all-gather buffers", "all-gather"),
    "reduction": ("gradient reduction buffers", "reduction"),
    "collective": ("buffers of other collectives", "collectives"),
    "forward": ("temporaries of forward (backward does not need them)", "temporary"),
    "backward": ("temporaries of backward", "temporary"),
    "optimizer": ("temporaries of the optimizer", "temporary"),
    "other": ("not known (under no operator)", "other"),
}
"""What memory is held for: in full, and as a column; columns are in this order."""
_MEMORY: dict[Category, str] = {
    "before, kept": "Most was allocated before the trace: shard parameters, gradients and optimizer state",
    "activations": "Most is activations: checkpoint them, or use a smaller microbatch or shorter sequences",
    "all-gather": "Most is unsharded parameters: reshard after forward, wrap smaller units, or prefetch fewer",
    "reduction": "Most is gradient reduction buffers: wrap smaller units, or reduce in a narrower dtype",
}


def memory_at_peak(figures: TraceFigures) -> Section | None:
    """What holds memory at the peak, on the GPU with the highest one, or on the CPU in a trace without GPUs."""
    if not figures.memory_peaks:
        return None
    peak = figures.memory_peaks[0]
    groups: dict[Category, list[Holder]] = defaultdict(list)
    for holder in peak.holders:
        groups[holder.category].append(holder)
    sums = {category: sum(one.bytes for one in members) for category, members in groups.items()}
    total, largest = sum(sums.values()), sorted(groups, key=lambda category: -sums[category])
    rows: list[Row] = [
        {
            "held for": _HELD[category][0], "bytes": Quantity(sums[category], "B"),
            "share": share(sums[category] / total), "blocks": None if None in counts else sum(filter(None, counts)),
            "mostly by": _operator(max(groups[category], key=lambda one: one.bytes)) or None,
        }
        for category in largest
        for counts in [[one.blocks for one in groups[category]]]
    ]  # fmt: skip
    sentences = [_moment(peak)]
    if peak.allocated_bytes is not None and peak.reserved_bytes:
        unused = peak.reserved_bytes - peak.allocated_bytes
        text = f"{format_part(unused, peak.reserved_bytes)} reserved are not allocated then: cache and fragmentation."
        if unused > 0.1 * peak.reserved_bytes:
            text += " A snapshot tells which: torch.cuda.memory._dump_snapshot(FILE), then refshard trace FILE."
        sentences.append(text)
    if largest and largest[0] in _MEMORY and 2 * sums[largest[0]] >= total:
        sentences.append(f"{_MEMORY[largest[0]]} ({format_percent(sums[largest[0]] / total, 0)} of the peak).")
    if peak.unmatched:
        sentences.append(
            f"{peak.unmatched:,} blocks were handed out again though the trace does not show them freed: threads that "
            "the profiler does not follow free memory, and figures by purpose may be too high."
        )
    if peak.device == "cpu":
        sentences.append(
            "The profiler counts a CPU's memory from when it begins, so parameters made before are not in it."
        )
    return section(
        f"Memory at the peak on {peak.device}",
        rows or [{"held for": "not known: the trace has no addresses or totals"}],
        "Blocks alive when the allocator holds most, by purpose.", sentences, text=("mostly by",),
    )  # fmt: skip


def _operator(one: Holder | MemoryPeak) -> str:
    return cut((one.operator or "").removeprefix("autograd::engine::evaluate_function: "), _LONGEST)


def _moment(peak: MemoryPeak) -> str:
    where = [] if peak.step is None else [f"in step {peak.step}"]
    where.append("in the optimizer's step" if peak.phase == "optimizer" else f"in {peak.phase}")
    where += [f"of {peak.unit}"] if peak.unit else []
    where += [f"under {_operator(peak)}"] if peak.operator else []
    allocated = "" if peak.allocated_bytes is None else f"{format_bytes(peak.allocated_bytes)} allocated, "
    return f"Peak {', '.join(where)}: {allocated}{format_bytes(peak.risen_bytes)} more than when the trace began."


def memory_by_unit(figures: TraceFigures) -> Section | None:
    """The same blocks by unit; None if no unit or annotation holds any."""
    holders = figures.memory_peaks[0].holders if figures.memory_peaks else ()
    if all(holder.unit is None for holder in holders):
        return None
    sums: dict[str | None, Counter[str]] = defaultdict(Counter)
    for holder in holders:
        sums[holder.unit][_HELD[holder.category][1]] += holder.bytes
    columns = dict.fromkeys(name for _, name in _HELD.values())
    rows: list[Row] = [
        {"unit": unit or "(none)", "all": Quantity(held.total(), "B"),
         **{name: Quantity(held[name], "B") if name in held else None for name in columns}}
        for unit, held in sorted(sums.items(), key=lambda item: -item[1].total())
    ]  # fmt: skip
    return section(
        f"Memory at the peak on {figures.memory_peaks[0].device}, by unit", rows,
        "The same blocks by the unit, or the annotation, that was running when they were made.",
    )  # fmt: skip


def graphs(figures: TraceFigures) -> Section | None:
    """The replays of graphs, and how much of the trace is their capture."""
    if (found := figures.graphs) is None:
        return None
    captures, sentences = found.captures, []
    rows: list[Row] = [
        {
            "graph": "capture not in the trace" if one.capture is None else f"capture {one.capture + 1}",
            "captured launches": None if one.capture is None else captures[one.capture].launches,
            "replays": one.count, "device events each": one.events, "device busy": ns(one.busy_ns),
        }
        for one in found.replays
    ]  # fmt: skip
    if captures:
        sentences.append(
            f"Captures: {len(captures):,}, of {sum(one.launches for one in captures):,} kernel launches, within "
            f"{format_ns(sum(one.end_ns - one.start_ns for one in captures))} of the host. Captured kernels run only "
            "when the graph is replayed."
        )
    if rows:
        sentences.append("All kernels of a replay count as launched by the call that replays their graph.")
    caption = "Replays of CUDA or HIP graphs; those with equally many device events share a row"
    return section("Graphs", rows, caption, sentences)


SECTIONS: tuple[Callable[[TraceFigures], Section | None], ...] = (
    windows, exposed_communication, messages, idle_time, lone_copies, what_ifs, host_stalls, host_time, work_by_class,
    operators, operators_by_shape, kernels, contention, memory_at_peak, memory_by_unit, graphs,
)  # fmt: skip
"""In the order of reading."""


def sections_of(figures: TraceFigures, timeline: Timeline | None = None) -> list[Section]:
    """The sections of one trace, page-only ones last; gaps need its timeline."""
    over = per_step(figures)
    units = f"{counted(len(figures.units), 'unit')}{f', the first {MOST_UNITS}' if figures.units[MOST_UNITS:] else ''}"
    on_page = (
        ("Every step in numbers", steps(figures),
         "Parts of every step; classes overlap, so they add up to more than the span"),
        ("Gaps in numbers", gaps(figures, timeline), "Gaps by length: number and total time, over the whole trace"),
        ("Collectives, the most exposed first", collectives(figures),
         f"By operation, size of the unsharded tensor and group. Counts and sums {over}; concurrent collectives add "
         "up"),
        (units, units_of(figures), f"Each unit's own spans, {over}; concurrent communication counts for each unit"),
        (f"Overheads, {over}", overheads(figures), f"Overheads, {over}"),
    )  # fmt: skip
    found = [
        *(make(figures) for make in SECTIONS),
        *(section(title, rows, caption, text=("units", "group", "figure"), where="page", shown=None)
          for title, rows, caption in on_page),
    ]  # fmt: skip
    return [one for one in found if one is not None]


def gaps(one: TraceFigures, timeline: Timeline | None) -> list[Row]:
    """Gaps between collectives by whether they block, and idle gaps by cause, by length over the whole trace."""
    if timeline is None or not len(timeline.spans):
        return []
    found: dict[str, list[int]] = defaultdict(list)
    for collective in one.collectives:
        if collective.gap_ns:
            name = f"between collectives, {'blocking' if collective.gap_blocking else 'other'}"
            found[name].append(collective.gap_ns)
    begin, close = int(timeline.spans.starts.min()), int(timeline.spans.ends.max())
    names = idle_names(one)
    for cause, idle in idle_by_cause(timeline, begin, close):
        found[names[cause]] += (idle.ends - idle.starts).tolist()
    least = sorted({_bin(length) for lengths in found.values() for length in lengths})

    def row(first: str, cells: dict[str, list[int]]) -> Row:
        return {"from": first, **{n: f"{len(x):,} ({format_ns(sum(x))})" if x else None for n, x in cells.items()}}

    rows = [row(format_ns(low), {n: [x for x in of if _bin(x) == low] for n, of in found.items()}) for low in least]
    middle = {name: f"{format_ns(median(lengths))}, {format_ns(max(lengths))}" for name, lengths in found.items()}
    return [*rows, row("all", found), {"from": "median, longest", **middle}] if rows else []


def _bin(length: int) -> int:
    """The last of 1, 2, 5, 10, 20, 50 ... that is not larger."""
    power = 10 ** (len(str(length)) - 1)
    return int(max(n * power for n in (1, 2, 5) if n * power <= length))


def steps(one: TraceFigures) -> list[Row]:
    """Where the time of every step, and of the whole trace, goes."""
    every = [step for step in one.steps if step.step is not None]
    names = [f"{step.step}" if step.name is None else f"{step.step}: {step.name}" for step in every]
    keys = {
        "span": "span_ns", "compute": "compute_ns", "communication": "comm_ns", "exposed": "exposed_ns",
        "exposed to all": "exposed_any_ns", "preparation": "prep_ns", "copy": "copy_ns",
        "unclassified": "unclassified_ns", "idle": "idle_ns",
        **{name: f"idle_{cause}_ns" for cause, name in idle_names(one).items()},
    }  # fmt: skip
    return [
        {
            each(one) if every else "step": name,
            **{head: ns(getattr(step.breakdown, key)) for head, key in keys.items()
               if head == "span" or not one.host_only},
            "late reductions (give-way)": ns(step.giveway.lost_ns), "copy-in": ns(step.copies.copy_in_ns),
            "copy-out": ns(step.copies.copy_out_ns), "waits for a reduction": ns(step.reduce_wait.host_ns),
        }
        for step, name in zip((*every, whole(one)), (*names, "whole trace"))
    ]  # fmt: skip


def per_step(one: TraceFigures) -> str:
    """The time base of sums over units, collectives and waits."""
    if not has_steps(one):
        return "over the whole trace"
    return f"per {each(one)}, mean of {len(one.steps)}" if len(one.steps) > 1 else f"of the only {each(one)}"


def units_of(one: TraceFigures) -> list[Row]:
    """One row per unit, per step."""
    steps = len(parts(one))
    return [
        {
            "unit": unit.unit, "compute": ns(unit.compute_ns, steps), "communication": ns(unit.comm_ns, steps),
            "exposed": ns(unit.exposed_ns, steps),
            "exposed share": share(unit.exposed_ns / unit.comm_ns if unit.comm_ns else None),
            "preparation": ns(unit.prep_ns, steps), "copy": ns(unit.copy_ns, steps),
            "collectives": count_per(unit.collectives, steps),
        }
        for unit in one.units[:MOST_UNITS]
    ]  # fmt: skip


def collectives(one: TraceFigures) -> list[Row]:
    """One row per operation, size and group, per step; the most exposed first."""
    groups: dict[tuple[str, int | None, str | None, int | None], list[CollectiveFigures]] = defaultdict(list)
    for found in one.collectives:
        groups[found.op, found.bytes, found.group, found.group_size].append(found)
    alike = Counter((op, format_bytes(size), *group) for op, size, *group in groups)
    steps, rows = len(parts(one)), list[Row]()
    for (op, size, group, ranks), members in sorted(
        groups.items(), key=lambda item: -sum(found.exposed_ns for found in item[1])
    ):
        text = format_bytes(size)
        if size is not None and alike[op, text, group, ranks] > 1:  # two rows would look alike
            text = f"{size:,} B"
        names = list(dict.fromkeys(found.unit for found in members if found.unit is not None))
        rows.append({
            "collective": op, "bytes": text, "units": f"{len(names)} units" if names[1:] else (*names, None)[0],
            "group": f"{group or 'unknown'} ({'?' if ranks is None else ranks} ranks)",
            "count": count_per(len(members), steps),
            "median duration": ns(median(found.duration_ns for found in members)),
            "algorithm bandwidth": Quantity(middle_of([found.algorithm_bandwidth for found in members]), "GB/s"),
            "bus bandwidth": Quantity(middle_of([found.bus_bandwidth for found in members]), "GB/s"),
            "exposed": ns(sum(found.exposed_ns for found in members), steps),
            "median queued": ns(middle_of([found.queued_ns for found in members])),
            "blocking gaps": blocking(members, steps),
        })  # fmt: skip
    return rows


def middle_of(values: Sequence[float | None]) -> float | None:
    """The median of the known values; None without any."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def blocking(members: Sequence[CollectiveFigures], steps: int) -> str:
    """Gaps in which a collective was launched already while compute ran: their number and time per step."""
    gaps = [one.gap_ns for one in members if one.gap_blocking and one.gap_ns is not None]
    return f"{count_per(len(gaps), steps)} ({format_ns(sum(gaps) / steps)})" if gaps else "0"


def overheads(one: TraceFigures) -> list[Row]:
    """Copies, waits for a reduction's buffer, and give-way: per step, as text."""
    copies, wait, give, steps = one.copies, one.reduce_wait, one.giveway, len(parts(one))

    def mean(total: int | None) -> str:
        return format_ns(None if total is None else total / steps)

    device = "" if wait.device_ns is None else f"; compute stream idle for {mean(wait.device_ns)} of it"
    late = give.reason or "not known"
    if give.index is not None:
        stretch = "" if give.stretch is None else f"preparatory kernels take {give.stretch:.2f} times as long; "
        baseline = f"; baseline: {give.baseline}, {give.samples} samples" if give.baseline else ""
        late = f"{format_percent(give.index)} of the trace, {mean(give.lost_ns)}: {stretch}"
        late += f"{count_per(give.reduces, steps)} reductions{baseline}"
    return [
        {"overhead": "copy-in and copy-out", "figure": f"{mean(copies.copy_in_ns)} in, {mean(copies.copy_out_ns)} out; "
         f"{mean(copies.exposed_ns)} exposed, {mean(copies.hidden_ns)} overlapped"},
        {"overhead": "waits for an earlier reduction", "figure": f"{count_per(wait.count, steps)}, host waiting "
         f"{mean(wait.host_ns)}{device}" if wait.count else "none"},
        {"overhead": "late reductions (give-way)", "figure": late},
    ]  # fmt: skip


def waits(members: Sequence[TraceFigures]) -> list[Row]:
    """Which rank of a job waits how long for which, per step; the longest waits first."""
    every = [(len(parts(one)), one, wait) for one in members for wait in one.waits_for]
    every.sort(key=lambda row: -row[2].waited_ns / row[0])
    span = {id(one): sum(part.breakdown.span_ns for part in parts(one)) for one in members}
    return [
        {
            "waiting": who(one), "for": f"rank {wait.rank}", "waited": ns(wait.waited_ns, steps),
            "share of the step": share(wait.waited_ns / span[id(one)] if span[id(one)] else None),
            "exposed": None if one.communication is None else ns(exposed_waits(one).get(wait.rank, 0), steps),
            "collectives": count_per(wait.collectives, steps),
        }
        for steps, one, wait in every[:_MOST_WAITS]
    ]  # fmt: skip
