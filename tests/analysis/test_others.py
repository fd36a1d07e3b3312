"""Real traces that others recorded, with exact figures: to the nanosecond. ``others/README.md`` gives their source."""

from itertools import pairwise
from pathlib import Path

import pytest

from refshard.analysis.analyse import Analysis, analyse, join
from refshard.analysis.figures import Cause
from refshard.events.timeline import Kind

OTHERS = Path(__file__).parent / "others"
FIELDS = ("n", "span", "busy", "compute", "comm", "overlap", "exposed_vs_compute", "exposed_vs_any", "idle")
EXACT_US = {
    "hta_sampled_128rank_r0": (1204, 1222847, 547656, 210320, 396199, 59216, 336983, 336033, 675191),
    "hta_sampled_128rank_r1": (1154, 1231186, 580050, 271973, 379053, 75530, 303523, 299495, 651136),
    "hta_cuda_event_sync_multi_stream": (6, 19506, 372, 369, 0, 0, 0, 0, 19134),
}


@pytest.fixture(scope="module")
def analyses() -> dict[str, Analysis]:
    found = join([analyse(path) for path in sorted(OTHERS.glob("*.json.gz"))])
    return {one.path.name.removesuffix(".json.gz"): one for one in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT_US)
def test_figures_are_exact_over_the_whole_trace(analyses: dict[str, Analysis], name: str) -> None:
    exact, one = dict(zip(FIELDS, EXACT_US[name], strict=True)), analyses[name]
    whole = one.figures.whole
    found_ns = {
        "span": whole.span_ns, "busy": whole.busy_ns, "compute": whole.compute_ns, "comm": whole.comm_ns,
        "overlap": whole.comm_ns - whole.exposed_ns, "exposed_vs_compute": whole.exposed_ns,
        "exposed_vs_any": whole.exposed_any_ns, "idle": whole.idle_ns,
    }  # fmt: skip
    assert len(one.timeline.spans) == exact.pop("n")
    assert found_ns == {key: 1000 * us for key, us in exact.items()}
    assert whole.overlap_ratio == (exact["overlap"] / exact["comm"] if exact["comm"] else None)


def test_every_class_of_time_is_in_its_place(analyses: dict[str, Analysis]) -> None:
    """Steps follow one another without a gap or an overlap, and idle time has one cause."""
    for one in analyses.values():
        windows = one.timeline.windows
        assert all(first.end == second.start for first, second in pairwise(windows))
        for part in (one.figures.whole, *(step.breakdown for step in one.figures.steps)):
            assert part.busy_ns + part.idle_ns == part.span_ns
            assert part.idle_ns == sum(getattr(part, f"idle_{cause}_ns") or 0 for cause in Cause)
            assert part.exposed_any_ns <= part.exposed_ns <= part.comm_ns <= part.busy_ns


def test_gloo_without_a_gpu_by_hand(analyses: dict[str, Analysis]) -> None:
    """Ten all-reduces on two threads, of which the first two lie in the step: their union, and what the step lacks.

    From the file: the step is [1212075529876.817, +210109.162) us, the all-reduces in it
    [1212075548353.304, +173209.713) and [1212075556659.473, +170471.258).
    """
    trace = analyses["hta_cpu_only_gloo"]
    (step,) = trace.figures.steps
    assert step.breakdown.span_ns == 210_109_162
    assert step.breakdown.comm_ns == (1212075556659473 + 170471258) - 1212075548353304
    assert step.breakdown.compute_ns == 0
    assert step.breakdown.overlap_ratio == 0
    assert trace.timeline.spans.of_kind(Kind.COMM).sum() == 10
    assert [c.bytes for c in trace.figures.collectives[:2]] == [4 * 321271, 4 * 2082411]
    assert trace.figures.rank == 34


def test_only_ranks_of_one_run_are_one_job(analyses: dict[str, Analysis]) -> None:
    jobs: dict[int, list[str]] = {}
    for name, one in analyses.items():
        jobs.setdefault(one.figures.job, []).append(name)
    assert sorted(jobs.values()) == [
        ["hta_cpu_only_gloo"],
        ["hta_cuda_event_sync_multi_stream"],
        ["hta_sampled_128rank_r0", "hta_sampled_128rank_r1"],
    ]
    assert [wait.rank for wait in analyses["hta_sampled_128rank_r0"].figures.waits_for] == [1]
