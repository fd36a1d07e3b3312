"""CUDA memory snapshots: figures against an allocator that keeps its own account, and files that must not be loaded."""

import gzip
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.snapshot import (
    DeviceFigures,
    Fragmentation,
    HistoryFigures,
    read_snapshot,
    snapshot_figures,
)
from refshard.errors import TraceError
from refshard.events.pickles import is_pickle
from refshard.events.sites import Site
from tests.analysis.snapshots import SEGMENT, TORCH, UNIT, Allocator, frames, write

KIB = 1024


def figures(path: Path, snapshot: Any) -> DeviceFigures:
    (found,) = snapshot_figures(read_snapshot(write(path, snapshot)))
    return found


def history(path: Path, snapshot: Any) -> HistoryFigures:
    found = figures(path, snapshot).history
    assert found is not None
    return found


def worked() -> Allocator:
    """3 KiB at line 1, 1000 bytes at line 2 kept; 4 KiB at line 3 for a while; a segment of 16 KiB taken and cached."""
    allocator = Allocator()
    allocator.allocate(3 * KIB, 1)
    passing = allocator.allocate(4 * KIB, 3)
    allocator.allocate(1000, 2)
    large = allocator.allocate(16 * KIB, 4)
    allocator.free(passing)
    allocator.free(large)
    return allocator


def test_what_is_reserved_now_is_told_apart_exactly(tmp_path: Path) -> None:
    found = figures(tmp_path / "s.pickle", worked().snapshot()).fragmentation
    assert found == Fragmentation(
        requested_bytes=3 * KIB + 1000, rounding_bytes=24, pending_bytes=0, split_bytes=4 * KIB,
        unused_bytes=16 * KIB, largest_free_bytes=16 * KIB,
    )  # fmt: skip
    assert (found.allocated_bytes, found.active_bytes, found.reserved_bytes) == (4 * KIB, 4 * KIB, 24 * KIB)


def test_the_peak_and_who_holds_it(tmp_path: Path) -> None:
    allocator = worked()
    found = figures(tmp_path / "s.pickle", allocator.snapshot())
    history = found.history
    assert history is not None
    assert (history.requested_bytes, history.reserved_bytes) == (23 * KIB + 1000, 24 * KIB)
    assert (history.entries, history.allocations, history.peak_after_entries) == (10, 4, 6)
    assert history.peak_time_us == allocator.entries[5]["time_us"]
    assert [(line.site and line.site.line, line.bytes, line.blocks) for line in found.lines] == [
        (4, 16 * KIB, 1), (3, 4 * KIB, 1), (1, 3 * KIB, 1), (2, 1000, 1)
    ]  # fmt: skip
    assert found.lines[0].site == Site(file="/home/me/project/train.py", line=4, function="step")
    assert [(one.size, one.blocks) for one in found.sizes] == [(16 * KIB, 1), (4 * KIB, 1), (3 * KIB, 1), (1000, 1)]


def test_a_history_that_ends_before_the_snapshot_keeps_its_peak(tmp_path: Path) -> None:
    """The last two blocks are freed after recording stops: counting back from now would lose them from the peak."""
    allocator = worked()
    whole = figures(tmp_path / "whole.pickle", allocator.snapshot())
    recorded = len(allocator.entries)
    for block in [part for parts in allocator.segments.values() for part in parts if part.state == "active_allocated"]:
        allocator.free(block)
    snapshot = allocator.snapshot()
    snapshot["device_traces"] = [trace[:recorded] for trace in snapshot["device_traces"]]
    cut = figures(tmp_path / "cut.pickle", snapshot)
    assert whole.history is not None
    assert cut.history is not None
    assert (whole.history.gone_bytes, cut.history.gone_bytes) == (0, 3 * KIB + 1000)
    assert cut.history.requested_bytes == whole.history.requested_bytes == 23 * KIB + 1000
    assert (cut.lines, cut.sizes) == (whole.lines, whole.sizes)


def test_a_block_freed_while_a_stream_uses_it_is_pending_and_not_in_use(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(700, 1), pending=True)
    allocator.allocate(900, 2)
    found = figures(tmp_path / "s.pickle", allocator.snapshot())
    assert found.fragmentation.pending_bytes == 2 * UNIT
    assert found.history is not None
    assert (found.history.requested_bytes, found.history.pending_bytes) == (900, 700)


def test_without_a_history_the_lines_are_of_what_is_held_now(tmp_path: Path) -> None:
    snapshot = worked().snapshot(entries=0)
    for name, told in (("s", snapshot), ("segments", snapshot["segments"])):
        found = figures(tmp_path / name, told)
        assert found.history is None
        assert [(line.site and line.site.line, line.bytes) for line in found.lines] == [(1, 3 * KIB), (2, 1000)]


