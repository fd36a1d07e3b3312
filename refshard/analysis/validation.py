"""Predictions compared with measurements: cases that differ in fidelity and cluster only."""

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
    def ok(self) -> bool:
        """Whether both ended ok."""
        return self.measured.ok and self.predicted.ok

    def error(self, metric: str) -> float | None:
        """The relative error of the prediction, above 0 if it is too large; None if a side does not know the metric."""
        mine, theirs = self.predicted.metrics.get(metric), self.measured.metrics.get(metric)
        return mine / theirs - 1 if mine and theirs else None

    @property
    def quickest_error(self) -> float | None:
        """The error of the step time compared with the quickest measured launch, which other work disturbed least."""
        times = [t for launch in self.measured.launches if (t := launch.metrics.get("step_time_s"))]
        mine = self.predicted.metrics.get("step_time_s")
        return mine / min(times) - 1 if mine and times else None


def validated(evidence: Evidence) -> tuple[Validated, ...]:
    """Every prediction of a measured case, in the order of the evidence.

    A dry run predicts the cases of its GPU, on any machine; other predictions were made on the same machine.
    """

    def spec_and_place(case: CaseResult) -> tuple[Case, str]:
        spec = case.spec.changed(fidelity="measured", cluster="", resident_ranks=1)
        if case.fidelity == "dryrun":
            return spec, profile_of_device(case.launches[0].device) or ""
        return spec, machine(case.header.environment)

    measured: dict[tuple[Case, str], CaseResult] = {}
    for case in evidence.cases:
        if case.fidelity == "measured":
            environment = case.header.environment
            gpus = {device for gpu in environment.gpus if (device := profile_of_device(gpu))}
            measured |= {(case.spec, place): case for place in (machine(environment), *gpus)}
    pairs = ((measured.get(spec_and_place(case)), case) for case in evidence.cases if case.fidelity in PREDICTED)
    return tuple(Validated(measured=mine, predicted=case) for mine, case in pairs if mine is not None)


def errors(pairs: Sequence[Validated], metric: str) -> list[float]:
    """Absolute relative errors of ``metric``, as far as both sides know it."""
    return [abs(error) for pair in pairs if (error := pair.error(metric)) is not None]


def scaled(pairs: Sequence[Validated]) -> tuple[float, list[float]]:
    """One factor for all predictions of step times, the median of what each would need, and the absolute relative
    errors that remain: a machine that was faster during calibration than during the measurement is faster for all.
    """
    found = [error for pair in pairs if (error := pair.error("step_time_s")) is not None]
    factor = median(1 / (1 + error) for error in found)
    return factor, [abs(factor * (1 + error) - 1) for error in found]


def in_order(pairs: Sequence[Validated]) -> tuple[int, int]:
    """How many pairs of strategies in one setting are predicted in their measured order, and how many there are.

    Only pairs with disjoint measured intervals count.
    """
    agreed = known = 0
    settings = {id(pair): pair.predicted.spec.changed(strategy="") for pair in pairs}
    for one, other in combinations(pairs, 2):
        if settings[id(one)] != settings[id(other)]:
            continue
        for faster, slower in ((one, other), (other, one)):
            fast, slow = faster.measured.step_time, slower.measured.step_time
            if fast and slow and fast.high < slow.low:
                known += 1
                agreed += (faster.predicted.metrics["step_time_s"] or 0) < (
                    slower.predicted.metrics["step_time_s"] or 0
                )
    return agreed, known


def as_objects(pairs: Sequence[Validated]) -> list[dict[str, Any]]:
    """One object for each prediction: seconds, bytes and fractions."""
    sizes = {"peak_memory": "peak_memory_bytes", "peak_reserved": "peak_reserved_bytes"}
    return [
        {
            "strategy": pair.measured.strategy,
            "gpus": pair.measured.spec.job.gpus,
            "model": pair.measured.spec.job.model,
            "fidelity": pair.predicted.fidelity,
            "cluster": pair.predicted.spec.job.cluster,
            "measured_step_time_s": pair.measured.metrics["step_time_s"],
            "predicted_step_time_s": pair.predicted.metrics["step_time_s"],
            "step_time_error": pair.error("step_time_s"),
            "step_time_error_of_quickest_launch": pair.quickest_error,
            **{
                key: value
                for name, metric in sizes.items()
                for key, value in (
                    (f"measured_{metric}", pair.measured.metrics[metric]),
                    (f"predicted_{metric}", pair.predicted.metrics[metric]),
                    (f"{name}_error", pair.error(metric)),
                )
            },
        }
        for pair in pairs
    ]
