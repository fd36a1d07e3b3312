"""Reads memory timelines of torch's profiler (``export_memory_timeline`` to a file that ends in ``.raw.json.gz``): what
each tensor's bytes are for, as torch judges by the graph of operators.

The file is an array of ``[ns, action, bytes, category]``, where bytes are negative for what goes, and ns is -1 for what
was there before. A tensor that is written to goes and comes again, maybe for another purpose.
"""

import gzip
import os
import zlib
from pathlib import Path

import msgspec
import numpy as np

from refshard.errors import TraceError

CATEGORIES = (
    "parameters", "optimizer state", "inputs", "temporary", "activations", "gradients", "autograd detail", "unknown",
)  # fmt: skip
"""By torch's numbers."""
_START, _GZIP = b"[[", b"\x1f\x8b"
_MOST_BYTES = 1 << 30
"""Of decompressed text: more would not fit where a trace does."""


class MemoryTimelineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of one device: bytes by category, in all, and nanoseconds after the first event that has a time.

    ``before_bytes`` were there before the recording began.
    """

    events: int
    peak_bytes: int
    peak_ns: int
    before_bytes: int
    by_category: dict[str, int]


def is_memory_timeline(path: Path) -> bool:
    """Whether a file begins as such a timeline does; it may be gzipped."""
    if not os.path.isfile(path):  # noqa: PTH113 -- never raises; opening a pipe would wait for its writer
        return False
    try:
        return _text(path, most=64).lstrip().replace(b" ", b"").startswith(_START)
    except (OSError, EOFError, zlib.error):
        return False


def memory_timeline(path: Path) -> MemoryTimelineFigures:
    """The figures of a timeline.

    Raises:
        TraceError: the file cannot be read, is damaged, or is no memory timeline.
    """
    try:
        text = _text(path, most=_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise TraceError(f"{path}: expands to more than {_MOST_BYTES:,} bytes; record fewer steps")
        rows = msgspec.json.decode(text, type=list[tuple[int, int, int, int]])
        times, _, changes, categories = np.array(rows, np.int64).reshape(-1, 4).T
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError) as error:
        raise TraceError(
            f"{path}: an array of arrays, but no memory timeline of torch.profiler ({error}); a trace is an object "
            "with traceEvents, or an array of events"
        ) from None
    if not len(times) or categories.min() < 0 or categories.max() >= len(CATEGORIES):
        raise TraceError(
            f"{path}: no memory timeline of torch.profiler (no events, or categories that it does not have)"
        )
    order = np.argsort(times, kind="stable")
    times, changes, categories = times[order], changes[order], categories[order]
    held = np.cumsum(changes)
    # Within one moment a tensor may go and come again: what counts is what is held after it.
    last = np.append(times[1:] > times[:-1], True)
    at = int(np.flatnonzero(last)[np.argmax(held[last])])
    if held[at] <= 0:
        raise TraceError(f"{path}: no memory timeline of torch.profiler (it never holds anything)")
    sums = np.bincount(categories[: at + 1], weights=changes[: at + 1], minlength=len(CATEGORIES)).astype(np.int64)
    recorded = times[times >= 0]
    return MemoryTimelineFigures(
        events=len(times),
        peak_bytes=int(held[at]),
        peak_ns=max(0, int(times[at] - recorded[0])) if len(recorded) else 0,
        before_bytes=int(changes[times < 0].sum()),
        by_category={name: size for name, size in zip(CATEGORIES, sums.tolist()) if size},
    )


def _text(path: Path, *, most: int) -> bytes:
    with path.open("rb") as raw:
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        return gzip.GzipFile(fileobj=raw).read(most) if packed else raw.read(most)
