"""What the ranks left becomes one record: metrics and proof of run, or the state that the case ended in.

The proof is that a launch did what its case claims: units, collectives against the strategy's plan, losses, parameters.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from refshard.analysis.figures import Breakdown
from refshard.analysis.kineto import read_timeline
from refshard.analysis.overlap import collectives_per_step, mean_ratio, step_breakdowns
from refshard.errors import TraceError
from refshard.flops import CONVENTION, FORMULAS
from refshard.measure.flight import waited_for
from refshard.measure.launchers.base import LaunchOutcome
from refshard.measure.load import load_of
from refshard.measure.rank import RankResult, rank_file, trace_file
from refshard.measure.reduced import Reduced
from refshard.outside_memory import EXPANDABLE_SEGMENTS
from refshard.records import (
    DERIVED,
    METRICS,
    CollectiveCount,
    Environment,
    GpuMemory,
    GpuUse,
    LaunchRecord,
    Proof,
    State,
    StepTrace,
    parity_tolerance,
)
from refshard.specs.case import Case
from refshard.specs.hardware import load_hardware, profile_of_device
from refshard.specs.job import REFERENCE_STRATEGY
from refshard.specs.model import is_factory
from refshard.strategies.table import ROWS

NS = 1e-9
NOT_COMPARABLE = "emulated: data from other ranks is made up, so losses and parameters are not comparable"
_LISTED_RANKS = 8
_SOURCE = re.compile(r"/[^\s\"']*/(?=(?:site-packages|python3\.\d+|refshard)/[^\s\"']*\.(?:py|so)\b)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """The traces of all ranks; ``per_step`` holds rank and collectives of every traced step.

    ``unread`` says why a rank's collectives are missing there.
    """

    steps: tuple[StepTrace, ...] = ()
    overlap_ratio: float | None = None
    per_step: tuple[tuple[int, tuple[CollectiveCount, ...]], ...] = ()
    unread: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """What a case is compared with: the record of one unsharded rank, or a reduced case if one rank is too small, and
    the record of DDP at the same world size.
    """

    reference: LaunchRecord | None
    ddp: LaunchRecord | None
    reduced: Reduced | None = None


def assemble(
    blank: LaunchRecord, launch: LaunchOutcome, folder: Path, environment: Environment, peers: Peers
) -> LaunchRecord:
    """Complete ``blank``, which ended ok, with what the launch of its case left in ``folder``."""
    case = blank.case
    try:
        paths = (rank_file(folder, rank) for rank in range(case.processes))
        ranks = [msgspec.json.decode(path.read_bytes(), type=RankResult) for path in paths if path.exists()]
    except msgspec.DecodeError as damage:
        return msgspec.structs.replace(blank, state="failed", error=f"a rank left a damaged result: {damage}")
    if launch.timed_out or len(ranks) < case.processes or any(r.state != "ok" for r in ranks):
        state, error = failure_of(case, launch, ranks, folder)
        log_tail = tuple(map(without_home, launch.log_tail))
        return msgspec.structs.replace(blank, state=state, error=error, log_tail=log_tail)
    try:
        traces = read_traces(folder, case.processes)
    except TraceError as error:
        return msgspec.structs.replace(blank, state="failed", error=str(error))
    record = _with_samples(blank, ranks, traces, environment)
    proof = prove(case, ranks, traces, record.losses, peers)
    record = msgspec.structs.replace(record, proof=proof)
    if proof.failures:
        return msgspec.structs.replace(record, state="failed", error="proof of run: " + "; ".join(proof.failures))
    return msgspec.structs.replace(record, metrics=metrics_of(record, ranks, traces))


def _with_samples(
    blank: LaunchRecord, ranks: list[RankResult], traces: Traces, environment: Environment
) -> LaunchRecord:
    """What the ranks measured, and what it is compared with."""
    case, first = blank.case, ranks[0]
    gpu_use = of_all_hosts([r.gpu_use for r in ranks])
    gpu_memory = tuple(r.gpu_memory for r in ranks if r.gpu_memory)
    warnings = [*(w for r in ranks for w in r.warnings), *throttle_warnings(gpu_use), *retry_warnings(gpu_memory)]
    return msgspec.structs.replace(
        blank,
        device=first.device,
        backend=first.backend,
        step_times_s=tuple(r.step_times_s for r in ranks),
        traced_step_times_s=tuple(r.traced_step_times_s for r in ranks),
        losses=tuple(fmean(step) for step in zip(*(r.losses for r in ranks))),
        flops_convention=flops_text(case),
        flops_per_token=first.flops_per_token,
        recompute=recompute_text(case, len(first.blocks)),
        steps=traces.steps,
        census=first.census,
        memory_course_bytes=first.memory_course_bytes,
        compile_s=max(r.compile_s for r in ranks) or None,
        load=load_of([r.load for r in ranks]),
        gpu_use=gpu_use,
        gpu_memory=gpu_memory,
        warnings=tuple(dict.fromkeys(warnings)),
        **peak_of(case, first.device, environment),
    )


def failure_of(case: Case, launch: LaunchOutcome, ranks: Sequence[RankResult], folder: Path) -> tuple[State, str]:
    """The state of a case that did not end well, and its cause in one line; ``folder`` holds what the ranks left."""
    if launch.out_of_memory:
        return "oom", f"{launch.error}: killed by the kernel's OOM killer"
    if launch.timed_out:
        waiting = waited_for(folder)
        return "timeout", timeout_text(case, launch) + (f"; {waiting}" if waiting else "")
    unwell = [rank for rank in ranks if rank.state != "ok"]
    for rank in unwell:
        if rank.state == "oom":
            return "oom", f"rank {rank.rank}: {rank.error}"
    if launch.failed_rank is not None and launch.failed_rank not in {rank.rank for rank in ranks}:
        return "failed", launch.error or f"rank {launch.failed_rank} ended without a result"
    # The first error caused the others.
    for rank in sorted(unwell, key=lambda rank: (rank.failed_at_s, rank.rank != launch.failed_rank)):
        return rank.state, f"rank {rank.rank}: {rank.error}"
    return "failed", launch.error or "a rank ended without a result"


def timeout_text(case: Case, launch: LaunchOutcome) -> str:
    """The time limit that a launch reached, and where its ranks stood."""
    stood = f": {launch.error}" if launch.error else ""
    return f"did not finish within time_limit_s = {case.protocol.time_limit_s:g}; the ranks were killed{stood}"


def without_home(line: str) -> str:
    """Strip home and site-packages prefixes from paths in a line of a log; records are shared.

    >>> without_home('File "/home/me/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 7, in linear')
    'File "site-packages/torch/nn/functional.py", line 7, in linear'
    >>> without_home("Failed to load /home/me/venv/lib/python3.11/site-packages/torchao/_C.abi3.so: a reason")
    'Failed to load site-packages/torchao/_C.abi3.so: a reason'
    """
    return _SOURCE.sub("", line)


def metrics_of(record: LaunchRecord, ranks: Sequence[RankResult], traces: Traces) -> dict[str, float | None]:
    """Every metric but derived ones; None if it does not exist."""
    step_time, traced_time = (
        median(max(step) for step in zip(*times)) for times in (record.step_times_s, record.traced_step_times_s)
    )
    peaks = [rank.peak_memory_bytes for rank in ranks if rank.peak_memory_bytes]
    gpus = record.gpu_memory
    return complete(
        {
            **rates(record, step_time),
            "peak_memory_bytes": max(peaks, default=None),
            "peak_active_bytes": max((gpu.active_bytes for gpu in gpus), default=None),
            "peak_reserved_bytes": max((gpu.reserved_bytes for gpu in gpus), default=None),
            "rss_bytes": max(rank.rss_bytes for rank in ranks),
            **traced_parts(traces.steps),
            "overlap_ratio": traces.overlap_ratio,
            "perturbation": traced_time / step_time,
            "synchronisation": step_time / max(free)
            if (free := [r.free_step_s for r in ranks if r.free_step_s])
            else None,
            "loss_parity": record.proof.loss_parity if record.proof else None,
        }
    )


def rates(record: LaunchRecord, step_time_s: float) -> dict[str, float | None]:
    """The step time, and what a rank does in it: tokens, model FLOPs, and MFU."""
    case = record.case
    tokens_per_s = case.job.global_batch * case.job.seq_len / step_time_s / case.job.gpus
    flops_per_s = None if record.flops_per_token is None else tokens_per_s * record.flops_per_token
    peak = record.peak_flops_per_s
    return {
        "step_time_s": step_time_s,
        "tokens_per_s_gpu": tokens_per_s,
        "tflops": None if flops_per_s is None else flops_per_s / 1e12,
        "mfu": flops_per_s / peak if flops_per_s is not None and peak else None,
    }


def traced_parts(steps: Sequence[StepTrace]) -> dict[str, float | None]:
    """Parts of traced steps, s: means over steps and ranks."""
    return {
        "compute_s": fmean(step.compute_ns for step in steps) * NS,
        "comm_s": fmean(step.comm_ns for step in steps) * NS,
        "exposed_comm_s": fmean(step.exposed_ns for step in steps) * NS,
        "idle_s": fmean(step.idle_ns for step in steps) * NS,
    }


def complete(found: dict[str, float | None]) -> dict[str, float | None]:
    """A key for every metric that a record has."""
    return {name: found.get(name) for name in METRICS.keys() - DERIVED}


def flops_text(case: Case) -> str:
    """The FLOPs convention, by name and formula; for a factory's module, what is counted."""
    if is_factory(case.job.model):
        return "matrix products, attention and convolutions, counted by torch"
    frozen = ", less the backward of frozen parts" if case.job.frozen else ""
    tunes = case.job.workload == "training" and case.job.tuning != "full"
    return f"{CONVENTION}: {FORMULAS['tuning' if tunes else case.job.workload]}{frozen}"


