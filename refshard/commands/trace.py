"""``refshard trace``: analyse Kineto traces and CUDA memory snapshots, whoever recorded them."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from refshard.analysis import hta
from refshard.analysis.analyse import Analysis, analyse, join
from refshard.analysis.difference import Difference, difference, mean_steps, pair
from refshard.analysis.frames import SUFFIXES, trace_files
from refshard.analysis.hang import find_hang
from refshard.analysis.kineto import timeline_of
from refshard.analysis.names import patterns
from refshard.analysis.prediction import beside
from refshard.analysis.snapshot import is_memory_timeline, memory_timeline, read_snapshot, snapshot_figures
from refshard.analysis.windows import parse_window
from refshard.commands.printing import check_writable, tell, write_page
from refshard.errors import SpecError, TraceError
from refshard.events.flight import read_flights
from refshard.events.nsys import is_nsys
from refshard.events.pickles import is_pickle
from refshard.events.reader import read_events
from refshard.report.blocks import Answer
from refshard.report.trace.answer import check_block, trace_answer
from refshard.report.trace.difference import Compared, difference_answer
from refshard.report.trace.hang import hang_answer
from refshard.report.trace.prediction import prediction_answer
from refshard.report.trace.snapshot import memory_timeline_answer, snapshot_answer
from refshard.resources import available_cores

_NAMED = 3
"""Skipped files of folders that are named; folders may hold many that are no traces."""
_LARGE = 2**24
"""Bytes of files from which on several processes analyse them."""
_MOST_GRAPHS = 8
"""Number of graphs kept in memory, one a rank, to replay a step in which every rank is on time."""


def trace(
    paths: Sequence[Path],
    *,
    page: Path | None = None,
    one_job: bool = False,
    calibration: Path | None = None,
    against: Path | None = None,
    cross_check: str | None = None,
    window: str | None = None,
    device: str | None = None,
    communication: Sequence[str] = (),
) -> Answer:
    """Analyse trace files and folders of them, or files about memory alone. ``page`` is an HTML file to write.

    ``window`` takes the annotations that match it, or a range of time, in place of the traces' steps, and ``device``
    one of several devices in a trace.

    With ``against``, say instead what accounts for the change in step time from ``paths`` to it; if one of the two is a
    dry run's, what that got wrong. ``cross_check`` names
    another analyser to compare these figures with: ``hta``. Kernels whose names hold one of ``communication``,
    regular expressions, communicate, besides the known ones. A file that cannot be analysed is named on standard
    error, and the others are analysed.

    Raises:
        TraceError: no file can be analysed, a snapshot is among traces, or the other analyser is not installed.
        SpecError: ``page`` cannot be written, options do not go together, ``window`` is neither a pattern nor a range,
            or ``communication`` holds what is no regular expression.
    """
    check_writable(html=page)
    chosen = None if window is None else parse_window(window)
    if cross_check not in (None, "hta"):
        raise SpecError(f"cross-check must be 'hta', got '{cross_check}'")
    if against is not None and cross_check is not None:
        raise SpecError("against: cannot be combined with --cross-check; run the command twice")
    has_options = any(given is not None for given in (page, calibration, against, cross_check))
    if (of_memory := _of_memory(paths, has_options=has_options)) is not None:
        return of_memory
    own = patterns(communication)
    analyse_file = partial(
        analyse,
        calibration=None if calibration is None else timeline_of(read_events(calibration), communication=own),
        keep_timeline=page is not None or cross_check is not None,
        communicating=own,
        window=chosen,
        device=device,
        compare=against is not None,
    )
    analyses = join(_analyse_all(paths, analyse_file), one_job=one_job)
    more = f"page: {page}" if page is not None else ""
    if against is not None:
        other = join(_analyse_all([against], analyse_file), one_job=one_job)
        dry = [all(one.identity.is_dry_run for one in side) for side in (analyses, other)]
        if dry[0] != dry[1]:
            sides = (other, analyses) if dry[0] else (analyses, other)
            answer = prediction_answer(_compare(*sides, beside), more)
        else:
            answer = difference_answer(_compare(analyses, other, difference), more)
        read = [*analyses, *other]
    else:
        if cross_check is not None and (exports := [one.path for one in analyses if is_nsys(one.path)]):
            raise SpecError(f"cross-check: HTA reads Kineto traces only; leave out {exports[0]}, an export of nsys")
        checked = analyses if cross_check is not None else []
        checks = [(hta.in_its_words(one.timeline), hta.cross_check(one.path)) for one in checked]
        blocks = [check_block(one.path.name, *check) for one, check in zip(analyses, checks)]
        answer, read = trace_answer(analyses, blocks, more), [*analyses]
        for built, (ours, theirs) in zip(answer.data["traces"], checks):
            built["cross_check"] = msgspec.to_builtins({"refshard": ours, "hta": theirs})
    if page is not None:
        if page.resolve() in {one.path.resolve() for one in read}:
            raise SpecError(f"html: {page} is one of the traces, which the page would overwrite; name another file")
        write_page(answer, page, "trace")
    return answer


def _of_memory(paths: Sequence[Path], *, has_options: bool) -> Answer | None:
    """The answer of files about memory alone: snapshots, or timelines of torch's profiler; None if there are none."""
    for kind, is_kind, answer_of in (
        ("memory snapshot", is_pickle, memory_snapshots),
        ("memory timeline", is_memory_timeline, memory_timelines),
    ):
        found = [path for path in paths if is_kind(path)]
        if not found:
            continue
        if len(found) < len(paths):
            raise TraceError(f"{found[0]}: is a {kind}, other files are not; analyse them apart")
        if has_options:
            raise SpecError(f"{found[0]}: a {kind} takes no option of traces; leave them out")
        return answer_of(found)
    return None


