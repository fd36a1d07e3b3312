"""The answer of a dry run: does it fit, how fast is it, where do memory and time go, what to change."""

import base64
import gzip
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from refshard.analysis.figures import TraceFigures
from refshard.analysis.mismatch import ROOT
from refshard.dryrun.advice import Advice
from refshard.dryrun.analyse import Analysis
from refshard.dryrun.memory import Held, without_numbers
from refshard.dryrun.recording import Phase, Recording
from refshard.dryrun.request import Request
from refshard.errors import Status
from refshard.events.writer import as_kineto
from refshard.outside_memory import EXPANDABLE_SEGMENTS
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
    Table,
    Text,
    TraceFile,
    Verdict,
    table,
)
from refshard.report.draw.embed import MOST_EMBEDDED
from refshard.report.dryrun.advice import advice_as_object, advice_blocks
from refshard.report.dryrun.against import Against, against_section
from refshard.report.dryrun.categories import CATEGORIES
from refshard.report.dryrun.phases import lead_of, phases_as_object, phases_blocks, why_unreached
from refshard.report.dryrun.prices import as_object as prices_as_object
from refshard.report.dryrun.prices import compared, measured_sentences
from refshard.report.trace.answer import as_objects, job_blocks, rank_blocks, where_block
from refshard.report.trace.findings import Finding, findings

_LISTED = 8
_FRAGMENTED = 0.08
"""Part of the usable memory that is reserved but not allocated at the peak, from which on it is named."""
_HOST_BOUND = 0.1
"""Part of a step that the GPU waits for the host, from which on the step counts as host-bound."""
_PHASES = {Phase.OTHER: "outside modules", Phase.OPTIMIZER: "the optimizer step"}
_UNNAMED = {"": "the script", ROOT: "the model"}
_ONE_RANK = "Only one rank ran. Stragglers and uneven data are not modelled."
_LIMITS = (
    "Exact: operators, their order, streams, waits, collectives and allocations are the script's own. Reserved memory "
    "is a simulation of torch's allocator. Durations are modelled.",
    "Values are not computed: the loss means nothing, and data-dependent control flow follows placeholders.",
    _ONE_RANK,
    "Not modelled: data loaders, disks, networks shared with other jobs, and memory that libraries allocate outside "
    "torch's allocator.",
    "In refshard's sources, docs/explanation/dryrun.md explains how a dry run works, and "
    "docs/explanation/validation.md shows how accurate it was on published runs.",
)


def dryrun_answer(
    found: Analysis, more: str = "", against: Against | None = None, advice: Advice | None = None, *, ranks: str = "",
    alone: Analysis | None = None,
) -> Answer:  # fmt: skip
    """The whole report; the status is 0 if the script fits, 1 if it does not, failed or has races, 3 if nothing tells
    since it took no optimizer step on the GPU. ``more`` is a line for the terminal, ``against`` another run to
    compare with, ``ranks`` names the ranks that ran if they were several, ``alone`` is the same without a trace's
    prices.
    """
    data = as_object(found)
    if advice is not None:
        data["advice"] = advice_as_object(advice)
    if against is not None:
        data["against"] = {"name": against.names[1], **as_object(against.other)}
    if (prices := prices_as_object(found, alone)) is not None:
        data["prices"] = prices
    return Answer(
        data=data,
        rows=[{key: value for key, value in data.items() if not isinstance(value, (dict, list))}],
        blocks=[
            Text(text=_title(found), where="terminal"),
            Facts(facts=list(_facts(found))),
            *_memory(found),
            *phases_blocks(found),
            Notes(sentences=sentences(found)),
            *([] if against is None else [against_section(found, against)]),
            *_time(found),
            *compared(found, alone),
            *_races(found),
            *_limits(found, ranks),
            *([Text(text=more, where="terminal")] if more else []),
            *([] if advice is None else advice_blocks(advice, fits=found.fits is not False)),
            _verdict(found, advice, list(measured_sentences(found, alone))),
        ],
        status=_status(found),
        cover=Cover(
            title=_what_ran(found.run.request),
            about=f"{_where_it_ran(found)}. The script ran on a fake GPU; nothing was computed.",
            fidelity="dry run",
        ),
    )


