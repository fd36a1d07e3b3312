"""Memory that ``record_stream()`` holds back: recordings made by hand, a naive model, and real programs."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.dryrun.device import Rates
from refshard.dryrun.held_back import (
    AsHostKnew,
    AsReplayed,
    NotReproducedError,
    Reallocation,
    finish_times,
    holds_back,
    reallocate,
    same_calls,
    settle,
    with_segments,
)
from refshard.dryrun.recording import HOST_COUNTS, Kind, Recording
from refshard.dryrun.replay import replay
from refshard.dryrun.request import Request
from refshard.dryrun.run import DryRun, dry_run
from refshard.dryrun.steps import steps_of
from refshard.quantities import MIB
from refshard.specs.cluster import load_cluster
from tests.dryrun.allocating import extension
from tests.dryrun.made import Made, prices
from tests.dryrun.test_command import run as run_command
from tests.fakecuda.allocator_device import BASE
from tests.fakecuda.allocator_model import ModelAllocator
from tests.fakecuda.allocator_programs import ModelSettings
from tests.fakecuda.needs import needs_device

pytestmark = pytest.mark.processes  # the first to need the allocator builds it

HOST_S = 1e-5
BLOCK = 20 * MIB
"""Gets a segment of its own."""
SIDE = 7


def allocated(
    made: Made, seconds: dict[int, float], ext: ModuleType | None = None, total: int = 0, reset: int = 0
) -> Reallocation:
    """Allocate a recording again by its replay, in which each launch takes 10 us of the host."""
    ext, recording = ext or extension(), made.recording()
    replayed = replay(recording, prices(recording, seconds, host_s=HOST_S), Rates())
    follower = AsReplayed(recording, replayed, ext)
    return reallocate(recording, follower, lambda *told: ext.allocator_like(0, *told, total), reset=reset)


def as_run(recording: Recording, ext: ModuleType, total: int = 0) -> Reallocation:
    """Allocate a recording as the script's process would have."""
    return reallocate(recording, AsHostKnew(recording, ext), lambda *told: ext.allocator_like(0, *told, total))


def recorded(made: Made, ext: ModuleType, total: int = 0) -> Recording:
    """The recording with the segments and addresses that it gets while a script runs."""
    found = as_run(made.recording(), ext, total)
    recording = with_segments(made.recording(), found)
    reads = recording.reads.copy()
    reads[recording.kinds == Kind.ALLOCATE] = found.addresses
    return replace(recording, reads=reads)


def used_on_side(made: Made) -> int:
    """A block that a kernel of another stream uses, and that is then freed; the kernel's row."""
    block = made.allocate(BLOCK)
    row = made.launch(stream=SIDE)
    made.hold(block, SIDE)
    made.free(block)
    return row


