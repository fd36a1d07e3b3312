"""What one rank measures of one case, in order: proof and warm-up, timed steps, traced steps.

A step of training is forward and backward of each microbatch and one optimizer step; a step of inference is forward and
loss under ``no_grad``, on weights that stay as they were initialised.

Nothing watches while steps are timed, except that a GPU's allocator always counts: its peaks are those of the timed
steps. A CPU's peak is taken over one early step, after the optimizer's state and the engine's slots exist. Operators
are counted in the step after it; of adapters, both in the two steps after warm-up, once they have dropout. On a GPU,
steps follow that nothing waits for. The trace is recorded last. A limit on memory holds until then: what a trace and
the digest of the parameters need is the measurement's, not the strategy's.
"""

import hashlib
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from refshard.analysis.recording import WARMUP_STEPS, AllocatorPeak, GpuPeaks, OperatorCensus, capture_steps
from refshard.measure.gpus import watched_gpus
from refshard.measure.load import RankLoad, watched_load
from refshard.measure.reduced import ReducedLosses
from refshard.measure.trainer import Trainer, compiling_anew
from refshard.quantities import GIB
from refshard.records import Census, CollectiveCount, GpuMemory, GpuUse, State
from refshard.specs.case import Case
from refshard.specs.model import known_dimensions
from refshard.strategies import strategy_for
from refshard.strategies.table import ROWS

_NO_ROOM_FOR_A_STACK = ("Resource temporarily unavailable", "can't start new thread")
"""What errors say if the limit leaves no room for the stack of a new thread."""


@contextmanager
def limited_memory(limit_bytes: int | None, device: torch.device) -> Iterator[None]:
    """Let allocations beyond the limit fail: on a GPU, those that torch's allocator reserves; on a CPU, those of the
    whole process (``RLIMIT_DATA``). A limit above the GPU's memory limits nothing.

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


MEMORY_STEP = 2
"""The step whose allocator peak is recorded on a CPU: the first whose every buffer was there before."""
CENSUS_STEP = MEMORY_STEP + 1
"""The step whose operators are counted."""
MOST_FREE_STEPS = 10
"""Steps on a GPU that follow each other without a wait of the host, to learn what waiting for each step costs."""

Progress = Callable[[str, int, int], None]
"""Called with the phase, the step and the number of steps of that phase."""


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank reports. ``losses`` are this rank's, one per step; times are in seconds, sizes in bytes.

    An emulated rank has no ``parameters_sha256``: what it would gather from others is made up. Rank 0 names its
    ``operators``, in order, of the step that its ``census`` is of. ``reduced`` is there where the case's own reference
    is too large. ``free_step_s`` is the mean of steps between which the host waits for nothing, on a GPU.
    ``failed_at_s`` is the wall clock's time: other ranks' errors are later, if they are but echoes.
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


def measure(case: Case, group: dist.ProcessGroup, device: torch.device, trace: Path, progress: Progress) -> RankResult:
    """Run ``case`` on this rank, compiling anew what is compiled. The Kineto trace goes to ``trace``."""
    with compiling_anew() as compile_s:
        result = _measure(case, group, device, trace, progress)
        return msgspec.structs.replace(result, compile_s=compile_s())


def _measure(case: Case, group: dist.ProcessGroup, device: torch.device, trace: Path, progress: Progress) -> RankResult:
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
                trainer.timed_step(aligned=True) for _ in _counted("measure", case.protocol.measured_steps, progress)
            ]
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        free = (
            trainer.free_step_s(min(case.protocol.measured_steps, MOST_FREE_STEPS)) if device.type == "cuda" else None
        )
    row = ROWS[case.job.strategy]
    if not row.labels and not row.compiles:  # compiled code would take hooks for a part of it
        trainer.mark_units()
    traced = []
    with capture_steps(trace, case.protocol.traced_steps, all_threads=case.protocol.fidelity == "emulated") as profiler:
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
    )


def _import_lazy_parts() -> None:
    """Let torch import what it puts off until a first optimizer step, and the CPU's matrix library take the buffers
    that it keeps from its first large product on: tens of MiB that are no strategy's memory.
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
