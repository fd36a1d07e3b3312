"""Recording: a trace lies whole under its name."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from refshard.analysis.kineto import read_timeline
from refshard.analysis.recording import MOST_POINTS, WARMUP_STEPS, AllocatorPeak, capture_steps, highest_of
from tests.events.spans import listed


def test_capture_holds_the_steps_after_warmup(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    with capture_steps(path, 2) as profiler:
        for _ in range(WARMUP_STEPS + 2):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            profiler.step()
    timeline = read_timeline(path)
    assert len(timeline.windows) == 2
    assert sum(span.name == "aten::mm" for span in listed(timeline.spans)) == 2
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


MEGABYTE = 2**20


def megabytes(n: int) -> torch.Tensor:
    return torch.empty(n * MEGABYTE, dtype=torch.uint8)


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """What torch imports for the first operator that is watched, some 20 MB, is not what these tests measure."""
    with AllocatorPeak().window():
        megabytes(1)


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """The C library counts the whole process: garbage of other tests, a megabyte at times, must not go in a window."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_peak_counts_what_was_held_before_the_window_and_not_what_was_freed() -> None:
    peak = AllocatorPeak()
    held = megabytes(30)
    early = megabytes(500)
    del early
    with peak.window():
        first = megabytes(40)
        second = megabytes(50)
        del first, second
        third = megabytes(70)
        del third
    assert held.nbytes == 30 * MEGABYTE
    assert peak.peak_bytes == pytest.approx((30 + 40 + 50) * MEGABYTE, rel=0.02)


def test_peak_sees_what_another_thread_frees() -> None:
    """As gloo's threads do with the tensors of a collective: the profiler's events would count them for ever."""
    peak = AllocatorPeak()
    with peak.window():
        for _ in range(5):
            kept = [megabytes(40)]
            thread = threading.Thread(target=kept.clear)
            thread.start()
            thread.join()
    assert peak.peak_bytes == pytest.approx(40 * MEGABYTE, rel=0.02)


def test_without_a_window_there_is_no_peak() -> None:
    assert AllocatorPeak().peak_bytes is None


def test_its_course_rises_and_falls_with_what_is_held() -> None:
    peak = AllocatorPeak()
    with peak.window():
        first = megabytes(40)
        second = megabytes(50)
        del first
        third = megabytes(20)
    assert (second.nbytes, third.nbytes) == (50 * MEGABYTE, 20 * MEGABYTE)
    assert peak.course_bytes == pytest.approx([held * MEGABYTE for held in (0, 40, 90, 70)], abs=MEGABYTE)
    assert max(peak.course_bytes) == peak.peak_bytes


def test_a_long_course_keeps_the_highest_of_each_stretch() -> None:
    samples = [n % 50 for n in range(1000)]
    found = highest_of(samples)
    assert len(found) == MOST_POINTS
    assert max(found) == 49
    assert highest_of(list(range(1000)))[-1] == 999
    assert highest_of([]) == ()
