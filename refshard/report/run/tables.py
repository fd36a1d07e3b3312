"""Tables of cases: their figures, the comparison's ranking, the traced step, memory, power, proof and states."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from refshard.analysis.cases import CaseResult, ranks
from refshard.analysis.evidence import Evidence, Setting
from refshard.analysis.history import Series
from refshard.analysis.rankings import Ranking
from refshard.analysis.ratios import ratios
from refshard.plain import plain
from refshard.quantities import format_bytes, format_part, format_percent
from refshard.records import CollectiveCount, GpuUse
from refshard.report.blocks import (
    Block,
    Cell,
    Marked,
    Quantity,
    Row,
    Section,
    Table,
    Text,
    Where,
    cell_text,
    table,
    without_empty,
)  # fmt: skip
from refshard.report.run import cells
from refshard.report.run.cells import STATES, metric, ratio_text
from refshard.report.run.verdict import first_line
from refshard.specs.case import REPEATING
from refshard.specs.job import REFERENCE_STRATEGY

STEP_TIME = "step time\n(95 % interval)"


def case_table(cases: Sequence[CaseResult], *, title: str, caption: str = "", where: Where = "always") -> Table:
    """Every headline figure of each case.

    Columns that no case fills are left out. If all cases that ended ok ran on GPUs, memory is what is reserved of the
    device's: :func:`gpu_memory_table` has the rest.
    """
    calculated = all(case.fidelity in REPEATING for case in cases)
    ranged = any(case.traced_range for case in cases)
    on_gpus = any(case.ok for case in cases) and all(case.gpu_memory for case in cases if case.ok)
    rows: list[Row] = [
        {
            "strategy": case.strategy,
            "ranks": case.spec.job.gpus,
            "state": cells.state(case.state),
            "step time" if calculated else STEP_TIME: cells.step_time(case),
            "peak reserved": cells.reserved(case),
            "peak memory": None if on_gpus else metric(case, "peak_memory_bytes"),
            "compile time": None if case.compile_s is None else Quantity(case.compile_s, "s"),
            "tokens/s/GPU": metric(case, "tokens_per_s_gpu"),
            "TFLOPS": metric(case, "tflops"),
            "MFU": metric(case, "mfu"),
            "exposed communication\n[traced steps]" if ranged else "exposed communication": cells.exposed(case),
            "overlap ratio": cells.overlap(case),
            "overlap efficiency": metric(case, "overlap_efficiency"),
            "loss parity": metric(case, "loss_parity"),
        }
        for case in cases
    ]
    optional = ["peak reserved", "peak memory", "compile time", "overlap efficiency"]
    if not any(case.fidelity == "measured" for case in cases):
        optional.append("loss parity")
    rows = without_empty(rows, optional)
    if "overlap efficiency" in rows[0]:  # one column more than fits a terminal; tokens/s say the same for one model
        rows = [{**{head: row[head] for head in row if head != "TFLOPS"}, "TFLOPS": row["TFLOPS"]} for row in rows]
    return table(rows, text=["state"], title=title, caption=caption, cases=numbers(cases), where=where)


def numbers(cases: Sequence[CaseResult]) -> list[int]:
    """The cases' numbers, by which a page's filter finds them."""
    return [case.number for case in cases]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A comparison's table, its cases, and the one that the others are compared with."""

    table: Table
    cases: tuple[CaseResult, ...]
    base: CaseResult | None


