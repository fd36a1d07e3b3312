"""The cases of one run or of several, sorted into settings that may be compared.

A *setting* is what cases must share to be in one table: everything but the strategy and the world size, the fidelity
and the machine included. If several runs hold a case, the latest counts. A suite that fixes the batch per rank answers
another question than one that fixes the global batch, so neither replaces the other's cases.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from refshard.analysis.cases import CaseResult, cases_of
from refshard.errors import SpecError
from refshard.records import Environment, Run
from refshard.specs.case import KEYS, Case, Fidelity, spelled
from refshard.specs.job import REFERENCE_STRATEGY

_Named = TypeVar("_Named")
_COUNTED = {
    "warmup_steps": ("warm-up step", ""), "measured_steps": ("measured step", ""), "traced_steps": ("traced step", ""),
    "threads_per_rank": ("thread", " per rank"), "resident_ranks": ("rank", " resident"),
}  # fmt: skip
"""Fields that are counts: the noun, and what follows it."""
_NAMED = ("strategy", "gpus", "model", "global_batch", "seq_len")
"""Fields that labels name anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Cases that differ in strategy and world size only; ``label`` says what they share, the axes included.

    ``known`` are the strategies of all evidence without the reference: a strategy's place in it chooses its colour.
    """

    label: str
    cases: tuple[CaseResult, ...]
    known: tuple[str, ...]

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """World sizes present, ascending."""
        return tuple(sorted({case.spec.job.gpus for case in self.cases}))

    @property
    def strategies(self) -> tuple[str, ...]:
        """Strategies in the order in which the suites name them."""
        return tuple(dict.fromkeys(case.strategy for case in self.cases))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Runs, oldest first, and their cases: by model, axes, world size, batch and strategy.

    ``trainings`` holds measured cases that train the same, and so must have equal losses.
    """

    runs: tuple[Run, ...]
    cases: tuple[CaseResult, ...]
    settings: tuple[Setting, ...]
    trainings: tuple[Setting, ...]

    @property
    def latest(self) -> Run:
        """The run that started last."""
        return self.runs[-1]

    @property
    def ranked(self) -> tuple[Setting, ...]:
        """The settings that hold more than references, in which strategies compete; all settings if none does."""
        return tuple(s for s in self.settings if set(s.strategies) != {REFERENCE_STRATEGY}) or self.settings

    @property
    def strategies(self) -> tuple[str, ...]:
        """All but the reference, in the order in which the suites name them."""
        return self.settings[0].known if self.settings else ()


def gather(*runs: Run) -> Evidence:
    """Join one or more runs; a run that is given twice counts once.

    Raises:
        ValueError: there is no run.
    """
    if not runs:
        raise ValueError("evidence needs one run or more, got none")
    distinct = {(run.header.run_id, run.header.started_at): run for run in reversed(runs)}
    runs = tuple(sorted(distinct.values(), key=lambda run: run.header.started_at))
    latest: dict[tuple[Case, Fidelity, str, bool], CaseResult] = {}
    for run in runs:
        where = machine(run.header.environment), run.header.suite.fixes_batch_per_rank
        latest |= {(case.spec, case.fidelity, *where): case for case in cases_of(run)}
    # Strategies and axes in the order in which the suites name them.
    order = _places(name for run in runs for name in run.header.suite.strategies)
    axes = _places(case.axes for run in runs for case in _planned(run))
    machines = _places(machine(run.header.environment) for run in runs)
    found = sorted(
        _with_unique_labels(list(latest.values())),
        key=lambda case: (
            case.spec.job.model,
            case.spec.job.seq_len,
            axes.get(case.spec.axes, len(axes)),
            case.spec.axes,
            machines[machine(case.header.environment)],
            case.spec.job.gpus,
            case.spec.job.global_batch,
            case.variant,
            order.get(case.strategy, len(order)),
        ),
    )
    cases = tuple(replace(case, number=number) for number, case in enumerate(found))
    present = {case.strategy for case in cases} - {REFERENCE_STRATEGY}
    known = tuple(sorted(present, key=lambda name: order.get(name, len(order))))
    settings: dict[tuple[object, ...], list[CaseResult]] = {}
    trainings: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in cases:
        per_rank, where_ = case.header.suite.fixes_batch_per_rank, machine(case.header.environment)
        key = shared(case.spec, per_rank), per_rank, case.fidelity, case.spec.protocol.resident_ranks, where_
        settings.setdefault(key, []).append(case)
        if case.fidelity == "measured":
            trainings.setdefault((_timeless(case.spec.reference()), where_), []).append(case)
    return Evidence(
        runs=runs, cases=cases, settings=_labelled(settings.values(), cases, known, per_rank=True),
        trainings=_labelled(trainings.values(), cases, known, per_rank=False),
    )  # fmt: skip


def machine(env: Environment) -> str:
    """What must be the same before times may be compared: the environment's hash, and the network."""
    return f"{env.id}, {env.network}" if env.network else env.id


def _places(named: Iterable[_Named]) -> dict[_Named, int]:
    return {name: place for place, name in enumerate(dict.fromkeys(named))}


def _planned(run: Run) -> tuple[Case, ...]:
    """The suite's cases; none if this version no longer accepts a suite that an older one ran."""
    try:
        return run.header.suite.cases()
    except SpecError:
        return ()


def _timeless(spec: Case) -> Case:
    """The spec without its time limit, which changes nothing that it trains."""
    return spec.changed(time_limit_s=1.0)


