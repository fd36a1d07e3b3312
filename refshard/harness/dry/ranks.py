"""What the recordings of a case's ranks come to, replayed together: memory that is held back, steps and traces."""

import gzip
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import msgspec

from refshard.dryrun.as_trace import as_trace
from refshard.dryrun.device import Rates
from refshard.dryrun.held_back import UNLIMITED, NotReproducedError, Settled, holds_back, settle
from refshard.dryrun.price import price
from refshard.dryrun.recording import Recording
from refshard.dryrun.replay import replay_together
from refshard.dryrun.request import UNLIMITED_BYTES
from refshard.dryrun.steps import steps_of
from refshard.events.writer import as_kineto
from refshard.harness.dry.reading import read_step, retried
from refshard.harness.dry.result import DryCase, DryResult, StepResult
from refshard.harness.rank import trace_file
from refshard.specs.case import CaseSpec
from refshard.specs.cluster import ClusterSpec

GPU = 0
"""The only GPU that a rank's process sees."""
BUILT = "build"
"""The mark between building and the steps; peaks of memory are those of the steps."""


def steps_for(case: CaseSpec) -> int:
    """How many steps a rank takes; the last is like any that would follow. The first makes the optimizer's state, and
    before the second DDP lays out its buckets anew. In a pipeline without DDP the second step is like the third, and
    there are as many ranks to follow as it has.
    """
    return 2 if case.pipeline_ranks > 1 and case.strategy != "ddp" else 3


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
        result = msgspec.structs.replace(result, limited=_refused(refused))
        found = settle(recordings, cluster, ext, GPU, as_run_bytes=as_run, total_bytes=UNLIMITED, reset=BUILT)
    warnings = dict.fromkeys((*result.warnings, *(told for one in found for told in retried(one.allocator.retries))))
    return msgspec.structs.replace(result, fits=refused is None, warnings=tuple(warnings)), found


def _refused(one: Settled) -> DryResult:
    refused = one.allocator.refused
    assert refused is not None
    return DryResult(
        state="oom", error=refused.message, peak=one.allocator.peak, refused=asked_for(refused.message)
    )  # fmt: skip


def asked_for(error: str) -> str:
    """How much was asked for, in the words of torch's error."""
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
