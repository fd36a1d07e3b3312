"""What a page or a table speaks of: the cases of one run or of several, sorted into settings that may be compared.

A *setting* is what cases must share before their numbers may stand in one table: everything but the strategy and the
world size, the fidelity and the machine included. Of a case that several runs hold, the latest counts; but a suite that
fixes the batch per rank asks another question than one that fixes the global one, and takes no case from its rankings.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from refshard.analysis.cases import CaseResult, cases_of
from refshard.errors import SpecError
from refshard.records import Environment, Run
from refshard.specs.case import KEYS, Case, Fidelity, spelled
from refshard.specs.job import REFERENCE_STRATEGY

_COUNTED = {
    "warmup_steps": ("warm-up step", ""), "measured_steps": ("measured step", ""), "traced_steps": ("traced step", ""),
    "threads_per_rank": ("thread", " per rank"), "resident_ranks": ("rank", " resident"),
}  # fmt: skip
"""Fields that count something: its name, and what follows."""
_NAMED = ("strategy", "gpus", "model", "global_batch", "seq_len")
"""Fields that labels name by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Cases that differ in strategy and world size only; ``label`` says what they share, the axes included.

    ``known`` are the strategies of all evidence, the reference aside: their places choose colours.
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

    @property
    def fidelity(self) -> Fidelity:
        """That of all of its cases."""
        return self.cases[0].fidelity


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Runs, oldest first, and their cases: by model, axes, world size, batch and strategy.

    ``trainings`` holds measured cases by what they train: those of one must have equal losses.
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
        """The settings in which strategies compete: those that hold more than references, or all if none does."""
        return tuple(s for s in self.settings if set(s.strategies) != {REFERENCE_STRATEGY}) or self.settings

    @property
    def strategies(self) -> tuple[str, ...]:
        """All but the reference, in the order in which the suites name them."""
        return self.settings[0].known if self.settings else ()


def gather(*runs: Run) -> Evidence:
    """Join runs, one or more, whose cases count as those of one; a run that is given twice counts once.

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
    order, axes = _order(runs), _axes_order(runs)
    machines = list(dict.fromkeys(machine(run.header.environment) for run in runs))
    found = sorted(
        _told_apart(list(latest.values())),
        key=lambda case: (
            case.spec.job.model,
            case.spec.job.seq_len,
            axes.get(case.spec.axes, len(axes)),
            case.spec.axes,
            machines.index(machine(case.header.environment)),
            case.spec.job.gpus,
            case.spec.job.global_batch,
            case.variant,
            order.get(case.strategy, len(order)),
        ),
    )
    cases = tuple(replace(case, number=number) for number, case in enumerate(found))
    present = {case.strategy for case in cases} - {REFERENCE_STRATEGY}
    known = tuple(sorted(present, key=lambda name: order.get(name, len(order))))
    return Evidence(runs=runs, cases=cases, settings=_settings(cases, known), trainings=_trainings(cases, known))


def machine(env: Environment) -> str:
    """What must be the same before times may be compared: the environment's hash, and the network."""
    return f"{env.id}, {env.network}" if env.network else env.id


def _order(runs: Iterable[Run]) -> dict[str, int]:
    named = dict.fromkeys(name for run in runs for name in run.header.suite.strategies)
    return {name: place for place, name in enumerate(named)}


def _axes_order(runs: Iterable[Run]) -> dict[tuple[str, ...], int]:
    """Places of the axes in the order in which the suites give them."""
    named = dict.fromkeys(case.axes for run in runs for case in _planned(run))
    return {axes: place for place, axes in enumerate(named)}


def _planned(run: Run) -> tuple[Case, ...]:
    """The suite's cases; none if this version no longer accepts a suite that an older one ran."""
    try:
        return run.header.suite.cases()
    except SpecError:
        return ()


def _settings(cases: Sequence[CaseResult], known: tuple[str, ...]) -> tuple[Setting, ...]:
    """A suite that fixes the batch per rank compares world sizes at that, any other at the global batch."""
    grouped: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in cases:
        per_rank = case.header.suite.fixes_batch_per_rank
        where = machine(case.header.environment)
        key = (shared(case.spec, per_rank), per_rank, case.fidelity, case.spec.protocol.resident_ranks, where)
        grouped.setdefault(key, []).append(case)
    return _labelled(map(_most_patient, grouped.values()), cases, known, per_rank=True)


def _most_patient(group: list[CaseResult]) -> list[CaseResult]:
    """Of cases that differ in their time limits only, such as references of a suite with several, the longest."""
    longest: dict[Case, float] = {}
    for spec in (case.spec for case in group):
        longest[_timeless(spec)] = max(spec.protocol.time_limit_s, longest.get(_timeless(spec), 0.0))
    return [case for case in group if case.spec.protocol.time_limit_s == longest[_timeless(case.spec)]]


def _timeless(spec: Case) -> Case:
    """The spec with one and the same time limit, on which what it trains does not depend."""
    return spec.changed(time_limit_s=1.0)


def _trainings(cases: Sequence[CaseResult], known: tuple[str, ...]) -> tuple[Setting, ...]:
    grouped: dict[tuple[Case, str], list[CaseResult]] = {}
    for case in cases:
        if case.fidelity == "measured":
            key = _timeless(case.spec.reference()), machine(case.header.environment)
            grouped.setdefault(key, []).append(case)
    return _labelled(map(_most_patient, grouped.values()), cases, known, per_rank=False)