def _labelled(
    groups: Iterable[list[CaseResult]], every: Sequence[CaseResult], known: tuple[str, ...], *, per_rank: bool
) -> tuple[Setting, ...]:
    """Each group under what its cases share; the fidelity and the machine if there are several."""
    several_fidelities = len({case.fidelity for case in every}) > 1
    hosts = _hosts(every)
    found = []
    for group in groups:
        # If cases differ in their time limits only, such as the references of a suite, the longest limit is shown.
        longest: dict[Case, float] = {}
        for spec in (case.spec for case in group):
            longest[_timeless(spec)] = max(spec.protocol.time_limit_s, longest.get(_timeless(spec), 0.0))
        cases = tuple(case for case in group if case.spec.protocol.time_limit_s == longest[_timeless(case.spec)])
        first, spec = cases[0], cases[0].spec
        kind = first.kind if len({case.kind for case in cases}) == 1 else ""
        batch = (
            f"{_sequences(spec.job.global_batch // spec.job.gpus)} of {spec.job.seq_len:,} tokens per rank"
            if per_rank and first.header.suite.fixes_batch_per_rank
            else f"global batch of {_sequences(spec.job.global_batch)} of {spec.job.seq_len:,} tokens"
        )
        fidelity = spelled(first.fidelity)
        label = f"{spec.job.model}, {batch}{kind}"
        if several_fidelities and fidelity not in kind:
            label += f", {fidelity}"
        if len(hosts) > 1:
            label += f", on {hosts[machine(first.header.environment)]}"
        found.append(Setting(label=label, cases=cases, known=known))
    return tuple(found)


def _sequences(count: int) -> str:
    return f"{count:,} sequence{'' if count == 1 else 's'}"


def _hosts(cases: Sequence[CaseResult]) -> dict[str, str]:
    """A name for each machine: the host's, with the hash and the network if several machines share it."""
    found = {machine(case.header.environment): case.header.environment.hostname for case in cases}
    unique = len(set(found.values())) == len(found)
    return {key: host if unique else f"{host} ({key})" for key, host in found.items()}


def _with_unique_labels(found: Sequence[CaseResult]) -> list[CaseResult]:
    """The cases with a variant, which distinguishes cases of one name, and a place, for cases of one label."""

    def theme(spec: Case) -> tuple[object, ...]:
        """What every label has, besides strategy, world size and batch."""
        return spec.job.model, spec.job.seq_len, spec.axes

    specs: dict[tuple[object, ...], list[Case]] = {}
    for case in found:
        specs.setdefault(theme(case.spec), []).append(case.spec)
    unnamed = [field for field in KEYS if field not in _NAMED]
    varying = {
        key: [field for field in unnamed if len({spec.fields[field] for spec in alike}) > 1]
        for key, alike in specs.items()
    }
    cases = [
        replace(case, variant="".join(f", {in_words(case.spec, field)}" for field in varying[theme(case.spec)]))
        for case in found
    ]
    hosts = _hosts(cases)

    def place(case: CaseResult) -> tuple[str, ...]:
        batch = f"batch of {case.spec.job.global_batch:,} x {case.spec.job.seq_len:,} tokens"
        return case.spec.job.model, batch, spelled(case.fidelity), f"on {hosts[machine(case.header.environment)]}"

    places: dict[str, list[tuple[str, ...]]] = {}
    for case in cases:
        places.setdefault(case.label, []).append(place(case))
    differing = {label: [len(set(parts)) > 1 for parts in zip(*alike)] for label, alike in places.items()}
    cases = [
        replace(case, place="".join(f", {part}" for part, shown in zip(place(case), differing[case.label]) if shown))
        for case in cases
    ]
    alike = Counter(case.full_label for case in cases)
    return [
        replace(case, place=f"{case.place}, of {case.header.suite.name}") if alike[case.full_label] > 1 else case
        for case in cases
    ]


def in_words(spec: Case, field: str) -> str:
    """A field of a spec and its value, as a label says it.

    >>> spec = Case.of(strategy="ddp", gpus=2, model="llama-tiny", global_batch=2, traced_steps=1)
    >>> in_words(spec, "traced_steps"), in_words(spec, "threads_per_rank"), in_words(spec, "learning_rate")
    ('1 traced step', '1 thread per rank', 'learning rate 0.001')
    """
    value = spec.fields[field]
    if field == "memory_limit_gib":
        return "no memory limit" if value is None else f"limit of {value:.4g} GiB"
    if field == "time_limit_s":
        return f"time limit of {value:g} s"
    if field in _COUNTED:
        noun, rest = _COUNTED[field]
        return f"{value:,} {noun}{'' if value == 1 else 's'}{rest}"
    if isinstance(value, bool):
        return f"{'with' if value else 'without'} {field}"
    return f"{field.replace('_', ' ')} {f'{value:g}' if isinstance(value, float) else value}"


def shared(spec: Case, per_rank: bool, *, but: tuple[str, ...] = ()) -> tuple[object, ...]:
    """The spec's fields, to compare by, without ``but``, strategy, world size and resident ranks; its batch is per rank
    if the suite fixes that.
    """
    batch = spec.job.global_batch // spec.job.gpus if per_rank else spec.job.global_batch
    apart = ("strategy", "gpus", "resident_ranks", "global_batch", "time_limit_s", *but)
    return batch, *(value for field, value in spec.fields.items() if field not in apart)
