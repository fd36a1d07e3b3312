"""Findings: names of jobs, the time base, and warnings; ``scenarios`` shows the sentences."""

import subprocess
import sys

import pytest
from msgspec.structs import replace

from refshard.analysis.figures import Cause, Lateness, TraceWarning, WindowFigures
from refshard.analysis.names import LONGEST
from refshard.report.trace.findings import findings, unknown_waiting, warning, warnings_text
from refshard.report.trace.ranks import late
from refshard.report.trace.sections import idle_time
from refshard.report.trace.text import in_each, job_names, of_each, per
from tests.report.printed import opened
from tests.report.trace.scenarios import communicating, idle, split
from tests.report.traces import MS, made


@pytest.mark.parametrize(
    ("steps", "windows", "texts"),
    [
        (3, False, ("per step", "a step", "a step")),
        (0, False, ("in the trace", "in the trace", "the trace")),
        (3, True, ("per window", "a window", "a window")),
        (1, True, ("in the window", "in the window", "the window")),
    ],
)
def test_the_time_base_is_a_step_a_window_or_the_whole(steps: int, *, windows: bool, texts: tuple[str, ...]) -> None:
    chosen = WindowFigures(window="x", groups=()) if windows else None
    figures = made(steps=made().steps[:1] * steps, windows=chosen)
    assert (per(figures), in_each(figures), of_each(figures)) == texts


def test_no_rank_is_waited_for_longer_than_a_step() -> None:
    """Seven ranks that each wait for 90 of 100 ms wait 90 ms, not 630."""
    none = Lateness(last=0, collectives=9, cost_ns=0, steps=(0, 0), leads=0, grows=False)
    its = replace(none, last=9, cost_ns=180 * MS, steps=(90 * MS, 90 * MS), leads=2)
    eight = [made(rank=n, lateness=its if n == 7 else none) for n in range(8)]
    assert "the 7 others wait 90.0 ms a step for it (90.0 %)" in late(eight)


@pytest.mark.parametrize(
    ("bound", "size", "given", "ranks"),
    [
        ("below", 8, {}, "all 8 ranks"),
        ("unknown", 2, {}, "both ranks"),
        ("unknown", None, {}, "all ranks"),
        ("bandwidth", 8, {}, ""),  # a full link leaves no room for waiting
        ("latency", 8, {}, ""),
        ("below", 8, {"missing": None}, ""),
        ("below", 8, {"steps": 0, "whole": split(undivided_ns=4 * MS, transfer_ns=6 * MS)}, ""),
    ],
)
def test_unknown_waiting_names_the_ranks_to_record(bound: str, size: int | None, given: dict, ranks: str) -> None:  # type: ignore[type-arg]
    communication = communicating(bound, **given).communication
    text = unknown_waiting(made(world_size=size, communication=communication), mostly=True)
    assert (f"Record the same steps on {ranks}, a file each" in text) if ranks else not text


def test_a_kernel_that_is_waited_for_has_a_short_name() -> None:
    """The names of lambdas in templates have hundreds of letters, and would make a table wider than any terminal."""
    kernel = f"void clover::par_ranged2d_kernel<ideal_gas_kernel({', '.join(['clover::Buffer2D<double> &'] * 9)})>(T1)"
    figures = made(exposed=3, dependency=5, host=10, idle=idle(Cause.LAUNCH, kernel, 20, 2))
    (row,) = opened(idle_time(figures)).rows
    assert len(row["what"]) <= LONGEST
    assert f" is longest before {row['what']}: " in findings([figures])[0].more[0]


HASHED = ("fsdp2-w2-tiny-5a30c0d831ee-r0-rank{}.json.gz", "yafsdp-w2-tiny-7c1d8d39291c-r0-rank{}.json.gz")


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ([[name.format(rank) for rank in (0, 1)] for name in HASHED], ["fsdp2", "yafsdp"]),
        ([[HASHED[0].format(0), HASHED[0].format(1)]], ["fsdp2-w2-tiny-r0"]),
        ([["a-5a30c0d831ee-rank0.json"], ["a-7c1d8d39291c-rank0.json"]], ["a-5a30c0d831ee", "a-7c1d8d39291c"]),
        ([["one/rank0.json"], ["two/rank0.json"]], ["one", "two"]),
        ([["rank0.json"], ["rank0.json"]], ["job 0", "job 1"]),
        ([["a.internal_8586.17.pt.trace.json", "a.internal_8587.18.pt.trace.json"]], ["a.internal"]),  # processes
        ([["runs/four/447.json", "runs/four/448.json"]], ["four"]),
    ],
)
def test_jobs_are_named_by_what_tells_their_files_apart(files: list[list[str]], names: list[str]) -> None:
    members = [made(job=job, file=file, rank=rank) for job, of in enumerate(files) for rank, file in enumerate(of)]
    assert list(job_names(members).values()) == names


@pytest.mark.processes
@pytest.mark.parametrize("command", ["trace", "dryrun", "plan"])
def test_text_needs_neither_pandas_nor_plotly(command: str) -> None:
    """Both take a second to import; only pages and the Python API need them."""
    code = f"import sys, refshard.commands.{command}; print({{'pandas', 'plotly'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_warning_is_given_once_with_its_traces_and_its_count() -> None:
    few, lost = TraceWarning(code="few", message="Few steps.", count=3), TraceWarning(code="x", message="Lost.", ns=MS)
    given = [made(file=f"r{n}", warnings=(few, lost) if n == 1 else (few,)) for n in range(9)]
    assert warnings_text(given) == ["[few] Few steps. (3 events) (all 9 traces)", "[x] Lost. (1.00 ms) (r1)"]
    assert warnings_text(given[:1]) == ["[few] Few steps. (3 events)"]
    for text, count in (("1,200 lost", ""), ("1200 lost", ""), ("12003 lost", " (1,200 events)")):
        assert warning(TraceWarning(code="x", message=text, count=1200)) == f"{text}{count}"
    assert warning(TraceWarning(code="x", message="2.00 ms lost", ns=2 * MS)) == "2.00 ms lost"
