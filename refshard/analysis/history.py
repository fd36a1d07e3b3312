"""A metric of one case on one machine over runs."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from refshard.analysis.cases import cases_of
from refshard.analysis.evidence import machine
from refshard.records import Run
from refshard.specs.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run's value, of ``launches`` that ended ok."""

    run: str
    launches: int
    started_at: str
    commit: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """One case on one machine, oldest run first; ``case`` is its name, with the spec's hash where several have it."""

    case: str
    spec: Case
    environment: str
    points: tuple[Point, ...]

    @property
    def change(self) -> float:
        """The latest value over the first."""
        return self.points[-1].value / self.points[0].value


def series_of(runs: Iterable[Run], metric: str) -> tuple[Series, ...]:
    """Every case that ended ok with a positive ``metric``, by spec and machine, in order of their first run."""
    found: dict[tuple[Case, str], list[Point]] = {}
    for run in sorted(runs, key=lambda run: run.header.started_at):
        for case in cases_of(run):
            launches, value = len(case.ok_launches), case.metrics[metric] or 0
            if launches and value > 0:
                point = Point(
                    run=run.header.run_id, launches=launches, started_at=run.header.started_at,
                    commit=(run.header.environment.git_commit or "unknown")[:9], value=value,
                )  # fmt: skip
                found.setdefault((case.spec, machine(run.header.environment)), []).append(point)
    names = Counter((spec.name, where) for spec, where in found)
    return tuple(
        Series(
            case=spec.name if names[spec.name, where] == 1 else f"{spec.name} ({spec.hash})",
            spec=spec,
            environment=where,
            points=tuple(points),
        )
        for (spec, where), points in found.items()
    )
