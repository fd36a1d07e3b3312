"""A CPU's idle time by its own name: nothing is launched there, so time between operators is not launch-bound."""

import json
from dataclasses import replace

from refshard.report.draw.charts import Chart
from refshard.report.trace.idle import BETWEEN_OPERATORS, NAMES
from refshard.tracing.figures import Cause

_NAMES = (NAMES[Cause.LAUNCH], f"idle, {BETWEEN_OPERATORS}")


def chart_of_cpu(chart: Chart) -> Chart:
    """The same with the name in its legend and in what it says of each block."""
    return replace(chart, figure=json.loads(json.dumps(chart.figure).replace(*_NAMES)))
