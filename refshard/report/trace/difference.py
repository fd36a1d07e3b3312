"""How two jobs' steps differ, in a terminal, on a page and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from refshard.analysis.attribution import IDLE
from refshard.analysis.difference import Change, Difference, Unlike
from refshard.quantities import format_ns, format_percent
from refshard.report.blocks import Answer, Block, Charts, Column, Cover, Notes, Table, Text, Verdict
from refshard.report.trace.wording import counted, cut_middle

if TYPE_CHECKING:
    from refshard.report.draw.charts import Chart

_SHOWN_CHANGES, _SHOWN_RANKS, _MOST_CHANGES = 25, 8, 400
_LONGEST_LABEL, _LONGEST_KERNEL = 80, 40
_CLASSES = {"comm": "communication", "prep": "preparation"}
_SMALL = 0.05
"""Classes under this share of the largest one are not in the verdict."""
_TELLING = 0.01
"""Less of a step than this is not worth a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A difference of two jobs, ``names`` and ``steps`` (how many) of each, and what makes it uncertain.

    ``unlike`` says in what the jobs are not like for like.

    ``interval`` bounds the change in nanoseconds as far as the scatter of steps leaves it open (95 %); None where there
    are too few.
    """

    names: tuple[str, str]
    steps: tuple[int, int]
    difference: Difference
    interval: tuple[float, float] | None = None
    warnings: Sequence[str] = ()
    unlike: Sequence[Unlike] = ()

    @property
    def is_noise(self) -> bool:
        """Whether steps of one side scatter by more than the sides differ."""
        return self.interval is not None and self.interval[0] <= 0 <= self.interval[1]


def difference_answer(found: Compared, more: str = "") -> Answer:
    """What accounts for the change in step time: by class, and then in detail, each adding up to the whole.

    ``more`` is printed below the verdict.
    """
    changes, lead = found.difference.changes, verdict(found)
    data = {
        "verdict": lead,
        "unlike": msgspec.to_builtins(found.unlike),
        "interval_ns": found.interval,
        **msgspec.to_builtins(found.difference),
    }
    rows = [_flat(change) for change in changes]
    blocks: list[Block] = [Text(text="\n".join(sides(found))), Notes(sentences=not_alike(found))]
    if any(change.delta_ns for change in changes):
        blocks += [
            Charts(draw=lambda: [_bars(found)]), by_class(found.difference),
            replace(by_work(found.difference, _SHOWN_CHANGES), where="terminal"),
            replace(by_work(found.difference, _MOST_CHANGES), where="page"),
            *by_rank(found.difference), Notes(sentences=remarks(found)),
        ]  # fmt: skip
    blocks += [Verdict(sentences=lead), *([Text(text=more, where="terminal")] if more else [])]
    return Answer(data=data, rows=rows, blocks=blocks, cover=Cover(title="Difference of two jobs"))


def _bars(found: Compared) -> "Chart":
    """The mean step of each side, cut into classes that add up to it."""
    from refshard.report.draw.charts import Bar, Row, chart, stacked  # plotly takes a second to import
    from refshard.report.draw.palette import GREY, STEP, Look

    looks = {
        "compute": STEP["compute alone"], "communication": STEP["exposed communication"],
        "preparation": STEP["compute over communication"], "copy": STEP["copy, preparation, other"],
        "unclassified": Look(GREY, "+"), "idle": STEP["idle"],
    }  # fmt: skip
    bars = [
        Bar(place=place, name=name, parts={part: ns[place] / 1e9 for part, ns in class_sums(found.difference).items()})
        for place, name in enumerate("AB")
    ]
    figure = stacked([Row(text=bar.name) for bar in bars], bars, looks, "s", "of the mean step")
    whole = found.difference
    return chart("sides", "Both steps", figure, f"Mean steps: A {format_ns(whole.a_ns)}, B {format_ns(whole.b_ns)}.")


def sides(found: Compared) -> list[str]:
    """What A and B are."""
    ns = (found.difference.a_ns, found.difference.b_ns)
    ranks = f", mean of {len(found.difference.ranks)} ranks" if len(found.difference.ranks) > 1 else ""
    return [
        f"{name}: {path}, {counted(steps, 'step')} of {format_ns(mean)}{ranks}"
        for name, path, steps, mean in zip("AB", found.names, found.steps, ns)
    ]


def not_alike(found: Compared) -> list[str]:
    """In what A and B are not like for like, with what each is; no sentence where they are."""
    if not found.unlike:
        return []
    named = [
        f"{one.what} ({'for example ' if one.what in _OF_SHAPES else ''}{cut_middle(one.a, _LONGEST_LABEL)} and "
        f"{cut_middle(one.b, _LONGEST_LABEL)})"
        for one in found.unlike
    ]
    return [f"{_NOT_ALIKE} {_listed(named)}."]


def verdict(found: Compared) -> list[str]:
    """Whether A and B are like for like, and what accounts for the change."""
    named = [one.what for one in found.unlike]
    return [*([f"{_NOT_ALIKE} {_listed(named)}."] if named else []), *claims(found)]


_NOT_ALIKE = "Not like for like: A and B differ in"
_OF_SHAPES = ("batch size", "input shapes")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def claims(found: Compared) -> list[str]:
    """How much longer B's step is, which classes make the change up, and whether it could be chance."""
    whole, changes = found.difference, found.difference.changes
    if not any(change.delta_ns for change in changes):
        return ["No difference."]
    parts = sorted(((name, b - a) for name, (a, b) in class_sums(whole).items()), key=lambda part: -abs(part[1]))
    largest = abs(parts[0][1])
    named = [(name, ns) for name, ns in parts if abs(ns) >= _SMALL * largest]
    cancels = any(ns * whole.delta_ns <= 0 for _, ns in named)  # shares over 100 % or below 0 need a second reading
    share = f" ({format_percent(abs(whole.delta_ns) / whole.a_ns)})" if whole.a_ns else ""
    more = "more" if whole.delta_ns > 0 else "less"
    known = [
        f"{name} {signed(ns)}" + ("" if cancels else f" ({format_percent(ns / whole.delta_ns, 0)}{of})")
        for place, (name, ns) in enumerate(named)
        for of in ("" if place else " of the change",)
    ]
    takes = f"{format_ns(abs(whole.delta_ns))}{share} {more} per step than A" if whole.delta_ns else "as long as A"
    sentences = [f"B takes {takes}: {', '.join(known)}."]
    sentences.append(f"The largest single change is {_cut(changes[0])}, {signed(changes[0].delta_ns)}.")
    if found.is_noise and found.interval is not None:
        low, high = map(signed, found.interval)
        sentences.append(f"The change is within step-to-step variation (95 % interval over steps {low} to {high}).")
    return sentences


