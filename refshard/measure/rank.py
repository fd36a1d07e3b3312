"""One rank of one case, or of a series of them.

It reads ``FOLDER/case.json``, runs the case and leaves ``FOLDER/rank<r>.json``, whatever happens short of being killed.
Of a series, ``FOLDER/series.json`` lists the cases, and each has a folder of its own within, named by its place. It
imports torch, numpy and msgspec and nothing heavier, so it runs on a bare cluster image.
"""

import gc
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from refshard.errors import RefshardError, UnsupportedError
from refshard.measure.flight import answering
from refshard.measure.reduced import REDUCED_FILE, Reduced, losses_of
from refshard.measure.timing import Progress, RankResult, measure
from refshard.measure.worker import ASK
from refshard.records import State
from refshard.specs.case import Case
from refshard.specs.cluster import load_cluster

CASE_FILE = "case.json"
SERIES_FILE = "series.json"
PROGRESS_FILE = "progress"
_ABORT_S = 10.0
"""How long NCCL may take to abort before the process ends all the same."""
_ZERO_CTA = "2"
"""NCCL's policy of using no multiprocessor where it can do without: copy engines gather to symmetric memory."""
_SIGNS = ("can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")
"""Parts of messages that tell of no memory: the CPU's allocator has no exception of its own, nor has what CUDA, its
libraries and NCCL allocate beside torch's allocator.
"""


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its :class:`RankResult`."""
    return folder / f"rank{rank}.json"


def trace_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its Kineto trace."""
    return folder / f"trace-rank{rank}.json.gz"


def run_rank(folder: Path) -> int:
    """Run this rank and return the process's exit status."""
    case = msgspec.json.decode((folder / CASE_FILE).read_bytes(), type=Case)
    return 0 if _leave_result(folder, lambda: _run(case, folder, int(os.environ["RANK"]))) else 1


def run_series_rank(folder: Path) -> int:
    """Run this rank through the cases of a series, in one process group, and return the process's exit status.

    The first case that does not end well is the last, and ends the process.
    """
    cases = msgspec.json.decode((folder / SERIES_FILE).read_bytes(), type=list[Case])
    torch.set_num_threads(cases[0].protocol.threads_per_rank)
    device = _device(cases[0])
    with _process_group(cases[0], device) as group:
        for index, case in enumerate(cases):
            own = series_folder(folder, index)
            progress = _progress(folder, group, f"case {index + 1}/{len(cases)}, ")
            if not _leave_result(own, partial(_measure, case, own, group, device, progress)):
                end_now(group)
            make_room(device)  # its memory is not the next one's
    return 0


def series_folder(folder: Path, index: int) -> Path:
    """Where the ranks of a series leave what they know of the case at ``index``."""
    return folder / str(index)


def _leave_result(folder: Path, run: Callable[[], RankResult]) -> bool:
    """Leave this rank's result, or the error that it met; whether it ended well."""
    rank = int(os.environ["RANK"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = run()
        except BaseException as error:
            result = _failed(rank, error)
    notes = dict.fromkeys([*result.warnings, *(str(w.message) for w in caught if "refshard" in str(w.message))])
    _replace(rank_file(folder, rank), msgspec.json.encode(msgspec.structs.replace(result, warnings=tuple(notes))))
    return result.state == "ok"


def _run(case: Case, folder: Path, rank: int) -> RankResult:
    device = _device(case)
    torch.set_num_threads(case.protocol.threads_per_rank)
    if case.protocol.fidelity == "emulated":
        return _emulate(case, folder, rank, device)
    with _process_group(case, device) as group, answering(folder, group, ASK):
        try:
            return _measure(case, folder, group, device, _progress(folder, group))
        except BaseException as error:
            _replace(rank_file(folder, rank), msgspec.json.encode(_failed(rank, error)))
            end_now(group)


def end_now(group: dist.ProcessGroup) -> NoReturn:
    """End this process, whose result is written, with status 1.

    It does not destroy the group: NCCL would first wait for collectives that the other ranks never come to.
    """
    if dist.get_backend(group) == "nccl":
        aborting = Thread(target=group.abort, daemon=True)  # takes kernels that wait for peers off the device
        aborting.start()
        aborting.join(_ABORT_S)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(1)


@contextmanager
def _process_group(case: Case, device: torch.device) -> Iterator[dist.ProcessGroup]:
    if case.job.comm_memory == "symmetric":
        # By the environment, for the communicators that meshes and strategies make later as well.
        os.environ["NCCL_CTA_POLICY"] = _ZERO_CTA
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def _emulate(case: Case, folder: Path, rank: int, device: torch.device) -> RankResult:
    # Here, since it registers a backend with torch: what is measured is measured without.
    from refshard.emulate.process_group import emulated_world
    from refshard.emulate.world import EmulatedWorld

    world = EmulatedWorld(
        load_cluster(case.job.cluster), rank=rank, world_size=case.job.gpus, meet=_meeting(case.processes)
    )
    with emulated_world(world) as group:
        result = _measure(case, folder, group, device, _progress(folder, group))
        remark = world.remark()
    return msgspec.structs.replace(result, warnings=(remark,) if remark else ())


def _progress(folder: Path, group: dist.ProcessGroup, within: str = "") -> Progress:
    """Rank 0 says what it is at."""

    def tell(phase: str, step: int, steps: int) -> None:
        if group.rank() == 0:
            (folder / PROGRESS_FILE).write_text(f"{within}{phase} {step + 1}/{steps}")

    return tell


def _measure(
    case: Case, folder: Path, group: dist.ProcessGroup, device: torch.device, progress: Progress
) -> RankResult:
    result = measure(case, group, device, trace_file(folder, group.rank()), progress)
    if (order := folder / REDUCED_FILE).exists():
        reduced = msgspec.json.decode(order.read_bytes(), type=Reduced)
        make_room(device)
        result = msgspec.structs.replace(result, reduced=losses_of(reduced, group, device, progress))
    dist.barrier()
    return result


def make_room(device: torch.device) -> None:
    """Give back what was held and is needed no more, such as a model, and what a GPU's allocator has cached of it."""
    gc.collect()  # a model may be part of a cycle
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _meeting(processes: int) -> Callable[[], None] | None:
    """Where the processes of an emulated case wait for each other: the launcher's store. One has nobody to meet."""
    if processes == 1:
        return None
    store, _, _ = next(rendezvous("env://"))

    def meet() -> None:
        arrived = store.add("arrived", 1)
        turn = f"turn {(arrived - 1) // processes}"
        if arrived % processes:
            store.wait([turn])
        else:  # the last one asks for nothing more: the process that holds the store may be gone
            store.set(turn, "")

    return meet


def _device(case: Case) -> torch.device:
    wanted = (
        case.protocol.device if case.protocol.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    )
    if wanted == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _failed(rank: int, error: BaseException) -> RankResult:
    failed_at_s = time.time()
    with suppress(OSError):  # a full disk takes no log, but perhaps a result
        traceback.print_exception(error)
    return RankResult(rank=rank, state=state_of(error), error=describe(error), failed_at_s=failed_at_s)


def state_of(error: BaseException) -> State:
    """How a case ends that ends with ``error``."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "oom"
    if isinstance(error, UnsupportedError):
        return "unsupported"
    return "oom" if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS) else "failed"


def describe(error: BaseException) -> str:
    """An error in one line."""
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return first_line if isinstance(error, RefshardError) else f"{type(error).__name__}: {first_line}"


def _replace(path: Path, data: bytes) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(data)
    unfinished.replace(path)