def headline(ranking: Ranking, setting: Setting) -> Headline:
    """One row per strategy: the figures that decide, the best of each highlighted. The fastest comes first, then cases
    that did not end ok, then references. ``setting`` holds the comparison's cases and its references.
    """
    base = ranking.winner or next(iter(ranking.candidates), None)
    cases = sorted(
        setting.cases,
        key=lambda case: (case.strategy == REFERENCE_STRATEGY, not case.ok, case.metrics["step_time_s"] or 0.0),
    )
    compared = {ratio.case: ratio for ratio in ratios(setting, base.strategy)} if base else {}

    def best(case: CaseResult, name: str, found: Cell) -> Cell:
        return Marked(cell_text(found), "strong") if case in ranking.leaders.get(name, ()) else found

    def versus(case: CaseResult) -> Cell:
        if case is base or case not in compared:
            return "1" if case is base else None
        time = compared[case].step_time
        return cells.times(compared[case].calculated) if time is None else ratio_text(time)

    def memory(case: CaseResult) -> Cell:
        value = case.metrics[ranking.memory_metric]
        if not case.ok and value is not None:
            return f"needs {format_bytes(value)}"
        return best(case, ranking.memory_metric, metric(case, ranking.memory_metric))

    calculated = all(case.fidelity in REPEATING for case in cases)
    rows: list[Row] = [
        {
            "strategy": case.strategy if case.spec.job.gpus == ranking.world_size else case.label,
            "step time" if calculated else STEP_TIME: (
                best(case, "step_time_s", cells.step_time(case)) if case.ok else STATES[case.state]
            ),
            "vs": versus(case),
            "reserved memory" if ranking.memory_metric == "peak_reserved_bytes" else "peak memory": memory(case),
            "tokens/s/GPU": best(case, "tokens_per_s_gpu", metric(case, "tokens_per_s_gpu")),
            "MFU": best(case, "mfu", metric(case, "mfu")),
            "exposed comm.": Quantity(case.exposed_share, "share")
            if case.exposed_share is not None and case.metrics["comm_s"]
            else None,
        }
        for case in cases
    ]
    caption = f"{ranking.setting.label}, {ranks(ranking.world_size)}"
    found = table(
        without_empty(rows, ["MFU", "exposed comm."]), caption=caption, cases=numbers(cases), identity="headline"
    )
    return Headline(table=found, cases=tuple(cases), base=base)


def failures(cases: Sequence[CaseResult]) -> list[Text]:
    """A line for each state that is not ok: the cases that ended in it, and why."""
    found: dict[str, list[str]] = {}
    for case in cases:
        if not case.ok:
            error = first_line(case, 110)
            found.setdefault(STATES[case.state], []).append(f"{case.strategy} ({error})" if error else case.strategy)
    return [
        Text(text=f"{state.capitalize()}: {', '.join(failed)}.", style="bad", where="page")
        for state, failed in found.items()
    ]


def breakdown_table(cases: Sequence[CaseResult]) -> Table:
    """The parts of a traced step, with the exposed share of the step and the overlap ratio; on GPUs also the cost of
    synchronising the host and the device after each step.
    """
    traced = [case for case in cases if case.ok and case.breakdown]
    rows: list[Row] = [
        {
            "case": case.label,
            **{part: Quantity(seconds, "s") for part, seconds in (case.breakdown or {}).items()},
            "exposed communication": cells.exposed(case, share=False) or Quantity(0, "s"),
            "exposed share": Quantity(case.exposed_share, "share"),
            "overlap ratio": cells.overlap(case),
            "perturbation": metric(case, "perturbation"),
            "synchronised / free-running": metric(case, "synchronisation"),
        }
        for case in traced
    ]
    return table(
        without_empty(rows, ["synchronised / free-running"]), cases=numbers(traced), where="detail",
        title="Parts of a traced step in numbers",
        caption="Means over steps, ranks and rounds; in brackets, the smallest and the largest step",
    )  # fmt: skip


def gpu_memory_table(cases: Sequence[CaseResult]) -> Table:
    """Memory by kind, of each case with GPU records of it."""
    found = [(case, gpu) for case in cases if (gpu := case.gpu_memory)]
    rows: list[Row] = [
        {
            "case": case.label,
            "reserved": format_part(gpu.reserved_bytes, gpu.total_bytes),
            "active": Quantity(gpu.active_bytes, "B"),
            "allocated": Quantity(gpu.allocated_bytes, "B"),
            "requested": Quantity(gpu.requested_bytes, "B"),
            "used on the device": format_part(gpu.used_bytes, gpu.total_bytes),
            "outside the allocator": Quantity(gpu.outside_bytes, "B"),
            "retries": gpu.retries,
        }
        for case, gpu in found
    ]
    caption = "Memory of the fullest GPU: peaks over the measured steps; reserved memory decides whether a case fits"
    return table(rows, caption=caption, cases=numbers([case for case, _ in found]), where="page")


