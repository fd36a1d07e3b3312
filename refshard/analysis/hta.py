"""What Holistic Trace Analysis (HTA) says of a trace, to compare with what refshard says.

HTA logs to stdout, lets pandas errors through, and is slow on large traces. So it runs in a process of its own
with a time limit, and this is the only file that imports it, in that process alone. ``docs/reference/metrics.md``
says where its figures differ from refshard's, and why.
"""

import contextlib
import importlib.metadata
import logging
import math
import os
import re
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from refshard.errors import TraceError
from refshard.events.timeline import Kind, Timeline
from refshard.resources import install_extra

DISTRIBUTION = "traceinsight"
"""The maintained distribution of HTA; its import name is ``hta``."""

REMEDY = install_extra("hta")

PANDAS_FROM, PANDAS_BELOW = (2, 2), (3, 0)
"""The versions of pandas with which refshard and HTA's own tests pass; the extra ``hta`` holds pandas to the same."""

_INCLUDE_LAST_STEP = "--include-last-step"
_MEMORY = ("Memcpy", "Memset")
_NO_ROUNDING = "HTA_DISABLE_NS_ROUNDING"


class HtaFigures(msgspec.Struct, frozen=True, kw_only=True, tag="figures"):
    """HTA's temporal breakdown and overlap of one rank, over all the steps that it keeps.

    Times are in microseconds. ``span_us``, HTA's "kernel_time", reaches from the start of the first device event to the
    end of the last, and equals ``idle_us + compute_us + noncompute_us``. ``noncompute_us`` is time in which copies,
    communication or sync events run and no compute does: HTA gives no exposed communication. ``overlap_pct`` is the
    percentage, 0 to 100, of communication during which compute runs, with two decimals; None where HTA prints nan, for
    want of communication.
    """

    version: str
    span_us: float
    compute_us: float
    noncompute_us: float
    idle_us: float
    overlap_pct: float | None


class HtaFailure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """HTA gave no figures; ``error`` is one line: the exception that it raised, or how its process ended."""

    version: str
    error: str


def in_its_words(timeline: Timeline) -> HtaFigures | None:
    """Exact figures of a trace by HTA's classes, in which every kernel that neither communicates nor copies computes.

    None for a trace without device events, which HTA does not support.
    """
    if not timeline.on_device:
        return None
    spans = timeline.spans
    is_memory = np.array([name.startswith(_MEMORY) for name in spans.name_table])[spans.names]
    communicates = spans.of_kind(Kind.COMM)
    comm, compute = spans.covered(communicates), spans.covered(~communicates & ~is_memory)
    busy, span = timeline.busy(*Kind), int(spans.ends.max() - spans.starts.min())
    return HtaFigures(
        version="refshard", span_us=span / 1000, compute_us=compute.length / 1000,
        noncompute_us=(busy.length - compute.length) / 1000, idle_us=(span - busy.length) / 1000,
        overlap_pct=round(100 * (comm & compute).length / comm.length, 2) if comm.length else None,
    )  # fmt: skip


def cross_check(
    path: Path,
    *,
    include_last_step: bool = False,
    rounded: bool = True,
    time_limit_s: float = 600.0,
    installed: Callable[[str], str] = importlib.metadata.version,
) -> HtaFigures | HtaFailure:
    """Run HTA on one rank's trace (HTA reads names that end in ``.json`` or ``.gz``).

    As they stand, the options are HTA's own defaults, so that the figures are those which its users see: the last of
    several steps is dropped, and starts are rounded up and ends down to whole microseconds where the trace holds
    decimals. ``installed`` gives the version of a distribution, and is there for tests.

    Raises:
        TraceError: HTA is not installed, or not with a pandas that it works with; the message names the remedy.
    """
    try:
        version = installed(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise TraceError(f"a cross-check needs Holistic Trace Analysis; {REMEDY}") from None
    pandas = installed("pandas")
    match = re.match(r"(\d+)\.(\d+)", pandas)
    if match is None or not PANDAS_FROM <= (int(match[1]), int(match[2])) < PANDAS_BELOW:
        wanted = f">={'.'.join(map(str, PANDAS_FROM))},<{PANDAS_BELOW[0]}"
        raise TraceError(f"Holistic Trace Analysis {version} needs pandas {wanted}, got {pandas}; {REMEDY}")
    command = [sys.executable, "-m", "refshard.analysis.hta", str(path.absolute())]
    environment = {**os.environ, _NO_ROUNDING: "0" if rounded else "1"}
    try:
        done = subprocess.run(
            [*command, _INCLUDE_LAST_STEP] if include_last_step else command,
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=time_limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return HtaFailure(version=version, error=f"no result within the time limit of {time_limit_s:g} s")
    if done.returncode:
        return HtaFailure(version=version, error=_how_it_ended(done.returncode, done.stderr))
    return msgspec.json.decode(done.stdout, type=HtaFigures | HtaFailure)


def _how_it_ended(returncode: int, stderr: bytes) -> str:
    r"""One line on a process that gave no result.

    >>> _how_it_ended(-9, b"")
    'its process was ended by SIGKILL, perhaps for want of memory'
    >>> _how_it_ended(1, b"Traceback ...\nImportError: no msgspec\n")
    'its process ended with status 1: ImportError: no msgspec'
    """
    if returncode < 0:
        hint = ", perhaps for want of memory" if returncode == -signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-returncode).name}{hint}"
    last = stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return f"its process ended with status {returncode}: {last}"


def _analyse(path: str, *, include_last_step: bool) -> HtaFigures | HtaFailure:
    """In the child process: HTA's figures, or any exception that it raised."""
    version = importlib.metadata.version(DISTRIBUTION)
    try:
        from hta.trace_analysis import TraceAnalysis

        analysis = TraceAnalysis(trace_files={0: path}, include_last_profiler_step=include_last_step)
        times = analysis.get_temporal_breakdown(visualize=False).iloc[0]
        overlap_pct = float(analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"])
    except Exception as error:
        return HtaFailure(version=version, error=_one_line(error))
    return HtaFigures(
        version=version, span_us=float(times["kernel_time(us)"]), compute_us=float(times["compute_time(us)"]),
        noncompute_us=float(times["non_compute_time(us)"]), idle_us=float(times["idle_time(us)"]),
        overlap_pct=None if math.isnan(overlap_pct) else overlap_pct,
    )  # fmt: skip


def _one_line(error: Exception) -> str:
    """Its type and message; of a bare assertion, the condition that did not hold."""
    frames = traceback.extract_tb(error.__traceback__)
    message = str(error) or (frames[-1].line if frames else None) or ""
    return " ".join(f"{type(error).__name__}: {message}".split()).removesuffix(":")


def _main(path: str, *options: str) -> None:
    # HTA takes stdout for its log as it is imported; the result must be alone there.
    with contextlib.redirect_stdout(sys.stderr):
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        result = _analyse(path, include_last_step=_INCLUDE_LAST_STEP in options)
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
