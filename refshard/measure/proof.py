"""Whether a launch did what its case claims: units, collectives against the strategy's plan, losses, parameters."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from refshard.analysis.figures import Breakdown
from refshard.analysis.kineto import read_timeline
from refshard.analysis.overlap import collectives_per_step, mean_ratio, step_breakdowns
from refshard.errors import TraceError
from refshard.measure.rank import trace_file
from refshard.measure.reduced import Reduced
from refshard.measure.timing import RankResult
from refshard.records import (
    CollectiveCount,
    LaunchRecord,
    Proof,
    StepTrace,
    parity_tolerance,
)
from refshard.specs.case import Case
from refshard.specs.job import REFERENCE_STRATEGY
from refshard.strategies.table import ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """What the traces of all ranks say; ``per_step`` are rank and collectives of every traced step.

    ``unread`` says why a rank's collectives are not among them.
    """

    steps: tuple[StepTrace, ...] = ()
    overlap_ratio: float | None = None
    per_step: tuple[tuple[int, tuple[CollectiveCount, ...]], ...] = ()
    unread: str = ""


def read_traces(folder: Path, processes: int) -> Traces:
    """Read the trace of every rank.

    Raises:
        TraceError: a trace is missing, damaged, or holds no step.
    """
    steps: list[StepTrace] = []
    found: list[Breakdown] = []
    per_step: list[tuple[int, tuple[CollectiveCount, ...]]] = []
    unread = ""
    for rank in range(processes):
        timeline = read_timeline(trace_file(folder, rank))
        of_rank = step_breakdowns(timeline)
        found += of_rank
        steps += [step_trace(rank, window.step, b) for window, b in zip(timeline.windows, of_rank)]
        try:
            issued = collectives_per_step(timeline)
        except TraceError as error:
            unread = unread or f"rank {rank}: {error}"
            continue
        per_step += [
            (rank, tuple(CollectiveCount(op=op, count=count, bytes=size) for op, count, size in counts))
            for counts in issued.values()
        ]
    return Traces(steps=tuple(steps), overlap_ratio=mean_ratio(found), per_step=tuple(per_step), unread=unread)


def step_trace(rank: int, step: int | None, breakdown: Breakdown) -> StepTrace:
    """A traced step as a record keeps it.

    Raises:
        TraceError: the trace has no steps.
    """
    if step is None:
        raise TraceError(f"the trace of rank {rank} holds no ProfilerStep; call profiler.step() after every step")
    return StepTrace(
        rank=rank,
        step=step,
        span_ns=breakdown.span_ns,
        compute_ns=breakdown.compute_ns,
        comm_ns=breakdown.comm_ns,
        exposed_ns=breakdown.exposed_ns,
        # Neither compute nor communication; what prepares a collective may run then.
        idle_ns=breakdown.span_ns - breakdown.compute_ns - breakdown.exposed_ns,
    )


NOT_COMPARABLE = "emulated: data from other ranks is made up, so losses and parameters are not comparable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """What a case is held against: the records of one unsharded rank, or a reduced case where that is too large for
    one, and of DDP at the same world size.
    """

    reference: LaunchRecord | None
    ddp: LaunchRecord | None
    reduced: Reduced | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parity:
    """How far losses differ from the reference's; ``value`` is None where that is not known, and ``note`` says why."""

    value: float | None
    note: str = ""
    of: str = ""
    tolerance: float | None = None

    def failed(self) -> Iterator[str]:
        """That they differ by too much."""
        if self.value is not None and self.tolerance is not None and not self.value <= self.tolerance:
            of = f" of {self.of}" if self.of else ""
            yield f"losses{of} differ from one unsharded rank by {self.value:.2g}, more than {self.tolerance:g}"


def prove(case: Case, ranks: Sequence[RankResult], traces: Traces, losses: Sequence[float], peers: Peers) -> Proof:
    """Hold what the ranks and their traces show against what the strategy announced, and against the peers."""
    announced, units = ranks[0].announced, units_of_all([rank.wrapped_units for rank in ranks])
    differing = next((step for step in traces.per_step if step[1] != ranks[step[0]].announced), None)
    failures = [*_failed_collectives(case, ranks, traces, differing)]
    failures += failed_units(case, ranks[0].blocks, units)
    if len(losses) < case.protocol.total_steps or any(
        len(r.step_times_s) != case.protocol.measured_steps for r in ranks
    ):
        failures.append("a rank left fewer losses or step times than steps")
    parity, identical, bits_note = _Parity(value=None, note=NOT_COMPARABLE), None, NOT_COMPARABLE
    if case.protocol.fidelity == "measured":
        parity = _parity_of(case, ranks, losses, peers)
        identical, bits_note = _compare_bits(case, losses, ranks[0].parameters_sha256, peers.ddp)
        failures += parity.failed()
        if any(r.parameters_sha256 != ranks[0].parameters_sha256 for r in ranks):
            failures.append("the ranks ended with different parameters")
    return Proof(
        wrapped_units=units,
        announced=announced,
        traced=(differing or next(iter(traces.per_step), (0, ())))[1],
        collectives_note=traces.unread and f"not checked, because {traces.unread}",
        parity_steps=case.protocol.warmup_steps,
        loss_parity=parity.value,
        parity_note=parity.note,
        parity_of=parity.of,
        parity_tolerance=parity.tolerance,
        parameters_sha256=ranks[0].parameters_sha256,
        bit_identical_to_ddp=identical,
        bits_note=bits_note,
        failures=tuple(failures),
    )


