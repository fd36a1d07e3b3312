"""What is said about calls that hold the GPU up."""

import msgspec
import pytest

from refshard.analysis.figures import (
    NO_SYNC,
    ClassFigures,
    CriticalPath,
    HostStall,
    HostStalls,
    OperatorReport,
    Stall,
    WhatIf,
    WhatIfFigures,
)
from refshard.report.trace.host_stalls import host_stalls_section
from tests.report.printed import Opened, opened
from tests.report.traces import figures, gpu

MS = 1_000_000
LITTLE = "No blocking call itself idles the GPU for 1 % of a step or more."
HOLDUP = HostStall(
    kind=Stall.ITEM, call="cudaMemcpyAsync", line=None, operator="aten::_local_scalar_dense", unit=None, thread="7/7",
    copied=None, count=8, host_ns=40 * MS, idle_ns=20 * MS, followed_ns=30 * MS,
)  # fmt: skip


def of(*places: HostStall, steps: int | None = 4) -> Opened:
    """The section of four steps of 100 ms."""
    found = HostStalls(places=places, steps=steps, span_ns=400 * MS, idle_ns=50 * MS)
    return opened(host_stalls_section(msgspec.structs.replace(figures(gpu(steps=1)), host_stalls=found)))


def changed(**how: object) -> HostStall:
    return msgspec.structs.replace(HOLDUP, **how)


@pytest.mark.parametrize(("calls", "words"), [(25, "PYTORCH_NO_CUDA_MEMORY_CACHING"), (24, "expandable_segments")])
def test_an_allocator_that_does_not_cache_is_told_apart(calls: int, words: str) -> None:
    """Four steps of 25 kernels each, and memory given back for every fourth of them or for fewer."""
    places = (
        changed(kind=Stall.ALLOCATOR, call="hipFree", count=20),
        changed(kind=Stall.ALLOCATOR, call="hipFree", count=calls - 20),
        changed(kind=Stall.ALLOCATOR, call="hipMalloc", count=90),
    )
    work = ClassFigures(name="GEMM", count=100, ns=300 * MS, share=1.0)
    report = OperatorReport(
        steps=4, work_ns=300 * MS, classes=(work,), totals=(), total_count=0, operators=(), operator_count=0,
        kernels=(), kernel_count=0, contention=None, hardware=None, has_shapes=False,
    )  # fmt: skip
    found = HostStalls(places=places, steps=4, span_ns=400 * MS, idle_ns=50 * MS)
    section = opened(
        host_stalls_section(msgspec.structs.replace(figures(gpu(steps=1)), host_stalls=found, operators=report))
    )
    assert words in section.sentences[1]


def test_the_worst_is_named_with_its_remedy() -> None:
    first, remedy, together, stacks = of(HOLDUP, changed(kind=Stall.COPY, idle_ns=8 * MS)).sentences
    assert first == (
        "The GPU is held up most by: value read by the host (cudaMemcpyAsync) at aten::_local_scalar_dense. It makes "
        "the GPU idle for 5.00 ms a step (5.0 %)."
    )
    assert remedy.startswith("Try: read values (.item(), .tolist(), if tensor:) only every n steps")
    assert together == "All such calls cause 7.00 ms of 12.5 ms of idle time a step."
    assert "with_stack=True" in stacks
    assert len(of(changed(line="train.py(3): log")).sentences) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": Stall.SHAPE}, "torch.where"),
        ({"kind": Stall.COPY, "copied": "Memcpy HtoD (Pageable -> Device)"}, "pin_memory=True"),
        ({"kind": Stall.COPY, "copied": "Memcpy DtoH (Device -> Pageable)"}, "pinned memory"),
        ({"kind": Stall.COPY}, "non_blocking=True"),
        ({"kind": Stall.SYNC}, "wait_stream"),
        ({"kind": Stall.ALLOCATOR}, "expandable_segments"),
        ({"kind": Stall.LOADING}, "CUDA_MODULE_LOADING=EAGER"),
        ({"kind": Stall.LOADING, "call": "hipLaunchKernel"}, "HIP_ENABLE_DEFERRED_LOADING=0"),
        ({"kind": Stall.OTHER}, "warm up"),
    ],
)
def test_each_cause_has_a_remedy(changes: dict[str, object], words: str) -> None:
    assert words in of(changed(**changes)).sentences[1]


