"""Recording: a trace lies whole under its name, and the allocator's peak is what was allocated."""

from pathlib import Path

import torch

from refshard.tracing.capture import WARMUP_STEPS, AllocatorPeak, capture_steps
from refshard.tracing.kineto import read_timeline

MEGABYTE = 2**20


def megabytes(n: int) -> torch.Tensor:
    return torch.empty(n * MEGABYTE, dtype=torch.uint8)


def test_capture_holds_the_steps_after_warmup(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    with capture_steps(path, 2) as profiler:
        for _ in range(WARMUP_STEPS + 2):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            profiler.step()
    timeline = read_timeline(path)
    assert len(timeline.windows) == 2
    assert sum(span.name == "aten::mm" for span in timeline.spans) == 2
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_peak_counts_what_was_held_before_the_window_and_not_what_was_freed() -> None:
    with AllocatorPeak(torch.device("cpu")) as peak:
        held = megabytes(3)
        early = megabytes(50)
        del early
        peak.open_window()
        first = megabytes(4)
        second = megabytes(5)
        del first, second
        third = megabytes(7)
        del third
    assert held.nbytes == 3 * MEGABYTE
    assert peak.peak_bytes == (3 + 4 + 5) * MEGABYTE
