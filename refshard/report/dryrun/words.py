"""A dry run's report in the terminal: does it fit, how fast is it, where do memory and time go, what to change."""

from collections import Counter
from collections.abc import Iterator, Sequence

from refshard.dryrun.analyse import Analysis, Synchronisation
from refshard.dryrun.figures import StepFigures
from refshard.dryrun.memory import Held
from refshard.dryrun.races import Race
from refshard.dryrun.recording import Category, Phase, Recording
from refshard.dryrun.request import Request
from refshard.quantities import format_bytes, format_percent, format_seconds, format_times
from refshard.report.answer import Block, Notes, Text, Verdict, table

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
        *(_time(found) if found.figures is not None else ()),
        *_synchronisations(found),
        Notes(sentences=sentences(found)),
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
    pace = [] if found.figures is None else [f"{would}step time {format_seconds(found.figures.step_s)}{_rates(found)}"]
    if not found.fits:
        return Verdict(sentences=[f"DOES NOT FIT: {needed(found)}", refusal(found), *pace], style="bad")
    fits = (
        f"FITS: peak reserved {format_bytes(answer.peak.reserved)} of {usable} usable "
        f"({format_bytes(found.headroom_bytes)} headroom); peak allocated {format_bytes(answer.peak.allocated)}"
    )
    return Verdict(sentences=[fits, *pace], style="good")


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
    figures = found.figures
    assert figures is not None
    rows = [
        {"one step": name, "time": format_seconds(s), "of the step": format_percent(s / figures.step_s)}
        for name, s in (*parts_of_step(figures), ("step", figures.step_s))
    ]
    operators = [
        {
            "longest operators": one.name,
            "time": format_seconds(one.seconds),
            "of the step": format_percent(one.seconds / figures.step_s),
            "count": f"{one.count:,}",
        }
        for one in figures.operators[:_LISTED]
    ]
    return [table(rows), table(operators, detail=True)]


def parts_of_step(figures: StepFigures) -> tuple[tuple[str, float], ...]:
    """Seconds of a step by name. Compute and communication overlap, so the parts do not add up to the step."""
    return (
        ("compute", figures.compute_s),
        ("communication", figures.comm_s),
        ("exposed communication", figures.exposed_comm_s),
        ("idle", figures.idle_s),
        ("idle, waiting for the host", figures.host_bound_s),
    )


def _synchronisations(found: Analysis) -> list[Block]:
    if found.figures is None:
        return []
    if not found.synchronisations:
        return [Notes(sentences=["The host never waits for the GPU within a step."], detail=True)]
    rows = [
        {
            "host waits per step": one.why,
            "where": place(one),
            "times": f"{one.count:,}",
            "value": "not computed" if one.unknown else "",
        }
        for one in found.synchronisations[:_LISTED]
    ]
    return [table(rows, left=2)]


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
    """Where memory peaks, how uncertain the prices are, and what to change first."""
    return [*_explained(found), *_held_back(found), *_doubted(found), *_advice(found)]


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
    if found.figures is None:
        return
    figures = found.figures
    if figures.host_bound_s > _HOST_BOUND * figures.step_s:
        yield (
            "Host-bound: the step time depends on the host. The profile's host needs "
            f"{format_seconds(found.hardware.host_s)} per kernel of a small layer, others may need a fraction. Measure "
            "yours: refshard calibrate."
        )
    losses = {
        f"exposed communication takes {format_seconds(figures.exposed_comm_s)} per step. Try: prefetching, "
        "larger batches, or sharding within a node only (HSDP).": figures.exposed_comm_s,
        f"the GPU waits {format_seconds(figures.host_bound_s)} per step for the host. Try: torch.compile, fewer and "
        "larger operators, and no .item() in the step.": figures.host_bound_s,
        f"recomputation takes {format_seconds(_recomputed(found))} per step. Try: checkpointing fewer layers, if the "
        "headroom allows it.": _recomputed(found) if found.headroom_bytes > 0.1 * found.usable_bytes else 0.0,
    }
    worst = max(losses, key=lambda words: losses[words])
    if losses[worst] > 0.01 * figures.step_s:
        yield f"Largest loss: {worst}"
    elif found.fits and found.headroom_bytes > 0.2 * found.usable_bytes:
        yield (
            f"{format_bytes(found.headroom_bytes)} of memory are unused. Try: a larger batch, to amortise "
            "communication and launches."
        )


def _recomputed(found: Analysis) -> float:
    """Seconds of kernels that recompute activations."""
    assert found.step is not None
    rows = slice(found.step.first, found.step.end)
    again = found.run.recording.phases[rows] == Phase.RECOMPUTE
    return float(found.prices.seconds[rows][again].sum())
