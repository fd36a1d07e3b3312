"""Recording: a trace lies whole under its name."""

from pathlib import Path

import torch

from refshard.tracing.kineto import read_timeline
from refshard.tracing.recording import WARMUP_STEPS, capture_steps


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
