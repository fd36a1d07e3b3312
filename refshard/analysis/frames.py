"""Figures of traces as pandas frames, for notebooks and scripts.

Columns have the names of ``refshard trace --json``; names end in their unit: ``_ns`` are int64 nanoseconds, ``_bytes``
and ``bytes`` bytes, ``_per_s`` and ``_bandwidth`` per second. Unknown values are ``pandas.NA``: columns are pandas'
nullable types, so that nanoseconds stay exact.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import inspect

from refshard.analysis.analyse import Analysis, analyse, join
from refshard.analysis.figures import (
    Breakdown,
    CollectiveFigures,
    MemoryPoint,
    OperatorFigures,
    StepFigures,
    TraceFigures,
)
from refshard.analysis.names import short_kernel_name
from refshard.analysis.overlap import CAUSES, idle_gaps
from refshard.analysis.windows import bounds
from refshard.errors import TraceError
from refshard.events.timeline import KINDS, UNKNOWN

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".json", ".json.gz", ".sqlite")
"""Endings of traces' file names."""
_DTYPES: dict[type[inspect.Type], str] = {
    inspect.IntType: "Int64", inspect.FloatType: "Float64", inspect.BoolType: "boolean", inspect.StrType: "string",
    inspect.LiteralType: "string", inspect.EnumType: "string",
}  # fmt: skip
_RUN = {"step": "Int64", "start_ns": "Int64", "duration_ns": "Int64"}
_Columns = Mapping[str, Sequence[Any]]
_Source = str | Path | Sequence[str | Path]


def read_trace(source: _Source, *, device: str | None = None) -> "Trace":
    """Read Kineto traces or exports of nsys into frames: a file, a list of files, or a folder (the ranks of a job).

    Files are read on first access to a frame. If a file has several devices, ``device`` selects one, such as "0"::

        trace = refshard.read_trace("runs/latest")
        trace.breakdown.groupby("rank").exposed_ns.mean()

    Raises:
        TraceError: a file does not exist, or a folder has no traces. Frames raise it if a file is not a trace.
    """
    several = [source] if isinstance(source, str | Path) else source
    files, folders = dict[Path, None](), set[Path]()
    for path in map(Path, several):
        if path.is_dir():
            found = trace_files(path)
            if not found:
                raise TraceError(f"{path}: holds no trace; traces end in {', '.join(SUFFIXES)}")
            folders |= set(found)
            files |= dict.fromkeys(found)
        elif path.exists():
            files[path] = None
        else:
            raise TraceError(f"{path}: no such file or folder")
    if not files:
        raise TraceError("no trace was named; pass a file, a folder or a list of them")
    return Trace(tuple(files), device=device, optional=frozenset(folders))


def trace_files(folder: Path) -> list[Path]:
    """Files that may be traces, in a folder and below it, without hidden ones; for a run's folder, its traces."""
    if (folder / "records.jsonl").exists() and (folder / "traces").exists():
        folder = folder / "traces"
    files = (Path(where, name) for where, _, names in os.walk(folder) for name in names)
    return sorted(p for p in files if p.name.endswith(SUFFIXES) and os.path.isfile(p) and p.name[0] != ".")  # noqa: PTH113


