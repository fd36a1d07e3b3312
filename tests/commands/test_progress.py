"""What a run shows while it goes on: on a terminal, in a log."""

import os
import pty
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from refshard.commands.progress import Bars, Course, Lines, bars
from refshard.measure.run import run_suite
from tests.measure.commandline import write_suite
from tests.measure.fakes import ENVIRONMENT, FakeLauncher, make_suite
from tests.report.runs import run

ENDED = run().launches
"""Launches by hand; the fifth took 40 ms a step."""
OK, FAILED = ENDED[4], next(record for record in ENDED if record.state == "failed")


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def course(clock: Clock) -> Course:
    return Course(clock)


def shown(course: Course, columns: int = 80) -> list[str]:
    """Lines of what stays at the bottom of a terminal."""
    console = Console(file=StringIO(), width=columns, force_terminal=True, record=True)
    console.print(bars(course, columns - 2))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_it_names_the_case_the_step_the_rate_and_what_is_left(course: Course, clock: Clock) -> None:
    """One launch took 60 s and two more are left, of which the second has run for 20 s; 10 steps took it 4 s."""
    course.start(OK.case, 0, 0, 3)
    clock.now = 60
    course.end()
    course.start(OK.case, 1, 1, 3)
    clock.now = 76
    course.progress("measure 2/20")
    clock.now = 80
    course.progress("measure 12/20")
    label, figures = shown(course)
    assert label == "refshard-yafsdp, llama-mini, 2 ranks, round 2"
    assert re.fullmatch(r"━+╺━+  1/3  measure 12/20  2.50 steps/s +about 1 min 40 s left", figures)


def test_before_any_launch_has_ended_nothing_is_said_of_the_rest(course: Course, clock: Clock) -> None:
    course.start(OK.case, 0, 0, 3)
    clock.now = 30
    course.progress("build 1/1")
    assert course.remaining_s is None
    assert course.steps_per_s is None
    assert re.fullmatch(r"━+  0/3  build 1/1", shown(course)[1])


def test_a_launch_that_takes_longer_than_those_before_leaves_the_later_ones(course: Course, clock: Clock) -> None:
    course.start(OK.case, 0, 0, 3)
    clock.now = 10
    course.end()
    assert course.remaining_s == 20
    course.start(OK.case, 1, 1, 3)
    clock.now = 35
    assert course.remaining_s == 10
    course.end()
    course.start(OK.case, 2, 2, 3)
    course.end()
    assert course.remaining_s is None


def test_another_phase_has_a_rate_of_its_own(course: Course, clock: Clock) -> None:
    course.start(OK.case, 0, 0, 1)
    for now, text in ((1, "warm-up 1/10"), (2, "warm-up 9/10"), (3, "measure 1/20")):
        clock.now = now
        course.progress(text)
    assert course.steps_per_s is None
    clock.now = 5
    course.progress("measure 2/20")
    assert course.steps_per_s == 0.5


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_no_line_is_wider_than_the_terminal(course: Course, clock: Clock, columns: int) -> None:
    """Even the longest of everything, and an echoed ^C."""
    long = OK.case.changed(global_batch=8, microbatches=4, checkpointing="every-2")
    course.start(long, 0, 100, 1000)
    clock.now = 3000
    course.end()
    course.start(long, 99, 101, 1000)
    course.progress("case 10/10, warm-up 1/10")
    clock.now = 3004.05
    course.progress("case 10/10, warm-up 10/10")
    lines = shown(course, columns)
    assert len(lines) == 2
    assert all(len(line) <= columns for line in lines)
    assert columns < 80 or len(lines[1]) <= columns - 2


def test_on_a_terminal_a_line_a_launch_stays_and_the_bars_go() -> None:
    written = StringIO()
    with Bars(Console(file=written, width=80, force_terminal=True)) as observer:
        for index, record in enumerate((OK, FAILED)):
            observer.case_started(record.case, record.round, index, 2)
            observer.case_progressed("measure 2/20")
            observer.case_ended(record)
    kept = [line.rstrip() for line in lines_of(written.getvalue()) if re.match(r"\d/2  |     \S", line)]
    assert kept[:2] == [
        "1/2  ok        40.0 ms a step  refshard-yafsdp, llama-mini, 2 ranks, round 1",
        "2/2  failed   fsdp2-tuned, llama-mini, 2 ranks, round 3",
    ]
    assert kept[2].startswith("     RuntimeError: mat1 and mat2 shapes differ")


def test_in_a_log_it_is_a_line_a_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = make_suite()
    with Lines() as observer:
        run_suite(suite, tmp_path / "run", FakeLauncher(), observer, ENVIRONMENT)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert re.fullmatch(
        r"\[1/3\] ok       single, llama-tiny, 1 rank, round 1: step time 200 ms  \(took [^,]+, about \d+ s left\)",
        lines[0],
    )
    assert re.fullmatch(r"\[3/3\] ok       refshard-yafsdp, .*: step time 250 ms  \(took [^,]+\)", lines[2])


def test_a_log_tells_what_is_waited_for_and_no_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines() as observer:
        for text in ("job 7 pending: Resources", "", "warm-up 1/2", "measure 10/20"):
            observer.case_progressed(text)
    assert capsys.readouterr().err == "  job 7 pending: Resources\n"


@pytest.mark.full
def test_on_a_real_terminal_it_ends_with_lines_that_fit_and_a_cursor(tmp_path: Path) -> None:
    """Of 80 columns; what it wrote is read as a terminal would, line by line."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
    suite = write_suite(tmp_path, "ddp")
    command = [sys.executable, "-m", "refshard", "run", str(suite), "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=terminal, env=environment)
    os.close(terminal)
    try:
        written = b"".join(iter(lambda: _read(controller), b"")).decode()
    finally:
        os.close(controller)
        assert process.wait(timeout=1800) == 0
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    lines = lines_of(written)
    assert max(map(len, lines[1:])) <= 80  # the first one names the folder
    assert any(re.search(r"0/2  (warm-up|measure|trace|build) \d", line) for line in lines)
    for place, strategy in (("1/2", "single"), ("2/2", "ddp")):
        found = [line for line in lines if re.match(rf"{place}  ok  .* a step  {strategy}, llama-tiny, 1 rank", line)]
        assert len(found) == 1, lines


def lines_of(written: str) -> list[str]:
    """What a terminal was sent, without its control sequences, cut wherever it begins a line or goes back to one."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written))


def _read(controller: int) -> bytes:
    """What there is; nothing at the end, which Linux tells by an error."""
    try:
        return os.read(controller, 65536)
    except OSError:
        return b""
