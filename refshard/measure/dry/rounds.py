"""Rounds of dry runs: the best jobs by closed form, and the next best as long as too few of them fit.

Closed forms are farther off for some strategies and pipeline schedules than for others, so the best of each that is
nearly as fast comes first. If a dry run needs more than its closed form, others of its kind do too: jobs that cannot
fit by this are skipped.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from refshard.measure.dry.proxies import Extrapolated, Proxies, Setting, closed, extrapolate, proxies_of
from refshard.measure.dry.rank import DryResult
from refshard.quantities import format_bytes
from refshard.specs.case import Case
from refshard.specs.job import Job

NEARLY = 1.15
"""Configurations are nearly as fast if their closed form is within this ratio of the fastest one's: closed forms are
about this far from their dry runs."""
Found = Extrapolated | str
"""What a configuration's dry run comes to, or why it has none."""


class Run(Protocol):
    """Dry-runs cases, as :func:`~refshard.measure.dry.many.dry_run_many` does."""

    def __call__(self, cases: Sequence[Case], work: Path, *, time_limit_s: float) -> list[tuple[DryResult, ...]]:
        """The results of each case's ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How many jobs are to fit into ``usable_bytes``, and how long the first round may take for each. Another
    round begins only if it would end within the time for all, should each configuration take as long as in the one
    before.
    """

    count: int
    usable_bytes: int
    each_s: float
    all_s: float


def dry_run_rounds(
    jobs: Sequence[Job], step_s: Sequence[float], setting: Setting, folder: Path, rounds: Rounds,
    run: Run, clock: Callable[[], float] = time.monotonic,
) -> dict[int, Found]:  # fmt: skip
    """Dry-run the jobs, which are sorted by the ``step_s`` of their closed forms, until enough of them fit or
    the time is up.

    Returns results by index in ``jobs``, without jobs that no round reached. ``folder`` is for the cases'
    models and results.
    """
    found: dict[int, Found] = {}
    began, limit_s, each_s = clock(), rounds.each_s * rounds.count, 0.0
    while missing := rounds.count - sum(_fits(one, rounds) for one in found.values()):
        chosen = _first(_next(jobs, step_s, setting, folder, found, missing, rounds), jobs, missing)
        if not chosen or each_s * len(chosen) > limit_s:
            break
        round_began = clock()
        found |= _dry_run(chosen, setting, folder / f"round-{len(found)}", run, limit_s)
        each_s = (clock() - round_began) / len(chosen)
        limit_s = began + rounds.all_s - clock()
    return found


def _fits(one: Found, rounds: Rounds) -> bool:
    return isinstance(one, Extrapolated) and one.allocated_bytes <= rounds.usable_bytes


def _first(near: Mapping[int, Proxies], jobs: Sequence[Job], count: int) -> dict[int, Proxies]:
    """``count`` of the ``near`` ones: the best of each strategy and schedule, then the best of the others."""
    best: dict[Hashable, int] = {}
    for place in near:
        best.setdefault((jobs[place].strategy, jobs[place].schedule), place)
    return {place: near[place] for place in list(dict.fromkeys([*best.values(), *near]))[:count]}


def _next(
    jobs: Sequence[Job], step_s: Sequence[float], setting: Setting, folder: Path,
    found: dict[int, Found], count: int, rounds: Rounds,
) -> dict[int, Proxies]:  # fmt: skip
    """The next ``count`` that can be dry-run, and all that are nearly as fast as the first; ``found`` gets the reason
    why others before them cannot.
    """
    beyond = dict(_beyond(jobs, found))
    chosen: dict[int, Proxies] = {}
    for place, one in enumerate(jobs):
        if place in found:
            continue
        if len(chosen) >= count and step_s[place] > NEARLY * step_s[next(iter(chosen))]:
            break
        more = beyond.get(_kind(one), 0)
        if more and (needed := closed(one, setting, setting.model.n_layers).peak_bytes + more) > rounds.usable_bytes:
            found[place] = (
                f"similar dry runs need {format_bytes(more)} more than their closed form, so this one would need "
                f"{format_bytes(round(needed))}, of {format_bytes(rounds.usable_bytes)} usable"
            )
            continue
        proxies = proxies_of(one, setting, folder)
        if isinstance(proxies, str):
            found[place] = proxies
        else:
            chosen[place] = proxies
    return chosen


def _beyond(jobs: Sequence[Job], found: Mapping[int, Found]) -> Iterator[tuple[Hashable, int]]:
    """By kind, what dry runs need beyond their closed form."""
    for place, one in found.items():
        if isinstance(one, Extrapolated):
            yield _kind(jobs[place]), one.beyond_bytes


def _kind(one: Job) -> Hashable:
    """Configurations of one kind differ in their batch, their shards and how many layers they checkpoint."""
    policy = one.checkpointing if one.checkpointing in ("none", "selective", "full") else "some"
    return one.strategy, one.tp, one.cp, one.pp, one.interleave, one.schedule, policy


def _dry_run(chosen: Mapping[int, Proxies], setting: Setting, work: Path, run: Run, limit_s: float) -> dict[int, Found]:
    cases = [(place, point, case) for place, one in chosen.items() for point, case in one.cases.items()]
    ended = run([case for _, _, case in cases], work, time_limit_s=limit_s)
    results: dict[int, dict[tuple[int, int], Sequence[DryResult]]] = {place: {} for place in chosen}
    for (place, point, _), ranks in zip(cases, ended, strict=True):
        results[place][point] = ranks
    return {place: extrapolate(chosen[place], setting, of) for place, of in results.items()}
