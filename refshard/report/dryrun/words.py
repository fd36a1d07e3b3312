"""A dry run's report in the terminal: does it fit, how fast is it, where do memory and time go, what to change."""

from collections import Counter
from collections.abc import Iterator, Sequence

from refshard.dryrun.analyse import Analysis, Synchronisation
from refshard.dryrun.memory import Held
from refshard.dryrun.races import Race
from refshard.dryrun.recording import Category, Phase, Recording
from refshard.dryrun.request import Request
from refshard.quantities import format_bytes, format_percent, format_seconds, format_times
from refshard.report.answer import Block, Notes, Text, Verdict, table
from refshard.report.trace.terminal import job_blocks
from refshard.report.trace.words import Finding, findings
from refshard.tracing.figures import TraceFigures

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


def dryrun_blocks(found: Analysis, more: str = "") -> list[Block]:
    """The whole report, the verdict last."""
    return [
        Text(text=_title(found)),
        *_memory(found),
        Notes(sentences=sentences(found)),
        *_time(found),
        *([] if found.races is None else [_races(found.races)]),
        *([Text(text=more)] if more else []),
        _verdict(found),
    ]


def _title(found: Analysis) -> str:
    request = found.run.request
    rest = " and ".join(f"{format_bytes(one.bytes)} for {one.name}" for one in found.overheads)
    return (
        f"dry run: {what_ran(request)}\nrank {request.rank} of {request.world_size} on {request.cluster} "
        f"({found.hardware.about}); {how_it_ended(found)}\nmemory of the GPU: "
        f"{format_bytes(found.hardware.memory_bytes)}, less {rest} (estimates)"
    )


def what_ran(request: Request) -> str:
    """The script or the module, and its arguments."""
    return " ".join(request.command if not request.module else ("-m", *request.command))


def how_it_ended(found: Analysis) -> str:
    """How many steps it took, in how many seconds, and whether it failed."""
    answer = found.run.refused or found.run.answer
    steps = f"{answer.steps_taken} optimizer {'step' if answer.steps_taken == 1 else 'steps'}"
    seconds = f"in {answer.wall_s:.1f} s on this machine"
    if answer.outcome == "oom":
        return f"out of memory after {steps}, {seconds}"
    if answer.outcome == "failed":
        return f"failed after {steps}, {seconds}"
    return f"{steps} {seconds}"


def _verdict(found: Analysis) -> Verdict:
    answer = found.run.answer
    if answer.outcome == "failed":
        where = [f"at {answer.where}"] if answer.where else []
        return Verdict(sentences=[f"FAILED: {answer.error}", *where], style="bad")
    usable = format_bytes(found.usable_bytes)
    would = "" if found.fits else "Without the memory limit: "
    pace = [] if found.step_s is None else [f"{would}step time {format_seconds(found.step_s)}{_rates(found)}"]
    if not found.fits:
        return Verdict(sentences=[f"DOES NOT FIT: {needed(found)}", refusal(found), *pace], style="bad")
    fits = (
        f"FITS: peak reserved {format_bytes(answer.peak.reserved)} of {usable} usable "
        f"({format_bytes(found.headroom_bytes)} headroom); peak allocated {format_bytes(answer.peak.allocated)}"
    )
    lead = [] if found.traced is None else [finding_of(found.traced.figures).lead]
    return Verdict(sentences=[fits, *pace, *lead], style="good")


def needed(found: Analysis) -> str:
    """How much memory a script that does not fit needs, if that is known."""
    peak, usable = found.run.answer.peak, format_bytes(found.usable_bytes)
    if found.run.refused is None:
        return f"needs more than {usable}"
    return (
        f"needs {format_bytes(peak.reserved)} reserved, {format_bytes(-found.headroom_bytes)} more than {usable}; peak "
        f"allocated {format_bytes(peak.allocated)}"
    )


def refusal(found: Analysis) -> str:
    """Torch's out-of-memory error without its advice, and the line of the script that raised it."""
    answer = found.run.refused or found.run.answer
    return f"{answer.error.partition(' Including')[0]} At {answer.where or 'a line inside torch'}."