def test_out_of_memory_tells_what_was_asked_for_and_what_was_there(tmp_path: Path) -> None:
    allocator = worked()
    allocator.fail(1 << 20, 5000, 7)
    found = history(tmp_path / "s.pickle", allocator.snapshot())
    (oom,) = found.ooms
    assert (oom.asked_bytes, oom.device_free_bytes) == (1 << 20, 5000)
    assert (oom.requested_bytes, oom.reserved_bytes) == (3 * KIB + 1000, 24 * KIB)
    assert oom.site == Site(file="/home/me/project/train.py", line=7, function="step")


def test_what_is_held_when_an_allocation_fails_is_told_apart_from_the_peak(tmp_path: Path) -> None:
    allocator = worked()
    allocator.fail(1 << 20, 5000, 7)
    found = figures(tmp_path / "s.pickle", allocator.snapshot())
    assert found.failure is not None
    assert [(one.site and one.site.line, one.bytes) for one in found.failure.lines] == [(1, 3 * KIB), (2, 1000)]
    assert [(one.size, one.blocks) for one in found.free_blocks] == [(16 * KIB, 1), (4 * KIB, 1)]
    assert (found.failure.free_bytes, found.failure.changed) == (20 * KIB, False)
    allocator.empty_cache()
    later = figures(tmp_path / "later.pickle", allocator.snapshot()).failure
    assert later is not None
    assert (later.lines, later.changed) == (found.failure.lines, True)
    assert later.free_bytes == 20 * KIB + 24, "rounding is not known of the past"


def test_calls_to_the_device_after_warm_up_are_counted_apart(tmp_path: Path) -> None:
    allocator = Allocator()
    for _ in range(4):
        allocator.free(allocator.allocate(100, 1))
        allocator.empty_cache()
    found = history(tmp_path / "s.pickle", allocator.snapshot())
    assert (found.segments_taken, found.segments_given_back) == (4, 4)
    assert (found.late_segments_taken, found.late_segments_given_back) == (1, 2), "the third is taken to allocate"


def test_pools_are_told_apart_by_size_stream_and_owner(tmp_path: Path) -> None:
    snapshot = worked().snapshot()
    snapshot["segments"][0] |= {"segment_type": "large", "is_expandable": True, "stream": 7, "segment_pool_id": (0, 3)}
    small, large = figures(tmp_path / "s.pickle", snapshot).pools
    assert (small.kind, small.expandable, small.private, small.stream) == ("small", False, False, 0)
    assert (large.kind, large.expandable, large.private, large.stream) == ("large", True, True, 7)
    assert (small.fragmentation.reserved_bytes, large.fragmentation.reserved_bytes) == (16 * KIB, SEGMENT)


def test_each_device_has_its_own_figures(tmp_path: Path) -> None:
    snapshot = worked().snapshot(device=1)
    other = Allocator()
    other.allocate(100, 5)
    snapshot["segments"] += other.snapshot()["segments"]
    first, second = snapshot_figures(read_snapshot(write(tmp_path / "s.pickle", snapshot)))
    assert (first.device, first.fragmentation.requested_bytes, first.history) == (0, 100, None)
    assert (second.device, second.fragmentation.requested_bytes) == (1, 3 * KIB + 1000)
    assert second.history is not None