class TestByHand:
    """The host launches the side stream's kernel at 10 us, when it starts, and is free again at 20 us."""

    @pytest.mark.parametrize(("kernel_us", "reserved"), [(10, BLOCK), (11, 2 * BLOCK)])
    def test_a_block_comes_free_once_the_other_stream_has_passed(self, kernel_us: int, reserved: int) -> None:
        made = Made()
        row = used_on_side(made)
        made.launch()
        made.allocate(BLOCK)
        assert allocated(made, {row: kernel_us * 1e-6}).peak.reserved == reserved

    def test_what_the_stream_is_asked_after_the_block_was_freed_does_not_count(self) -> None:
        made = Made()
        row = used_on_side(made)
        later = made.launch(stream=SIDE)
        made.allocate(BLOCK)
        assert allocated(made, {row: 1e-6, later: 1.0}).peak.reserved == BLOCK

    @pytest.mark.parametrize("waits", [False, True])
    def test_a_stream_that_waits_has_not_passed(self, waits: bool) -> None:
        made, third = Made(), 8
        slow = made.launch(stream=third)
        event = made.record(third)
        block = made.allocate(BLOCK)
        quick = made.launch(stream=SIDE)
        if waits:
            made.wait(SIDE, event)
        made.hold(block, SIDE)
        made.free(block)
        made.launch()
        made.launch()
        made.allocate(BLOCK)
        assert allocated(made, {slow: 1.0, quick: 1e-6}).peak.reserved == (2 * BLOCK if waits else BLOCK)

    def test_streams_run_in_order(self) -> None:
        made = Made()
        slow = made.launch(stream=SIDE)
        quick = used_on_side(made)
        made.launch()
        made.allocate(BLOCK)
        assert allocated(made, {slow: 1.0, quick: 1e-6}).peak.reserved == 2 * BLOCK

    def test_all_streams_that_use_a_block_must_have_passed(self) -> None:
        made, third = Made(), 8
        block = made.allocate(BLOCK)
        slow, quick = made.launch(stream=third), made.launch(stream=SIDE)
        made.hold(block, SIDE)
        made.hold(block, third)
        made.free(block)
        made.launch()
        made.allocate(BLOCK)
        assert allocated(made, {slow: 1.0, quick: 1e-6}).peak.reserved == 2 * BLOCK

    def test_a_wait_of_the_host_counts(self) -> None:
        made = Made()
        row = used_on_side(made)
        made.synchronise(stream=SIDE)
        made.allocate(BLOCK)
        assert allocated(made, {row: 1.0}).peak.reserved == BLOCK

    def test_giving_memory_back_waits_for_all_streams(self) -> None:
        made = Made()
        row = used_on_side(made)
        other = made.allocate(BLOCK)
        made.free(other)  # a wait for the device, when memory for the third block runs out
        made.allocate(2 * BLOCK)
        found = allocated(made, {row: 1.0}, total=2 * BLOCK)
        assert (found.retries, found.refused) == (1, None)
        assert found.sizes.tolist() == [BLOCK, BLOCK, -BLOCK, -BLOCK, 2 * BLOCK]

    def test_what_the_allocator_waited_for_is_not_waited_for_again(self) -> None:
        made = Made()
        block = made.allocate(BLOCK)
        row = made.launch(stream=SIDE)
        made.hold(block, SIDE)
        made.free(made.allocate(BLOCK))
        made.allocate(2 * BLOCK)  # memory runs out
        made.free(block)
        made.allocate(BLOCK)
        assert allocated(made, {row: 1.0}, total=3 * BLOCK).retries == 1

    def test_an_emptied_cache_returns_what_was_held_back(self) -> None:
        made = Made()
        row = used_on_side(made)
        made.synchronise(why="empty_cache")
        made.allocate(BLOCK)
        found = allocated(made, {row: 1.0})
        assert found.sizes.tolist() == [BLOCK, -BLOCK, BLOCK]
        assert [Kind(int(kind)).name for kind in made.recording().kinds[found.rows]] == [
            "ALLOCATE", "SYNCHRONISE", "ALLOCATE",
        ]  # fmt: skip

    def test_an_allocation_that_the_device_has_no_memory_for_ends_it(self) -> None:
        made = Made()
        used_on_side(made)
        made.allocate(BLOCK)
        made.allocate(2 * BLOCK)
        found = allocated(made, {}, total=2 * BLOCK)
        assert found.refused is not None
        assert found.refused.row == 5
        assert "Tried to allocate 40.00 MiB" in found.refused.message
        assert found.peak.reserved == BLOCK

    def test_peaks_begin_anew_where_the_script_reset_them(self) -> None:
        made = Made()
        made.free(made.allocate(2 * BLOCK))
        made.synchronise(why="empty_cache")
        made.mark("build")
        made.allocate(BLOCK)
        assert allocated(made, {}, reset=3).peak.reserved == BLOCK
        assert allocated(made, {}).peak.reserved == 2 * BLOCK


def test_finish_times_follow_streams_and_waits() -> None:
    made = Made()
    first = made.launch(stream=SIDE)
    event = made.record(SIDE)
    made.wait(0, event)
    second = made.launch()
    recording = made.recording()
    replayed = replay(recording, prices(recording, {first: 1e-3, second: 1e-3}, host_s=HOST_S), Rates())
    assert finish_times(recording, replayed).tolist() == [1_010_000, 1_010_000, 1_010_000, 2_010_000]