def _rates(found: Analysis) -> str:
    words = ""
    if found.tokens_per_s is not None:
        words += f"; {found.tokens_per_s:,.0f} tokens/s/GPU"
        if (sharing := found.run.answer.sharing) > 1:
            words += f" ({sharing} ranks share each batch)"
    if found.mfu is not None:
        words += f"; MFU {format_percent(found.mfu)}"
    return words


def _memory(found: Analysis) -> list[Block]:
    memory = found.memory
    if not memory.held:
        return []
    share = 1 / max(memory.peak_bytes, 1)
    by_category = [
        {
            "memory at the peak": CATEGORIES[category],
            "allocated": format_bytes(size),
            "of the peak": format_percent(size * share),
        }
        for category, size in memory.by_category().items()
    ]
    largest = [
        {
            "largest at the peak": CATEGORIES[one.category],
            "allocated in": where(one),
            "operator": one.operator or "-",
            "bytes": format_bytes(one.bytes),
            "blocks": f"{one.blocks:,}",
        }
        for one in merged(memory.held)[:_LISTED]
    ]
    return [table(by_category), table(largest, left=3, detail=True)]


def where(one: Held) -> str:
    """The module and the phase of the step that allocated it."""
    phase = _PHASES.get(one.phase, one.phase.name.lower())
    return f"{one.module}, {phase}" if one.module else phase


def merged(held: tuple[Held, ...]) -> list[Held]:
    """Merge the rows of the same module in different layers: ``layers.*.mlp.up``."""
    sizes: Counter[tuple[object, ...]] = Counter()
    blocks: Counter[tuple[object, ...]] = Counter()
    for one in held:
        module = ".".join("*" if part.isdigit() else part for part in one.module.split("."))
        key = (one.category, module, one.operator, one.phase)
        sizes[key] += one.bytes
        blocks[key] += one.blocks
    return [
        Held(category=key[0], module=key[1], operator=key[2], phase=key[3], bytes=size, blocks=blocks[key])  # type: ignore[arg-type]
        for key, size in sizes.most_common()
    ]


def _time(found: Analysis) -> list[Block]:
    """What ``refshard trace`` says of the replayed steps."""
    if found.traced is None:
        return []
    figures = found.traced.figures
    return job_blocks([figures], finding_of(figures), f"Replayed: {which_steps(figures)}")


def finding_of(figures: TraceFigures) -> Finding:
    """The finding of the only rank."""
    (finding,) = findings([figures])
    return finding


def which_steps(figures: TraceFigures) -> str:
    """The numbers of the steps in the trace."""
    numbers = [str(step.step) for step in figures.steps]
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"


def place(one: Synchronisation) -> str:
    """The line of the script at which the host waits."""
    return one.site or "in backward or inside torch"


NO_RACES = "none; all accesses to the same memory from different streams are ordered"


def _races(races: Sequence[Race]) -> Notes:
    """Unordered accesses to the same memory from two streams, one race per line."""
    if not races:
        return Notes(sentences=[f"Races: {NO_RACES}"])
    return Notes(
        sentences=[str(race) for race in races], title="RACES: unordered accesses to the same memory from two streams"
    )


def sentences(found: Analysis) -> list[str]:
    """Where memory peaks, how certain the figures are, and what to change about memory and the host."""
    return [*_explained(found), *_held_back(found), *_doubted(found), *_unknown_values(found), *_advice(found)]


def _explained(found: Analysis) -> Iterator[str]:
    recording, at = found.run.recording, found.memory.peak_at
    if not len(recording):
        return
    yield f"Memory peaks {moment(recording, at)}."


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
        places = ", ".join(dict.fromkeys(place(one) for one in unknown[:_LISTED]))
        yield (
            f"The host reads {sum(one.count for one in unknown):,} values per step that a dry run does not compute; a "
            f"script that branches on them may take another path on a GPU. Where: {places}."
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
