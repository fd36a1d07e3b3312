"""One device of a trace that holds several, such as a report of Nsight Systems on all ranks of a host."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from refshard.errors import TraceError
from refshard.tracing.files.events import LAUNCH, TraceFile


def only_device(trace: TraceFile, device: str) -> TraceFile:
    """The trace with one device's events, and with the host's events of the processes that launched them.

    Raises:
        TraceError: the trace has no such device.
    """
    wanted = [lane for lane, (name, _) in enumerate(trace.lanes) if name == device]
    if not wanted:
        names = ", ".join(sorted({name for name, _ in trace.lanes})) or "none (a CPU trace)"
        raise TraceError(f"{trace.path}: --device {device} is not in the trace; its devices: {names}")
    rows = np.flatnonzero(np.isin(trace.device.lanes, wanted))
    host = trace.host
    launched = (host.categories == LAUNCH) & (host.correlations > 0)
    launched &= np.isin(host.correlations, trace.device.correlations[rows])
    processes = {trace.threads[thread][0] for thread in np.unique(host.threads[launched]).tolist()}
    threads = [place for place, (process, _) in enumerate(trace.threads) if process in processes]
    kept = np.flatnonzero(np.isin(host.threads, threads)) if processes else np.arange(len(host.threads))
    return replace(
        trace,
        host=replace(host, **{name: getattr(host, name)[kept] for name in host.__dataclass_fields__}),
        device=replace(
            trace.device, **{name: getattr(trace.device, name)[rows] for name in trace.device.__dataclass_fields__}
        ),
        host_args=_renumbered(trace.host_args, kept),
        device_args=_renumbered(trace.device_args, rows),
    )


def _renumbered(args: dict[int, dict[str, Any]], rows: npt.NDArray[np.int64]) -> dict[int, dict[str, Any]]:
    """Arguments by row, of the rows that are left."""
    places = np.flatnonzero(np.isin(rows, list(args))).tolist()
    return {place: args[int(rows[place])] for place in places}
