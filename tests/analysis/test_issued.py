"""Collectives: what is announced finds what ran for it, with its true size and duration, or nothing."""

from pathlib import Path
from typing import Any

import pytest

from refshard.analysis.analyse import Analysis, analyse
from refshard.analysis.figures import CollectiveFigures
from refshard.analysis.kineto import OF_SHARDS, OPERATORS, bytes_of_message, group_of, operation_of
from tests.analysis.handmade import event, note, shaped, step, write

Events = list[dict[str, Any]]


def nccl(number: int, launch: float, start: float, duration: float, *, thread: int = 1, **args: Any) -> Events:
    """A kernel that communicates, and its launch."""
    kernel: dict[str, Any] = {"stream": 20, "correlation": number, **args}
    return [
        event("cudaLaunchKernel", launch, 0.5, cat="cuda_runtime", tid=thread, correlation=number),
        event(f"ncclDevKernel_{number}", start, duration, cat="kernel", tid=20, **kernel),
    ]


def op(name: str, start: float, duration: float, dims: list[Any], types: list[str], *, thread: int = 1) -> Events:
    return [event(f"c10d::{name}", start, duration, tid=thread, **shaped(dims, types))]


def found(path: Path, *groups: Events) -> Analysis:
    return analyse(write(path / "t.json", [step(0, 0, 500), *(one for group in groups for one in group)]))


def only(path: Path, *groups: Events) -> CollectiveFigures:
    (one,) = found(path, *groups).figures.collectives
    return one


@pytest.mark.parametrize(("dtype", "size"), [("BFloat16", 2000), ("Float", 4000), ("Double", 8000), ("Strange", None)])
def test_a_list_of_tensors_has_the_size_that_its_kernel_tells(tmp_path: Path, dtype: str, size: int | None) -> None:
    announced = op("allreduce_", 5, 5, [[[1000]], []], ["TensorList", ""])
    message: dict[str, Any] = {"In_msg_nelems": 1000, "Out_msg_nelems": 1000, "dtype": dtype, "Group_size": 2}
    one = only(tmp_path, announced, nccl(1, 6, 20, 10, collective="allreduce", **message))
    assert (one.op, one.bytes, one.group_size) == ("all_reduce", size, 2)
    assert one.bus_bandwidth == (None if size is None else pytest.approx(size / 10e-6))


@pytest.mark.parametrize(
    ("dtype", "element"), [("c10::BFloat16", 2), ("c10::Float8_e4m3fn", 1), ("long int", 8), ("c10::complex<float>", 8)]
)
def test_elements_have_the_size_of_their_type(tmp_path: Path, dtype: str, element: int) -> None:
    announced = op("_allgather_base_", 5, 5, [[1000], [500]], [dtype, dtype])
    assert only(tmp_path, announced, nccl(1, 6, 20, 10)).bytes == 1000 * element


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_goes_by_its_operation_and_its_unsharded_tensor(tmp_path: Path, name: str) -> None:
    operation, argument = OPERATORS[name]
    own = [[250]] if name in OF_SHARDS else [[300], [200]]
    dims = [own, [[100]]] if argument == 0 else [[[100]], own]
    one = only(tmp_path, op(name, 5, 5, dims, ["TensorList", "TensorList"]), nccl(1, 6, 20, 10, dtype="Float",
               collective="x", Group_size=2))  # fmt: skip
    assert (one.op, one.bytes) == (operation, 2000)
    assert operation in {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
                         "scatter", "send", "recv"}  # fmt: skip


@pytest.mark.parametrize(("gets", "sends"), [(1000, 600), (600, 1000), (0, 1000)])
def test_an_all_to_all_of_uneven_parts_has_its_larger_side(tmp_path: Path, gets: int, sends: int) -> None:
    announced = op("alltoall_base_", 5, 5, [[gets], [sends]], ["float", "float"])
    assert only(tmp_path, announced, nccl(1, 6, 20, 10)).bytes == 4000


def test_threads_that_announce_at_once_are_kept_apart(tmp_path: Path) -> None:
    gather = op("_allgather_base_", 5, 30, [[1000], [500]], ["float", "float"])
    reduce = op("_reduce_scatter_base_", 6, 30, [[500], [1000]], ["float", "float"], thread=2)
    figures = found(
        tmp_path, gather, reduce, nccl(1, 10, 50, 10), nccl(2, 11, 70, 20, thread=2, stream=22)
    ).figures.collectives
    assert [(one.op, one.duration_ns) for one in figures] == [("all_gather", 10_000), ("reduce_scatter", 20_000)]