def _status(found: Analysis) -> int:
    if found.races or unanswered(found) is None:
        return 0 if found.fits and not found.races else 1
    return Status.NO_VERDICT


def _title(found: Analysis) -> str:
    rest = " and ".join(f"{format_bytes(one.bytes)} for {one.name}" for one in found.overheads)
    shown = found.nvidia_smi_bytes
    return (
        f"dry run: {_what_ran(found.run.request)}\n{_where_it_ran(found)}\nmemory of the GPU: "
        f"{format_bytes(found.hardware.memory_bytes)}, less {rest} (estimates)"
        + ("" if shown is None else f"\nnvidia-smi: {format_bytes(shown)} at the peak (reserved, and these estimates)")
    )


def unanswered(found: Analysis) -> tuple[str, str] | None:
    """Why there is no verdict, and what to do; None if there is one, or the script failed. A verdict is about training:
    it needs an optimizer step with work on the GPU; or about the phases that are named, which must all occur.
    """
    answer, recording, launches = found.run.answer, found.run.recording, found.launches
    if found.fits is not None or answer.outcome == "failed":
        return None
    if found.unreached:
        return why_unreached(found)
    steps = f"{answer.steps_taken} optimizer {'step' if answer.steps_taken == 1 else 'steps'} ran"
    if answer.steps_taken:
        return (
            f"{steps}, but nothing of their forward, backward or update is on the GPU",
            'The script trains on the CPU. Move the model and its inputs to the GPU: model.to("cuda"); an option for '
            "the device may be missing.",
        )
    if not launches:
        return (
            "no optimizer step ran, and nothing was launched on the GPU",
            "Give the script the arguments with which it trains. Processes that it starts itself are not followed: "
            "start ranks with torchrun or torch.multiprocessing.spawn.",
        )
    if (recording.phases == Phase.BACKWARD).any():
        return (
            f"backward ran ({launches:,} launches on the GPU), but no optimizer step did",
            "Steps are those of torch.optim.Optimizer: derive an optimizer of your own from it, and let the script run "
            "until one steps.",
        )
    return (
        f"no optimizer step ran, and no backward ({launches:,} launches on the GPU)",
        "A dry run answers for training. For a verdict on inference, let the script run it in "
        'torch.profiler.record_function("generate"), and add --until-phase generate.',
    )


def _unanswered_verdict(found: Analysis, why: str, remedy: str) -> Verdict:
    peak = f"peak reserved {format_bytes(found.run.answer.peak.reserved)}"
    return Verdict(sentences=[f"NO VERDICT: {why}; {peak}", remedy], style="doubtful")


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
    """The command; of a model that refshard trains, what it is."""
    if request.module and request.command[0].startswith("refshard."):
        return " ".join(request.command[1:])
    return " ".join(request.command if not request.module else ("-m", *request.command))


def _verdict(found: Analysis, advice: Advice | None, prices: list[str]) -> Verdict:
    answer = found.run.answer
    if answer.outcome == "failed":
        where = [f"at {answer.where}"] if answer.where else []
        return Verdict(sentences=[f"FAILED: {answer.error}", *where, *_blamed(found)], style="bad")
    if (why := unanswered(found)) is not None:
        return _unanswered_verdict(found, *why)
    usable, peak = format_bytes(found.usable_bytes), answer.peak
    routing = [f"Routing {one}" for one in _peaks_by_routing(found)]
    if found.fits:
        fits = (
            f"FITS: peak reserved {format_bytes(peak.reserved)} of {usable} usable "
            f"({format_bytes(found.headroom_bytes)} headroom); peak allocated {format_bytes(peak.allocated)}"
        )
        lead = [] if found.traced is None else [finding_of(found.traced.figures).lead]
        return Verdict(
            sentences=[*_raced(found), fits, *lead_of(found), *routing, *_pace(found), *prices, *lead],
            style="bad" if found.races else "good",
        )
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
    enough = [] if advice is None else [one.change for one in advice.remedies if one.tried.fits]
    remedy = [f"Fits with {', or with '.join(enough)} (dry-run)"] if enough else []
    return Verdict(
        sentences=[
            f"DOES NOT FIT: {needed}", refusal, *_raced(found), *lead_of(found), *routing, *pace, *prices, *remedy,
        ],
        style="bad",
    )  # fmt: skip


