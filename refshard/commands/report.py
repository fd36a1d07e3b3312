"""``refshard report``: draw the dashboard of one run or of several."""

from collections.abc import Sequence
from pathlib import Path

from refshard import resources
from refshard.analysis.cases import CaseResult
from refshard.analysis.evidence import Evidence, gather
from refshard.errors import SpecError, StoreError
from refshard.harness.dry.first import folder_of_dry_runs
from refshard.harness.gate.noise import newest_noise
from refshard.harness.store import holds_run, read_run
from refshard.report.run.page import Extras, write_dashboard
from refshard.report.run.why import Traced, read_traces
from refshard.report.trace.page import AnalysedTrace, write_trace_page
from refshard.stats.rehearsal import Noise

PAGE = "dashboard.html"


def report(runs: Sequence[Path], output: Path | None, *, against: Path | None = None, multi: bool = False) -> Path:
    """Draw the runs in these folders to ``output``, else to ``dashboard.html`` in the last folder; return the path.

    The dry runs that preceded a run are drawn beside it. ``against`` is the folder of a run to compare with. With
    ``multi``, ``output`` is a folder of pages: the dashboard and, for each case with a trace, that trace's timeline.

    Raises:
        StoreError: there is no run in a folder, or it is damaged.
        SpecError: ``output`` cannot be written.
    """
    # runs/latest leads to another of runs/*
    distinct = {folder.resolve(): folder for folder in reversed(runs)}
    dry = map(folder_of_dry_runs, distinct)
    distinct = {**{path: path for path in dry if holds_run(path)}, **distinct}
    read = [(read_run(folder), folder) for folder in distinct.values()]
    evidence = gather(*(run for run, _ in read))
    baseline = None if against is None else gather(read_run(against))
    target = _target(runs[-1], output, multi=multi)
    try:
        if multi:
            target.parent.mkdir(parents=True, exist_ok=True)
        traces = read_traces(evidence, read, target)
        timelines = _timelines(traces, target.parent) if multi else {}
        extras = Extras(traces=traces, baseline=baseline, noise=_noise(evidence), timelines=timelines)
        write_dashboard(evidence, target, extras)
    except OSError as error:
        raise SpecError(
            f"out: {target} cannot be written ({error.strerror}); let `refshard report --out` name "
            f"a {'folder' if multi else 'file'} that can"
        ) from None
    return target


def _target(last: Path, output: Path | None, *, multi: bool) -> Path:
    if multi:
        return (output or last / "dashboard") / "index.html"
    return output or last / PAGE


def _timelines(traces: dict[CaseResult, Traced], folder: Path) -> dict[CaseResult, str]:
    """Draw each analysed trace on a page of its own; links to them by case."""
    links = {}
    for number, (case, one) in enumerate(traces.items()):
        if one.analysis is None:
            continue
        name = f"trace-{number}.html"
        drawn = AnalysedTrace(figures=one.analysis.figures, timeline=one.analysis.timeline, path=one.path)
        write_trace_page([drawn], folder / name)
        links[case] = name
    return links


def _noise(evidence: Evidence) -> Noise | None:
    """That of the latest run's machine, as far as it was measured and can be read."""
    try:
        recorded = newest_noise(resources.BASELINES, evidence.latest.header.environment.id)
    except StoreError:
        return None
    return recorded.noise if recorded else None
