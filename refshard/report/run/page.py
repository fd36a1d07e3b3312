"""The pages of runs, each one HTML file that needs nothing else: a run's page, and the index of several.

A run holds one comparison or several: a setting at a world size. Its page shows one at a time; the others travel in
templates, which a browser neither lays out nor draws.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from refshard.analysis.cases import CaseResult, ranks
from refshard.analysis.evidence import Evidence, Setting, gather
from refshard.analysis.rankings import Ranking, rankings
from refshard.analysis.ratios import pairs
from refshard.analysis.rehearsal import Noise
from refshard.folders import replace_file
from refshard.records import METRICS
from refshard.report.blocks import Block, Fact, Facts, Notes, Row, Section, Text, cell_text, table
from refshard.report.draw.charts import Chart, theme
from refshard.report.draw.embed import embedded
from refshard.report.draw.render import fill, resource, script
from refshard.report.run import charts, origin, tables
from refshard.report.run.compare import against, against_section
from refshard.report.run.curves import crossovers, scalings, trend
from refshard.report.run.predictions import dry_runs, dry_runs_of
from refshard.report.run.traces import Traced, why
from refshard.report.run.trust import in_short, trust
from refshard.report.run.verdict import Finding, finding_of, findings, notes, overview, unfinished, unranked
from refshard.specs.case import spelled
from refshard.specs.job import REFERENCE_STRATEGY

SCRIPTS = ("charts.js", "tables.js", "perfetto.js", "run.js")
LAYERED = 4
"""Comparisons whose layers are drawn."""


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
class View:
    """One comparison: one setting at one world size, with its references."""

    id: str
    name: str
    finding: Finding
    headline: tables.Headline
    tradeoff: Chart | None
    details: Sequence[Block]
    sections: Sequence[Section]
    traced: Sequence[CaseResult]


def write_dashboard(evidence: Evidence, path: Path, extras: Extras | None = None) -> None:
    """Write the page of a run to ``path``, whole or not at all.

    Raises:
        OSError: the folder does not exist or cannot be written; what was at ``path`` stays.
    """
    replace_file(path, page(evidence, extras))


def page(evidence: Evidence, extras: Extras | None = None) -> Iterable[str]:
    """The HTML of a run's page in pieces, in order."""
    extras = extras or Extras()
    views = views_of(evidence, extras.traces)
    facts = trust(evidence, extras.noise)
    present = {case.strategy for case in evidence.cases}
    strategies = [name for name in (REFERENCE_STRATEGY, *evidence.strategies) if name in present]
    header = evidence.latest.header
    network = f" ({header.environment.network})" if header.environment.network else ""
    contents = embedded([one.path for one in extras.traces.values()])
    dry = dry_runs(evidence)
    return _filled(
        "run.html.j2",
        SCRIPTS,
        title=title(evidence),
        index=extras.index,
        about="".join(
            f"{about}. " for about in dict.fromkeys(run.header.suite.about for run in evidence.runs) if about
        ) + f"{_moment(header.started_at)}, {header.environment.hostname}{network}, torch {header.environment.torch}",
        views=views,
        nothing="No case finished." if evidence.cases else "No case finished yet.",
        unfinished=unfinished(evidence),
        overview=overview([view.finding for view in views]),
        trust=[Facts(facts=facts), Notes(sentences=notes(evidence))],
        in_short=in_short(facts),
        doubts=sum(fact.style == "doubtful" for fact in facts),
        strategies=strategies if len(strategies) > 1 else [],
        against=against_section(against(evidence, extras.baseline)) if extras.baseline else None,
        dry_runs=dry,
        record=_record(evidence, extras.baseline),
        traces={case: (one, extras.timelines.get(case, ""), content)
                for (case, one), content in zip(extras.traces.items(), contents)},
        data={
            "theme": theme(),
            "cases": [case.strategy for case in evidence.cases],  # a case's number is its place
            "pairs": pairs(evidence),
            "bases": {view.id: view.headline.base.number for view in views if view.headline.base},
        },
    )  # fmt: skip


def title(evidence: Evidence) -> str:
    """The names of the suites."""
    names = list(dict.fromkeys(run.header.suite.name for run in evidence.runs))
    return ", ".join(names) if len(names) < 4 else f"{len(evidence.runs)} runs"


def views_of(evidence: Evidence, traced: Mapping[CaseResult, Traced]) -> list[View]:
    """Every comparison, in the order of the settings; world sizes ascend. Its name has its ranks, and what its setting
    does not share with the others.
    """
    found = rankings(evidence)
    parts = [ranking.setting.label.split(", ") for ranking in found]
    common = set.intersection(*map(set, parts)) if parts else set()
    dry = dry_runs_of(evidence)
    losses = [charts.losses(training, f"t{n}-losses") for n, training in enumerate(evidence.trainings)]
    curves = scalings(evidence), crossovers(evidence), [one for one in losses if one]
    views = []
    for place, (ranking, mine) in enumerate(zip(found, parts)):
        references = (case for case in ranking.setting.cases if case.strategy == REFERENCE_STRATEGY)
        together = tuple(dict.fromkeys((*ranking.cases, *references)))
        headline = tables.headline(ranking, replace(ranking.setting, cases=together))
        shown = replace(ranking.setting, cases=headline.cases)
        about = [[one.section for one in every if any(case in ranking.cases for case in one.cases)] for every in curves]
        caption = "All figures. In brackets: the least and the largest traced step"
        name = "All figures of this comparison"
        figures = tables.case_table(headline.cases, title=name, caption=caption, where="detail")
        limit = charts.device_limit(ranking.cases)
        views.append(
            View(
                id=f"v{place}",
                name=", ".join([ranks(ranking.world_size), *(part for part in mine if part not in common)]),
                finding=finding_of(ranking),
                headline=headline,
                tradeoff=charts.tradeoff(ranking, limit, f"v{place}-tradeoff", dry),
                details=[*tables.failures(headline.cases), figures],
                sections=list(_sections(ranking, shown, f"v{place}", dry, about, traced, place < LAYERED)),
                traced=[case for case in headline.cases if case in traced],
            )
        )
    return views


