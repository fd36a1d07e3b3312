"""Kineto traces made by hand, whose every figure can be added up on paper."""

import gzip
import json
from pathlib import Path
from typing import Any

BASE_US = 1_790_857_026_000_000
"""A real trace's order of magnitude: microseconds since 1970, where a float would lose nanoseconds."""


def event(
    name: str, start: float, duration: float, *, cat: str = "cpu_op", tid: int = 1, collective: str = "", **args: Any
) -> dict[str, Any]:
    """One complete event; times in microseconds after the base, given to the nanosecond.

    Underscores stand for the spaces in the names of arguments.
    """
    args = {key.replace("_", " "): value for key, value in args.items()}
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": f"{BASE_US}+{start}", "dur": duration,
        "args": {**args, **({"Collective name": collective} if collective else {})},
    }  # fmt: skip


def write(path: Path, events: list[dict[str, Any]], *, rank: int = 0, **metadata: Any) -> Path:
    """Write a trace as Kineto does: decimal microseconds with three digits, gzipped where the name says so."""
    lines = []
    for e in events:
        start = float(e["ts"].partition("+")[2])
        whole, nanoseconds = divmod(round(start * 1000), 1000)
        text = json.dumps({k: v for k, v in e.items() if k != "ts"})[:-1]
        lines.append(f'{text}, "ts": {BASE_US + whole}.{nanoseconds:03d}}}')
    head = json.dumps({**metadata, "schemaVersion": 1, "distributedInfo": {"rank": rank}})
    body = f'{head[:-1]}, "traceEvents": [{", ".join(lines)}]}}'
    path.write_bytes(gzip.compress(body.encode()) if path.suffix == ".gz" else body.encode())
    return path


def step(number: int, start: float, duration: float) -> dict[str, Any]:
    """A ProfilerStep annotation on the main thread."""
    return event(f"ProfilerStep#{number}", start, duration, cat="user_annotation")


def note(name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    """An annotation of the host."""
    return event(name, start, duration, cat="user_annotation", **args)


def shaped(dims: list[Any], types: list[str]) -> dict[str, Any]:
    """The arguments that record_shapes adds."""
    return {"Input Dims": dims, "Input type": types}
