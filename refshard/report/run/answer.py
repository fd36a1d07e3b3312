"""A run as an answer: its tables, what to know of them, and the verdict last."""

from refshard.analysis.evidence import Evidence, Setting
from refshard.plain import plain
from refshard.report.blocks import Answer, Cell, Column, Marked, Notes, Style, Table, Verdict, Where
from refshard.report.run.columns import names
from refshard.report.run.verdict import (
    Finding,
    caveats,
    findings,
    modelled,
    network,
    overview,
    unfinished,
    unranked,
)
from refshard.report.run.views import as_json, knows_efficiency, summary_table
from refshard.specs.case import REPEATING

_STEP_TIME = "step time (95 % interval)"
_ORDER = ("strategy", "ranks", "state", _STEP_TIME, "peak reserved", "peak memory")
"""Columns that come first; the others follow in the table's order."""
_STATES: dict[str, Style] = {"ok": "plain", "unsupported": "doubtful", "skipped": "doubtful"}


def run_answer(evidence: Evidence, *, more: str = "", status: int = 0) -> Answer:
    """Tables by setting, notes, and the verdict; ``more`` is a last line for people."""
    rows = as_json(evidence)
    found = findings(evidence)
    told = verdict(evidence, found)
    return Answer(
        data={"verdict": told, "notes": _notes(evidence), "cases": rows},
        rows=rows,
        columns=names(),
        blocks=[
            *(
                case_table(setting, where="always" if setting in evidence.ranked else "detail")
                for setting in evidence.settings
            ),
            Notes(sentences=_each(found), title="Each comparison", where="detail"),
            Notes(sentences=[words for one in found for words in (one.busy, one.why) if words], where="detail"),
            Notes(sentences=_notes(evidence)),
            Verdict(sentences=told),
            *([Verdict(sentences=[more], style="plain")] if more else []),
        ],
        status=status,
    )


def case_table(setting: Setting, *, where: Where) -> Table:
    """A row for each case of the setting; a setting of nothing but references is a detail."""
    found = summary_table(setting.cases).map(plain)
    found[_STEP_TIME] = found[_STEP_TIME].str.replace(" (", "\n(", regex=False)
    order = [name for name in _ORDER if name in found] + [name for name in found if name not in _ORDER]
    found = found[order]
    if all(case.fidelity in REPEATING for case in setting.cases):
        found = found.rename(columns={_STEP_TIME: "step time"})
    if knows_efficiency(setting.cases):  # one column more than fits; tokens/s tell the same at one model
        found = found.drop(columns="TFLOPS")
    heads = [str(head).replace(" (", "\n(").replace(" [", "\n[") for head in found.columns]
    columns = [Column(head, "left" if head in ("strategy", "state") else "right") for head in heads]
    place = list(found.columns).index("state")
    rows = [[*row[:place], _state(row[place]), *row[place + 1 :]] for row in found.values.tolist()]
    return Table(columns=columns, rows=rows, title=plain(setting.label), where=where)


def verdict(evidence: Evidence, found: tuple[Finding, ...]) -> list[str]:
    """Who is fastest, by how much, and who needs least memory; of many comparisons, how often who leads."""
    if told := overview(found):
        return [*unfinished(evidence), *told]
    several = len(found) > 1
    sentences = [(one.title, " ".join(filter(None, (one.speed, one.margin, one.memory)))) for one in found]
    return [*unfinished(evidence), *(f"{title}: {words}" if several else words for title, words in sentences if words)]


def _each(found: tuple[Finding, ...]) -> list[str]:
    """Every comparison on its own, where the verdict only counts them."""
    if not overview(found):
        return []
    return [f"{one.title}: {' '.join(filter(None, (one.speed, one.margin, one.memory)))}" for one in found]


def _notes(evidence: Evidence) -> list[str]:
    parts = (network(evidence), modelled(evidence), unranked(evidence), caveats(evidence))
    return [plain(sentence) for part in parts for sentence in part]


def _state(state: str) -> Cell:
    style = _STATES.get(state, "bad")
    return state if style == "plain" else Marked(state, style)
