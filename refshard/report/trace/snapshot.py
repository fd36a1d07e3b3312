"""What CUDA memory snapshots and memory timelines of torch's profiler look like in a terminal, and as JSON."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

import msgspec

from refshard.analysis.snapshot import (
    DeviceFigures,
    Fragmentation,
    HistoryFigures,
    LineFigures,
    MemoryTimelineFigures,
    OomFigures,
    Site,
)
from refshard.plain import plain
from refshard.quantities import format_bytes, format_ns, format_part, format_percent, format_times
from refshard.report.blocks import Answer, Block, Notes, Table, Text, Verdict, table


def memory_timeline_answer(timelines: Sequence[tuple[str, MemoryTimelineFigures]]) -> Answer:
    """The peak of each file, by category."""
    blocks: list[Block] = []
    verdicts = []
    for file, one in timelines:
        ordered = sorted(one.by_category.items(), key=lambda item: -item[1])
        rows = [
            {"held for": name, "bytes": format_bytes(size), "share": format_percent(size / one.peak_bytes)}
            for name, size in ordered
        ]
        blocks.append(table(rows, title=f"{PurePath(file).name}: memory at the peak, by torch's categories"))
        most, size = ordered[0]
        verdicts.append(
            f"Peak: {format_bytes(one.peak_bytes)}, {format_ns(one.peak_ns)} after the first event; most is {most} "
            f"({format_percent(size / one.peak_bytes, 0)})."
        )
    data = [{"file": file, **msgspec.to_builtins(one)} for file, one in timelines]
    rows = [
        {"file": one["file"], "category": name, "bytes": n} for one in data for name, n in one["by_category"].items()
    ]
    return Answer(
        data={"verdict": verdicts, "memory_timelines": data},
        rows=rows,
        blocks=[*blocks, Verdict(sentences=verdicts)],
    )


_LINES, _SIZES, _OOMS = 12, 10, 5
_LARGE = 0.1
"""Of what is reserved: less of it lost is not worth a remedy."""
_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def snapshot_answer(
    snapshots: Sequence[tuple[str, Mapping[str, str | int | float], Sequence[DeviceFigures]]],
) -> Answer:
    """What there is to know of some snapshots, the verdict last."""
    blocks: list[Block] = []
    verdicts: list[str] = []
    data, rows = [], []
    for file, settings, devices in snapshots:
        conf = str(settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")
        for one in devices:
            blocks += _blocks(file, conf, one)
            name = "" if len(snapshots) == len(devices) == 1 else f"{PurePath(file).name}, device {one.device}: "
            verdicts += [f"{name}{plain(found)}" for found in _verdict(one, conf)]
            rows.append({"file": file, "device": one.device, **_flat(one)})
        # What is reserved and allocated now, beside what it is made of.
        names = ("allocated_bytes", "active_bytes", "reserved_bytes")
        built = [{**msgspec.to_builtins(x), **{n: getattr(x.fragmentation, n) for n in names}} for x in devices]
        data.append({"file": file, "allocator_settings": settings, "devices": built})
    return Answer(
        data={"verdict": verdicts, "snapshots": data},
        rows=rows,
        blocks=[*blocks, Verdict(sentences=verdicts)],
    )


def _flat(one: DeviceFigures) -> dict[str, Any]:
    now, history = one.fragmentation, one.history
    return {
        "reserved_bytes": now.reserved_bytes,
        "active_bytes": now.active_bytes,
        "allocated_bytes": now.allocated_bytes,
        **msgspec.to_builtins(now),
        "peak_requested_bytes": None if history is None else history.requested_bytes,
        "peak_reserved_bytes": None if history is None else history.reserved_bytes,
        "ooms": None if history is None else len(history.ooms),
    }


def _blocks(file: str, conf: str, one: DeviceFigures) -> list[Block]:
    recorded = "no recorded history" if one.history is None else f"{one.history.entries:,} recorded calls"
    head = f"{PurePath(file).name}: device {one.device}, {recorded}{f', {conf}' if conf else ''}"
    return [
        Text(text=plain(head)),
        _sums(one),
        _pools(one),
        _lines(one),
        _sizes(one),
        Notes(sentences=[] if one.history is None else _calls(one.history)),
        Notes(sentences=_failures(one.history.ooms) if one.history else [], title="Out of memory"),
    ]


def _sums(one: DeviceFigures) -> Table:
    """Where what is reserved now is, and how much of it there was at the peak, as far as a history tells."""
    now, history = one.fragmentation, one.history
    peak = {} if history is None else {
        "asked for": history.requested_bytes, "waiting for a stream": history.pending_bytes,
        "reserved": history.reserved_bytes,
    }  # fmt: skip
    rows = (
        ("asked for", now.requested_bytes),
        ("rounding", now.rounding_bytes),
        ("waiting for a stream", now.pending_bytes),
        ("free, in segments in use", now.split_bytes),
        ("free, in unused segments", now.unused_bytes),
        ("reserved", now.reserved_bytes),
        ("largest free block", now.largest_free_bytes),
    )
    return table(
        [
            {"memory": name, "now": format_bytes(size), "share": _share(size, now.reserved_bytes)}
            | ({} if history is None else {"at the peak": format_bytes(peak.get(name))})
            for name, size in rows
        ]
    )


def _pools(one: DeviceFigures) -> Table:
    return table(
        [
            {
                "pool": f"{pool.kind}{', expandable' if pool.expandable else ''}{', private' if pool.private else ''}",
                "stream": str(pool.stream),
                "segments": f"{pool.segments:,}",
                "reserved": format_bytes(pool.fragmentation.reserved_bytes),
                "allocated": format_bytes(pool.fragmentation.allocated_bytes),
                "free, in use": format_bytes(pool.fragmentation.split_bytes),
                "free, unused": format_bytes(pool.fragmentation.unused_bytes),
                "largest free": format_bytes(pool.fragmentation.largest_free_bytes),
            }
            for pool in one.pools
        ],
        title="Pools, now",
    )


def _lines(one: DeviceFigures) -> Table:
    total, when = sum(line.bytes for line in one.lines), "at the peak" if one.history else "now"
    shown = one.lines[:_LINES]
    part = f": the first {len(shown)} of {len(one.lines)} lines" if len(shown) < len(one.lines) else ""
    return table(
        [
            {
                "line": plain(_place(line)),
                "function": plain("-" if line.site is None else line.site.function),
                "asked for": format_bytes(line.bytes),
                "share": _share(line.bytes, total),
                "blocks": f"{line.blocks:,}",
            }
            for line in shown
        ],
        left=2,
        title=f"Held {when}, by line of Python{part}",
    )


def _sizes(one: DeviceFigures) -> Table:
    return table(
        [
            {
                "block size": f"{one.size:,} B",
                "blocks": f"{one.blocks:,}",
                "together": format_bytes(one.size * one.blocks),
            }
            for one in one.sizes[:_SIZES]
        ],
        title=f"Held {'at the peak' if one.history else 'now'}, by size of block",
        where="detail",
    )


def _calls(history: HistoryFigures) -> list[str]:
    """How often the device was asked for memory, which stops it."""
    if not history.allocations:
        return []
    sentences = [
        f"{history.allocations:,} allocations; memory taken from the device {format_times(history.segments_taken)}, "
        f"given back {format_times(history.segments_given_back)}; in the latter half "
        f"{format_times(history.late_segments_taken)} and {format_times(history.late_segments_given_back)}."
    ]
    if history.gone_bytes:
        sentences.append(
            f"The history ends before the snapshot was taken: {format_bytes(history.gone_bytes)} that it leaves in use "
            "are not there any more. Take the snapshot before recording is switched off."
        )
    if history.late_segments_taken and history.late_segments_given_back:
        sentences.append(
            "A program that has warmed up should do neither: each call stops the device. It runs near the limit of its "
            "memory, or calls torch.cuda.empty_cache()."
        )
    if history.early_bytes > 0:
        sentences.append(
            f"{format_part(history.early_bytes, history.requested_bytes)} at the peak were there before the recorded "
            "history began."
        )
    return sentences


def _failures(ooms: Sequence[OomFigures]) -> list[str]:
    sentences = []
    for one in ooms[:_OOMS]:
        when = "" if one.time_us is None else f"{datetime.fromtimestamp(one.time_us // 1_000_000, UTC):%H:%M:%S UTC}: "
        where = "" if one.site is None else f" at {_where(one.site)}"
        sentences.append(
            f"{when}{format_bytes(one.asked_bytes)} asked for{where}, {format_bytes(one.device_free_bytes)} free on "
            f"the device, {format_bytes(one.reserved_bytes - one.requested_bytes)} reserved and not in use."
        )
    return [plain(sentence) for sentence in sentences] + ([f"{len(ooms) - _OOMS} more."] if len(ooms) > _OOMS else [])


def _verdict(one: DeviceFigures, conf: str) -> list[str]:
    now, history = one.fragmentation, one.history
    if history is None:
        text = f"{format_part(now.allocated_bytes, now.reserved_bytes)} reserved are allocated now"
    else:
        text = f"Peak: {format_part(history.requested_bytes, history.reserved_bytes)} reserved were in use"
    known = [line for line in one.lines if line.site is not None]
    if known and (total := sum(line.bytes for line in one.lines)):
        share = format_percent(known[0].bytes / total, 0)
        text += f"; {_place(known[0])} holds most ({share})"
    elif one.lines:
        text += "; no stacks were recorded: call torch.cuda.memory._record_memory_history() first"
    return [f"{text}.", *_remedy(now, conf), *_failure(history)]


def _remedy(now: Fragmentation, conf: str) -> list[str]:
    """What to do about what is lost, if it is worth it."""
    if now.split_bytes > _LARGE * now.reserved_bytes:
        share = format_percent(now.split_bytes / now.reserved_bytes, 0)
        text = f"Fragmentation: {format_bytes(now.split_bytes)} ({share}) are free, in segments that are in use."
        return [text if "expandable_segments:True" in conf else f"{text} Try {_EXPANDABLE}."]
    return []


def _failure(history: HistoryFigures | None) -> list[str]:
    if history is None or not history.ooms:
        return []
    last = history.ooms[-1]
    unused = last.reserved_bytes - last.requested_bytes
    last_of = "" if len(history.ooms) == 1 else f" {len(history.ooms):,} times; the last time"
    text = f"Out of memory{last_of or ':'} {format_bytes(last.asked_bytes)} were asked for"
    if unused > last.asked_bytes:
        return [f"{text} while {format_bytes(unused)} were reserved and not in use: fragmentation. Try {_EXPANDABLE}."]
    return [f"{text}, and {format_bytes(unused)} were reserved and not in use: hold less."]


def _place(line: LineFigures) -> str:
    return "(no stack)" if line.site is None else _where(line.site)


def _where(site: Site) -> str:
    """A line by its file's last two parts."""
    return f"{'/'.join(PurePath(site.file).parts[-2:])}:{site.line}"


def _share(part: int, whole: int) -> str:
    return format_percent(part / whole) if whole else "-"
