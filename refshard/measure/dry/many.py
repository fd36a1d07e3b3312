"""Dry runs of many cases of one cluster, each forked from one process that has the fake device and torch already.

``python -m refshard.measure.dry.many FOLDER`` is that process; it runs as many cases at a time as there are cores.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from refshard.measure.dry.rank import DryCase, DryResult, forked, prepare, read_results, run_case
from refshard.measure.worker import end_with_parent
from refshard.specs.case import Case

_CASES = "cases.json"


def dry_run_many(
    cases: Sequence[Case], work: Path, on_progress: Callable[[str], None], *, time_limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> list[tuple[DryResult, ...]]:  # fmt: skip
    """The results of each case's ranks, as far as there are any, without a memory limit, and without traces.

    All cases must share a cluster profile. Unfinished ones are killed after ``time_limit_s``. ``environment``
    is added to their processes' variables.
    """
    if not cases:
        return []
    work.mkdir(parents=True, exist_ok=True)
    requests = [DryCase(case=case, limited=False, traced=False) for case in cases]
    (work / _CASES).write_bytes(msgspec.json.encode(requests))

    def results() -> list[tuple[DryResult, ...]]:
        return [read_results(work / str(place), case) for place, case in enumerate(cases)]

    with (work / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "refshard.measure.dry.many", str(work)], stdout=subprocess.DEVNULL, stderr=log,
            start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )  # fmt: skip
    try:
        waited, shown = 0.0, -1
        while process.poll() is None and waited < time_limit_s:
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                waited += 0.5
            ended = sum(len(found) == len(case.job.stage_ranks) for case, found in zip(cases, results()))
            if shown < ended < len(cases):
                on_progress(f"dry run {ended + 1} of {len(cases)}")
                shown = ended
    finally:
        if process.poll() is None:  # end it and all its forks, which are one session
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return results()


def main(folder: Path) -> int:
    """Run the requested cases, each in a process and a folder of its own. All end with the process that asked."""
    end_with_parent(os.getppid(), signal.SIGKILL)
    requests = msgspec.json.decode((folder / _CASES).read_bytes(), type=list[DryCase])
    ext = prepare(requests)
    parent, places = os.getpid(), list(range(len(requests)))

    def child(place: int) -> None:
        if end_with_parent(parent, signal.SIGKILL):
            run_case(requests[place], ext, folder / str(place))
        os._exit(1)

    for _ in forked(places, child):
        """Its results are in its folder."""
    return 0


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(status)
