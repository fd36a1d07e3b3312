"""Traces as pandas frames: the same figures, exact, with units; and the recipes of the documentation."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

import refshard
from refshard.analysis.analyse import analyse
from refshard.analysis.frames import Trace
from refshard.errors import TraceError
from tests.analysis.handmade import BASE_US, event, step, write
from tests.printed import as_json
from tests.test_architecture import modules_after

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
OTHERS = Path(__file__).parent / "others"
TRACES = [EXAMPLES / "trace_fsdp2.json.gz", *sorted(OTHERS.glob("*.json.gz"))]
FRAMES = ("breakdown", "operators", "collectives", "gaps", "kernels", "memory")


@pytest.fixture(scope="module")
def dry() -> Trace:
    """Two steps of FSDP2 on rank 0 of 8, with memory, as a dry run predicts them."""
    return refshard.read_trace(TRACES[0])


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_frames_hold_the_figures_of_the_analysis(path: Path) -> None:
    figures, trace = analyse(path).figures, refshard.read_trace(path)
    steps = [one.breakdown for one in figures.steps] or [figures.whole]
    for name in ("span_ns", "compute_ns", "comm_ns", "exposed_ns", "idle_ns"):
        assert trace.breakdown[name].tolist() == [getattr(one, name) for one in steps]
    assert trace.gaps.duration_ns.sum() == sum(one.idle_ns for one in steps)
    assert trace.collectives.exposed_ns.tolist() == [one.exposed_ns for one in figures.collectives]
    assert len(trace.memory) == len(figures.memory)
    report = figures.operators
    assert trace.operators.ns.tolist() == ([] if report is None else [one.ns for one in report.operators])


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_every_frame_names_file_and_rank_and_the_types_of_its_columns_never_change(path: Path, dry: Trace) -> None:
    trace = refshard.read_trace(path)
    for name in FRAMES:
        frame: pd.DataFrame = getattr(trace, name)
        assert list(frame.columns[:2]) == ["file", "rank"]
        assert frame.dtypes.equals(getattr(dry, name).dtypes)
        assert {str(dtype) for dtype in frame.dtypes} <= {"string", "Int64", "Float64", "boolean"}


def test_nanoseconds_since_1970_stay_exact_next_to_unknown_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", [step(1, 0, 100), event("gemm", 10.001, 20, cat="kernel", tid=7)])
    kernels = refshard.read_trace(path).kernels
    assert kernels.start_ns.tolist() == [(BASE_US + 10) * 1000 + 1]
    assert kernels.unit.isna().all()


def test_ranks_of_a_folder_share_a_frame_and_what_is_no_trace_is_named(tmp_path: Path) -> None:
    for rank in (0, 1):
        shutil.copy(OTHERS / f"hta_sampled_128rank_r{rank}.json.gz", tmp_path)
    (tmp_path / "case.json").write_text('{"a": 1}')
    trace = refshard.read_trace(str(tmp_path))
    assert trace.breakdown.groupby("rank").size().to_dict() == {0: 2, 1: 2}
    assert [Path(reason.partition(": ")[0]).name for reason in trace.skipped] == ["case.json"]
    assert "case.json" in repr(trace)
    listed = refshard.read_trace([tmp_path / f"hta_sampled_128rank_r{rank}.json.gz" for rank in (0, 1)])
    assert listed.breakdown.equals(trace.breakdown)


def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "a.json").write_text("{}")
    for source, says in (
        (tmp_path / "missing.json", "no such file or folder"), (tmp_path / "none", "holds no trace"), ([], "no trace"),
    ):  # fmt: skip
        with pytest.raises(TraceError, match=says):
            refshard.read_trace(source)
    trace = refshard.read_trace(tmp_path / "a.json")
    with pytest.raises(TraceError, match="not a Kineto trace"):
        trace.breakdown  # noqa: B018
    with pytest.raises(TraceError, match="not a Kineto trace"):
        refshard.read_trace(tmp_path).gaps  # noqa: B018


def test_a_trace_without_the_devices_events_has_no_breakdown(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", [event("aten::mm", 10, 20), event("cudaLaunchKernel", 12, 3, cat="cuda_runtime")])
    if analyse(path).figures.host_only:
        assert refshard.read_trace(path).breakdown.compute_ns.isna().all()


@pytest.mark.processes
def test_reading_a_trace_needs_neither_torch_nor_pandas_before_the_first_frame() -> None:
    assert not modules_after(f"import refshard; refshard.read_trace('{TRACES[0]}')") & {"torch", "pandas"}


def recipes() -> dict[str, str]:
    page = (
        (ROOT / "docs" / "how-to" / "traces.md").read_text().partition("## Frames for pandas")[2].partition("\n## ")[0]
    )
    return dict(re.findall(r"^\| ([^|`]+\?) \| `([^`]+)` \|$", page, re.M))


def test_the_five_recipes_of_the_documentation_answer(dry: Trace) -> None:
    found = recipes()
    assert len(found) == 5
    for question, code in found.items():
        answer = eval(code, {"trace": dry})
        assert len(answer), question


def test_the_example_prints_short_tables(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"__name__": "trace_frames", "__file__": str(EXAMPLES / "trace_frames.py")}
    exec(compile((EXAMPLES / "trace_frames.py").read_text(), "trace_frames.py", "exec"), namespace)
    main = namespace["main"]
    assert callable(main)
    main()
    text = capsys.readouterr().out
    assert text.count("?") == 5
    assert len(text.splitlines()) < 60
    assert re.search(r"aten::mm +132 +48\.15", text)
    assert re.search(r"reduce_scatter model\.layers\.0 +2\.22 +2\.17 +0\.02", text)
    main(*map(str, TRACES[-2:]))
    assert "profile_memory=True" in capsys.readouterr().out


def test_json_and_frames_have_the_same_names(dry: Trace) -> None:
    (one,) = as_json("trace", str(TRACES[0]))["traces"]
    assert set(dry.breakdown.columns) - {"file", "rank"} <= one["steps"][0].keys()
    for name in ("collectives", "memory"):
        assert json.loads(getattr(dry, name).drop(columns=["file", "rank"]).head(1).to_json(orient="records")) == [
            {key: one[name][0][key] for key in getattr(dry, name).columns[2:]}
        ]
