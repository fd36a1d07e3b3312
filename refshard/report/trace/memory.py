"""Who holds a trace's memory at its peak: rows by purpose and unit."""

from collections import defaultdict
from collections.abc import Sequence

from refshard.analysis.figures import Category, Holder, MemoryPeak, TraceFigures
from refshard.quantities import format_bytes, format_part, format_percent
from refshard.report.blocks import Section
from refshard.report.trace.wording import cut, section

PURPOSES: dict[Category, str] = {
    "before, kept": "allocated before the trace, never freed in it",
    "before, freed later": "allocated before the trace, freed in it",
    "kept": "allocated in forward, alive after an optimizer step",
    "activations": "activations (made in forward, alive in backward)",
    "forward": "temporaries of forward (backward does not need them)",
    "gradients": "gradients (made in backward, outlive it)",
    "backward": "temporaries of backward",
    "optimizer state": "optimizer state (made in a step, outlives it)",
    "optimizer": "temporaries of the optimizer",
    "all-gather": "unsharded parameters and all-gather buffers",
    "reduction": "gradient reduction buffers",
    "collective": "buffers of other collectives",
    "other": "not known (under no operator)",
}
_SHORT: dict[Category, str] = {
    "before, kept": "before the trace",
    "before, freed later": "before the trace",
    "kept": "kept",
    "activations": "activations",
    "gradients": "gradients",
    "optimizer state": "optimizer state",
    "all-gather": "all-gather",
    "reduction": "reduction",
    "collective": "collectives",
    "forward": "temporary",
    "backward": "temporary",
    "optimizer": "temporary",
    "other": "other",
}
"""Columns, in their order."""
_REMEDIES: dict[Category, str] = {
    "before, kept": "Most was allocated before the trace: shard parameters, gradients and optimizer state",
    "activations": "Most is activations: checkpoint them, or use a smaller microbatch or shorter sequences",
    "all-gather": "Most is unsharded parameters: reshard after forward, wrap smaller units, or prefetch fewer",
    "reduction": "Most is gradient reduction buffers: wrap smaller units, or reduce in a narrower dtype",
}
_LARGE = 0.1
"""Of what is reserved: less of it unused is not worth a remedy."""
_LONGEST = 60


def memory_at_peak(figures: TraceFigures) -> Section | None:
    """The GPU's allocator whose peak is highest, or the CPU's in a trace without GPUs."""
    if not figures.memory_peaks:
        return None
    peak, doubtful = figures.memory_peaks[0], []
    if peak.unmatched:
        doubtful.append(
            f"{peak.unmatched:,} blocks were handed out again though the trace does not show them freed: threads that "
            "the profiler does not follow free memory, and figures by purpose may be too high."
        )
    if peak.device == "cpu":
        doubtful.append(
            "The profiler counts a CPU's memory from when it begins, so parameters made before are not in it."
        )
    return section(
        title=f"Memory at the peak on {peak.device}",
        caption="Blocks alive when the allocator holds most, by what they are for.",
        rows=_by_purpose(peak.holders) or [{"held for": "not known: the trace has no addresses or totals"}],
        sentences=[_moment(peak), *_unused(peak), *_remedy(peak), *doubtful],
        text=("mostly by",),
    )


def memory_by_unit(figures: TraceFigures) -> Section | None:
    """The same blocks by unit; None where no unit or annotation holds any."""
    holders = figures.memory_peaks[0].holders if figures.memory_peaks else ()
    if all(holder.unit is None for holder in holders):
        return None
    return section(
        title=f"Memory at the peak on {figures.memory_peaks[0].device}, by unit",
        caption="The same blocks by the unit, or the annotation, that was running when they were made.",
        rows=_by_unit(holders),
    )


def _by_purpose(holders: Sequence[Holder]) -> list[dict[str, str]]:
    groups: dict[Category, list[Holder]] = defaultdict(list)
    for holder in holders:
        groups[holder.category].append(holder)
    total = sum(holder.bytes for holder in holders)
    return [
        {
            "held for": PURPOSES[category],
            "bytes": format_bytes(_bytes(members)),
            "share": format_percent(_bytes(members) / total),
            "blocks": "-" if None in counts else f"{sum(n for n in counts if n is not None):,}",
            "mostly by": _shortened(max(members, key=lambda one: one.bytes).operator or "-"),
        }
        for category, members in sorted(groups.items(), key=lambda item: -_bytes(item[1]))
        for counts in [[one.blocks for one in members]]
    ]


def _by_unit(holders: Sequence[Holder]) -> list[dict[str, str]]:
    sums: dict[str | None, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for holder in holders:
        sums[holder.unit][_SHORT[holder.category]] += holder.bytes
    columns = [name for name in dict.fromkeys(_SHORT.values()) if any(name in held for held in sums.values())]
    return [
        {
            "unit": unit or "(none)",
            "all": format_bytes(sum(held.values())),
            **{name: format_bytes(held[name]) if name in held else "-" for name in columns},
        }
        for unit, held in sorted(sums.items(), key=lambda item: -sum(item[1].values()))
    ]


def _bytes(members: Sequence[Holder]) -> int:
    return sum(one.bytes for one in members)


def _shortened(name: str) -> str:
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    return cut(name, _LONGEST)


def _moment(peak: MemoryPeak) -> str:
    where = [] if peak.step is None else [f"in step {peak.step}"]
    where.append({"optimizer": "in the optimizer's step"}.get(peak.phase, f"in {peak.phase}"))
    where += [f"of {peak.unit}"] if peak.unit else []
    where += [f"under {_shortened(peak.operator)}"] if peak.operator else []
    if peak.allocated_bytes is None:
        return f"Peak {', '.join(where)}: {format_bytes(peak.risen_bytes)} more than when the trace began."
    return (
        f"Peak {', '.join(where)}: {format_bytes(peak.allocated_bytes)} allocated, {format_bytes(peak.risen_bytes)} "
        "more than when the trace began."
    )


def _unused(peak: MemoryPeak) -> list[str]:
    """What is reserved and not allocated, at the peak of all moments: cache and fragmentation."""
    if peak.allocated_bytes is None or not peak.reserved_bytes:
        return []
    unused = peak.reserved_bytes - peak.allocated_bytes
    text = f"{format_part(unused, peak.reserved_bytes)} reserved are not allocated then: cache and fragmentation."
    if unused <= _LARGE * peak.reserved_bytes:
        return [text]
    return [f"{text} A snapshot tells which: torch.cuda.memory._dump_snapshot(FILE), then refshard trace FILE."]


def _remedy(peak: MemoryPeak) -> list[str]:
    sums: dict[Category, int] = defaultdict(int)
    for holder in peak.holders:
        sums[holder.category] += holder.bytes
    most = max(sums, key=lambda category: sums[category], default=None)
    if most is None or most not in _REMEDIES or 2 * sums[most] < sum(sums.values()):
        return []
    return [f"{_REMEDIES[most]} ({format_percent(sums[most] / sum(sums.values()), 0)} of the peak)."]
