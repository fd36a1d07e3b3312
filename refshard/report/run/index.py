"""The page that leads to several runs: a card each, the trend of their cases, and how their machines differ."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from refshard.analysis.evidence import Evidence, gather
from refshard.report.draw.charts import theme
from refshard.report.draw.render import fill, resource, script
from refshard.report.run.origin import environment_differences
from refshard.report.run.over_runs import over_runs
from refshard.report.run.page import in_short, title
from refshard.report.run.trust import Fact, trust
from refshard.report.run.verdict import findings, overview, unfinished, unranked
from refshard.specs.case import spelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One run: where its page is, and what to know of it before opening that."""

    href: str
    title: str
    about: str
    origin: str
    verdict: str
    failed: str
    facts: tuple[Fact, ...]


def card(evidence: Evidence, href: str) -> Card:
    """The card of one run, whose page is at ``href``."""
    found, header = findings(evidence), evidence.latest.header
    told = overview(found) or tuple(finding.lead for finding in found[:1]) or ("No case finished yet.",)
    more = f" More comparisons: {len(found) - 1}." if len(found) > 1 and not overview(found) else ""
    kinds = ", ".join(dict.fromkeys(spelled(case.fidelity) for case in evidence.cases))
    missing = len(unranked(evidence))
    failed = f"{missing} of {len(evidence.cases)} cases did not end ok." if missing else ""
    return Card(
        href=href,
        title=title(evidence),
        about=header.suite.about,
        origin=f"{header.started_at[:16].replace('T', ' ')}, {header.environment.hostname}, {kinds}",
        verdict=f"{' '.join(told)}{more}",
        failed=" ".join([*unfinished(evidence), *filter(None, [failed])]),
        facts=tuple(fact for fact in in_short(trust(evidence)) if fact.label != "Fidelity"),
    )


def index_page(cards: Sequence[Card], every: Sequence[Evidence]) -> Iterable[str]:
    """The page's HTML in pieces, in order."""
    together = gather(*(run for evidence in every for run in evidence.runs))
    content = {
        "title": f"{len(cards)} runs",
        "cards": cards,
        "history": over_runs(together.runs, together),
        "differences": environment_differences(together.runs),
        "data": {"theme": theme()},
    }
    scripts = [script(resource(name)) for name in ("charts.js", "tables.js")]
    return fill("index.html.j2", content, style=resource("style.css") + resource("run.css"), scripts=scripts)
