"""How fast traces are analysed, and in how much memory: a large trace alone, and a smaller one beside HTA.

Real traces of that size are nobody's to ship, so one is made of a small real one: its events again and again, each time
later, with ids and step numbers of their own. What is replicated is a trace of eight A100s from
``../shared/traces``, or from ``REFSHARD_TRACE``; without either, one that the project recorded on a CPU, which HTA
cannot read.

    pytest suites/bench_tracing.py --benchmark-json=tracing.json

The first test analyses 1 GB in a process of its own, on one core, and records its peak resident set. The second gives
the same 200 MB to ``refshard trace`` and to Holistic Trace Analysis (extra ``hta``) in turn, in processes of their own:
breakdown and overlap are what is asked of both. With ``--benchmark-disable`` both are small.
"""

import gzip
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from refshard.resources import install_extra

ROOT = Path(__file__).parents[1]
CANDIDATES = (
    Path(os.environ.get("REFSHARD_TRACE", "")),
    ROOT.parent / "shared" / "traces" / "hta_trace_diff_control_a100_8rank_r3.json.gz",
    *sorted((ROOT / "profiles" / "recorded").glob("*/*/traces/refshard-yafsdp*.json.gz")),
)
SOURCE = next(path for path in CANDIDATES if path.is_file())
LARGE, SMALL, SMOKE = 1_000_000_000, 200_000_000, 4_000_000
ROUNDS = 3
_SHIFTED = re.compile(rb'"(ts)": (\d+)|"(External id|external id|correlation|Ev Idx|id)": (\d+)|(ProfilerStep#)(\d+)')


def replicate(source: Path, target: Path, size: int) -> int:
    """Write ``source``'s events to ``target`` until it holds ``size`` bytes; return how often they stand there."""
    text = gzip.decompress(source.read_bytes())
    opening = text.index(b"[", text.index(b'"traceEvents"')) + 1
    # The array's end: only metadata follows it.
    closing = text.rindex(b"]", 0, len(text) if b'"traceName"' not in text else text.rindex(b'"traceName"'))
    head, events, tail = text[:opening], text[opening:closing].strip(), text[closing:]
    times = [int(match[1]) for match in re.finditer(rb'"ts": (\d+)', events)]
    span = max(times) - min(times) + 1_000_000
    ids = 1 + max(int(match[1]) for match in re.finditer(rb'"(?:External id|correlation)": (\d+)', events))
    steps = [int(match[1]) for match in re.finditer(rb"ProfilerStep#(\d+)", events)]
    stride = max(steps, default=0) - min(steps, default=0) + 1
    copies = 0
    with target.open("wb") as file:
        file.write(head)
        while file.tell() < size:
            file.write(b",\n" if copies else b"\n")
            file.write(_SHIFTED.sub(lambda match, by=copies: _shift(match, by, span, ids, stride), events))  # type: ignore[misc]
            copies += 1
        file.write(tail)
    return copies


def _shift(match: "re.Match[bytes]", by: int, span: int, ids: int, stride: int) -> bytes:
    if match[1]:
        return b'"ts": %d' % (int(match[2]) + by * span)
    if match[3]:
        return b'"%b": %d' % (match[3], int(match[4]) + by * ids)
    return b"ProfilerStep#%d" % (int(match[6]) + by * stride)


@pytest.fixture
def large(benchmark: Any, tmp_path: Path) -> Iterator[Path]:
    """A trace of 1 GB, gone afterwards."""
    yield from _made(tmp_path, SMOKE if benchmark.disabled else LARGE)


@pytest.fixture
def small(benchmark: Any, tmp_path: Path) -> Iterator[Path]:
    """A trace of 200 MB, gone afterwards."""
    pytest.importorskip("hta", reason=f"HTA is not here; {install_extra('hta')}")
    if b'"kernel"' not in gzip.decompress(SOURCE.read_bytes()):
        pytest.skip("HTA analyses traces of GPUs only, and there is none; name one in REFSHARD_TRACE")
    yield from _made(tmp_path, SMOKE if benchmark.disabled else SMALL)


def _made(folder: Path, size: int) -> Iterator[Path]:
    path = folder / f"{size // 1_000_000}MB.json"
    replicate(SOURCE, path, size)
    yield path
    path.unlink()


def run_on_one_core(arguments: list[str]) -> tuple[float, int]:
    """Seconds and peak resident bytes of a process of its own, pinned to one core."""
    started = time.perf_counter()
    process = subprocess.Popen(
        arguments, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{arguments} ended with {process.returncode}"
    return time.perf_counter() - started, usage.ru_maxrss * 1024


def ours(trace: Path) -> list[str]:
    """All that ``refshard trace`` finds, as JSON."""
    return [sys.executable, "-m", "refshard", "trace", str(trace), "--json"]


def hta(trace: Path) -> list[str]:
    """HTA's breakdown and overlap, as its users call it: its own defaults, nothing drawn."""
    script = (
        "import sys; from hta.trace_analysis import TraceAnalysis;"
        "analysis = TraceAnalysis(trace_files={0: sys.argv[1]});"
        "analysis.get_temporal_breakdown(visualize=False); analysis.get_comm_comp_overlap(visualize=False)"
    )
    return [sys.executable, "-c", script, str(trace)]


def test_one_gigabyte(benchmark: Any, large: Path) -> None:
    """Time and peak memory of one trace of 1 GB: at most 10 s and 1.5 GB on one core."""
    peaks = []

    def analyse() -> None:
        peaks.append(run_on_one_core(ours(large))[1])

    benchmark.pedantic(analyse, rounds=ROUNDS)
    benchmark.extra_info.update(
        {"source": SOURCE.name, "bytes": large.stat().st_size, "peak_rss_bytes": max(peaks), "cores": 1}
    )


def test_beside_hta(benchmark: Any, small: Path) -> None:
    """The same 200 MB to both, in turn: refshard's time, and how many times as long HTA takes."""
    times: dict[str, list[float]] = {"refshard": [], "hta": []}
    peaks = {"refshard": 0, "hta": 0}

    def in_turn() -> None:
        for name, arguments in (("refshard", ours(small)), ("hta", hta(small))):
            seconds, peak = run_on_one_core(arguments)
            times[name].append(seconds)
            peaks[name] = max(peaks[name], peak)

    benchmark.pedantic(in_turn, rounds=ROUNDS)
    ratios = [theirs / mine for mine, theirs in zip(times["refshard"], times["hta"])]
    benchmark.extra_info.update(
        {
            "source": SOURCE.name,
            "bytes": small.stat().st_size,
            "seconds": times,
            "hta_over_refshard": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
            "peak_rss_bytes": peaks,
            "hta": version("traceinsight"),
        }
    )