def test_pauses_between_a_collectives_kernels_are_not_its_own(tmp_path: Path) -> None:
    announced = op("_allgather_base_", 5, 5, [[1000], [500]], ["float", "float"])
    gemm = event("gemm", 30, 60, cat="kernel", stream=7)
    one = only(tmp_path, announced, nccl(1, 6, 20, 10), nccl(2, 7, 100, 10), [gemm])
    assert (one.duration_ns, one.exposed_ns, one.exposed_any_ns) == (20_000, 20_000, 20_000)
    assert one.algorithm_bandwidth == pytest.approx(4000 / 20e-6)


def test_coalesced_operators_are_one_collective(tmp_path: Path) -> None:
    """Within a coalescing manager the kernel is launched once, after the operators."""
    dims, types = [[1000], [500]], ["float", "float"]
    first, second = op("_allgather_base_", 5, 1, dims, types), op("_allgather_base_", 7, 1, dims, types)
    analysis = found(tmp_path, first, second, nccl(1, 10, 20, 10, collective="allgather_into_tensor_coalesced"))
    (one,) = analysis.figures.collectives
    assert (one.op, one.bytes, one.queued_ns) == ("all_gather", 8000, 15_000)
    assert "collectives_without_execution" not in {warning.code for warning in analysis.figures.warnings}


def test_a_kernel_that_no_operator_announced_tells_what_it_is(tmp_path: Path) -> None:
    message: dict[str, Any] = {"In_msg_nelems": 500, "Out_msg_nelems": 1000, "dtype": "Half", "Process_Group_Name": "2",
               "Process_Group_Ranks": "[0, 1, 2, 3]"}  # fmt: skip
    one = only(tmp_path, nccl(1, 6, 20, 10, collective="_allgather_base", **message))
    assert (one.op, one.bytes, one.group, one.group_size) == ("all_gather", 2000, "2 [0-3]", 4)


def test_an_annotation_around_the_launch_tells_of_older_kernels(tmp_path: Path) -> None:
    label = note("nccl:all_reduce", 5, 5, **shaped([[1000]], ["float"]))
    one = only(tmp_path, [label], nccl(1, 6, 20, 10))
    assert (one.op, one.bytes, one.group) == ("all_reduce", 4000, None)


def test_an_emulated_collective_has_the_type_of_its_annotation(tmp_path: Path) -> None:
    """As DDP's all-reduces on a GPU: the list hides the type, and the kernels are none of NCCL's."""
    announced = op("allreduce_", 5, 10, [[[1000]]], ["TensorList"])
    label = note("emulated:all_reduce", 6, 8, **shaped([[1000]], ["c10::BFloat16"]))
    launched = event("cudaLaunchKernel", 7, 0.5, cat="cuda_runtime", correlation=1)
    kernel = event("refshard_emulated_hold", 20, 10, cat="kernel", tid=20, stream=20, correlation=1)
    one = only(tmp_path, announced, [label, launched, kernel])
    assert (one.op, one.bytes, one.duration_ns) == ("all_reduce", 2000, 10_000)


def test_a_collective_without_a_kernel_has_the_annotation_of_its_own_thread(tmp_path: Path) -> None:
    announced = op("allreduce_", 5, 10, [[[1000]], []], ["TensorList", ""])
    others = event("record_param_comms", 6, 1, tid=2, collective="allreduce", dtype="Half")
    own = event("record_param_comms", 7, 1, collective="allreduce", dtype="Float", Group_size=1)
    kernel = event("gemm", 30, 60, cat="kernel", stream=7)
    (one,) = found(tmp_path, announced, [others, own, kernel]).timeline.collectives
    assert (one.bytes, one.dtype, one.group_size, one.start) == (4000, "Float", 1, None)


@pytest.mark.parametrize(
    "odd",
    [{"Input Dims": {"a": 1}}, {"Input Dims": [5], "Input type": ["float"]}, {"Input Dims": [[1.5]]},
     {"Input type": {"a": 1}}, {"In msg nelems": 1e300, "dtype": "Float"}, {"In msg nelems": True, "dtype": "Float"},
     {"In msg nelems": -4, "dtype": "Float"}, {"dtype": ["Float"], "In msg nelems": 4}],
)  # fmt: skip
def test_odd_arguments_tell_no_size(odd: dict[str, Any]) -> None:
    assert bytes_of_message("all_reduce", odd) is None
    assert group_of({"Group size": 0, "Process Group Name": [1], "Process Group Ranks": 5, **odd}, {}).size is not True


def test_names_of_kernels() -> None:
    names = ["ncclDevKernel_SendRecv(x)", "ncclKernel_AllReduce_RING", "reduce_scatter_tensor_coalesced", "what"]
    assert [operation_of(name) for name in names] == ["send_recv", "all_reduce", "reduce_scatter", "what"]
