"""Step time against memory of one comparison."""

import math
from collections.abc import Mapping, Sequence

from refshard.analysis.cases import CaseResult
from refshard.analysis.rankings import ALIKE, Ranking, step_time
from refshard.quantities import format_bytes, format_seconds
from refshard.report.draw.charts import Chart, chart
from refshard.report.draw.tradeoff import Frame, Point, front, shows_limit, tradeoff_figure
from refshard.report.run.charts import colour
from refshard.report.run.device_limit import Limit
from refshard.report.run.tips import tip
from refshard.report.run.verdict import listed
from refshard.specs.case import REPEATING


def tradeoff(
    ranking: Ranking, limit: Limit | None, identity: str, predicted: Mapping[CaseResult, CaseResult] | None = None
) -> Chart | None:
    """None if no strategy has both figures. ``predicted`` holds dry runs of the cases, drawn hollow."""
    found = tuple(ranking.peaks)
    if not found:
        return None
    points = [_point(ranking, case, case, limit) for case in found]
    dry = {case: one for case in found if (one := (predicted or {}).get(case)) is not None}
    hollow = [_point(ranking, case, one, limit) for case, one in dry.items() if one.metrics[ranking.memory_metric]]
    ties = len(ranking.fastest) > 1 and found[0].fidelity in REPEATING
    frame = Frame(
        memory="reserved memory" if ranking.memory_metric == "peak_reserved_bytes" else "peak memory",
        limit=limit.bytes if limit else None,
        limit_text=limit.text if limit else "",
        tie=(1 + ALIKE) * min(point.time for point in points) if ties else None,
    )
    figure = tradeoff_figure(points, frame, hollow)
    return chart(identity, "Step time against memory", figure, _sentence(points, frame))


def _point(ranking: Ranking, case: CaseResult, shown: CaseResult, limit: Limit | None) -> Point:
    """``shown`` is the case itself, or its dry run."""
    known = ranking.setting.known
    summary = None if shown.fidelity in REPEATING else shown.step_time
    bounded = summary if summary and math.isfinite(summary.high) else None
    return Point(
        name=case.strategy,
        time=step_time(shown),
        memory=shown.metrics[ranking.memory_metric] or 0.0,
        tip=tip(shown, ranking.memory_metric, limit),
        colour=colour(ranking.setting, case.strategy),
        place=known.index(case.strategy) if case.strategy in known else 0,
        number=case.number,
        low=bounded.low if bounded else None,
        high=bounded.high if bounded else None,
    )


def _sentence(points: Sequence[Point], frame: Frame) -> str:
    """The chart in words."""
    best = [f"{one.name} ({format_seconds(one.time)}, {format_bytes(one.memory)})" for one in front(points)]
    told = f"Lower left is better. Dotted, the Pareto front: {listed(best)}."
    if frame.tie is not None:
        told += f" Shaded: within {ALIKE:.0%} of the fastest, the model's error.".replace("%", " %")
    if frame.limit is not None and not shows_limit(points, frame):
        told += f" The limit, {frame.limit_text}, lies outside the chart."
    return told
