"""``refshard show``: a run's tables and verdict; of a folder of runs, a list of them."""

from pathlib import Path

from refshard.analysis.evidence import gather
from refshard.commands.folders import find_run, runs_answer, runs_in
from refshard.measure.store import holds_run, read_run
from refshard.report.blocks import Answer
from refshard.report.run.answer import run_answer


def show(folder: Path) -> Answer:
    """The run in ``folder``, or the runs below it.

    Raises:
        StoreError: there is no run, or it is damaged.
    """
    if not holds_run(folder) and runs_in(folder):
        return runs_answer(folder)
    return run_answer(gather(read_run(find_run(folder))))