def _raced(found: Analysis) -> Iterator[str]:
    """That streams race, which may make a run that fits train wrong."""
    if count := len(found.races or ()):
        yield f"RACES: {count} pair{'s' * (count > 1)} of unordered accesses to the same memory; see Races."


def _blamed(found: Analysis) -> Iterator[str]:
    """The value that probably failed a check of the script."""
    if found.run.answer.blamed:
        yield (
            f"Probably because {found.run.answer.blamed} reads a value that a dry run does not compute: it gets a "
            "placeholder. Leave the check out of a dry run."
        )


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
    if found.fits is None:
        until = " until the failure" if answer.outcome == "failed" else ""
        yield Fact(label=f"memory{until}", value=f"{format_bytes(answer.peak.reserved)} reserved", detail=detail)
    elif not found.fits:
        until = "" if found.run.refused else "Until memory ran out: "
        yield Fact(label="memory", value="does not fit", detail=f"{until}{detail}", style="bad")
    else:
        value = f"fits, {format_bytes(found.headroom_bytes)} left"
        yield Fact(label="memory", value=value, detail=detail, style="good")
    if found.nvidia_smi_bytes is not None:
        detail = "At the peak: reserved memory, and what lies outside torch's allocator (estimated)."
        yield Fact(label="nvidia-smi", value=format_bytes(found.nvidia_smi_bytes), detail=detail)
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
    modules = Counter((count, among, without_numbers(module)) for count, among, module in choices)
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
            *_segments(found),
        ],
    )  # fmt: skip


def _segments(found: Analysis) -> Iterator[Block]:
    """Peak reserved memory with both settings of the allocator."""
    if (other := found.run.answer.other_segments) is None:
        return
    fits = {True: "fits", False: "does not fit"}
    rows: list[Row] = [
        {"expandable segments": "no" if other.expandable else "yes", "peak reserved":
         Quantity(found.run.answer.peak.reserved, "B"), "within the GPU's memory": fits[found.run.refused is None]},
        {"expandable segments": "yes" if other.expandable else "no", "peak reserved": Quantity(other.reserved, "B"),
         "within the GPU's memory": fits[other.fits]},
    ]  # fmt: skip
    yield table(rows, title="Both settings of the allocator (the script ran with the first)", where="detail")


def _where(one: Held) -> str:
    """The module and the phase of the step that allocated it."""
    phase = _PHASES.get(one.phase, one.phase.name.lower())
    return f"{one.module}, {phase}" if one.module else phase


def _merged(held: tuple[Held, ...]) -> list[Held]:
    """Merge the rows of the same module in different layers: ``layers.*.mlp.up``."""
    sizes: Counter[tuple[object, ...]] = Counter()
    blocks: Counter[tuple[object, ...]] = Counter()
    for one in held:
        key = (one.category, without_numbers(one.module), one.operator, one.phase)
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
    goes = where_block(figures, traced.timeline, "replayed", found.recomputed)
    yield Section(
        title=f"Replayed: {_steps_of(figures)}", id="time", nav="Time", blocks=[
            goes, *_job(found, figures),
            *rank_blocks(drawn, traced.kept, "replayed", packed),
        ],
    )  # fmt: skip


def _job(found: Analysis, figures: TraceFigures) -> list[Block]:
    """Of a run that does not fit the figures only: advice about time would be for a run that never takes place."""
    blocks = job_blocks(figures, finding_of(figures))
    return blocks if found.fits is not False else [block for block in blocks if isinstance(block, Table)]


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


