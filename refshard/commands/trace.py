"""``refshard trace``: analyse Kineto traces and CUDA memory snapshots, whoever recorded them."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from refshard.commands.memory_snapshot import memory_snapshots, memory_timelines
from refshard.errors import SpecError, TraceError
from refshard.report.answer import Answer
from refshard.report.trace import terminal as trace_table
from refshard.timeline import Timeline
from refshard.tracing import hta
from refshard.tracing.analysis import Analysis, analyse, join
from refshard.tracing.diff import attribute, difference
from refshard.tracing.kineto import timeline_of
from refshard.tracing.memory_timeline import is_memory_timeline
from refshard.tracing.reader import read_trace
from refshard.tracing.snapshot_file import is_snapshot

_SUFFIXES = (".json", ".json.gz")
_NAMED = 3
_OF_MEMORY = (
    ("memory snapshot", is_snapshot, memory_snapshots),
    ("memory timeline", is_memory_timeline, memory_timelines),
)
"""Files about memory alone, which have answers of their own."""
_MOST_GRAPHS = 8
"""So many ranks' graphs are kept in memory to tell what a step would take if all were on time."""


def trace(
    paths: Sequence[Path],
    *,
    page: Path | None = None,
    one_job: bool = False,
    calibration: Path | None = None,
    against: Path | None = None,
    cross_check: str | None = None,
) -> Answer:
    """Analyse trace files and folders of them, or files about memory alone. ``page`` is an HTML file to write.

    With ``against``, say instead what accounts for the change in step time from ``paths`` to it. ``cross_check`` names
    another analyser whose figures to set beside these: ``hta``.

    Raises:
        TraceError: a file named is no trace or is damaged, a folder holds none, a snapshot is among traces, or the
            other analyser is not installed.
        SpecError: ``page`` cannot be written, or options do not go together.
    """
    if cross_check not in (None, "hta"):
        raise SpecError(f"cross-check must be 'hta', got '{cross_check}'")
    if against is not None and (page is not None or cross_check is not None):
        option = "--html" if page is not None else "--cross-check"
        raise SpecError(f"against: cannot be combined with {option}; run the command twice")
    for kind, is_kind, answer_of in _OF_MEMORY:
        if of_memory := [path for path in paths if is_kind(path)]:
            if len(of_memory) < len(paths):
                raise TraceError(f"{of_memory[0]}: is a {kind}, other files are not; analyse them apart")
            if page is not None or calibration is not None or against is not None or cross_check is not None:
                raise SpecError(f"{of_memory[0]}: a {kind} takes no option of traces; leave them out")
            return answer_of(of_memory)
    undisturbed = None if calibration is None else timeline_of(read_trace(calibration))
    keep = page is not None or against is not None or cross_check is not None
    analyses = join(_analyse_all(paths, undisturbed, keep_timelines=keep), one_job=one_job)
    if against is not None:
        other = join(_analyse_all([against], undisturbed, keep_timelines=True), one_job=one_job)
        return _compare(analyses, other)
    if page is not None:
        _write(analyses, page)
    figures = [one.figures for one in analyses]
    checks = [] if cross_check is None else [(hta.in_its_words(a.timeline), hta.cross_check(a.path)) for a in analyses]
    blocks = [trace_table.check_block(one.path.name, *check) for one, check in zip(analyses, checks)]
    answer = trace_table.trace_answer(figures, blocks, f"page: {page}" if page is not None else "")
    for one, (ours, theirs) in zip(answer.data["traces"], checks):
        one["cross_check"] = msgspec.to_builtins({"refshard": ours, "hta": theirs})
    return answer


