"""The dashboard of one run or of several: one HTML file that needs nothing else.

Everything on it is computed by other modules of this room; this one says what comes in which order, and hands the
page's script what its filters and its choice of A and B need. Of many settings only the first are parts that a browser
lays out at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from refshard.analysis.cases import CaseResult
from refshard.analysis.contests import leaders
from refshard.analysis.evidence import Evidence, Setting
from refshard.analysis.gpu_memory import gpu_memory_of
from refshard.analysis.ratios import pairs
from refshard.folders import replace_file
from refshard.records import METRICS
from refshard.report.draw.charts import Chart, theme
from refshard.report.draw.render import fill, resource, script
from refshard.report.run import charts, origin, views
from refshard.report.run.against import against
from refshard.report.run.crossover import crossovers
from refshard.report.run.losses import losses
from refshard.report.run.memory import Memory, memory
from refshard.report.run.over_runs import over_runs
from refshard.report.run.published import published
from refshard.report.run.ratios import pair_rows
from refshard.report.run.scaling import scalings
from refshard.report.run.trust import trust
from refshard.report.run.validation import dry_runs_beside
from refshard.report.run.verdict import caveats, findings, modelled, network, overview, unfinished, unranked
from refshard.report.run.why import Traced, Why, why
from refshard.specs.case import REFERENCE_STRATEGY, spelled
from refshard.stats.rehearsal import Noise

BEST = {
    "step_time_s": "step time (95 % interval)", "tokens_per_s_gpu": "tokens/s/GPU", "tflops": "TFLOPS", "mfu": "MFU",
    "peak_memory_bytes": "peak memory", "peak_reserved_bytes": "peak reserved",
}  # fmt: skip
"""Metrics whose leaders are marked in a setting's table, and their columns there."""
UNFOLDED = 8
"""Settings that a section shows; those after them are folded until a reader asks for them."""
LAYERED = 4
"""Settings whose layers are drawn."""
UNFOLDED_ROWS = 200
"""Rows from which on a table of all cases or launches is folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What stands beside the evidence on its page: traces by case, a baseline, the machine's noise, and where the page
    of a case's trace is, if it has one.
    """

    traces: Mapping[CaseResult, Traced] = field(default_factory=dict)
    baseline: Evidence | None = None
    noise: Noise | None = None
    timelines: Mapping[CaseResult, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What the page shows of one setting. ``best`` has the marked cells, by case number and column."""

    label: str
    cases: tuple[CaseResult, ...]
    summary: pd.DataFrame
    best: frozenset[tuple[int, str]]
    charts: tuple[Chart, ...]
    breakdown: pd.DataFrame
    broken_down: tuple[CaseResult, ...]
    breakdown_chart: Chart | None
    why: Why | None
    gpu_memory: pd.DataFrame
    on_gpus: tuple[CaseResult, ...]
    memory: Memory | None


def write_dashboard(evidence: Evidence, path: Path, beside: Beside | None = None) -> None:
    """Write the dashboard to ``path``, whole or not at all.

    Raises:
        OSError: the folder does not exist or cannot be written; what was at ``path`` stays.
    """
    replace_file(path, page(evidence, beside))


def page(evidence: Evidence, beside: Beside | None = None) -> Iterable[str]:
    """The dashboard's HTML in pieces, in order."""
    content = _content(evidence, beside or Beside())
    scripts = [script(resource(name)) for name in ("charts.js", "page.js")]
    style = resource("style.css") + resource("run.css")
    return fill("run.html.j2", content, style=style, scripts=scripts)


def _content(evidence: Evidence, beside: Beside) -> dict[str, Any]:
    sections = [_section(setting, beside, place) for place, setting in enumerate(evidence.contested)]
    trainings = [losses(training, f"t{place}") for place, training in enumerate(evidence.trainings)]
    curves = [found for found in trainings if found]
    scaled = scalings(evidence)
    history = over_runs(evidence.runs, evidence) if len(evidence.runs) > 1 else None
    return {
        **_verdict(evidence, beside),
        **_record(evidence, beside),
        "sections": sections,
        "scalings": scaled,
        "crossovers": crossovers(evidence),
        "published": published(evidence),
        "dry_runs": dry_runs_beside(evidence),
        "curves": curves,
        "history": history,
        "peers": evidence.strategies,
        "pairs": pair_rows(evidence),
        "facets": _facets(evidence),
        "unfolded": UNFOLDED,
        "unfolded_rows": UNFOLDED_ROWS,
        "data": {
            "theme": theme(),
            "cases": [_facets_of(case) for case in evidence.cases],
            "labels": [case.full_label for case in evidence.cases],
            "pairs": pairs(evidence),
        },
    }


def _verdict(evidence: Evidence, beside: Beside) -> dict[str, Any]:
    found = findings(evidence)
    return {
        "title": _title(evidence),
        "runs": [run.header for run in evidence.runs],
        "findings": found,
        "overview": overview(found),
        "against": against(evidence, beside.baseline) if beside.baseline else None,
        "notes": (*network(evidence), *modelled(evidence), *caveats(evidence)),
        "unranked": (*unfinished(evidence), *unranked(evidence)),
        "facts": trust(evidence, beside.noise),
    }


def _title(evidence: Evidence) -> str:
    names = list(dict.fromkeys(run.header.suite.name for run in evidence.runs))
    return ", ".join(names) if len(names) < 4 else f"{len(evidence.runs)} runs"


def _record(evidence: Evidence, beside: Beside) -> dict[str, Any]:
    """Proof, states, environment and commands."""
    links = {case: one.link for case, one in beside.traces.items()}
    return {
        "proof": views.proof_table(evidence),
        "states": views.state_table(evidence),
        "launched": [case for case in evidence.cases for _ in case.launches],
        "environments": [(run.header, origin.environment(run), origin.command(run)) for run in evidence.runs],
        "differences": origin.environment_differences(
            [*(beside.baseline.runs if beside.baseline else ()), *evidence.runs]
        ),
        "commands": [(case, origin.case_command(case, evidence.cases)) for case in evidence.cases],
        "cases": evidence.cases,
        "trace_links": links,
        "timelines": beside.timelines,
        "metrics": list(METRICS.values()),
    }


def _section(setting: Setting, beside: Beside, place: int) -> Section:
    prefix = f"s{place}"
    broken_down = tuple(case for case in setting.cases if case.ok and case.breakdown)
    return Section(
        label=setting.label,
        cases=setting.cases,
        summary=views.summary_table(setting.cases),
        best=_best(setting),
        charts=tuple(charts.bar_charts(setting, prefix).values()),
        breakdown=views.breakdown_table(setting),
        broken_down=broken_down,
        breakdown_chart=charts.breakdown_chart(setting, prefix) if broken_down else None,
        why=why(setting, beside.traces, prefix, with_layers=place < LAYERED),
        gpu_memory=views.gpu_memory_table(setting.cases),
        on_gpus=tuple(case for case in setting.cases if gpu_memory_of(case)),
        memory=memory(setting, prefix),
    )


def _best(setting: Setting) -> frozenset[tuple[int, str]]:
    return frozenset((case.number, BEST[metric]) for metric, cases in leaders(setting).items() for case in cases)


def _facets_of(case: CaseResult) -> dict[str, str]:
    return {
        "model": case.spec.model,
        "strategy": case.strategy,
        "ranks": f"{case.spec.world_size:,}",
        "fidelity": spelled(case.fidelity),
    }


def _facets(evidence: Evidence) -> dict[str, list[str]]:
    """What filters offer: every facet that has several values, with these in their order."""
    rows = [_facets_of(case) for case in evidence.cases]
    order = [REFERENCE_STRATEGY, *evidence.strategies]
    found: dict[str, list[str]] = {}
    for name in ("model", "strategy", "ranks", "fidelity"):
        values = dict.fromkeys(row[name] for row in rows)
        found[name] = _ordered(name, values, order)
    return {name: values for name, values in found.items() if len(values) > 1}


def _ordered(name: str, values: Iterable[str], strategies: Sequence[str]) -> list[str]:
    if name == "strategy":
        return sorted(values, key=strategies.index)
    if name == "ranks":
        return sorted(values, key=lambda value: int(value.replace(",", "")))
    return list(values)
