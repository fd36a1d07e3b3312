"""Recorded waits of streams, by hand and against a walk over what the host called."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.figures import Cause
from refshard.analysis.kineto import timeline_of
from refshard.analysis.overlap import idle_figures
from refshard.events.reader import read_events
from tests.analysis.handmade import event, write

Events = list[dict[str, Any]]


def call(name: str, number: int, at: float) -> dict[str, Any]:
    return event(name, at, 0.25, cat="cuda_runtime", correlation=number)


def launch(number: int, at: float, stream: int, start: float, duration: float) -> Events:
    args: dict[str, Any] = {"stream": stream, "device": 0, "correlation": number}
    kernel = event(f"k{number}", start, duration, cat="kernel", tid=stream, **args)
    return [call("cudaLaunchKernel", number, at), kernel]


def wait(number: int, at: float, stream: int, source: int, record: int | None = None) -> Events:
    """A stream waits for an event of another one; traces until 2023 do not say which call recorded it."""
    args = {"stream": stream, "device": 0, "correlation": number, "wait_on_stream": source}
    if record is not None:
        args["wait_on_cuda_event_record_corr_id"] = record
    sync = {**event("Stream Wait Event", at, 0.25, cat="cuda_sync", tid=stream), "args": args}
    return [call("cudaStreamWaitEvent", number, at), sync]


def pairs(path: Path, events: Events) -> list[tuple[str, str]]:
    timeline = timeline_of(read_events(write(path, events)))
    names = [timeline.spans.name_table[code] for code in timeline.spans.names]
    assert timeline.calls is not None
    return [(names[one], names[other]) for one, other in zip(timeline.calls.waiting, timeline.calls.sources)]


operations = st.lists(
    st.tuples(st.just("launch"), st.sampled_from([7, 20, 24]), st.just(0))
    | st.tuples(st.just("record"), st.sampled_from([7, 20, 24, 31]), st.just(0))
    | st.tuples(st.just("wait"), st.sampled_from([7, 20, 24, 31]), st.integers(0, 3)),
    max_size=30,
)
"""Launches and records on a stream, and waits for one of the last records; nothing runs on stream 31."""


@given(operations, st.booleans())
def test_waits_are_those_of_a_walk(
    tmp_path_factory: pytest.TempPathFactory, done: list[tuple[str, int, int]], told: bool
) -> None:
    events = launch(1000, 0, 7, 100, 1)
    last: dict[int, str] = {7: "k1000"}
    records: list[tuple[int, int, str | None]] = []
    open_waits: list[tuple[int, int, str | None]] = []  # the wait, its stream, and what it waits for
    waiting: dict[int, tuple[str, str]] = {}
    for number, (what, stream, back) in enumerate(done, 1):
        if what == "launch":
            events += launch(number, number, stream, 200 + 2 * number, 1)
            last[stream] = f"k{number}"
            for one in [one for one in open_waits if one[1] == stream]:
                open_waits.remove(one)
                if one[2] is not None:
                    waiting[one[0]] = (f"k{number}", one[2])
        elif what == "record":
            events.append(call("cudaEventRecord", number, number))
            records.append((number, stream, last.get(stream)))
        elif back < len(records):
            record, source, then = records[-1 - back]
            events += wait(number, number, stream, source, record if told else None)
            if source != stream:
                open_waits.append((number, stream, then if told else last.get(source)))
    assert pairs(tmp_path_factory.mktemp("t") / "t.json", events) == [waiting[one] for one in sorted(waiting)]


def test_the_call_that_waits_must_be_in_the_trace(tmp_path: Path) -> None:
    events = [*launch(1, 0, 7, 10, 5), *wait(2, 2, 20, 7)[1:], *launch(3, 4, 20, 20, 5)]
    assert pairs(tmp_path / "t.json", events) == []
    record_lost = [*launch(1, 0, 7, 10, 5), *wait(2, 2, 20, 7, record=99), *launch(3, 4, 20, 20, 5)]
    assert pairs(tmp_path / "t.json", record_lost) == []


# Launches into an empty queue take 6 us here; then the streams 7 and 20 run side by side until 400 and 410.
BEFORE = [part for n in range(3) for part in launch(100 + n, 100 * n - 6, 7, 100 * n, 10)]
BESIDE = [*launch(1, 300, 7, 306, 94), *launch(2, 301, 20, 310, 100)]


@pytest.mark.parametrize(("waited", "start", "cause", "what"), [
    (wait(9, 302, 24, 20), 411, Cause.DEPENDENCY, "stream 24 waits for stream 20"),
    (wait(9, 302, 24, 20), 460, Cause.DEPENDENCY, "stream 24 waits for stream 20"),
    # The event of stream 7 had come at 400: at 410 nothing on record held the kernel back.
    (wait(9, 302, 24, 7), 460, Cause.UNKNOWN, "k3"),
    # So soon after stream 20, an event of stream 7 may have waited for stream 20 itself.
    (wait(9, 302, 24, 7), 411, Cause.DEPENDENCY, "stream 24 waits for stream 20"),
    # Waits are recorded, and none is this kernel's.
    (wait(9, 302, 7, 20), 411, Cause.UNKNOWN, "k3"),
    # Nothing is recorded: what starts so soon is taken to have waited.
    ([], 411, Cause.DEPENDENCY, "stream 24 waits for stream 20"),
    (wait(9, 302, 24, 20)[:1], 460, Cause.DEPENDENCY, "stream 24 waits for stream 20"),
])  # fmt: skip
def test_idle_time_is_a_dependency_if_the_span_waited_for_ended_as_it_began(
    tmp_path: Path, waited: Events, start: float, cause: Cause, what: str
) -> None:
    events = [*BEFORE, *BESIDE, *waited, *launch(3, 303, 24, start, 20), *launch(4, 304, 7, 600, 10)]
    found = idle_figures(timeline_of(read_events(write(tmp_path / "t.json", events))))
    assert [(one.cause, one.what) for one in found if one.ns == round((start - 410) * 1000)] == [(cause, what)]


def test_of_streams_that_fall_silent_at_once_the_one_on_record_is_named(tmp_path: Path) -> None:
    both = [*launch(1, 300, 7, 306, 104), *launch(2, 301, 20, 310, 100), *launch(5, 301.5, 21, 310, 100)]
    for source in (7, 20, 21):
        events = [*BEFORE, *both, *wait(9, 302, 24, source), *launch(3, 303, 24, 430, 20)]
        found = idle_figures(timeline_of(read_events(write(tmp_path / "t.json", events))))
        assert [one.what for one in found if one.cause is Cause.DEPENDENCY] == [f"stream 24 waits for stream {source}"]
