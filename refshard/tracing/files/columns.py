"""Columns that grow block by block, each in one piece of memory, so that joining the blocks takes no more of it."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

TYPES: dict[str, type] = {
    "starts": np.int64, "ends": np.int64, "correlations": np.int64, "externals": np.int64,
    "times": np.int64, "changes": np.int64, "addresses": np.int64, "allocated": np.int64, "reserved": np.int64,
    "devices": np.int32,
    "categories": np.int8, "names": np.int32, "threads": np.int32, "lanes": np.int32, "signatures": np.int32,
    "operands": np.int32, "is_collective": np.bool_,
    "kinds": np.int8, "streams": np.int64, "sources": np.int64, "records": np.int64,
}  # fmt: skip
"""Of the columns of the tables in ``events.py`` and ``frames.py``, by name."""


class Growing:
    """The columns of ``table``, a dataclass, in the order of its fields; other fields than columns are left out."""

    def __init__(self, table: type) -> None:
        names = [name for name in table.__dataclass_fields__ if name in TYPES]  # type: ignore[attr-defined]
        self._buffers = {name: bytearray() for name in names}

    def append(self, block: Iterable[npt.NDArray[Any]]) -> None:
        """Add some rows, a column each."""
        for (name, buffer), column in zip(self._buffers.items(), block, strict=True):
            if len(column):
                buffer += np.ascontiguousarray(column, TYPES[name]).view(np.uint8).data

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """All rows; none may be added any more."""
        return {
            name: np.frombuffer(buffer, TYPES[name]) if buffer else np.empty(0, TYPES[name])
            for name, buffer in self._buffers.items()
        }
