"""Traces inside a page, so that a page that is sent elsewhere can still open them in Perfetto."""

import base64
import contextlib
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
        most, content = min(left, MOST_EMBEDDED), None
        with contextlib.suppress(OSError):
            with path.open("rb") as file:
                compressed = file.read(2) == b"\x1f\x8b"
            # A trace as plain JSON compresses to about a tenth.
            if path.stat().st_size <= (most if compressed else 16 * most):
                content = path.read_bytes() if compressed else gzip.compress(path.read_bytes(), mtime=0)
        kept = None if content is None or len(content) > most else content
        left -= len(kept or b"")
        found.append(None if kept is None else base64.b64encode(kept).decode())
    return found
