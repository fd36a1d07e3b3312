"""The launches of a case joined into one.

A run holds one record per launch. Readers think in cases: one strategy at one world size, over all its rounds.
:mod:`refshard.analysis.evidence` sorts them into settings that may be compared.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from refshard.analysis.efficiency import lower_bound, overlap_efficiency
from refshard.analysis.sample import Launches, Summary, step_samples, summarize
from refshard.errors import SpecError
from refshard.plain import plain
from refshard.records import METRICS, LaunchRecord, Run, RunRecord, State, StepTrace
from refshard.specs.case import REPEATING, Case, Fidelity
from refshard.specs.model import load_model
from refshard.specs.suite import NetworkSpec

SEVERITY: tuple[State, ...] = ("ok", "unsupported", "skipped", "oom", "timeout", "failed")
"""Case states from best to worst."""

RATES = ("tokens_per_s_gpu", "tflops", "mfu")
"""Metrics that divide by the step time: a case's come from its own step time, so that its row adds up."""
TRACED = ("compute_s", "comm_s", "exposed_comm_s", "idle_s")
"""Metrics of the traced steps: a case's are means over its launches, so that the parts add up to the step."""

BREAKDOWN = ("compute alone", "overlapped communication", "exposed communication", "idle")
"""Parts of a traced step; they add up to it."""

FIDELITY: dict[Fidelity, str] = {
    "measured": "real processes, kernels and network",
    "emulated": "one real rank; the other ranks are modelled",
    "dryrun": "the strategy's own code on fake GPUs; all times are modelled",
    "simulated": "all times are modelled",
}
"""What is real in a case of each fidelity."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CaseResult:
    """One case of one run over all its rounds; two are equal if they are the same object.

    ``header`` is that of its run. ``launches`` are in the order of their rounds, one each; ``samples`` and ``metrics``
    come from those that ended ok, the overlap efficiency from the reference's too. Metrics are medians over launches,
    but for :data:`RATES` and :data:`TRACED`. ``state`` is the worst of them, ``error`` that of the first launch in this
    state. ``variant`` names what tells this case from others of one name, and ``place`` what tells it from others of
    one label (the model, the batch); both are empty as a rule. ``number`` counts the cases that are shown together.
    """

    header: RunRecord
    spec: Case
    fidelity: Fidelity
    launches: tuple[LaunchRecord, ...]
    state: State
    error: str | None
    samples: Launches
    step_time: Summary | None
    metrics: dict[str, float | None]
    warnings: tuple[str, ...]
    variant: str = ""
    place: str = ""
    number: int = 0

    @property
    def strategy(self) -> str:
        """Name of the strategy."""
        return self.spec.job.strategy

    @property
    def ok(self) -> bool:
        """Whether every launch ended ok."""
        return self.state == "ok"

    @property
    def kind(self) -> str:
        """In words, each after a comma: how the case departs from plain training, and the variant."""
        return "".join(f", {word}" for word in self.spec.axes) + self.variant

    @property
    def label(self) -> str:
        """Strategy, world size and kind in words, for a row or a legend."""
        return f"{self.strategy}, {ranks(self.spec.job.gpus)}{self.kind}"

    @property
    def breakdown(self) -> dict[str, float] | None:
        """The parts of a traced step by :data:`BREAKDOWN`, s; None without a trace.

        Communication is overlapped or exposed; what is overlapped lies under compute, the rest of which is compute
        alone.
        """
        compute, comm, exposed, idle = (self.metrics[name] for name in TRACED)
        if not any(launch.state == "ok" for launch in self.launches):
            return None
        if compute is None or comm is None or exposed is None or idle is None:
            return None
        return dict(zip(BREAKDOWN, (compute - (comm - exposed), comm - exposed, exposed, idle)))

    @property
    def traced_range(self) -> dict[str, tuple[float, float]]:
        """The least and the largest of the traced steps of all launches, each the mean over ranks.

        Of :data:`TRACED`, s, and of the overlap ratio if all steps communicate; empty of a single step, and of
        calculated times.
        """
        by_step: dict[tuple[int, int], list[StepTrace]] = {}
        for launch in self.launches:
            if launch.state == "ok" and launch.fidelity not in REPEATING:
                for step in launch.steps:
                    by_step.setdefault((launch.round, step.step), []).append(step)
        steps = [[statistics.fmean(parts) / 1e9 for parts in zip(*map(_parts, ranks))] for ranks in by_step.values()]
        if len(steps) < 2:
            return {}
        columns = dict(zip(TRACED, zip(*steps)))
        if all(columns["comm_s"]):
            pairs = zip(columns["exposed_comm_s"], columns["comm_s"])
            columns["overlap_ratio"] = tuple(1 - exposed / comm for exposed, comm in pairs)
        return {name: (min(values), max(values)) for name, values in columns.items()}

    @property
    def compile_s(self) -> float | None:
        """Median over launches of the time in torch's compiler, s; None where nothing was compiled."""
        known = [launch.compile_s for launch in self.launches if launch.compile_s is not None]
        return statistics.median(known) if known else None

    @property
    def exposed_share(self) -> float | None:
        """Exposed communication over the traced step: the same pass on both sides of the division."""
        parts = self.breakdown
        total = sum(parts.values()) if parts else 0
        return parts["exposed communication"] / total if parts and total else None

    @property
    def full_label(self) -> str:
        """The label, and what tells the case from others where all of a run meet."""
        return f"{self.label}{self.place}"

    @property
    def name(self) -> str:
        """The spec's short name."""
        return f"{self.spec.name}{self.variant}"


