"""Windows that a user chooses in place of steps: by annotation, by time, and by kind."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.analyse import Analysis, analyse
from refshard.analysis.windows import device_windows_apart, parse_window
from refshard.errors import SpecError, TraceError
from refshard.events.timeline import UNKNOWN, Window
from tests.analysis import small
from tests.analysis.handmade import event, step, write
from tests.analysis.inference import batch, inference, kernel

US = 1000


def ask(path: Path, window: str) -> Analysis:
    return analyse(path, window=parse_window(window))


def test_each_match_is_a_window_with_the_wait_for_its_first_kernel(tmp_path: Path) -> None:
    found = ask(inference(tmp_path / "t.json"), r"step\[")
    (base,) = {int(found.timeline.spans.starts.min()) - 20 * US}
    assert [(w.step, w.start - base, w.end - base, w.name) for w in found.timeline.windows] == [
        (0, 10 * US, 60 * US, "step[EXTEND bs=2 toks=900]"),
        (1, 66 * US, 76 * US, "step[DECODE bs=8]"),
        (2, 100 * US, 110 * US, "step[DECODE bs=9]"),
    ]
    parts = [step.breakdown for step in found.figures.steps]
    assert [part.compute_ns for part in parts] == [30 * US, 6 * US, 5 * US]
    assert [part.exposed_ns for part in parts] == [10 * US, 0, 0]
    assert [part.idle_ns for part in parts] == [10 * US, 4 * US, 5 * US]
    assert [step.name for step in found.figures.steps] == [w.name for w in found.timeline.windows]
    assert [one.step for one in found.figures.collectives] == [0]


def test_figures_are_grouped_by_name_less_numbers(tmp_path: Path) -> None:
    windows = ask(inference(tmp_path / "t.json"), r"step\[").figures.windows
    assert windows is not None
    extend, decode = windows.groups
    assert (extend.name, extend.count, extend.span_ns) == ("step[EXTEND bs=2 toks=900]", 1, 50 * US)
    assert (extend.comm_ns, extend.exposed_ns) == (10 * US, 10 * US)
    assert (decode.name, decode.count, decode.span_ns) == ("step[DECODE bs=#]", 2, 20 * US)
    assert (decode.compute_ns, decode.idle_ns) == (11 * US, 9 * US)
    assert (decode.shortest_ns, decode.longest_ns) == (10 * US, 10 * US)


def test_parentheses_in_the_pattern_say_what_the_kinds_are(tmp_path: Path) -> None:
    path = inference(tmp_path / "t.json")
    for pattern, kinds in (
        (r"step\[(EXTEND|DECODE)", [("EXTEND", 1), ("DECODE", 2)]),
        (r"^step\[\w+ (bs=\d+)", [("bs=2", 1), ("bs=8", 1), ("bs=9", 1)]),
        (r"DECODE", [("step[DECODE bs=#]", 2)]),
    ):
        windows = ask(path, pattern).figures.windows
        assert windows is not None
        assert [(group.name, group.count) for group in windows.groups] == kinds


def test_what_is_in_no_window_and_what_is_no_window_is_told(tmp_path: Path) -> None:
    path = inference(tmp_path / "t.json")
    found = {warning.code: warning for warning in ask(path, r"step\[").figures.warnings}
    assert found["outside_windows"].ns == 4 * US  # the sampling
    assert "windows_overlap" not in found
    assert "outside_steps" not in found
    events = [
        batch("decode", 0, 10), batch("decode inner", 2, 8), batch("decode", 3, 9, tid=2), batch("decode", 20, 30),
        *kernel(1, 1, 2, 5),
    ]  # fmt: skip
    told = {warning.code: warning.count for warning in ask(write(path, events), "decode").figures.warnings}
    assert told["windows_overlap"] == 2
    assert told["windows_without_work"] == 1
    assert "outside_windows" not in told


def test_a_pattern_that_matches_nothing_names_the_frequent_annotations(tmp_path: Path) -> None:
    path = inference(tmp_path / "t.json")
    with pytest.raises(TraceError) as error:
        ask(path, "prefill")
    assert str(error.value) == (
        f"{path}: --window 'prefill' matches no annotation; the most frequent are: step[DECODE bs=#] (2), "
        "step[EXTEND bs=2 toks=900] (1)"
    )
    write(path, kernel(1, 1, 2, 5))
    with pytest.raises(TraceError, match=r"the trace has no annotations; a range of time such as 1\.5s\.\.2s needs"):
        ask(path, "prefill")


def test_operators_match_where_no_annotation_does(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [event("forward", 0, 10), batch("loop", 0, 20), *kernel(1, 1, 2, 5)])
    assert [w.name for w in ask(path, "forward").timeline.windows] == ["forward"]


def test_a_trace_without_steps_is_told_which_windows_it_has(tmp_path: Path) -> None:
    def told(events: list[dict[str, Any]]) -> str:
        figures = analyse(write(tmp_path / "t.json", events)).figures
        return next((w.message for w in figures.warnings if w.code == "no_steps"), "")

    decode = [batch("[decode] 1", 0, 9), batch("[decode] 2", 10, 19)]
    often = [batch("log", at, at + 1) for at in range(5)]
    assert told([*decode, *often, *kernel(1, 1, 2, 5)]).endswith(
        r"; or use --window '^\[decode', which takes its 2 annotations as windows"
    )
    collectives = [batch("nccl:all_reduce", 0, 9), batch("nccl:all_reduce", 10, 19)]
    assert "--window" not in told([*collectives, decode[0], *kernel(1, 1, 2, 5)])
    assert told([step(1, 0, 20), *decode, *kernel(1, 1, 2, 5)]) == ""


def test_a_range_of_time_is_cut_as_it_is(tmp_path: Path) -> None:
    path = inference(tmp_path / "t.json")  # its first event is at 10 us
    cut = ask(path, "35us..64us")
    assert cut.timeline.spans.steps.tolist() == [UNKNOWN, 0, 0, 0, UNKNOWN]
    found = cut.figures
    (only,) = found.steps
    assert (only.step, only.name, only.breakdown.span_ns) == (0, "35us..64us", 29 * US)
    # From 45 to 74: the gemm until 50, the all-reduce until 60, the sampling from 62 to 66, the decode from 70 on.
    assert only.breakdown.compute_ns == (5 + 4 + 4) * US
    assert only.breakdown.exposed_ns == 10 * US
    assert only.breakdown.idle_ns == (2 + 4) * US
    assert [one.step for one in found.collectives] == [0]
    assert not {"outside_steps", "outside_windows", "no_steps"} & {w.code for w in found.warnings}
    assert ask(path, "80us..").figures.steps[0].breakdown.span_ns == (112 - 90) * US  # to the last event's end
    assert ask(path, "..45us").figures.steps[0].breakdown.span_ns == 45 * US
    assert [one.step for one in ask(path, "..35us").figures.collectives] == [None]
    with pytest.raises(TraceError, match=r"--window 1ms\.\. lies after the trace's end; the trace is 102 us long"):
        ask(path, "1ms..")


def test_windows_replace_steps_on_a_cpu(tmp_path: Path) -> None:
    events = [
        step(7, 0, 100), batch("decode", 10, 40), event("aten::mm", 15, 20), batch("decode", 50, 90),
        event("aten::mm", 60, 25),
    ]  # fmt: skip
    found = ask(write(tmp_path / "t.json", events), "decode").figures
    assert [(s.step, s.breakdown.span_ns, s.breakdown.compute_ns) for s in found.steps] == [
        (0, 30 * US, 20 * US),
        (1, 40 * US, 25 * US),
    ]


@pytest.mark.parametrize(("text", "start", "end"), [
    ("1.5s..2s", 1_500_000_000, 2_000_000_000), ("800ms..", 800_000_000, None), ("..20us", None, 20_000),
    ("0.001us..1ms", 1, 1_000_000),
])  # fmt: skip
def test_ranges_are_exact(text: str, start: int | None, end: int | None) -> None:
    asked = parse_window(text)
    assert (asked.pattern, asked.start_ns, asked.end_ns) == (None, start, end)


def test_what_is_no_range_is_a_pattern() -> None:
    for text in ("..", "step", "a..b", "^1..$"):
        assert parse_window(text).pattern is not None


@pytest.mark.parametrize(("text", "message"), [
    ("2s..1s", "window: a range must end after it starts, got 2s..1s"),
    ("1s..1s", "window: a range must end after it starts"),
    ("1.5..2", "window: a range needs times with unit s, ms or us, such as 1.5s..2s; got 1.5..2"),
    ("1h..2h", "unit s, ms or us"),
    ("step[", "window: 'step[' is no regular expression (unterminated character set at position 4)"),
])  # fmt: skip
def test_what_is_neither_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_window(text)
    assert message in str(error.value)


Placed = list[tuple[small.Row, int]]
"""Spans, each with the window that launched it."""


def reference(rows: Placed, windows: tuple[Window, ...], main: int) -> list[tuple[int | None, int, int]]:
    """The definition, window by window."""
    found: list[tuple[int | None, int, int]] = []
    for place, window in enumerate(windows):
        mine = [row for row, step in rows if step == window.step]
        if not mine:
            continue
        first = min(row.start for row in mine)
        before = [row.end for row, _ in rows if row.lane == main and row.start < first]
        start = min(first, max([window.start, *before]))
        if found:
            start = max(start, found[-1][2])
        later = [row.start for row, step in rows if step in {w.step for w in windows[place + 1 :]}]
        end = min([max(row.end for row in mine), *later])
        end = max([end, *(row.end for row in mine if row.lane == main)])
        found.append((window.step, start, max(start, end)))
    return found


@given(small.rows, st.lists(st.integers(UNKNOWN, 3), min_size=10, max_size=10), st.lists(st.integers(0, 9), min_size=8))
def test_windows_on_the_device_are_as_defined(rows: list[small.Row], steps: list[int], parts: list[int]) -> None:
    cuts = [sum(parts[: place + 1]) for place in range(8)]
    windows = tuple(Window(step=i, start=cuts[2 * i], end=cuts[2 * i + 1]) for i in range(4))
    placed = list(zip(rows, steps))
    spans = replace(small.timeline_of(rows).spans, steps=np.array([step for _, step in placed], np.int32))
    found = device_windows_apart(spans, windows)
    assert [(w.step, w.start, w.end) for w in found] == reference(placed, windows, spans.main_lane())
