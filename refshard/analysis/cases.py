"""The launches of a case joined into one.

A run has one record per launch; a case is one strategy at one world size, over all its rounds.
:mod:`refshard.analysis.evidence` sorts cases into settings that may be compared.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from refshard.analysis.efficiency import lower_bound
from refshard.analysis.sample import Launches, Summary, step_samples, summarize
from refshard.errors import SpecError
from refshard.plain import plain
from refshard.records import METRICS, GpuMemory, LaunchRecord, Proof, Run, RunRecord, State, StepTrace, parity_tolerance
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
    come from launches that ended ok, the overlap efficiency also from the reference's. Metrics are medians over
    launches, except :data:`RATES` and :data:`TRACED`. ``state`` is the worst of them, ``error`` that of the first
    launch in this state. ``variant`` distinguishes cases of one name, and ``place`` cases of one label (the model, the
    batch); both are usually empty. ``number`` counts the cases that are shown together.
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
    def ok_launches(self) -> list[LaunchRecord]:
        """The launches that ended ok."""
        return [launch for launch in self.launches if launch.state == "ok"]

    @property
    def kind(self) -> str:
        """How the case departs from plain training, and the variant; each after a comma."""
        return "".join(f", {word}" for word in self.spec.axes) + self.variant

    @property
    def label(self) -> str:
        """Strategy, world size and kind, for a row or a legend."""
        return f"{self.strategy}, {ranks(self.spec.job.gpus)}{self.kind}"

    @property
    def full_label(self) -> str:
        """The label, unique among all cases that are shown together."""
        return f"{self.label}{self.place}"

    @property
    def name(self) -> str:
        """The spec's short name."""
        return f"{self.spec.name}{self.variant}"

    @property
    def breakdown(self) -> dict[str, float] | None:
        """The parts of a traced step by :data:`BREAKDOWN`, s; None without a trace.

        Communication is overlapped or exposed; overlapped communication runs under compute, and the rest of the compute
        runs alone.
        """
        compute, comm, exposed, idle = (self.metrics[name] for name in TRACED)
        if not self.ok_launches or compute is None or comm is None or exposed is None or idle is None:
            return None
        return dict(zip(BREAKDOWN, (compute - (comm - exposed), comm - exposed, exposed, idle)))

    @property
    def exposed_share(self) -> float | None:
        """Exposed communication over the traced step: both from the same pass."""
        total = sum(parts.values()) if (parts := self.breakdown) else 0
        return parts["exposed communication"] / total if parts and total else None

    @property
    def traced_range(self) -> dict[str, tuple[float, float]]:
        """The smallest and the largest of the traced steps of all launches, each the mean over ranks.

        For :data:`TRACED`, s, and the overlap ratio if all steps communicate; empty for a single step, and for
        calculated times.
        """
        by_step: dict[tuple[int, int], list[StepTrace]] = {}
        for launch in self.ok_launches if self.fidelity not in REPEATING else ():
            for step in launch.steps:
                by_step.setdefault((launch.round, step.step), []).append(step)
        fields = ("compute_ns", "comm_ns", "exposed_ns", "idle_ns")
        if len(by_step) < 2:
            return {}
        columns = {
            metric: [statistics.fmean(getattr(rank, field) for rank in step) / 1e9 for step in by_step.values()]
            for metric, field in zip(TRACED, fields)
        }
        if all(columns["comm_s"]):
            pairs = zip(columns["exposed_comm_s"], columns["comm_s"])
            columns["overlap_ratio"] = [1 - exposed / comm for exposed, comm in pairs]
        return {name: (min(values), max(values)) for name, values in columns.items()}

    @property
    def compile_s(self) -> float | None:
        """Median over launches of the time in torch's compiler, s; None if nothing was compiled."""
        return _over((launch.compile_s for launch in self.launches), statistics.median)

    @property
    def gpu_memory(self) -> GpuMemory | None:
        """The maximum over ranks, and its median over launches; retries and failures are summed over both.

        ``total_bytes`` is that of the smallest GPU. None if no launch that ended ok has a GPU's memory.
        """
        launches = [launch.gpu_memory for launch in self.ok_launches if launch.gpu_memory]
        if not launches:
            return None

        def over(field: str) -> int:
            values = [[getattr(rank, field) for rank in ranks] for ranks in launches]
            if field in ("retries", "ooms"):
                return sum(map(sum, values))
            return int(statistics.median(map(min if field == "total_bytes" else max, values)))

        return GpuMemory(**{field: over(field) for field in GpuMemory.__struct_fields__})

    @property
    def proofs(self) -> list[Proof]:
        """The proof of each launch that has one."""
        return [launch.proof for launch in self.launches if launch.proof is not None]

    @property
    def proof_summary(self) -> str:
        """``proved`` by every launch; ``losses not checked`` or ``collectives not checked`` if everything else is;
        ``incomplete`` (proved by some), ``none``, or ``failed: ...``.
        """
        proofs = self.proofs
        if failures := dict.fromkeys(failure for proof in proofs for failure in proof.failures):
            return f"failed: {'; '.join(map(plain, failures))}"
        if len(proofs) < len(self.launches) or not proofs:
            return "incomplete" if proofs else "none"
        unchecked = ["collectives"] if any(proof.collectives_note for proof in proofs) else []
        if self.fidelity == "measured" and any(proof.loss_parity is None for proof in proofs):
            unchecked.append("losses")
        return f"{' and '.join(unchecked)} not checked" if unchecked else "proved"

    @property
    def bit_identical(self) -> bool | None:
        """Whether every launch was bit-identical to DDP; None if one is unknown and none differed."""
        verdicts = [launch.proof.bit_identical_to_ddp if launch.proof else None for launch in self.launches]
        return False if False in verdicts else None if None in verdicts else True

    @property
    def parity_of(self) -> str:
        """The reduced case that was checked for loss parity; empty if it was the case itself."""
        return next((proof.parity_of for proof in self.proofs if proof.parity_of), "")

    @property
    def parity_tolerance(self) -> float:
        """How large the loss parity of this case may be."""
        given = (proof.parity_tolerance for proof in self.proofs if proof.parity_tolerance is not None)
        return next(given, parity_tolerance(self.spec))

    def proof_note(self, about: str) -> str:
        """Why something is not known, or not as expected: of ``collectives``, ``bits`` or ``parity``."""
        found: Iterable[Any] = (getattr(proof, f"{about}_note") for proof in self.proofs)
        return plain("; ".join(dict.fromkeys(filter(None, found))))


