"""One comparison as its page shows it: one setting at one world size, with its references."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import pandas as pd

from refshard.analysis.cases import CaseResult, ranks
from refshard.analysis.evidence import Evidence
from refshard.analysis.gpu_memory import gpu_memory_of
from refshard.analysis.rankings import Ranking, leaders, rankings
from refshard.report.draw.charts import Chart
from refshard.report.run import charts, views
from refshard.report.run.crossover import Crossover, crossovers
from refshard.report.run.device_limit import device_limit
from refshard.report.run.headline import Headline, failures, headline
from refshard.report.run.losses import Losses, losses
from refshard.report.run.memory import memory_over_step
from refshard.report.run.power import power_table
from refshard.report.run.scaling import Scaling, scalings
from refshard.report.run.tradeoff import tradeoff
from refshard.report.run.validation import dry_runs_of
from refshard.report.run.verdict import Finding, finding_of
from refshard.report.run.why import Traced, Why, why
from refshard.specs.case import REFERENCE_STRATEGY

_Shown = TypeVar("_Shown", Scaling, Crossover, Losses)
LAYERED = 4
"""Comparisons whose layers are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the page shows of one comparison. ``best`` has the cells to mark, by case number and column."""

    id: str
    setting_label: str
    size: str
    finding: Finding
    cases: tuple[CaseResult, ...]
    headline: Headline
    best: frozenset[tuple[int, str]]
    tradeoff: Chart | None
    failed: list[tuple[str, list[CaseResult]]]
    full: pd.DataFrame
    breakdown: pd.DataFrame
    broken_down: tuple[CaseResult, ...]
    breakdown_chart: Chart | None
    why: Why | None
    power: pd.DataFrame
    gpu_memory: pd.DataFrame
    on_gpus: tuple[CaseResult, ...]
    memory: Chart | None
    scalings: tuple[Scaling, ...]
    crossovers: tuple[Crossover, ...]
    losses: tuple[Losses, ...]

    @property
    def has_memory(self) -> bool:
        """Whether the section on memory has anything to show."""
        return self.memory is not None or bool(self.on_gpus)


def views_of(evidence: Evidence, traced: Mapping[CaseResult, Traced]) -> tuple[View, ...]:
    """Every comparison, in the order of the settings; world sizes ascend."""
    shared = _Shared(evidence)
    return tuple(_view(ranking, shared, traced, place) for place, ranking in enumerate(rankings(evidence)))


class _Shared:
    """What several comparisons show; computed once."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    @cached_property
    def dry_runs(self) -> dict[CaseResult, CaseResult]:
        return dry_runs_of(self._evidence)

    @cached_property
    def scalings(self) -> tuple[Scaling, ...]:
        return scalings(self._evidence)

    @cached_property
    def crossovers(self) -> tuple[Crossover, ...]:
        return crossovers(self._evidence)

    @cached_property
    def losses(self) -> tuple[Losses, ...]:
        found = (losses(training, f"t{place}") for place, training in enumerate(self._evidence.trainings))
        return tuple(one for one in found if one)


def _view(ranking: Ranking, shared: _Shared, traced: Mapping[CaseResult, Traced], place: int) -> View:
    prefix = f"v{place}"
    references = (case for case in ranking.setting.cases if case.strategy == REFERENCE_STRATEGY)
    together = tuple(dict.fromkeys((*ranking.cases, *references)))
    setting = replace(ranking.setting, cases=together)
    top = headline(ranking, setting)
    setting = replace(setting, cases=top.cases)
    broken_down = tuple(case for case in setting.cases if case.ok and case.breakdown)
    alone = replace(ranking.setting, cases=ranking.cases)
    led = {metric: cases for metric, cases in leaders(alone).items() if metric in top.columns}
    return View(
        id=prefix,
        setting_label=ranking.setting.label,
        size=ranks(ranking.world_size),
        finding=finding_of(ranking),
        cases=setting.cases,
        headline=top,
        best=frozenset((case.number, top.columns[metric]) for metric, cases in led.items() for case in cases),
        tradeoff=tradeoff(ranking, device_limit(ranking.cases), f"{prefix}-tradeoff", shared.dry_runs),
        failed=failures(setting.cases),
        full=views.summary_table(setting.cases),
        breakdown=views.breakdown_table(setting),
        broken_down=broken_down,
        breakdown_chart=charts.breakdown_chart(setting, prefix) if broken_down else None,
        why=why(setting, traced, prefix, with_layers=place < LAYERED),
        power=power_table(setting.cases),
        gpu_memory=views.gpu_memory_table(setting.cases),
        on_gpus=tuple(case for case in setting.cases if gpu_memory_of(case)),
        memory=memory_over_step(
            replace(setting, cases=tuple(c for c in top.cases if c in ranking.cases)), prefix, shared.dry_runs
        ),
        scalings=_about(shared.scalings, ranking.cases),
        crossovers=_about(shared.crossovers, ranking.cases),
        losses=_about(shared.losses, ranking.cases),
    )


def _about(found: Iterable[_Shown], cases: Sequence[CaseResult]) -> tuple[_Shown, ...]:
    """Those that show one of these cases."""
    return tuple(one for one in found if any(case in cases for case in one.cases))
