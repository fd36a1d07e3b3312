"""Five questions about a trace, answered with pandas.

    python docs/examples/trace_frames.py [TRACE...]

Without arguments it reads a trace that lies beside it: FSDP2, three blocks of Llama 3 8B, as a dry run on 8 H100s
predicts it. Profiler traces of one or more ranks go the same way, also a folder of them.
"""

import sys
from pathlib import Path

import pandas as pd

import refshard
from refshard.analysis.frames import Trace


def time_by_kind(trace: Trace) -> pd.DataFrame:
    """Where does each step's time go? Milliseconds; kinds that overlap each other count in both."""
    kinds = ["compute_ns", "comm_ns", "exposed_ns", "lone_copy_ns", "idle_ns", "span_ns"]
    table = trace.breakdown.set_index(["rank", "step"])[kinds] / 1e6
    return table.rename(columns=lambda name: name.replace("_ns", "_ms"))


def top_kernels(trace: Trace, count: int = 5) -> pd.DataFrame:
    """Which kernels take most, and how even are their runs? All steps."""
    compute = trace.kernels.query("kind == 'compute' and step.notna()")
    table = compute.groupby("short").duration_ns.agg(runs="count", total_ms="sum", median_us="median", longest_us="max")
    table["share"] = table.total_ms / table.total_ms.sum()
    table = table.astype({"total_ms": float, "longest_us": float})
    table["total_ms"] /= 1e6
    table[["median_us", "longest_us"]] /= 1e3
    return table.nlargest(count, "total_ms")


def exposed_collectives(trace: Trace, count: int = 5) -> pd.DataFrame:
    """Which collectives are not hidden behind compute? Per step, by operation and layer."""
    steps = trace.breakdown.groupby("rank").step.count().max()
    table = trace.collectives.groupby(["op", "unit"], dropna=False)[["duration_ns", "exposed_ns"]].sum() / 1e6 / steps
    table["hidden"] = 1 - table.exposed_ns / table.duration_ns
    table = table.rename(columns={"duration_ns": "duration_ms", "exposed_ns": "exposed_ms"})
    return table.nlargest(count, "exposed_ms")


def idle_by_cause(trace: Trace, count: int = 5) -> pd.DataFrame:
    """Why is the device idle, and before what? All steps."""
    table = trace.gaps.groupby(["cause", "after"], dropna=False).duration_ns.agg(gaps="count", total_ms="sum")
    table["total_ms"] = table.total_ms.astype(float) / 1e6
    return table.nlargest(count, "total_ms")


def memory_over_time(trace: Trace, points: int = 6) -> pd.DataFrame:
    """What does the allocator hold? The highest of each part of the recording, GiB."""
    memory = trace.memory
    if memory.empty:
        return pd.DataFrame({"record with": ["profile_memory=True"]})
    part = pd.cut(memory.ns.astype("int64"), points, labels=False)
    table = memory.groupby(["rank", part]).agg(until_ms=("ns", "max"), peak_gib=("bytes", "max"))
    return table.droplevel("ns").astype(float) / [1e6, 2**30]


def main(*paths: str) -> None:
    trace = refshard.read_trace(paths or Path(__file__).parent / "trace_fsdp2.json.gz")
    for recipe in (time_by_kind, top_kernels, exposed_collectives, idle_by_cause, memory_over_time):
        print(f"{recipe.__doc__}\n{recipe(trace).to_string(float_format='{:,.2f}'.format)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
