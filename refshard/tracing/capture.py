"""Recording a Kineto trace of a few steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

WARMUP_STEPS = 1
"""Steps that the profiler runs through before it records, since its own start costs time."""


@contextmanager
def capture_steps(path: Path, steps: int, *, all_threads: bool = False) -> Iterator[profile]:
    """Profile ``WARMUP_STEPS + steps`` training steps; the caller calls ``step()`` on what is yielded after each.

    ``all_threads`` records threads too that Python started. The trace of the last ``steps`` is written to ``path``
    (gzipped Chrome JSON, as ``.json.gz``) and is there when the context ends.
    """

    def write(profiler: profile) -> None:
        # torch picks gzip by the suffix; a torn file never stands under the final name.
        unfinished = path.with_name(f"unfinished-{path.name}")
        try:
            profiler.export_chrome_trace(str(unfinished))
            unfinished.replace(path)
        finally:  # on a full disk it would take the room in which to say so
            unfinished.unlink(missing_ok=True)

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=WARMUP_STEPS, active=steps, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
        experimental_config=_ExperimentalConfig(profile_all_threads=True) if all_threads else None,
    ) as profiler:
        yield profiler
