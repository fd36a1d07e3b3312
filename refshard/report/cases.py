"""The launches of a case joined into one, and the cases sorted into settings that may be compared.

A run holds one record per launch. Readers think in cases: one strategy at one world size, over all its
rounds. A *setting* is what cases must share before their numbers may stand in one table: everything but the
strategy and the world size, the fidelity included.
"""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from refshard.errors import SpecError
from refshard.records import METRICS, CaseRecord, Run, State
from refshard.report.efficiency import lower_bound, overlap_efficiency
from refshard.specs.case import REFERENCE_STRATEGY, CaseSpec, Fidelity
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
    "simulated": "every duration is modelled",
}
"""What is real in a case of each fidelity."""

_NAMED = ("strategy", "world_size", "model", "global_batch", "seq_len")
_TERMINAL_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case over all its rounds.

    ``launches`` are in the order of their rounds, one each; ``samples`` and ``metrics`` come from those that
    ended ok, the overlap efficiency from the reference's too. ``state`` is the worst of them, ``error`` that of the
    first launch in this state. ``variant`` names what tells this case from others of one name, and ``place`` what tells
    it from others of one label (the model, the batch); both are empty as a rule.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Cases that differ in strategy and world size only; ``label`` says what they share, the axes included."""

    label: str
    cases: tuple[Case, ...]

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """World sizes present, ascending."""
        return tuple(sorted({case.spec.world_size for case in self.cases}))

    @property
    def strategies(self) -> tuple[str, ...]:
        """Strategies in the order in which the suite names them."""
        return tuple(dict.fromkeys(case.strategy for case in self.cases))


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


def cases(run: Run) -> tuple[Case, ...]:
    """Every case of the run that has a finished launch: settings together, then world sizes, then strategies.

    Of two records of one case and round, the later one counts: it is the repetition of the earlier.
    """
    grouped: dict[tuple[CaseSpec, Fidelity], dict[int, CaseRecord]] = {}
    for record in run.cases:
        grouped.setdefault((record.case, record.fidelity), {})[record.round] = record
    varying = _varying(spec for spec, _ in grouped)
    joined = [
        _join([launches[key] for key in sorted(launches)], varying[_theme(spec)])
        for (spec, _), launches in grouped.items()
    ]
    order = {name: place for place, name in enumerate(run.header.suite.strategies)}
    return tuple(
        sorted(
            _placed(_rated(joined, run.header.suite.network)),
            key=lambda case: (
                case.spec.model,
                case.spec.seq_len,
                case.spec.axes,
                case.spec.world_size,
                case.spec.global_batch,
                case.variant,
                order.get(case.strategy, len(order)),
            ),
        )
    )


def settings(run: Run) -> tuple[Setting, ...]:
    """Sort the run's cases into settings.

    A suite that fixes the batch per rank compares world sizes at that, any other at the global batch.
    """
    per_rank = run.header.suite.fixes_batch_per_rank
    found = cases(run)
    several = len({case.fidelity for case in found}) > 1
    grouped: dict[tuple[CaseSpec, Fidelity, int], list[Case]] = {}
    for case in found:
        key = (_shared(case.spec, per_rank), case.fidelity, case.spec.resident_ranks)
        grouped.setdefault(key, []).append(case)
    return tuple(
        Setting(label=_label(members, per_rank, several), cases=tuple(members)) for members in grouped.values()
    )


def contested(run: Run) -> tuple[Setting, ...]:
    """The settings in which strategies compete: those that hold more than references, or all if none does."""
    every = settings(run)
    return tuple(s for s in every if set(s.strategies) != {REFERENCE_STRATEGY}) or every


def trainings(run: Run) -> tuple[Setting, ...]:
    """Sort the run's measured cases by what they train: those of one group must have equal losses."""
    found = cases(run)
    several = len({case.fidelity for case in found}) > 1
    grouped: dict[CaseSpec, list[Case]] = {}
    for case in found:
        if case.fidelity == "measured":
            grouped.setdefault(case.spec.reference(), []).append(case)
    return tuple(Setting(label=_label(members, False, several), cases=tuple(members)) for members in grouped.values())


