"""The annotations of a trace, for messages: which are frequent, and which look like steps."""

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

from refshard.events.table import ANNOTATION, EMULATED, GLOO, TraceFile
from refshard.tracing.labels import meaning_of

_NUMBER = re.compile(r"\d+")
_HEAD = re.compile(r"[^\w']*[A-Za-z_]+")
"""What a pattern can start with: the first word, with what stands before it."""
_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")
_NOT_SUGGESTED = re.compile(
    rf"ProfilerStep|nccl|FSDP::|FullyShardedDataParallel|{GLOO}|{EMULATED}|## Call Compiled|Torch-Compiled"
    r"|record_param_comms|enumerate\(DataLoader"
)
"""Repeated within a step, or around none."""
_LEAST_SHARE = 0.1
"""Annotations that take a smaller part of the host's time are no steps."""
_MOST_NAMED = 8


def suggestion(trace: TraceFile) -> str:
    """A pattern for the repeated annotations that take most time, in a clause; empty where there are none."""
    counts, lengths = Counter[str](), Counter[str]()
    for name, count, ns in _annotations(trace):
        if (head := _HEAD.match(name)) and not _NOT_SUGGESTED.match(name) and meaning_of(name) is None:
            counts[head[0]] += count
            lengths[head[0]] += ns
    least = _LEAST_SHARE * (int(trace.host.ends.max()) - int(trace.host.starts.min())) if lengths else 0
    repeated = [head for head, ns in lengths.most_common() if counts[head] > 1 and ns >= least]
    if not repeated:
        return ""
    pattern = "^" + _SPECIAL.sub(r"\\\g<0>", repeated[0])
    return f"; or use --window '{pattern}', which takes its {counts[repeated[0]]} annotations as windows"


def frequent(trace: TraceFile) -> str:
    """The most frequent annotations, numbers aside."""
    counts, names = Counter[str](), dict[str, set[str]]()
    for name, count, _ in _annotations(trace):
        kind = _NUMBER.sub("#", name)
        counts[kind] += count
        names.setdefault(kind, set()).add(name)
    if not counts:
        return "the trace has no annotations; a range of time such as 1.5s..2s needs none"
    found = [
        f"{min(names[kind]) if len(names[kind]) == 1 else kind} ({count})"
        for kind, count in counts.most_common(_MOST_NAMED)
    ]
    return f"the most frequent are: {', '.join(found)}"


def _annotations(trace: TraceFile) -> Iterable[tuple[str, int, int]]:
    """Name, number and total length of every annotation."""
    host = trace.host
    rows = host.categories == ANNOTATION
    codes, lengths = host.names[rows], (host.ends - host.starts)[rows]
    counts = np.bincount(codes, minlength=1)
    sums = np.bincount(codes, weights=lengths, minlength=1)
    for code in np.flatnonzero(counts).tolist():
        yield trace.names[code], int(counts[code]), int(sums[code])