def ranks(world_size: int) -> str:
    """A world size in words.

    >>> ranks(1), ranks(2)
    ('1 rank', '2 ranks')
    """
    return f"{world_size:,} rank{'' if world_size == 1 else 's'}"


def cases_of(run: Run) -> tuple[CaseResult, ...]:
    """Every case of the run that has a finished launch, in the order of their first.

    Of two records of one case and round, the later one counts: it is the repetition of the earlier.
    """
    grouped: dict[tuple[Case, Fidelity], dict[int, LaunchRecord]] = {}
    for record in run.launches:
        grouped.setdefault((record.case, record.fidelity), {})[record.round] = record
    joined = [_join(run.header, [launches[key] for key in sorted(launches)]) for launches in grouped.values()]
    return tuple(_rated(joined, run.header.suite.network))


def _join(header: RunRecord, launches: list[LaunchRecord]) -> CaseResult:
    worst = max(launches, key=lambda launch: SEVERITY.index(launch.state))
    good = [launch for launch in launches if launch.state == "ok"]
    samples = {launch.round: step_samples(launch.step_times_s) for launch in good if launch.step_times_s}
    step_time = summarize(samples) if samples else None
    # One that ended badly has metrics only if they say what it would have taken.
    metrics = _metrics(good or launches, step_time)
    stated = [warning for launch in launches for warning in launch.warnings]
    if step_time and launches[0].fidelity not in REPEATING:  # whose times are no samples: more of them say no more
        stated += step_time.warnings
    return CaseResult(
        header=header,
        spec=launches[0].case,
        fidelity=launches[0].fidelity,
        launches=tuple(launches),
        state=worst.state,
        error=None if worst.error is None else plain(worst.error),
        samples=samples,
        step_time=step_time,
        metrics=metrics,
        warnings=tuple(dict.fromkeys(stated)),
    )


def _rated(found: list[CaseResult], network: NetworkSpec | None) -> list[CaseResult]:
    """The cases, with their overlap efficiency where the rate of the link between the hosts is known, and real."""
    if network is None:
        return found
    times = {case.spec: case.metrics["step_time_s"] for case in found if case.fidelity == "measured"}
    rated = []
    for case in found:
        reference = times.get(case.spec.reference()) if case.fidelity == "measured" else None
        efficiency = _efficiency(case, reference, network) if reference else None
        rated.append(replace(case, metrics={**case.metrics, "overlap_efficiency": efficiency}))
    return rated


def _efficiency(case: CaseResult, reference_step_time_s: float, network: NetworkSpec) -> float | None:
    """None too for a model that this version has no preset of: its embedding's size is unknown."""
    proof = next((launch.proof for launch in case.launches if launch.state == "ok" and launch.proof), None)
    step_time = case.metrics["step_time_s"]
    if proof is None or not step_time:
        return None
    try:
        model = case.header.models.get(case.spec.job.model) or load_model(case.spec.job.model)
    except SpecError:
        return None
    return overlap_efficiency(step_time, lower_bound(case.spec, model, proof.announced, reference_step_time_s, network))


def _parts(step: StepTrace) -> tuple[int, int, int, int]:
    """As :data:`TRACED` names them, ns."""
    return step.compute_ns, step.comm_ns, step.exposed_ns, step.idle_ns


def _metrics(launches: Sequence[LaunchRecord], step_time: Summary | None) -> dict[str, float | None]:
    found = {name: _middle((launch.metrics.get(name) for launch in launches), statistics.median) for name in METRICS}
    found |= {name: _middle((launch.metrics.get(name) for launch in launches), statistics.fmean) for name in TRACED}
    if found["comm_s"] and found["exposed_comm_s"] is not None:
        found["overlap_ratio"] = 1 - found["exposed_comm_s"] / found["comm_s"]
    if step_time:
        found["step_time_s"] = step_time.median
        for name in RATES:
            work = _middle((_per_step(launch, name) for launch in launches), statistics.median)
            found[name] = None if work is None else work / step_time.median
    return found


def _per_step(launch: LaunchRecord, rate: str) -> float | None:
    """What a launch does in a step, of tokens, FLOPs or the peak's seconds; the same in every launch of a case."""
    per_s, step_time_s = launch.metrics.get(rate), launch.metrics.get("step_time_s")
    return None if per_s is None or step_time_s is None else per_s * step_time_s


def _middle(values: Iterable[float | None], of: Callable[[list[float]], float]) -> float | None:
    present = [value for value in values if value is not None]
    return of(present) if present else None
