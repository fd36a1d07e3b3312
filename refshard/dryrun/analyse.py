"""The result of a dry run: whether it fits, how long a step takes, and where memory and time go.

The replay becomes the events of a trace, so that times come from the code that analyses traces.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refshard.analysis import analyse as tracing
from refshard.analysis.figures import CLASSES, OperatorClass
from refshard.analysis.names import class_of_operator
from refshard.dryrun.as_trace import as_trace
from refshard.dryrun.device import Rates
from refshard.dryrun.measured_prices import Coverage, MeasuredTrace, coverage, seconds_of
from refshard.dryrun.memory import MemoryAccount, account_memory
from refshard.dryrun.overheads import overheads
from refshard.dryrun.phases import PhaseMemory, account_phases
from refshard.dryrun.price import Prices, price
from refshard.dryrun.races import Race, find_races
from refshard.dryrun.recording import Flag, Kind, Phase, Recording
from refshard.dryrun.replay import NS, Replayed, replay
from refshard.dryrun.run import DryRun
from refshard.dryrun.steps import Step, settled, steps_of
from refshard.events.table import TraceFile
from refshard.outside_memory import Overhead
from refshard.specs.cluster import ClusterSpec
from refshard.specs.hardware import HardwareSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronisation:
    """The host waits for the device at one line of the script, ``count`` times a step; ``unknown`` if what it waits for
    is a value that the dry run did not compute.
    """

    why: str
    site: str
    count: int
    unknown: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Analysis:
    """A dry run and what follows from it.

    ``trace`` holds the events of the steps after the first, which sets up what later steps reuse; of a single step,
    that one; without a whole step, all events. ``traced`` is its analysis, None without a whole step. ``step`` is the
    last whole one. ``overheads`` are device memory that the allocator cannot reserve.
    ``model_flops`` are those of the step's matrix products and attention, without recomputation, causal attention by
    half.
    ``tokens`` are this rank's, of a step: of tokens that ranks share, its part; None where unknown. ``unknown_reads``
    are the lines of the script that read values which were not computed, in the whole run, with the number of reads.
    ``phases`` are those that the request names and that occurred, and what lies outside of them.
    ``races`` is None unless they were looked for. ``measured`` is the trace that prices kernels, None without one or
    without a step; ``coverage`` says how many of them.
    """

    run: DryRun
    cluster: ClusterSpec
    memory: MemoryAccount
    prices: Prices
    replayed: Replayed
    trace: TraceFile
    traced: tracing.Analysis | None
    step: Step | None
    overheads: tuple[Overhead, ...]
    model_flops: float
    tokens: float | None
    synchronisations: tuple[Synchronisation, ...]
    unknown_reads: Counter[str]
    phases: tuple[PhaseMemory, ...] = ()
    races: tuple[Race, ...] | None = None
    measured: MeasuredTrace | None = None
    coverage: Coverage | None = None

    @property
    def hardware(self) -> HardwareSpec:
        """What the rank computes on."""
        return self.cluster.accelerator

    @property
    def fits(self) -> bool | None:
        """Whether the allocator served all requests; None if the script failed, or took no step on the GPU. If phases
        are named, these must have run on the GPU instead.
        """
        if self.run.refused is not None or self.run.answer.outcome == "oom":
            return False
        ran = self.launches and not self.unreached if self.run.request.watched else self.trained
        return True if self.run.answer.outcome != "failed" and ran else None

    @property
    def launches(self) -> int:
        """How many kernels were launched."""
        return int(kernels(self.run.recording).sum())

    @property
    def unreached(self) -> tuple[str, ...]:
        """The named phases that did not occur, or did not end as often as they should."""
        request = self.run.request
        least = {**dict.fromkeys(request.watched, 0), **dict([request.until] if request.until else [])}
        ended = {one.name: sum(range_.end_bytes is not None for range_ in one.ranges) for one in self.phases}
        return tuple(name for name, times in least.items() if ended.get(name, -1) < times)

    @property
    def trained(self) -> bool:
        """Whether the last optimizer step had work on the GPU: of its modules, its backward or its optimizer."""
        recording = self.run.recording
        works = kernels(recording) & (recording.phases != Phase.OTHER)
        return self.step is not None and bool(works[self.step.first : self.step.end].any())

    @property
    def nvidia_smi_bytes(self) -> int | None:
        """What nvidia-smi shows of the process at its peak: reserved memory and what lies outside the allocator. None
        where nothing was reserved, it does not fit or the script failed.
        """
        answer = self.run.answer
        if not answer.peak.reserved or self.fits is False or answer.outcome == "failed":
            return None
        return answer.peak.reserved + self.outside_bytes

    @property
    def outside_bytes(self) -> int:
        """Estimated device memory of the process outside of the allocator."""
        return sum(one.bytes for one in self.overheads)

    @property
    def usable_bytes(self) -> int:
        """What the allocator can reserve."""
        return self.hardware.memory_bytes - self.outside_bytes

    @property
    def headroom_bytes(self) -> int:
        """What the allocator could still have reserved at its peak; what it lacks, if negative."""
        return self.usable_bytes - self.run.answer.peak.reserved

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, the mean of those in the trace."""
        if self.traced is None:
            return None
        steps = self.traced.figures.steps
        return sum(step.breakdown.span_ns for step in steps) / len(steps) / NS

    @property
    def exposed_s(self) -> float | None:
        """Seconds of exposed communication of a step, the mean of those in the trace."""
        if self.traced is None:
            return None
        steps = self.traced.figures.steps
        return sum(step.breakdown.exposed_ns for step in steps) / len(steps) / NS

    @property
    def recomputed(self) -> dict[OperatorClass, float]:
        """Seconds of the last step's kernels that recompute activations, by class."""
        found = defaultdict[OperatorClass, float](float)
        if self.step is not None:
            rows, recording = slice(self.step.first, self.step.end), self.run.recording
            again = recording.phases[rows] == Phase.RECOMPUTE
            for name, seconds in zip(recording.names[rows][again].tolist(), self.prices.seconds[rows][again].tolist()):
                found[CLASSES[class_of_operator(recording.name_table[name])]] += seconds
        return dict(found)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of one GPU."""
        return self.tokens / self.step_s if self.tokens and self.step_s else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs a second over the hardware's bf16 peak (fp32's, where it has no other)."""
        rate = self.hardware.matmul.get("bf16") or self.hardware.matmul["fp32"]
        return self.model_flops / self.step_s / rate.peak if self.step_s else None


