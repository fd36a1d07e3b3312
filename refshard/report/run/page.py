"""The page of a run, and the index of several.

A run holds one comparison or several: a setting at a world size. Its page shows one at a time; the others are in
templates, which a browser neither lays out nor draws.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from refshard.analysis.cases import CaseResult, ranks
from refshard.analysis.evidence import Evidence, gather
from refshard.analysis.rankings import Ranking, rankings
from refshard.analysis.ratios import pairs
from refshard.analysis.rehearsal import Noise
from refshard.folders import replace_file
from refshard.records import METRICS
from refshard.report.blocks import Answer, Block, Cover, Facts, Marked, Notes, Row, Section, Text, Verdict, table
from refshard.report.draw.charts import Chart
from refshard.report.draw.embed import embedded
from refshard.report.page import SCRIPTS, filled
from refshard.report.run import charts, origin, tables
from refshard.report.run.charts import crossovers, scalings, trend
from refshard.report.run.compare import against, against_section
from refshard.report.run.predictions import dry_runs, dry_runs_of
from refshard.report.run.traces import Traced, why
from refshard.report.run.trust import in_short, trust
from refshard.report.run.verdict import Finding, finding_of, findings, notes, overview, unfinished, unranked
from refshard.specs.case import spelled
from refshard.specs.job import REFERENCE_STRATEGY

LAYERED = 4
"""Comparisons with layers drawn."""


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
    views, facts = views_of(evidence, extras.traces), trust(evidence, extras.noise)
    present = {case.strategy for case in evidence.cases}
    strategies = [name for name in (REFERENCE_STRATEGY, *evidence.strategies) if name in present]
    environment = evidence.latest.header.environment
    abouts = dict.fromkeys(run.header.suite.about for run in evidence.runs if run.header.suite.about)
    network = f" ({environment.network})" if environment.network else ""
    contents = embedded([one.path for one in extras.traces.values()])
    return filled(
        "run.html.j2",
        scripts=[*SCRIPTS, "run.js"],
        styles=["style.css", "run.css"],
        title=title(evidence),
        index=extras.index,
        about=f"{''.join(f'{about}. ' for about in abouts)}{_started(evidence)}, {environment.hostname}{network}, "
        f"torch {environment.torch}",
        views=views,
        nothing="No case finished." if evidence.cases else "No case finished yet.",
        unfinished=unfinished(evidence),
        overview=overview([view.finding for view in views]),
        trust=[Facts(facts=facts), Notes(sentences=notes(evidence))],
        in_short=in_short(facts),
        doubts=sum(fact.style == "doubtful" for fact in facts),
        strategies=strategies if len(strategies) > 1 else [],
        against=against_section(against(evidence, extras.baseline)) if extras.baseline else None,
        dry_runs=dry_runs(evidence),
        record=_record(evidence, extras.baseline),
        traces={case: (one, extras.timelines.get(case, ""), content)
                for (case, one), content in zip(extras.traces.items(), contents)},
        data={
            "cases": [case.strategy for case in evidence.cases],  # a case's number is its place
            "pairs": pairs(evidence),
            "bases": {view.id: view.headline.base.number for view in views if view.headline.base},
        },
    )  # fmt: skip


def title(evidence: Evidence) -> str:
    """The names of the suites."""
    names = list(dict.fromkeys(run.header.suite.name for run in evidence.runs))
    return ", ".join(names) if len(names) < 4 else f"{len(evidence.runs)} runs"


def _started(evidence: Evidence) -> str:
    return evidence.latest.header.started_at[:16].replace("T", " ")


def views_of(evidence: Evidence, traced: Mapping[CaseResult, Traced]) -> list[View]:
    """Every comparison, in the order of the settings; world sizes ascend. Its name has its ranks, and the parts of its
    setting that not all comparisons share.
    """
    found = rankings(evidence)
    parts = [ranking.setting.label.split(", ") for ranking in found]
    common = set.intersection(*map(set, parts)) if parts else set()
    dry = dry_runs_of(evidence)
    losses = [charts.losses(training, f"t{n}-losses") for n, training in enumerate(evidence.trainings)]
    curves = [scalings(evidence), crossovers(evidence), [one for one in losses if one]]
    views = []
    for place, (ranking, mine) in enumerate(zip(found, parts)):
        prefix = f"v{place}"
        references = (case for case in ranking.setting.cases if case.strategy == REFERENCE_STRATEGY)
        together = tuple(dict.fromkeys((*ranking.cases, *references)))
        headline = tables.headline(ranking, replace(ranking.setting, cases=together))
        about = [[one.section for one in every if any(case in ranking.cases for case in one.cases)] for every in curves]
        caption = "All figures. In brackets: the smallest and the largest traced step"
        name = "All figures of this comparison"
        figures = tables.case_table(headline.cases, title=name, caption=caption, where="detail")
        views.append(
            View(
                id=prefix,
                name=", ".join([ranks(ranking.world_size), *(part for part in mine if part not in common)]),
                finding=finding_of(ranking),
                headline=headline,
                tradeoff=charts.tradeoff(ranking, f"{prefix}-tradeoff", dry),
                details=[*tables.failures(headline.cases), figures],
                sections=list(_sections(ranking, headline.cases, prefix, dry, about, traced)),
                traced=[case for case in headline.cases if case in traced],
            )
        )
    return views


def _sections(
    ranking: Ranking, cases: tuple[CaseResult, ...], prefix: str, dry: Mapping[CaseResult, CaseResult],
    about: Sequence[Sequence[Section]], traced: Mapping[CaseResult, Traced],
) -> Iterator[Section]:  # fmt: skip
    """The sections of a comparison that have something to show; ``cases`` are its cases and references."""
    shown = replace(ranking.setting, cases=cases)
    step: list[Block] = []
    if any(case.ok and case.breakdown for case in cases):
        parts = charts.breakdown_chart(shown, f"{prefix}-breakdown")
        step = [charts.drawn(parts, titled=False), tables.breakdown_table(cases)]
    step += why(shown, traced, prefix, with_layers=prefix in {f"v{place}" for place in range(LAYERED)})
    scaling, crossover, losses = about
    own = replace(shown, cases=tuple(case for case in cases if case in ranking.cases))
    over_step = charts.memory_over_step(own, f"{prefix}-over-step", dry)
    memory, power = tables.gpu_memory_table(cases), tables.power_table(cases)
    in_memory: list[Block] = [*([memory] if memory.rows else []), *([charts.drawn(over_step)] if over_step else [])]
    every: list[tuple[str, str, Sequence[Block]]] = [
        ("Where a step goes", "why", step),
        ("Scaling" if scaling else "When sharding pays", "scaling", [*scaling, *crossover]),
        ("Memory", "memory", in_memory),
        ("Power and clocks", "power", [power] if power.rows else []),
        ("Losses", "losses", losses),
    ]
    yield from (Section(title=name, id=identity, blocks=blocks) for name, identity, blocks in every if blocks)


def _record(evidence: Evidence, baseline: Evidence | None) -> Section:
    """Proof, states, environment and commands."""
    several = len(evidence.runs) > 1
    machines: list[Block] = [
        table([{"machine": label, "value": value} for label, value in origin.environment(run).items() if value], left=2,
              caption=f"Run {run.header.run_id}, {run.header.started_at}" if several else "Machine and software")
        for run in evidence.runs
    ]  # fmt: skip
    machines.append(origin.environment_differences((*(baseline.runs if baseline else ()), *evidence.runs)))
    meanings: list[Row] = [{"metric": one.label, "meaning": one.meaning} for one in METRICS.values()]
    commands: list[Block] = [
        Text(text=shlex.join(run.header.environment.argv), style="command") for run in evidence.runs
    ]
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


def index_answer(every: Mapping[str, Evidence]) -> Answer:
    """The page that leads to several runs, each with the address of its page: a row each, the trend of their cases, and
    how their machines differ.
    """
    rows: list[Row] = []
    for href, evidence in every.items():
        header, outcomes = evidence.latest.header, findings(evidence)
        verdict = overview(outcomes) or [one.lead for one in outcomes[:1]] or ["No case finished yet."]
        more = [f"More comparisons: {len(outcomes) - 1}."] if len(outcomes) > 1 and not overview(outcomes) else []
        missing = len(unranked(evidence))
        failed = [f"{missing} of {len(evidence.cases)} cases did not end ok."] if missing else []
        facts = {fact.label: fact for fact in in_short(trust(evidence)) if fact.label != "Fidelity"}
        rows.append({
            "run": Marked(title(evidence), href=href),
            "verdict": " ".join([*unfinished(evidence), *verdict, *more, *failed]),
            "started": _started(evidence),
            "machine": header.environment.hostname,
            "fidelity": ", ".join(dict.fromkeys(spelled(case.fidelity) for case in evidence.cases)),
            **{label.lower(): Marked(facts[label].value, facts[label].style) if label in facts else None
               for label in ("Proof of run", "Loss parity", "Noise", "Machine drift")},
            "about": header.suite.about,
        })  # fmt: skip
    found = table(rows, left=5, text=["about"], caption="Runs")
    columns = [replace(column, wraps=column.head in ("verdict", "about")) for column in found.columns]
    used = overview([one for evidence in every.values() for one in findings(evidence)])
    blocks: list[Block] = [*([Verdict(sentences=used)] if used else []), replace(found, columns=columns)]
    together = gather(*(run for evidence in every.values() for run in evidence.runs))
    if over_runs := trend(together.runs, together):
        heading = "Trend of each case over runs"
        blocks.append(
            Section(title=heading, id="history", nav="Trend", blocks=[charts.drawn(over_runs.chart), over_runs.table])
        )
    differences = origin.environment_differences(together.runs)
    if differences.rows:
        heading = "What differs between the runs' machines"
        blocks.append(Section(title=heading, id="machines", nav="Differences", folded=True, blocks=[differences]))
    return Answer(data={}, rows=[], blocks=blocks, cover=Cover(title=f"{len(every)} runs"))
