"""The launches of a case joined into one.

A run holds one record per launch. Readers think in cases: one strategy at one world size, over all its rounds.
:mod:`refshard.analysis.evidence` sorts them into settings that may be compared.
"""

import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from refshard.analysis.efficiency import lower_bound, overlap_efficiency
from refshard.errors import SpecError
from refshard.records import METRICS, CaseRecord, Run, RunRecord, State
from refshard.specs.case import REPEATING, CaseSpec, Fidelity
from refshard.specs.model import load_model
from refshard.specs.suite import NetworkSpec
from refshard.stats.sample import Launches, Summary, step_samples, summarize

SEVERITY: tuple[State, ...] = ("ok", "unsupported", "oom", "timeout", "failed")
"""Case states from best to worst."""

BREAKDOWN = ("compute alone", "overlapped communication", "exposed communication", "idle")
"""Parts of a traced step; they add up to it."""

FIDELITY: dict[Fidelity, str] = {
    "measured": "real processes, kernels and wire",
    "emulated": "one real rank; the other ranks are modelled",
    "dryrun": "the strategy's own code on GPUs that are not there; every duration is modelled",
    "simulated": "every duration is modelled",
}
"""What is real in a case of each fidelity."""

_TERMINAL_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One case of one run over all its rounds; two are equal if they are the same object.

    ``header`` is that of its run. ``launches`` are in the order of their rounds, one each; ``samples`` and ``metrics``
    come from those that ended ok, the overlap efficiency from the reference's too. ``state`` is the worst of them,
    ``error`` that of the first launch in this state. ``variant`` names what tells this case from others of one name,
    and ``place`` what tells it from others of one label (the model, the batch); both are empty as a rule. ``number``
    counts the cases that are shown together.
    """

    header: RunRecord
    spec: CaseSpec
    fidelity: Fidelity
    launches: tuple[CaseRecord, ...]
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
        return self.spec.strategy

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
        return f"{self.strategy}, {ranks(self.spec.world_size)}{self.kind}"

    @property
    def breakdown(self) -> dict[str, float] | None:
        """The parts of a traced step by :data:`BREAKDOWN`, s, each the median over rounds; None without a trace."""
        rounds = [parts for launch in self.launches if launch.state == "ok" and (parts := _breakdown(launch))]
        return {part: statistics.median(parts[part] for parts in rounds) for part in BREAKDOWN} if rounds else None

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


def plain(text: str) -> str:
    """Text from a log, without colours and other codes that a terminal or a page would act on."""
    uncoloured = _TERMINAL_ESCAPE.sub("", text).replace("\t", "    ")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in uncoloured)


def cases_of(run: Run) -> tuple[Case, ...]:
    """Every case of the run that has a finished launch, in the order of their first.

    Of two records of one case and round, the later one counts: it is the repetition of the earlier.
    """
    grouped: dict[tuple[CaseSpec, Fidelity], dict[int, CaseRecord]] = {}
    for record in run.cases:
        grouped.setdefault((record.case, record.fidelity), {})[record.round] = record
    joined = [_join(run.header, [launches[key] for key in sorted(launches)]) for launches in grouped.values()]
    return tuple(_rated(joined, run.header.suite.network))


def _join(header: RunRecord, launches: list[CaseRecord]) -> Case:
    worst = max(launches, key=lambda launch: SEVERITY.index(launch.state))
    good = [launch for launch in launches if launch.state == "ok"]
    samples = {launch.round: step_samples(launch.step_times_s) for launch in good if launch.step_times_s}
    step_time = summarize(samples) if samples else None
    # One that ended badly has metrics only if they say what it would have taken.
    metrics = {name: _median(launch.metrics.get(name) for launch in good or launches) for name in METRICS}
    if step_time:
        metrics["step_time_s"] = step_time.median
    stated = [warning for launch in launches for warning in launch.warnings]
    if step_time and launches[0].fidelity not in REPEATING:  # whose times are no samples: more of them say no more
        stated += step_time.warnings
    return Case(
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


def _rated(found: list[Case], network: NetworkSpec | None) -> list[Case]:
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


def _efficiency(case: Case, reference_step_time_s: float, network: NetworkSpec) -> float | None:
    """None too for a model that this version has no preset of: its embedding's size is unknown."""
    proof = next((launch.proof for launch in case.launches if launch.state == "ok" and launch.proof), None)
    step_time = case.metrics["step_time_s"]
    if proof is None or not step_time:
        return None
    try:
        model = load_model(case.spec.model)
    except SpecError:
        return None
    return overlap_efficiency(step_time, lower_bound(case.spec, model, proof.announced, reference_step_time_s, network))


def _breakdown(launch: CaseRecord) -> dict[str, float] | None:
    """Communication is overlapped or exposed; what is overlapped lies under compute, whose rest is compute alone."""
    compute, comm = launch.metrics.get("compute_s"), launch.metrics.get("comm_s")
    exposed, idle = launch.metrics.get("exposed_comm_s"), launch.metrics.get("idle_s")
    if compute is None or comm is None or exposed is None or idle is None:
        return None
    return dict(zip(BREAKDOWN, (compute - (comm - exposed), comm - exposed, exposed, idle)))


def _median(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None
