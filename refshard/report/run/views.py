"""Records to tables and plain values; everything that a page, a terminal or a script shows is computed here.

Numbers stay in seconds, bytes and fractions wherever another program reads them (:func:`rows`,
:func:`as_json`, :func:`pivot`). Tables for people hold text, with "-" for what does not
exist.
"""

import math

import pandas as pd

from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence, Setting
from refshard.analysis.gpu_memory import gpu_memory_of
from refshard.analysis.proof import bit_identical, bits_note, collectives_note, parity_note, parity_of, proof_summary
from refshard.plain import plain
from refshard.quantities import (
    format_bytes,
    format_part,
    format_percent,
    format_rate,
    format_seconds,
)
from refshard.records import METRICS, CollectiveCount, GpuMemory, LaunchRecord
from refshard.report.run.columns import Row, values
from refshard.report.run.intervals import no_interval
from refshard.specs.case import REPEATING
from refshard.stats.sample import Summary

MISSING = "-"
_STEP_TIME = "step time (95 % interval)"
_RANGED = "exposed communication [traced steps]"


def rows(evidence: Evidence) -> pd.DataFrame:
    """One row per case, with the columns of :func:`as_json`; what does not exist is None or NaN."""
    return pd.DataFrame(as_json(evidence))


def as_json(evidence: Evidence) -> list[Row]:
    """One flat object per case, safe for JSON: seconds, bytes and fractions, None for what does not exist."""
    return [{**values(case), "network": case.header.environment.network or None} for case in evidence.cases]


def pivot(setting: Setting, value: str) -> pd.DataFrame:
    """One number per strategy and world size, of the cases that ended ok; NaN where there is none.

    Args:
        setting: cases that may be compared.
        value: a key of :func:`as_json`.
    """
    table = pd.DataFrame([values(case) for case in setting.cases if case.ok])
    if table.empty:
        return pd.DataFrame(index=list(setting.strategies), columns=list(setting.world_sizes), dtype=float)
    wide = table.astype({value: float}).pivot(index="strategy", columns="world_size", values=value)
    return wide.reindex(index=list(setting.strategies), columns=list(setting.world_sizes))


def format_metric(metric: str, value: float | None) -> str:
    """A metric for people.

    >>> format_metric("overlap_ratio", 0.5), format_metric("loss_parity", 0.00000012)
    ('50.0 %', '1.2e-07')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if metric == "loss_parity":
        return "0" if value == 0 else f"{value:.1e}"
    formats = {"s": format_seconds, "B": format_bytes, "fraction": format_percent}
    return formats.get(METRICS[metric].unit, format_rate)(value)


def step_time_text(summary: Summary | None, fallback: float | None = None) -> str:
    """Median and 95 % interval; the unit is written once where both ends share the median's."""
    if summary is None:
        return format_metric("step_time_s", fallback)
    median = format_seconds(summary.median)
    if not math.isfinite(summary.high):
        return f"{median} ({no_interval(summary)})"
    low, high = format_seconds(summary.low), format_seconds(summary.high)
    unit = median.rpartition(" ")[2]
    if low.endswith(f" {unit}") and high.endswith(f" {unit}"):
        low, high = low.removesuffix(f" {unit}"), high.removesuffix(f" {unit}")
    return f"{median} ({low} to {high})"


def summary_table(members: tuple[CaseResult, ...]) -> pd.DataFrame:
    """Every headline figure of each case as text, one row per case.

    Overlap efficiency, reserved memory and compile time where any case has them, loss parity where any was measured. Of
    cases on GPUs, memory is what is reserved of the device's: :func:`gpu_memory_table` has the rest.
    """
    table = pd.DataFrame([_summary_row(case) for case in members])
    dropped = [] if knows_efficiency(members) else ["overlap efficiency"]
    if all(case.compile_s is None for case in members):
        dropped.append("compile time")
    if all(case.metrics["peak_reserved_bytes"] is None for case in members):
        dropped.append("peak reserved")
    if memory_metric(members) == "peak_reserved_bytes":
        dropped.append("peak memory")
    if not any(case.fidelity == "measured" for case in members):
        dropped.append("loss parity")
    if any(case.traced_range for case in members):
        table = table.rename(columns={"exposed communication": _RANGED})
    return table.drop(columns=dropped, errors="ignore")


