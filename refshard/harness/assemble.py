"""What the ranks left behind becomes one record: metrics, proof of run, or the state that the case ended in."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import msgspec

from refshard.errors import TraceError
from refshard.flops import formula
from refshard.harness.launchers.base import Launch
from refshard.harness.measure import CONVENTION, RankResult
from refshard.harness.rank import rank_file, trace_file
from refshard.plan.checkpointing import checkpointing_of
from refshard.records import (
    DERIVED,
    METRICS,
    CaseRecord,
    CollectiveCount,
    Environment,
    Proof,
    State,
    StepTrace,
    parity_tolerance,
)
from refshard.specs.case import REFERENCE_STRATEGY, CaseSpec
from refshard.specs.model import ModelSpec, load_model
from refshard.strategies.table import ROWS
from refshard.tracing.figures import Breakdown
from refshard.tracing.kineto import read_timeline
from refshard.tracing.overlap import collectives_per_step, mean_ratio, step_breakdowns

NS = 1e-9
_SOURCE = re.compile(r"/[^\s\"']*/(?=(?:site-packages|python3\.\d+|refshard)/[^\s\"']*\.py\b)")
NOT_COMPARABLE = "emulated: what the other ranks send is made up, so losses and parameters compare with nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The records that a case is held against: one unsharded rank, and DDP at the same world size."""

    reference: CaseRecord | None
    ddp: CaseRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traces:
    """What the traces of all ranks say; ``per_step`` are rank and collectives of every traced step."""

    steps: tuple[StepTrace, ...] = ()
    overlap_ratio: float | None = None
    per_step: tuple[tuple[int, tuple[CollectiveCount, ...]], ...] = ()


def assemble(blank: CaseRecord, launch: Launch, folder: Path, environment: Environment, peers: Peers) -> CaseRecord:
    """Complete ``blank``, whose state is preset to ok, with what the launch of its case left in ``folder``."""
    case = blank.case
    try:
        ranks = _read_ranks(folder, case.processes)
    except msgspec.DecodeError as damage:
        return msgspec.structs.replace(blank, state="failed", error=f"a rank left a damaged result: {damage}")
    if launch.timed_out or len(ranks) < case.processes or any(r.state != "ok" for r in ranks):
        state, error = _failure(case, launch, ranks)
        log_tail = tuple(map(without_home, launch.log_tail))
        return msgspec.structs.replace(blank, state=state, error=error, log_tail=log_tail)
    try:
        traces = _read_traces(folder, case.processes)
    except TraceError as error:
        return msgspec.structs.replace(blank, state="failed", error=str(error))
    losses, model = tuple(fmean(step) for step in zip(*(r.losses for r in ranks))), load_model(case.model)
    proof = _prove(case, ranks, traces, losses, peers)
    record = msgspec.structs.replace(
        blank,
        device=ranks[0].device,
        backend=ranks[0].backend,
        step_times_s=tuple(r.step_times_s for r in ranks),
        traced_step_times_s=tuple(r.traced_step_times_s for r in ranks),
        losses=losses,
        flops_convention=f"{CONVENTION}: {formula(CONVENTION, case.workload, case.tuning)}",
        flops_per_token=ranks[0].flops_per_token,
        recompute=recompute_words(case, model),
        steps=traces.steps,
        census=ranks[0].census,
        planned_peak_bytes=ranks[0].planned_peak_bytes,
        memory_course_bytes=ranks[0].memory_course_bytes,
        compile_s=max(r.compile_s for r in ranks) or None,
        proof=proof,
        warnings=tuple(dict.fromkeys(w for r in ranks for w in r.warnings)),
        **_peak(case, ranks[0].device, environment),
    )
    if proof.failures:
        return msgspec.structs.replace(record, state="failed", error="proof of run: " + "; ".join(proof.failures))
    return msgspec.structs.replace(record, metrics=_metrics(record, ranks, traces))


