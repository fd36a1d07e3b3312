"""Several cases in one launch, one after the other in the same processes: for times, since a launch costs more.

A record of a series is complete: it has its own proof, from its own trace. What it cannot have is a fresh process, so
states such as oom, and exact metrics, are those of launches of one case each.
"""

import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from refshard.measure.assemble import assemble
from refshard.measure.launchers.base import Job, Launcher, LaunchOutcome
from refshard.measure.proof import Peers
from refshard.measure.rank import SERIES_FILE, series_folder
from refshard.measure.run import blank_record, fresh_folder
from refshard.records import LaunchRecord, RunRecord
from refshard.specs.case import CaseSpec


def launch_series(
    cases: Sequence[CaseSpec],
    round_: int,
    header: RunRecord,
    folder: Path,
    launcher: Launcher,
    on_progress: Callable[[str], None],
    peers_of: Callable[[CaseSpec], Peers],
) -> list[LaunchRecord]:
    """Run cases that are alike (see :func:`kind`) in one launch, and return their records; only records are kept.

    One that does not end well is the last: those after it have none.
    """
    assert len({kind(case) for case in cases}) == 1
    assert all(serial(case) for case in cases)
    work = fresh_folder(folder / "cases" / f"series-round{round_}")
    for index in range(len(cases)):
        series_folder(work, index).mkdir()
    (work / SERIES_FILE).write_bytes(msgspec.json.encode(cases))
    started = datetime.now(UTC)
    limit_s = sum(case.time_limit_s for case in cases)
    job = Job(program="series", processes=cases[0].processes, time_limit_s=limit_s)
    launch = launcher.launch(job, work, on_progress)
    records: list[LaunchRecord] = []
    for index, case in enumerate(cases):
        blank = blank_record(case, round_, header, started)
        own = series_folder(work, index)
        records.append(assemble(blank, launch, own, header.environment, peers_of(case)))
        if records[-1].state != "ok" and launch != LaunchOutcome():
            break
    shutil.rmtree(work)
    return records


def serial(case: CaseSpec) -> bool:
    """Whether a case can be part of a series: it is measured, and needs no limit of its own on its processes."""
    return case.fidelity == "measured" and case.memory_limit_gib is None


def kind(case: CaseSpec) -> tuple[int, int, str, bool]:
    """What the processes of a series have in common: the last is NCCL's policy for symmetric memory."""
    return case.world_size, case.threads_per_rank, case.device, case.comm_memory == "symmetric"
