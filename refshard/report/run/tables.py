"""Tables of cases: their figures, the comparison's ranking, the traced step, memory, power, proof and states."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from refshard.analysis.cases import CaseResult, ranks
from refshard.analysis.compared import metric_ratio
from refshard.analysis.evidence import Evidence, Setting
from refshard.analysis.gpu_memory import gpu_memory_of
from refshard.analysis.history import Series
from refshard.analysis.proof import bit_identical, bits_note, collectives_note, parity_note, parity_of, proof_summary
from refshard.analysis.rankings import Ranking, leaders
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
from refshard.specs.case import REPEATING
from refshard.specs.job import REFERENCE_STRATEGY

STEP_TIME = "step time\n(95 % interval)"


def case_table(cases: Sequence[CaseResult], *, title: str, caption: str = "", where: Where = "always") -> Table:
    """Every headline figure of each case.

    Columns that no case fills are left out. If all that ended ok ran on GPUs, memory is what is reserved of the
    device's: :func:`gpu_memory_table` has the rest.
    """
    calculated = all(case.fidelity in REPEATING for case in cases)
    ranged = any(case.traced_range for case in cases)
    rows: list[Row] = [
        {
            "strategy": case.strategy,
            "ranks": case.spec.job.gpus,
            "state": cells.state(case.state),
            "step time" if calculated else STEP_TIME: cells.step_time(case),
            "peak reserved": cells.reserved(case),
            "peak memory": metric(case, "peak_memory_bytes") if not _on_gpus(cases) else None,
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
    if "overlap efficiency" in rows[0]:  # one column more than fits a terminal; tokens/s tell the same at one model
        rows = [{**{head: row[head] for head in row if head != "TFLOPS"}, "TFLOPS": row["TFLOPS"]} for row in rows]
    return table(rows, text=["state"], title=title, caption=caption, cases=_numbers(cases), where=where)


def memory_metric(cases: Sequence[CaseResult]) -> str:
    """The metric that tells whether cases fit: reserved memory if all that ended ok ran on GPUs, else peak memory."""
    return "peak_reserved_bytes" if _on_gpus(cases) else "peak_memory_bytes"


def _on_gpus(cases: Sequence[CaseResult]) -> bool:
    known = [gpu_memory_of(case) is not None for case in cases if case.ok]
    return bool(known) and all(known)


def _numbers(cases: Sequence[CaseResult]) -> list[int]:
    return [case.number for case in cases]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A comparison's table, its cases, and the one that the others are compared with."""

    table: Table
    cases: tuple[CaseResult, ...]
    base: CaseResult | None


def headline(ranking: Ranking, setting: Setting) -> Headline:
    """One row per strategy: the figures that decide, the best of each set apart. The fastest comes first, then what did
    not end ok, then references. ``setting`` holds the comparison's cases and its references.
    """
    base = ranking.winner or next(iter(ranking.candidates), None)

    def place(case: CaseResult) -> tuple[bool, bool, float]:
        return case.strategy == REFERENCE_STRATEGY, not case.ok, case.metrics["step_time_s"] or 0.0

    cases = tuple(sorted(setting.cases, key=place))
    compared = {ratio.case: ratio for ratio in ratios(setting, base.strategy)} if base else {}
    led = leaders(Setting(label="", cases=ranking.cases, known=setting.known))

    def figure(case: CaseResult, name: str) -> Cell:
        found = cells.step_time(case) if name == "step_time_s" else metric(case, name)
        return Marked(cell_text(found), "strong") if case in led.get(name, ()) else found

    def versus(case: CaseResult) -> Cell:
        if case is base:
            return "1"
        if base is None or (ratio := compared.get(case)) is None:
            return None
        if ratio.step_time is not None:
            return ratio_text(ratio.step_time)
        plain_ratio = metric_ratio(base, case, "step_time_s")
        return None if plain_ratio is None else f"{plain_ratio:.2f}"

    def memory(case: CaseResult) -> Cell:
        value = case.metrics[ranking.memory_metric]
        return figure(case, ranking.memory_metric) if case.ok or value is None else f"needs {format_bytes(value)}"

    rows: list[Row] = [
        {
            "strategy": case.strategy if case.spec.job.gpus == ranking.world_size else case.label,
            "step time" if all(one.fidelity in REPEATING for one in cases) else STEP_TIME: (
                figure(case, "step_time_s") if case.ok else STATES[case.state]
            ),
            "vs": versus(case),
            "reserved memory" if ranking.memory_metric == "peak_reserved_bytes" else "peak memory": memory(case),
            "tokens/s/GPU": figure(case, "tokens_per_s_gpu"),
            "MFU": figure(case, "mfu"),
            "exposed comm.": None
            if (share := case.exposed_share) is None or not case.metrics["comm_s"]
            else Quantity(share, "share"),
        }
        for case in cases
    ]
    caption = f"{ranking.setting.label}, {ranks(ranking.world_size)}"
    found = table(
        without_empty(rows, ["MFU", "exposed comm."]), caption=caption, cases=_numbers(cases), identity="headline"
    )
    return Headline(table=found, cases=cases, base=base)


def failures(cases: Sequence[CaseResult]) -> list[Text]:
    """A line for each state that is not ok: the cases that ended in it, and why."""
    states = dict.fromkeys(case.state for case in cases if not case.ok)
    found = {STATES[state]: [case for case in cases if case.state == state] for state in states}
    return [
        Text(text=f"{state.capitalize()}: {', '.join(map(_with_error, failed))}.", style="bad", where="page")
        for state, failed in found.items()
    ]


