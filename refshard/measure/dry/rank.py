"""The process of a dry run, and its forks for more ranks. It imports torch once the fake device is there."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NoReturn, TypeVar

import msgspec

from refshard.dryrun.request import UNLIMITED_BYTES, Pool
from refshard.errors import RefshardError
from refshard.fakecuda import activate
from refshard.fakecuda.inductor import keep_apart
from refshard.folders import replace_file
from refshard.measure.worker import end_with_parent, request_file
from refshard.outside_memory import COMMUNICATOR_BYTES, context
from refshard.records import Census, CollectiveCount, State, StepTrace
from refshard.resources import available_cores
from refshard.specs.case import Case
from refshard.specs.cluster import load_cluster

RECORDING_FILE = "recording.npz"
NOTHING = Pool(allocated=0, active=0, reserved=0, requested=0)


class DryCase(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a case; the last of :func:`ranks_of` replays all together.

    It is ``limited`` by the GPU's memory, or by nothing, to learn what the case needs. ``traced`` ones leave a trace of
    each rank.
    """

    case: Case
    rank: int = 0
    limited: bool = True
    traced: bool = True


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The last step of a rank, replayed: its parts, the collectives that its host issued, its operators.

    ``step_s`` is from the end of the previous step to its own end. ``host_waits`` counts by reason how often the host
    waited for the device. ``peak`` is the rank's, over all steps, if a rank held memory back by ``record_stream()``.
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
    reserve with the communicators that it has made. ``refused`` is the size of the allocation that failed, as torch
    writes it. The optimizer of this rank steps ``stepped`` elements of those ``trained`` by all; the rank holds
    ``held``. The last rank has the ``steps`` of all.

    If a rank held memory back by ``record_stream()``, the replay decides, and the last rank reports for all: whether
    the case ``fits`` into the GPU's memory; if not, ``limited`` is the result within it.
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


def read_results(folder: Path, case: Case) -> tuple[DryResult, ...]:
    """The results of a case's ranks in ``folder``, in order, up to the first that is missing or not ok."""
    found: list[DryResult] = []
    for path in (result_file(rank_folder(folder, rank)) for rank in ranks_of(case)):
        if not path.exists() or (found and found[-1].state != "ok"):
            break
        found.append(msgspec.json.decode(path.read_bytes(), type=DryResult))
    return tuple(found)


Run = Callable[[int], DryResult]
T = TypeVar("T")


def run_dry_ranks(folder: Path) -> NoReturn:
    """Run the ranks of the case requested in ``folder``, leave their results there, and end this process.

    Each but the last has a process of its own, forked once the device and torch are there. The last, which reads all
    recordings, runs here, if the others ended ok.
    """
    request = msgspec.json.decode(request_file(folder, "dryrun").read_bytes(), type=DryCase)
    try:
        ext = prepare([request])
    except BaseException as refused:
        error = refused

        def fail(_: int) -> DryResult:
            raise error

        rank_folder(folder, 0).mkdir(exist_ok=True)
        _leave(0, fail, folder)
        _end()
    run_case(request, ext, folder)


def prepare(requests: Sequence[DryCase]) -> ModuleType:
    """Make the device of these cases, which share a cluster, and import what their ranks need, before any fork. Returns
    the extension.
    """
    first = requests[0]
    cluster = load_cluster(first.case.job.cluster).of_world_size(first.case.job.gpus)
    hardware = cluster.accelerator
    if not first.limited:
        hardware = msgspec.structs.replace(hardware, memory_bytes=UNLIMITED_BYTES)
    ext = activate(
        hardware, devices=cluster.ranks_per_node, context_bytes=context(hardware).bytes,
        communicator_bytes=COMMUNICATOR_BYTES,
    )  # fmt: skip
    # Imported here because torch must not be imported before the device is there.
    from refshard.measure.dry.steps import preload

    for one in requests:
        if len(requests) > 1 or len(ranks_of(one.case)) > 1:
            preload(one.case)
    return ext


def run_case(request: DryCase, ext: ModuleType, folder: Path) -> NoReturn:
    """Run the ranks of a case, in a process that has the device; leave their results, and end this process."""
    from refshard.measure.dry.steps import run_steps

    cluster = load_cluster(request.case.job.cluster).of_world_size(request.case.job.gpus)

    def run(rank: int) -> DryResult:
        take_place(rank, request.case.job.gpus, cluster.ranks_per_node)
        own = msgspec.structs.replace(request, rank=rank)
        with TemporaryDirectory(prefix="refshard-inductor-") as caches:
            keep_apart(Path(caches))
            return run_steps(own, cluster, ext, rank_folder(folder, rank))

    ranks = ranks_of(request.case)
    for rank in ranks:
        rank_folder(folder, rank).mkdir(parents=True, exist_ok=True)
    if _run_in_processes(ranks[:-1], run, folder):
        _leave(ranks[-1], run, folder)
    _end()


def _run_in_processes(ranks: Sequence[int], run: Run, folder: Path) -> bool:
    """Run each rank in a process; whether all ended ok. After one that did not, no more are started."""

    def child(rank: int) -> None:
        if end_with_parent(parent, signal.SIGKILL):
            _leave(rank, run, folder)
        _end()

    parent, waiting, well = os.getpid(), list(ranks), True
    for rank in forked(waiting, child):
        path = result_file(rank_folder(folder, rank))
        well = well and path.exists() and msgspec.json.decode(path.read_bytes(), type=DryResult).state == "ok"
        if not well:
            waiting.clear()
    return well


def forked(waiting: list[T], child: Callable[[T], None]) -> Iterator[T]:
    """Fork a process for each of those ``waiting``, as many at a time as there are cores; yield each as it ends.

    ``child`` must end its process.
    """
    running: dict[int, T] = {}
    while waiting or running:
        if waiting and len(running) < available_cores():
            one = waiting.pop(0)
            if not (pid := os.fork()):
                child(one)
            running[pid] = one
            continue
        ended, _ = os.wait()
        yield running.pop(ended)


def _leave(rank: int, run: Run, folder: Path) -> None:
    """Run a rank, and leave its result in its folder."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = run(rank)
        except BaseException as error:  # of the device or the replay: errors of the case are results already
            traceback.print_exception(error)
            text = str(error) if isinstance(error, RefshardError) else f"{type(error).__name__}: {error}"
            result = DryResult(state="failed", error=(text.splitlines() or [""])[0])
    own = [str(warning.message) for warning in caught if "refshard" in str(warning.message)]
    result = msgspec.structs.replace(result, warnings=tuple(dict.fromkeys([*result.warnings, *own])))
    replace_file(result_file(rank_folder(folder, rank)), [msgspec.json.encode(result).decode()])


def _end() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skips threads, and tensors that outlive the device


def take_place(rank: int, world_size: int, ranks_per_node: int) -> None:
    """Give this process a rank's place in the world. It sees one GPU: torch plans DTensors on the first one, even if a
    rank has another.
    """
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
    }  # fmt: skip
