"""The process of a dry run, and those that it forks for more ranks. It imports torch once the fake device is there."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import msgspec

from refshard.dryrun.overheads import overheads
from refshard.dryrun.request import UNLIMITED_BYTES, Pool
from refshard.errors import RefshardError
from refshard.fakecuda import activate
from refshard.folders import replace_file
from refshard.measure.worker import end_with_parent
from refshard.records import Census, CollectiveCount, State, StepTrace
from refshard.specs.case import Case
from refshard.specs.cluster import load_cluster

ASKED_FILE = "dryrun.json"


RECORDING_FILE = "recording.npz"


NOTHING = Pool(allocated=0, active=0, reserved=0, requested=0)


class DryCase(msgspec.Struct, frozen=True, kw_only=True):
    """The rank ``rank`` of a case; the last of :func:`ranks_of` replays them together.

    ``limited`` by what the GPU's memory holds, or by nothing, to learn what the case would take. ``traced`` ones leave
    a trace of each rank.
    """

    case: Case
    rank: int = 0
    limited: bool = True
    traced: bool = True


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The last step of a rank, replayed: where its time goes, the collectives that its host issued, what it asked for.

    ``step_s`` is from the end of the step before to its own end. ``host_waits`` counts by reason how often the host
    waited for the device. ``peak`` is the rank's, of all steps, if a rank held memory back by ``record_stream()``.
    """

    step_s: float
    trace: StepTrace
    issued: tuple[CollectiveCount, ...]
    census: Census
    memory_course_bytes: tuple[int, ...]
    host_waits: dict[str, int]
    peak: Pool | None = None


class DryResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank reports. ``peak`` is that of the caching allocator over all steps, ``usable_bytes`` what it may
    reserve. ``refused`` is how much was asked for when there was no more, in torch's words. The optimizer of this rank
    steps ``stepped`` elements of those ``trained`` by all, of which it holds ``held``. The last rank has the ``steps``
    of all.

    If a rank held memory back by ``record_stream()``, the replay decides, and the last rank tells of all: whether the
    case ``fits`` into the GPU's memory; if not, ``limited`` is the result within it.
    """

    state: State
    error: str | None = None
    usable_bytes: int = 0
    peak: Pool = NOTHING
    refused: str = ""
    blocks: tuple[str, ...] = ()
    flops_per_token: float | None = None
    wrapped_units: tuple[str, ...] = ()
    announced: tuple[CollectiveCount, ...] = ()
    stepped: int = 0
    trained: int = 0
    held: int = 0
    steps: tuple[StepResult, ...] = ()
    warnings: tuple[str, ...] = ()
    fits: bool = False
    limited: "DryResult | None" = None


def ranks_of(case: Case) -> tuple[int, ...]:
    """The ranks that a dry run follows: one of each pipeline rank's, since the others compute alike."""
    return case.job.stage_ranks


def rank_folder(folder: Path, rank: int) -> Path:
    """Where the process of a rank works, within the folder of its case."""
    return folder / f"rank{rank}"


def result_file(folder: Path) -> Path:
    """Where a process leaves its :class:`DryResult`, in the folder where it works."""
    return folder / "result.json"


Run = Callable[[int], DryResult]