class TestSegments:
    """Recordings get the segments of another allocation."""

    def test_the_host_s_own_answers_give_the_same_segments(self) -> None:
        ext, made = extension(), Made()
        used_on_side(made)
        made.allocate(BLOCK)
        made.synchronise(why="empty_cache")
        made.allocate(BLOCK)
        recording = recorded(made, ext)
        assert [Kind(int(kind)).name[:3] for kind in recording.kinds] == [
            "SEG", "ALL", "LAU", "HOL", "FRE", "SEG", "ALL", "SYN", "SEG", "SEG", "ALL",
        ]  # fmt: skip
        again = as_run(recording, ext)
        assert same_calls(recording, again)
        same = with_segments(recording, again)
        for name in Recording.__slots__:
            assert np.array_equal(getattr(recording, name), getattr(same, name)), name

    def test_accesses_stay_with_their_launches(self) -> None:
        made = Made()
        made.allocate(BLOCK)
        made.launch(accesses=[(1, 2, True), (3, 4, False)])
        made.allocate(BLOCK)
        made.launch(accesses=[(5, 6, True)])
        recording = recorded(made, extension())
        assert recording.access_ends.tolist() == [0, 0, 2, 2, 2, 3]

    @pytest.mark.parametrize(("kind", "which"), [(Kind.HOLD, 0), (Kind.FREE, 1), (Kind.ALLOCATE, 0)])
    def test_a_recording_that_lacks_a_call_is_not_reproduced(self, kind: Kind, which: int) -> None:
        ext, made = extension(), Made()
        used_on_side(made)
        made.free(made.allocate(BLOCK))
        made.allocate(BLOCK)
        recording = recorded(made, ext)
        kinds = recording.kinds.copy()
        kinds[np.flatnonzero(kinds == kind)[which]] = Kind.MARK
        lacking = replace(recording, kinds=kinds)
        with pytest.raises(NotReproducedError, match="misses some allocator calls"):
            settle((lacking,), load_cluster("dgx-h100"), ext, 0, as_run_bytes=0, total_bytes=0)


def test_waits_to_give_memory_back_are_replayed_again() -> None:
    """Memory is full with two blocks. As run, the third block makes the host wait until all streams are done.

    On a GPU the first block has come free by then, so the host does not wait, and is far ahead of the slow kernel when
    it wants the fourth: it waits there instead. A replay with the first wait would not show that.
    """
    made, ext, cluster = Made(), extension(), load_cluster("dgx-h100")
    made.launch(stream=8, reads=int(cluster.accelerator.memory_bytes_per_s * 0.01))
    used_on_side(made)
    for _ in range(10):
        made.launch()
    made.allocate(BLOCK, stream=9)
    third = made.allocate(BLOCK)
    made.hold(third, 8)
    made.free(third)
    fourth = made.allocate(BLOCK)
    recording = recorded(made, ext, 2 * BLOCK)
    assert waits_before(recording) == [third]
    (found,) = settle((recording,), cluster, ext, 0, as_run_bytes=2 * BLOCK, total_bytes=2 * BLOCK)
    assert waits_before(found.recording) == [fourth]
    assert (found.allocator.retries, found.allocator.refused) == (1, None)
    (roomy,) = settle((recording,), cluster, ext, 0, as_run_bytes=2 * BLOCK, total_bytes=3 * BLOCK)
    assert (waits_before(roomy.recording), roomy.allocator.peak.reserved) == ([], 3 * BLOCK)
    (small,) = settle((recording,), cluster, ext, 0, as_run_bytes=2 * BLOCK, total_bytes=BLOCK)
    assert small.allocator.refused is not None


def waits_before(recording: Recording) -> list[int]:
    """The blocks that the allocator gave memory back for."""
    blocks = np.flatnonzero(recording.kinds == Kind.ALLOCATE)
    returned = np.flatnonzero((recording.kinds == Kind.SEGMENT) & (recording.sizes < 0))
    return [int(block) for block in recording.subjects[blocks[np.searchsorted(blocks, returned)]]]