def _join(launches: list[CaseRecord], varying: list[str]) -> Case:
    worst = max(launches, key=lambda launch: SEVERITY.index(launch.state))
    good = [launch for launch in launches if launch.state == "ok"]
    samples = {launch.round: step_samples(launch.step_times_s) for launch in good if launch.step_times_s}
    step_time = summarize(samples) if samples else None
    metrics = {name: _median(launch.metrics.get(name) for launch in good) for name in METRICS}
    if step_time:
        metrics["step_time_s"] = step_time.median
    stated = [warning for launch in launches for warning in launch.warnings]
    if step_time and launches[0].fidelity != "simulated":  # whose times are no samples: more of them say no more
        stated += step_time.warnings
    return Case(
        spec=launches[0].case,
        fidelity=launches[0].fidelity,
        launches=tuple(launches),
        state=worst.state,
        error=None if worst.error is None else plain(worst.error),
        samples=samples,
        step_time=step_time,
        metrics=metrics,
        warnings=tuple(dict.fromkeys(stated)),
        variant="".join(f", {field} {getattr(launches[0].case, field)}" for field in varying),
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


_Theme = tuple[str, int, tuple[str, ...]]


def _theme(spec: CaseSpec) -> _Theme:
    """What every label names by itself, beside strategy, world size and batch."""
    return spec.model, spec.seq_len, spec.axes


def _varying(specs: Iterable[CaseSpec]) -> dict[_Theme, list[str]]:
    """By theme, the fields that differ between its cases and that no label names by itself."""
    themes: dict[_Theme, list[CaseSpec]] = {}
    for spec in specs:
        themes.setdefault(_theme(spec), []).append(spec)
    unnamed = [field for field in CaseSpec.__struct_fields__ if field not in _NAMED]
    return {
        theme: [field for field in unnamed if len({getattr(spec, field) for spec in known}) > 1]
        for theme, known in themes.items()
    }


def _placed(found: list[Case]) -> list[Case]:
    """The cases, with what tells apart those of one label."""
    named: dict[str, list[dict[str, str]]] = {}
    for case in found:
        named.setdefault(case.label, []).append(_place(case))
    placed = []
    for case in found:
        others = named[case.label]
        told = [words for part, words in _place(case).items() if len({other[part] for other in others}) > 1]
        placed.append(replace(case, place="".join(f", {words}" for words in told)))
    return placed


def _place(case: Case) -> dict[str, str]:
    spec = case.spec
    return {
        "model": spec.model,
        "batch": f"batch of {spec.global_batch:,} x {spec.seq_len:,} tokens",
        "fidelity": case.fidelity,
    }


def _shared(spec: CaseSpec, per_rank: bool) -> CaseSpec:
    """The spec with strategy, world size and resident ranks blanked; its batch is per rank if the suite fixes that."""
    batch = spec.global_batch // spec.world_size if per_rank else spec.global_batch
    return msgspec.structs.replace(spec, strategy="", world_size=1, resident_ranks=1, global_batch=batch)


def _label(members: Sequence[Case], per_rank: bool, several: bool) -> str:
    """What the cases share; how they depart from plain training only if all do alike.

    Of ``several`` fidelities in a run each is named; how a case departs tells those that are not measured.
    """
    case, spec = members[0], members[0].spec
    kind = case.kind if len({member.kind for member in members}) == 1 else ""
    batch = (
        f"{_sequences(spec.global_batch // spec.world_size)} of {spec.seq_len:,} tokens per rank"
        if per_rank
        else f"global batch of {_sequences(spec.global_batch)} of {spec.seq_len:,} tokens"
    )
    told = several and case.fidelity not in kind
    return f"{spec.model}, {batch}{kind}{f', {case.fidelity}' if told else ''}"


def _sequences(count: int) -> str:
    return f"{count:,} sequence{'' if count == 1 else 's'}"