def run_dry_ranks(folder: Path) -> NoReturn:
    """Run the ranks of the case that ``folder`` asks for, leave their results there, and end this process.

    Each but the last has a process of its own, forked once the device and torch are there. The last, which reads what
    all recorded, runs here, if they ended ok.
    """
    asked = msgspec.json.decode((folder / ASKED_FILE).read_bytes(), type=DryCase)
    try:
        device = prepare([asked])
    except BaseException as error:
        rank_folder(folder, 0).mkdir(exist_ok=True)
        _leave(0, _failing(error), folder)
        _end()
    run_case(asked, device, folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The fake device of this process: the extension, and the bytes that its allocator may reserve."""

    ext: ModuleType
    usable_bytes: int


def run_case(asked: DryCase, device: Prepared, folder: Path) -> NoReturn:
    """Run the ranks of a case, in a process that has the device; leave their results, and end this process."""
    ranks = ranks_of(asked.case)
    for rank in ranks:
        rank_folder(folder, rank).mkdir(parents=True, exist_ok=True)
    run = _runner(asked, device, folder)
    if _run_in_processes(ranks[:-1], run, folder):
        _leave(ranks[-1], run, folder)
    _end()


def prepare(asked: Sequence[DryCase]) -> Prepared:
    """Make the device of these cases, which are of one cluster, and import what their ranks need, before any is
    forked.
    """
    first = asked[0]
    cluster = load_cluster(first.case.job.cluster).of_world_size(first.case.job.gpus)
    hardware, beside = cluster.accelerator, sum(one.bytes for one in overheads(first.case.job.gpus))
    if not first.limited:
        hardware = msgspec.structs.replace(hardware, memory_bytes=UNLIMITED_BYTES)
    ext = activate(hardware, devices=cluster.ranks_per_node, unusable_bytes=beside)
    # Here, since torch must not be imported before the device is there.
    from refshard.measure.dry.steps import preload

    for one in asked:
        if len(asked) > 1 or len(ranks_of(one.case)) > 1:
            preload(one.case)
    return Prepared(ext=ext, usable_bytes=hardware.memory_bytes - beside)


def _runner(asked: DryCase, device: Prepared, folder: Path) -> Run:
    """What runs a rank, once in each process."""
    from refshard.measure.dry.steps import run_steps

    cluster = load_cluster(asked.case.job.cluster).of_world_size(asked.case.job.gpus)

    def run(rank: int) -> DryResult:
        take_place(rank, asked.case.job.gpus, cluster.ranks_per_node)
        own = msgspec.structs.replace(asked, rank=rank)
        result = run_steps(own, cluster, device.ext, rank_folder(folder, rank))
        return msgspec.structs.replace(result, usable_bytes=device.usable_bytes)

    return run


def _failing(error: BaseException) -> Run:
    def run(_: int) -> DryResult:
        raise error

    return run


def _run_in_processes(ranks: Sequence[int], run: Run, folder: Path) -> bool:
    """Run each rank in a process, as many at a time as there are cores; whether all ended ok. After one that did not,
    no more are started.
    """
    parent, waiting, running, well = os.getpid(), list(ranks), dict[int, int](), True
    while running or (waiting and well):
        if waiting and well and len(running) < len(os.sched_getaffinity(0)):
            rank = waiting.pop(0)
            if not (pid := os.fork()):
                if end_with_parent(parent, signal.SIGKILL):
                    _leave(rank, run, folder)
                _end()
            running[pid] = rank
            continue
        ended, _ = os.wait()
        path = result_file(rank_folder(folder, running.pop(ended)))
        well = well and path.exists() and msgspec.json.decode(path.read_bytes(), type=DryResult).state == "ok"
    return well


def _leave(rank: int, run: Run, folder: Path) -> None:
    """Run a rank, and leave its result in its folder."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = run(rank)
        except BaseException as error:  # of the device or of the reading: what the case meets is a result already
            traceback.print_exception(error)
            words = str(error) if isinstance(error, RefshardError) else f"{type(error).__name__}: {error}"
            result = DryResult(state="failed", error=(words.splitlines() or [""])[0])
    own = [str(warning.message) for warning in caught if "refshard" in str(warning.message)]
    result = msgspec.structs.replace(result, warnings=tuple(dict.fromkeys([*result.warnings, *own])))
    replace_file(result_file(rank_folder(folder, rank)), [msgspec.json.encode(result).decode()])


def _end() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads, and tensors that outlive the device, have nothing left to say


def take_place(rank: int, world_size: int, ranks_per_node: int) -> None:
    """A rank's place in the world, instead of its place among the processes that were really started. Its process sees
    one GPU: torch plans DTensors on the first one, whatever a rank's own is.
    """
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
    }  # fmt: skip