def recompute_text(case: Case, n_layers: int) -> str:
    """Which layers ran forward a second time. Model FLOPs, and so MFU, never count that."""
    policy = case.job.checkpointed(n_layers)
    if not policy.layers:
        return "none"
    but = " except attention and every other matmul" if policy.by_op else ""
    return f"forward of {len(policy.layers)} of {n_layers} layers{but}, not counted"


def peak_of(case: Case, device: str, environment: Environment) -> dict[str, object]:
    """The peak for MFU: a CPU's is measured, a GPU's is in its profile; an unknown GPU has none."""
    if device != "cpu":
        peak, source = _gpu_peak(case, device, environment)
    elif case.protocol.threads_per_rank != environment.gemm_threads:
        peak, source = None, f"measured with {environment.gemm_threads} thread(s) only"
    else:
        peak = environment.gemm_flops_per_s
        source = f"measured fp32 matrix product, {environment.gemm_threads} thread(s), machine idle"
    return {"peak_flops_per_s": peak, "peak_source": source}


def _gpu_peak(case: Case, device: str, environment: Environment) -> tuple[float | None, str]:
    """The dense peak of the case's precision, and its source: fp32 products are TF32 if torch may round so."""
    if (name := profile_of_device(device)) is None:
        return None, (
            f"no profile names '{device}': add it to also_named in the file of profiles/hardware that has its peaks, "
            f'or add a file with device_name = "{device}"'
        )
    hardware, file = load_hardware(name), f"profiles/hardware/{name}.toml"
    if case.job.precision == "fp32" and environment.tf32:
        if not hardware.tf32_peak:
            return None, f"TF32 is allowed, and {file} has no tf32_peak; add it with its source, or forbid TF32"
        return hardware.tf32_peak, f"TF32 (allowed for fp32 products), dense, {file}: {hardware.sources['tf32_peak']}"
    if case.job.precision not in hardware.matmul:
        return None, f"{file} has no [matmul.{case.job.precision}]; add it with its source"
    return hardware.matmul[
        case.job.precision
    ].peak, f"{case.job.precision}, dense, {file}: {hardware.sources['matmul']}"


