"""Holistic Trace Analysis on traces whose answer is known.

Each test shows one difference that ``docs/reference/metrics.md`` names.
"""

import ast
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import refshard
from refshard.analysis.hta import HtaFailure, HtaFigures, cross_check
from refshard.errors import TraceError
from refshard.resources import install_extra
from tests.analysis.handmade import event, step, write
from tests.analysis.test_others import EXACT_US, FIELDS, OTHERS

pytestmark = pytest.mark.full

needs_hta = pytest.mark.skipif(
    importlib.util.find_spec("hta") is None, reason=f"HTA is not here; {install_extra('hta')}"
)

GEMM = "ampere_sgemm"
NCCL = "ncclDevKernel_AllGather"


def device(name: str, start: float, duration: float, launch: int, *, stream: int = 7, **args: Any) -> dict[str, Any]:
    return event(name, start, duration, cat="kernel", tid=stream, stream=stream, correlation=launch, **args)


def launch(start: float, number: int) -> dict[str, Any]:
    return event("cudaLaunchKernel", start, 1, cat="cuda_runtime", correlation=number)


def one_step(*events: dict[str, Any]) -> list[dict[str, Any]]:
    return [step(1, 0, 1000), *events]


def two_steps() -> list[dict[str, Any]]:
    """Two steps of 100 us: compute 30 in the first, 50 in the second."""
    return [
        step(1, 0, 100), launch(1, 1), device(GEMM, 10, 30, 1),
        step(2, 100, 100), launch(101, 2), device(GEMM, 110, 50, 2),
    ]  # fmt: skip


def figures(path: Path, *, include_last_step: bool = False, rounded: bool = True) -> HtaFigures:
    found = cross_check(path, include_last_step=include_last_step, rounded=rounded)
    assert isinstance(found, HtaFigures), found
    return found


def times(found: HtaFigures) -> tuple[float, float, float, float]:
    """Span, compute, non-compute and idle, in microseconds."""
    return found.span_us, found.compute_us, found.noncompute_us, found.idle_us


def versions(**known: str) -> Callable[[str], str]:
    """A stand-in for :func:`importlib.metadata.version` on a machine where these distributions are installed."""

    def version(distribution: str) -> str:
        if distribution not in known:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return known[distribution]

    return version


def test_without_hta_the_error_is_one_line_that_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as error:
        cross_check(tmp_path / "t.json", installed=versions(pandas="2.3.3"))
    assert str(error.value) == (
        "a cross-check needs Holistic Trace Analysis; pip install -e '.[hta]' in refshard's checkout"
    )


@pytest.mark.parametrize("pandas", ["2.1.4", "3.0.0", "3.1.1", "10.0", "unknown"])
def test_another_pandas_is_refused_with_the_range(tmp_path: Path, pandas: str) -> None:
    with pytest.raises(TraceError, match=rf"0\.6\.1 needs pandas >=2\.2,<3, got {pandas}; pip install"):
        cross_check(tmp_path / "t.json", installed=versions(traceinsight="0.6.1", pandas=pandas))


def test_the_extra_holds_pandas_to_the_range_that_is_checked() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'hta = [\n    "pandas>=2.2,<3",' in project


def test_past_the_time_limit_the_failure_is_data(tmp_path: Path) -> None:
    installed = versions(traceinsight="0.6.1", pandas="2.3.3")
    found = cross_check(tmp_path / "t.json", time_limit_s=0.001, installed=installed)
    assert found == HtaFailure(version="0.6.1", error="no result within the time limit of 0.001 s")


def test_no_other_file_of_refshard_imports_hta() -> None:
    package = Path(refshard.__file__).parent
    importers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "hta" for name in names):
                importers.add(path.relative_to(package).as_posix())
    assert importers == {"analysis/hta.py"}


@needs_hta
def test_the_figures_of_a_trace_that_both_agree_on(tmp_path: Path) -> None:
    """Compute [10, 40), communication [20, 60): half of it is covered."""
    path = write(tmp_path / "t.json.gz", one_step(device(GEMM, 10, 30, 1), device(NCCL, 20, 40, 2, stream=20)))
    expected = HtaFigures(
        version=importlib.metadata.version("traceinsight"),
        span_us=50, compute_us=30, noncompute_us=20, idle_us=0, overlap_pct=50,
    )  # fmt: skip
    assert figures(path) == expected


@needs_hta
def test_nothing_is_printed_and_no_log_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    figures(write(tmp_path / "t.json", two_steps()))
    assert capfd.readouterr() == ("", "")


@needs_hta
def test_the_last_of_several_steps_is_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", two_steps())
    assert times(figures(path)) == (30, 30, 0, 0)
    assert times(figures(path, include_last_step=True)) == (150, 80, 0, 70)
    only = write(tmp_path / "one.json", two_steps()[:3])
    assert times(figures(only)) == (30, 30, 0, 0)


@needs_hta
def test_the_last_step_brings_all_that_was_launched_after_it(tmp_path: Path) -> None:
    """HTA shifts the starts of events to 0 but not the ends that it compares them with, so none is too late."""
    path = write(tmp_path / "t.json", [*two_steps(), launch(900, 3), device(GEMM, 910, 10, 3)])
    assert times(figures(path, include_last_step=True)) == (910, 90, 0, 820)