def _with_error(case: CaseResult) -> str:
    error = next(iter((case.error or "").splitlines()), "").replace("out of memory: ", "")
    short = error if len(error) <= 110 else f"{error[:107]}..."
    return f"{case.strategy} ({short})" if short else case.strategy


def breakdown_table(cases: Sequence[CaseResult]) -> Table:
    """The parts of a traced step, with the exposed share of the step and the overlap ratio. On GPUs also what it costs
    that the host waits for the device after each step.
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
            "synchronised / free-running": metric(case, "synchronisation") if case.metrics["synchronisation"] else None,
        }
        for case in traced
    ]
    return table(
        without_empty(rows, ["synchronised / free-running"]), cases=_numbers(traced), where="detail",
        title="Parts of a traced step in numbers",
        caption="Means over steps, ranks and rounds; in brackets, the least and the largest step",
    )  # fmt: skip


def gpu_memory_table(cases: Sequence[CaseResult]) -> Table:
    """Memory by kind, of each case whose GPUs recorded it."""
    found = {case: gpu for case in cases if (gpu := gpu_memory_of(case))}
    rows: list[Row] = [
        {
            "case": case.label,
            "reserved": f"{format_part(gpu.reserved_bytes, gpu.total_bytes)} reserved",
            "active": Quantity(gpu.active_bytes, "B"),
            "allocated": Quantity(gpu.allocated_bytes, "B"),
            "requested": Quantity(gpu.requested_bytes, "B"),
            "used on the device": format_part(gpu.used_bytes, gpu.total_bytes),
            "outside the allocator": Quantity(gpu.outside_bytes, "B"),
            "retries": gpu.retries,
        }
        for case, gpu in found.items()
    ]
    caption = "Memory of the fullest GPU: peaks over the measured steps; reserved memory decides whether a case fits"
    return table(rows, caption=caption, cases=_numbers(list(found)), where="page")


def power_table(cases: Sequence[CaseResult]) -> Table:
    """Power and clocks of each case whose GPUs were watched: means over GPUs and rounds, and the extremes."""
    watched = {case: [use for one in case.launches if one.state == "ok" for use in one.gpu_use] for case in cases}
    watched = {case: uses for case, uses in watched.items() if uses}

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
        for case, uses in watched.items()
    ]
    caption = "All GPUs of a case while its steps were timed"
    return table(rows, text=["throttled"], caption=caption, cases=_numbers(list(watched)), where="page")


def proof_table(evidence: Evidence) -> Table:
    """What each case proved before its timing counted."""
    rows: list[Row] = []
    for case in evidence.cases:
        proof = next((launch.proof for launch in case.launches if launch.proof), None)
        bits = {None: "", True: "yes", False: "no"}[bit_identical(case)]
        row: Row = {
            "case": case.full_label,
            "proof": proof_summary(case),
            "units": None if proof is None else len(proof.wrapped_units),
            "collectives announced (per rank and step)": collectives(proof.announced) if proof else None,
            "collectives traced": collectives_note(case) or None,
            "loss parity": _parity(case, proof.parity_steps) if proof else None,
            "bit-identical to DDP": ": ".join(filter(None, (bits, bits_note(case)))) or None,
        }
        if proof and not row["collectives traced"]:
            same = sorted(proof.announced) == sorted(proof.traced)
            row = {**row, "collectives traced": "the same" if same else collectives(proof.traced)}
        rows.append(row)
    return table(
        rows, left=7, cases=_numbers(evidence.cases),
        title="Proof of run: what each case did before its timing counted",
        caption="Units wrapped, collectives against the strategy's plan, losses against one unsharded rank",
        where="detail",
    )  # fmt: skip


def collectives(counts: tuple[CollectiveCount, ...]) -> str:
    """Collectives and their bytes: ``12 all_gather (36.0 MiB)``."""
    return ", ".join(f"{c.count:,} {c.op} ({format_bytes(c.bytes)})" for c in counts) or "none"


def _parity(case: CaseResult, steps: int) -> Cell:
    if case.metrics["loss_parity"] is None:
        return parity_note(case) or None
    text = f"{cells.metric_text(case, 'loss_parity')} over {steps} steps"
    return f"{text}, of {of}: {parity_note(case)}" if (of := parity_of(case)) else text


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

    def blocks() -> Iterator[Block]:
        yield table(rows, text=["state", "error"], caption="Every launch and how it ended",
                    cases=[case.number for case, _ in found])  # fmt: skip
        for case, launch in found:
            if log := plain("\n".join(launch.log_tail)):
                name = f"Log of {case.full_label}, round {launch.round + 1} ({launch.state})"
                yield Section(title=name, folded=True, blocks=[Text(text=log, style="code")])

    return Section(title=f"Case states: {len(found)} launches", folded=True, blocks=list(blocks()))


def moved(series: Series) -> float:
    """The latest value over the first."""
    return series.points[-1].value / series.points[0].value


def trend_row(series: Series, figure: Callable[[float], Cell]) -> Row:
    """A series in numbers: ``figure`` makes a cell of a value."""
    fewest, most = (of(point.launches for point in series.points) for of in (min, max))
    return {
        "case": series.case,
        "first": figure(series.points[0].value),
        "latest": figure(series.points[-1].value),
        "latest / first": f"{moved(series):.3f}",
        "runs": len(series.points),
        "launches per run": str(most) if fewest == most else f"{fewest} to {most}",
        "machine": series.environment,
    }