def of_all_hosts(ranks: Sequence[Sequence[GpuUse]]) -> tuple[GpuUse, ...]:
    """What the first rank of each host saw; ``ranks`` are in order, and other ranks saw nothing."""
    watching = [uses for uses in ranks if uses]
    return tuple(msgspec.structs.replace(use, host=host) for host, uses in enumerate(watching) for use in uses)


def throttle_warnings(uses: Sequence[GpuUse]) -> tuple[str, ...]:
    """Which GPUs were held below their clocks, why, and how often."""
    several = any(use.host for use in uses)
    return tuple(
        f"GPU {use.gpu}{f' of host {use.host}' if several else ''} was throttled ({reason}) during the measured steps: "
        f"in {count} of {use.samples} sample{'' if use.samples == 1 else 's'}"
        for use in uses
        for reason, count in use.throttled.items()
    )


def retry_warnings(ranks: Sequence[GpuMemory]) -> tuple[str, ...]:
    """Number of retried allocations by rank; empty if there were none."""
    retried = {rank: memory.retries for rank, memory in enumerate(ranks) if memory.retries}
    if not retried:
        return ()
    total = sum(retried.values())
    times = "time" if total == 1 else "times"
    listed = [f"{count} on rank {rank}" for rank, count in list(retried.items())[:_LISTED_RANKS]]
    if len(retried) > _LISTED_RANKS:
        listed.append(f"the others on {len(retried) - _LISTED_RANKS} more")
    return (
        f"GPU memory ran short {total} {times} during the measured steps ({', '.join(listed)}): "
        "the allocator then waits for the device, frees its cache and retries cudaMalloc, so steps stall; use less "
        f"memory, or set {EXPANDABLE_SEGMENTS}",
    )


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


