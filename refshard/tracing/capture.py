"""Recording a Kineto trace of a few steps, and a process's allocator peak, on a rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WARMUP_STEPS = 1
"""Steps that the profiler runs through before it records, since its own start costs time."""


@contextmanager
def capture_steps(path: Path, steps: int) -> Iterator[profile]:
    """Profile ``WARMUP_STEPS + steps`` training steps; the caller calls ``step()`` on what is yielded after each.

    The trace of the last ``steps`` is written to ``path`` (gzipped Chrome JSON, as ``.json.gz``) and is there when the
    context ends.
    """

    def write(profiler: profile) -> None:
        # torch picks gzip by the suffix; a torn file never stands under the final name.
        unfinished = path.with_name(f"unfinished-{path.name}")
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(path)

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=WARMUP_STEPS, active=steps, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
    ) as profiler:
        yield profiler


class AllocatorPeak:
    """Peak of what the allocator holds on ``device`` between :meth:`open_window` and the end of the context.

    On CUDA the caching allocator keeps the count itself. On a CPU only the profiler sees allocations, and only those
    made while it runs: enter this context before the model is built, so that parameters and optimizer state count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profiler: profile | None = None
        self._window_ns = 0
        self.peak_bytes = 0

    def __enter__(self) -> "AllocatorPeak":
        if self._device.type == "cpu":
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profiler.__enter__()
        return self

    def open_window(self) -> None:
        """Start to look for the peak; what was allocated before still counts as held."""
        if self._device.type == "cpu":
            with torch.profiler.record_function(_WINDOW):
                pass
        else:
            torch.cuda.reset_peak_memory_stats(self._device)

    def __exit__(self, *exc_info: object) -> None:
        if self._profiler is None:
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            return
        self._profiler.__exit__(None, None, None)
        self.peak_bytes = _peak_in_window(self._profiler)
        self._profiler = None


_WINDOW = "refshard::memory_window"


def _peak_in_window(profiler: profile) -> int:
    """Running sum of the allocator's events, from the profiler's start, maximised from the window's opening on."""
    assert profiler.profiler is not None
    results: Any = profiler.profiler.kineto_results
    events = sorted(results.events(), key=lambda event: event.start_ns())
    held = peak = 0
    opened = False
    for event in events:
        if event.name() == _WINDOW:
            opened, peak = True, held
        elif event.name() == "[memory]":
            held += event.nbytes()
            if opened:
                peak = max(peak, held)
    return peak
