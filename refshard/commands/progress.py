"""A run's progress on standard error: on a terminal a bar over its launches, elsewhere a line a launch."""

import logging
import re
import sys
import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from refshard.commands.printing import LOG
from refshard.measure.run import Observer
from refshard.plain import plain
from refshard.quantities import format_duration, format_rate, format_seconds
from refshard.records import LaunchRecord
from refshard.specs.case import Case

_STEP = re.compile(r"(?P<phase>.+) (?P<step>\d+)/\d+")
_WIDTHS = (0, len("warm-up 10/10"), len("0.123 steps/s"), len("about 12 min 34 s left"))
"""Column widths of launches, step, rate and remaining time, so that nothing jumps between updates."""
_REFRESHES_PER_S = 2  # the ranks need the cores


class Course:
    """Progress of a run, from its observer's events; ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.label, self.at = "", ""
        self.index, self.total = 0, 0
        self._took_s: list[float] = []
        self._started_s = clock()
        self._phase = ""
        self._first = self._last = (0, 0.0)

    def start(self, case: Case, round_: int, index: int, total: int) -> None:
        """The launch number ``index`` (from 0) of ``total`` starts."""
        self.label, self.index, self.total = _label(case, round_), index, total
        self._started_s = self._clock()
        self.progress("starting")

    def progress(self, text: str) -> None:
        """Rank 0 is at ``text``: a phase, and which of its steps as a rule."""
        self.at = text
        found = _STEP.fullmatch(text)
        self._last = (int(found["step"]) if found else 0, self._clock())
        if found is None or found["phase"] != self._phase:
            self._phase, self._first = found["phase"] if found else "", self._last

    def end(self) -> float:
        """The launch ended; return the seconds that it took."""
        self._took_s.append(self._clock() - self._started_s)
        self.index, self.label, self.at = self.index + 1, "", ""
        return self._took_s[-1]

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second of the phase that rank 0 is in; None until it has gone from one step to another."""
        (step, since), (later, now) = self._first, self._last
        return (later - step) / (now - since) if later > step and now > since else None

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the end if what is left takes as long as what has ended took on average; None before that, and
        at the end.
        """
        left = self.total - self.index
        if not self._took_s or not left:
            return None
        mean = sum(self._took_s) / len(self._took_s)
        running = max(0.0, mean - (self._clock() - self._started_s)) if self.at else mean
        return mean * (left - 1) + running


class Lines(Observer):
    """One line a launch, for logs and pipes. Use it as a context."""

    def __init__(self, course: Course | None = None) -> None:
        self._course = course or Course()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing is held."""

    def case_started(self, case: Case, round_: int, index: int, total: int) -> None:
        self._course.start(case, round_, index, total)

    def case_progressed(self, text: str) -> None:
        """A log needs no steps; but what is waited for."""
        if text and _STEP.fullmatch(text) is None:  # it may be read while it is written
            print(f"  {text}", file=sys.stderr, flush=True)

    def case_ended(self, record: LaunchRecord) -> None:
        course, took_s = self._course, self._course.end()
        step_time = _step_time_s(record)
        text = plain(record.error or "") if step_time is None else f"step time {format_seconds(step_time)}"
        left = f", {_left(course)}" if course.index < course.total else ""
        print(
            f"[{course.index}/{course.total}] {record.state:<8} {_label(record.case, record.round)}: {text}  "
            f"(took {format_seconds(took_s)}{left})",
            file=sys.stderr,
            flush=True,
        )


class Bars(Observer):
    """Two lines that stay at the bottom: what is launched, and how far the run is; above them, a line a launch."""

    def __init__(self, console: Console | None = None, course: Course | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._course = course or Course()
        self._live = Live(
            # An echoed ^C still fits into the last line; were that one broken, the two could not be erased.
            get_renderable=lambda: bars(self._course, self._console.width - len("^C")),
            console=self._console,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
        )

    def __enter__(self) -> "Bars":
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def case_started(self, case: Case, round_: int, index: int, total: int) -> None:
        self._course.start(case, round_, index, total)
        self._live.refresh()

    def case_progressed(self, text: str) -> None:
        self._course.progress(text)

    def case_ended(self, record: LaunchRecord) -> None:
        self._course.end()
        self._console.print(ended(record, self._course))


class Nothing(Observer):
    """Shows nothing, for ``--quiet``. Use it as a context."""

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing is held."""

    def case_started(self, case: Case, round_: int, index: int, total: int) -> None:
        """See :class:`Observer`."""

    def case_progressed(self, text: str) -> None:
        """See :class:`Observer`."""

    def case_ended(self, record: LaunchRecord) -> None:
        """See :class:`Observer`."""


def observer() -> Bars | Lines | Nothing:
    """What shows progress: bars on a terminal, lines elsewhere, nothing if ``--quiet``. Use it as a context."""
    if not LOG.isEnabledFor(logging.INFO):
        return Nothing()
    return Bars() if sys.stderr.isatty() else Lines()


def bars(course: Course, width: int) -> RenderableType:
    """What stays at the bottom: the running case; and in ``width`` columns launches, rank 0's step, steps per second
    and remaining time.
    """
    if not course.total:
        return Text("")
    rate = course.steps_per_s
    figures = Table.grid(padding=(0, 2), expand=True)
    figures.width = width
    figures.add_column(ratio=1)
    for width in _WIDTHS:
        figures.add_column(min_width=width, no_wrap=True)
    figures.add_row(
        ProgressBar(total=course.total, completed=course.index),
        f"{course.index}/{course.total}",
        course.at,
        "" if rate is None else f"{format_rate(rate)} steps/s",
        _left(course),
    )
    return Group(Text(course.label, no_wrap=True, overflow="ellipsis"), figures)


def ended(record: LaunchRecord, course: Course) -> RenderableType:
    """One line on a launch that ended, cut to the terminal's width; below it the error, if there was one."""
    place = f"{course.index:>{len(str(course.total))}}/{course.total}"
    step_time = _step_time_s(record)
    took = "" if step_time is None else f"{format_seconds(step_time):>8} a step  "
    label = _label(record.case, record.round)
    line = Text(f"{place}  {record.state:<8} {took}{label}", no_wrap=True, overflow="ellipsis")
    if record.state != "ok":
        line.stylize("red")
    error = [] if record.error is None else [Padding(Text(plain(record.error)), (0, 0, 0, len(place) + 2))]
    return Group(line, *error)


def _step_time_s(record: LaunchRecord) -> float | None:
    return record.metrics["step_time_s"] if record.state == "ok" else None


def _left(course: Course) -> str:
    remaining = course.remaining_s
    return "" if remaining is None else f"about {format_duration(remaining)} left"


def _label(case: Case, round_: int) -> str:
    job = case.job
    ranks = "1 rank" if job.gpus == 1 else f"{job.gpus} ranks"
    return ", ".join([job.strategy, job.model, ranks, *case.axes, f"round {round_ + 1}"])
