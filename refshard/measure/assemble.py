"""What the ranks left behind becomes one record: metrics and proof of run, or the state that the case ended in."""

from pathlib import Path
from statistics import fmean

import msgspec

from refshard.errors import TraceError
from refshard.measure.failure import failure_of, without_home
from refshard.measure.flight import read_flights
from refshard.measure.gpu_memory import retry_warnings
from refshard.measure.gpu_use import of_all_hosts, throttle_warnings
from refshard.measure.launchers.base import LaunchOutcome
from refshard.measure.load import load_of
from refshard.measure.metrics import flops_words, metrics_of, peak_of, recompute_words
from refshard.measure.proof import Peers, prove
from refshard.measure.rank import rank_file
from refshard.measure.timing import RankResult
from refshard.measure.traced import Traces, read_traces
from refshard.records import Environment, LaunchRecord


def assemble(
    blank: LaunchRecord, launch: LaunchOutcome, folder: Path, environment: Environment, peers: Peers
) -> LaunchRecord:
    """Complete ``blank``, whose state is preset to ok, with what the launch of its case left in ``folder``."""
    case = blank.case
    try:
        ranks = _read_ranks(folder, case.processes)
    except msgspec.DecodeError as damage:
        return msgspec.structs.replace(blank, state="failed", error=f"a rank left a damaged result: {damage}")
    if launch.timed_out or len(ranks) < case.processes or any(r.state != "ok" for r in ranks):
        state, error = failure_of(case, launch, ranks, read_flights(folder))
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


def _read_ranks(folder: Path, processes: int) -> list[RankResult]:
    paths = (rank_file(folder, rank) for rank in range(processes))
    return [msgspec.json.decode(p.read_bytes(), type=RankResult) for p in paths if p.exists()]


def _with_samples(
    blank: LaunchRecord, ranks: list[RankResult], traces: Traces, environment: Environment
) -> LaunchRecord:
    """What the ranks measured, as they left it, and what it is held against."""
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
        flops_convention=flops_words(case),
        flops_per_token=first.flops_per_token,
        recompute=recompute_words(case, len(first.blocks)),
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
