"""The dependency graph of a trace: what each kind of dependency does to a step, on traces made for it."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis import figures as whatif
from refshard.analysis.analyse import analyse
from refshard.analysis.graph import FULL_QUEUE, Graph, graph_of
from refshard.analysis.kineto import timeline_of
from refshard.events.reader import read_events
from tests.analysis.handmade import event, write

US = 1_000
MAIN, BACKWARD = 1, 2


def call(name: str, start: float, us: float, number: int = -1, *, thread: int = MAIN) -> dict[str, Any]:
    return event(name, start, us, cat="cuda_runtime", tid=thread, correlation=number)


def kernel(name: str, start: float, us: float, number: int, stream: int = 7, cat: str = "kernel") -> dict[str, Any]:
    return event(name, start, us, cat=cat, tid=stream, device=0, stream=stream, correlation=number)


def graph(path: Path, made: list[dict[str, Any]]) -> Graph:
    trace = read_events(write(path / "trace.json", made))
    found = graph_of(trace, timeline_of(trace))
    assert found is not None
    return found


def steps(path: Path, made: list[dict[str, Any]]) -> dict[str, int]:
    figures = analyse(write(path / "trace.json", made)).figures.what_if
    assert figures is not None
    assert figures.replay_error == 0
    return {one.what: one.step_ns // US for one in figures.what_ifs}


def test_a_copy_to_pageable_memory_blocks_its_call(tmp_path: Path) -> None:
    """The host computes 200 us on what it copied, and launches; a kernel of 400 us before the copy delays all that."""
    made = [
        call("cudaLaunchKernel", 0, 5, 1), kernel("gemm", 10, 400, 1),
        call("cudaMemcpyAsync", 5, 420, 2), kernel("Memcpy DtoH (Device -> Pageable)", 411, 10, 2, cat="gpu_memcpy"),
        call("cudaLaunchKernel", 625, 5, 3), kernel("small", 635, 50, 3),
    ]  # fmt: skip
    # Without waiting, the host launches the last kernel 200 us after a call of 5 us, while the first still runs.
    assert steps(tmp_path, made) == {
        whatif.KERNEL: 675 - 200,
        whatif.LAUNCHES: 400 + 1 + 10 + 4 + 50,  # the copy's call returns 4 us after the copy
        whatif.NO_SYNC: 400 + 1 + 10 + 1 + 50,
        whatif.FAST_HOST: 675 - (200 + 10) // 2,  # also the launch's latency
    }


def test_backward_begins_when_the_main_thread_hands_over(tmp_path: Path) -> None:
    """Main waits for the device, autograd's thread launches after it, and main goes on after that."""
    made = [
        call("cudaLaunchKernel", 0, 5, 1), kernel("gemm", 10, 400, 1), call("cudaDeviceSynchronize", 10, 403),
        call("cudaLaunchKernel", 450, 5, 2, thread=BACKWARD), kernel("backward", 460, 20, 2),
        call("cudaLaunchKernel", 500, 5, 3), kernel("adam", 510, 30, 3),
    ]  # fmt: skip
    found = graph(tmp_path, made)
    assert found.calls.parents.tolist() == [-1, 0, 1, 2]
    assert found.calls.segments.tolist() == [-1, -1, 1, 1]
    # A gemm of 200 us lets both threads go on 200 us earlier.
    assert steps(tmp_path, made)[whatif.KERNEL] == 530 - 200


def test_a_thread_with_operators_of_its_own_was_not_handed_over(tmp_path: Path) -> None:
    """A loader's thread makes a call while main computes: main's next launch does not depend on it."""
    made = [
        call("cudaLaunchKernel", 0, 5, 1), kernel("gemm", 10, 100, 1), event("aten::add", 20, 300, tid=MAIN),
        event("aten::add", 30, 5, tid=MAIN), call("cudaMemcpyAsync", 29, 8, 2, thread=BACKWARD),
        kernel("Memcpy HtoD (Pinned -> Device)", 40, 5, 2, 20, "gpu_memcpy"), call("cudaLaunchKernel", 400, 5, 3),
        kernel("adam", 410, 30, 3),
    ]  # fmt: skip
    assert graph(tmp_path, made).calls.parents.tolist() == [-1, 0, 0]


def test_a_launch_into_a_full_queue_waits_for_the_device(tmp_path: Path) -> None:
    """The host runs ahead until the queue is full; then each launch lasts until a kernel has left it."""
    made, starts, host = list[dict[str, Any]](), list[int](), 0
    for number in range(FULL_QUEUE + 300):
        begin, room = host, starts[number - FULL_QUEUE - 10] if number >= FULL_QUEUE + 10 else 0
        host = max(begin + 2, room)
        starts.append(max(begin + 5, starts[-1] + 30 if starts else 0))
        made.append(call("cudaLaunchKernel", begin, host - begin, number + 1))
        made.append(kernel("gemm", starts[-1], 30, number + 1))
    found = graph(tmp_path, made)
    assert found.calls.blocks.sum() == found.full_queue.sum() > 200
    changed = steps(tmp_path, made)
    assert changed[whatif.KERNEL] == 15 * len(starts)
    # A place in the queue is no synchronisation that anyone could do without.
    assert whatif.NO_SYNC not in changed


