"""How traces, ranks and jobs are called, which time base their figures have, and the cells of their tables."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import PurePath

from refshard.analysis.figures import Breakdown, Cause, StepFigures, TraceFigures
from refshard.report.blocks import Block, Notes, Quantity, Row, Section, Where, table, without_empty

IDLE = {
    Cause.LAUNCH: "idle, launch-bound",
    Cause.CALL: "idle, blocked call",
    Cause.BACK_TO_BACK: "idle, back to back",
    Cause.DEPENDENCY: "idle, waiting for a stream",
    Cause.UNKNOWN: "idle, cause unknown",
}
"""The parts of a step in which nothing runs, in charts and tables."""
ON_CPU = "idle, between operators"
"""What launch-bound is called on a CPU: nothing is launched there, the thread does something else."""
HOST_WORK: dict[str, str] = {
    "python": "Python outside of operators", "annotations": "annotated code", "autograd": "autograd and its hooks",
    "modes": "dispatch modes in Python (such as selective checkpointing's)", "operators": "operators",
    "subclasses": "tensor subclasses in Python (such as DTensor)", "launches": "launch calls",
    "waits": "waiting for the GPU", "calls": "other driver calls",
}  # fmt: skip


def cut(name: str, most: int, *, middle: bool = False) -> str:
    """At most ``most`` characters of a name: the first ones, or the first and the last.

    >>> cut("aten::copy_", 11), cut("aten::copy_", 6), cut("aten::copy_", 6, middle=True)
    ('aten::copy_', 'aten:…', 'ate…y_')
    """
    tail = most - most // 2 - 1 if middle else 0
    return name if len(name) <= most else f"{name[: most - 1 - tail]}…{name[len(name) - tail :]}"


def counted(n: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "step"), counted(3, "step")
    ('1 step', '3 steps')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def count_per(count: int, steps: int) -> str:
    """The mean count in a step: a whole number where it is one."""
    return f"{count // steps:,}" if count % steps == 0 else f"{count / steps:,.1f}"


def ns(total: float | None, steps: int = 1) -> Quantity | None:
    """A cell with nanoseconds of one of ``steps`` steps."""
    return None if total is None else Quantity(total / steps, "ns")


def share(part: float | None, digits: int = 1) -> Quantity | None:
    """A cell with a percentage."""
    return None if part is None else Quantity(part, "share", digits)


def rate(value: float | None, unit: float) -> Quantity | None:
    """A cell with a plain number of so large units."""
    return None if value is None else Quantity(value / unit, "rate")


def idle_names(figures: TraceFigures) -> dict[Cause, str]:
    """:data:`IDLE` for the device of a trace."""
    return {**IDLE, Cause.LAUNCH: ON_CPU} if figures.device == "cpu" else IDLE


def has_steps(figures: TraceFigures) -> bool:
    """Whether the trace has steps; one that has none holds its whole length as its only step, or nothing."""
    return any(step.step is not None for step in figures.steps)


def parts(figures: TraceFigures) -> tuple[StepFigures, ...]:
    """The steps; the whole of a trace without steps."""
    return figures.steps or (whole(figures),)


def whole(figures: TraceFigures) -> StepFigures:
    """The whole trace, as if it were one step."""
    return StepFigures(
        step=None, start_ns=0, breakdown=figures.whole, giveway=figures.giveway, copies=figures.copies,
        reduce_wait=figures.reduce_wait,
    )  # fmt: skip


def mean(members: Sequence[TraceFigures], of: Callable[[Breakdown], int]) -> float:
    """Mean nanoseconds over all steps of all these traces."""
    values = [of(part.breakdown) for one in members for part in parts(one)]
    return sum(values) / len(values)


def each(figures: TraceFigures) -> str:
    """The time base: what times of this trace are means over."""
    if figures.windows is not None:
        return "window"
    return "step" if has_steps(figures) else "trace"


def is_alone(figures: TraceFigures) -> bool:
    """Whether times cover one stretch, the trace or the only window, and are no means."""
    return not has_steps(figures) or (figures.windows is not None and len(figures.steps) == 1)


def per(figures: TraceFigures) -> str:
    """The time base in the head of a column: "per step", "in the trace"."""
    return f"in the {each(figures)}" if is_alone(figures) else f"per {each(figures)}"


def in_each(figures: TraceFigures) -> str:
    """The time base after a time in a sentence: "a step", "in the trace"."""
    return f"in the {each(figures)}" if is_alone(figures) else f"a {each(figures)}"


def of_each(figures: TraceFigures) -> str:
    """The time base after a share: "a step", "the trace"."""
    return f"{'the' if is_alone(figures) else 'a'} {each(figures)}"


def who(figures: TraceFigures) -> str:
    """How a sentence calls a trace."""
    return figures.file if figures.rank is None else f"rank {figures.rank}"


def jobs(figures: Sequence[TraceFigures]) -> dict[int, list[TraceFigures]]:
    """Traces by job, in order."""
    found: dict[int, list[TraceFigures]] = {}
    for one in figures:
        found.setdefault(one.job, []).append(one)
    return dict(sorted(found.items()))


_HASH = re.compile(r"-(?=[a-z]*\d)[0-9a-f]{8,40}(?=-|$)")
_RANK = re.compile(r"[-_.]?rank[-_]?\d*$|[-_.]r\d*$", re.IGNORECASE)


def job_names(figures: Sequence[TraceFigures]) -> dict[int, str]:
    """A name for each job: what the names of its files have in common, without what those of all jobs share.

    Ranks and hashes are left out if the names stay unique. Jobs without unique names go by number.
    """
    files = {job: [PurePath(one.file) for one in members] for job, members in jobs(figures).items()}
    for of in (lambda file: file.name, lambda file: f"{file.parent.name}/{file.name}", str):
        long = {job: _common([of(file) for file in members]) for job, members in files.items()}
        without = {job: _HASH.sub("", name) for job, name in long.items()}
        parts = {job: name.split("-") for job, name in without.items()}
        alike = len(os.path.commonprefix([one[::-1] for one in parts.values()])) if len(parts) > 1 else 0  # noqa: RUF071
        shorter = {job: "-".join(one[: -alike or None]) for job, one in parts.items()}
        for names in (shorter, without, long):
            if "" not in names.values() and len(set(names.values())) == len(names):
                return names
    return {job: f"job {job}" for job in files}


def _common(names: Sequence[str]) -> str:
    """What the names of one job's files begin with, without the rank and the suffixes of traces."""
    stems = [name.removesuffix(".gz").removesuffix(".json").removesuffix(".pt.trace") for name in names]
    start = stems[0] if len(stems) == 1 else os.path.commonprefix(stems)  # noqa: RUF071 -- of characters
    if any(stem[len(start) :][:1].isdigit() for stem in stems):  # half a number, such as a process's, is no name
        start = start.rstrip("0123456789")
    return _RANK.sub("", start).rstrip("-_./")


def section(
    title: str, rows: Sequence[Row], caption: str = "", sentences: Sequence[str] = (), *, text: Sequence[str] = (),
    where: Where = "detail", shown: int | None = 10,
) -> Section | None:  # fmt: skip
    """A table and sentences; None without any. Columns without values are left out.

    All rows have the same keys, the heads of their columns; the first column and those in ``text`` hold text.
    A terminal shows the first ``shown`` rows.
    """
    if not rows and not sentences:
        return None
    cells = without_empty(rows, list(rows[0])) if rows else []
    blocks: list[Block] = [table(cells, text=text, caption=caption, shown=shown), Notes(sentences=sentences)]
    return Section(title=title, blocks=blocks, where=where, folded=where == "page")
