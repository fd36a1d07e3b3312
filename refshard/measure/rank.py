"""One rank of one case, or of a series of cases.

It reads ``FOLDER/case.json``, runs the case and leaves ``FOLDER/rank<r>.json``, unless it is killed. For a series,
``FOLDER/series.json`` lists the cases, and each has a numbered folder of its own within. It imports torch, numpy and
msgspec and nothing heavier, so it runs on a bare cluster image.

A case takes, in order: warm-up steps, which give the losses for the parity proof; timed steps; traced steps. A step of
training is forward and backward of each microbatch and one optimizer step; a step of inference is forward and loss
under ``no_grad``, on weights that stay as they were initialised.

Nothing watches while steps are timed, except that a GPU's allocator always counts: its peaks are those of the timed
steps. A CPU's peak is taken over one early step, after the optimizer's state and the engine's slots exist. Operators
are counted in the step after it; with adapters, both in the two steps after warm-up, once they have dropout. On a GPU,
free-running steps follow, which the host does not wait for. The trace comes last. A memory limit holds until then: what
a trace and the digest of the parameters need is not the strategy's.
"""

import gc
import hashlib
import os
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous

from refshard.analysis.recording import WARMUP_STEPS, AllocatorPeak, GpuPeaks, OperatorCensus, capture_steps
from refshard.errors import RefshardError, UnsupportedError, first_line
from refshard.measure.flight import answering
from refshard.measure.load import RankLoad, watched_gpus, watched_load
from refshard.measure.reduced import Reduced, ReducedLosses, losses_of, reduced_file
from refshard.measure.trainer import Trainer, compiling_anew
from refshard.measure.worker import ASK, PROGRESS_FILE, request_file
from refshard.quantities import GIB
from refshard.records import Census, CollectiveCount, GpuMemory, GpuUse, State
from refshard.specs.case import Case
from refshard.specs.cluster import load_cluster
from refshard.specs.model import known_dimensions
from refshard.strategies import strategy_for
from refshard.strategies.table import ROWS

MEMORY_STEP = 2
"""On a CPU the allocator's peak is recorded in this step: the first with all buffers in place."""
CENSUS_STEP = MEMORY_STEP + 1
"""Operators are counted in this step."""
MOST_FREE_STEPS = 10
"""Free-running steps on a GPU, to learn what waiting for each step costs."""
_ABORT_S = 10.0
"""How long NCCL may take to abort before the process ends all the same."""
_ZERO_CTA = "2"
"""NCCL's policy of using no multiprocessor if possible: copy engines gather to symmetric memory."""
_SIGNS = ("can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")
"""Parts of out-of-memory messages: the CPU's allocator has no exception of its own, nor has what CUDA, its libraries
and NCCL allocate outside torch's allocator.
"""
_NO_ROOM_FOR_A_STACK = ("Resource temporarily unavailable", "can't start new thread")
"""What errors say if the limit leaves no room for the stack of a new thread."""

Progress = Callable[[str, int, int], None]
"""Called with the phase, the step and the number of steps of that phase."""


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank reports. ``losses`` are this rank's, one per step; times are in seconds, sizes in bytes.

    An emulated rank has no ``parameters_sha256``: what it would gather from others is made up. Rank 0 lists the
    ``operators`` of the step of its ``census``, in order. ``reduced`` is there if the case's own reference is too
    large. ``free_step_s`` is the mean of free-running steps, on a GPU. ``failed_at_s`` is the wall clock's time: the
    earliest error is the cause of the others.
    """

    rank: int
    state: State
    error: str | None = None
    failed_at_s: float = 0.0
    device: str = ""
    backend: str = ""
    step_times_s: tuple[float, ...] = ()
    traced_step_times_s: tuple[float, ...] = ()
    free_step_s: float | None = None
    losses: tuple[float, ...] = ()
    peak_memory_bytes: int | None = None
    memory_course_bytes: tuple[int, ...] = ()
    rss_bytes: int = 0
    load: RankLoad | None = None
    gpu_use: tuple[GpuUse, ...] = ()
    gpu_memory: GpuMemory | None = None
    compile_s: float = 0.0
    blocks: tuple[str, ...] = ()
    wrapped_units: tuple[str, ...] = ()
    announced: tuple[CollectiveCount, ...] = ()
    parameters_sha256: str = ""
    census: Census | None = None
    operators: tuple[str, ...] = ()
    flops_per_token: float | None = None
    reduced: ReducedLosses | None = None
    warnings: tuple[str, ...] = ()


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its :class:`RankResult`."""
    return folder / f"rank{rank}.json"


