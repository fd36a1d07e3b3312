"""``refshard history``: how cases went over all runs of a folder."""

import sys
from pathlib import Path

from refshard.analysis.history import series_of
from refshard.errors import SpecError, StoreError, nearest
from refshard.measure.store import RECORDS, read_run
from refshard.records import METRICS, Run
from refshard.report.blocks import Answer
from refshard.report.run.answer import history_answer


def history(folder: Path, *, metric: str, suite: str | None) -> Answer:
    """The runs in ``folder``, one folder each; of ``suite`` only, if given. Unreadable runs are reported and left out.

    Raises:
        SpecError: there is no such metric, or no run has it.
    """
    if metric not in METRICS:
        raise SpecError(f"metric: unknown '{metric}'; {nearest(metric, list(METRICS))}")
    runs: list[Run] = []
    for path in sorted(folder.glob(f"*/{RECORDS}")):
        if path.parent.is_symlink():  # latest
            continue
        try:
            runs.append(read_run(path.parent))
        except StoreError as error:
            print(f"refshard: left out: {error}", file=sys.stderr)
    found = series_of((run for run in runs if suite in (None, run.header.suite.name)), metric)
    if not found:
        of = "" if suite is None else f" of suite '{suite}'"
        raise SpecError(f"{folder}: no run there{of} has a case with {metric}; give a folder of runs, such as runs/")
    return history_answer(found, metric)
