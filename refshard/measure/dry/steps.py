"""A few steps of a case on the fake device, and what the recordings of its ranks come to, replayed together."""

import gzip
import hashlib
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.fx.experimental._config as symbolic

from refshard.analysis.kineto import timeline_of
from refshard.analysis.overlap import collectives_per_step, step_breakdowns
from refshard.analysis.recording import highest_of
from refshard.dryrun.as_trace import as_trace
from refshard.dryrun.device import Rates
from refshard.dryrun.held_back import UNLIMITED, NotReproducedError, Settled, holds_back, settle
from refshard.dryrun.memory import account_memory
from refshard.dryrun.observe import Observer, pool
from refshard.dryrun.overheads import overheads
from refshard.dryrun.price import price
from refshard.dryrun.recording import Flag, Kind, Recording, collect, load, save
from refshard.dryrun.replay import NS, Replayed, replay_together
from refshard.dryrun.request import UNLIMITED_BYTES
from refshard.dryrun.steps import Step, steps_of
from refshard.errors import UnsupportedError
from refshard.events.writer import as_kineto
from refshard.measure.assemble import step_trace
from refshard.measure.dry.rank import RECORDING_FILE, DryCase, DryResult, StepResult, rank_folder, ranks_of
from refshard.measure.rank import describe, trace_file
from refshard.measure.trainer import Trainer
from refshard.measure.worker import PROGRESS_FILE
from refshard.quantities import format_times
from refshard.records import Census, CollectiveCount, State
from refshard.specs.case import Case
from refshard.specs.cluster import ClusterSpec
from refshard.specs.model import known_dimensions
from refshard.strategies import make_strategy, strategy_for
from refshard.strategies.base import Strategy
from refshard.strategies.table import ROWS


def read_step(recording: Recording, replayed: Replayed, steps: Sequence[Step]) -> StepResult:
    """The figures of the last of ``steps``: two or more consecutive steps.

    The last step's window begins where the previous one ends, because the device is not drained between steps.
    """
    timeline, last = timeline_of(as_trace(recording, replayed, device="", steps=steps)), steps[-1]
    found = step_breakdowns(timeline)[-1]
    issued = collectives_per_step(timeline)[last.number]
    return StepResult(
        step_s=found.span_ns / NS,
        trace=step_trace(recording.rank, last.number, found),
        issued=tuple(CollectiveCount(op=op, count=count, bytes=size) for op, count, size in issued),
        census=census_of(recording, last),
        memory_course_bytes=highest_of(account_memory(recording).allocated[last.first : last.end].tolist()),
        host_waits=dict(sorted(Counter(_names(recording, _rows(recording, last, Kind.SYNCHRONISE))).items())),
    )


def census_of(recording: Recording, step: Step) -> Census:
    """Count a step's launches and collectives, stream waits and allocations; sizes are as the allocator rounds them.

    The order covers launches, collectives, event records and waits in host order, each with its stream. Streams are
    numbered by their first use in the step.
    """
    asked = _rows(recording, step, Kind.LAUNCH, Kind.COLLECTIVE)
    ordered = _rows(recording, step, Kind.LAUNCH, Kind.COLLECTIVE, Kind.RECORD, Kind.WAIT)
    numbers: dict[int, int] = {}
    streams = [numbers.setdefault(stream, len(numbers)) for stream in recording.streams[ordered].tolist()]
    order = "\n".join(f"{name} {stream}" for name, stream in zip(_names(recording, ordered), streams))
    allocations = _rows(recording, step, Kind.ALLOCATE)
    return Census(
        operators=len(asked),
        allocations=len(allocations),
        allocated_bytes=int(recording.sizes[allocations].sum()),
        order_sha256=hashlib.sha256(order.encode()).hexdigest(),
        stream_waits=len(_rows(recording, step, Kind.WAIT)),
    )


def remarks(recording: Recording, retries: int) -> Iterator[str]:
    """Warnings about a rank's figures; ``retries`` counts how often the allocator emptied its cache."""
    if unknown := int((recording.flags & Flag.VALUE_UNKNOWN != 0).sum()):
        values = "a value" if unknown == 1 else f"{unknown:,} values"
        yield f"the host reads {values} that a dry run does not compute; a GPU run may branch differently"
    yield from retried(retries)


