"""Predictions beside measurements, where a run holds both: cases that differ in fidelity and cluster only."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import msgspec
from tabulate import tabulate

from refshard.quantities import format_bytes, format_percent, format_seconds
from refshard.report.cases import Case
from refshard.report.evidence import Evidence, machine
from refshard.specs.case import CaseSpec, Fidelity, spelled

PREDICTED: tuple[Fidelity, ...] = ("emulated", "dryrun", "simulated")
_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """One measured case and a prediction of it."""

    measured: Case
    predicted: Case

    @property
    def step_time_error(self) -> float | None:
        """Relative: above 0 where the prediction is larger."""
        return self._error("step_time_s")

    @property
    def memory_error(self) -> float | None:
        """As :attr:`step_time_error`, of the peak memory."""
        return self._error("peak_memory_bytes")

    @property
    def quickest_error(self) -> float | None:
        """As :attr:`step_time_error`, but of the quickest measured launch, which other work disturbed least."""
        times = [t for launch in self.measured.launches if (t := launch.metrics.get("step_time_s"))]
        mine = self.predicted.metrics.get("step_time_s")
        return mine / min(times) - 1 if mine and times else None

    def _error(self, metric: str) -> float | None:
        mine, theirs = self.predicted.metrics.get(metric), self.measured.metrics.get(metric)
        return mine / theirs - 1 if mine and theirs else None


def validated(evidence: Evidence) -> tuple[Validated, ...]:
    """Every prediction of a measured case that was made on the same machine, in the order of the evidence."""
    found = [case for case in evidence.cases if case.ok]
    measured = {_place(case): case for case in found if case.fidelity == "measured"}
    pairs = ((measured.get(_place(case)), case) for case in found if case.fidelity in PREDICTED)
    return tuple(Validated(measured=mine, predicted=case) for mine, case in pairs if mine is not None)


def _place(case: Case) -> tuple[CaseSpec, str]:
    """What a prediction and its measurement share: the spec as measured, and the machine."""
    spec = msgspec.structs.replace(case.spec, fidelity="measured", cluster="", resident_ranks=1)
    return spec, machine(case.header.environment)


def errors(pairs: Sequence[Validated], fidelity: Fidelity, metric: str) -> list[float]:
    """Absolute relative errors of ``"step_time_s"`` or ``"peak_memory_bytes"``, as far as both sides know it."""
    of = [pair for pair in pairs if pair.predicted.fidelity == fidelity]
    found = [pair.step_time_error if metric == "step_time_s" else pair.memory_error for pair in of]
    return [abs(error) for error in found if error is not None]


def scaled(pairs: Sequence[Validated], fidelity: Fidelity) -> tuple[float, list[float]]:
    """One factor on all predictions of step times, the median of what each would need, and the absolute relative errors
    that it leaves: a machine that was faster when it was calibrated than when it was measured is faster for all.
    """
    found = [p.step_time_error for p in pairs if p.predicted.fidelity == fidelity and p.step_time_error is not None]
    factor = median(1 / (1 + error) for error in found)
    return factor, [abs(factor * (1 + error) - 1) for error in found]


def in_order(pairs: Sequence[Validated], fidelity: Fidelity) -> tuple[int, int]:
    """Of the pairs of strategies in one setting whose measured intervals do not meet, how many are predicted in their
    order, and how many there are.
    """
    agreed = told = 0
    of = [pair for pair in pairs if pair.predicted.fidelity == fidelity]
    for one, other in combinations(of, 2):
        if _setting(one) != _setting(other) or one.measured.step_time is None or other.measured.step_time is None:
            continue
        if one.measured.step_time.high < other.measured.step_time.low:
            faster, slower = one, other
        elif other.measured.step_time.high < one.measured.step_time.low:
            faster, slower = other, one
        else:
            continue
        told += 1
        agreed += (faster.predicted.metrics["step_time_s"] or 0) < (slower.predicted.metrics["step_time_s"] or 0)
    return agreed, told


def _setting(pair: Validated) -> CaseSpec:
    return msgspec.structs.replace(pair.predicted.spec, strategy="")


def as_objects(pairs: Sequence[Validated]) -> list[dict[str, Any]]:
    """One object a prediction: seconds, bytes and fractions."""
    return [
        {
            "strategy": pair.measured.strategy,
            "world_size": pair.measured.spec.world_size,
            "model": pair.measured.spec.model,
            "fidelity": pair.predicted.fidelity,
            "cluster": pair.predicted.spec.cluster,
            "measured_step_time_s": pair.measured.metrics["step_time_s"],
            "predicted_step_time_s": pair.predicted.metrics["step_time_s"],
            "step_time_error": pair.step_time_error,
            "step_time_error_of_quickest_launch": pair.quickest_error,
            "measured_peak_memory_bytes": pair.measured.metrics["peak_memory_bytes"],
            "predicted_peak_memory_bytes": pair.predicted.metrics["peak_memory_bytes"],
            "peak_memory_error": pair.memory_error,
        }
        for pair in pairs
    ]


def terminal_validation(pairs: Sequence[Validated]) -> str:
    """A row a prediction, and what they come to by fidelity."""
    rows = [
        {
            "case": pair.measured.label,
            "model": pair.measured.spec.model,
            "predicted": spelled(pair.predicted.fidelity),
            "on": pair.predicted.spec.cluster,
            "step time measured": format_seconds(pair.measured.metrics["step_time_s"]),
            "step time predicted": format_seconds(pair.predicted.metrics["step_time_s"]),
            "error": _signed(pair.step_time_error),
            "peak memory measured": format_bytes(pair.measured.metrics["peak_memory_bytes"]),
            "peak memory predicted": format_bytes(pair.predicted.metrics["peak_memory_bytes"]),
            "of it": _signed(pair.memory_error),
        }
        for pair in pairs
    ]
    headers = {key: "\n".join(textwrap.wrap(key, 10)) for key in rows[0]}
    table = tabulate(rows, headers=headers, disable_numparse=True, colalign=["left"] * 4 + ["right"] * 6)
    told = [textwrap.fill(f"* {sentence}", _WIDTH, subsequent_indent="  ") for sentence in findings(pairs)]
    return "\n".join([table, *told])


def findings(pairs: Sequence[Validated]) -> list[str]:
    """What the predictions come to, a sentence for each fidelity."""
    told = []
    for fidelity in PREDICTED:
        times, memory = (errors(pairs, fidelity, metric) for metric in ("step_time_s", "peak_memory_bytes"))
        if not times:
            continue
        agreed, all_ = in_order(pairs, fidelity)
        alone = all(len(pair.measured.launches) == 1 for pair in pairs)
        quickest = [abs(p.quickest_error or 0) for p in pairs if p.predicted.fidelity == fidelity]
        least = "" if alone else f" (of each case's quickest launch {format_percent(median(quickest))})"
        factor, left = scaled(pairs, fidelity)
        common = (
            f"; one factor on all, {factor:.2f}, leaves {format_percent(median(left))}, at most "
            f"{format_percent(max(left))}"
        )
        sizes = f"; of peak memory at most {format_percent(max(memory))}" if memory else ""
        ordered = f"; {agreed} of {all_} pairs that measurement tells apart are in its order" if all_ else ""
        told.append(
            f"{spelled(fidelity).capitalize()}: median error of the step time {format_percent(median(times))}{least}, "
            f"at most {format_percent(max(times))}{common if len(times) > 2 else ''}{ordered}{sizes}."
        )
    return told


def _signed(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f} %"
