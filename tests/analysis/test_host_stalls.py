"""What holds the GPU up, on traces with figures that can be added up on paper, and counted nanosecond by nanosecond."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.analyse import analyse
from refshard.analysis.figures import HostStall, HostStalls, Stall
from tests.analysis.handmade import event, note, step, write

Events = list[dict[str, Any]]
US = 1000
DTOH, HTOD = "Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pageable -> Device)"


def call(name: str, start: float, duration: float, correlation: int = 0, **where: Any) -> dict[str, Any]:
    return event(name, start, duration, cat="cuda_runtime", correlation=correlation, **where)


def launched(number: int, at: float, start: float, duration: float, *, takes: float = 2, **where: Any) -> Events:
    """A launch of ``takes`` microseconds at ``at``, and its kernel."""
    return [
        call("cudaLaunchKernel", at, takes, number, **where),
        event("gemm", start, duration, cat="kernel", tid=7, stream=7, device=0, correlation=number),
    ]


def copied(number: int, at: float, takes: float, name: str, start: float, duration: float) -> Events:
    """A call of ``takes`` microseconds that copies."""
    return [
        call("cudaMemcpyAsync", at, takes, number),
        event(name, start, duration, cat="gpu_memcpy", tid=7, stream=7, device=0, correlation=number),
    ]


def frame(name: str, start: float, duration: float, **where: Any) -> dict[str, Any]:
    return event(name, start, duration, cat="python_function", **where)


def host_stalls(path: Path, events: Events) -> HostStalls:
    found = analyse(write(path / "t.json", events)).figures.host_stalls
    assert found is not None
    return found


def places(path: Path, events: Events) -> list[HostStall]:
    found = host_stalls(path, events).places
    assert found is not None
    return list(found)


def item() -> Events:
    """A kernel to 100; ``.item()`` copies from 101 to 103, and returns at 112; the next kernel starts at 135."""
    return [
        *launched(1, 10, 20, 80), event("aten::item", 50, 62), event("aten::_local_scalar_dense", 51, 61),
        *copied(2, 52, 56, DTOH, 101, 2), call("cudaStreamSynchronize", 109, 2), *launched(3, 130, 135, 65),
    ]  # fmt: skip


def test_item_makes_the_gpu_idle_until_the_next_launch(tmp_path: Path) -> None:
    (one,) = places(tmp_path, item())
    assert (one.kind, one.operator, one.count) == (Stall.ITEM, "aten::_local_scalar_dense", 1)
    assert one.call == "cudaMemcpyAsync"
    assert one.copied == DTOH
    # One microsecond before the copy, and 32 after it, which the 58 in both calls outlast.
    assert (one.host_ns, one.idle_ns, one.followed_ns) == (58 * US, 33 * US, 33 * US)


def test_a_call_causes_no_more_idle_time_than_it_takes(tmp_path: Path) -> None:
    events = [*launched(1, 10, 20, 80), call("cudaDeviceSynchronize", 200, 3), *launched(2, 600, 605, 10)]
    (one,) = places(tmp_path, events)
    assert (one.kind, one.call) == (Stall.SYNC, "cudaDeviceSynchronize")
    assert (one.host_ns, one.idle_ns, one.followed_ns) == (3 * US, 3 * US, 405 * US)


def test_calls_before_one_launch_share_the_gap_by_their_durations(tmp_path: Path) -> None:
    events = [
        *launched(1, 10, 20, 80), call("cudaDeviceSynchronize", 40, 60), call("cudaMalloc", 110, 20),
        *launched(2, 135, 140, 10),
    ]  # fmt: skip
    wait, allocation = places(tmp_path, events)
    # Idle from 100 to 140; without the calls the launch would have come 80 earlier. The shares are 60 and 20 of 80.
    assert (wait.call, wait.idle_ns, wait.followed_ns) == ("cudaDeviceSynchronize", 30 * US, 10 * US)
    assert (allocation.call, allocation.idle_ns, allocation.followed_ns) == ("cudaMalloc", 10 * US, 30 * US)
    assert allocation.kind is Stall.ALLOCATOR


@pytest.mark.parametrize(("apart", "lasting", "start", "expected"), [
    (1, 1, 1590, (Stall.LOADING, 1500 * US, 1500 * US, 1530 * US)),  # the GPU has nothing to do meanwhile
    (300, 299, 2739, (Stall.QUEUE, 1500 * US, 0, 0)),  # it is busy: the queue is full
])  # fmt: skip
def test_a_long_launch_loads_or_waits_for_a_full_queue(
    tmp_path: Path, apart: int, lasting: int, start: int, expected: tuple[Stall, int, int, int]
) -> None:
    short = [part for n in range(9) for part in launched(10 + n, 1 + 3 * n, 40 + apart * n, lasting)]
    (one,) = places(tmp_path, [*short, *launched(2, 60, start, 10, takes=1500)])
    assert one.call == "cudaLaunchKernel"
    assert (one.kind, one.host_ns, one.idle_ns, one.followed_ns) == expected


def test_a_pinned_copy_that_returns_at_once_holds_nothing_up(tmp_path: Path) -> None:
    pinned = "Memcpy DtoH (Device -> Pinned)"
    assert (
        places(tmp_path, [*launched(1, 10, 20, 80), *copied(2, 52, 8, pinned, 101, 2), *launched(3, 130, 135, 5)]) == []
    )


def test_a_pageable_copy_blocks_if_it_returns_after_its_end_or_late(tmp_path: Path) -> None:
    def copies(takes: float, start: float) -> Events:
        return [*launched(1, 10, 20, 80), *copied(2, 50, takes, HTOD, start, 10), *launched(3, 500, 505, 5)]

    assert places(tmp_path, copies(20, 101)) == []
    (late,) = places(tmp_path, copies(110, 151))
    (after,) = places(tmp_path, copies(70, 101))
    assert (late.kind, late.count, after.kind, after.count) == (Stall.COPY, 1, Stall.COPY, 1)


@pytest.mark.parametrize(
    ("operator", "kind"),
    [("aten::nonzero", Stall.SHAPE), ("aten::copy_", Stall.COPY), ("aten::item", Stall.ITEM), ("mine", Stall.SYNC)],
)
def test_a_wait_is_named_by_the_operator_around_it(tmp_path: Path, operator: str, kind: Stall) -> None:
    events = [
        *launched(1, 10, 20, 80), event(operator, 30, 80), call("cudaStreamSynchronize", 40, 30),
        call("cudaStreamSynchronize", 72, 30), *launched(2, 120, 125, 10),
    ]  # fmt: skip
    (one,) = places(tmp_path, events)
    assert (one.kind, one.operator, one.count) == (kind, operator, 2 if kind is Stall.SYNC else 1)


CALLS = {
    Stall.SYNC: "cudaEventSynchronize hipStreamSynchronize cuCtxSynchronize",
    Stall.ALLOCATOR: "cudaMalloc hipFree cudaMemGetInfo cudaHostAlloc cuMemMap hipExtMallocWithFlags",
    Stall.LOADING: "cuModuleLoadData hipModuleLoadData cuLibraryLoadData",
    Stall.COPY: "cudaMemcpy hipMemcpyWithStream cudaMemcpy2D",
    None: "cudaMallocAsync cudaStreamWaitEvent cudaEventRecord cudaEventQuery cudaFuncGetAttributes "
    "hipModuleLaunchKernel cudaGraphLaunch",
}
LONG = [("cudaFuncGetAttributes", Stall.LOADING, 150), ("cudaStreamCreateWithFlags", Stall.OTHER, 150),
        ("cudaGraphLaunch", None, 150), ("hipGraphLaunch", None, 150)]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "us"), [*((name, kind, 5) for kind, names in CALLS.items() for name in names.split()), *LONG]
)
def test_what_calls_are_for(tmp_path: Path, name: str, kind: Stall | None, us: int) -> None:
    found = places(tmp_path, [*launched(1, 10, 20, 80), call(name, 200, us), *launched(2, 420, 425, 10)])
    assert [one.kind for one in found] == ([] if kind is None else [kind])


def test_the_place_is_the_innermost_function_of_the_users_code(tmp_path: Path) -> None:
    events = [
        *item(), frame("train.py(5): main", 0, 200), frame("train.py(40): log", 45, 70),
        frame("torch/_tensor.py(3): item", 47, 67), frame("<built-in method item of Tensor object at 0x7>", 48, 65),
        frame("other.py(1): run", 0, 200, tid=2),
    ]  # fmt: skip
    (one,) = places(tmp_path, events)
    assert one.line == "train.py(40): log"


def test_without_stacks_the_place_is_the_operator_with_its_layer_or_annotation(tmp_path: Path) -> None:
    events = [
        step(3, 0, 400), *launched(1, 10, 20, 10), note("FSDP::pre_forward (layers.3)", 30, 4),
        event("aten::empty", 38, 9), call("cudaMalloc", 40, 5), note("FSDP::post_forward (layers.3)", 50, 4),
        *launched(2, 60, 65, 10), note("validation", 80, 40), call("cudaFree", 90, 6), *launched(3, 100, 105, 10),
        call("cudaDeviceSynchronize", 130, 7, tid=9), *launched(4, 140, 145, 10),
    ]  # fmt: skip
    found = {one.call: one for one in places(tmp_path, events)}
    assert [(one.line, one.operator, one.unit) for one in found.values()] == [
        (None, None, "validation"), (None, "aten::empty", "layers.3"), (None, None, None),
    ]  # fmt: skip
    assert found["cudaDeviceSynchronize"].thread == "7/9"
    # Nothing is launched on that thread, so that no gap is due to it.
    assert [one.idle_ns for one in found.values()] == [6 * US, 5 * US, 0]


def test_calls_at_one_place_are_added_up_over_the_steps_and_others_left_out(tmp_path: Path) -> None:
    events: Events = [step(0, 5, 95), step(1, 100, 100)]
    for n in range(3):
        at = 100 * n
        events += [*launched(2 * n + 1, at + 10, at + 20, 20), call("cudaDeviceSynchronize", at + 30, 10 + n)]
        events += launched(2 * n + 2, at + 60, at + 65, 20)
    found = host_stalls(tmp_path, events)
    assert found.places is not None
    (one,) = found.places
    assert (found.steps, one.count, one.host_ns, one.idle_ns) == (2, 2, 21 * US, 21 * US)
    # From the first kernel, at 20, to the last of the second step, at 185, less four kernels of 20.
    assert (found.span_ns, found.idle_ns) == (165 * US, 85 * US)


def test_what_comes_after_a_graphs_first_kernel_is_not_due_to_a_wait_before_the_graph(tmp_path: Path) -> None:
    wait = call("cudaDeviceSynchronize", 40, 70)
    graph = [call("cudaGraphLaunch", 120, 40, 2)]
    graph += [kernel for start in (135, 150) for kernel in launched(2, 120, start, 10)[1:]]
    (one,) = places(tmp_path, [*launched(1, 10, 20, 80), wait, *graph])
    assert (one.idle_ns, one.followed_ns) == (35 * US, 35 * US)


def test_hip_and_the_schema_of_2021_give_the_same(tmp_path: Path) -> None:
    def renamed(categories: dict[str, str], prefix: str) -> list[HostStall]:
        events = item()
        for one in events:
            one["cat"] = categories.get(one["cat"], one["cat"])
            if one["name"].startswith("cuda"):
                one["name"] = prefix + one["name"].removeprefix("cuda")
        return places(tmp_path, events)

    (old,) = renamed(
        {"cuda_runtime": "Runtime", "cpu_op": "Operator", "kernel": "Kernel", "gpu_memcpy": "Memcpy"}, "cuda"
    )
    (hip,) = renamed({"cuda_runtime": "hip_runtime"}, "hip")
    for one in (old, hip):
        assert (one.kind, one.count, one.host_ns, one.idle_ns) == (Stall.ITEM, 1, 58 * US, 33 * US)


def test_what_cannot_be_told_has_a_reason(tmp_path: Path) -> None:
    kernels = [part for part in item() if part["cat"] in ("kernel", "gpu_memcpy")]
    kernels.append(event("aten::mm", 1, 2))
    without_calls = host_stalls(tmp_path, kernels)
    assert (without_calls.places, without_calls.reason) == (None, "the trace holds no calls of the CUDA or HIP runtime")
    unmatched = host_stalls(tmp_path, [*kernels, call("cudaDeviceSynchronize", 40, 60, 99)])
    assert (unmatched.places, unmatched.reason) == (None, "no call of the trace has the correlation id of a kernel")
    assert analyse(write(tmp_path / "cpu.json", [step(0, 0, 9), event("aten::mm", 1, 2)])).figures.host_stalls is None


LENGTHS = {"launch": "cudaLaunchKernel", "wait": "cudaDeviceSynchronize", "copy": "cudaMemcpy", "free": "cudaFree"}
happenings = st.lists(
    st.tuples(st.sampled_from((1, 2)), st.sampled_from(sorted(LENGTHS)), st.integers(0, 6), st.integers(1, 9),
              st.integers(0, 12), st.integers(0, 9)),
    min_size=1, max_size=14,
)  # fmt: skip
"""Calls on two threads: after a pause, of a length; those that launch do so after a delay, for a while."""


@pytest.mark.slow
@given(happenings=happenings)
def test_every_gap_is_divided_as_counted_nanosecond_by_nanosecond(
    tmp_path_factory: pytest.TempPathFactory, happenings: list[tuple[int, str, int, int, int, int]]
) -> None:
    clock, calls, kernels = {1: 0, 2: 0}, [], []
    for thread, kind, pause, length, delay, runs in happenings:
        start = clock[thread] + pause
        clock[thread] = start + length
        calls.append((thread, kind, start, start + length))
        # Distinct starts, so that no two kernels end one gap.
        kernels.append(None if kind in ("wait", "free") else (start + delay, start + delay + runs))
    starts = [kernel[0] for kernel in kernels if kernel]
    points = [(thread, start) for thread, _, start, _ in calls]
    if not starts or len(set(starts)) < len(starts) or len(set(points)) < len(points):
        return
    expected = _divided(calls, kernels)
    events = []
    for number, ((thread, kind, start, end), kernel) in enumerate(zip(calls, kernels), 1):
        # A frame of its own for each call makes a place of it.
        at, takes = start / 1000, (end - start) / 1000
        events.append(call(LENGTHS[kind], at, takes, number if kernel else 0, tid=thread))
        events.append(frame(f"f{number}.py(1): f", at, takes, tid=thread))
        if kernel:
            where: dict[str, Any] = {"cat": "kernel", "tid": 7, "stream": 7, "device": 0, "correlation": number}
            events.append(event("gemm", kernel[0] / 1000, (kernel[1] - kernel[0]) / 1000, **where))
    found = analyse(write(tmp_path_factory.getbasetemp() / "divided.json", events)).figures.host_stalls
    assert found is not None
    assert found.places is not None
    by_number = {int((one.line or "")[1:].partition(".")[0]): one for one in found.places}
    assert set(by_number) == {n for n, (_, kind, *_) in enumerate(calls, 1) if kind != "launch"}
    for number, one in by_number.items():
        caused, followed = expected.get(number, (Fraction(), 0))
        assert abs(one.idle_ns - caused) <= 3, (number, expected)  # whole nanoseconds of each gap's share
        assert one.followed_ns == followed
        assert one.idle_ns <= one.host_ns
    assert sum(one.followed_ns for one in found.places) <= found.idle_ns
    assert sum(one.idle_ns for one in found.places) == sum(caused for caused, _ in expected.values())


Called = tuple[int, str, int, int]


def _divided(calls: list[Called], kernels: list[tuple[int, int] | None]) -> dict[int, tuple[Fraction, int]]:
    """By the number of each call, from 1: the idle time that it causes, and that which follows it."""
    running = {t for kernel in kernels if kernel for t in range(*kernel)}
    lasting = {kernel[0]: n for n, kernel in enumerate(kernels) if kernel and kernel[1] > kernel[0]}
    first, last = min(min(k[0] for k in kernels if k), *(c[2] for c in calls)), max([*running, 0])
    traced = min(k[0] for k in kernels if k)
    found: dict[int, tuple[Fraction, int]] = {}
    for begin in lasting:
        gap: list[int] = []
        while begin - 1 - len(gap) >= first and begin - 1 - len(gap) not in running:
            gap.append(begin - 1 - len(gap))
        thread, _, launch, returned = calls[lasting[begin]]
        if not gap or begin > last or min(returned, begin) <= min(gap):
            continue
        launches = [c[2] for c, k in zip(calls, kernels) if k and c[0] == thread and c[2] < launch]
        previous = max(launches, default=-1)
        between = [n for n, c in enumerate(calls) if c[0] == thread and c[1] != "launch" and previous <= c[2] <= launch]
        followers = {
            t: max((n for n in between if calls[n][2] <= t), key=lambda n: calls[n][2], default=-1) for t in gap
        }
        delays = {n: _delay(calls[n], kernels[n], n == lasting[begin], running, first) for n in between}
        total = sum(delays.values())
        sooner = range(begin - min(total, sum(n >= 0 for n in followers.values())), begin)
        for n in between:
            caused = Fraction(sum(t >= traced for t in sooner) * delays[n], total) if total else Fraction()
            before = found.get(n + 1, (Fraction(), 0))
            found[n + 1] = (before[0] + caused, before[1] + sum(t >= traced for t in gap if followers[t] == n))
    return found


def _delay(of: Called, kernel: tuple[int, int] | None, is_own: bool, running: set[int], first: int) -> int:
    """How long a call holds up the launch that ends a gap."""
    _, _, start, end = of
    idle = sum(t not in running for t in range(max(start, first), min(kernel[0], end))) if kernel else 0
    return idle if is_own else end - start - idle