def units_of_all(units: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The units that any rank has: in a pipeline each has its own."""
    return tuple(dict.fromkeys(unit for own in units for unit in own))


def failed_units(case: Case, blocks: Sequence[str], units: Sequence[str]) -> Iterator[str]:
    """What of the model, whose ``blocks`` are named, should be in a unit, and is not."""
    if not units and case.job.strategy != REFERENCE_STRATEGY:
        yield "the model was not wrapped: it has no unit"
    elif ROWS[case.job.strategy].by_block:
        inside = [block for block in blocks if any(unit == block or unit.startswith(f"{block}.") for unit in units)]
        if bare := [block for block in blocks if block not in inside]:
            yield f"blocks outside any unit: {', '.join(bare)}"


def failed_announcement(case: Case, announced: Sequence[CollectiveCount]) -> Iterator[str]:
    """What a strategy should have announced, and has not."""
    if case.job.gpus > 1 and case.job.workload == "training" and not announced:
        yield "no collective was announced, but training on several ranks needs them"


def _failed_collectives(
    case: Case,
    ranks: Sequence[RankResult],
    traces: Traces,
    differing: tuple[int, tuple[CollectiveCount, ...]] | None,
) -> Iterator[str]:
    """What the traces do not show as it was announced; ``differing`` is a rank's step that has other collectives."""
    announced = ranks[0].announced
    if differing is not None:
        rank, found = differing
        yield f"the plan announced {counts(ranks[rank].announced)}, the trace shows {counts(found)}"
    alike = len(ranks) // case.job.pp_ranks or 1  # ranks of one stage follow each other
    firsts = [ranks[place // alike * alike] for place in range(len(ranks))]
    if any(_of_all(rank.announced) != _of_all(first.announced) for rank, first in zip(ranks, firsts)):
        yield "the ranks announced different collectives"
    yield from failed_announcement(case, announced)
    if len(traces.steps) != case.processes * case.protocol.traced_steps:
        yield f"the traces hold {len(traces.steps)} steps, {case.processes * case.protocol.traced_steps} were asked for"
    # NCCL launches no kernel for a group of one rank.
    if announced and case.job.gpus > 1 and not all(step.comm_ns for step in traces.steps):
        yield "collectives were issued, but the trace shows no communication"


def _parity_of(case: Case, ranks: Sequence[RankResult], losses: Sequence[float], peers: Peers) -> _Parity:
    """The parity of the case itself, or of the reduced one. A reference that did not end ok leaves it unknown: it says
    nothing against the case.
    """
    if (reduced := peers.reduced) is not None:
        return _reduced_parity(reduced, ranks)
    if case == case.reference():
        return _Parity(value=0.0, tolerance=parity_tolerance(case))
    if peers.reference is None or peers.reference.state != "ok":
        return _Parity(value=None, note=f"not compared, because {_missing(peers.reference)}")
    value = _difference(losses[: case.protocol.warmup_steps], peers.reference.losses)
    return _Parity(value=value, tolerance=parity_tolerance(case))


def _missing(reference: LaunchRecord | None) -> str:
    if reference is None:
        return "the case of one unsharded rank has not run"
    return f"the case of one unsharded rank ended in state {reference.state}: {reference.error or 'no error is known'}"


def _reduced_parity(reduced: Reduced, ranks: Sequence[RankResult]) -> _Parity:
    held = [rank.reduced for rank in ranks if rank.reduced is not None]
    if len(held) < len(ranks) or not held[0].reference:
        why = held[0].error if held else "the ranks left no losses of the reduced case"
        return _Parity(value=None, note=f"not compared, because {why}; {reduced.why}", of=reduced.words)
    losses = [fmean(step) for step in zip(*(rank.losses for rank in held))]
    value = _difference(losses, held[0].reference)
    return _Parity(value=value, note=reduced.why, of=reduced.words, tolerance=parity_tolerance(reduced.case))


def _difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of a step's loss."""
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, reference))


def _compare_bits(
    case: Case, losses: Sequence[float], digest: str, ddp: LaunchRecord | None
) -> tuple[bool | None, str]:
    """Whether losses and final parameters equal DDP's to the bit, and a word on it where they do not."""
    job = case.job
    if job.gpus == 1:
        return None, "one rank reduces nothing"
    if job.strategy == "ddp":
        return True, ""
    if ddp is None or ddp.state != "ok" or ddp.proof is None:
        return None, "no ddp case at this world size ended ok before it in this run"
    step = next((i for i, (mine, theirs) in enumerate(zip(losses, ddp.losses)) if mine != theirs), None)
    if step is None and digest == ddp.proof.parameters_sha256:
        return True, ""
    where = "the final parameters differ" if step is None else f"the loss of step {step} is the first to differ"
    if job.precision == "bf16" and job.tuning == "full":
        return False, f"{where}: DDP computes under autocast, which keeps norms and the residual stream in fp32"
    if job.microbatches > 1:
        return False, f"{where}: DDP sums microbatches before reducing; reducing each microbatch changes the order"
    if job.gpus > 2:
        return False, f"{where}: with more than two ranks the order of summation differs from DDP's all-reduce"
    return False, f"{where}, although the order cannot matter with two ranks: other arithmetic differs"


def _of_all(issued: Sequence[CollectiveCount]) -> list[CollectiveCount]:
    """All but messages from one rank to another, of which each rank has its own; and without the bytes of all-to-alls,
    since ranks own matrices of different sizes.
    """
    alike = (count for count in issued if count.op not in ("send", "recv"))
    return [msgspec.structs.replace(count, bytes=0) if count.op == "all_to_all" else count for count in alike]


def counts(issued: Sequence[CollectiveCount]) -> str:
    """Collectives in words."""
    return ", ".join(f"{c.count} {c.op} of {c.bytes} B" for c in issued) or "no collectives"
