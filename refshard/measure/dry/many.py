"""Dry runs of many cases of one cluster, each forked from one process that has the fake device and torch already.

``python -m refshard.measure.dry.many FOLDER`` is that process; it runs as many cases at a time as there are cores.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from refshard.measure.dry.rank import (
    DryCase,
    DryResult,
    Prepared,
    prepare,
    rank_folder,
    ranks_of,
    result_file,
    run_case,
)
from refshard.specs.case import Case

_CASES = "cases.json"


def dry_run_many(
    cases: Sequence[Case], work: Path, on_progress: Callable[[str], None], *, time_limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> list[tuple[DryResult, ...]]:  # fmt: skip
    """The results of each case's ranks, without a limit of memory, and without traces; of a case that did not end,
    those that there are.

    All cases must be of one cluster profile. Those that have not ended after ``time_limit_s`` are killed. Their
    processes have the variables of ``environment`` besides this one's.
    """
    if not cases:
        return []
    work.mkdir(parents=True, exist_ok=True)
    (work / _CASES).write_bytes(
        msgspec.json.encode([DryCase(case=case, limited=False, traced=False) for case in cases])
    )
    with (work / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "refshard.measure.dry.many", str(work)], stdout=subprocess.DEVNULL, stderr=log,
            start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )  # fmt: skip
    try:
        _wait(process, cases, work, on_progress, time_limit_s)
    finally:
        if process.poll() is None:  # end it and all that it forked, which are one session
            import signal

            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return [_results(work / str(place), case) for place, case in enumerate(cases)]


def _wait(
    process: subprocess.Popen[bytes], cases: Sequence[Case], work: Path, on_progress: Callable[[str], None],
    time_limit_s: float,
) -> None:  # fmt: skip
    waited, told = 0.0, -1
    while process.poll() is None and waited < time_limit_s:
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            waited += 0.5
        ended = sum(len(_results(work / str(place), case)) == len(ranks_of(case)) for place, case in enumerate(cases))
        if ended > told and ended < len(cases):
            on_progress(f"dry run {ended + 1} of {len(cases)}")
            told = ended


def _results(folder: Path, case: Case) -> tuple[DryResult, ...]:
    found = []
    for rank in ranks_of(case):
        path = result_file(rank_folder(folder, rank))
        if not path.exists():
            break
        found.append(msgspec.json.decode(path.read_bytes(), type=DryResult))
    return tuple(found)


def main(folder: Path) -> int:
    """Run the cases that ``folder`` names, each in a process and a folder of its own."""
    asked = msgspec.json.decode((folder / _CASES).read_bytes(), type=list[DryCase])
    device = prepare(asked)
    waiting, running = list(enumerate(asked)), set[int]()
    while waiting or running:
        if waiting and len(running) < len(os.sched_getaffinity(0)):
            place, one = waiting.pop(0)
            if not (pid := os.fork()):
                _run(one, device, folder / str(place))
            running.add(pid)
            continue
        ended, _ = os.wait()
        running.discard(ended)
    return 0


def _run(asked: DryCase, device: Prepared, folder: Path) -> None:
    folder.mkdir(parents=True)
    run_case(asked, device, folder)


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(status)
