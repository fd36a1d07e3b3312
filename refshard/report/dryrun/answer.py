"""The answer of a dry run: does it fit, how fast is it, where do memory and time go, what to change."""

import base64
import gzip
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from refshard.analysis.figures import TraceFigures
from refshard.dryrun.analyse import Analysis, Synchronisation
from refshard.dryrun.memory import Held
from refshard.dryrun.recording import ROOT, Category, Phase, Recording
from refshard.dryrun.request import Request
from refshard.events.writer import as_kineto
from refshard.quantities import format_bytes, format_percent, format_seconds, format_times
from refshard.report.blocks import (
    Answer,
    Block,
    Charts,
    Cover,
    Fact,
    Facts,
    Notes,
    Quantity,
    Row,
    Section,
    Text,
    TraceFile,
    Verdict,
    table,
)
from refshard.report.draw.embed import MOST_EMBEDDED
from refshard.report.trace.answer import as_objects, job_blocks, rank_blocks
from refshard.report.trace.findings import Finding, findings

_LISTED = 8
_HOST_BOUND = 0.1
"""Part of a step that the GPU waits for the host, from which on the step counts as host-bound."""
CATEGORIES = {
    Category.PARAMETERS: "parameters",
    Category.GRADIENTS: "gradients",
    Category.OPTIMIZER: "optimizer state",
    Category.UNSHARDED: "unsharded parameters",
    Category.ACTIVATIONS: "activations",
    Category.WORKSPACE: "workspaces",
    Category.OTHER: "other",
}
_PHASES = {Phase.OTHER: "outside modules", Phase.OPTIMIZER: "the optimizer step"}
_UNNAMED = {"": "the script", ROOT: "the model"}
_LIMITS = (
    "Exact: operators, their order, streams, waits, collectives and allocations are the script's own. Reserved memory "
    "is a simulation of torch's allocator. Durations are modelled.",
    "Values are not computed: the loss means nothing, and data-dependent control flow follows placeholders.",
    "Only one rank ran. Stragglers and uneven data are not modelled.",
    "Not modelled: data loaders, disks, networks shared with other jobs, and memory that libraries allocate outside "
    "torch's allocator.",
    "In refshard's sources, docs/explanation/dryrun.md explains how a dry run works, and "
    "docs/explanation/dryrun-validation.md shows how accurate it was on published runs.",
)


def dryrun_answer(found: Analysis, more: str = "") -> Answer:
    """The whole report; the status is 0 if the script fits, 1 if it does not, failed or has races. ``more`` is a line
    for the terminal.
    """
    data = as_object(found)
    return Answer(
        data=data,
        rows=[{key: value for key, value in data.items() if not isinstance(value, (dict, list))}],
        blocks=[
            Text(text=_title(found), where="terminal"),
            Facts(facts=list(_facts(found))),
            *_memory(found),
            Notes(sentences=sentences(found)),
            *_time(found),
            *_races(found),
            *_limits(found),
            *([Text(text=more, where="terminal")] if more else []),
            _verdict(found),
        ],
        status=0 if found.fits and found.run.answer.outcome != "failed" and not found.races else 1,
        cover=Cover(
            title=_what_ran(found.run.request),
            about=f"{_where_it_ran(found)}. The script ran on a fake GPU; nothing was computed.",
            fidelity="dry run",
        ),
    )


def _title(found: Analysis) -> str:
    rest = " and ".join(f"{format_bytes(one.bytes)} for {one.name}" for one in found.overheads)
    return (
        f"dry run: {_what_ran(found.run.request)}\n{_where_it_ran(found)}\nmemory of the GPU: "
        f"{format_bytes(found.hardware.memory_bytes)}, less {rest} (estimates)"
    )


def _where_it_ran(found: Analysis) -> str:
    """The rank, the cluster, and how many steps it took in how many seconds."""
    request, answer = found.run.request, found.run.refused or found.run.answer
    steps = f"{answer.steps_taken} optimizer {'step' if answer.steps_taken == 1 else 'steps'}"
    seconds = f"in {answer.wall_s:.1f} s on this machine"
    ended = {"oom": f"out of memory after {steps}, {seconds}", "failed": f"failed after {steps}, {seconds}"}
    return (
        f"rank {request.rank} of {request.world_size} on {request.cluster} ({found.hardware.about}); "
        f"{ended.get(answer.outcome, f'{steps} {seconds}')}"
    )


