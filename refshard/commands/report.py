"""``refshard report``: draw the pages of runs.

One run makes one file, unless the output names a folder. Several runs make a folder: an index, and a page each. In a
folder each trace has a page of its own. A name that ends in .zip packs the folder, with the traces, to be sent.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from refshard import resources
from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence, gather
from refshard.analysis.rehearsal import Noise
from refshard.commands.folders import find_run
from refshard.commands.printing import write_page
from refshard.errors import SpecError, StoreError
from refshard.folders import STDOUT
from refshard.measure.dry.first import folder_of_dry_runs
from refshard.measure.gate import newest_noise
from refshard.measure.store import holds_run, read_run
from refshard.records import Run
from refshard.report.run.page import Extras, index_answer, write_dashboard
from refshard.report.run.traces import Traced, read_traces
from refshard.report.trace.answer import trace_answer

PAGE = "dashboard.html"
FOLDER = "report"
"""Where several runs are drawn by default, in the last one's folder."""


_Read = tuple[Evidence, list[tuple[Run, Path]]]
"""A run with the dry runs that preceded it: what they hold, and the folder of each."""


def report(runs: Sequence[Path], output: Path | None, *, against: Path | None = None) -> Path:
    """Draw the runs in these folders and return what was written.

    One run: the file ``output``, by default ``dashboard.html`` in its folder. Several runs, or an ``output`` that does
    not end in .html: a folder. ``against`` is the folder of an earlier run to compare with.

    Raises:
        StoreError: there is no run in a folder, or it is damaged.
        SpecError: ``output`` cannot be written, or is one file for several runs.
    """
    read = _read_all(runs)
    baseline = None if against is None else gather(read_run(find_run(against)))
    target = output or (runs[-1] / (PAGE if len(read) == 1 else FOLDER))
    is_file = target.suffix == ".html" or target == STDOUT
    if not is_file and target.suffix[1:].isalpha() and target.suffix != ".zip":
        raise SpecError(f"out: must be a .html file, a folder or a .zip, got '{target}'; name one of these")
    if is_file and len(read) > 1:
        raise SpecError(f"out: {target} is one file, and {len(read)} runs make a folder; name a folder, or a .zip")
    try:
        if is_file:
            evidence, folders = read[0]
            traces = read_traces(evidence, folders, target)
            write_dashboard(evidence, target, Extras(traces=traces, baseline=baseline, noise=_noise(evidence)))
        else:
            with _folder(target) as folder:
                _write_folder(read, folder, baseline)
    except OSError as error:
        raise SpecError(f"out: {target} cannot be written ({error.strerror}); name another place with --out") from None
    return target


def _read_all(runs: Sequence[Path]) -> list[_Read]:
    """Each run once: ``runs/latest`` leads to another of ``runs/*``, and dry runs belong to the run after them."""
    distinct = list({folder.resolve(): folder for folder in reversed(runs)}.values())[::-1]
    preceding = {folder_of_dry_runs(folder).resolve() for folder in distinct}
    found = []
    for folder in distinct:
        if len(distinct) == 1 or folder.resolve() not in preceding:
            dry = folder_of_dry_runs(folder)
            folders = [(read_run(path), path) for path in ([dry] if holds_run(dry) else []) + [find_run(folder)]]
            found.append((gather(*(run for run, _ in folders)), folders))
    return found


@contextmanager
def _folder(target: Path) -> Iterator[Path]:
    """The folder to write to; packed at the end where ``target`` is a .zip."""
    if target.suffix != ".zip":
        target.mkdir(parents=True, exist_ok=True)
        yield target
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / target.stem
        folder.mkdir()
        yield folder
        packed = shutil.make_archive(str(Path(made) / "packed"), "zip", root_dir=made, base_dir=target.stem)
        shutil.move(packed, target)


def _write_folder(read: Sequence[_Read], folder: Path, baseline: Evidence | None) -> None:
    """A page for each run and for each of its traces, the traces, and an index if there are several runs."""
    ids = [re.sub(r"[^\w.-]+", "-", evidence.latest.header.run_id) for evidence, _ in read]
    names = [f"{name}-{n}" if ids.count(name) > 1 or name == "index" else name for n, name in enumerate(ids)]
    several = len(read) > 1
    for (evidence, folders), run_name in zip(read, names):
        name, prefix = (f"{run_name}.html", f"{run_name}-") if several else ("index.html", "")
        traces, timelines = dict[CaseResult, Traced](), dict[CaseResult, str]()
        for place, (case, one) in enumerate(read_traces(evidence, folders, folder / name).items()):
            # The trace stays with the page when the folder is moved.
            (folder / "traces").mkdir(exist_ok=True)
            link = f"traces/{prefix}{place}-{one.path.name}"
            shutil.copyfile(one.path, folder / link)
            traces[case] = replace(one, link=link)
            if one.analysis is not None:
                timelines[case] = f"{prefix}trace-{place}.html"
                write_page(trace_answer([one.analysis]), folder / timelines[case], "trace")
        extras = Extras(
            traces=traces, baseline=baseline, noise=_noise(evidence), timelines=timelines,
            index="index.html" if several else "",
        )  # fmt: skip
        write_dashboard(evidence, folder / name, extras)
    if several:
        every = {f"{name}.html": evidence for (evidence, _), name in zip(read, names)}
        write_page(index_answer(every), folder / "index.html", "report")


def _noise(evidence: Evidence) -> Noise | None:
    """That of the latest run's machine, if it was measured and can be read."""
    try:
        recorded = newest_noise(resources.BASELINES, evidence.latest.header.environment.id)
    except StoreError:
        return None
    return recorded.noise if recorded else None
