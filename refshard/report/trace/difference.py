"""How the steps of two jobs differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from refshard.analysis.analyse import Analysis
from refshard.analysis.attribution import IDLE
from refshard.analysis.difference import Change, Difference, Unlike
from refshard.quantities import format_ns, format_percent
from refshard.report.blocks import Answer, Block, Cover, Notes, Row, Section, Table, Text, Verdict, table
from refshard.report.trace.sides import side_by_side
from refshard.report.trace.text import counted, cut, ns

_SHOWN_CHANGES, _SHOWN_RANKS, _MOST_CHANGES = 25, 8, 400
_LONGEST_LABEL, _LONGEST_KERNEL = 80, 40
_CLASSES = {"comm": "communication", "prep": "preparation"}
_PHASES = ("forward", "backward", "optimizer", "")
_SMALL_CLASS = 0.05
"""Classes under this share of the largest one are not in the verdict."""
_SMALL = 0.01
"""Less than this share of a step is not worth a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A difference of two jobs, ``names`` and ``steps`` (how many) of each, and what makes it uncertain.

    ``unlike`` lists how the jobs are not like for like. ``interval`` bounds the change in nanoseconds given the scatter
    of steps (95 %); None with too few steps. ``sides`` are the traces of each, for a page.
    """

    names: tuple[str, str]
    steps: tuple[int, int]
    difference: Difference
    interval: tuple[float, float] | None = None
    warnings: Sequence[str] = ()
    unlike: Sequence[Unlike] = ()
    sides: tuple[Sequence[Analysis], Sequence[Analysis]] = ((), ())

    @property
    def is_noise(self) -> bool:
        """Whether steps of one side scatter by more than the sides differ."""
        return self.interval is not None and self.interval[0] <= 0 <= self.interval[1]


def difference_answer(found: Compared, more: str = "") -> Answer:
    """What accounts for the change in step time: by class, and then in detail, each adding up to the whole.

    ``more`` is printed below the verdict.
    """
    whole, lead = found.difference, verdict(found)
    data = {
        "verdict": lead,
        "unlike": msgspec.to_builtins(found.unlike),
        "interval_ns": found.interval,
        **msgspec.to_builtins(whole),
    }
    ranks = f", mean of {len(whole.ranks)} ranks" if len(whole.ranks) > 1 else ""
    sides = [
        f"{name}: {path}, {counted(steps, 'step')} of {format_ns(mean)}{ranks}"
        for name, path, steps, mean in zip("AB", found.names, found.steps, (whole.a_ns, whole.b_ns))
    ]
    blocks: list[Block] = [Text(text="\n".join(sides)), Notes(sentences=not_alike(found))]
    both = side_by_side(("A", "B"), found.sides) if all(found.sides) else []
    if any(change.delta_ns for change in whole.changes):
        every = by_work(whole, _MOST_CHANGES, where="page")
        folded = [Section(title="All changes", blocks=[every], folded=True, where="page")]
        changes: list[Block] = [by_work(whole, _SHOWN_CHANGES), *(folded if len(every.rows) > _SHOWN_CHANGES else [])]
        blocks += [
            *both[:2], by_class(whole),
            Section(title="Largest changes", id="changes", nav="Changes", blocks=changes, heading=False),
            *by_rank(whole), Notes(sentences=remarks(found)),
        ]  # fmt: skip
    blocks += both[2:]
    blocks += [Verdict(sentences=lead), *([Text(text=more, where="terminal")] if more else [])]
    rows = [flat(change) for change in whole.changes]
    return Answer(data=data, rows=rows, blocks=blocks, cover=Cover(title="Difference of two jobs"))


def flat(change: Change) -> dict[str, Any]:
    """A change without nested values."""
    built: dict[str, Any] = msgspec.to_builtins(change)
    work = built.pop("work")
    kernels = {side: "; ".join(built.pop(side)) for side in ("a_kernels", "b_kernels")}
    return {**built, **{key: value for key, value in work.items() if key != "kind"}, **kernels}


def _unlike(named: Sequence[str]) -> list[str]:
    *first, last = named or [""]
    text = f"{', '.join(first)} and {last}" if first else last
    return [f"Not like for like: A and B differ in {text}."] if named else []


def not_alike(found: Compared) -> list[str]:
    """How A and B are not like for like, with the values of each."""
    return _unlike([
        f"{one.what} ({'for example ' if one.what in ('batch size', 'input shapes') else ''}"
        f"{cut(one.a, _LONGEST_LABEL, middle=True)} and {cut(one.b, _LONGEST_LABEL, middle=True)})"
        for one in found.unlike
    ])  # fmt: skip


def verdict(found: Compared) -> list[str]:
    """Whether A and B are like for like, how much longer B's step is, which classes account for it, and chance."""
    whole = found.difference
    sentences = _unlike([one.what for one in found.unlike])
    if not any(change.delta_ns for change in whole.changes):
        return [*sentences, "No difference."]
    deltas = sorted(((name, b - a) for name, (a, b) in class_sums(whole).items()), key=lambda pair: -abs(pair[1]))
    named = [(name, delta) for name, delta in deltas if abs(delta) >= _SMALL_CLASS * abs(deltas[0][1])]
    cancels = any(delta * whole.delta_ns <= 0 for _, delta in named)  # shares over 100 % or below 0 would confuse
    known = [
        f"{name} {signed(delta)}" + ("" if cancels else f" ({format_percent(delta / whole.delta_ns, 0)}{of})")
        for (name, delta), of in zip(named, (" of the change", *[""] * len(named)))
    ]
    share = f" ({format_percent(abs(whole.delta_ns) / whole.a_ns)})" if whole.a_ns else ""
    more = "more" if whole.delta_ns > 0 else "less"
    takes = f"{format_ns(abs(whole.delta_ns))}{share} {more} per step than A" if whole.delta_ns else "as long as A"
    largest = whole.changes[0]
    sentences.append(f"B takes {takes}: {', '.join(known)}.")
    sentences.append(f"The largest single change is {_label(largest)}, {signed(largest.delta_ns)}.")
    if found.is_noise and found.interval is not None:
        low, high = map(signed, found.interval)
        sentences.append(f"The change is within step-to-step variation (95 % interval over steps {low} to {high}).")
    return sentences