_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "allocate", "launch", "launch", "hold", "free", "record", "wait", "sync"]),
        st.integers(0, 2),
        st.integers(0, 30),
        st.sampled_from([MIB // 2, 3 * MIB, 12 * MIB, BLOCK]),
        st.sampled_from([0.0, 5e-6, 15e-6, 60e-6]),
    ),
    min_size=10,
    max_size=60,
)


@given(_CALLS)
def test_random_programs_agree_with_a_naive_model(calls: list[tuple[str, int, int, int, float]]) -> None:
    made, seconds, held, events = Made(), {}, [], []
    for action, stream, pick, size, kernel_s in calls:
        if action == "allocate":
            held.append(made.allocate(size, stream=stream))
        elif action == "launch":
            seconds[made.launch(stream=stream)] = kernel_s
        elif action == "record":
            events.append(made.record(stream))
        elif action == "wait" and events:
            made.wait(stream, events[pick % len(events)])
        elif action == "sync":
            made.synchronise(stream=stream)
        elif action == "hold" and held:
            made.hold(held[pick % len(held)], stream)
        elif action == "free" and held:
            made.free(held.pop(pick % len(held)))
    recording = made.recording()
    replayed = replay(recording, prices(recording, seconds, host_s=HOST_S), Rates())
    ext = extension()
    found = reallocate(recording, AsReplayed(recording, replayed, ext), lambda *told: ext.allocator_like(0, *told, 0))
    assert (found.addresses - BASE).tolist() == _naively(recording, replayed.ends, replayed.host_starts)


def _naively(recording: Recording, ends: Any, host_starts: Any) -> list[int]:
    """Addresses by the model; a stream has passed a ticket if all before it is over now, told by search."""
    at = 0

    def over(row: int) -> bool:
        """Whether a row of a stream is done at the host's time, and with it all that it waits for."""
        kind, now = recording.kinds[row], int(host_starts[at])
        if kind == Kind.LAUNCH:
            return bool(ends[row] <= now)
        before = [r for r in range(row) if recording.kinds[r] in (Kind.LAUNCH, Kind.WAIT, Kind.RECORD)]
        mine = [r for r in before if recording.streams[r] == recording.streams[row]]
        if kind == Kind.WAIT:
            mine += [r for r in before if recording.kinds[r] == Kind.RECORD
                     and recording.subjects[r] == recording.subjects[row]]  # fmt: skip
        return all(map(over, mine))

    def rows(stream: int) -> list[int]:
        return [r for r in range(at) if recording.streams[r] == stream
                and recording.kinds[r] in (Kind.LAUNCH, Kind.WAIT, Kind.RECORD)]  # fmt: skip

    model = ModelAllocator(
        0, 1 << 60, 1 << 40, ModelSettings(), lambda stream: len(rows(stream)),
        lambda stream, ticket: all(map(over, rows(stream)[:ticket])), lambda: None,
    )  # fmt: skip
    places: dict[int, int] = {}
    found = []
    for at, kind in enumerate(recording.kinds.tolist()):
        block = int(recording.subjects[at])
        if kind == Kind.ALLOCATE:
            places[block] = model.allocate(int(recording.sizes[at]), int(recording.streams[at]))[0]
            found.append(places[block])
        elif kind == Kind.FREE:
            model.free(places[block])
        elif kind == Kind.HOLD:
            model.record_stream(places[block], int(recording.streams[at]))
    return found


