"""A signal that asks a run to end, at every line of the harness that could leave something half done."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from refshard.errors import StoreError
from refshard.measure import interruption, run, store
from refshard.measure.interruption import Interruption, interruptible
from refshard.measure.launchers.base import LaunchOutcome
from refshard.measure.run import resume_run, run_suite
from refshard.measure.store import read_run
from refshard.specs.case import Case
from tests.measure.fakes import ENVIRONMENT, FakeLauncher, Silent, good, make_suite

WATCHED = {
    (run.__file__, name) for name in ("run_suite", "_launch_all", "open_run", "launch", "_launched", "_keep")
} | {
    (store.__file__, name) for name in ("__init__", "append", "close", "_write", "_lock", "__exit__")
} | {
    (interruption.__file__, name) for name in ("__enter__", "__exit__", "_handle", "_restore")
}  # fmt: skip


@contextmanager
def signal_at(line: int, *numbers: signal.Signals) -> Iterator[list[int]]:
    """Send this process the signals before the ``line``-th line, from 0, that runs of those that are watched; yield how
    many ran.
    """
    ran = [0]

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if (frame.f_code.co_filename, frame.f_code.co_name) not in WATCHED:
            return None
        if event == "line":
            ran[0] += 1
            if ran[0] == line + 1:
                for number in numbers:
                    signal.raise_signal(number)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield ran
    finally:
        sys.settrace(before)


def interrupted(folder: Path, line: int) -> bool:
    """Whether a run into ``folder`` came to the ``line``-th line, and was interrupted there."""

    def outcome(case: Case, work: Path) -> LaunchOutcome:
        job = case.job
        return good(case, work) if job.strategy == "single" else LaunchOutcome(failed_rank=0, error="rank 0 failed")

    suite = make_suite(matrix={"strategy": ["single", "ddp"], "gpus": [2], "model": ["llama-tiny"]})
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        with interruptible(), signal_at(line, signal.SIGTERM) as ran:
            run_suite(suite, folder, FakeLauncher(outcome), Silent(), ENVIRONMENT)
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers):
            signal.signal(number, handler)
    return ran[0] > line


@pytest.mark.full
def test_whatever_line_is_interrupted_the_run_is_whole_and_can_be_resumed(tmp_path: Path) -> None:
    """Each line before which the signal came was once the last; what had been written stays, counted once."""
    line, states = 0, set()
    while interrupted(folder := tmp_path / str(line) / "run", line):
        line += 1
        try:
            before = read_run(folder)
        except StoreError:  # no header: nothing was launched
            assert not (folder / "cases").exists(), line
            continue
        states.add((len(before.launches), before.end is not None))
        if before.end is not None:
            assert before.end.cases == len(before.launches), line
        if line % 5 == 0:
            after = resume_run(folder, FakeLauncher(), Silent(), ENVIRONMENT)
            assert [record.state for record in after.launches] == ["ok", "ok"], line
            assert [r for r in before.launches if r.state == "ok"] == [
                r for r in after.launches if r in before.launches
            ], line
            assert after.end is not None
            assert (after.end.cases, after.end.interrupted) == (2, False), line
    assert line > 100
    assert states >= {(0, True), (1, True), (2, True)}, "each number of records was what an interruption left"


def test_the_first_signal_within_nested_interruptions_is_passed_on() -> None:
    done: list[object] = []

    def work() -> None:
        with Interruption() as outer:
            with Interruption():
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append(outer.received)

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), interruptible():
        work()
    assert done == ["inner", True]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible(), Interruption() as noted:
            signal.raise_signal(signal.SIGHUP)
            assert not noted.received
    finally:
        signal.signal(signal.SIGHUP, before)


def test_every_signal_raises_and_handlers_are_as_they_were() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        given = signal.signal(number, signal.SIG_DFL)  # under nohup, or in the background, some are ignored
        try:
            with pytest.raises(KeyboardInterrupt, match=number.name), interruptible():
                signal.raise_signal(number)
            assert signal.getsignal(number) is signal.SIG_DFL
        finally:
            signal.signal(number, given)