def test_what_a_call_by_name_waits_for_without_a_record(tmp_path: Path) -> None:
    """A stream's synchronisation waits for the stream of which the work ended during it."""
    made = [
        call("cudaLaunchKernel", 0, 5, 1), kernel("side", 10, 300, 1, 20), call("cudaLaunchKernel", 10, 5, 2),
        kernel("main", 20, 30, 2), call("cudaStreamSynchronize", 20, 293), call("cudaLaunchKernel", 320, 5, 3),
        kernel("last", 330, 10, 3),
    ]  # fmt: skip
    assert steps(tmp_path, made)[whatif.KERNEL] == 330 - 150
    made[0] = call("hipLaunchKernel", 0, 5, 1)
    made[4] = call("hipStreamSynchronize", 20, 293)
    assert steps(tmp_path, made)[whatif.KERNEL] == 330 - 150


def freeing(after: int, *others: dict[str, Any]) -> list[dict[str, Any]]:
    """A kernel of 400 us that ends at 410; the host frees memory ``after`` that, and launches 50 us later."""
    return [
        call("cudaLaunchKernel", 0, 5, 1), kernel("gemm", 10, 400, 1), *others, call("cudaFree", 410 + after, 20),
        call("cudaLaunchKernel", 480 + after, 5, 2), kernel("small", 490 + after, 30, 2),
    ]  # fmt: skip


def test_memory_that_is_freed_as_work_ends_was_waited_for(tmp_path: Path) -> None:
    """The allocator waited for an event, which is not recorded: a gemm half as long lets the host go on."""
    assert steps(tmp_path, freeing(20))[whatif.KERNEL] == 530 - 200
    assert steps(tmp_path, freeing(20, call("cudaMalloc", 10, 30)))[whatif.KERNEL] == 530 - 200


def test_memory_that_is_freed_later_or_after_a_call_was_not(tmp_path: Path) -> None:
    """The host computed until then, however long the gemm takes."""
    assert steps(tmp_path, freeing(300))[whatif.KERNEL] == 810
    assert steps(tmp_path, freeing(20, call("cudaEventQuery", 400, 12)))[whatif.KERNEL] == 530


def test_one_late_start_does_not_make_lateness_usual(tmp_path: Path) -> None:
    """Kernels start 5 us after their launch; one starts after 75, of which ten times the usual may be the launch."""
    made, late = list[dict[str, Any]](), 6
    for number in range(10):
        begin = 200 * number
        made.append(call("cudaLaunchKernel", begin, 5, number + 1))
        made.append(kernel("gemm", begin + (80 if number == late else 10), 100, number + 1))
    found = graph(tmp_path, made)
    assert found.holds[found.rows == late].tolist() == [25 * US]
    assert found.holds.sum() == 25 * US
    assert found.only_launches
    made.append(call("cudaStreamSynchronize", 500, 1))
    assert not graph(tmp_path, made).only_launches


def test_a_kernel_that_begins_before_its_launch_follows_no_call(tmp_path: Path) -> None:
    """The clocks of host and device disagree: the second kernel starts while the host still waits for the first."""
    made = [
        call("cudaLaunchKernel", 0, 5, 1), kernel("gemm", 10, 100, 1), call("cudaDeviceSynchronize", 10, 110),
        call("cudaLaunchKernel", 130, 5, 2), kernel("other", 105, 50, 2, 20),
    ]  # fmt: skip
    assert steps(tmp_path, made) == dict.fromkeys(
        (whatif.LAUNCHES, whatif.FAST_HOST, whatif.NO_SYNC, whatif.KERNEL), 145
    )


NAMES = ("cudaLaunchKernel", "cudaMemcpyAsync", "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaStreamWaitEvent")


@pytest.mark.slow
@given(st.lists(st.tuples(*(st.integers(0, 300) for _ in range(6))), min_size=1, max_size=25))
def test_times_that_contradict_each_other_do_no_harm(rows: list[tuple[int, ...]]) -> None:
    """Any calls and kernels at any times: nothing becomes slower, and the critical path is as long as the step."""
    made = []
    for number, (begin, length, start, ns, which, where) in enumerate(rows, 1):
        made.append(call(NAMES[which % len(NAMES)], begin, length % 60, number, thread=1 + where % 2))
        made.append(kernel("nccl" if which % 3 else "gemm", start, ns % 50, number, 7 + where % 3))
    made.append(kernel("gemm", 0, 1, 0))
    with TemporaryDirectory() as folder:
        figures = analyse(write(Path(folder) / "trace.json", made)).figures.what_if
    assert figures is not None
    assert all(one.gain_ns >= 0 for one in figures.what_ifs)
    assert sum(part.ns for part in figures.path.parts) == figures.step_ns