def _analyse_all(paths: Sequence[Path], calibration: Timeline | None, *, keep_timelines: bool) -> list[Analysis]:
    found, skipped, seen = list[Analysis](), [], set[Path]()

    def read(path: Path, before: int) -> Analysis:
        keep_graph = before < _MOST_GRAPHS
        return analyse(path, calibration=calibration, keep_timeline=keep_timelines, keep_graph=keep_graph)

    for path in paths:
        if not os.path.isdir(path):  # noqa: PTH112 -- never raises
            if path.resolve() not in seen:
                found.append(read(path, len(found)))
            seen.add(path.resolve())
            continue
        inside, candidates = list[Analysis](), _candidates(path)
        fresh = [file for file in candidates if file.resolve() not in seen]
        seen.update(file.resolve() for file in fresh)
        for file in fresh:
            try:
                inside.append(read(file, len(found) + len(inside)))
            except TraceError as error:
                skipped.append(str(error))
        if not inside and len(fresh) == len(candidates):
            raise TraceError(f"{path}: holds no trace; traces end in {' or '.join(_SUFFIXES)}")
        found += inside
    for reason in skipped[:_NAMED]:
        print(f"refshard: skipped {reason}", file=sys.stderr)
    if len(skipped) > _NAMED:
        print(f"refshard: skipped {len(skipped) - _NAMED} more files that are no traces", file=sys.stderr)
    return found


def _candidates(folder: Path) -> list[Path]:
    """Files that may be traces, in a folder and below it, hidden ones left out; of a run's folder, its traces."""
    if (folder / "records.jsonl").exists() and (folder / "traces").exists():
        folder = folder / "traces"
    files = (Path(where, name) for where, _, names in os.walk(folder) for name in names)
    return sorted(p for p in files if p.name.endswith(_SUFFIXES) and os.path.isfile(p) and p.name[0] != ".")  # noqa: PTH113


def _write(analyses: Sequence[Analysis], page: Path) -> None:
    # plotly and pandas take a second to import, and no other output needs them.
    from refshard.report.trace.page import AnalysedTrace, write_trace_page

    if page.resolve() in {one.path.resolve() for one in analyses}:
        raise SpecError(f"html: {page} is one of the traces, which the page would overwrite; name another file")
    traces = [AnalysedTrace(figures=one.figures, timeline=one.timeline, path=one.path) for one in analyses]
    try:
        write_trace_page(traces, page)
    except OSError as error:
        raise SpecError(f"html: {page} cannot be written ({error.strerror}); name a writable file") from None


def _compare(before: Sequence[Analysis], after: Sequence[Analysis]) -> Answer:
    a, b = _one_rank(before, after)
    of_a, of_b = attribute(a.timeline), attribute(b.timeline)
    sides = [(what, getattr(a.figures, what), getattr(b.figures, what)) for what in ("device", "world_size")]
    doubts = [f"A and B differ in {what}: {ours} and {theirs}." for what, ours, theirs in sides if ours != theirs]
    return trace_table.difference_answer((str(a.path), str(b.path)), of_a, of_b, difference(of_a, of_b), doubts)


def _one_rank(before: Sequence[Analysis], after: Sequence[Analysis]) -> tuple[Analysis, Analysis]:
    """The traces to compare: the only ones, or those of the lowest rank that both jobs have."""
    if len(before) == len(after) == 1:
        return before[0], after[0]
    for name, side in (("A", before), ("B", after)):
        first_of = {one.figures.job: one.path.name for one in reversed(side)}
        if len(first_of) > 1:
            raise TraceError(
                f"--against compares two jobs, but {name} holds {len(first_of)}, with {', '.join(first_of.values())}; "
                "name one file of each"
            )
    ranks = {one.figures.rank for one in before} & {one.figures.rank for one in after} - {None}
    if not ranks:
        raise TraceError("--against compares one rank of two jobs, but they have none in common; name one file of each")
    rank = min(rank for rank in ranks if rank is not None)
    print(f"refshard: comparing rank {rank}", file=sys.stderr)
    return tuple(next(one for one in side if one.figures.rank == rank) for side in (before, after))  # type: ignore[return-value]
