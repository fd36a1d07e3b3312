"""Memory of the phases that a script annotates: which one has the peak, and what it found there."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from difflib import SequenceMatcher
from typing import Any

from refshard.dryrun.analyse import Analysis
from refshard.dryrun.phases import OUTSIDE, PhaseMemory
from refshard.dryrun.recording import Category
from refshard.quantities import format_bytes, format_times
from refshard.report.blocks import Block, Notes, Quantity, Row, Section, table
from refshard.report.dryrun.categories import CATEGORIES

_IN_ROW, _NAMED, _LISTED = 2, 3, 8
_WORTH = 0.01
"""Part of the peak from which on something that was carried over is named."""
_UNNAMED = (Category.OTHER, Category.ACTIVATIONS, Category.WORKSPACE)
"""What a line tells more of than the category."""
_CACHED = 0.1
"""Part of a phase's reserved memory that an earlier one left in the allocator's cache, from which on it is named."""


def lead_of(found: Analysis) -> list[str]:
    """Which phase has the peak, and what it found when it began."""
    if not found.phases:
        return []
    peak, where = format_bytes(found.memory.peak_bytes), _peak_in(found)
    if where.name == OUTSIDE:
        return [f"The peak is outside of the phases: {peak} allocated."]
    occurrence = f" (occurrence {where.highest.number} of {len(where.ranges)})" if len(where.ranges) > 1 else ""
    sums = Counter[str]()
    for one in where.entries:
        if one.carried:
            line = f" ({one.place})" if one.place and one.category in _UNNAMED else ""
            sums[f"{CATEGORIES[one.category]}{line} from {_named(one.made_in)}"] += one.bytes
    parts = [
        f"{format_bytes(size)} {what}"
        for what, size in sums.most_common(_NAMED)
        if size > _WORTH * found.memory.peak_bytes
    ]
    carried = f", of which {format_bytes(sums.total())} carried over: {', '.join(parts)}" if parts else ""
    return [f"The peak is in {where.name}{occurrence}: {peak} allocated{carried}."]


def _peak_in(found: Analysis) -> PhaseMemory:
    """The innermost phase at the peak of the run."""
    at = [one for one in found.phases if one.highest.peak_at == found.memory.peak_at]
    return max(at, key=lambda one: (one.name != OUTSIDE, one.highest.first))


def _named(name: str) -> str:
    return "outside of phases" if name == OUTSIDE else name


def phases_blocks(found: Analysis) -> Iterator[Block]:
    """A row for each phase, and what inherits its reserved memory; in detail, each occurrence and what it holds."""
    if not found.phases:
        return
    each: list[Row] = [
        {"phase": _named(one.name), "times": None if one.name == OUTSIDE else len(one.ranges),
         "peak allocated": Quantity(one.highest.peak_bytes, "B"),
         "peak reserved": Quantity(one.peak_reserved_bytes, "B"),
         "held before": Quantity(one.highest.begin_bytes, "B"),
         "kept after": Quantity(one.kept_bytes, "B"),
         "largest at its peak": ", ".join(
             f"{CATEGORIES[category]} {format_bytes(size)}" for category, size in [*one.by_category().items()][:_IN_ROW]
         )}
        for one in found.phases
    ]  # fmt: skip
    ranges = sorted((range_ for one in found.phases for range_ in one.ranges), key=lambda one: one.first)
    course: list[Row] = [
        {"in order": one.name, "occurrence": one.number, "allocated before": Quantity(one.begin_bytes, "B"),
         "peak": Quantity(one.peak_bytes, "B"), "after": Quantity(one.end_bytes, "B"),
         "made and kept": Quantity(one.kept_bytes, "B"), "reserved before": Quantity(one.begin_reserved_bytes, "B"),
         "peak reserved": Quantity(one.peak_reserved_bytes, "B")}
        for one in ranges if one.name != OUTSIDE
    ]  # fmt: skip
    largest: list[Row] = [
        {"at the peak of": _named(phase.name), "held": CATEGORIES[one.category], "made in": _named(one.made_in),
         "by": one.place or "-", "bytes": Quantity(one.bytes, "B"), "blocks": one.blocks}
        for phase in found.phases for one in phase.entries[:_LISTED]
    ]  # fmt: skip
    yield Section(
        title="Memory by phase", id="phases", nav="Phases", blocks=[
            table(each, text=("largest at its peak",), caption="Held before the occurrence with the highest peak; "
                  "kept after an occurrence that made it, at most"),
            Notes(sentences=list(_cached(found))),
            table(course, title="Each occurrence", where="detail"),
            table(largest, left=4, title="Largest entries at the peak of each phase", where="detail"),
        ],
    )  # fmt: skip


def _cached(found: Analysis) -> Iterator[str]:
    """Phases that do not need what is reserved while they run."""
    for one in found.phases:
        unused = one.peak_reserved_bytes - one.highest.peak_bytes
        if one.name != OUTSIDE and one.cached_since is not None and unused > _CACHED * one.peak_reserved_bytes:
            since = _named(one.cached_since)
            yield (
                f"{one.name} allocates at most {format_bytes(one.highest.peak_bytes)} of "
                f"{format_bytes(one.peak_reserved_bytes)} reserved: the rest was in the allocator's cache before, most "
                f"of it from {since}."
            )


def why_unreached(found: Analysis) -> tuple[str, str]:
    """Why a named phase has not run, and what to do."""
    answer, until, name = found.run.answer, found.run.request.until, found.unreached[0]
    began = {one.name for one in found.phases if one.name != OUTSIDE}
    steps = f"in {answer.steps_taken} optimizer {'step' if answer.steps_taken == 1 else 'steps'}"
    cut = answer.outcome == "stepped"
    if name in began:
        assert until is not None
        remedy = "Raise --steps." if cut else "Let the script run for longer."
        return f"phase '{name}' did not end {format_times(until[1])} {steps}", remedy
    seen = sorted({*began, *answer.ranges}, key=lambda one: (-SequenceMatcher(None, name, one).ratio(), one))
    known = f"The script annotates {', '.join(seen[:_LISTED])}: name one of these, or put" if seen else "Put"
    later = f" If it comes later, {'raise --steps' if until else f'add --until-phase {name}'}." if cut else ""
    return (
        f"no phase '{name}' {steps}",
        f'{known} what you want to account into torch.profiler.record_function("{name}") or an NVTX range.{later}',
    )


def phases_as_object(found: Analysis) -> dict[str, Any] | None:
    """For ``--json``: bytes; null in place of a name is what lies outside of phases."""
    if not found.run.request.watched:
        return None
    return {
        "peak_in": (_peak_in(found).name or None) if found.phases else None,
        "unreached": found.unreached,
        "says": [*lead_of(found), *_cached(found)],
        "phases": [
            {
                "name": one.name or None, "peak_allocated_bytes": one.highest.peak_bytes,
                "peak_reserved_bytes": one.peak_reserved_bytes, "peak_occurrence": one.highest.number,
                "held_before_bytes": one.highest.begin_bytes, "kept_bytes": one.kept_bytes,
                "peak_by_category": {category.name.lower(): size for category, size in one.by_category().items()},
                "entries": [
                    {**asdict(entry), "category": entry.category.name.lower(), "made_in": entry.made_in or None}
                    for entry in one.entries
                ],
                "cached_since": None if one.cached_since is None else _named(one.cached_since),
                "occurrences": [asdict(range_) for range_ in one.ranges],
            }
            for one in found.phases
        ],
    }  # fmt: skip
