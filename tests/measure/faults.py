"""What a run must survive, and what must hold after each fault."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import psutil

from refshard.measure.launchers.base import ask_for_stacks
from refshard.measure.store import read_run
from refshard.records import LaunchRecord, Run
from tests.measure.commandline import processes_of, start, wait_for
from tests.measure.planted.sitecustomize import HANGING

PLANTED = Path(__file__).parent / "planted"


def planting(*faults: str) -> dict[str, str]:
    """The environment in which ranks meet ``faults``, each "STRATEGY RANK PLACE DEED"; see ``planted``."""
    paths = [str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PLANTED": ",".join(faults)}


@contextmanager
def running(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Iterator["Popen[str]"]:
    """``refshard`` with ``arguments``; killed if the test fails before it ends."""
    with start(*arguments, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def case_folder(run: Path, strategy: str) -> Path:
    (found,) = run.glob(f"cases/{strategy}-*")
    return found


def ranks_of(run: Path, strategy: str) -> dict[int, psutil.Process]:
    """The living ranks of the case of ``strategy``."""
    return {int(process.environ()["RANK"]): process for process in processes_of(case_folder(run, strategy))}


def kill_within_collective(run: Path, strategy: str, victim: int) -> None:
    """Once another rank hangs, wait for ``victim`` to wait for it, and kill it there."""
    wait_for(lambda: list(run.glob(f"cases/{strategy}-*/{HANGING}")), 240)
    rank = ranks_of(run, strategy)[victim]

    def waits() -> bool:
        (stack,) = ask_for_stacks({victim: rank.pid}, case_folder(run, strategy)).values()
        return "refshard/engine/collectives.py" in stack[0]

    wait_for(waits)
    rank.kill()


def record_of(run: Run, strategy: str) -> LaunchRecord:
    (record,) = (record for record in run.launches if record.case.job.strategy == strategy)
    return record


def launches(run: Run) -> list[tuple[str, int]]:
    return sorted((record.spec_hash, record.round) for record in run.launches)


def check_left(run: Path) -> Run:
    """No process is left, and what is read back is whole: each launch once, and the closing record counts them."""
    wait_for(lambda: not processes_of(run))
    found = read_run(run)
    assert len(set(launches(found))) == len(found.launches)
    if found.end is not None:
        assert found.end.cases == len(found.launches) == sum(found.end.states.values())
    return found


def check_mended(run: Path, before: Run, *, kept: tuple[str, ...] = ("ok",)) -> Run:
    """After a resumption every planned launch is there once, ok or as it was, and what had ended so is untouched."""
    found = check_left(run)
    assert found.end is not None
    assert not found.end.interrupted
    assert len(found.launches) == found.header.planned
    assert [r for r in before.launches if r.state in kept] == [r for r in found.launches if r in before.launches]
    assert all(record.state == "ok" or record in before.launches for record in found.launches), found.launches
    return found