def power_table(cases: Sequence[CaseResult]) -> Table:
    """Power and clocks of each case with watched GPUs: means over GPUs and rounds, and the extremes."""
    found = [(case, [use for launch in case.ok_launches for use in launch.gpu_use]) for case in cases]
    watched = [(case, uses) for case, uses in found if uses]

    def over(uses: Sequence[GpuUse], field: str, of: Callable[[list[float]], float], unit: str) -> Cell:
        known = [value for use in uses if (value := getattr(use, field)) is not None]
        return f"{of(known):,.0f} {unit}" if known else None

    def throttled(uses: Sequence[GpuUse]) -> str:
        """The share of samples in which each reason held the clocks down."""
        samples = sum(use.samples for use in uses)
        reasons = sum((Counter(use.throttled) for use in uses), Counter[str]())
        return ", ".join(f"{why} {format_percent(count / samples)}" for why, count in reasons.most_common()) or "no"

    rows: list[Row] = [
        {
            "case": case.label,
            "power, mean": over(uses, "power_w", fmean, "W"),
            "power, highest": over(uses, "max_power_w", max, "W"),
            "SM clock, mean": over(uses, "sm_clock_mhz", fmean, "MHz"),
            "SM clock, lowest": over(uses, "min_sm_clock_mhz", min, "MHz"),
            "throttled": throttled(uses),
        }
        for case, uses in watched
    ]
    caption = "All GPUs of a case while its steps were timed"
    watched_cases = numbers([case for case, _ in watched])
    return table(rows, text=["throttled"], caption=caption, cases=watched_cases, where="page")


def proof_table(evidence: Evidence) -> Table:
    """What each case proved before its timing counted."""
    rows: list[Row] = []
    for case in evidence.cases:
        proof, parity = next(iter(case.proofs), None), case.proof_note("parity") or None
        traced = case.proof_note("collectives") or None
        if proof:
            same = sorted(proof.announced) == sorted(proof.traced)
            traced = traced or ("the same" if same else collectives(proof.traced))
            if case.metrics["loss_parity"] is not None:
                of = f", of {case.parity_of}: {parity}" if case.parity_of else ""
                parity = f"{cells.metric_text(case, 'loss_parity')} over {proof.parity_steps} steps{of}"
        bits = {None: "", True: "yes", False: "no"}[case.bit_identical]
        rows.append({
            "case": case.full_label,
            "proof": case.proof_summary,
            "units": None if proof is None else len(proof.wrapped_units),
            "collectives announced (per rank and step)": collectives(proof.announced) if proof else None,
            "collectives traced": traced,
            "loss parity": parity if proof else None,
            "bit-identical to DDP": ": ".join(filter(None, (bits, case.proof_note("bits")))) or None,
        })  # fmt: skip
    return table(
        rows, left=7, cases=numbers(evidence.cases),
        title="Proof of run: what each case did before its timing counted",
        caption="Units wrapped, collectives against the strategy's plan, losses against one unsharded rank",
        where="detail",
    )  # fmt: skip


def collectives(counts: tuple[CollectiveCount, ...]) -> str:
    """Collectives and their bytes: ``12 all_gather (36.0 MiB)``."""
    return ", ".join(f"{c.count:,} {c.op} ({format_bytes(c.bytes)})" for c in counts) or "none"


def states(evidence: Evidence) -> Section:
    """Every launch and how it ended, and the last lines of the logs."""
    found = [(case, launch) for case in evidence.cases for launch in case.launches]
    rows: list[Row] = [
        {
            "case": case.full_label,
            "round": launch.round + 1,
            "state": cells.state(launch.state),
            "duration": Quantity(launch.duration_s, "s"),
            "error": plain(launch.error or ""),
        }
        for case, launch in found
    ]
    logs: list[Block] = [
        Section(
            title=f"Log of {case.full_label}, round {launch.round + 1} ({launch.state})", folded=True,
            blocks=[Text(text=plain("\n".join(launch.log_tail)), style="code")],
        )
        for case, launch in found
        if launch.log_tail
    ]  # fmt: skip
    every = table(rows, text=["state", "error"], caption="Every launch and how it ended",
                  cases=numbers([case for case, _ in found]))  # fmt: skip
    return Section(title=f"Case states: {len(found)} launches", folded=True, blocks=[every, *logs])


def trend_row(series: Series, figure: Callable[[float], Cell]) -> Row:
    """A series in numbers: ``figure`` makes a cell of a value."""
    fewest, most = (of(point.launches for point in series.points) for of in (min, max))
    return {
        "case": series.case,
        "first": figure(series.points[0].value),
        "latest": figure(series.points[-1].value),
        "latest / first": f"{series.change:.3f}",
        "runs": len(series.points),
        "launches per run": str(most) if fewest == most else f"{fewest} to {most}",
        "machine": series.environment,
    }