def trace_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its Kineto trace."""
    return folder / f"trace-rank{rank}.json.gz"


def series_folder(folder: Path, index: int) -> Path:
    """Where the ranks of a series leave their results of the case at ``index``."""
    return folder / str(index)


def run_rank(folder: Path) -> int:
    """Run this rank and return the process's exit status."""
    case = msgspec.json.decode(request_file(folder, "case").read_bytes(), type=Case)
    return 0 if _leave_result(folder, lambda: _run(case, folder)) else 1


def run_series_rank(folder: Path) -> int:
    """Run this rank through the cases of a series, in one process group, and return the process's exit status.

    The first case that does not end well is the last, and ends the process.
    """
    cases = msgspec.json.decode(request_file(folder, "series").read_bytes(), type=list[Case])
    torch.set_num_threads(cases[0].protocol.threads_per_rank)
    device = _device(cases[0])
    with _process_group(cases[0], device) as group:
        for index, case in enumerate(cases):
            own = series_folder(folder, index)
            progress = _progress(folder, group, f"case {index + 1}/{len(cases)}, ")
            if not _leave_result(own, partial(_measure, case, own, group, device, progress)):
                end_now(group)
            make_room(device)  # for the next case
    return 0


def _leave_result(folder: Path, run: Callable[[], RankResult]) -> bool:
    """Leave this rank's result, or its error; whether it ended well."""
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


def _run(case: Case, folder: Path) -> RankResult:
    device, rank = _device(case), int(os.environ["RANK"])
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
    """End this process with status 1, once its result is written.

    It does not destroy the group: NCCL would first wait for collectives that the other ranks never reach.
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
        # In the environment, so that it also holds for communicators that meshes and strategies make later.
        os.environ["NCCL_CTA_POLICY"] = _ZERO_CTA
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def _emulate(case: Case, folder: Path, rank: int, device: torch.device) -> RankResult:
    # Imported here because it registers a backend with torch: measured cases run without.
    from refshard.emulate.process_group import emulated_world
    from refshard.emulate.world import EmulatedWorld

    meet = _meeting(case.processes) if case.processes > 1 else None
    world = EmulatedWorld(load_cluster(case.job.cluster), rank=rank, world_size=case.job.gpus, meet=meet)
    with emulated_world(world) as group:
        result = _measure(case, folder, group, device, _progress(folder, group))
        remark = world.remark()
    return msgspec.structs.replace(result, warnings=(remark,) if remark else ())


def _meeting(processes: int) -> Callable[[], None]:
    """A barrier of the processes of an emulated case, at the launcher's store."""
    store, _, _ = next(rendezvous("env://"))

    def meet() -> None:
        arrived = store.add("arrived", 1)
        turn = f"turn {(arrived - 1) // processes}"
        if arrived % processes:
            store.wait([turn])
        else:  # the last one asks for nothing more: the process that holds the store may be gone
            store.set(turn, "")

    return meet


def _progress(folder: Path, group: dist.ProcessGroup, prefix: str = "") -> Progress:
    def tell(phase: str, step: int, steps: int) -> None:
        if group.rank() == 0:
            (folder / PROGRESS_FILE).write_text(f"{prefix}{phase} {step + 1}/{steps}")

    return tell


def _measure(
    case: Case, folder: Path, group: dist.ProcessGroup, device: torch.device, progress: Progress
) -> RankResult:
    result = measure(case, group, device, trace_file(folder, group.rank()), progress)
    if (request := reduced_file(folder)).exists():
        reduced = msgspec.json.decode(request.read_bytes(), type=Reduced)
        make_room(device)
        result = msgspec.structs.replace(result, reduced=losses_of(reduced, group, device, progress))
    dist.barrier()
    return result


