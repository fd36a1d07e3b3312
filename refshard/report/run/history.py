"""How cases went over runs, as an answer."""

from collections.abc import Sequence

from refshard.analysis.history import Series
from refshard.plain import plain
from refshard.records import METRICS
from refshard.report.blocks import Answer, table


def history_answer(all_series: Sequence[Series], metric: str) -> Answer:
    """A row for each series; for programs, one for each of its points."""
    rows = [
        {
            "case": plain(series.case),
            "first": f"{series.points[0].value:.4g}",
            "latest": f"{series.points[-1].value:.4g}",
            "latest / first": f"{series.points[-1].value / series.points[0].value:.3f}",
            "runs": str(len(series.points)),
            "launches per run": launches_told(series),
            "machine": series.environment,
        }
        for series in all_series
    ]
    points = [
        {
            "case": series.case, "environment": series.environment, "metric": metric, "run": point.run,
            "launches": point.launches, "started_at": point.started_at, "commit": point.commit, "value": point.value,
        }
        for series in all_series
        for point in series.points
    ]  # fmt: skip
    title = f"{METRICS[metric].label} ({METRICS[metric].unit})"
    return Answer(data={"points": points}, rows=points, blocks=[table(rows, title=title)])


def launches_told(series: Series) -> str:
    """How many launches each run's value comes from, the fewest and the most."""
    fewest, most = (of(point.launches for point in series.points) for of in (min, max))
    return str(most) if fewest == most else f"{fewest} to {most}"