def without_home(line: str) -> str:
    """A line of a log with the paths of sources from their package on: records are shown to others, whom it tells
    nothing where somebody's environment lies.

    >>> without_home('File "/home/me/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 7, in linear')
    'File "site-packages/torch/nn/functional.py", line 7, in linear'
    """
    return _SOURCE.sub("", line)


def _read_ranks(folder: Path, processes: int) -> list[RankResult]:
    paths = (rank_file(folder, rank) for rank in range(processes))
    return [msgspec.json.decode(p.read_bytes(), type=RankResult) for p in paths if p.exists()]


def _failure(case: CaseSpec, launch: Launch, ranks: Sequence[RankResult]) -> tuple[State, str]:
    """The state of a case that did not end well, and its cause in one line."""
    if launch.out_of_memory:
        return "oom", f"{launch.error}: the kernel's out-of-memory killer chose it"
    if launch.timed_out:
        return "timeout", timeout_text(case, launch)
    unwell = [rank for rank in ranks if rank.state != "ok"]
    for rank in unwell:
        if rank.state == "oom":
            return "oom", f"rank {rank.rank}: {rank.error}"
    if launch.failed_rank is not None and launch.failed_rank not in {rank.rank for rank in ranks}:
        return "failed", launch.error or f"rank {launch.failed_rank} ended without a result"
    # The other ranks' errors are but echoes of the first.
    for rank in sorted(unwell, key=lambda rank: (rank.failed_at_s, rank.rank != launch.failed_rank)):
        return rank.state, f"rank {rank.rank}: {rank.error}"
    return "failed", launch.error or "a rank ended without a result"


def timeout_text(case: CaseSpec, launch: Launch) -> str:
    """How long a launch had that was ended, and where its ranks stood."""
    stood = f": {launch.error}" if launch.error else ""
    return f"did not end within time_limit_s = {case.time_limit_s:g}; the ranks were ended{stood}"


def _read_traces(folder: Path, processes: int) -> _Traces:
    steps: list[StepTrace] = []
    found: list[Breakdown] = []
    per_step: list[tuple[int, tuple[CollectiveCount, ...]]] = []
    for rank in range(processes):
        timeline = read_timeline(trace_file(folder, rank))
        of_rank = step_breakdowns(timeline)
        found += of_rank
        steps += [_step_trace(rank, window.step, b) for window, b in zip(timeline.windows, of_rank)]
        per_step += [
            (rank, tuple(CollectiveCount(op=op, count=count, bytes=size) for op, count, size in issued))
            for issued in collectives_per_step(timeline).values()
        ]
    return _Traces(steps=tuple(steps), overlap_ratio=mean_ratio(found), per_step=tuple(per_step))


def _prove(
    case: CaseSpec, ranks: Sequence[RankResult], traces: _Traces, losses: Sequence[float], peers: Peers
) -> Proof:
    announced = ranks[0].announced
    differing = next((step for step in traces.per_step if step[1] != ranks[step[0]].announced), None)
    failures = [*_failed_collectives(case, ranks, traces, differing)]
    failures += failed_units(case, ranks[0].wrapped_units)
    if len(losses) < case.total_steps or any(len(r.step_times_s) != case.measured_steps for r in ranks):
        failures.append("a rank left fewer losses or step times than steps")
    parity, parity_note, identical, bits_note = None, "", None, ""
    if case.fidelity == "measured":
        parity = _parity(case, losses, peers.reference)
        identical, bits_note = _compare_bits(case, losses, ranks[0].parameters_sha256, peers.ddp)
        failures += _failed_training(case, ranks, parity)
    else:
        parity_note = bits_note = NOT_COMPARABLE
    return Proof(
        wrapped_units=ranks[0].wrapped_units,
        announced=announced,
        traced=(differing or next(iter(traces.per_step), (0, ())))[1],
        parity_steps=case.warmup_steps,
        loss_parity=parity,
        parity_note=parity_note,
        parameters_sha256=ranks[0].parameters_sha256,
        bit_identical_to_ddp=identical,
        bits_note=bits_note,
        failures=tuple(failures),
    )


