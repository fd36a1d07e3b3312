"""The answers about CUDA memory snapshots, and memory timelines of torch's profiler."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePath

import msgspec

from refshard.analysis.snapshot import (
    DeviceFigures,
    FailureFigures,
    HistoryFigures,
    LineFigures,
    MemoryTimelineFigures,
    OomFigures,
    SizeFigures,
)
from refshard.outside_memory import EXPANDABLE_SEGMENTS
from refshard.plain import plain
from refshard.quantities import MIB, format_bytes, format_ns, format_part, format_percent, format_times
from refshard.report.blocks import Answer, Block, Notes, Quantity, Row, Text, Verdict, table
from refshard.report.trace.text import share

_LINES, _SIZES, _OOMS, _FREE = 12, 10, 5, 5
_LARGE = 0.1
"""Below this share of reserved memory, lost memory is not worth a remedy."""
_SUMS = {
    "asked for": "requested_bytes", "rounding": "rounding_bytes", "waiting for a stream": "pending_bytes",
    "free, in segments in use": "split_bytes", "free, in unused segments": "unused_bytes", "reserved": "reserved_bytes",
    "largest free block": "largest_free_bytes",
}  # fmt: skip


def memory_timeline_answer(timelines: Sequence[tuple[str, MemoryTimelineFigures]]) -> Answer:
    """The peak of each file, by category."""
    blocks: list[Block] = []
    verdicts, flat = [], []
    for file, one in timelines:
        ordered = sorted(one.by_category.items(), key=lambda item: -item[1])
        rows: list[Row] = [
            {"held for": name, "bytes": Quantity(size, "B"), "share": share(size / one.peak_bytes)}
            for name, size in ordered
        ]
        blocks.append(table(rows, title=f"{PurePath(file).name}: memory at the peak, by torch's categories"))
        verdicts.append(
            f"Peak: {format_bytes(one.peak_bytes)}, {format_ns(one.peak_ns)} after the first event; most is "
            f"{ordered[0][0]} ({format_percent(ordered[0][1] / one.peak_bytes, 0)})."
        )
        flat += [{"file": file, "category": name, "bytes": size} for name, size in one.by_category.items()]
    data = [{"file": file, **msgspec.to_builtins(one)} for file, one in timelines]
    return Answer(
        data={"verdict": verdicts, "memory_timelines": data}, rows=flat, blocks=[*blocks, Verdict(sentences=verdicts)]
    )


def snapshot_answer(
    snapshots: Sequence[tuple[str, Mapping[str, str | int | float], Sequence[DeviceFigures]]],
) -> Answer:
    """The devices of each snapshot, the verdict last."""
    blocks: list[Block] = []
    verdicts: list[str] = []
    data, rows = [], []
    for file, settings, devices in snapshots:
        conf = str(settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")
        built = []
        for one in devices:
            blocks += _blocks(file, conf, one)
            name = "" if len(snapshots) == len(devices) == 1 else f"{PurePath(file).name}, device {one.device}: "
            verdicts += [f"{name}{plain(found)}" for found in _verdict(one, conf)]
            now, history = one.fragmentation, one.history
            sums = {key: getattr(now, key) for key in ("reserved_bytes", "active_bytes", "allocated_bytes")}
            peak = {
                "peak_requested_bytes": None if history is None else history.requested_bytes,
                "peak_reserved_bytes": None if history is None else history.reserved_bytes,
                "ooms": None if history is None else len(history.ooms),
            }
            rows.append({"file": file, "device": one.device, **sums, **msgspec.to_builtins(now), **peak})
            built.append({**msgspec.to_builtins(one), **sums})
        data.append({"file": file, "allocator_settings": settings, "devices": built})
    return Answer(
        data={"verdict": verdicts, "snapshots": data}, rows=rows, blocks=[*blocks, Verdict(sentences=verdicts)]
    )


def _blocks(file: str, conf: str, one: DeviceFigures) -> list[Block]:
    now, history, when = one.fragmentation, one.history, "now" if one.history is None else "at the peak"
    recorded = "no recorded history" if history is None else f"{history.entries:,} recorded calls"
    moments: dict[str, dict[str, int]] = {}
    if history is not None:
        moments["at the peak"] = {
            "asked for": history.requested_bytes, "waiting for a stream": history.pending_bytes,
            "reserved": history.reserved_bytes,
        }  # fmt: skip
    free, later = list[Row](), ""
    if history is not None and one.failure is not None:
        last, when = history.ooms[-1], "at the failing allocation"
        later = "in the snapshot, which was taken later" if one.failure.changed else when
        moments["at the failure"] = {"asked for": last.requested_bytes, "reserved": last.reserved_bytes}
        free = [
            {"free block": format_bytes(b.size), "blocks": b.blocks, "together": Quantity(b.size * b.blocks, "B")}
            for b in one.free_blocks[:_FREE]
        ]
    sums: list[Row] = [
        {
            "memory": name, "now": Quantity(getattr(now, key), "B"),
            "share": share(getattr(now, key) / now.reserved_bytes if now.reserved_bytes else None),
            **{moment: Quantity(held.get(name), "B") for moment, held in moments.items()},
        }
        for name, key in _SUMS.items()
    ]  # fmt: skip
    columns = {
        "reserved": "reserved_bytes", "allocated": "allocated_bytes", "free, in use": "split_bytes",
        "free, unused": "unused_bytes", "largest free": "largest_free_bytes",
    }  # fmt: skip
    pools: list[Row] = [
        {
            "pool": f"{pool.kind}{', expandable' if pool.expandable else ''}{', private' if pool.private else ''}",
            "stream": str(pool.stream), "segments": pool.segments,
            **{head: Quantity(getattr(pool.fragmentation, key), "B") for head, key in columns.items()},
        }
        for pool in one.pools
    ]  # fmt: skip
    held_lines, held_sizes = (one.failure or one).lines, (one.failure or one).sizes
    total, shown = sum(line.bytes for line in held_lines), held_lines[:_LINES]
    lines: list[Row] = [
        {
            "line": plain(_place(line)), "function": plain("-" if line.site is None else line.site.function),
            "asked for": Quantity(line.bytes, "B"), "share": share(line.bytes / total if total else None),
            "blocks": line.blocks,
        }
        for line in shown
    ]  # fmt: skip
    sizes: list[Row] = [
        {"block size": f"{size.size:,} B", "blocks": size.blocks, "together": Quantity(size.size * size.blocks, "B")}
        for size in held_sizes[:_SIZES]
    ]
    part = f": the first {len(shown)} of {len(held_lines)} lines" if len(shown) < len(held_lines) else ""
    head = f"{PurePath(file).name}: device {one.device}, {recorded}{f', {conf}' if conf else ''}"
    return [
        Text(text=plain(head)),
        table(sums),
        table(pools, title="Pools, now"),
        table(lines, left=2, title=f"Held {when}, by line of Python{part}"),
        table(sizes, title=f"Held {when}, by size of block", where="detail"),
        table(free, title=f"Largest free blocks {later}"),
        Notes(sentences=[] if history is None else list(_calls(history))),
        Notes(sentences=_failures(history.ooms) if history and len(history.ooms) > 1 else [], title="Out of memory"),
    ]


def _calls(history: HistoryFigures) -> Iterator[str]:
    """How often memory was requested from the device, which stops it."""
    if not history.allocations:
        return
    yield (
        f"{history.allocations:,} allocations; memory taken from the device {format_times(history.segments_taken)}, "
        f"given back {format_times(history.segments_given_back)}; in the latter half "
        f"{format_times(history.late_segments_taken)} and {format_times(history.late_segments_given_back)}."
    )
    if history.gone_bytes:
        yield (
            f"The history ends before the snapshot was taken: {format_bytes(history.gone_bytes)} that it leaves in use "
            "are not there any more. Take the snapshot before recording is switched off."
        )
    if history.late_segments_taken and history.late_segments_given_back:
        yield (
            "A program that has warmed up should do neither: each call stops the device. It runs near the limit of its "
            "memory, or calls torch.cuda.empty_cache()."
        )
    if history.early_bytes > 0:
        yield (
            f"{format_part(history.early_bytes, history.requested_bytes)} at the peak were there before the recorded "
            "history began."
        )


def _failures(ooms: Sequence[OomFigures]) -> list[str]:
    sentences = []
    for one in ooms[:_OOMS]:
        when = "" if one.time_us is None else f"{datetime.fromtimestamp(one.time_us // 1_000_000, UTC):%H:%M:%S UTC}: "
        where = "" if one.site is None else f" at {one.site.short}"
        sentences.append(
            f"{when}{format_bytes(one.asked_bytes)} asked for{where}, {format_bytes(one.device_free_bytes)} free on "
            f"the device, {format_bytes(one.reserved_bytes - one.requested_bytes)} reserved and not in use."
        )
    return [plain(sentence) for sentence in sentences] + ([f"{len(ooms) - _OOMS} more."] if len(ooms) > _OOMS else [])


def _verdict(one: DeviceFigures, conf: str) -> Iterator[str]:
    """Use of the reserved memory and what holds most of it; fragmentation, and running out of memory."""
    now, history = one.fragmentation, one.history
    text = f"{format_part(now.allocated_bytes, now.reserved_bytes)} reserved are allocated now"
    if history is not None:
        text = f"Peak: {format_part(history.requested_bytes, history.reserved_bytes)} reserved were in use"
    known = [line for line in one.lines if line.site is not None]
    if known and (total := sum(line.bytes for line in one.lines)):
        text += f"; {_place(known[0])} holds most ({format_percent(known[0].bytes / total, 0)})"
    elif one.lines:
        text += "; no stacks were recorded: call torch.cuda.memory._record_memory_history() first"
    yield f"{text}."
    if one.failure is None and now.split_bytes > _LARGE * now.reserved_bytes:
        part = f"{format_bytes(now.split_bytes)} ({format_percent(now.split_bytes / now.reserved_bytes, 0)})"
        attempt = "" if "expandable_segments:True" in conf else f" Try {EXPANDABLE_SEGMENTS}."
        yield f"Fragmentation: {part} are free, in segments that are in use.{attempt}"
    if history is not None and one.failure is not None:
        yield from failure_sentences(history.ooms, one.failure, one.free_blocks, conf)


def failure_sentences(
    ooms: Sequence[OomFigures], failure: FailureFigures, free_blocks: Sequence[SizeFigures], conf: str
) -> Iterator[str]:
    """What was asked for and what was free, and whether the allocator could have served it."""
    oom = ooms[-1]
    asked, free, on_device = oom.asked_bytes, failure.free_bytes, oom.device_free_bytes
    where = "" if oom.site is None else f" at {oom.site.short}"
    times = "" if len(ooms) == 1 else f" {len(ooms):,} times, the last time{where and ','}"
    block = f", at most {format_bytes(free_blocks[0].size)} in one block" if free_blocks and not failure.changed else ""
    yield (
        f"Out of memory{times}{where}: {format_bytes(asked)} were asked for; {format_bytes(on_device)} were free on "
        f"the device, and {format_bytes(free)} in the allocator's segments{block}."
    )
    if _segment_bytes(asked) <= on_device:
        yield "The device had enough: a limit of the process refused it (torch.cuda.set_per_process_memory_fraction)."
    elif asked > free + on_device:
        short = format_bytes(asked - free - on_device)
        yield f"All of it together is {short} short, so no setting of the allocator makes room: hold less."
    elif "expandable_segments:True" in conf:
        yield "Together that is enough: fragmentation that expandable segments, already on, do not join."
    else:
        yield f"Together that is enough, but not in one piece: fragmentation. Try {EXPANDABLE_SEGMENTS}."


def _segment_bytes(asked: int) -> int:
    """What torch takes from the device to serve a request."""
    if asked < 10 * MIB:
        return 2 * MIB if asked <= MIB else 20 * MIB
    return -(-asked // (2 * MIB)) * 2 * MIB


def _place(line: LineFigures) -> str:
    return "(no stack)" if line.site is None else line.site.short
