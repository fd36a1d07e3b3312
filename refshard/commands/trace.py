"""``refshard trace``: analyse Kineto traces and CUDA memory snapshots, whoever recorded them."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from refshard.commands.memory_snapshot import memory_snapshots, memory_timelines
from refshard.errors import SpecError, TraceError
from refshard.report.answer import Answer
from refshard.report.trace import terminal as trace_table
from refshard.report.trace.difference import Compared, difference_answer
from refshard.timeline import Timeline
from refshard.tracing import hta
from refshard.tracing.analysis import Analysis, analyse, join
from refshard.tracing.kineto import timeline_of
from refshard.tracing.matching import difference, mean_steps
from refshard.tracing.memory_timeline import is_memory_timeline
from refshard.tracing.pairing import pair
from refshard.tracing.reader import read_trace
from refshard.tracing.snapshot_file import is_snapshot

_SUFFIXES = (".json", ".json.gz")
_NAMED = 3
_OF_MEMORY = (
    ("memory snapshot", is_snapshot, memory_snapshots),
    ("memory timeline", is_memory_timeline, memory_timelines),
)
"""Files about memory alone, which have answers of their own."""


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
    if against is not None and cross_check is not None:
        raise SpecError("against: cannot be combined with --cross-check; run the command twice")
    for kind, is_kind, answer_of in _OF_MEMORY:
        if of_memory := [path for path in paths if is_kind(path)]:
            if len(of_memory) < len(paths):
                raise TraceError(f"{of_memory[0]}: is a {kind}, other files are not; analyse them apart")
            if page is not None or calibration is not None or against is not None or cross_check is not None:
                raise SpecError(f"{of_memory[0]}: a {kind} takes no option of traces; leave them out")
            return answer_of(of_memory)
    undisturbed = None if calibration is None else timeline_of(read_trace(calibration))
    keep = against is None and (page is not None or cross_check is not None)
    found = _analyse_all(paths, undisturbed, keep_timelines=keep, compare=against is not None)
    analyses = join(found, one_job=one_job)
    if against is not None:
        other = join(_analyse_all([against], undisturbed, keep_timelines=False, compare=True), one_job=one_job)
        compared = _compare(analyses, other)
        if page is not None:
            _write_difference(compared, [*analyses, *other], page)
        return difference_answer(compared, f"page: {page}" if page is not None else "")
    if page is not None:
        _write(analyses, page)
    figures = [one.figures for one in analyses]
    checks = [] if cross_check is None else [(hta.in_its_words(a.timeline), hta.cross_check(a.path)) for a in analyses]
    blocks = [trace_table.check_block(one.path.name, *check) for one, check in zip(analyses, checks)]
    answer = trace_table.trace_answer(figures, blocks, f"page: {page}" if page is not None else "")
    for one, (ours, theirs) in zip(answer.data["traces"], checks):
        one["cross_check"] = msgspec.to_builtins({"refshard": ours, "hta": theirs})
    return answer


def _analyse_all(
    paths: Sequence[Path], calibration: Timeline | None, *, keep_timelines: bool, compare: bool = False
) -> list[Analysis]:
    look = partial(analyse, calibration=calibration, keep_timeline=keep_timelines, compare=compare)
    found, skipped, seen = [], [], set[Path]()
    for path in paths:
        if not os.path.isdir(path):  # noqa: PTH112 -- never raises
            if path.resolve() not in seen:
                found.append(look(path))
            seen.add(path.resolve())
            continue
        inside, candidates = [], _candidates(path)
        fresh = [file for file in candidates if file.resolve() not in seen]
        seen.update(file.resolve() for file in fresh)
        for file in fresh:
            try:
                inside.append(look(file))
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

    traces = [AnalysedTrace(figures=one.figures, timeline=one.timeline, path=one.path) for one in analyses]
    with _writing(page, analyses):
        write_trace_page(traces, page)


def _write_difference(compared: Compared, analyses: Sequence[Analysis], page: Path) -> None:
    from refshard.report.trace.difference_page import write_difference_page

    with _writing(page, analyses):
        write_difference_page(compared, page)


@contextmanager
def _writing(page: Path, analyses: Sequence[Analysis]) -> Iterator[None]:
    """Say what is wrong with the page's path, whichever page is written."""
    if page.resolve() in {one.path.resolve() for one in analyses}:
        raise SpecError(f"html: {page} is one of the traces, which the page would overwrite; name another file")
    try:
        yield
    except OSError as error:
        raise SpecError(f"html: {page} cannot be written ({error.strerror}); name a writable file") from None


def _compare(before: Sequence[Analysis], after: Sequence[Analysis]) -> Compared:
    # scipy takes half a second to import, and no other output needs it.
    import numpy as np

    from refshard.stats.means import change_of_means

    pairing = pair(before, after)
    of_a, of_b = ([one.attribution for one in side if one.attribution is not None] for side in (pairing.a, pairing.b))
    scatter = [np.array(mean_steps(side)) for side in (of_a, of_b)]
    return Compared(
        names=(_common_name(pairing.a), _common_name(pairing.b)),
        steps=(len(scatter[0]), len(scatter[1])),
        difference=difference(of_a, of_b, pairing.ranks),
        interval=change_of_means(*scatter),
        doubts=pairing.doubts,
    )


def _common_name(side: Sequence[Analysis]) -> str:
    """The file, or the folder that all files lie in and how many there are."""
    if len(side) == 1:
        return str(side[0].path)
    return f"{os.path.commonpath([one.path.absolute().parent for one in side])} ({len(side)} ranks)"
