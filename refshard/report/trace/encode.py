"""A drawing as JSON: arrays as base64 of little-endian unsigned integers, as narrow as their values allow.

Times are counted in ticks from the drawing's start. A tick is a nanosecond unless the drawing is longer than 2**32 of
them, and then the power of two of nanoseconds with which it fits.
"""

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

from refshard.report.trace.lanes import Drawing
from refshard.report.trace.pyramid import Level
from refshard.timeline import Nanoseconds


def packed(values: npt.NDArray[Any]) -> str:
    """Unsigned integers as their width in bytes, a colon, and base64.

    >>> packed(np.array([1, 2])), packed(np.array([256]))
    ('1:AQI=', '2:AAE=')
    """
    largest = int(values.max(initial=0))
    width = next(width for width in (1, 2, 4) if largest < 256**width)
    return f"{width}:{base64.b64encode(values.astype(f'<u{width}').tobytes()).decode()}"


def encode(drawing: Drawing) -> dict[str, Any]:
    """What ``dashboards/timeline.js`` reads."""
    tick = tick_ns(drawing.end - drawing.start)
    finest = drawing.levels[0].firsts
    queued = np.where(drawing.queued < 0, 0, np.minimum(drawing.queued, 2**32 - 2) + 1)[finest]
    return {
        "tick": tick,
        "length": -(-(drawing.end - drawing.start) // tick),
        "begin": (drawing.begin - drawing.start) // tick,
        "close": (drawing.close - drawing.start) // tick,
        "lanes": [{"label": lane.label, "role": lane.role, "rows": lane.rows} for lane in drawing.lanes],
        "groups": [[group.lane, group.row, group.style] for group in drawing.groups],
        "levels": [_level(level, drawing, finest, tick) for level in drawing.levels],
        "names": packed(drawing.names[finest]),
        "units": packed(drawing.units[finest] + 1),  # 0 is none
        "queued": packed(queued),  # in ns, 0 is unknown
        "notes": packed(drawing.notes[finest] + 1),  # 0 is none
        "noteTable": drawing.note_table,
        "nameTable": drawing.name_table,
        "unitTable": drawing.unit_table,
    }


def tick_ns(length: int) -> int:
    """Nanoseconds per tick.

    >>> tick_ns(2**32 - 2), tick_ns(10 * 10**9)
    (1, 4)
    """
    tick = 1
    while length // tick >= 2**32 - 1:
        tick *= 2
    return tick


def _level(level: Level, drawing: Drawing, finest: Nanoseconds, tick: int) -> dict[str, Any]:
    starts = (level.starts - drawing.start) // tick
    extents = (level.ends - drawing.start) // tick - starts
    merged = bool(np.any(level.counts > 1))
    offsets = np.searchsorted(level.groups, np.arange(len(drawing.groups) + 1))
    return {
        "resolution": level.resolution / tick,
        "offsets": packed(offsets),
        "starts": packed(starts),
        "extents": packed(extents),
        # Where nothing is merged, a block is a span and is busy throughout.
        "busy": packed(level.busy // tick) if merged else None,
        "counts": packed(level.counts) if merged else None,
        "firsts": packed(np.searchsorted(finest, level.firsts)) if level.firsts is not finest else None,
    }