def _limits(found: Analysis, ranks: str) -> Iterator[Block]:
    doubts: list[Row] = [
        {"operator": one.name, "why": one.reason, "launches": one.count, "priced at": Quantity(one.seconds, "s")}
        for one in sorted(found.prices.doubts, key=lambda one: -one.seconds)
    ]
    yield Section(
        title="Limits", id="doubts", nav="Limits", where="page", folded=True, blocks=[
            table(doubts, text=("why",), caption="Operators with an uncertain price, over the whole run"),
            Notes(sentences=[_ranks_limit(ranks) if one == _ONE_RANK else one for one in _LIMITS]),
        ],
    )  # fmt: skip


def _ranks_limit(ranks: str) -> str:
    if not ranks:
        return _ONE_RANK
    return f"Of the ranks, {ranks} ran, each alone; the figures are those of one. Stragglers are not modelled."


def sentences(found: Analysis) -> list[str]:
    """Where memory peaks, how certain the figures are, and what to change about memory and the host."""
    return [
        *_explained(found), *_several_gpus(found), *_loading(found), *_paged(found), *_batches(found),
        *_first_step_only(found), *_compiled(found), *_routing(found), *_held_back(found), *_doubted(found),
        *_unknown_values(found), *_advice(found),
    ]  # fmt: skip


def _explained(found: Analysis) -> Iterator[str]:
    if len(found.run.recording):
        yield f"Memory peaks {moment(found.run.recording, found.memory.peak_at)}."


def _several_gpus(found: Analysis) -> Iterator[str]:
    if others := found.run.answer.others:
        each = ", ".join(f"GPU {gpu} {format_bytes(size)}" for gpu, size in others.items())
        yield (
            f"The process uses {len(others) + 1} GPUs. Peaks are those of the one that holds most; reserved on others: "
            f"{each}. Memory by purpose and the step time are of all of them."
        )


def _loading(found: Analysis) -> Iterator[str]:
    """The peak before the first forward pass, if it is at least half the peak after it."""
    memory = found.memory
    loading, training = memory.loading_peak_bytes, memory.training_peak_bytes
    if not training or loading < training / 2:
        return
    needs = f"Loading needs {format_bytes(loading)} allocated, training {format_bytes(training)}."
    yield needs if loading <= training else f"{needs} Try: load and quantise layer by layer."


def _paged(found: Analysis) -> Iterator[str]:
    if size := found.run.answer.managed_bytes:
        yield (
            f"Paged optimizer state: {format_bytes(size)} of managed memory, which no figure here includes. The driver "
            "moves it to the host when the GPU is full; updates are priced as if it were on the GPU."
        )


def _batches(found: Analysis) -> Iterator[str]:
    """Batches of different lengths: the longest seen, and whether the peak is stable."""
    request, answer = found.run.request, found.run.answer
    if not answer.batches:
        return
    sequences, tokens = max(answer.batches, key=lambda shape: (shape[1], shape[0]))
    longest = f"{sequences:,} x {tokens:,} tokens"
    if len(answer.batches) > 1:
        stable = " Try: --steps auto, which goes on until the peak is stable."
        if request.until_stable:
            rising = answer.outcome == "stepped" and answer.steps_taken >= request.steps
            stable = f" After {answer.steps_taken} steps the peak was {'not yet ' if rising else ''}stable."
        yield (
            f"Batches vary: {len(answer.batches)} shapes seen, the longest seen {longest}. Longer ones need more "
            f"memory.{stable}"
        )
    elif request.until_stable:
        yield (
            f"All batches are of {longest}. Batches of mixed lengths fragment memory more (measured elsewhere: LoRA "
            "22.1 GiB became 22.2, full fine-tuning 35.5 became 36.3)."
        )