def _what_ran(request: Request) -> str:
    return " ".join(request.command if not request.module else ("-m", *request.command))


def _verdict(found: Analysis) -> Verdict:
    answer = found.run.answer
    if answer.outcome == "failed":
        where = [f"at {answer.where}"] if answer.where else []
        return Verdict(sentences=[f"FAILED: {answer.error}", *where], style="bad")
    usable, peak = format_bytes(found.usable_bytes), answer.peak
    routing = [f"Routing {one}" for one in _peaks_by_routing(found)]
    if found.fits:
        fits = (
            f"FITS: peak reserved {format_bytes(peak.reserved)} of {usable} usable "
            f"({format_bytes(found.headroom_bytes)} headroom); peak allocated {format_bytes(peak.allocated)}"
        )
        lead = [] if found.traced is None else [finding_of(found.traced.figures).lead]
        return Verdict(sentences=[fits, *routing, *_pace(found), *lead], style="good")
    needed = f"needs more than {usable}"
    if found.run.refused is not None:
        needed = (
            f"needs {format_bytes(peak.reserved)} reserved, {format_bytes(-found.headroom_bytes)} more than {usable}; "
            f"peak allocated {format_bytes(peak.allocated)}"
        )
    # Torch's error without its advice, and the line that raised it.
    refused = found.run.refused or answer
    refusal = f"{refused.error.partition(' Including')[0]} At {refused.where or 'a line inside torch'}."
    pace = [f"Without the memory limit: {words}" for words in _pace(found)]
    return Verdict(sentences=[f"DOES NOT FIT: {needed}", refusal, *routing, *pace], style="bad")


def _pace(found: Analysis) -> list[str]:
    """The step time, and the rates that are known."""
    if found.step_s is None:
        return []
    words = f"step time {format_seconds(found.step_s)}"
    if found.tokens_per_s is not None:
        words += f"; {found.tokens_per_s:,.0f} tokens/s/GPU"
        if (sharing := found.run.answer.sharing) > 1:
            words += f" ({sharing} ranks share each batch)"
    return [words if found.mfu is None else f"{words}; MFU {format_percent(found.mfu)}"]


def _facts(found: Analysis) -> Iterator[Fact]:
    """The figures to read first."""
    answer, usable = found.run.answer, format_bytes(found.usable_bytes)
    detail = (
        f"{format_bytes(answer.peak.reserved)} reserved at the peak ({usable} usable); "
        f"{format_bytes(answer.peak.allocated)} allocated."
    )
    if not found.fits:
        until = "" if found.run.refused else "Until memory ran out: "
        yield Fact(label="memory", value="does not fit", detail=f"{until}{detail}", style="bad")
    elif answer.outcome == "failed":
        value = f"{format_bytes(answer.peak.reserved)} reserved"
        yield Fact(label="memory until the failure", value=value, detail=detail)
    else:
        value = f"fits, {format_bytes(found.headroom_bytes)} left"
        yield Fact(label="memory", value=value, detail=detail, style="good")
    if found.traced is None:
        return
    figures = found.traced.figures
    yield Fact(
        label="step time", value=format_seconds(found.step_s), detail=f"Predicted: a replay of {_steps_of(figures)}."
    )
    if found.tokens is not None and found.tokens_per_s is not None:
        shared = f"; {answer.sharing} ranks share each batch" if answer.sharing > 1 else ""
        detail = f"{found.tokens:,.0f} tokens per step and GPU{shared}."
        yield Fact(label="tokens/s/GPU", value=f"{found.tokens_per_s:,.0f}", detail=detail)
    if found.mfu is not None:
        detail = f"{found.model_flops / 1e12:,.1f} trillion FLOPs per step, without recomputation."
        yield Fact(label="MFU", value=format_percent(found.mfu), detail=detail)
    steps = [step.breakdown for step in figures.steps]
    if any(step.comm_ns for step in steps):
        share = sum(step.exposed_ns for step in steps) / sum(step.span_ns for step in steps)
        detail = "Communication that runs while nothing computes."
        yield Fact(label="exposed communication", value=format_percent(share), detail=detail)
    if answer.choices:
        detail = "; ".join(_peaks_by_routing(found)) or "No size in the model depends on it."
        yield Fact(label="routing", value=f"assumed {found.run.request.routing}", detail=detail)
    count = sum(one.count for one in found.synchronisations)
    detail = "Calls that hold the GPU up are listed below." if count else "No line waits for the GPU."
    yield Fact(label="host synchronisations per step", value=f"{count:,}", detail=detail)


