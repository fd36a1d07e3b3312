"""The process of a dry run, and those that it forks for more ranks. It imports torch once the fake device is there."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import msgspec

from refshard.dryrun.overheads import overheads
from refshard.dryrun.request import UNLIMITED_BYTES
from refshard.errors import RefshardError
from refshard.fakecuda import activate
from refshard.folders import replace_file
from refshard.harness.dry.result import ASKED_FILE, DryCase, DryResult, rank_folder, ranks_of, result_file
from refshard.harness.worker import end_with_parent
from refshard.specs.cluster import ClusterSpec, load_cluster

Run = Callable[[int], DryResult]


def run_dry_ranks(folder: Path) -> NoReturn:
    """Run the ranks of the case that ``folder`` asks for, leave their results there, and end this process.

    Each but the last has a process of its own, forked once the device and torch are there. The last, which reads what
    all recorded, runs here, if they ended ok.
    """
    asked = msgspec.json.decode((folder / ASKED_FILE).read_bytes(), type=DryCase)
    ranks = ranks_of(asked.case)
    for rank in ranks:
        rank_folder(folder, rank).mkdir(exist_ok=True)
    try:
        run = _prepare(asked, folder)
    except BaseException as error:
        run = _failing(error)
        ranks = ranks[:1]
    if _run_in_processes(ranks[:-1], run, folder):
        _leave(ranks[-1], run, folder)
    _end()


def _prepare(asked: DryCase, folder: Path) -> Run:
    """Make the device and import torch; returns what runs a rank, once in each process."""
    cluster = load_cluster(asked.case.cluster).of_world_size(asked.case.world_size)
    usable, ext = make_device(asked, cluster)
    # Here, since torch must not be imported before the device is there.
    from refshard.harness.dry.steps import preload, run_steps

    if len(ranks_of(asked.case)) > 1:
        preload(asked.case)

    def run(rank: int) -> DryResult:
        take_place(rank, asked.case.world_size, cluster.ranks_per_node)
        own = msgspec.structs.replace(asked, rank=rank)
        return msgspec.structs.replace(run_steps(own, cluster, ext, rank_folder(folder, rank)), usable_bytes=usable)

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


def make_device(asked: DryCase, cluster: ClusterSpec) -> tuple[int, ModuleType]:
    """Give this process the case's GPUs: returns the bytes that the allocator may reserve, and the extension."""
    hardware, beside = cluster.accelerator, sum(one.bytes for one in overheads(asked.case.world_size))
    if not asked.limited:
        hardware = msgspec.structs.replace(hardware, memory_bytes=UNLIMITED_BYTES)
    ext = activate(hardware, devices=cluster.ranks_per_node, unusable_bytes=beside)
    return hardware.memory_bytes - beside, ext


def take_place(rank: int, world_size: int, ranks_per_node: int) -> None:
    """A rank's place in the world, instead of its place among the processes that were really started. Its process sees
    one GPU: torch plans DTensors on the first one, whatever a rank's own is.
    """
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
    }  # fmt: skip