def remarks(found: Compared) -> list[str]:
    """How sure the change is, how it differs between ranks, and how much work could not be matched."""
    sentences, whole = [], found.difference
    if found.interval is None:
        sentences.append(
            "Fewer than 3 steps on a side: whether the change is more than step-to-step variation is unknown."
        )
    elif not found.is_noise:
        low, high = map(signed, found.interval)
        sentences.append(f"95 % interval of the change over steps: {low} to {high}. Another recording may differ more.")
    ranks = sorted(whole.ranks, key=lambda one: abs(one.delta_ns))
    if len(ranks) > 1 and ranks[-1].delta_ns:
        least, most = (f"rank {one.rank} ({signed(one.delta_ns)})" for one in (ranks[0], ranks[-1]))
        sentences.append(f"{len(ranks)} ranks: {most} changed most and {least} least.")
    ran = [change for change in whole.changes if change.kind != IDLE]
    nameless = [change for change in ran if change.work.by_name and change.kind != "comm"]
    for a_ns, b_ns, text in (
        (sum(c.a_ns for c in ran if c.gone), sum(c.b_ns for c in ran if c.new),
         "Only on one side: {} of A and {} of B. Operators were added, removed, fused or replaced."),
        (sum(c.a_ns for c in nameless), sum(c.b_ns for c in nameless),
         "Operators unknown for {} of A and {} of B: their kernels are matched by name, without template arguments and "
         "tile sizes."),
    ):  # fmt: skip
        if max(a_ns, b_ns) > _SMALL * max(whole.a_ns, whole.b_ns):
            sentences.append(text.format(format_ns(a_ns), format_ns(b_ns)))
    return [*sentences, *found.warnings]


