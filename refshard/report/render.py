"""A run to one HTML file that needs nothing else; computes no figure, only lays out what the views give.

Strategy names, errors and logs come from outside and are hostile until escaped: Jinja2 escapes them in the page,
``tojson`` in the charts' data, and the page's content security policy runs no script but its own two, by hash.
"""

import base64
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from refshard import resources
from refshard.folders import replace_file
from refshard.records import METRICS, Run
from refshard.report import charts, origin, views
from refshard.report.cases import Setting, contested, settings, trainings
from refshard.report.charts import Chart
from refshard.report.trust import trust
from refshard.report.verdict import caveats, findings, modelled, unfinished, unranked

_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=(?:%|ns|us|ms|s|B|[KMG]iB(?:/s)?)(?:\W|$))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A table of strategies by world size, the chart that draws it if there is one, and its best cells."""

    title: str
    meaning: str
    table: pd.DataFrame
    best: set[tuple[str, str]]
    chart: Chart | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What the page shows of one setting."""

    label: str
    panels: tuple[Panel, ...]
    breakdown: pd.DataFrame
    breakdown_chart: Chart
    why: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """The losses of the cases that train the same."""

    label: str
    table: pd.DataFrame
    chart: Chart


def write_dashboard(run: Run, path: Path) -> None:
    """Write the dashboard of ``run`` to ``path``, whole or not at all.

    Raises:
        OSError: the folder does not exist or cannot be written; what was at ``path`` stays.
    """
    replace_file(path, page(run))


def page(run: Run) -> Iterable[str]:
    """The dashboard's HTML in pieces, in order."""
    scripts = [script(get_plotlyjs()), script(resource("charts.js"))]
    return fill("run.html.j2", _content(run), style=resource("style.css"), scripts=scripts)


def fill(template: str, content: dict[str, Any], *, style: str, scripts: list[str]) -> Iterable[str]:
    """A template's HTML in pieces; its content security policy runs ``scripts`` by hash and no other."""
    templates = Environment(
        loader=FileSystemLoader(resources.dashboards()),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["unbroken"] = unbroken
    return templates.get_template(template).generate(
        **content,
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        script_hashes=[_hash(script) for script in scripts],
    )


def unbroken(text: str) -> str:
    r"""Text in which no line breaks between a number and its unit.

    >>> unbroken("17.3 % of 538 ms in 3 steps").split(" ")
    ['17.3\xa0%', 'of', '538\xa0ms', 'in', '3', 'steps']
    """
    return _NUMBER_AND_UNIT.sub("\N{NO-BREAK SPACE}", text)


def resource(name: str) -> str:
    """The text of a file beside the templates."""
    return (resources.dashboards() / name).read_text(encoding="utf-8")


def _content(run: Run) -> dict[str, Any]:
    sections = [_section(setting, f"s{place}") for place, setting in enumerate(contested(run))]
    curves = [_curves(training, f"t{place}") for place, training in enumerate(trainings(run))]
    drawn = [
        *(panel.chart for section in sections for panel in section.panels if panel.chart),
        *(section.breakdown_chart for section in sections),
        *(curve.chart for curve in curves),
    ]
    return {
        "header": run.header,
        "findings": findings(run),
        "unranked": (*unfinished(run), *unranked(run)),
        "modelled": modelled(run),
        "caveats": caveats(run),
        "facts": trust(run),
        "summaries": [(setting.label, views.summary_table(setting.cases)) for setting in settings(run)],
        "sections": sections,
        "curves": curves,
        "proof": views.proof_table(run),
        "states": views.state_table(run),
        "environment": origin.environment(run),
        "command": origin.command(run),
        "metrics": list(METRICS.values()),
        "figures": {chart.id: chart.figure for chart in drawn},
    }


def _section(setting: Setting, prefix: str) -> Section:
    drawn = charts.bar_charts(setting, prefix)
    return Section(
        label=setting.label,
        panels=tuple(_panel(setting, metric, chart) for metric, chart in drawn.items()),
        breakdown=views.breakdown_table(setting),
        breakdown_chart=charts.breakdown_chart(setting, prefix),
        why=tuple(_panel(setting, metric, None) for metric in _why(setting)),
    )


def _why(setting: Setting) -> tuple[str, ...]:
    known = ("overlap_efficiency",) if views.knows_efficiency(setting.cases) else ()
    return ("exposed_comm_s", "overlap_ratio", *known)


def _panel(setting: Setting, metric: str, chart: Chart | None) -> Panel:
    return Panel(
        title=METRICS[metric].label,
        meaning=METRICS[metric].meaning,
        table=views.grid(setting, metric).reset_index(),
        best=views.leaders(setting, metric),
        chart=chart,
    )


def _curves(training: Setting, prefix: str) -> Curves:
    return Curves(label=training.label, table=views.loss_table(training), chart=charts.loss_chart(training, prefix))


def script(text: str) -> str:
    """A script as an HTML parser will hand it to the browser, which hashes that."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
