"""``refshard trace`` of files about memory alone: CUDA memory snapshots, and memory timelines of torch's profiler."""

from collections.abc import Sequence
from pathlib import Path

from refshard.analysis.snapshot import memory_timeline, read_snapshot, snapshot_figures
from refshard.report.blocks import Answer
from refshard.report.trace.snapshot import memory_timeline_answer, snapshot_answer


def memory_snapshots(paths: Sequence[Path]) -> Answer:
    """What each snapshot tells, whichever code wrote it; nothing that a file could name is run.

    Raises:
        TraceError: a file is damaged, or no memory snapshot.
    """
    found = []
    for path in paths:
        snapshot = read_snapshot(path)
        found.append((str(path), snapshot.settings, snapshot_figures(snapshot)))
    return snapshot_answer(found)


def memory_timelines(paths: Sequence[Path]) -> Answer:
    """The peak of each timeline, by what torch's profiler says that its bytes are for.

    Raises:
        TraceError: a file is damaged, or no memory timeline.
    """
    return memory_timeline_answer([(str(path), memory_timeline(path)) for path in paths])
