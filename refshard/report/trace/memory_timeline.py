"""What a memory timeline of torch's profiler looks like in a terminal, and as JSON."""

from collections.abc import Sequence
from pathlib import PurePath

import msgspec

from refshard.quantities import format_bytes, format_ns, format_percent
from refshard.report.blocks import Answer, Block, Verdict, table
from refshard.tracing.memory_timeline import MemoryTimelineFigures


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