@needs_hta
def test_with_several_steps_a_kernel_without_its_launch_is_lost(tmp_path: Path) -> None:
    orphan = device(GEMM, 50, 10, 99)
    assert figures(write(tmp_path / "two.json", [*two_steps(), orphan])).compute_us == 30
    assert figures(write(tmp_path / "one.json", [*two_steps()[:3], orphan])).compute_us == 40


@needs_hta
def test_rounding_takes_from_both_ends_of_a_kernel(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", one_step(*(device(GEMM, 10 + 1.5 * i, 1.5, i) for i in range(20))))
    assert times(figures(path)) == (30, 20, 0, 10)  # as if a busy device were idle a third of the time
    assert times(figures(path, rounded=False)) == (30, 30, 0, 0)


@needs_hta
def test_rounding_makes_short_kernels_negative(tmp_path: Path) -> None:
    short = [device(GEMM, 10 * i + 0.25, 0.5, i) for i in range(1, 11)]
    long = device(GEMM, 200.25, 20, 99)
    path = write(tmp_path / "t.json", one_step(*short, long))
    assert figures(path, rounded=False).compute_us == 25
    assert figures(path).compute_us == 9  # 19 for the long one, less 1 for each of the short
    alone = cross_check(write(tmp_path / "short.json", one_step(*short)))
    assert isinstance(alone, HtaFailure)
    assert alone.error.startswith("AssertionError: assert ")


@needs_hta
def test_floats_hold_the_time_since_1970_to_a_quarter_of_a_microsecond(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", one_step(device(GEMM, 10.1, 1, 1), device(GEMM, 20.2, 1, 2)))
    assert figures(path, rounded=False).span_us == 11.25  # exactly 11.1


@needs_hta
@pytest.mark.parametrize(
    ("odd", "compute_us", "noncompute_us"),
    [
        (event("Stream Wait Event", 70, 20, cat="cuda_sync", stream=20), 30, 20),
        (event("Stream Sync", 70, 20, cat="cuda_sync", stream=7), 30, 20),
        (event("Event Sync", 70, 20, cat="cuda_sync", stream=-1), 30, 0),
        (event("triton_poi_fused_add_0", 70, 20, stream=7), 50, 0),
        (event("FSDP::forward", 5, 100, cat="gpu_user_annotation", stream=7), 100, 0),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_whatever_carries_a_stream_keeps_the_device_busy(
    tmp_path: Path, odd: dict[str, Any], compute_us: float, noncompute_us: float
) -> None:
    """Beside a kernel of 30 us. It counts as compute, but for sync events."""
    found = figures(write(tmp_path / "t.json", one_step(device(GEMM, 10, 30, 1), odd)))
    assert (found.compute_us, found.noncompute_us) == (compute_us, noncompute_us)


@needs_hta
@pytest.mark.parametrize("name", ["rcclGenericKernel", "nvshmemi_barrier", "void deep_ep::dispatch", "my_comm"])
def test_communication_of_other_names_is_compute(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "t.json", one_step(device(name, 10, 30, 1, collective="allreduce")))
    found = figures(path)
    assert (found.compute_us, found.noncompute_us, found.overlap_pct) == (30, 0, None)


@needs_hta
def test_hip_kernels_are_communication_and_some_kernels_are_nothing(tmp_path: Path) -> None:
    """A name that begins with "hip", and one with "Sync" or "dma" in it."""
    odd = [device(n, 50 * i, 10, i) for i, n in enumerate(["hip_gemm", "SyncBatchNorm_forward", "headmax_kernel"], 1)]
    found = figures(write(tmp_path / "t.json", one_step(device(GEMM, 0, 30, 9), *odd)))
    assert (found.compute_us, found.noncompute_us, found.overlap_pct) == (30, 30, 0)


@needs_hta
@pytest.mark.parametrize(("name", "events", "error"), [
    ("cpu.json", [step(1, 0, 100), event("aten::mm", 1, 5), event("gloo:all_reduce", 3, 9, tid=2)], "IndexError: "),
    ("empty.json", [], "KeyError: 'ts'"), ("name.trace", [], "ValueError: Trace files validation failed."),
])  # fmt: skip
def test_what_hta_cannot_read_is_one_line_of_data(tmp_path: Path, name: str, events: list[Any], error: str) -> None:
    found = cross_check(write(tmp_path / name, events))
    assert isinstance(found, HtaFailure)
    assert found.error.startswith(error)
    assert "\n" not in found.error


@needs_hta
@pytest.mark.parametrize("rank", [0, 1])
def test_with_all_steps_and_whole_microseconds_hta_is_exact(rank: int) -> None:
    name = f"hta_sampled_128rank_r{rank}"
    exact = dict(zip(FIELDS, EXACT_US[name], strict=True))
    found = figures(OTHERS / f"{name}.json.gz", include_last_step=True)
    assert times(found) == (exact["span"], exact["compute"], exact["busy"] - exact["compute"], exact["idle"])
    assert found.overlap_pct == round(100 * exact["overlap"] / exact["comm"], 2)


@needs_hta
def test_real_sync_events_count_as_busy() -> None:
    name = "hta_cuda_event_sync_multi_stream"
    assert figures(OTHERS / f"{name}.json.gz").idle_us == EXACT_US[name][FIELDS.index("idle")] - 2


@needs_hta
def test_a_real_cpu_trace_is_beyond_hta() -> None:
    found = cross_check(OTHERS / "hta_cpu_only_gloo.json.gz")
    assert isinstance(found, HtaFailure)
    assert found.error == "IndexError: single positional indexer is out-of-bounds"