def memory_metric(members: tuple[CaseResult, ...]) -> str:
    """The metric that tells whether cases fit: what is reserved if all that ended ok ran on GPUs, else peak memory."""
    on_gpus = [gpu_memory_of(case) is not None for case in members if case.ok]
    return "peak_reserved_bytes" if on_gpus and all(on_gpus) else "peak_memory_bytes"


def knows_efficiency(members: tuple[CaseResult, ...]) -> bool:
    """Whether any of the cases has an overlap efficiency."""
    return any(case.metrics["overlap_efficiency"] is not None for case in members)


def _summary_row(case: CaseResult) -> Row:
    return {
        "strategy": case.strategy,
        "ranks": f"{case.spec.world_size:,}",
        "state": case.state,
        _STEP_TIME: step_time_text(sampled(case), case.metrics["step_time_s"]),
        "compile time": MISSING if case.compile_s is None else format_seconds(case.compile_s),
        "tokens/s/GPU": format_metric("tokens_per_s_gpu", case.metrics["tokens_per_s_gpu"]),
        "TFLOPS": format_metric("tflops", case.metrics["tflops"]),
        "MFU": format_metric("mfu", case.metrics["mfu"]),
        "peak memory": format_metric("peak_memory_bytes", case.metrics["peak_memory_bytes"]),
        "peak reserved": reserved_text(case),
        "exposed communication": exposed_text(case),
        "overlap ratio": overlap_text(case),
        "overlap efficiency": format_metric("overlap_efficiency", case.metrics["overlap_efficiency"]),
        "loss parity": format_metric("loss_parity", case.metrics["loss_parity"]),
    }


def reserved_text(case: CaseResult) -> str:
    """Peak reserved memory, and the device's size where a real one told it."""
    gpu = gpu_memory_of(case)
    if gpu is None:
        return format_metric("peak_reserved_bytes", case.metrics["peak_reserved_bytes"])
    return format_part(gpu.reserved_bytes, gpu.total_bytes)


def gpu_memory_table(members: tuple[CaseResult, ...]) -> pd.DataFrame:
    """Memory of the GPUs by kind as text, one row per case that says what its GPUs' memory held."""
    return pd.DataFrame([_gpu_memory_row(case, gpu) for case in members if (gpu := gpu_memory_of(case))])


def _gpu_memory_row(case: CaseResult, gpu: GpuMemory) -> Row:
    return {
        "case": case.label,
        "reserved": f"{format_part(gpu.reserved_bytes, gpu.total_bytes)} reserved",
        "active": format_bytes(gpu.active_bytes),
        "allocated": format_bytes(gpu.allocated_bytes),
        "requested": format_bytes(gpu.requested_bytes),
        "used on the device": format_part(gpu.used_bytes, gpu.total_bytes),
        "outside the allocator": format_bytes(gpu.outside_bytes),
        "retries": f"{gpu.retries:,}",
    }


def sampled(case: CaseResult) -> Summary | None:
    """The step time's samples; what is calculated has none."""
    return None if case.fidelity in REPEATING else case.step_time


def exposed_text(case: CaseResult) -> str:
    """Exposed communication, its share of the traced step and the range of the traced steps; "-" for a case that does
    not communicate.
    """
    if not case.metrics["comm_s"]:
        return MISSING
    exposed, share = format_metric("exposed_comm_s", case.metrics["exposed_comm_s"]), case.exposed_share
    return (exposed if share is None else f"{exposed} ({format_percent(share)})") + _exposed_range(case)


def overlap_text(case: CaseResult) -> str:
    """Overlap ratio and the range of the traced steps."""
    ends = (format_percent(end, 0) for end in case.traced_range.get("overlap_ratio", ()))
    return format_metric("overlap_ratio", case.metrics["overlap_ratio"]) + _range(*ends)


def _exposed_range(case: CaseResult) -> str:
    return _range(*map(format_seconds, case.traced_range.get("exposed_comm_s", ())))


def _range(low: str = "", high: str = "") -> str:
    """The least and the largest of the traced steps, on a line of their own; the unit is written once."""
    unit = high.rpartition(" ")[2]
    return "" if low == high else f"\n[{low.removesuffix(f' {unit}')} to {high}]"