def measure(case: Case, group: dist.ProcessGroup, device: torch.device, trace: Path, progress: Progress) -> RankResult:
    """Run ``case`` on this rank; nothing compiled earlier is used. The Kineto trace goes to ``trace``."""
    with compiling_anew() as compile_s:
        strategy, spec = strategy_for(case, cuda=device.type == "cuda"), known_dimensions(case.job.model)
        warmup = _counted("warm-up", case.protocol.warmup_steps, progress)
        progress("build", 0, 1)
        _import_lazy_parts()
        allocator, gpu, census = AllocatorPeak(), GpuPeaks(device), OperatorCensus()
        limit_bytes = None if case.protocol.memory_limit_gib is None else int(case.protocol.memory_limit_gib * GIB)
        with limited_memory(limit_bytes, device):
            trainer = Trainer(case, spec, strategy, group, device)
            watching: dict[int, AbstractContextManager[object]] = {CENSUS_STEP: census}
            if device.type == "cpu":
                watching = {MEMORY_STEP: allocator.window(), **watching}
            for step in warmup:
                with nullcontext() if trainer.drops else watching.get(step, nullcontext()):
                    trainer.timed_step(aligned=True)
            if trainer.drops:
                trainer.begin_dropout()
                for watch in watching.values():  # with what dropout keeps for backward
                    with watch:
                        trainer.timed_step(aligned=True)
            with watched_load(device) as load, watched_gpus(device) as gpu_use, gpu.window():
                times = [
                    trainer.timed_step(aligned=True)
                    for _ in _counted("measure", case.protocol.measured_steps, progress)
                ]
                rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            free = (
                trainer.free_step_s(min(case.protocol.measured_steps, MOST_FREE_STEPS))
                if device.type == "cuda"
                else None
            )
        row = ROWS[case.job.strategy]
        if not row.labels and not row.compiles:  # hooks would become part of compiled code
            trainer.mark_units()
        traced = []
        with capture_steps(
            trace, case.protocol.traced_steps, all_threads=case.protocol.fidelity == "emulated"
        ) as profiler:
            for step in _counted("trace", WARMUP_STEPS + case.protocol.traced_steps, progress):
                elapsed = trainer.timed_step(aligned=False)
                profiler.step()
                if step >= WARMUP_STEPS:
                    traced.append(elapsed)
        return RankResult(
            rank=group.rank(),
            state="ok",
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            backend=dist.get_backend(group),
            step_times_s=tuple(times),
            traced_step_times_s=tuple(traced),
            free_step_s=free,
            losses=tuple(trainer.losses),
            peak_memory_bytes=gpu.memory.allocated_bytes if gpu.memory else allocator.peak_bytes,
            memory_course_bytes=allocator.course_bytes if group.rank() == 0 else (),
            rss_bytes=rss,
            load=load[0] if load else None,
            gpu_use=tuple(gpu_use),
            gpu_memory=gpu.memory,
            blocks=trainer.blocks,
            wrapped_units=strategy.wrapped_units(),
            announced=strategy.announced(),
            parameters_sha256=_digest(strategy.full_parameters()) if case.protocol.fidelity == "measured" else "",
            census=census.census,
            operators=census.operators if group.rank() == 0 else (),
            flops_per_token=trainer.flops_per_token,
            compile_s=compile_s(),
        )


@contextmanager
def limited_memory(limit_bytes: int | None, device: torch.device) -> Iterator[None]:
    """Let allocations beyond the limit fail: on a GPU, what torch's allocator reserves; on a CPU, the whole process
    (``RLIMIT_DATA``). A limit above the GPU's memory limits nothing.

    Raises:
        MemoryError: a thread could not be started under the limit.
    """
    if limit_bytes is None:
        yield
    elif device.type == "cuda":
        _, total_bytes = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        before, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, most))
        try:
            yield
        except RuntimeError as error:
            if any(sign in str(error) for sign in _NO_ROOM_FOR_A_STACK):
                raise MemoryError(f"no room for the stack of a thread ({error})") from error
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def _import_lazy_parts() -> None:
    """Let torch import what a first optimizer step needs, and the CPU's matrix library allocate its buffers.

    It keeps those of its first large product: tens of MiB that are no strategy's memory.
    """
    torch.zeros(512, 512) @ torch.zeros(512, 8192)
    parameter = nn.Parameter(torch.zeros(1))
    parameter.sum().backward()
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    optimizer.zero_grad()


def _counted(phase: str, steps: int, progress: Progress) -> Iterator[int]:
    for step in range(steps):
        progress(phase, step, steps)
        yield step


def _digest(parameters: Iterator[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names and bits of all parameters, by name, so that two strategies' can be compared."""
    digests = {
        name: hashlib.sha256(value.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in parameters
    }
    return hashlib.sha256("".join(f"{n}={d};" for n, d in sorted(digests.items())).encode()).hexdigest()


def make_room(device: torch.device) -> None:
    """Free what is no longer needed, such as a model, and a GPU allocator's cache of it."""
    gc.collect()  # a model may be part of a cycle
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
    with suppress(OSError):  # a full disk may still take a result
        traceback.print_exception(error)
    return RankResult(rank=rank, state=state_of(error), error=describe(error), failed_at_s=failed_at_s)


def state_of(error: BaseException) -> State:
    """The state of a case that ends with ``error``."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "oom"
    if isinstance(error, UnsupportedError):
        return "unsupported"
    return "oom" if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS) else "failed"


def describe(error: BaseException) -> str:
    """An error in one line."""
    return first_line(error) if isinstance(error, RefshardError) else f"{type(error).__name__}: {first_line(error)}"


def _replace(path: Path, data: bytes) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(data)
    unfinished.replace(path)
