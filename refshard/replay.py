"""Records under pytest-benchmark: the step times of a launch, replayed to it by a clock.

Ranks take their times in processes of their own, which pytest-benchmark cannot time. So it times nothing here: its
timer stands still, except that each round moves it on by one sample, the maximum over ranks of that step. A
``conftest.py`` that imports both fixtures has them; a test asks for ``replay`` in place of ``benchmark``, and calls it
with one record. This needs the extra ``test``.
"""

from collections.abc import Callable
from typing import Any

import pytest

from refshard.analysis.exact import exact_metrics
from refshard.analysis.sample import step_samples
from refshard.records import LaunchRecord

Replay = Callable[[LaunchRecord], None]


class ReplayClock:
    """A timer at 0 s, which :meth:`advance` moves on by the next sample and :meth:`rewind` sets back.

    A sample is then the difference of two readings exactly, as no sum of samples before it could be.
    """

    def __init__(self) -> None:
        self.samples_s: tuple[float, ...] = ()
        self.readings = 0
        self._replayed = 0
        self._now_s = 0.0

    def __repr__(self) -> str:
        """What pytest-benchmark names its timer by."""
        return "refshard.replay"

    def __call__(self) -> float:
        """Seconds."""
        self.readings += 1
        return self._now_s

    def rewind(self) -> None:
        """Begin a round."""
        self._now_s = 0.0

    def advance(self) -> None:
        """Let a step's time pass; from the first one again after the last."""
        self._now_s = self.samples_s[self._replayed % len(self.samples_s)]
        self._replayed += 1


@pytest.fixture
def replay_clock(request: pytest.FixtureRequest) -> ReplayClock:
    """The clock of one test, which ``benchmark`` takes for its timer if it is made after this."""
    clock = ReplayClock()
    given = request.node.get_closest_marker("benchmark")
    options = {**(given.kwargs if given else {}), "timer": clock}
    request.node.add_marker(pytest.mark.benchmark(**options), append=False)
    return clock


@pytest.fixture
def replay(replay_clock: ReplayClock, benchmark: Any) -> Replay:
    """A function that gives pytest-benchmark the step times of one record, a round each, in the order of the steps.

    The benchmark's ``extra_info`` says which case was launched where, and holds its exact metrics. A record that did
    not end ok fails the test with its error.
    """
    clock = replay_clock

    def replayed(record: LaunchRecord) -> None:
        if record.state != "ok":
            pytest.fail(f"{record.case.name}: {record.state}: {record.error}", pytrace=False)
        clock.samples_s = tuple(step_samples(record.step_times_s).tolist())
        benchmark.extra_info.update(
            fidelity=record.fidelity,
            spec_hash=record.spec_hash,
            environment=record.environment,
            run_id=record.run_id,
            round=record.round,
            exact_metrics=exact_metrics(record) if record.proof else {},
        )
        benchmark.pedantic(clock.advance, setup=clock.rewind, rounds=len(clock.samples_s))
        if not (benchmark.disabled or clock.readings):
            pytest.fail("`benchmark` was made before `replay`, with a timer of its own; ask for `replay` alone")

    return replayed