def retried(retries: int) -> Iterator[str]:
    """A warning if the allocator emptied its cache."""
    if retries:
        yield f"the allocator emptied its cache {format_times(retries)} for an allocation; the host waits each time"


def _rows(recording: Recording, step: Step, *kinds: Kind) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.isin(recording.kinds[step.first : step.end], kinds)) + step.first


def _names(recording: Recording, rows: npt.NDArray[np.int64]) -> list[str]:
    return [recording.name_table[name] for name in recording.names[rows].tolist()]


GPU = 0
"""The only GPU that a rank's process sees."""
BUILT = "build"
"""The mark between building and the steps; peaks of memory are those of the steps."""


def steps_for(case: Case) -> int:
    """How many steps a rank takes; the last is like any that would follow. The first makes the optimizer's state, and
    before the second DDP lays out its buckets anew. In a pipeline without DDP the second step is like the third, and
    there are as many ranks to follow as it has.
    """
    return 2 if case.job.pp_ranks > 1 and case.job.strategy != "ddp" else 3


def read_ranks(
    asked: DryCase, result: DryResult, recordings: Sequence[Recording], cluster: ClusterSpec, ext: ModuleType,
    folder: Path,
) -> DryResult:  # fmt: skip
    """The ``result`` of the last rank, with what the recordings of all come to; traces, if any, go to ``folder``."""
    if not any(map(holds_back, recordings)):
        return msgspec.structs.replace(result, steps=_steps(asked, recordings, cluster, folder))
    try:
        result, settled = _settled(asked, result, recordings, cluster, ext)
    except NotReproducedError as doubt:
        warning = f"upper bound: memory kept by record_stream() counts until the host waits for the GPU: {doubt}"
        result = msgspec.structs.replace(result, warnings=(*result.warnings, warning))
        return msgspec.structs.replace(result, steps=_steps(asked, recordings, cluster, folder))
    steps = _steps(asked, [one.recording for one in settled], cluster, folder)
    peaks = (msgspec.structs.replace(step, peak=one.allocator.peak) for step, one in zip(steps, settled))
    return msgspec.structs.replace(result, steps=tuple(peaks))


def _settled(
    asked: DryCase, result: DryResult, recordings: Sequence[Recording], cluster: ClusterSpec, ext: ModuleType
) -> tuple[DryResult, tuple[Settled, ...]]:
    """The ranks as on GPUs: within their memory if they fit, else without a limit."""
    memory_bytes = cluster.accelerator.memory_bytes
    as_run = memory_bytes if asked.limited else UNLIMITED_BYTES
    found = settle(recordings, cluster, ext, GPU, as_run_bytes=as_run, total_bytes=memory_bytes, reset=BUILT)
    refused = next((one for one in found if one.allocator.refused), None)
    if refused is not None:
        failed = refused.allocator.refused
        assert failed is not None
        limited = DryResult(
            state="oom", error=failed.message, peak=refused.allocator.peak, refused=asked_for(failed.message)
        )
        result = msgspec.structs.replace(result, limited=limited)
        found = settle(recordings, cluster, ext, GPU, as_run_bytes=as_run, total_bytes=UNLIMITED, reset=BUILT)
    warnings = dict.fromkeys((*result.warnings, *(text for one in found for text in retried(one.allocator.retries))))
    return msgspec.structs.replace(result, fits=refused is None, warnings=tuple(warnings)), found


def asked_for(error: str) -> str:
    """The size of the allocation that failed, from torch's message."""
    return error.partition("Tried to allocate ")[2].partition(". ")[0]


def _steps(
    asked: DryCase, recordings: Sequence[Recording], cluster: ClusterSpec, folder: Path
) -> tuple[StepResult, ...]:
    """The last step of every rank."""
    prices = [price(recording, cluster) for recording in recordings]
    device = cluster.accelerator.device_name or cluster.accelerator.about
    found = []
    for recording, replayed in zip(recordings, replay_together(recordings, prices, Rates.of(cluster))):
        steps = steps_of(recording)[-steps_for(asked.case) :]  # building comes first, in which some optimizers step too
        found.append(read_step(recording, replayed, steps))
        if asked.traced:
            with gzip.open(trace_file(folder, recording.rank), "wt", encoding="utf-8") as file:
                file.write(as_kineto(as_trace(recording, replayed, device=device, steps=steps[-1:])))
    return tuple(found)


