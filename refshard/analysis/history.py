"""How a metric of the same case on the same machine went over runs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from refshard.analysis.cases import cases_of, plain
from refshard.analysis.evidence import machine
from refshard.records import METRICS, Run
from refshard.specs.case import CaseSpec


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
    spec: CaseSpec
    environment: str
    points: tuple[Point, ...]


def series_of(runs: Iterable[Run], metric: str) -> tuple[Series, ...]:
    """Every case that ended ok with a positive ``metric``, by spec and machine, in order of their first run."""
    found: dict[tuple[CaseSpec, str], list[Point]] = {}
    for run in sorted(runs, key=lambda run: run.header.started_at):
        for case in cases_of(run):
            launches = sum(launch.state == "ok" for launch in case.launches)
            value = case.metrics[metric] or 0
            if not launches or value <= 0:
                continue
            point = Point(
                run=run.header.run_id,
                launches=launches,
                started_at=run.header.started_at,
                commit=(run.header.environment.git_commit or "unknown")[:9],
                value=value,
            )
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


def history_table(all_series: Sequence[Series], metric: str) -> str:
    """A row for each series."""
    rows = [
        {
            "case": plain(series.case),
            "machine": series.environment,
            "runs": str(len(series.points)),
            "launches per run": launches_told(series),
            "first": f"{series.points[0].value:.4g}",
            "latest": f"{series.points[-1].value:.4g}",
            "latest / first": f"{series.points[-1].value / series.points[0].value:.3f}",
        }
        for series in all_series
    ]
    title = f"{METRICS[metric].label} ({METRICS[metric].unit})"
    return f"{title}\n\n{tabulate(rows, headers='keys', disable_numparse=True)}"


def launches_told(series: Series) -> str:
    """How many launches each run's value comes from, the fewest and the most."""
    fewest, most = (of(point.launches for point in series.points) for of in (min, max))
    return str(most) if fewest == most else f"{fewest} to {most}"


def as_object(all_series: Sequence[Series], metric: str) -> list[dict[str, Any]]:
    """Everything, for machines."""
    return [
        {
            "case": series.case,
            "environment": series.environment,
            "metric": metric,
            "points": [
                {
                    "run": p.run,
                    "launches": p.launches,
                    "started_at": p.started_at,
                    "commit": p.commit,
                    "value": p.value,
                }
                for p in series.points
            ],
        }
        for series in all_series
    ]
