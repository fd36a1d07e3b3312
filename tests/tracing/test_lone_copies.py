"""Copies beside which nothing else runs: against counting point by point."""

from collections import Counter
from pathlib import Path

from hypothesis import given

from refshard.events.timeline import Kind, Meaning
from refshard.tracing.analysis import analyse
from refshard.tracing.figures import LoneCopy
from refshard.tracing.overlap import lone_copies
from tests.tracing.handmade import event, step, write
from tests.tracing.small import Row, bounds, rows, timeline_of, windows


@given(rows, windows)
def test_each_name_has_its_time_in_the_windows(found: list[Row], inside: list[tuple[int, int]]) -> None:
    timeline = timeline_of(found)
    copies = [row for row in found if row.kind is Kind.COPY and not row.under & (Meaning.COPY_IN | Meaning.COPY_OUT)]
    others = set().union(*(row.points for row in found if row not in copies))
    within = set().union(*(range(*window) for window in inside))
    ns, counts = Counter[str](), Counter[str]()
    for row in copies:
        alone = len((row.points - others) & within)
        name = timeline.spans.name_table[row.name]
        ns[name] += alone
        counts[name] += alone > 0
    told = lone_copies(timeline, *bounds(inside))
    assert {one.name: (one.ns, one.count) for one in told} == {name: (ns[name], counts[name]) for name in +ns}
    assert [one.ns for one in told] == sorted((one.ns for one in told), reverse=True)


def test_a_copy_beside_a_kernel_is_alone_for_the_rest(tmp_path: Path) -> None:
    """In 100 us a kernel takes 40, a copy to the device 50 of which 10 are beside the kernel, and a fill 5."""
    events = [
        step(0, 0, 100),
        *(event("cudaLaunchKernel", at, 1, cat="cuda_runtime", correlation=n) for n, at in enumerate((1, 2, 3), 1)),
        event("gemm", 10, 40, cat="kernel", tid=7, correlation=1, stream=7, device=0),
        event("Memcpy HtoD (Pageable -> Device)", 40, 50, cat="gpu_memcpy", tid=8, correlation=2, stream=8, device=0),
        event("Memset (Device)", 95, 5, cat="gpu_memset", tid=7, correlation=3, stream=7, device=0),
    ]
    figures = analyse(write(tmp_path / "trace.json", events)).figures
    assert figures.whole.lone_copy_ns == 45_000
    assert figures.lone_copies == (
        LoneCopy(name="Memcpy HtoD (Pageable -> Device)", ns=40_000, count=1),
        LoneCopy(name="Memset (Device)", ns=5_000, count=1),
    )