def _first_step_only(found: Analysis) -> Iterator[str]:
    """One step does not show what later ones need."""
    answer = found.run.answer
    if found.fits and answer.steps_taken == 1:
        what = "--steps 3" if answer.outcome == "stepped" else "let the script train for more steps"
        if (until := found.run.request.until) is not None and answer.outcome == "stepped":
            what = f"--until-phase {until[0]}:{until[1] + 1}"
        yield (
            "Only one optimizer step ran: optimizers make their state at its end, so later steps may need more memory. "
            f"Try: {what}."
        )


def _compiled(found: Analysis) -> Iterator[str]:
    """What torch.compile made, and each line that made it stop or start over."""
    if (compiled := found.run.answer.compiled) is None:
        return
    graphs = f"{compiled.graphs:,} {'graph' if compiled.graphs == 1 else 'graphs'}"
    yield f"torch.compile made {graphs}; the time to compile is not part of a step."
    for what, places in (("Graph break", compiled.breaks), ("Compiled again", compiled.recompiled)):
        for place in places[:_LISTED]:
            times = f" ({format_times(place.count)})" if place.count > 1 else ""
            yield f"{what}{times} at {place.line}: {place.reason}"
        if rest := places[_LISTED:]:
            yield f"{what}: {sum(place.count for place in rest):,} more, at other lines."


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
    if not found.unknown_reads:
        return
    places = ", ".join(site or "in backward or inside torch" for site in list(found.unknown_reads)[:_LISTED])
    yield (
        f"Values that a dry run does not compute were read {format_times(found.unknown_reads.total())} and are "
        "placeholders: losses and metrics printed from them mean nothing, and a script that branches on them may take "
        f"another path on a GPU. Where: {places}."
    )


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
    """Facts about fragmentation, allocator retries, the host, recomputation and unused memory."""
    answer = found.run.answer
    wasted, other = answer.peak.reserved - answer.peak.allocated, answer.other_segments
    if wasted > _FRAGMENTED * found.usable_bytes and not (other is not None and other.expandable is False):
        tried = "" if other is None else f" With {EXPANDABLE_SEGMENTS}: {format_bytes(other.reserved)} reserved."
        yield f"Fragmentation: peak reserved exceeds peak allocated by {format_bytes(wasted)}.{tried}"
    if answer.retries:
        yield (
            f"The allocator emptied its cache {format_times(answer.retries)} to serve an allocation; the host waits "
            "for the GPU each time."
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
    if not found.fits:
        return
    unused = found.headroom_bytes > 0.1 * found.usable_bytes
    again = sum(found.recomputed.values())
    if unused and again > 0.01 * found.step_s:
        yield (
            f"Recomputation takes {format_seconds(again)} per step "
            f"({format_percent(again / found.step_s)}), and {format_bytes(found.headroom_bytes)} of "
            "memory are unused."
        )
    elif found.headroom_bytes > 0.2 * found.usable_bytes:
        yield (
            f'{format_bytes(found.headroom_bytes)} of memory are unused. --largest "--batch {{}}" finds the largest '
            "batch that fits."
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
        "no_verdict": None if (why := unanswered(found)) is None else why[0],
        "peak_reserved_bytes": answer.peak.reserved,
        "peak_allocated_bytes": answer.peak.allocated,
        "nvidia_smi_bytes": found.nvidia_smi_bytes,
        "refused": msgspec.to_builtins(found.run.refused),
        "by_routing": msgspec.to_builtins(found.run.by_routing),
        "usable_bytes": found.usable_bytes,
        "headroom_bytes": found.headroom_bytes,
        "overheads": [{"name": o.name, "bytes": o.bytes, "source": o.source} for o in found.overheads],
        "peak_by_category": {category.name.lower(): size for category, size in found.memory.by_category().items()},
        "peak_by_module": found.memory.by_module(),
        "phases": phases_as_object(found),
        "loading_peak_allocated_bytes": found.memory.loading_peak_bytes,
        "training_peak_allocated_bytes": found.memory.training_peak_bytes,
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