def breakdown_table(setting: Setting) -> pd.DataFrame:
    """The parts of a traced step as text, with the exposed share of the step and the overlap ratio.

    On GPUs also what it costs that the host waits for the device after each step.
    """
    table = pd.DataFrame(
        [
            {
                "case": case.label,
                **{part: format_seconds(seconds) for part, seconds in parts.items()},
                "exposed communication": f"{format_seconds(parts['exposed communication'])}{_exposed_range(case)}",
                "exposed share": format_percent(case.exposed_share),
                "overlap ratio": overlap_text(case),
                "perturbation": format_metric("perturbation", case.metrics["perturbation"]),
                "synchronised / free-running": format_metric("synchronisation", case.metrics["synchronisation"]),
            }
            for case in setting.cases
            if case.ok and (parts := case.breakdown)
        ]
    )
    waited_for = any(case.metrics["synchronisation"] for case in setting.cases)
    return table if waited_for else table.drop(columns="synchronised / free-running", errors="ignore")


def losses(setting: Setting) -> pd.DataFrame:
    """Loss per step from 1, a column per case that has losses; its launches repeat the same curve."""
    curves = {
        case.label: pd.Series(launch.losses, index=range(1, len(launch.losses) + 1), dtype=float)
        for case in setting.cases
        if (launch := _with_losses(case))
    }
    table = pd.DataFrame(curves)
    table.index.name = "step"
    return table


def _with_losses(case: CaseResult) -> LaunchRecord | None:
    return next((launch for launch in case.launches if launch.state == "ok" and launch.losses), None)


def loss_table(setting: Setting) -> pd.DataFrame:
    """:func:`losses` as text, with the six digits that float32 carries."""
    table = losses(setting)
    text = table.map(lambda loss: MISSING if pd.isna(loss) else f"{loss:.6g}")
    text.insert(0, "step", [str(step) for step in table.index])
    return text


def proof_table(evidence: Evidence) -> pd.DataFrame:
    """What each case proved before its timing counted, one row per case."""
    return pd.DataFrame([_proof_row(case) for case in evidence.cases])


def _proof_row(case: CaseResult) -> Row:
    proof = next((launch.proof for launch in case.launches if launch.proof), None)
    return {
        "case": case.full_label,
        "proof": proof_summary(case),
        "units": MISSING if proof is None else str(len(proof.wrapped_units)),
        "collectives announced (per rank and step)": collectives(proof.announced) if proof else MISSING,
        "collectives traced": collectives_note(case) or (_traced(proof.announced, proof.traced) if proof else MISSING),
        "loss parity": MISSING if proof is None else _parity(case, proof.parity_steps),
        "bit-identical to DDP": _bits(case),
    }


def collectives(counts: tuple[CollectiveCount, ...]) -> str:
    """Collectives in words: ``12 all_gather (36.0 MiB)``."""
    return ", ".join(f"{c.count:,} {c.op} ({format_bytes(c.bytes)})" for c in counts) or "none"


def _traced(announced: tuple[CollectiveCount, ...], traced: tuple[CollectiveCount, ...]) -> str:
    return "the same" if sorted(announced) == sorted(traced) else collectives(traced)


def _parity(case: CaseResult, steps: int) -> str:
    parity = case.metrics["loss_parity"]
    if parity is None:
        return parity_note(case) or MISSING
    words = f"{format_metric('loss_parity', parity)} over {steps} steps"
    return f"{words}, of {of}: {parity_note(case)}" if (of := parity_of(case)) else words


def _bits(case: CaseResult) -> str:
    answer, note = bit_identical(case), bits_note(case)
    if answer is None:
        return note or MISSING
    word = "yes" if answer else "no"
    return f"{word}: {note}" if note else word


def state_table(evidence: Evidence) -> pd.DataFrame:
    """Every launch and how it ended, one row per launch; ``log`` is the tail of its output, lines joined."""
    columns = ["case", "round", "state", "duration", "error", "log"]
    found = [(case, launch) for case in evidence.cases for launch in case.launches]
    return pd.DataFrame([_state_row(case, launch) for case, launch in found], columns=columns)


def _state_row(case: CaseResult, launch: LaunchRecord) -> Row:
    return {
        "case": case.full_label,
        "round": str(launch.round + 1),
        "state": launch.state,
        "duration": format_seconds(launch.duration_s),
        "error": plain(launch.error or ""),
        "log": plain("\n".join(launch.log_tail)),
    }