_AT_FIRST = (
    "torch._dynamo",
    "torch._meta_registrations",
    "torch._refs",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
)


def run_steps(asked: DryCase, cluster: ClusterSpec, ext: ModuleType, folder: Path) -> DryResult:
    """Take the steps of one rank, which works in ``folder``; the last rank reads what the device's extension ``ext``
    recorded of all.

    What the case meets on the way is its result.
    """
    device = torch.device("cuda", GPU)
    torch.cuda.set_device(device)
    symbolic.meta_nonzero_assume_all_nonzero = True
    dist.init_process_group("nccl")
    try:
        strategy = strategy_for(asked.case, cuda=True)
        stepped, trainer = _train(asked, strategy, device, ext, folder)
        result = DryResult(
            state="ok",
            stepped=stepped,
            trained=trainer.trained,
            held=trainer.held,
            blocks=trainer.blocks,
            flops_per_token=trainer.flops_per_token,
            peak=pool(device.index, "peak"),
            wrapped_units=strategy.wrapped_units(),
            announced=strategy.announced(),
        )
    except BaseException as error:
        usable = _usable_bytes(cluster, collect(ext, asked.rank, asked.case.job.gpus))
        return msgspec.structs.replace(_ended_by(error, device.index), usable_bytes=usable)
    recording = collect(ext, asked.rank, asked.case.job.gpus)
    # The allocator's retries are known here only if all of its memory came free when the host knew.
    retries = 0 if holds_back(recording) else torch.cuda.memory_stats()["num_alloc_retries"]
    result = msgspec.structs.replace(
        result, warnings=tuple(remarks(recording, retries)), usable_bytes=_usable_bytes(cluster, recording)
    )
    if asked.rank != ranks_of(asked.case)[-1]:
        save(recording, folder / RECORDING_FILE)
        return result
    _tell(asked, folder, "replay")
    recordings = [load(rank_folder(folder.parent, rank) / RECORDING_FILE) for rank in ranks_of(asked.case)[:-1]]
    return read_ranks(asked, result, [*recordings, recording], cluster, ext, folder.parent)


def _usable_bytes(cluster: ClusterSpec, recording: Recording) -> int:
    hardware = cluster.accelerator
    return hardware.memory_bytes - sum(one.bytes for one in overheads(hardware, recording))


def preload(case: Case) -> None:
    """Import what a rank's first step imports, so that ranks which are forked from this process need not."""
    for module in _AT_FIRST:
        import_module(module)
    if case.job.strategy in ROWS:
        make_strategy(case.job.strategy)
    _ = torch.empty(1, device="meta") + 1  # torch registers its meta kernels


def _train(
    asked: DryCase, strategy: Strategy, device: torch.device, ext: ModuleType, folder: Path
) -> tuple[int, Trainer]:
    """How many elements this rank's optimizer steps, and what trained."""
    case = asked.case
    ext.record(True)
    observer = Observer(ext, sys.maxsize)  # which would end a script after that many steps
    observer.install()
    _tell(asked, folder, "build")
    group = dist.group.WORLD
    assert group is not None
    trainer = Trainer(case, known_dimensions(case.job.model), strategy, group, device)
    if trainer.drops:
        trainer.begin_dropout()
    batch = trainer.batch(0)
    torch.cuda.empty_cache()  # what building took is not the steps'
    torch.cuda.reset_peak_memory_stats(device)
    ext.mark(BUILT)
    for step in range(steps := steps_for(case)):
        _tell(asked, folder, f"step {step + 1}/{steps}")
        trainer.step(batch)
        if case.job.workload == "inference":  # else the optimizer's step is marked
            ext.mark("step")
    ext.record(False)
    return observer.stepped, trainer


def _tell(asked: DryCase, folder: Path, what: str) -> None:
    rank = f"rank {asked.rank}, " if len(ranks_of(asked.case)) > 1 else ""
    (folder.parent / PROGRESS_FILE).write_text(rank + what)


def _ended_by(error: BaseException, device: int) -> DryResult:
    traceback.print_exception(error)
    if isinstance(error, torch.OutOfMemoryError):
        return DryResult(
            state="oom", error=describe(error), peak=pool(device, "peak"), refused=asked_for(str(error))
        )  # fmt: skip
    state: State = "unsupported" if isinstance(error, UnsupportedError) else "failed"
    return DryResult(state=state, error=describe(error))