def analyse(
    run: DryRun, cluster: ClusterSpec, *, global_tokens: int | None = None, races: bool = False,
    measured: MeasuredTrace | None = None,
) -> Analysis:  # fmt: skip
    """Price and replay a dry run on ``cluster``, and look for ``races``.

    ``global_tokens`` are those of a step over all ranks, where given. Kernels of ``measured`` are not modelled.
    """
    recording = run.recording
    steps = steps_of(recording, "step") if run.answer.steps_taken else ()
    known = None if measured is None or not steps else seconds_of(recording, steps[-1], measured)
    prices = price(recording, cluster, known)
    replayed = replay(recording, prices, Rates.of(cluster))
    device = cluster.accelerator.device_name or cluster.accelerator.about
    name = " ".join(run.request.command)
    traced = settled(recording, steps) or steps_of(recording, "step")
    trace = as_trace(recording, replayed, device=device, steps=traced, name=name)
    step = steps[-1] if steps else None
    memory = account_memory(recording)
    return Analysis(
        run=run, cluster=cluster, memory=memory, prices=prices, replayed=replayed, trace=trace,
        traced=tracing.analyse(trace) if steps and len(trace.device.starts) else None, step=step,
        overheads=overheads(cluster.accelerator, recording),
        model_flops=_model_flops(recording, prices, step), tokens=_tokens(run, global_tokens),
        synchronisations=_synchronisations(recording, step), unknown_reads=_unknown_reads(recording),
        phases=account_phases(recording, memory),
        races=find_races(recording) if races else None, measured=None if known is None else measured,
        coverage=None if known is None else coverage(recording, steps[-1], prices.seconds, known),
    )  # fmt: skip


def kernels(recording: Recording) -> npt.NDArray[np.bool_]:
    """Which events are launches of kernels."""
    return (recording.kinds == Kind.LAUNCH) & (recording.flags & Flag.HOST_ONLY == 0)  # type: ignore[no-any-return]


def _tokens(run: DryRun, global_tokens: int | None) -> float | None:
    if global_tokens is not None:
        return global_tokens / run.request.world_size
    taken = run.answer.steps_taken
    return run.answer.tokens / taken / run.answer.sharing if taken and run.answer.tokens else None


def _model_flops(recording: Recording, prices: Prices, step: Step | None) -> float:
    if step is None:
        return 0.0
    rows = slice(step.first, step.end)
    counted = ~np.isin(recording.phases[rows], (Phase.RECOMPUTE, Phase.OPTIMIZER))
    return float(prices.flops[rows][counted].sum())


def _synchronisations(recording: Recording, step: Step | None) -> tuple[Synchronisation, ...]:
    first, end = (step.first, step.end) if step else (0, len(recording))
    rows = first + np.flatnonzero(recording.kinds[first:end] == Kind.SYNCHRONISE)
    keys = zip(
        recording.names[rows].tolist(),
        recording.sites[rows].tolist(),
        (recording.flags[rows] & Flag.VALUE_UNKNOWN).tolist(),
    )
    return tuple(
        Synchronisation(
            why=recording.name_table[name], site=recording.site_table[site], count=count, unknown=bool(unknown)
        )
        for (name, site, unknown), count in Counter(keys).most_common()
    )


def _unknown_reads(recording: Recording) -> Counter[str]:
    rows = (recording.kinds == Kind.SYNCHRONISE) & (recording.flags & Flag.VALUE_UNKNOWN != 0)
    return Counter(recording.site_table[site] for site in recording.sites[rows].tolist())