def failed_units(case: CaseSpec, units: Sequence[str]) -> Iterator[str]:
    """What of the model should be in a unit, and is not."""
    if not units and case.strategy != REFERENCE_STRATEGY:
        yield "the model was not wrapped: it has no unit"
    elif ROWS[case.strategy].by_block:
        blocks = [f"model.layers.{index}" for index in range(load_model(case.model).n_layers)]
        inside = [block for block in blocks if any(unit == block or unit.startswith(f"{block}.") for unit in units)]
        if bare := [block for block in blocks if block not in inside]:
            yield f"no unit is, or lies in, {', '.join(bare)}"


def failed_announcement(case: CaseSpec, announced: Sequence[CollectiveCount]) -> Iterator[str]:
    """What a strategy should have announced, and has not."""
    if case.world_size > 1 and case.workload == "training" and not announced:
        yield "no collective was announced: several ranks train together only by communicating"


def _failed_collectives(
    case: CaseSpec,
    ranks: Sequence[RankResult],
    traces: _Traces,
    differing: tuple[int, tuple[CollectiveCount, ...]] | None,
) -> Iterator[str]:
    """What the traces do not show as it was announced; ``differing`` is a rank's step that has other collectives."""
    announced = ranks[0].announced
    if differing is not None:
        rank, found = differing
        yield f"the plan announced {counts(ranks[rank].announced)}, the trace shows {counts(found)}"
    if any(_of_all(rank.announced) != _of_all(announced) for rank in ranks):
        yield "the ranks announced different collectives"
    yield from failed_announcement(case, announced)
    if len(traces.per_step) != case.processes * case.traced_steps:
        yield f"the traces hold {len(traces.per_step)} steps, {case.processes * case.traced_steps} were asked for"
    if announced and not all(step.comm_ns for step in traces.steps):
        yield "collectives were issued, but the trace shows no communication"


def _failed_training(case: CaseSpec, ranks: Sequence[RankResult], parity: float | None) -> Iterator[str]:
    """How training differs between ranks, or from that of one."""
    if any(r.parameters_sha256 != ranks[0].parameters_sha256 for r in ranks):
        yield "the ranks ended with different parameters"
    if parity is None:
        yield "no loss parity: the reference case did not end ok"
    elif not parity <= (tolerance := parity_tolerance(case)):
        yield f"losses differ from one unsharded rank by {parity:.2g}, more than {tolerance:g}"


def _parity(case: CaseSpec, losses: Sequence[float], reference: CaseRecord | None) -> float | None:
    """Largest relative difference over the proof steps; 0 for the reference itself."""
    if case == case.reference():
        return 0.0
    if reference is None or reference.state != "ok":
        return None
    steps = list(zip(losses, reference.losses))[: case.warmup_steps]
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in steps)


def _compare_bits(
    case: CaseSpec, losses: Sequence[float], digest: str, ddp: CaseRecord | None
) -> tuple[bool | None, str]:
    """Whether losses and final parameters equal DDP's to the bit, and a word on it where they do not."""
    if case.world_size == 1:
        return None, "one rank reduces nothing"
    if case.strategy == "ddp":
        return True, ""
    if ddp is None or ddp.state != "ok" or ddp.proof is None:
        return None, "no ddp case at this world size ended ok before it in this run"
    step = next((i for i, (mine, theirs) in enumerate(zip(losses, ddp.losses)) if mine != theirs), None)
    if step is None and digest == ddp.proof.parameters_sha256:
        return True, ""
    where = "the final parameters differ" if step is None else f"the loss of step {step} is the first to differ"
    if case.precision == "bf16" and case.tuning == "full":
        return False, f"{where}: DDP computes under autocast, which keeps norms and the residual stream in fp32"
    if case.microbatches > 1:
        return False, f"{where}: DDP sums the microbatches before the ranks, one that reduces each of them after"
    if case.world_size > 2:
        return False, f"{where}: with more than two ranks the order of summation differs from DDP's all-reduce"
    return False, f"{where}, although two terms have but one sum: the arithmetic elsewhere must differ"


