"""How a metric of the same case on the same machine went over runs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tabulate import tabulate

from refshard.analysis.cases import cases_of, plain
from refshard.analysis.evidence import machine
from refshard.records import METRICS, Run
from refshard.specs.case import CaseSpec
from refshard.stats.history import ChangePoint, change_points


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run's value: the median over its rounds."""

    run: str
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

    @property
    def changes(self) -> tuple[ChangePoint, ...]:
        """Where its level changes."""
        return change_points([point.value for point in self.points])


def series_of(runs: Iterable[Run], metric: str) -> tuple[Series, ...]:
    """Every case that ended ok with a positive ``metric``, by spec and machine, in order of their first run."""
    found: dict[tuple[CaseSpec, str], list[Point]] = {}
    for run in sorted(runs, key=lambda run: run.header.started_at):
        for case in cases_of(run):
            values = [value for c in case.launches if c.state == "ok" and (value := c.metrics.get(metric) or 0) > 0]
            if not values:
                continue
            point = Point(
                run=run.header.run_id,
                started_at=run.header.started_at,
                commit=(run.header.environment.git_commit or "unknown")[:9],
                value=median(values),
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
    """A row a series, and a line for each change of level."""
    rows = [
        {
            "case": plain(series.case),
            "machine": series.environment,
            "runs": str(len(series.points)),
            "first": f"{series.points[0].value:.4g}",
            "latest": f"{series.points[-1].value:.4g}",
            "latest / first": f"{series.points[-1].value / series.points[0].value:.3f}",
            "changes": str(len(series.changes)),
        }
        for series in all_series
    ]
    unit = METRICS[metric].unit
    parts = [
        f"{METRICS[metric].label} ({unit}), median over rounds",
        tabulate(rows, headers="keys", disable_numparse=True),
    ]
    told = changes_told(all_series)
    if told:
        parts += ["\n".join(f"* {sentence}" for sentence in told), "Worth a look; nothing fails by it."]
    else:
        parts.append("No change of level shows; it takes some ten runs to show one.")
    return "\n\n".join(parts)


def changes_told(all_series: Sequence[Series]) -> tuple[str, ...]:
    """A sentence for each change of level."""
    return tuple(_told(series, change) for series in all_series for change in series.changes)


def _told(series: Series, change: ChangePoint) -> str:
    last, first = series.points[change.index - 1], series.points[change.index]
    return (
        f"{plain(series.case)} on {series.environment}: {change.ratio:.3f} times as much from run {plain(first.run)} "
        f"on ({first.started_at[:10]}, commit {first.commit}; before it {last.commit}), p = {change.p:.3f}."
    )


def as_object(all_series: Sequence[Series], metric: str) -> list[dict[str, Any]]:
    """Everything, for machines."""
    return [
        {
            "case": series.case,
            "environment": series.environment,
            "metric": metric,
            "points": [
                {"run": p.run, "started_at": p.started_at, "commit": p.commit, "value": p.value} for p in series.points
            ],
            "changes": [
                {"run": series.points[c.index].run, "index": c.index, "ratio": c.ratio, "p": c.p}
                for c in series.changes
            ],
        }
        for series in all_series
    ]
