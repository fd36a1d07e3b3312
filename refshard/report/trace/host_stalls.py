"""What holds the GPU up, in a table and sentences: which calls, where in the code, and what to do about them."""

from refshard.analysis.figures import NO_SYNC, TOLERATED_ERROR, HostStall, HostStalls, Stall, TraceFigures
from refshard.quantities import format_ns, format_percent
from refshard.report.blocks import Section
from refshard.report.trace.findings import SMALL
from refshard.report.trace.wording import cut, in_each, of_each, per, section

_LEAST = SMALL / 10
"""Rows are calls that take, or cause idle time of, this share of the step."""
_SHOWN = 8
_LONGEST = 48
_REMEDIES = {
    Stall.ITEM: "read values (.item(), .tolist(), if tensor:) only every n steps, or copy them into pinned memory with "
    "non_blocking=True and read them a step later",
    Stall.SHAPE: "keep sizes independent of values: torch.where or a mask instead of nonzero and boolean indexing",
    Stall.COPY: "pin_memory=True in the DataLoader, non_blocking=True in .to() and .cuda(), and read results a step "
    "later",
    Stall.SYNC: "take the wait out of the step; CUDA events and wait_stream order streams without stopping the host",
    Stall.ALLOCATOR: "warm up before the steps that count; if it goes on, leave the allocator headroom: smaller "
    "batches, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation",
    Stall.LOADING: "run some steps to warm up before those that count; CUDA_MODULE_LOADING=EAGER loads all kernels at "
    "the start",
    Stall.QUEUE: "nothing: the host is ahead of the GPU",
    Stall.OTHER: "run some steps to warm up before those that count: such calls mostly set up contexts, streams and "
    "graphs, once",
}  # fmt: skip
_UNCACHED = 0.25
"""From so many calls that give memory back for each kernel on, it is not cached at all."""
_CACHE = (
    "let torch cache memory: tensors are taken from the driver and given back to it all the time. Is "
    "PYTORCH_NO_CUDA_MEMORY_CACHING (on ROCm also PYTORCH_NO_HIP_MEMORY_CACHING) set?"
)
_TO_HOST = "copy results into pinned memory with non_blocking=True, and read them a step later"
_FROM_HOST = "pin_memory=True in the DataLoader, and non_blocking=True in .to() and .cuda()"
_LOADING_OF_HIP = (
    "run some steps to warm up before those that count; HIP_ENABLE_DEFERRED_LOADING=0 loads all kernels at the start"
)
_WHAT = {
    Stall.ITEM: "value read by the host",
    Stall.SHAPE: "size that depends on values",
    Stall.COPY: "blocking copy",
    Stall.LOADING: "kernel loading",
    Stall.QUEUE: "full launch queue",
}


def host_stalls_section(figures: TraceFigures) -> Section | None:
    """The calls that hold the GPU up, the worst first; None for a trace without a GPU's events."""
    found = figures.host_stalls
    if found is None:
        return None
    if found.places is None:
        return section(title=_TITLE, caption="", rows=(), sentences=(
            f"What holds the GPU up cannot be told: {found.reason}. Record CPU and CUDA activities together.",
        ))  # fmt: skip
    steps = found.steps or 1
    rows = [
        {
            "what": _what(one),
            "where": _where(one),
            "GPU idle caused": format_ns(one.idle_ns / steps),
            "host time in calls": format_ns(one.host_ns / steps),
            "calls": f"{one.count / steps:,.4g}",
        }
        for one in found.places
        if max(one.idle_ns, one.host_ns) >= _LEAST * found.span_ns
    ]
    return section(
        title=f"{_TITLE}, {per(figures)}",
        caption="Calls of the host that wait, allocate or load. GPU idle caused: how much sooner the next kernel would "
        "have started without them.",
        rows=rows,
        sentences=_sentences(found.places, found, figures),
        text=("where",),
        brief=_share(found, found.places[:1]) >= SMALL,
        shown=_SHOWN,
    )


_TITLE = "What holds the GPU up"


def _what(one: HostStall) -> str:
    """The purpose, and the driver's function."""
    return f"{_WHAT[one.kind]} ({one.call})" if one.kind in _WHAT else one.call