def _of_all(issued: Sequence[CollectiveCount]) -> list[CollectiveCount]:
    """All but messages from one rank to another, of which each rank has its own."""
    return [count for count in issued if count.op not in ("send", "recv")]


def counts(issued: Sequence[CollectiveCount]) -> str:
    """Collectives in words."""
    return ", ".join(f"{c.count} {c.op} of {c.bytes} B" for c in issued) or "no collectives"


def recompute_words(case: CaseSpec, model: ModelSpec) -> str:
    """Which layers ran forward a second time. Model FLOPs, and so MFU, never count that."""
    policy = checkpointing_of(case.checkpointing, model.n_layers)
    if not policy.layers:
        return "none"
    but = " but attention and every second product" if policy.by_op else ""
    return f"forward of {len(policy.layers)} of {model.n_layers} layers{but}, not counted"


def _peak(case: CaseSpec, device: str, environment: Environment) -> dict[str, object]:
    """The peak that MFU is held against: on a CPU a measured one; an unknown device has none."""
    if device != "cpu":
        return {"peak_flops_per_s": None, "peak_source": "no fp32 peak on record for this device"}
    if case.threads_per_rank != environment.gemm_threads:
        return {"peak_flops_per_s": None, "peak_source": f"measured with {environment.gemm_threads} thread(s) only"}
    return {
        "peak_flops_per_s": environment.gemm_flops_per_s,
        "peak_source": f"measured fp32 matrix product, {environment.gemm_threads} thread(s), machine idle",
    }


def _metrics(record: CaseRecord, ranks: Sequence[RankResult], traces: _Traces) -> dict[str, float | None]:
    case = record.case
    step_time = median(max(step) for step in zip(*record.step_times_s))
    traced_time = median(max(step) for step in zip(*record.traced_step_times_s))
    tokens_per_s = case.global_batch * case.seq_len / step_time / case.world_size
    flops_per_s = tokens_per_s * (record.flops_per_token or 0)
    steps = traces.steps
    found: dict[str, float | None] = {
        "step_time_s": step_time,
        "tokens_per_s_gpu": tokens_per_s,
        "tflops": flops_per_s / 1e12,
        "mfu": flops_per_s / record.peak_flops_per_s if record.peak_flops_per_s else None,
        "peak_memory_bytes": max(peaks)
        if (peaks := [r.peak_memory_bytes for r in ranks if r.peak_memory_bytes])
        else None,
        "rss_bytes": max(r.rss_bytes for r in ranks),
        "compute_s": fmean(s.compute_ns for s in steps) * NS,
        "comm_s": fmean(s.comm_ns for s in steps) * NS,
        "exposed_comm_s": fmean(s.exposed_ns for s in steps) * NS,
        "overlap_ratio": traces.overlap_ratio,
        "idle_s": fmean(s.idle_ns for s in steps) * NS,
        "perturbation": traced_time / step_time,
        "loss_parity": record.proof.loss_parity if record.proof else None,
    }
    return {name: found.get(name) for name in METRICS.keys() - DERIVED}


def _step_trace(rank: int, step: int | None, breakdown: Breakdown) -> StepTrace:
    if step is None:
        raise TraceError(f"the trace of rank {rank} holds no ProfilerStep; call profiler.step() after every step")
    return StepTrace(
        rank=rank,
        step=step,
        span_ns=breakdown.span_ns,
        compute_ns=breakdown.compute_ns,
        comm_ns=breakdown.comm_ns,
        exposed_ns=breakdown.exposed_ns,
        idle_ns=_neither(breakdown),
    )


def _neither(step: Breakdown) -> int:
    """Nanoseconds with neither compute nor communication; what prepares a collective may run in them."""
    return step.span_ns - step.compute_ns - step.exposed_ns
