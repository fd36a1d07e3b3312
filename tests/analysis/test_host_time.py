"""The host's time by its innermost event: traces made by hand, whose every part adds up on paper."""

from pathlib import Path
from typing import Any

from refshard.analysis import figures as whatif
from refshard.analysis.analyse import analyse
from refshard.analysis.figures import HostTime
from tests.analysis.handmade import event, note, step, write
from tests.analysis.inference import kernel

US = 1000


def found(path: Path, made: list[dict[str, Any]]) -> HostTime:
    figures = analyse(write(path / "t.json", made)).figures.host_time
    assert figures is not None
    return figures


def spent(time: HostTime) -> dict[str, int]:
    return {part.kind: part.ns // US for part in time.parts}


MADE = [
    step(0, 0, 100),
    note("FSDP::pre_forward (layers.3)", 5, 20),
    event("PythonDispatchMode", 10, 12), event("aten::mm", 12, 6), *kernel(1, 14, 30, 60),
    event("aten::add", 30, 10), *kernel(2, 32, 62, 64),
    event("cudaDeviceSynchronize", 70, 20, cat="cuda_runtime", correlation=9),
]  # fmt: skip


def test_every_nanosecond_of_a_step_has_one_owner(tmp_path: Path) -> None:
    time = found(tmp_path, MADE)
    assert (time.steps, time.span_ns, time.launches) == (1, 100 * US, 2)
    assert spent(time) == {
        "python": 5 + 5 + 30 + 10, "waits": 20, "operators": 5 + 9, "annotations": 8, "modes": 6, "launches": 2,
    }  # fmt: skip
    assert sum(part.ns for part in time.parts) == time.span_ns
    (notes,) = [part for part in time.parts if part.kind == "annotations"]
    assert (notes.count, notes.most) == (1, (("FSDP::pre_forward", 8 * US),))  # the same for all units


def test_a_thread_that_waits_for_autograds_does_not_count(tmp_path: Path) -> None:
    """Main stands in an annotation around backward() from 50 to 90, autograd's thread evaluates from 55 to 85."""
    name = "autograd::engine::evaluate_function: MmBackward0"
    made = [
        step(0, 0, 100), event("aten::mm", 0, 50), *kernel(1, 10, 20, 40), note("backward", 50, 40),
        event(name, 55, 30, tid=2), event("cudaLaunchKernel", 60, 1, cat="cuda_runtime", correlation=2, tid=2),
        event("gemm", 70, 5, cat="kernel", tid=7, correlation=2, device=0, stream=7),
    ]  # fmt: skip
    assert spent(found(tmp_path, made)) == {
        "operators": 49, "autograd": 29, "annotations": 10, "python": 10, "launches": 2,
    }  # fmt: skip


def test_python_outside_of_operators_is_the_users_functions(tmp_path: Path) -> None:
    frames = [
        event("train.py(1): main", 0, 100, cat="python_function"),
        event("model.py(7): forward", 2, 30, cat="python_function"),
    ]
    time = found(tmp_path, [*MADE, *frames])
    (python,) = [part for part in time.parts if part.kind == "python"]
    assert dict(python.most) == {"train.py(1): main": 40 * US, "model.py(7): forward": 10 * US}


def test_a_trace_of_launches_alone_tells_nothing(tmp_path: Path) -> None:
    assert analyse(write(tmp_path / "t.json", [step(0, 0, 9), *kernel(1, 1, 2, 5)])).figures.host_time is None


def test_no_dispatch_modes_gain_their_own_time(tmp_path: Path) -> None:
    """Seven queued kernels show what a gap costs; each of ten more waits for 8 us of a mode and 4 of mm."""
    made = [step(0, 0, 200), *(one for n in range(7) for one in kernel(n + 1, n, 3 + 6 * n, 8 + 6 * n))]
    for n in range(10):
        at = 50 + 12.0 * n
        made += [
            event("PythonDispatchMode", at, 12), event("aten::mm", at + 4, 4), *kernel(n + 8, at + 5, at + 7, at + 8)
        ]  # fmt: skip
    replay = analyse(write(tmp_path / "t.json", made)).figures.what_if
    assert replay is not None
    gains = {one.what: one.gain_ns // US for one in replay.what_ifs}
    assert replay.step_ns == (50 + 9 * 12 + 8) * US
    assert gains[whatif.NO_MODES] == 9 * 8 + 4


def test_the_gpu_waits_for_data(tmp_path: Path) -> None:
    """The loader runs from 0 to 40 on a thread of its own; from 2 to 10 the GPU works, and from 35 again."""
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    made = [
        step(0, 0, 100), event(name, 0, 40, cat="user_annotation", tid=9),
        event("aten::mm", 0, 5), *kernel(1, 0, 2, 10), event("aten::mm", 30, 5), *kernel(2, 31, 35, 60),
    ]  # fmt: skip
    assert found(tmp_path, made).input_ns == 27 * US
    assert found(tmp_path, MADE).input_ns == 0
