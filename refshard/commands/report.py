"""``refshard report``: draw the pages of runs.

One run makes one file, unless the output names a folder. Several runs make a folder: an index, and a page each. In a
folder each trace has a page of its own. A name that ends in .zip packs the folder, with the traces, to be sent.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from refshard import resources
from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence, gather
from refshard.analysis.rehearsal import Noise
from refshard.commands.folders import find_run
from refshard.commands.printing import write_page
from refshard.errors import SpecError, StoreError
from refshard.folders import STDOUT, replace_file
from refshard.measure.dry.first import folder_of_dry_runs
from refshard.measure.gate import newest_noise
from refshard.measure.store import holds_run, read_run
from refshard.records import Run
from refshard.report.run.page import Extras, card, index_page, write_dashboard
from refshard.report.run.traces import Traced, read_traces
from refshard.report.trace.answer import trace_answer

PAGE = "dashboard.html"
FOLDER = "report"
"""Where several runs are drawn by default, in the last one's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A run, with the dry runs that preceded it: what they hold, and the folder of each."""

    evidence: Evidence
    folders: list[tuple[Run, Path]]


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
    if is_file and len(read) > 1:
        raise SpecError(f"out: {target} is one file, and {len(read)} runs make a folder; name a folder, or a .zip")
    try:
        if is_file:
            write_dashboard(read[0].evidence, target, _extras(read[0], target, baseline))
        else:
            with _folder(target) as folder:
                _write_folder(read, folder, baseline)
    except OSError as error:
        raise SpecError(f"out: {target} cannot be written ({error.strerror}); name another place with --out") from None
    return target


def _read_all(runs: Sequence[Path]) -> list[_Read]:
    """Each run once: ``runs/latest`` leads to another of ``runs/*``, and dry runs go with the run that they precede."""
    distinct = list({folder.resolve(): folder for folder in reversed(runs)}.values())[::-1]
    preceding = {folder_of_dry_runs(folder).resolve() for folder in distinct}
    return [_read(folder) for folder in distinct if len(distinct) == 1 or folder.resolve() not in preceding]


def _read(folder: Path) -> _Read:
    dry = folder_of_dry_runs(folder)
    folders = [(read_run(path), path) for path in ([dry] if holds_run(dry) else []) + [find_run(folder)]]
    return _Read(evidence=gather(*(run for run, _ in folders)), folders=folders)


def _extras(read: _Read, target: Path, baseline: Evidence | None) -> Extras:
    return Extras(
        traces=read_traces(read.evidence, read.folders, target), baseline=baseline, noise=_noise(read.evidence)
    )


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
    if len(read) == 1:
        _write_run(read[0], folder, "index.html", "", baseline)
        return
    names = _names([one.evidence.latest.header.run_id for one in read])
    for one, name in zip(read, names):
        _write_run(one, folder, f"{name}.html", f"{name}-", baseline)
    cards = [card(one.evidence, f"{name}.html") for one, name in zip(read, names)]
    replace_file(folder / "index.html", index_page(cards, [one.evidence for one in read]))


def _names(ids: Sequence[str]) -> list[str]:
    """A file's name for each run."""
    plain = [re.sub(r"[^\w.-]+", "-", one) for one in ids]
    return [f"{name}-{place}" if plain.count(name) > 1 or name == "index" else name for place, name in enumerate(plain)]


def _write_run(read: _Read, folder: Path, name: str, prefix: str, baseline: Evidence | None) -> None:
    """A run's page, a page for each of its traces, and the traces themselves."""
    extras = _extras(read, folder / name, baseline)
    kept = {case: _kept(one, folder, f"{prefix}{place}") for place, (case, one) in enumerate(extras.traces.items())}
    timelines = _timelines(kept, folder, prefix)
    index = "index.html" if name != "index.html" else ""
    extras = Extras(traces=kept, baseline=baseline, noise=extras.noise, timelines=timelines, index=index)
    write_dashboard(read.evidence, folder / name, extras)


def _kept(one: Traced, folder: Path, prefix: str) -> Traced:
    """The trace as it lies in the folder, where it stays when the folder is moved."""
    (folder / "traces").mkdir(exist_ok=True)
    link = f"traces/{prefix}-{one.path.name}"
    shutil.copyfile(one.path, folder / link)
    return Traced(case=one.case, path=one.path, link=link, analysis=one.analysis, view=one.view)


def _timelines(traces: dict[CaseResult, Traced], folder: Path, prefix: str) -> dict[CaseResult, str]:
    """Draw each analysed trace on a page of its own; links to them by case."""
    links = {}
    for number, (case, one) in enumerate(traces.items()):
        if one.analysis is None:
            continue
        links[case] = f"{prefix}trace-{number}.html"
        write_page(trace_answer([one.analysis]), folder / links[case], "trace")
    return links


def _noise(evidence: Evidence) -> Noise | None:
    """That of the latest run's machine, if it was measured and can be read."""
    try:
        recorded = newest_noise(resources.BASELINES, evidence.latest.header.environment.id)
    except StoreError:
        return None
    return recorded.noise if recorded else None