def prove(case: Case, ranks: Sequence[RankResult], traces: Traces, losses: Sequence[float], peers: Peers) -> Proof:
    """Compare the ranks' results and traces with what the strategy announced, and with the peers."""
    announced, units = ranks[0].announced, units_of_all([rank.wrapped_units for rank in ranks])
    differing = next((step for step in traces.per_step if step[1] != ranks[step[0]].announced), None)
    failures = [*_failed_collectives(case, ranks, traces, differing)]
    failures += failed_units(case, ranks[0].blocks, units)
    if len(losses) < case.protocol.total_steps or any(
        len(r.step_times_s) != case.protocol.measured_steps for r in ranks
    ):
        failures.append("a rank left fewer losses or step times than steps")
    parity: dict[str, Any] = {"loss_parity": None, "parity_note": NOT_COMPARABLE}
    identical, bits_note = None, NOT_COMPARABLE
    if case.protocol.fidelity == "measured":
        parity = _parity_of(case, ranks, losses, peers)
        identical, bits_note = _compare_bits(case, losses, ranks[0].parameters_sha256, peers.ddp)
        value, tolerance = parity["loss_parity"], parity.get("parity_tolerance")
        if value is not None and not value <= tolerance:
            of = f" of {parity['parity_of']}" if "parity_of" in parity else ""
            failures.append(f"losses{of} differ from one unsharded rank by {value:.2g}, more than {tolerance:g}")
        if any(r.parameters_sha256 != ranks[0].parameters_sha256 for r in ranks):
            failures.append("the ranks ended with different parameters")
    return Proof(
        wrapped_units=units,
        announced=announced,
        traced=(differing or next(iter(traces.per_step), (0, ())))[1],
        collectives_note=traces.unread and f"not checked, because {traces.unread}",
        parity_steps=case.protocol.warmup_steps,
        parameters_sha256=ranks[0].parameters_sha256,
        bit_identical_to_ddp=identical,
        bits_note=bits_note,
        failures=tuple(failures),
        **parity,
    )


