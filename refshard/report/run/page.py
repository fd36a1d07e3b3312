"""The page of one run: one HTML file that needs nothing else.

A run holds one comparison or several: a setting at a world size. The page shows one at a time; the others travel in
templates, which a browser neither lays out nor draws. Figures come from other modules; this one orders them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence
from refshard.analysis.ratios import pairs
from refshard.folders import replace_file
from refshard.records import METRICS
from refshard.report.draw.charts import theme
from refshard.report.draw.embed import embedded
from refshard.report.draw.render import fill, resource, script
from refshard.report.run import origin, views
from refshard.report.run.against import against
from refshard.report.run.trust import Fact, trust
from refshard.report.run.validation import dry_runs
from refshard.report.run.verdict import caveats, modelled, network, overview, unfinished, unranked
from refshard.report.run.view import View, views_of
from refshard.report.run.why import Traced
from refshard.specs.case import REFERENCE_STRATEGY
from refshard.stats.rehearsal import Noise

SCRIPTS = ("charts.js", "tables.js", "perfetto.js", "run.js")
_IN_SHORT = ("Fidelity", "Proof of run", "Loss parity", "Noise", "Machine drift")
"""Facts that the line on trust names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What the page shows besides the run: traces by case, an earlier run, the machine's noise, the page of each
    trace, and the index that leads here.
    """

    traces: Mapping[CaseResult, Traced] = field(default_factory=dict)
    baseline: Evidence | None = None
    noise: Noise | None = None
    timelines: Mapping[CaseResult, str] = field(default_factory=dict)
    index: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """A case's trace: its name, the links to it and to its page, and its gzip as base64 if it is in the page."""

    case: CaseResult
    file_name: str
    link: str
    timeline: str
    content: str | None


def write_dashboard(evidence: Evidence, path: Path, extras: Extras | None = None) -> None:
    """Write the dashboard to ``path``, whole or not at all.

    Raises:
        OSError: the folder does not exist or cannot be written; what was at ``path`` stays.
    """
    replace_file(path, page(evidence, extras))


def page(evidence: Evidence, extras: Extras | None = None) -> Iterable[str]:
    """The dashboard's HTML in pieces, in order."""
    content = _content(evidence, extras or Extras())
    style = resource("style.css") + resource("run.css")
    return fill("run.html.j2", content, style=style, scripts=[script(resource(name)) for name in SCRIPTS])


def title(evidence: Evidence) -> str:
    """The names of the suites."""
    names = list(dict.fromkeys(run.header.suite.name for run in evidence.runs))
    return ", ".join(names) if len(names) < 4 else f"{len(evidence.runs)} runs"


def _content(evidence: Evidence, extras: Extras) -> dict[str, Any]:
    shown = views_of(evidence, extras.traces)
    facts = trust(evidence, extras.noise)
    return {
        "title": title(evidence),
        "index": extras.index,
        "latest": evidence.latest.header,
        "abouts": dict.fromkeys(run.header.suite.about for run in evidence.runs if run.header.suite.about),
        "views": shown,
        "named": list(zip(shown, short_names(shown))),
        "overview": overview([view.finding for view in shown]),
        "against": against(evidence, extras.baseline) if extras.baseline else None,
        "unfinished": unfinished(evidence),
        "unranked": unranked(evidence),
        "notes": (*network(evidence), *modelled(evidence), *caveats(evidence)),
        "facts": facts,
        "in_short": in_short(facts),
        "doubts": [fact for fact in facts if fact.good is False],
        "strategies": _filtered(evidence),
        "dry_runs": dry_runs(evidence),
        "traces": _trace_files(extras),
        **_record(evidence, extras),
        "data": _data(evidence, shown),
    }


def short_names(shown: Sequence[View]) -> list[str]:
    """A name for each comparison: its ranks, and what its setting does not share with the others."""
    parts = [view.setting_label.split(", ") for view in shown]
    common = set.intersection(*map(set, parts)) if parts else set()
    apart = [[part for part in mine if part not in common] for mine in parts]
    return [", ".join([view.size, *words]) for view, words in zip(shown, apart)]


def in_short(facts: Iterable[Fact]) -> list[Fact]:
    """The facts for one line, without those that say nothing."""
    known = {fact.label: fact for fact in facts}
    found = [known[label] for label in _IN_SHORT if label in known]
    return [fact for fact in found if fact.good is not None or not fact.value.startswith(("not ", "none"))]


def _filtered(evidence: Evidence) -> list[str]:
    """The strategies that the filter offers, in order; none where there is no choice."""
    present = {case.strategy for case in evidence.cases}
    found = [name for name in (REFERENCE_STRATEGY, *evidence.strategies) if name in present]
    return found if len(found) > 1 else []


def _trace_files(extras: Extras) -> dict[CaseResult, TraceFile]:
    traced = list(extras.traces.values())
    contents = embedded([one.path for one in traced])
    return {
        one.case: TraceFile(
            case=one.case, file_name=one.path.name, link=one.link, timeline=extras.timelines.get(one.case, ""),
            content=content,
        )
        for one, content in zip(traced, contents)
    }  # fmt: skip


def _data(evidence: Evidence, shown: Iterable[View]) -> dict[str, Any]:
    """What the page's script reads; a case's number is its place in ``cases``."""
    return {
        "theme": theme(),
        "cases": [case.strategy for case in evidence.cases],
        "pairs": pairs(evidence),
        "bases": {view.id: view.headline.base.number for view in shown if view.headline.base},
    }


def _record(evidence: Evidence, extras: Extras) -> dict[str, Any]:
    """Proof, states, environment and commands."""
    known = (*(extras.baseline.runs if extras.baseline else ()), *evidence.runs)
    return {
        "proof": views.proof_table(evidence),
        "states": views.state_table(evidence),
        "launched": [case for case in evidence.cases for _ in case.launches],
        "environments": [(run.header, origin.environment(run), origin.command(run)) for run in evidence.runs],
        "differences": origin.environment_differences(known),
        "commands": [(case, origin.case_command(case, evidence.cases)) for case in evidence.cases],
        "cases": evidence.cases,
        "metrics": list(METRICS.values()),
    }