def class_sums(difference: Difference) -> dict[str, tuple[float, float]]:
    """Nanoseconds per step of A and of B by class; they add up to the steps."""
    found: dict[str, tuple[float, float]] = {}
    for change in difference.changes:
        name = _CLASSES.get(change.kind, change.kind)
        a, b = found.get(name, (0.0, 0.0))
        found[name] = (a + change.a_ns, b + change.b_ns)
    return found


def _sides(a_ns: float, b_ns: float) -> Row:
    return {"A": ns(a_ns), "B": ns(b_ns), "B - A": signed(b_ns - a_ns)}


def _sum(changes: Sequence[Change]) -> Row:
    return _sides(sum(one.a_ns for one in changes), sum(one.b_ns for one in changes))


def by_class(difference: Difference) -> Table:
    """A row per class, of compute also one per phase, and the step."""
    rows: list[Row] = []
    for kind in dict.fromkeys(change.kind for change in difference.changes):
        members = [change for change in difference.changes if change.kind == kind]
        rows.append({"class": _CLASSES.get(kind, kind), **_sum(members)})
        phases = sorted({change.work.phase or "" for change in members}, key=_PHASES.index)
        for phase in phases if kind == "compute" and len(phases) > 1 else ():
            mine = [change for change in members if (change.work.phase or "") == phase]
            rows.append({"class": f"- {phase or 'other'}", **_sum(mine)})
    rows.append({"class": "step", **_sides(difference.a_ns, difference.b_ns)})
    title = "Per step; overlapping time counts once: as compute if any runs, as communication only if exposed"
    return table(rows, title=title)


def by_work(difference: Difference, shown: int, where: Any = "always") -> Table:
    """The largest changes, the sum of the others, and the step; for several ranks, the one that changed most."""
    rows: list[Row] = []
    for one in difference.changes[:shown]:
        most = "" if one.most_ns is None else f"{signed(one.most_ns)}, {one.most_rank}"
        names = [kernels[0].removeprefix("void ") for kernels in (one.a_kernels, one.b_kernels) if kernels]
        kernels = " -> ".join(dict.fromkeys(cut(name, _LONGEST_KERNEL, middle=True) for name in names))
        if one.delta_ns:
            rows.append(_work(_label(one), _CLASSES.get(one.kind, one.kind), _sum([one]), most, kernels))
    if rest := difference.changes[shown:]:
        rows.append(_work(f"{len(rest)} others", "", _sum(rest)))
    rows.append(_work("step", "", _sides(difference.a_ns, difference.b_ns)))
    if len(difference.ranks) < 2:
        rows = [{key: cell for key, cell in row.items() if key != "most, on rank"} for row in rows]
    caption = "Largest changes first; they add up to the change of the step"
    return table(rows, left=2, text=("kernels",), caption=caption, where=where)


def _work(what: str, kind: str, sides: Row, most: str = "", kernels: str = "") -> Row:
    return {"what": what, "class": kind, **sides, "most, on rank": most, "kernels": kernels}


def by_rank(difference: Difference) -> list[Table]:
    """The ranks, largest change first; none if there is one rank."""
    ranks = sorted(difference.ranks, key=lambda one: -abs(one.delta_ns))
    rows = [{"rank": str(one.rank), **_sides(one.a_ns, one.b_ns)} for one in ranks]
    title = "Mean step by rank, those that changed most first"
    return [table(rows, title=title, shown=_SHOWN_RANKS)] if len(ranks) > 1 else []


def signed(delta_ns: float) -> str:
    """Nanoseconds with their sign."""
    return f"{'+' if delta_ns > 0 else ''}{format_ns(delta_ns)}"


def _label(change: Change) -> str:
    """A label cut in its middle, marked if it is new or gone."""
    mark = ""
    if change.kind != IDLE:  # idle time before an operator comes and goes with the operator's speed
        mark = " [new]" if change.new else " [gone]" if change.gone else ""
    return cut(change.label, _LONGEST_LABEL - len(mark), middle=True) + mark
