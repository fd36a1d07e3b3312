"""Events whose times are far from the others' are left out and counted; pauses that are meant are none."""

from pathlib import Path
from typing import Any

import pytest

from refshard.analysis.analyse import analyse
from tests.analysis.handmade import event, step, write

HOUR_US, DAY_US = 3_600_000_000, 86_400_000_000


def kernels(count: int, start: float = 0) -> list[dict[str, Any]]:
    return [
        event("gemm", start + 10 * i, 5, cat="kernel", tid=7, correlation=i + 1, stream=7, device=0)
        for i in range(count)
    ]


@pytest.mark.parametrize(("count", "far"), [
    (200, [event("gemm", 2 * HOUR_US, 5, cat="kernel", stream=7)]),
    (200, [event("gemm", -1_790_857_026_000_000, 5, cat="kernel", stream=7)]),
    (200, [event("aten::mm", 3, 2 * HOUR_US)]),
    (4, [event("gemm", 2 * DAY_US, 5, cat="kernel", stream=7), event("aten::mm", -2 * DAY_US, 1)]),
])  # fmt: skip
def test_events_far_from_the_others_are_left_out(tmp_path: Path, count: int, far: list[dict[str, Any]]) -> None:
    figures = analyse(write(tmp_path / "t.json", [*far[:1], *kernels(count), *far[1:]])).figures
    assert figures.whole.span_ns == 1000 * (10 * (count - 1) + 5)
    (warning,) = [one for one in figures.warnings if one.code == "far_events"]
    assert warning.count == len(far)
    assert f"{len(far)} event" in warning.message


@pytest.mark.parametrize("events", [
    [*kernels(50), *kernels(50, 2 * HOUR_US)], [*kernels(1), *kernels(1, 2 * DAY_US)],
    [*kernels(4), *kernels(1, 2 * HOUR_US)],
    [step(0, 0, HOUR_US * 50), *kernels(200), *kernels(200, HOUR_US / 2), *kernels(1, HOUR_US * 49)],
])  # fmt: skip
def test_pauses_stay(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    assert "far_events" not in {one.code for one in analyse(write(tmp_path / "t.json", events)).figures.warnings}


def test_arguments_stay_with_their_events(tmp_path: Path) -> None:
    nccl = event("ncclDevKernel_AllReduce", 5, 5, cat="kernel", tid=9, collective="allreduce", stream=9, device=0,
                 In_msg_nelems=8, Out_msg_nelems=8, dtype="Float")  # fmt: skip
    early = event("ncclDevKernel_AllGather", -9 * DAY_US, 5, cat="kernel", tid=9, collective="allgather", stream=9)
    figures = analyse(write(tmp_path / "t.json", [early, *kernels(3), nccl])).figures
    assert [(one.op, one.bytes) for one in figures.collectives] == [("all_reduce", 32)]