def _routing(found: Analysis) -> Iterator[str]:
    """Which choices an assumption made. Nothing if there were none."""
    choices = {(one.count, one.among, one.module) for one in found.run.answer.choices}
    modules = Counter((count, among, _without_numbers(module)) for count, among, module in choices)
    if not modules:
        return
    chosen = ", ".join(
        f"{times} modules ({module}) choose {count} of {among:,}"
        if times > 1
        else f"{_UNNAMED.get(module, module)} chooses {count} of {among:,}"
        for (count, among, module), times in sorted(modules.items(), key=lambda item: (-item[1], item[0]))[:_LISTED]
    )
    sizes = "" if found.run.answer.chosen_sizes else " No size in the model depends on it."
    yield f"Routing: assumed {found.run.request.routing}; {chosen}.{sizes}"


def _peaks_by_routing(found: Analysis) -> Iterator[str]:
    """Memory under the assumed routing and at worst, if sizes depend on it."""
    for rule, answer in found.run.by_routing.items():
        reserved, allocated = format_bytes(answer.peak.reserved), format_bytes(answer.peak.allocated)
        if answer.outcome == "failed":
            yield f"{rule}: failed ({answer.error})"
            continue
        own = rule == found.run.request.routing
        does_not_fit = not found.fits if own else answer.peak.allocated > found.usable_bytes
        may_not_fit = not own and answer.peak.reserved > found.usable_bytes
        doubt = "does not fit, " if does_not_fit else "may not fit, " if may_not_fit else ""
        yield f"{rule}: {doubt}peak reserved {reserved}, peak allocated {allocated}"