PREFETCHES = """
import torch
side = torch.cuda.Stream()
model = torch.nn.Linear({width}, {out}, bias=False, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    for _ in range(8):
        with torch.cuda.stream(side):
            batch = torch.ones({rows}, {width}, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        batch.record_stream(torch.cuda.current_stream())
        model(batch).sum().backward()
        del batch
    optimizer.step()
"""
"""24 batches in three steps, each held back until the main stream is done with it."""
BATCH = 12 * MIB
FAST = PREFETCHES.format(rows=BATCH // 4 // 16, width=16, out=1)
SLOW = PREFETCHES.format(rows=BATCH // 4 // 8192, width=8192, out=8192)
"""Their products take the GPU less, and more, time than the host's launches."""
TWO_DEVICES = FAST.replace("side =", "other = torch.ones(2**20, device='cuda:1')\nside =")
"""Recordings do not tell devices apart."""


def ran(folder: Path, script: str) -> DryRun:
    path = folder / "train.py"
    path.write_text(script)
    return dry_run(Request(command=(str(path),), cluster="dgx-h100", world_size=8, local_ranks=8))


def on_side(run: DryRun) -> int:
    """Bytes of segments that the script's batches lie in."""
    kinds, sizes = run.recording.kinds, run.recording.sizes
    return int(sizes[(kinds == Kind.SEGMENT) & (sizes == BATCH)].sum())


@pytest.mark.processes
@needs_device
class TestPrograms:
    """Scripts on the fake device."""

    def test_batches_come_back_when_the_gpu_is_done_with_them(self, tmp_path: Path) -> None:
        run = ran(tmp_path, FAST)
        answer = run.answer
        assert (answer.outcome, answer.held_until, answer.doubt) == ("stepped", "gpu", "")
        assert holds_back(run.recording)
        there = on_side(run)
        assert 2 * BATCH <= there <= 4 * BATCH  # the host asks for the next one while the GPU works on the last few
        assert answer.peak_as_run is not None
        assert answer.peak_as_run.reserved - answer.peak.reserved == 24 * BATCH - there
        assert answer.peak_as_run.allocated == answer.peak.allocated
        taken = np.where(run.recording.kinds == Kind.SEGMENT, run.recording.sizes, 0)
        assert np.cumsum(taken).max() == answer.peak.reserved
        assert answer.limited is not None
        assert (answer.limited.outcome, run.refused) == ("stepped", None)

    @pytest.mark.full
    def test_batches_stay_where_the_gpu_is_far_behind(self, tmp_path: Path) -> None:
        run = ran(tmp_path, SLOW)
        assert run.answer.held_until == "gpu"
        assert on_side(run) > 12 * BATCH

    @pytest.mark.full
    def test_two_runs_agree_to_the_bit(self, tmp_path: Path) -> None:
        first, second = ran(tmp_path, SLOW), ran(tmp_path, SLOW)
        for name in Recording.__slots__:
            one, other = (getattr(run.recording, name) for run in (first, second))
            if name in HOST_COUNTS:  # what importing takes depends on what the first run left compiled
                setup = steps_of(first.recording)[0].end
                assert np.array_equal(one[setup:], other[setup:]), name
            elif name not in ("reads", "access_addresses"):  # which begin where the system reserves them
                assert np.array_equal(one, other), name
        alike = {"wall_s": 0, "host_peak_bytes": 0, "limited": None}
        assert msgspec.structs.replace(first.answer, **alike) == msgspec.structs.replace(second.answer, **alike)

    @pytest.mark.full
    def test_what_cannot_be_allocated_again_stays_an_upper_bound_and_says_so(self, tmp_path: Path) -> None:
        done = run_command(tmp_path, TWO_DEVICES, "--json")
        found = json.loads(done.stdout)
        assert found["answer"]["held_until"] == "host"
        assert found["answer"]["peak_as_run"] is None
        assert found["answer"]["peak"]["reserved"] > 24 * BATCH
        assert any(
            told.startswith("Reserved memory is an upper bound: memory kept by record_stream() counts until")
            for told in found["says"]
        )

    @pytest.mark.full
    def test_the_report_tells_what_the_script_saw(self, tmp_path: Path) -> None:
        done = run_command(tmp_path, FAST)
        assert "keeps freed memory until the GPU is done with it; the figures use the replay's times" in done.stdout

    @pytest.mark.full
    def test_a_script_without_record_stream_is_not_replayed(self, tmp_path: Path) -> None:
        run = ran(tmp_path, FAST.replace("batch.record_stream", "id"))
        assert not holds_back(run.recording)
        assert (run.answer.held_until, run.answer.peak_as_run, run.answer.limited) == ("", None, None)