def hang(paths: Sequence[Path]) -> Answer:
    """The answer about flight recorder dumps: why the job that left them hangs.

    Raises:
        TraceError: a file is damaged or no dump, or there is none.
    """
    return hang_answer(find_hang(read_flights(paths)))


def memory_snapshots(paths: Sequence[Path]) -> Answer:
    """The answer about CUDA memory snapshots; nothing that a file could name is run.

    Raises:
        TraceError: a file is damaged, or no memory snapshot.
    """
    read = [(str(path), read_snapshot(path)) for path in paths]
    return snapshot_answer([(name, snapshot.settings, snapshot_figures(snapshot)) for name, snapshot in read])


def memory_timelines(paths: Sequence[Path]) -> Answer:
    """The answer about memory timelines.

    Raises:
        TraceError: a file is damaged, or no memory timeline.
    """
    return memory_timeline_answer([(str(path), memory_timeline(path)) for path in paths])


def _analyse_all(paths: Sequence[Path], analyse_file: Callable[..., Analysis]) -> list[Analysis]:
    """Every file that can be analysed, each once; the others are named on standard error.

    Raises:
        TraceError: none can be.
    """
    files, named = _files(paths)
    found, inside = list[Analysis](), list[str]()
    for file, one in zip(files, _each(files, analyse_file)):
        if isinstance(one, TraceError):
            (named if file in paths else inside).append(str(one))
        else:
            found.append(one)
    reasons = [*named, *inside]
    if not found and len(reasons) == 1:
        raise TraceError(reasons[0])
    for reason in (*named, *inside[:_NAMED]):
        print(f"refshard: skipped {reason}", file=sys.stderr)
    if len(inside) > _NAMED:
        print(f"refshard: skipped {len(inside) - _NAMED} more files that cannot be analysed", file=sys.stderr)
    if not found:
        raise TraceError(f"none of {len(reasons)} files and folders could be analysed, for the reasons above")
    return found


def _each(files: Sequence[Path], analyse_file: Callable[..., Analysis]) -> Iterator[Analysis | TraceError]:
    """The analysis of each file in order, or why there is none: of many large files as many at a time as cores."""
    works = [partial(_attempt, analyse_file, file, keep_graph=place < _MOST_GRAPHS) for place, file in enumerate(files)]
    workers = min(available_cores(), len(files))
    if workers < 2 or sum(file.stat().st_size for file in files if file.is_file()) < _LARGE:
        yield from (work() for work in works)
        return
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        for place, future in enumerate([pool.submit(work) for work in works], start=1):
            yield future.result()
            if 10 * place // len(files) > 10 * (place - 1) // len(files):  # at each tenth
                tell(f"{place} of {len(files)} files analysed")
    finally:
        pool.shutdown(cancel_futures=True)


def _attempt(analyse_file: Callable[..., Analysis], file: Path, *, keep_graph: bool) -> Analysis | TraceError:
    try:
        return analyse_file(file, keep_graph=keep_graph)
    except TraceError as error:
        return error


def _files(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Files as they are named and those of folders that may be traces, each once; and which folders hold none."""
    found, empty = dict[Path, Path](), []
    for path in paths:
        if not os.path.isdir(path):  # noqa: PTH112 -- never raises
            found.setdefault(path.resolve(), path)
            continue
        inside = trace_files(path)
        if not inside:
            empty.append(f"{path}: holds no trace; traces end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
        for file in inside:
            found.setdefault(file.resolve(), file)
    return list(found.values()), empty


def _compare(
    before: Sequence[Analysis], after: Sequence[Analysis], differ: Callable[..., Difference]
) -> Compared:  # fmt: skip
    # scipy takes half a second to import, and no other output needs it.
    import numpy as np

    from refshard.analysis.sample import change_of_means

    pairing = pair(before, after)
    of_a, of_b = ([one.attribution for one in side if one.attribution is not None] for side in (pairing.a, pairing.b))
    scatter = [np.array(mean_steps(side)) for side in (of_a, of_b)]
    return Compared(
        names=(_common_name(pairing.a), _common_name(pairing.b)),
        steps=(len(scatter[0]), len(scatter[1])),
        difference=differ(of_a, of_b, pairing.ranks),
        interval=change_of_means(*scatter),
        warnings=pairing.warnings,
        unlike=pairing.unlike,
        sides=(pairing.a, pairing.b),
    )


def _common_name(side: Sequence[Analysis]) -> str:
    """The file, or the folder that all files lie in and how many there are."""
    if len(side) == 1:
        return str(side[0].path)
    return f"{os.path.commonpath([one.path.absolute().parent for one in side])} ({len(side)} ranks)"
