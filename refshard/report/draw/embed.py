"""Traces inside a page, so that a page that is sent elsewhere can still open them in Perfetto."""

import base64
import gzip
from collections.abc import Sequence
from pathlib import Path

from refshard.quantities import MIB

MOST_EMBEDDED = MIB // 2
"""Compressed bytes of one trace: with them, the page of a step of 20,000 kernels stays under 3 MB."""
MOST_EMBEDDED_TOGETHER = 4 * MIB
"""And of all traces of one page."""


def embedded(paths: Sequence[Path]) -> list[str | None]:
    """Each trace's gzip as base64, None if it is too large or cannot be read."""
    left, found = MOST_EMBEDDED_TOGETHER, list[str | None]()
    for path in paths:
        content = _gzipped(path, min(left, MOST_EMBEDDED))
        left -= len(content or b"")
        found.append(None if content is None else base64.b64encode(content).decode())
    return found


def _gzipped(path: Path, most: int) -> bytes | None:
    """The trace's bytes as gzip, None if they are more than ``most`` or the file cannot be read any more."""
    try:
        size = path.stat().st_size
        if size > 16 * most:  # a trace as plain JSON compresses to about a tenth
            return None
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        if compressed and size > most:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    content = content if compressed else gzip.compress(content, mtime=0)
    return content if len(content) <= most else None
