"""Predictions beside measurements, where runs hold both: cases that differ in fidelity and cluster only."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence, machine
from refshard.specs.case import Case, Fidelity
from refshard.specs.hardware import profile_of_device

PREDICTED: tuple[Fidelity, ...] = ("emulated", "dryrun", "simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """One measured case and a prediction of it."""

    measured: CaseResult
    predicted: CaseResult

    @property
    def step_time_error(self) -> float | None:
        """Relative: above 0 where the prediction is larger."""
        return self.error("step_time_s")

    @property
    def quickest_error(self) -> float | None:
        """As :attr:`step_time_error`, but of the quickest measured launch, which other work disturbed least."""
        times = [t for launch in self.measured.launches if (t := launch.metrics.get("step_time_s"))]
        mine = self.predicted.metrics.get("step_time_s")
        return mine / min(times) - 1 if mine and times else None

    def error(self, metric: str) -> float | None:
        """As :attr:`step_time_error`, of any metric; None where a side does not know it."""
        mine, theirs = self.predicted.metrics.get(metric), self.measured.metrics.get(metric)
        return mine / theirs - 1 if mine and theirs else None


def validated(evidence: Evidence) -> tuple[Validated, ...]:
    """Every pair of :func:`beside_measured` of which both ended ok."""
    return tuple(pair for pair in beside_measured(evidence) if pair.measured.ok and pair.predicted.ok)


def beside_measured(evidence: Evidence) -> tuple[Validated, ...]:
    """Every prediction of a measured case, in the order of the evidence: a dry run is one where its GPU is that of the
    machine, wherever it took place; other predictions were made on the same machine.
    """
    measured = {place: case for case in evidence.cases if case.fidelity == "measured" for place in _places(case)}
    pairs = ((measured.get(_place(case)), case) for case in evidence.cases if case.fidelity in PREDICTED)
    return tuple(Validated(measured=mine, predicted=case) for mine, case in pairs if mine is not None)


def _places(case: CaseResult) -> tuple[tuple[Case, str], ...]:
    """Of a measured case, what :func:`_place` may say of its predictions."""
    environment = case.header.environment
    gpus = {device for gpu in environment.gpus if (device := profile_of_device(gpu))}
    return tuple((case.spec, where) for where in (machine(environment), *gpus))


def _place(case: CaseResult) -> tuple[Case, str]:
    """What a prediction shares with its measurement: the spec as measured, and the machine, or of a dry run the GPU."""
    spec = case.spec.changed(fidelity="measured", cluster="", resident_ranks=1)
    if case.fidelity != "dryrun":
        return spec, machine(case.header.environment)
    return spec, profile_of_device(case.launches[0].device) or ""


def errors(pairs: Sequence[Validated], fidelity: Fidelity, metric: str) -> list[float]:
    """Absolute relative errors of ``metric``, as far as both sides know it."""
    found = [pair.error(metric) for pair in pairs if pair.predicted.fidelity == fidelity]
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


def _setting(pair: Validated) -> Case:
    return pair.predicted.spec.changed(strategy="")


def as_objects(pairs: Sequence[Validated]) -> list[dict[str, Any]]:
    """One object a prediction: seconds, bytes and fractions."""
    return [
        {
            "strategy": pair.measured.strategy,
            "gpus": pair.measured.spec.job.gpus,
            "model": pair.measured.spec.job.model,
            "fidelity": pair.predicted.fidelity,
            "cluster": pair.predicted.spec.job.cluster,
            "measured_step_time_s": pair.measured.metrics["step_time_s"],
            "predicted_step_time_s": pair.predicted.metrics["step_time_s"],
            "step_time_error": pair.step_time_error,
            "step_time_error_of_quickest_launch": pair.quickest_error,
            "measured_peak_memory_bytes": pair.measured.metrics["peak_memory_bytes"],
            "predicted_peak_memory_bytes": pair.predicted.metrics["peak_memory_bytes"],
            "peak_memory_error": pair.error("peak_memory_bytes"),
            "measured_peak_reserved_bytes": pair.measured.metrics["peak_reserved_bytes"],
            "predicted_peak_reserved_bytes": pair.predicted.metrics["peak_reserved_bytes"],
            "peak_reserved_error": pair.error("peak_reserved_bytes"),
        }
        for pair in pairs
    ]