def _sections(
    ranking: Ranking, shown: Setting, prefix: str, dry: Mapping[CaseResult, CaseResult],
    about: Sequence[Sequence[Section]], traced: Mapping[CaseResult, Traced], with_layers: bool,
) -> Iterator[Section]:  # fmt: skip
    """The sections of a comparison; ``shown`` are its cases and references."""
    step: list[Block] = []
    if any(case.ok and case.breakdown for case in shown.cases):
        parts = charts.breakdown_chart(shown, f"{prefix}-breakdown")
        step += [charts.drawn(parts, titled=False), tables.breakdown_table(shown.cases)]
    step += why(shown, traced, prefix, with_layers=with_layers)
    if step:
        yield Section(title="Where a step goes", id="why", blocks=step)
    scaling, crossover, losses = about
    if scaling or crossover:
        heading = "Scaling" if scaling else "When sharding pays"
        yield Section(title=heading, id="scaling", blocks=[*scaling, *crossover])
    own = replace(shown, cases=tuple(case for case in shown.cases if case in ranking.cases))
    over_step = charts.memory_over_step(own, f"{prefix}-over-step", dry)
    memory = tables.gpu_memory_table(shown.cases)
    if over_step or memory.rows:
        blocks: list[Block] = [memory, *([charts.drawn(over_step)] if over_step else [])]
        yield Section(title="Memory", id="memory", blocks=blocks)
    power = tables.power_table(shown.cases)
    if power.rows:
        yield Section(title="Power and clocks", id="power", blocks=[power])
    if losses:
        yield Section(title="Losses", id="losses", blocks=losses)


def _record(evidence: Evidence, baseline: Evidence | None) -> Section:
    """Proof, states, environment and commands."""
    several = len(evidence.runs) > 1
    machines: list[Block] = [
        table([{"machine": label, "value": value} for label, value in origin.environment(run)], left=2,
              caption=f"Run {run.header.run_id}, {run.header.started_at}" if several else "Machine and software")
        for run in evidence.runs
    ]  # fmt: skip
    machines.append(origin.environment_differences((*(baseline.runs if baseline else ()), *evidence.runs)))
    meanings: list[Row] = [{"metric": one.label, "meaning": one.meaning} for one in METRICS.values()]
    commands: list[Block] = [Text(text=origin.command(run), style="command") for run in evidence.runs]
    commands += [
        Section(title=case.full_label, cases=[case.number],
                blocks=[Text(text=origin.case_command(case, evidence.cases), style="command")])
        for case in evidence.cases
    ]  # fmt: skip
    return Section(
        title="Record", id="record", blocks=[
            tables.proof_table(evidence),
            *([tables.states(evidence)] if evidence.cases else []),
            Section(title="Machine and software", folded=True, blocks=machines),
            table(meanings, left=2, title="What each metric means", where="detail"),
            Section(title="Reproduce: the command of this run and of each case", folded=True, blocks=commands),
        ],
    )  # fmt: skip


def _filled(template: str, names: Sequence[str], **content: Any) -> Iterable[str]:
    style = resource("style.css") + resource("run.css")
    scripts = [script(resource(name)) for name in names]
    return fill(template, {**content, "text_of": cell_text}, style=style, scripts=scripts)


def _moment(started_at: str) -> str:
    return started_at[:16].replace("T", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One run on the index: where its page is, and what to know of it before opening that."""

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
    summed_up = overview(found)
    verdict = " ".join(summed_up or [finding.lead for finding in found[:1]] or ["No case finished yet."])
    kinds = ", ".join(dict.fromkeys(spelled(case.fidelity) for case in evidence.cases))
    missing = len(unranked(evidence))
    failed = [f"{missing} of {len(evidence.cases)} cases did not end ok."] if missing else []
    return Card(
        href=href,
        title=title(evidence),
        about=header.suite.about,
        origin=f"{_moment(header.started_at)}, {header.environment.hostname}, {kinds}",
        verdict=f"{verdict} More comparisons: {len(found) - 1}." if len(found) > 1 and not summed_up else verdict,
        failed=" ".join([*unfinished(evidence), *failed]),
        facts=tuple(fact for fact in in_short(trust(evidence)) if fact.label != "Fidelity"),
    )


def index_page(cards: Sequence[Card], every: Sequence[Evidence]) -> Iterable[str]:
    """The HTML of the page that leads to several runs: a card each, the trend of their cases, and how their machines
    differ.
    """
    together = gather(*(run for evidence in every for run in evidence.runs))
    sections: list[Section] = []
    if over_runs := trend(together.runs, together):
        blocks: list[Block] = [charts.drawn(over_runs.chart), over_runs.table]
        sections.append(Section(title="Trend of each case over runs", id="history", nav="Trend", blocks=blocks))
    differences = origin.environment_differences(together.runs)
    if differences.rows:
        fold = Section(title="Fields of the environment that are not the same", folded=True, blocks=[differences])
        heading = "What differs between the runs' machines"
        sections.append(Section(title=heading, id="machines", nav="Differences", blocks=[fold]))
    return _filled(
        "index.html.j2", SCRIPTS[:2], title=f"{len(cards)} runs", cards=cards, sections=sections,
        data={"theme": theme()},
    )  # fmt: skip