class Trace:
    """Traces of one or more ranks. Every frame has the columns ``file`` and ``rank``, and is cached."""

    def __init__(self, files: Sequence[Path], *, device: str | None = None, optional: frozenset[Path]) -> None:
        self.files = tuple(files)
        self._device, self._optional = device, optional
        self._skipped: list[str] = []

    def __repr__(self) -> str:
        return f"Trace({', '.join(map(str, self.files[:3]))}{', ...' if len(self.files) > 3 else ''})"

    @cached_property
    def analyses(self) -> tuple[Analysis, ...]:
        """The analysis of each file; its ``figures`` are what ``refshard trace --json`` prints.

        Raises:
            TraceError: a file is damaged or not a trace; for a folder, only if none of its files can be analysed.
        """
        found = list[Analysis]()
        for file in self.files:
            try:
                found.append(analyse(file, device=self._device, keep_graph=False))
            except TraceError as error:
                if file not in self._optional:
                    raise
                self._skipped.append(str(error))
        if not found:
            raise TraceError(self._skipped[0])
        return join(found)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Files in folders that could not be analysed, with the reason."""
        assert self.analyses
        return tuple(self._skipped)

    @cached_property
    def breakdown(self) -> "pd.DataFrame":
        """Where time goes: a row per step; if a trace has no steps, one row for all of it (``step`` is NA).

        ``step``, ``name``, ``start_ns``, ``span_ns``, ``busy_ns``, ``compute_ns``, ``comm_ns``, ``exposed_ns``,
        ``overlap_ratio``, ``idle_ns`` and its causes, and ``copy_ns``, as
        :class:`~refshard.analysis.figures.Breakdown` defines them.
        """
        types = {**_columns(StepFigures, "step", "name", "start_ns"), **_columns(Breakdown)}

        def rows(one: Analysis) -> Iterator[Mapping[str, Any]]:
            figures = one.figures
            unknown = {name: None for name in _columns(Breakdown) if figures.host_only and name != "span_ns"}
            for step in figures.steps:
                about = {"step": step.step, "name": step.name, "start_ns": step.start_ns}
                yield {**_values(step.breakdown), **unknown, **about}
            if not figures.steps:
                yield {**_values(figures.whole), **unknown, "step": None, "name": None, "start_ns": None}

        return self._frame(types, lambda one: _by_column(types, rows(one)))

    @cached_property
    def operators(self) -> "pd.DataFrame":
        """Operators by name and input shapes, the longest first: a row for each, over all steps.

        ``name``, ``kind``, ``shapes``, ``dtype``, ``calls``, ``ns``, ``share``, ``flops``, ``bytes``, ``flops_per_s``,
        ``of_peak``, ``of_roofline`` and ``bound``, as :class:`~refshard.analysis.figures.OperatorFigures` defines them.
        """
        return self._of_structs(OperatorFigures, lambda one: () if one.operators is None else one.operators.operators)

    @cached_property
    def collectives(self) -> "pd.DataFrame":
        """Collectives that ran: a row for each.

        ``op``, ``unit``, ``step``, ``group``, ``group_size``, ``start_ns``, ``duration_ns``, ``exposed_ns``,
        ``queued_ns``, ``bytes``, ``algorithm_bandwidth`` and ``bus_bandwidth`` (bytes per second), ``sequence`` ..., as
        :class:`~refshard.analysis.figures.CollectiveFigures` defines them.
        """
        return self._of_structs(CollectiveFigures, lambda one: one.collectives)

    @cached_property
    def gaps(self) -> "pd.DataFrame":
        """Idle time within the steps, a row for each gap: ``step``, ``start_ns``, ``duration_ns``, ``cause`` (a
        :class:`~refshard.analysis.figures.Cause`), ``before`` and ``after`` (what ran last and next), and ``call`` (the
        call that the launching thread was in).
        """
        types = {**_RUN, **dict.fromkeys(("cause", "before", "after", "call"), "string")}

        def columns(one: Analysis) -> _Columns:
            timeline, spans = one.timeline, one.timeline.spans
            if not len(spans):
                return dict.fromkeys(types, ())
            starts, ends = bounds(timeline.windows)
            gaps = idle_gaps(timeline, int(starts.min()), int(ends.max())).split(starts, ends)
            gaps = gaps.of(gaps.ends > gaps.starts)
            windows = np.searchsorted(starts, gaps.starts, side="right") - 1
            names = (*map(short_kernel_name, spans.name_table), None)  # UNKNOWN is the last
            name_of = np.append(spans.names, UNKNOWN)
            calls = np.empty(0, np.int32) if timeline.calls is None else timeline.calls.names
            return {
                "step": [timeline.windows[place].step for place in windows.tolist()],
                "start_ns": gaps.starts.tolist(), "duration_ns": (gaps.ends - gaps.starts).tolist(),
                "cause": [CAUSES[code].value for code in gaps.causes.tolist()],
                "before": [names[code] for code in name_of[gaps.before].tolist()],
                "after": [names[code] for code in name_of[gaps.followers].tolist()],
                "call": [names[code] for code in np.append(calls, UNKNOWN)[gaps.calls].tolist()],
            }  # fmt: skip

        return self._frame(types, columns)

    @cached_property
    def kernels(self) -> "pd.DataFrame":
        """Kernels and copies on the device (on a CPU: operators and collectives), a row for each run: ``step``,
        ``start_ns``, ``duration_ns``, ``kind`` (compute, comm, copy, prep, unclassified), ``name`` and ``short`` name,
        the ``operator`` that launched it, its ``unit`` (layer) and its ``lane`` (stream).
        """
        types = {**_RUN, **dict.fromkeys(("kind", "name", "short", "operator", "unit", "lane"), "string")}

        def columns(one: Analysis) -> _Columns:
            spans = one.timeline.spans
            units, names = (*spans.unit_names, None), spans.name_table
            short = [short_kernel_name(name) for name in names]
            return {
                "step": [None if step == UNKNOWN else step for step in spans.steps.tolist()],
                "start_ns": spans.starts.tolist(), "duration_ns": (spans.ends - spans.starts).tolist(),
                "kind": [KINDS[code].value for code in spans.kinds.tolist()],
                "name": [names[code] for code in spans.names.tolist()],
                "short": [short[code] for code in spans.names.tolist()],
                "operator": [names[code] for code in spans.operators.tolist()],
                "unit": [units[code] for code in spans.units.tolist()],
                "lane": [spans.lane_names[code] for code in spans.lanes.tolist()],
            }  # fmt: skip

        return self._frame(types, columns)

    @cached_property
    def memory(self) -> "pd.DataFrame":
        """Memory of torch's allocator over time, with every peak: ``device``, ``ns`` (host clock) and ``bytes``.

        Empty unless the trace was recorded with ``profile_memory=True``.
        """
        return self._of_structs(MemoryPoint, lambda one: one.memory)

    def _frame(self, own: Mapping[str, str], columns: Callable[[Analysis], _Columns]) -> "pd.DataFrame":
        """The columns of all files under one another, of the types ``own``."""
        import pandas as pd

        types = {"file": "string", "rank": "Int64", **own}
        values: dict[str, list[Any]] = {name: [] for name in types}
        for one in self.analyses:
            found = columns(one)
            count = len(found[next(iter(own))])
            values["file"] += [str(one.path)] * count
            values["rank"] += [one.figures.rank] * count
            for name in own:
                values[name] += found[name]
        return pd.DataFrame({name: pd.Series(values[name], dtype=dtype) for name, dtype in types.items()})

    def _of_structs(
        self, struct: type[msgspec.Struct], found: Callable[[TraceFigures], Sequence[msgspec.Struct]]
    ) -> "pd.DataFrame":
        types = _columns(struct)
        return self._frame(types, lambda one: _by_column(types, map(_values, found(one.figures))))


def _columns(struct: type[msgspec.Struct], *names: str) -> dict[str, str]:
    """The types of columns for a struct's fields (default: all), without those that hold more than a value."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    found = {one.name: _dtype(one.type) for one in info.fields}
    return {name: found[name] for name in names or found if found[name]}


def _dtype(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.UnionType):
        (kind,) = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
    return _DTYPES.get(type(kind), "")


def _values(struct: msgspec.Struct) -> dict[str, Any]:
    found = {name: getattr(struct, name) for name in struct.__struct_fields__}
    return {name: value.value if isinstance(value, Enum) else value for name, value in found.items()}


def _by_column(types: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> _Columns:
    listed = list(rows)
    return {name: [row[name] for row in listed] for name in types}
