"""How traces, ranks and jobs are called, what their times are means over, and a section of table and sentences."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import PurePath

from refshard.analysis.figures import Breakdown, StepFigures, TraceFigures
from refshard.report.blocks import Block, Notes, Row, Section, table


def cut(name: str, most: int) -> str:
    """At most so many characters: the first ones, and a sign that there are more.

    >>> cut("aten::copy_", 11), cut("aten::copy_", 6)
    ('aten::copy_', 'aten:…')
    """
    return name if len(name) <= most else f"{name[: most - 1]}…"


def cut_middle(name: str, most: int) -> str:
    """At most so many characters: the first and the last ones.

    >>> cut_middle("aten::copy_", 11), cut_middle("aten::copy_", 6)
    ('aten::copy_', 'ate…y_')
    """
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}"


def has_steps(figures: TraceFigures) -> bool:
    """Whether the trace tells steps apart; one that does not has its whole length as its only step, or none."""
    return any(step.step is not None for step in figures.steps)


def each(figures: TraceFigures) -> str:
    """What times of this trace are means over, or of."""
    if figures.windows is not None:
        return "window"
    return "step" if has_steps(figures) else "trace"


def per(figures: TraceFigures) -> str:
    """What a column of times is for, in its head: "per step"; of a trace without steps "in the trace"."""
    return f"in the {each(figures)}" if is_alone(figures) else f"per {each(figures)}"


def in_each(figures: TraceFigures) -> str:
    """The same in a sentence, after a time: "a step", "in the trace"."""
    return f"in the {each(figures)}" if is_alone(figures) else f"a {each(figures)}"


def of_each(figures: TraceFigures) -> str:
    """The same after a share: "a step", "the trace"."""
    return f"{'the' if is_alone(figures) else 'a'} {each(figures)}"


def is_alone(figures: TraceFigures) -> bool:
    """Whether times are of one stretch of time, the trace or the only window, and no means."""
    return not has_steps(figures) or (figures.windows is not None and len(figures.steps) == 1)


_HASH = re.compile(r"-(?=[a-z]*\d)[0-9a-f]{8,40}(?=-|$)")


_RANK = re.compile(r"[-_.]?rank[-_]?\d*$|[-_.]r\d*$", re.IGNORECASE)


def parts(figures: TraceFigures) -> tuple[StepFigures, ...]:
    """The steps; of a trace without steps the whole."""
    return figures.steps or (whole(figures),)


def whole(figures: TraceFigures) -> StepFigures:
    """The whole trace, as if it were one step."""
    return StepFigures(
        step=None, start_ns=0, breakdown=figures.whole, giveway=figures.giveway, copies=figures.copies,
        reduce_wait=figures.reduce_wait,
    )  # fmt: skip


def counted(n: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "step"), counted(3, "step")
    ('1 step', '3 steps')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def count_per(count: int, steps: int) -> str:
    """How many in a step: a whole number where steps are alike."""
    return f"{count // steps:,}" if count % steps == 0 else f"{count / steps:,.1f}"


def who(figures: TraceFigures) -> str:
    """How a trace is called in a sentence."""
    return figures.file if figures.rank is None else f"rank {figures.rank}"


def jobs(figures: Sequence[TraceFigures]) -> dict[int, list[TraceFigures]]:
    """Traces by job, in order."""
    found: dict[int, list[TraceFigures]] = {}
    for one in figures:
        found.setdefault(one.job, []).append(one)
    return dict(sorted(found.items()))


def job_names(figures: Sequence[TraceFigures]) -> dict[int, str]:
    """A name for each job: what its files' names have in common, less what all jobs' have.

    Ranks and hashes are left out, as far as the names stay unique; where they do not, jobs go by number.
    """
    files = {job: [PurePath(one.file) for one in members] for job, members in jobs(figures).items()}
    for of in (lambda file: file.name, lambda file: f"{file.parent.name}/{file.name}", str):
        long = {job: _common([of(file) for file in members]) for job, members in files.items()}
        without = {job: _HASH.sub("", name) for job, name in long.items()}
        for names in (_shorter(without), without, long):
            if "" not in names.values() and len(set(names.values())) == len(names):
                return names
    return {job: f"job {job}" for job in files}


def _common(names: Sequence[str]) -> str:
    """What names of one job have in common, without the rank and what every trace's name ends with."""
    stems = [name.removesuffix(".gz").removesuffix(".json").removesuffix(".pt.trace") for name in names]
    start = stems[0] if len(stems) == 1 else os.path.commonprefix(stems)  # noqa: RUF071 -- of characters
    if any(stem[len(start) :][:1].isdigit() for stem in stems):  # a part of a number, such as of a process, is no name
        start = start.rstrip("0123456789")
    return _RANK.sub("", start).rstrip("-_./")


def _shorter(names: dict[int, str]) -> dict[int, str]:
    """Without the parts that all of several names end with."""
    if len(names) < 2:
        return names
    reverse = [name.split("-")[::-1] for name in names.values()]
    alike = len(os.path.commonprefix(reverse))  # noqa: RUF071 -- of whole parts
    return {job: "-".join(name.split("-")[: -alike or None]) for job, name in names.items()}


def ranks(members: Sequence[TraceFigures]) -> str:
    """How many ranks of a job are here, and what they run on."""
    first = members[0]
    size = first.world_size
    text = "1 rank" if size == 1 else f"{len(members)} of {size} ranks"
    text = counted(len(members), "trace") if size is None else text
    return ", ".join([text, *([first.backend] if first.backend else []), first.device])


def mean(members: Sequence[TraceFigures], of: Callable[[Breakdown], int]) -> float:
    """Nanoseconds that ``of`` gives, over all steps of all these traces."""
    values = [of(part.breakdown) for one in members for part in parts(one)]
    return sum(values) / len(values)


def capital(text: str) -> str:
    """What :func:`who` says, at the start of a sentence."""
    return text[:1].upper() + text[1:] if text.startswith("rank ") else text


def section(
    *, title: str, caption: str, rows: Sequence[Row], sentences: Sequence[str] = (),
    text: Sequence[str] = (), brief: bool = False, shown: int = 10,
) -> Section:  # fmt: skip
    """All ``rows`` have the same keys, the heads of their columns; the first and those in ``text`` hold text, the
    others figures. ``caption`` explains the rows. A terminal shows the first ``shown`` rows of a ``brief`` section, and
    those of others with ``--verbose``.
    """
    blocks: list[Block] = [table(rows, text=text, caption=caption, shown=shown), Notes(sentences=sentences)]
    return Section(title=title, blocks=blocks, where="always" if brief else "detail")