def test_little_is_said_to_be_little() -> None:
    section = of(changed(idle_ns=3 * MS))
    assert section.sentences == (LITTLE,)
    assert len(section.rows) == 1
    assert not section.brief
    several = of(*[changed(idle_ns=3 * MS, call=name) for name in "abc"])
    assert several.sentences == (LITTLE, "All such calls cause 2.25 ms of 12.5 ms of idle time a step.")
    nothing = of(changed(idle_ns=0, host_ns=0))
    assert (nothing.rows, nothing.sentences) == ([], (LITTLE,))
    assert of().sentences == (LITTLE,)


def what_if(gain: int, error: float = 0.0) -> WhatIfFigures:
    """Of four steps of 100 ms: what they gain, in ms, if the host never waits."""
    one = WhatIf(what=NO_SYNC, step_ns=(100 - gain) * MS, gain_ns=gain * MS)
    return WhatIfFigures(
        steps=4, step_ns=100 * MS, replay_error=error, waits_recorded=0, waits_inferred=0, only_launches=False,
        what_ifs=(one,), order=(), path=CriticalPath(parts=(), owners=()),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (
            what_if(28),
            [
                "But the host starts what follows later because it waits: if it never waited for the GPU, 28.0 ms a "
                "step would be saved (see What if)."
            ],
        ),
        (what_if(0), []),
        (what_if(28, error=0.5), []),
        (None, []),
    ],
)
def test_waits_that_delay_the_host_are_said_to(found: WhatIfFigures | None, told: list[str]) -> None:
    """A wait of 10 ms that ends before the queue does idles nothing, and yet delays all launches after it."""
    few = HostStalls(places=(changed(idle_ns=MS, kind=Stall.SYNC),), steps=4, span_ns=400 * MS, idle_ns=50 * MS)
    section = opened(
        host_stalls_section(msgspec.structs.replace(figures(gpu(steps=1)), host_stalls=few, what_if=found))
    )
    assert list(section.sentences) == [LITTLE, *told]


def test_a_full_queue_is_no_problem() -> None:
    section = of(changed(kind=Stall.QUEUE, call="cudaLaunchKernel", idle_ns=0))
    assert section.rows[0]["what"] == "full launch queue (cudaLaunchKernel)"
    assert section.sentences[-1] == "Launches that wait for a full queue are no problem: the host is ahead of the GPU."


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"line": "/a/b/project/models/net.py(7): forward"}, "models/net.py(7): forward, aten::_local_scalar_dense"),
        ({"line": "train.py(7): main", "operator": None}, "train.py(7): main"),
        ({"operator": "aten::empty", "unit": "layers.3"}, "aten::empty in layers.3"),
        ({"operator": None, "unit": "validation"}, "validation"),
        ({"operator": "x" * 60}, "x" * 47 + "…"),
    ],
)
def test_where_it_is(changes: dict[str, object], where: str) -> None:
    assert of(changed(**changes)).rows[0]["where"] == where


def test_a_trace_that_cannot_tell_says_why() -> None:
    told = figures(gpu(steps=1))
    assert host_stalls_section(told) is None
    unknown = HostStalls(places=None, reason="the trace holds no calls")
    section = opened(host_stalls_section(msgspec.structs.replace(told, host_stalls=unknown)))
    assert section.rows == []
    assert section.sentences == (
        "What holds the GPU up cannot be told: the trace holds no calls. Record CPU and CUDA activities together.",
    )


def test_a_trace_without_steps_has_sums() -> None:
    section = of(HOLDUP, steps=None)
    assert (section.rows[0]["calls"], section.rows[0]["host time in calls"]) == ("8", "40.0 ms")