def ranks(world_size: int) -> str:
    """A number of ranks.

    >>> ranks(1), ranks(2)
    ('1 rank', '2 ranks')
    """
    return f"{world_size:,} rank{'' if world_size == 1 else 's'}"


def cases_of(run: Run) -> tuple[CaseResult, ...]:
    """Every case of the run that has a finished launch, in the order of their first.

    If a case has two records of one round, the later one counts: it repeats the earlier.
    """
    grouped: dict[tuple[Case, Fidelity], dict[int, LaunchRecord]] = {}
    for record in run.launches:
        grouped.setdefault((record.case, record.fidelity), {})[record.round] = record
    joined = [_join(run.header, [launches[key] for key in sorted(launches)]) for launches in grouped.values()]
    network = run.header.suite.network
    if network is None:
        return tuple(joined)
    # The rate of the link between the hosts is known, and real: measured cases have an overlap efficiency.
    times = {case.spec: case.metrics["step_time_s"] for case in joined if case.fidelity == "measured"}
    return tuple(
        replace(case, metrics={**case.metrics, "overlap_efficiency": _efficiency(case, times, network)})
        for case in joined
    )


def _join(header: RunRecord, launches: list[LaunchRecord]) -> CaseResult:
    worst = max(launches, key=lambda launch: SEVERITY.index(launch.state))
    good = [launch for launch in launches if launch.state == "ok"]
    samples = {launch.round: step_samples(launch.step_times_s) for launch in good if launch.step_times_s}
    step_time = summarize(samples) if samples else None
    warnings = [warning for launch in launches for warning in launch.warnings]
    if step_time and launches[0].fidelity not in REPEATING:  # a calculated time needs no further launch
        warnings += step_time.warnings
    return CaseResult(
        header=header,
        spec=launches[0].case,
        fidelity=launches[0].fidelity,
        launches=tuple(launches),
        state=worst.state,
        error=None if worst.error is None else plain(worst.error),
        samples=samples,
        step_time=step_time,
        metrics=_metrics(good or launches, step_time),  # a launch that ran out of memory says what it would need
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _metrics(launches: Sequence[LaunchRecord], step_time: Summary | None) -> dict[str, float | None]:
    found = {
        name: _over(
            (launch.metrics.get(name) for launch in launches), statistics.fmean if name in TRACED else statistics.median
        )
        for name in METRICS
    }
    if found["comm_s"] and found["exposed_comm_s"] is not None:
        found["overlap_ratio"] = 1 - found["exposed_comm_s"] / found["comm_s"]
    if step_time:
        found["step_time_s"] = step_time.median
        for name in RATES:
            # The work of a step (tokens, FLOPs, seconds of the peak) is the same in every launch of a case.
            work = [
                rate * seconds
                for launch in launches
                if (rate := launch.metrics.get(name)) is not None
                and (seconds := launch.metrics.get("step_time_s")) is not None
            ]
            found[name] = statistics.median(work) / step_time.median if work else None
    return found


def _efficiency(case: CaseResult, times: dict[Case, float | None], network: NetworkSpec) -> float | None:
    """Lower bound over step time; None for a model that this version has no preset of: its embedding is unknown."""
    reference = times.get(case.spec.reference()) if case.fidelity == "measured" else None
    proof = next((launch.proof for launch in case.ok_launches if launch.proof), None)
    step_time = case.metrics["step_time_s"]
    if reference is None or proof is None or not step_time:
        return None
    try:
        model = case.header.models.get(case.spec.job.model) or load_model(case.spec.job.model)
    except SpecError:
        return None
    bound = lower_bound(case.spec, model, proof.announced, reference, network)
    return bound / step_time if bound else None


def _over(values: Iterable[float | None], of: Callable[[list[float]], float]) -> float | None:
    """Over the values that are known."""
    known = [value for value in values if value is not None]
    return of(known) if known else None