def test_a_stack_without_user_code_gives_torchs_own_line_and_none_without_python(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.allocate(100, 1)
    allocator.allocate(200, 1)
    allocator.entries[1]["frames"] = [TORCH]
    allocator.entries[2]["frames"] = [{"filename": "??", "line": 0, "name": "x"}, "odd", {"filename": 3}]
    lines = figures(tmp_path / "s.pickle", allocator.snapshot()).lines
    assert [(line.site and line.site.file, line.bytes) for line in lines] == [(None, 200), (TORCH["filename"], 100)]


Call = tuple[str, int]
calls = st.lists(
    st.tuples(st.sampled_from(("allocate", "allocate", "free", "hold", "complete", "empty")), st.integers(0, 12000)),
    max_size=40,
)


def played(moves: list[Call]) -> Allocator:
    """An allocator after these calls; a number is a size or, modulo what there is, which block."""
    allocator, used, pending = Allocator(), [], []
    for number, (what, n) in enumerate(moves):
        if what == "allocate":
            used.append(allocator.allocate(n + 1, number + 1))
        elif what in ("free", "hold") and used:
            part = used.pop(n % len(used))
            allocator.free(part, pending=what == "hold")
            pending += [part] if what == "hold" else []
        elif what == "complete" and pending:
            allocator.complete(pending.pop(n % len(pending)))
        elif what == "empty":
            allocator.empty_cache()
    return allocator


@given(calls, st.integers(0, 40))
def test_figures_equal_the_allocators_own_account(
    tmp_path_factory: pytest.TempPathFactory, moves: list[Call], recorded: int
) -> None:
    """Whatever was called, and however little of it was recorded."""
    allocator = played(moves)
    if not allocator.segments and not allocator.entries[-recorded or len(allocator.entries) :]:
        return
    found = figures(tmp_path_factory.mktemp("s") / "s.pickle", allocator.snapshot(entries=recorded))
    used, _, reserved, by_line = allocator.states[-1]
    parts = [part for parts in allocator.segments.values() for part in parts]
    now = found.fragmentation
    assert (now.requested_bytes, now.reserved_bytes) == (used, reserved)
    assert now.allocated_bytes == sum(part.size for part in parts if part.state == "active_allocated")
    assert now.pending_bytes == sum(part.size for part in parts if part.state == "active_pending_free")
    assert now.largest_free_bytes == max((part.size for part in parts if part.state == "inactive"), default=0)
    count = min(recorded, len(allocator.entries))
    if not count:
        assert {line.site.line: line.bytes for line in found.lines if line.site} == by_line
        return
    states = allocator.states[len(allocator.states) - 1 - count :]
    at = max(range(len(states)), key=lambda place: (states[place][0], -place))
    history = found.history
    assert history is not None
    assert history.peak_after_entries == at
    assert (history.requested_bytes, history.pending_bytes, history.reserved_bytes) == states[at][:3]
    assert history.most_reserved_bytes == max(state[2] for state in states)
    assert sum(line.bytes for line in found.lines) == history.requested_bytes
    told = {line.site.line: line.bytes for line in found.lines if line.site}
    assert all(told[line] == states[at][3][line] for line in told), "what is named is right"
    if count == len(allocator.entries):
        assert told == states[at][3]


def test_a_snapshot_is_known_by_its_content_and_may_be_gzipped(tmp_path: Path) -> None:
    plain = write(tmp_path / "memory.json", worked().snapshot())
    packed = tmp_path / "memory"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    text = tmp_path / "other.pickle"
    text.write_text('{"traceEvents": []}')
    assert [is_pickle(path) for path in (plain, packed, text, tmp_path, tmp_path / "none")] == [True, True] + [
        False
    ] * 3
    assert snapshot_figures(read_snapshot(packed)) == snapshot_figures(read_snapshot(plain))


class Runs:
    """What a pickle can make a careless reader do."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self._made_of = (call, arguments)

    def __reduce__(self) -> Any:
        return self._made_of


@pytest.mark.parametrize("call", [os.system, subprocess.call, eval, getattr, list])
def test_nothing_that_a_file_names_is_run(tmp_path: Path, call: Any) -> None:
    mark = tmp_path / "ran"
    snapshot = {**worked().snapshot(), "more": Runs(call, f"touch {mark}")}
    for protocol in range(2, 6):
        path = tmp_path / f"{protocol}.pickle"
        path.write_bytes(pickle.dumps(snapshot, protocol=protocol))
        with pytest.raises(TraceError, match=r"asks for \w+\.\w+; a CUDA memory snapshot holds plain values only"):
            read_snapshot(path)
    assert not mark.exists()


@pytest.mark.parametrize("code", [
    b"cos\nsystem\n(S'true'\ntR.",  # GLOBAL
    b"(S'true'\nios\nsystem\n.",  # INST
    b"(cos\nsystem\nS'true'\no.",  # OBJ
    b"\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL
    b"Pkey\n.",  # PERSID
    b"\x82\x01.",  # EXT1
])  # fmt: skip
def test_no_opcode_finds_a_way_around(tmp_path: Path, code: bytes) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(b"\x80\x04" + code)
    with pytest.raises(TraceError, match=r"plain values only|damaged pickle"):
        read_snapshot(path)


@pytest.mark.parametrize("value", [3, None, "text", {"segments": 3}, {"segments": [{"address": "x"}]}, {"a": 1}])
def test_other_plain_pickles_are_no_snapshots(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TraceError, match="not a CUDA memory snapshot"):
        read_snapshot(write(tmp_path / "s.pickle", value))


def test_a_truncated_or_missing_file_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "s.pickle", worked().snapshot())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="damaged pickle"):
        read_snapshot(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_snapshot(tmp_path / "none")


def test_stacks_that_many_entries_share_are_the_same_line(tmp_path: Path) -> None:
    allocator, shared = Allocator(), frames(3)
    for _ in range(3):
        allocator.allocate(100, 9)
    for entry in allocator.entries:
        entry["frames"] = shared
    (line,) = figures(tmp_path / "s.pickle", allocator.snapshot()).lines
    assert (line.bytes, line.blocks, line.site and line.site.line) == (300, 3, 3)