def _without_numbers(module: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _memory(found: Analysis) -> Iterator[Block]:
    memory = found.memory
    if not memory.held:
        return
    by_category: list[Row] = [
        {"memory at the peak": CATEGORIES[category], "allocated": Quantity(size, "B"),
         "of the peak": Quantity(size / max(memory.peak_bytes, 1), "share")}
        for category, size in memory.by_category().items()
    ]  # fmt: skip
    largest: list[Row] = [
        {"largest at the peak": CATEGORIES[one.category], "allocated in": _where(one), "operator": one.operator or "-",
         "bytes": Quantity(one.bytes, "B"), "blocks": one.blocks}
        for one in _merged(memory.held)
    ]  # fmt: skip
    overheads: list[Row] = [
        {"outside the allocator": one.name, "bytes": Quantity(one.bytes, "B"), "source": one.source}
        for one in found.overheads
    ]

    def charts() -> Any:
        from refshard.report.dryrun.memory_picture import memory_charts  # plotly takes a second to import

        return memory_charts(found)

    peak = f"{format_bytes(memory.peak_bytes)} allocated"
    yield Section(
        title="Memory", id="memory", nav="Memory", heading=False, blocks=[
            Charts(draw=charts),
            Section(title=f"At the peak, {peak}, by category", blocks=[table(by_category)], heading=False, folded=True),
            table(largest, left=3, title="Largest entries at the peak", shown=_LISTED, where="detail",
                  caption="Layers that differ only in their number are merged"),
            table(overheads, text=("source",), title="GPU memory outside torch's allocator (estimates)",
                  where="detail"),
        ],
    )  # fmt: skip


def _where(one: Held) -> str:
    """The module and the phase of the step that allocated it."""
    phase = _PHASES.get(one.phase, one.phase.name.lower())
    return f"{one.module}, {phase}" if one.module else phase


def _merged(held: tuple[Held, ...]) -> list[Held]:
    """Merge the rows of the same module in different layers: ``layers.*.mlp.up``."""
    sizes: Counter[tuple[object, ...]] = Counter()
    blocks: Counter[tuple[object, ...]] = Counter()
    for one in held:
        key = (one.category, _without_numbers(one.module), one.operator, one.phase)
        sizes[key] += one.bytes
        blocks[key] += one.blocks
    return [
        Held(category=key[0], module=key[1], operator=key[2], phase=key[3], bytes=size, blocks=blocks[key])  # type: ignore[arg-type]
        for key, size in sizes.most_common()
    ]


def _time(found: Analysis) -> Iterator[Block]:
    """What ``refshard trace`` says of the replayed steps."""
    if (traced := found.traced) is None:
        return
    figures = traced.figures

    def content() -> str | None:
        text = gzip.compress(as_kineto(found.trace).encode(), mtime=0)
        return base64.b64encode(text).decode() if len(text) <= MOST_EMBEDDED else None

    drawn = msgspec.structs.replace(figures, memory=())  # the section on memory has a better picture
    packed = TraceFile(id="trace", name="dryrun.json.gz", content=content)
    yield Section(
        title=f"Replayed: {_steps_of(figures)}", id="time", nav="Time", blocks=[
            *job_blocks(figures, finding_of(figures)),
            *rank_blocks(drawn, traced.kept, "replayed", packed),
        ],
    )  # fmt: skip


def finding_of(figures: TraceFigures) -> Finding:
    """The finding of the only rank."""
    (finding,) = findings([figures])
    return finding


def _steps_of(figures: TraceFigures) -> str:
    numbers = [str(step.step) for step in figures.steps]
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"


def _races(found: Analysis) -> Iterator[Block]:
    """Unordered accesses to the same memory from two streams, one race per line."""
    if found.races is None:
        return
    notes = [str(race) for race in found.races]
    title = "RACES: unordered accesses to the same memory from two streams" if notes else "Races"
    notes = notes or ["Races: none; all accesses to the same memory from different streams are ordered"]
    yield Section(title=title, id="races", nav="Races", blocks=[Notes(sentences=notes)])


def _limits(found: Analysis) -> Iterator[Block]:
    doubts: list[Row] = [
        {"operator": one.name, "why": one.reason, "launches": one.count, "priced at": Quantity(one.seconds, "s")}
        for one in sorted(found.prices.doubts, key=lambda one: -one.seconds)
    ]
    yield Section(
        title="Limits", id="doubts", nav="Limits", where="page", folded=True, blocks=[
            table(doubts, text=("why",), caption="Operators with an uncertain price, over the whole run"),
            Notes(sentences=_LIMITS),
        ],
    )  # fmt: skip


def sentences(found: Analysis) -> list[str]:
    """Where memory peaks, how certain the figures are, and what to change about memory and the host."""
    return [
        *_explained(found), *_routing(found), *_held_back(found), *_doubted(found), *_unknown_values(found),
        *_advice(found),
    ]  # fmt: skip


def _explained(found: Analysis) -> Iterator[str]:
    if len(found.run.recording):
        yield f"Memory peaks {moment(found.run.recording, found.memory.peak_at)}."


def _held_back(found: Analysis) -> Iterator[str]:
    """How long ``record_stream()`` holds memory, if that changes how much is reserved."""
    answer = found.run.answer
    if answer.held_until == "host":
        yield (
            "Reserved memory is an upper bound: memory kept by record_stream() counts until the host has "
            f"waited for the GPU ({answer.doubt})."
        )
    as_run = answer.peak_as_run
    if as_run is not None and as_run.reserved != answer.peak.reserved:
        yield (
            "record_stream() keeps freed memory until the GPU is done with it; the figures use the replay's times. "
            "While the script ran, such memory was kept until the host waited for the GPU, and "
            f"the peak was {format_bytes(as_run.reserved)} reserved."
        )


def _doubted(found: Analysis) -> Iterator[str]:
    """Uncertain prices, if they make up more than 1 % of the time of all launches."""
    doubts, total = found.prices.doubts, float(found.prices.seconds.sum())
    if doubts and (uncertain := sum(doubt.seconds for doubt in doubts)) > 0.01 * total:
        worst = doubts[0]
        yield (
            f"{format_percent(uncertain / total)} of the operators' time is uncertain; most of it in {worst.name}: "
            f"{worst.reason}."
        )


def _unknown_values(found: Analysis) -> Iterator[str]:
    """Where the host reads values that nothing computed."""
    unknown = [one for one in found.synchronisations if one.unknown]
    if found.traced is not None and unknown:
        places = ", ".join(dict.fromkeys(_place(one) for one in unknown[:_LISTED]))
        yield (
            f"The host reads {sum(one.count for one in unknown):,} values per step that a dry run does not compute; a "
            f"script that branches on them may take another path on a GPU. Where: {places}."
        )


def _place(one: Synchronisation) -> str:
    return one.site or "in backward or inside torch"


def moment(recording: Recording, at: int) -> str:
    """The phase and the module of event ``at``; a negative ``at`` is before the first event."""
    if at < 0:
        return "at the start"
    phase = Phase(int(recording.phases[at]))
    module = recording.module_table[recording.modules[at]]
    if phase == Phase.OTHER:
        return f"in {module}" if module else "outside the model's modules, in the script's own code"
    part = "the optimizer step" if phase == Phase.OPTIMIZER else phase.name.lower()
    return f"in {part}{f' of {module}' if module else ''}"


def _advice(found: Analysis) -> Iterator[str]:
    """Sentences on fragmentation and allocator retries, if any, and one on the largest loss of time."""
    answer = found.run.answer
    wasted = answer.peak.reserved - answer.peak.allocated
    if wasted > 0.08 * found.usable_bytes:
        yield (
            f"Fragmentation: peak reserved exceeds peak allocated by {format_bytes(wasted)}. Try: "
            "PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
    if answer.retries:
        yield (
            f"The allocator emptied its cache {format_times(answer.retries)} to serve an allocation; the host waits "
            "for the GPU each time. Try: a smaller batch, or more checkpointing."
        )
    if found.traced is None:
        return
    steps = [step.breakdown for step in found.traced.figures.steps]
    if sum(step.idle_host_ns or 0 for step in steps) > _HOST_BOUND * sum(step.span_ns for step in steps):
        yield (
            "Host-bound: the step time depends on the host. The profile's host needs "
            f"{format_seconds(found.hardware.host_s)} per kernel of a small layer, others may need a fraction. Measure "
            "yours: refshard calibrate."
        )
    assert found.step_s is not None
    if not found.fits or found.headroom_bytes < 0.1 * found.usable_bytes:
        return
    if found.recomputed_s > 0.01 * found.step_s:
        yield (
            f"Recomputation takes {format_seconds(found.recomputed_s)} per step "
            f"({format_percent(found.recomputed_s / found.step_s)}). Try: checkpointing fewer layers; "
            f"{format_bytes(found.headroom_bytes)} of memory are unused."
        )
    elif found.headroom_bytes > 0.2 * found.usable_bytes:
        yield (
            f"{format_bytes(found.headroom_bytes)} of memory are unused. Try: a larger batch, to amortise "
            "communication and launches."
        )


def as_object(found: Analysis) -> dict[str, Any]:
    """Everything, for ``--json``; bytes and seconds."""
    answer, traced = found.run.answer, found.traced
    steps = [] if traced is None else [step.breakdown for step in traced.figures.steps]

    def seconds(key: str) -> float | None:
        return sum(getattr(step, key) or 0 for step in steps) / len(steps) / 1e9 if steps else None

    return {
        "request": msgspec.to_builtins(found.run.request),
        "answer": msgspec.to_builtins(answer),
        "outcome": answer.outcome,
        "fits": found.fits,
        "peak_reserved_bytes": answer.peak.reserved,
        "peak_allocated_bytes": answer.peak.allocated,
        "refused": msgspec.to_builtins(found.run.refused),
        "by_routing": msgspec.to_builtins(found.run.by_routing),
        "usable_bytes": found.usable_bytes,
        "headroom_bytes": found.headroom_bytes,
        "overheads": [{"name": o.name, "bytes": o.bytes, "source": o.source} for o in found.overheads],
        "peak_by_category": {category.name.lower(): size for category, size in found.memory.by_category().items()},
        "peak_by_module": found.memory.by_module(),
        "step_s": found.step_s,
        "tokens_per_s_gpu": found.tokens_per_s,
        "mfu": found.mfu,
        "model_flops": found.model_flops,
        "compute_s": seconds("compute_ns"),
        "comm_s": seconds("comm_ns"),
        "exposed_comm_s": seconds("exposed_ns"),
        "idle_s": seconds("idle_ns"),
        "host_bound_s": seconds("idle_host_ns"),
        "trace": None if traced is None else as_objects([traced.figures])[0],
        "host_synchronisations": [
            {"why": s.why, "site": s.site, "count": s.count, "value_unknown": s.unknown} for s in found.synchronisations
        ],
        "races": None if found.races is None else [str(race) for race in found.races],
        "says": sentences(found),
        "doubts": [msgspec.to_builtins(doubt) for doubt in found.prices.doubts],
    }