def remarks(found: Compared) -> list[str]:
    """How sure the change is, how it spreads over ranks, and by what works were matched."""
    sentences = []
    if found.interval is None:
        sentences.append(
            "Fewer than 3 steps on a side: whether the change is more than step-to-step variation is unknown."
        )
    elif not found.is_noise:
        low, high = map(signed, found.interval)
        sentences.append(f"95 % interval of the change over steps: {low} to {high}. Another recording may differ more.")
    ranks = sorted(found.difference.ranks, key=lambda one: abs(one.delta_ns))
    if len(ranks) > 1 and ranks[-1].delta_ns:
        least, most = (f"rank {one.rank}" + f" ({signed(one.delta_ns)})" for one in (ranks[0], ranks[-1]))
        sentences.append(f"Of {len(ranks)} ranks, {most} changed most and {least} least.")
    return [*sentences, *_unmatched(found.difference), *found.warnings]


def _unmatched(difference: Difference) -> list[str]:
    """How much time is of operators that only one side calls, and how much of kernels without an operator."""
    sentences = []
    ran = [change for change in difference.changes if change.kind != IDLE]
    alone = [sum(c.a_ns for c in ran if c.gone), sum(c.b_ns for c in ran if c.new)]
    if max(alone) > _TELLING * max(difference.a_ns, difference.b_ns):
        a, b = map(format_ns, alone)
        sentences.append(f"Only on one side: {a} of A and {b} of B. Operators were added, removed, fused or replaced.")
    nameless = [sum(getattr(c, side) for c in ran if c.work.by_name and c.kind != "comm") for side in ("a_ns", "b_ns")]
    if max(nameless) > _TELLING * max(difference.a_ns, difference.b_ns):
        a, b = map(format_ns, nameless)
        sentences.append(
            f"Operators unknown for {a} of A and {b} of B: their kernels are matched by name, without template "
            "arguments and tile sizes."
        )
    return sentences