def units_of_all(units: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The units of all ranks: in a pipeline each has its own."""
    return tuple(dict.fromkeys(unit for own in units for unit in own))


def failed_units(case: Case, blocks: Sequence[str], units: Sequence[str]) -> Iterator[str]:
    """Blocks of the model that should be in a unit, and are not."""
    if not units and case.job.strategy != REFERENCE_STRATEGY:
        yield "the model was not wrapped: it has no unit"
    elif ROWS[case.job.strategy].by_block:
        inside = [block for block in blocks if any(unit == block or unit.startswith(f"{block}.") for unit in units)]
        if bare := [block for block in blocks if block not in inside]:
            yield f"blocks outside any unit: {', '.join(bare)}"


def failed_announcement(case: Case, announced: Sequence[CollectiveCount]) -> Iterator[str]:
    """Collectives that a strategy should have announced, and has not."""
    if case.job.gpus > 1 and case.job.workload == "training" and not announced:
        yield "no collective was announced, but training on several ranks needs them"


def _failed_collectives(
    case: Case,
    ranks: Sequence[RankResult],
    traces: Traces,
    differing: tuple[int, tuple[CollectiveCount, ...]] | None,
) -> Iterator[str]:
    """How the traces differ from what was announced; ``differing`` is a rank's step with other collectives."""
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


def _parity_of(case: Case, ranks: Sequence[RankResult], losses: Sequence[float], peers: Peers) -> dict[str, Any]:
    """Fields of the proof: the largest relative difference of a step's loss from the reference's, of the case itself or
    of the reduced one. Without a reference it is unknown, and fails no case.
    """

    def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
        return max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, reference))

    def unknown(why: str) -> dict[str, Any]:
        return {"loss_parity": None, "parity_note": f"not compared, because {why}"}

    if (reduced := peers.reduced) is not None:
        held = [rank.reduced for rank in ranks if rank.reduced is not None]
        if len(held) < len(ranks) or not held[0].reference:
            why = held[0].error if held else "the ranks left no losses of the reduced case"
            return unknown(f"{why}; {reduced.why}") | {"parity_of": reduced.text}
        of_steps = [fmean(step) for step in zip(*(rank.losses for rank in held))]
        return {
            "loss_parity": difference(of_steps, held[0].reference),
            "parity_note": reduced.why,
            "parity_of": reduced.text,
            "parity_tolerance": parity_tolerance(reduced.case),
        }
    if case == case.reference():
        return {"loss_parity": 0.0, "parity_tolerance": parity_tolerance(case)}
    alone = "the case of one unsharded rank"
    if peers.reference is None:
        return unknown(f"{alone} has not run")
    if peers.reference.state != "ok":
        return unknown(
            f"{alone} ended in state {peers.reference.state}: {peers.reference.error or 'no error is known'}"
        )
    value = difference(losses[: case.protocol.warmup_steps], peers.reference.losses)
    return {"loss_parity": value, "parity_tolerance": parity_tolerance(case)}


def _compare_bits(
    case: Case, losses: Sequence[float], digest: str, ddp: LaunchRecord | None
) -> tuple[bool | None, str]:
    """Whether losses and final parameters equal DDP's to the bit, and if not, why."""
    if case.job.gpus == 1:
        return None, "one rank reduces nothing"
    if case.job.strategy == "ddp":
        return True, ""
    if ddp is None or ddp.state != "ok" or ddp.proof is None:
        return None, "no ddp case at this world size ended ok before it in this run"
    step = next((i for i, (mine, theirs) in enumerate(zip(losses, ddp.losses)) if mine != theirs), None)
    if step is None and digest == ddp.proof.parameters_sha256:
        return True, ""
    where = "the final parameters differ" if step is None else f"the loss of step {step} is the first to differ"
    if case.job.precision == "bf16" and case.job.tuning == "full":
        return False, f"{where}: DDP computes under autocast, which keeps norms and the residual stream in fp32"
    if case.job.microbatches > 1:
        return False, f"{where}: DDP sums microbatches before reducing; reducing each microbatch changes the order"
    if case.job.gpus > 2:
        return False, f"{where}: with more than two ranks the order of summation differs from DDP's all-reduce"
    return False, f"{where}, although the order cannot matter with two ranks: other arithmetic differs"


def _of_all(issued: Sequence[CollectiveCount]) -> list[CollectiveCount]:
    """The collectives that all ranks should share: no point-to-point messages, which differ by rank, and no bytes of
    all-to-alls, since ranks own matrices of different sizes.
    """
    alike = (count for count in issued if count.op not in ("send", "recv"))
    return [msgspec.structs.replace(count, bytes=0) if count.op == "all_to_all" else count for count in alike]


def counts(issued: Sequence[CollectiveCount]) -> str:
    """Collectives as text."""
    return ", ".join(f"{c.count} {c.op} of {c.bytes} B" for c in issued) or "no collectives"