def _where(one: HostStall) -> str:
    """The line and the operator; without a line the operator and its layer or annotation; else the thread."""
    if one.line is not None:
        operator = f", {cut(one.operator, _LONGEST)}" if one.operator else ""
        path, bracket, rest = one.line.partition("(")
        line = "/".join(path.split("/")[-2:]) + bracket + rest  # the last two parts of the path will do
        return f"{cut(line, _LONGEST)}{operator}"
    found = " in ".join(cut(name, _LONGEST) for name in (one.operator, one.unit) if name)
    return found or f"thread {one.thread}"


def _share(found: HostStalls, places: tuple[HostStall, ...]) -> float:
    """Of the steps' time, the idle time that some places cause."""
    return sum(one.idle_ns for one in places) / found.span_ns if found.span_ns else 0.0


def _sentences(places: tuple[HostStall, ...], found: HostStalls, figures: TraceFigures) -> tuple[str, ...]:
    steps, share = found.steps or 1, _share(found, places[:1])
    if share < SMALL:
        limit = format_percent(SMALL, 0)
        sentences = [f"No blocking call itself idles the GPU for {limit} of {of_each(figures)} or more."]
    else:
        worst = places[0]
        sentences = [
            f"The GPU is held up most by: {_what(worst)} at {_where(worst)}. It makes the GPU idle for "
            f"{format_ns(worst.idle_ns / steps)} {in_each(figures)} ({format_percent(share)}).",
            f"Try: {_CACHE}" if _is_uncached(worst, places, figures) else f"Try: {_remedy(worst)}.",
        ]
    if len(places) > 1 and _share(found, places) >= SMALL:
        total = format_ns(sum(one.idle_ns for one in places) / steps)
        sentences.append(
            f"All such calls cause {total} of {format_ns(found.idle_ns / steps)} of idle time {in_each(figures)}."
        )
    if share >= SMALL and all(one.line is None for one in places):
        sentences.append("With with_stack=True in the profiler, the table names the Python functions.")
    if share < SMALL and (gain := _gain_without_waits(figures)):
        sentences.append(
            "But the host starts what follows later because it waits: if it never waited for the GPU, "
            f"{format_ns(gain)} {in_each(figures)} would be saved (see What if)."
        )
    queued = [one for one in places if one.kind is Stall.QUEUE]
    if sum(one.host_ns for one in queued) >= SMALL * found.span_ns:
        sentences.append("Launches that wait for a full queue are no problem: the host is ahead of the GPU.")
    return tuple(sentences)


def _is_uncached(worst: HostStall, places: tuple[HostStall, ...], figures: TraceFigures) -> bool:
    """Whether the allocator gives memory back so often that it cannot cache anything."""
    if worst.kind is not Stall.ALLOCATOR or not worst.call.endswith("Free"):  # a first step takes memory, and keeps it
        return False
    kernels = 0 if figures.operators is None else sum(one.count for one in figures.operators.classes)
    frees = sum(one.count for one in places if one.kind is Stall.ALLOCATOR and one.call.endswith("Free"))
    return 0 < _UNCACHED * kernels <= frees


def _gain_without_waits(figures: TraceFigures) -> int:
    """Nanoseconds of a step that go if the host never waits for the device, where a replay tells and it is no trifle.

    A wait idles the device longer than it lasts if the host has much to do after it.
    """
    found = figures.what_if
    if found is None or found.replay_error > TOLERATED_ERROR:
        return 0
    gain = next((one.gain_ns for one in found.what_ifs if one.what == NO_SYNC), 0)
    return gain if gain >= SMALL * found.step_ns else 0


def _remedy(one: HostStall) -> str:
    if one.kind is Stall.COPY and one.copied is not None and one.copied.startswith("Memcpy DtoH"):
        return _TO_HOST
    if one.kind is Stall.COPY and one.copied is not None and one.copied.startswith("Memcpy HtoD"):
        return _FROM_HOST
    if one.kind is Stall.LOADING and one.call.startswith("hip"):
        return _LOADING_OF_HIP
    return _REMEDIES[one.kind]
