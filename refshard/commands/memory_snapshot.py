"""``refshard trace`` of CUDA memory snapshots."""

from collections.abc import Sequence
from pathlib import Path

from refshard.report.answer import Answer
from refshard.report.trace.snapshot import snapshot_answer
from refshard.tracing.snapshot import snapshot_figures
from refshard.tracing.snapshot_file import read_snapshot


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
