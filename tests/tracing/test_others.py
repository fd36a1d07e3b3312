"""Real traces of others, which nobody here made, with exact figures: to the nanosecond."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from refshard.timeline import Kind
from refshard.tracing.analysis import Analysis, analyse, join

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
MANIFEST: dict[str, Any] = json.loads((SHARED / "manifest.json").read_text()) if SHARED.is_dir() else {}
# Of one trace the manifest's span was subtracted in floats: its last kernel ends at 4458677083276.404 + 154.782 us and
# its first event starts at 4458676422880.181 us, as the file writes them.
CORRECTED = {"hta_nccl_data_a100_2rank_r0.json.gz": {"span_us": 660551.005, "idle": 503050.991}}
EXACT = {
    name: {**entry["exact_us"], **CORRECTED.get(name, {})}
    for name, entry in MANIFEST.items()
    if name != "_about" and "exact_us" in entry
}

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="shared/traces, traces of others, are not here")


@pytest.fixture(scope="module")
def analyses() -> dict[str, Analysis]:
    found = join([analyse(path) for path in sorted(SHARED.glob("*.json.gz"))])
    return {one.path.name: one for one in found}


@pytest.mark.parametrize("name", EXACT)
def test_figures_are_exact_over_the_whole_trace(analyses: dict[str, Analysis], name: str) -> None:
    exact, one = EXACT[name], analyses[name]
    whole = one.figures.whole
    found = {
        "n": len(one.timeline.spans), "span_us": whole.span_ns, "busy": whole.busy_ns, "compute": whole.compute_ns,
        "comm": whole.comm_ns, "overlap": whole.comm_ns - whole.exposed_ns, "exposed_vs_compute": whole.exposed_ns,
        "exposed_vs_any": whole.exposed_any_ns, "idle": whole.idle_ns,
    }  # fmt: skip
    assert found == {key: round(exact[key] * (1 if key == "n" else 1000)) for key in found}
    if exact["comm"]:
        assert round(100 * (whole.overlap_ratio or 0), 2) == exact["ov_pct"]
    else:
        assert whole.overlap_ratio is None


def test_every_class_of_time_is_in_its_place(analyses: dict[str, Analysis]) -> None:
    """Steps follow one another without a gap or an overlap, and idle time has one of two reasons."""
    for one in analyses.values():
        windows = one.timeline.windows
        assert all(first.end == second.start for first, second in pairwise(windows))
        for part in (one.figures.whole, *(step.breakdown for step in one.figures.steps)):
            assert part.busy_ns + part.idle_ns == part.span_ns
            assert part.idle_ns == (part.idle_host_ns or 0) + (part.idle_dependency_ns or 0)
            assert part.exposed_any_ns <= part.exposed_ns <= part.comm_ns <= part.busy_ns


def test_the_schema_of_2021_by_hand(analyses: dict[str, Analysis]) -> None:
    """No exact figures came with it; an independent sum over its kernels gives these."""
    trace = analyses["kineto_tb_resnet50_v100_oldformat.json.gz"]
    assert [window.step for window in trace.timeline.windows] == [16, 17, 18, 19, 20, 21]
    assert len(trace.timeline.spans) == 8772 + 312 + 12
    assert trace.figures.whole.compute_ns == 591_209_000
    assert trace.figures.whole.comm_ns == 0
    assert trace.figures.rank is None
    assert {warning.code for warning in trace.figures.warnings} == {"no_rank"}
    assert max(point.bytes for point in trace.figures.memory if point.device == "device 0") > 2**30


def test_gloo_without_a_gpu_by_hand(analyses: dict[str, Analysis]) -> None:
    """Ten all-reduces on two threads, of which the first two lie in the step: their union, and what the step lacks.

    From the file: the step is [1212075529876.817, +210109.162) us, the all-reduces in it
    [1212075548353.304, +173209.713) and [1212075556659.473, +170471.258).
    """
    trace = analyses["hta_cpu_only_gloo.json.gz"]
    (step,) = trace.figures.steps
    assert step.breakdown.span_ns == 210_109_162
    assert step.breakdown.comm_ns == (1212075556659473 + 170471258) - 1212075548353304
    assert step.breakdown.compute_ns == 0
    assert step.breakdown.overlap_ratio == 0
    assert trace.timeline.spans.of_kind(Kind.COMM).sum() == 10
    assert [c.bytes for c in trace.figures.collectives[:2]] == [4 * 321271, 4 * 2082411]
    assert trace.figures.rank == 34


def test_nccls_arguments_are_read(analyses: dict[str, Analysis]) -> None:
    """HTA's own test of this trace asserts the same 21 kernels and message."""
    trace = analyses["hta_nccl_data_a100_2rank_r0.json.gz"]
    assert len(trace.figures.collectives) == 21
    found = [c for c in trace.figures.collectives if c.op == "all_reduce" and c.bytes == 2049000 * 4]
    assert found
    assert all((c.group, c.group_size, c.dtype) == ("0 [0-1]", 2, "Float") for c in found)
    for one in found:
        assert one.algorithm_bandwidth == pytest.approx(2049000 * 4 / (one.duration_ns * 1e-9))
        assert one.bus_bandwidth == pytest.approx(one.algorithm_bandwidth)  # 2 (n - 1) / n is 1 with two ranks


def test_only_ranks_of_one_run_are_one_job(analyses: dict[str, Analysis]) -> None:
    """Two of these traces say NCCL and eight ranks, but ran on an A100 and on a B200, three years apart."""
    jobs: dict[int, list[str]] = {}
    for name, one in analyses.items():
        jobs.setdefault(one.figures.job, []).append(name)
    assert [names for names in jobs.values() if len(names) > 1] == [
        ["hta_sampled_128rank_r0.json.gz", "hta_sampled_128rank_r1.json.gz"]
    ]
    waits = analyses["hta_sampled_128rank_r0.json.gz"].figures.waits_for
    assert [wait.rank for wait in waits] == [1]
