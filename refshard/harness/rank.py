"""One rank of one case.

It reads ``FOLDER/case.json``, runs the case and leaves ``FOLDER/rank<r>.json``, whatever happens short of being killed.
It imports torch, numpy and msgspec and nothing heavier, so it runs on a bare cluster image.
"""

import os
import resource
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from refshard.errors import RefshardError, UnsupportedError
from refshard.harness.measure import RankResult, measure
from refshard.quantities import GIB
from refshard.records import State
from refshard.specs.case import CaseSpec
from refshard.specs.cluster import load_cluster

CASE_FILE = "case.json"
PROGRESS_FILE = "progress"


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its :class:`RankResult`."""
    return folder / f"rank{rank}.json"


def trace_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its Kineto trace."""
    return folder / f"trace-rank{rank}.json.gz"


def run_rank(folder: Path) -> int:
    """Run this rank and return the process's exit status."""
    rank = int(os.environ["RANK"])
    case = msgspec.json.decode((folder / CASE_FILE).read_bytes(), type=CaseSpec)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = _run(case, folder, rank)
        except BaseException as error:
            result = _failed(rank, error)
    notes = dict.fromkeys([*result.warnings, *(str(w.message) for w in caught if "refshard" in str(w.message))])
    _replace(rank_file(folder, rank), msgspec.json.encode(msgspec.structs.replace(result, warnings=tuple(notes))))
    return 0 if result.state == "ok" else 1


def _run(case: CaseSpec, folder: Path, rank: int) -> RankResult:
    if case.memory_limit_gib is not None:
        limit = int(case.memory_limit_gib * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(case.threads_per_rank)
    device = _device(case)
    if case.fidelity == "emulated":
        return _emulate(case, folder, rank, device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        group = dist.group.WORLD
        assert group is not None
        return _measure(case, folder, group, device)
    except BaseException as error:
        return _failed(rank, error)  # before the group goes, by which the other ranks fail in turn
    finally:
        dist.destroy_process_group()


def _emulate(case: CaseSpec, folder: Path, rank: int, device: torch.device) -> RankResult:
    # Here, since it registers a backend with torch: what is measured is measured without.
    from refshard.emulate.process_group import emulated_world
    from refshard.emulate.world import EmulatedWorld

    world = EmulatedWorld(
        load_cluster(case.cluster), rank=rank, world_size=case.world_size, meet=_meeting(case.processes)
    )
    with emulated_world(world) as group:
        result = _measure(case, folder, group, device)
        remark = world.remark()
    return msgspec.structs.replace(result, warnings=(remark,) if remark else ())


def _measure(case: CaseSpec, folder: Path, group: dist.ProcessGroup, device: torch.device) -> RankResult:
    def progress(phase: str, step: int, steps: int) -> None:
        if group.rank() == 0:
            (folder / PROGRESS_FILE).write_text(f"{phase} {step + 1}/{steps}")

    result = measure(case, group, device, trace_file(folder, group.rank()), progress)
    dist.barrier()
    return result


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


def _device(case: CaseSpec) -> torch.device:
    wanted = case.device if case.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if wanted == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _failed(rank: int, error: BaseException) -> RankResult:
    failed_at_s = time.time()
    with suppress(OSError):  # a full disk takes no log, but perhaps a result
        traceback.print_exception(error)
    return RankResult(rank=rank, state=_state_of(error), error=_describe(error), failed_at_s=failed_at_s)


def _state_of(error: BaseException) -> State:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "oom"
    if isinstance(error, UnsupportedError):
        return "unsupported"
    # The CPU allocator has no exception of its own.
    return "oom" if isinstance(error, RuntimeError) and "can't allocate memory" in str(error) else "failed"


def _describe(error: BaseException) -> str:
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return first_line if isinstance(error, RefshardError) else f"{type(error).__name__}: {first_line}"


def _replace(path: Path, data: bytes) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(data)
    unfinished.replace(path)