def by_class(difference: Difference) -> Table:
    """A row per class, of compute also one per phase, and the step."""
    rows = []
    for kind in dict.fromkeys(change.kind for change in difference.changes):
        members = [change for change in difference.changes if change.kind == kind]
        rows.append(_sum_row(_CLASSES.get(kind, kind), members))
        phases = sorted({change.work.phase or "" for change in members}, key=_ORDER.index)
        if kind == "compute" and len(phases) > 1:
            for phase in phases:
                mine = [change for change in members if (change.work.phase or "") == phase]
                rows.append(_sum_row(f"- {phase or 'other'}", mine))
    rows.append(_row("step", difference.a_ns, difference.b_ns))
    title = "Per step; overlapping time counts once: as compute if any runs, as communication only if exposed"
    return _table(("class",), rows, title)


_ORDER = ("forward", "backward", "optimizer", "")


def by_work(difference: Difference, shown: int) -> Table:
    """The largest changes, the sum of the others, and the step; of several ranks, the one that changed most."""
    listed = [change for change in difference.changes[:shown] if change.delta_ns]
    rows = [_row(_cut(c), c.a_ns, c.b_ns, _CLASSES.get(c.kind, c.kind)) for c in listed]
    most = ["" if c.most_ns is None else f"{signed(c.most_ns)}, {c.most_rank}" for c in listed]
    more = [[name, _kernels(c)] for name, c in zip(most, listed)]
    if rest := difference.changes[shown:]:
        rows.append(_sum_row(f"{len(rest)} others", rest, ""))
    rows.append(_row("step", difference.a_ns, difference.b_ns, ""))
    several = len(difference.ranks) > 1
    heads = [*([Column("most, on rank")] if several else []), Column("kernels", "left")]
    cells = [found[not several :] for found in (*more, *[["", ""]] * (len(rows) - len(more)))]
    built = _table(("what", "class"), [[*row, *cell] for row, cell in zip(rows, cells)], "")
    caption = "Largest changes first; they add up to the change of the step"
    return replace(built, columns=[*built.columns, *heads], caption=caption)


def by_rank(difference: Difference) -> list[Table]:
    """The ranks, those that changed most first; none if there is one rank."""
    ranks = sorted(difference.ranks, key=lambda one: -abs(one.delta_ns))
    rows = [_row(str(one.rank), one.a_ns, one.b_ns) for one in ranks]
    title = "Mean step by rank, those that changed most first"
    return [replace(_table(("rank",), rows, title), shown=_SHOWN_RANKS)] if len(ranks) > 1 else []


def class_sums(difference: Difference) -> dict[str, tuple[float, float]]:
    """Nanoseconds per step of A and of B by class; they add up to the steps."""
    found: dict[str, tuple[float, float]] = {}
    for change in difference.changes:
        name = _CLASSES.get(change.kind, change.kind)
        a, b = found.get(name, (0.0, 0.0))
        found[name] = (a + change.a_ns, b + change.b_ns)
    return found


def _table(names: tuple[str, ...], rows: Sequence[Sequence[str]], title: str) -> Table:
    columns = [*(Column(name, "left") for name in names), Column("A"), Column("B"), Column("B - A")]
    return Table(columns=columns, rows=rows, title=title)


def _sum_row(label: str, changes: Sequence[Change], *more: str) -> list[str]:
    return _row(label, sum(c.a_ns for c in changes), sum(c.b_ns for c in changes), *more)


def _row(label: str, a_ns: float, b_ns: float, *more: str) -> list[str]:
    return [label, *more, format_ns(a_ns), format_ns(b_ns), signed(b_ns - a_ns)]


def signed(ns: float) -> str:
    """Nanoseconds with their sign."""
    return f"{'+' if ns > 0 else ''}{format_ns(ns)}"


def _cut(change: Change) -> str:
    """A label cut in its middle, and what is new or gone."""
    mark = ""
    if change.kind != IDLE:  # idle time before an operator comes and goes with the operator's speed
        mark = " [new]" if change.new else " [gone]" if change.gone else ""
    return cut_middle(change.label, _LONGEST_LABEL - len(mark)) + mark


def _kernels(change: Change) -> str:
    """The longest kernel of each side; one of the same name once."""
    names = [kernels[0].removeprefix("void ") for kernels in (change.a_kernels, change.b_kernels) if kernels]
    return " -> ".join(dict.fromkeys(cut_middle(name, _LONGEST_KERNEL) for name in names))


def _flat(change: Change) -> dict[str, Any]:
    """A change without what is nested in it."""
    built: dict[str, Any] = msgspec.to_builtins(change)
    work = built.pop("work")
    kernels = {side: "; ".join(built.pop(side)) for side in ("a_kernels", "b_kernels")}
    return {**built, **{key: value for key, value in work.items() if key != "kind"}, **kernels}
