"""``refshard compare``: two runs, or strategies of one run."""

from collections.abc import Sequence
from pathlib import Path

from refshard.analysis.evidence import gather
from refshard.commands.folders import find_run
from refshard.errors import SpecError
from refshard.measure.environment import changes
from refshard.measure.store import holds_run, read_run
from refshard.report.blocks import Answer
from refshard.report.run.compare import compare_runs, compare_strategies


def compare(a: str, others: Sequence[str], run: Path | None) -> Answer:
    """``a`` and each of ``others``: folders of runs; else strategies of ``run`` (by default runs/latest): if only ``a``
    is named, all others are compared with it.

    Raises:
        SpecError: runs and strategies are mixed, or the run has no case of a strategy.
        StoreError: there is no such run.
    """
    runs = [name for name in (a, *others) if "/" in name or holds_run(Path(name))]
    if not runs:
        return compare_strategies(gather(read_run(find_run(run or Path("runs/latest")))), a, others)
    if len(others) != 1 or len(runs) != 2:
        raise SpecError(
            f"compare: give two runs, or strategies of one run, got {' '.join((a, *others))}; for strategies of one "
            "run, name it with --run"
        )
    if run is not None:
        raise SpecError("compare: --run is for strategies of one run; leave it out to compare two runs")
    first, second = (read_run(find_run(Path(name))) for name in (a, *others))
    return compare_runs(gather(first), gather(second), changes(first.header.environment, second.header.environment))