def _labelled(
    groups: Iterable[list[CaseResult]], every: Sequence[CaseResult], known: tuple[str, ...], *, per_rank: bool
) -> tuple[Setting, ...]:
    """Each group under what its cases share; the fidelity and the machine where there are several."""
    fidelities = {case.fidelity for case in every}
    hosts = _hosts(every)
    return tuple(
        Setting(
            label=_label(members, per_rank and members[0].header.suite.fixes_batch_per_rank, len(fidelities) > 1)
            + (f", on {hosts[machine(members[0].header.environment)]}" if len(hosts) > 1 else ""),
            cases=tuple(members),
            known=known,
        )
        for members in groups
    )


def _hosts(cases: Sequence[CaseResult]) -> dict[str, str]:
    """Machines by name: the host's where no other has it, else with the hash, or the network."""
    found = {machine(case.header.environment): case.header.environment for case in cases}
    if len({env.hostname for env in found.values()}) == len(found):
        return {key: env.hostname for key, env in found.items()}
    if len({env.id for env in found.values()}) == len(found):
        return {key: f"{env.hostname} ({env.id})" for key, env in found.items()}
    return {key: f"{env.hostname} ({env.id}{f', {env.network}' if env.network else ''})" for key, env in found.items()}


def _told_apart(found: Sequence[CaseResult]) -> list[CaseResult]:
    """The cases, with what tells apart those of one name (the variant) and those of one label (the place)."""
    themes: dict[tuple[object, ...], list[Case]] = {}
    for case in found:
        themes.setdefault(_theme(case.spec), []).append(case.spec)
    unnamed = [field for field in KEYS if field not in _NAMED]
    varying = {
        theme: [field for field in unnamed if len({spec.fields[field] for spec in known}) > 1]
        for theme, known in themes.items()
    }
    told = [
        replace(case, variant="".join(f", {in_words(case.spec, field)}" for field in varying[_theme(case.spec)]))
        for case in found
    ]
    hosts = _hosts(told)
    named: dict[str, list[dict[str, str]]] = {}
    for case in told:
        named.setdefault(case.label, []).append(_place(case, hosts))
    placed = [replace(case, place=_apart(_place(case, hosts), named[case.label])) for case in told]
    alike = Counter(case.full_label for case in placed)
    return [
        replace(case, place=f"{case.place}, of {case.header.suite.name}") if alike[case.full_label] > 1 else case
        for case in placed
    ]


def in_words(spec: Case, field: str) -> str:
    """A field of a spec and its value, as a label says it.

    >>> spec = Case.of(strategy="ddp", gpus=2, model="llama-tiny", global_batch=2, traced_steps=1)
    >>> in_words(spec, "traced_steps"), in_words(spec, "threads_per_rank"), in_words(spec, "learning_rate")
    ('1 traced step', '1 thread per rank', 'learning rate 0.001')
    """
    value = spec.fields[field]
    if field == "memory_limit_gib":
        return "no memory limit" if value is None else f"limit of {value:g} GiB"
    if field == "time_limit_s":
        return f"time limit of {value:g} s"
    if field in _COUNTED:
        noun, rest = _COUNTED[field]
        return f"{value:,} {noun}{'' if value == 1 else 's'}{rest}"
    if isinstance(value, bool):
        return f"{'with' if value else 'without'} {field}"
    told = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{field.replace('_', ' ')} {told}"


def _apart(place: dict[str, str], others: Sequence[dict[str, str]]) -> str:
    return "".join(f", {words}" for part, words in place.items() if len({other[part] for other in others}) > 1)


def _theme(spec: Case) -> tuple[object, ...]:
    """What every label names by itself, beside strategy, world size and batch."""
    return spec.job.model, spec.job.seq_len, spec.axes


def _place(case: CaseResult, hosts: dict[str, str]) -> dict[str, str]:
    spec = case.spec
    return {
        "model": spec.job.model,
        "batch": f"batch of {spec.job.global_batch:,} x {spec.job.seq_len:,} tokens",
        "fidelity": spelled(case.fidelity),
        "machine": f"on {hosts[machine(case.header.environment)]}",
    }


def shared(spec: Case, per_rank: bool, *, but: tuple[str, ...] = ()) -> tuple[object, ...]:
    """The spec's fields, to compare by, but for those of ``but``, strategy, world size and resident ranks; its batch is
    per rank if the suite fixes that.
    """
    job = spec.job
    batch = job.global_batch // job.gpus if per_rank else job.global_batch
    apart = ("strategy", "gpus", "resident_ranks", "global_batch", "time_limit_s", *but)
    return batch, *(value for field, value in spec.fields.items() if field not in apart)


def _label(members: Sequence[CaseResult], per_rank: bool, several: bool) -> str:
    """What the cases share; how they depart from plain training only if all do alike.

    Of ``several`` fidelities each is named; how a case departs tells those that are not measured.
    """
    case, spec = members[0], members[0].spec
    kind = case.kind if len({member.kind for member in members}) == 1 else ""
    batch = (
        f"{_sequences(spec.job.global_batch // spec.job.gpus)} of {spec.job.seq_len:,} tokens per rank"
        if per_rank
        else f"global batch of {_sequences(spec.job.global_batch)} of {spec.job.seq_len:,} tokens"
    )
    fidelity = spelled(case.fidelity)
    told = several and fidelity not in kind
    return f"{spec.job.model}, {batch}{kind}{f', {fidelity}' if told else ''}"


def _sequences(count: int) -> str:
    return f"{count:,} sequence{'' if count == 1 else 's'}"
