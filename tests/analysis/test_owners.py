"""Which operator a kernel belongs to: by hand, and by a walk over all operators."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.kineto import timeline_of
from refshard.analysis.labels import Nesting, innermost_on, nested_order
from refshard.analysis.operators import launched_work
from refshard.events.reader import read_events
from refshard.events.timeline import UNKNOWN
from tests.analysis.handmade import event, step, write

Pairs = list[tuple[str, str]]
CPP_NODE = "torch::autograd::CppNode<Mine>"
ATTENTION = "aten::_scaled_dot_product_flash_attention"


def kernel(number: int, *, external: int = -1) -> dict[str, Any]:
    ids: dict[str, Any] = {} if external < 0 else {"External id": external}
    return event(
        f"k{number}", 500 + number, 0.5, cat="kernel", tid=7, stream=7, device=0, correlation=number, **ids
    )  # fmt: skip


def launch(number: int, at: float, name: str = "cudaLaunchKernel", tid: int = 1) -> dict[str, Any]:
    return event(name, at, 0.25, cat="cuda_runtime", tid=tid, correlation=number)


def owners(folder: Path, events: list[dict[str, Any]]) -> Pairs:
    """Kernels by name, each with its operator; operators' figures and the spans must say the same."""
    trace = read_events(write(folder / "t.json", [step(0, 0, 400), *events]))
    timeline = timeline_of(trace)
    work, spans = launched_work(trace, timeline), timeline.spans
    assert work.names.tolist() == spans.operators.tolist()
    assert [code if row == UNKNOWN else trace.host.names[row] for code, row in zip(spans.names, spans.calls)] == (
        spans.operators.tolist()
    )
    return [(spans.name_table[name], spans.name_table[op]) for name, op in zip(spans.names, spans.operators)]


def inside(folder: Path, *names: str, call: str = "cudaLaunchKernel") -> str:
    """The operator of a kernel launched within operators of these names, the outermost first."""
    around = [event(name, n, 40 - 2 * n) for n, name in enumerate(names)]
    return owners(folder, [*around, launch(1, 10, call), kernel(1)])[0][1]


@pytest.mark.parametrize(("names", "expected"), [
    (("aten::linear", "aten::addmm"), "aten::addmm"),
    (("aten::conv2d", "aten::convolution", "aten::_convolution", "aten::cudnn_convolution"), "aten::convolution"),
    (("aten::convolution", "aten::add_"), "aten::convolution"),
    ((ATTENTION, "aten::_flash_attention_forward", "aten::fill_"), ATTENTION),
    (("c10d::allreduce_", "record_param_comms"), "c10d::allreduce_"),
    (("record_param_comms",), "k1"),
    (("autograd::engine::evaluate_function: MmBackward0", "MmBackward0", "aten::mm"), "aten::mm"),
    (("autograd::engine::evaluate_function: MineBackward", "MineBackward"), "MineBackward"),
    (("autograd::engine::evaluate_function: x", CPP_NODE), CPP_NODE),
    (("autograd::engine::evaluate_function: x", "torch::autograd::AccumulateGrad"), "k1"),
    (("Torch-Compiled Region: 0/0", "CompiledFunction"), "k1"),
    (("Torch-Compiled Region: 0/0", "triton_poi_fused_add_0"), "triton_poi_fused_add_0"),
    (("ProfilerStep#3", "Optimizer.step#SGD.step", "aten::add_"), "aten::add_"),
    (("ProfilerStep#3", "Optimizer.step#SGD.step"), "k1"),
    (("## forward ##",), "k1"),
    ((), "k1"),
])  # fmt: skip
def test_the_innermost_that_is_more_than_a_name_for_others(
    tmp_path: Path, names: tuple[str, ...], expected: str
) -> None:
    assert inside(tmp_path, *names) == expected


@pytest.mark.parametrize("call", ["cudaGraphLaunch", "hipGraphLaunch", "cuGraphLaunch"])
def test_kernels_of_a_graph_go_by_their_own_names(tmp_path: Path, call: str) -> None:
    assert inside(tmp_path, "aten::mm", call=call) == "k1"


def test_ids_of_another_numbering_tell_nothing(tmp_path: Path) -> None:
    """Those of 2022: an id may be that of an operator that was over, or on another thread, or around the right one."""
    events = [
        event("aten::early", 0, 5, External_id=1), event("aten::outer", 10, 20, External_id=2),
        event("aten::inner", 12, 10, External_id=3), event("aten::elsewhere", 8, 30, tid=2, External_id=4),
        *(launch(n, 13 + n) for n in range(1, 5)), *(kernel(n, external=n) for n in range(1, 5)),
    ]  # fmt: skip
    assert owners(tmp_path, events) == [(f"k{n}", "aten::inner") for n in range(1, 5)]


def test_without_its_call_a_kernel_belongs_to_the_operator_with_its_id(tmp_path: Path) -> None:
    events = [
        event("aten::convolution", 10, 20, External_id=2), event("aten::cudnn_convolution", 10, 20, External_id=3),
        event("aten::mm", 40, 20, External_id=4), event("aten::first", 40, 5, External_id=5),
        *(kernel(n, external=n) for n in (3, 4, 9)),
    ]  # fmt: skip
    assert owners(tmp_path, events) == [("k3", "aten::convolution"), ("k4", "aten::mm"), ("k9", "k9")]


NAMES = ("aten::mm", "aten::convolution", "aten::_convolution", "record_param_comms", "CompiledFunction")


@st.composite
def nested(draw: st.DrawFn, first: int = 0, last: int = 60, depth: int = 4) -> list[tuple[str, int, int]]:
    if depth == 0 or last - first < 3:
        return []
    cuts = sorted(draw(st.sets(st.integers(first + 1, last - 1), max_size=6)))
    found = []
    for start, end in zip(cuts[::2], cuts[1::2]):
        found += [(draw(st.sampled_from(NAMES)), start, end), *draw(nested(start, end, depth - 1))]
    return found


def walked(operators: list[tuple[str, int, int, int]], at: float, tid: int) -> str | None:
    """The rule of the documentation: what holds, from the outermost in, one at a time."""
    held = sorted((one for one in operators if one[3] == tid and one[1] <= at < one[2]), key=lambda one: one[1])
    whole = [name for name, *_ in held if name == "aten::convolution"]
    mine = [name for name, *_ in held if name not in ("record_param_comms", "CompiledFunction")]
    found = whole or mine
    return found[-1] if found else None


@given(nested(), nested(), st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 2])), min_size=1, max_size=12))
def test_owners_are_those_of_a_walk(
    tmp_path_factory: pytest.TempPathFactory, one: list[Any], other: list[Any], launches: list[tuple[int, int]]
) -> None:
    operators = [(*span, tid) for tid, spans in ((1, one), (2, other)) for span in spans]
    events = [event(name, start, end - start, tid=tid) for name, start, end, tid in operators]
    for n, (at, tid) in enumerate(launches):
        events += [launch(n + 1, at + 0.5, tid=tid), kernel(n + 1)]
    found = owners(tmp_path_factory.mktemp("t"), events)
    expected = [walked(operators, at + 0.5, tid) or f"k{n + 1}" for n, (at, tid) in enumerate(launches)]
    assert [operator for _, operator in found] == expected


@st.composite
def nestings(draw: st.DrawFn, first: int = 0, last: int = 40, depth: int = 4) -> list[tuple[int, int]]:
    """Intervals of which any two are disjoint or one encloses the other, some of length 0, some equal."""
    if depth == 0 or last <= first:
        return []
    cuts = sorted(draw(st.lists(st.integers(first, last), max_size=6)))
    found = []
    for start, end in zip(cuts[::2], cuts[1::2]):
        found += [(start, end), *draw(nestings(start, end, depth - 1))]
    return found


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([a for a, _ in pairs], np.int64), np.array([b for _, b in pairs], np.int64)


@given(nestings())
def test_innermost_is_the_shortest_that_holds(pairs: list[tuple[int, int]]) -> None:
    starts, ends = columns(pairs)
    points = np.arange(-1, 42)
    found = innermost_on(np.zeros(len(pairs), np.int32), starts, ends, np.zeros(43, np.int32), points)
    for point, place in zip(points.tolist(), found.tolist()):
        lengths = [end - start for start, end in pairs if start <= point < end]
        if not lengths:
            assert place == UNKNOWN
        else:
            start, end = pairs[place]
            assert start <= point < end
            assert end - start == min(lengths)


@given(nestings())
def test_own_times_add_up_to_the_union(pairs: list[tuple[int, int]]) -> None:
    starts, ends = columns([(start, end) for start, end in pairs if end > start])
    order = nested_order(starts, ends)
    own = Nesting.of(starts[order], ends[order]).own()
    assert own.sum() == len({point for start, end in pairs for point in range(start, end)})


def test_threads_are_apart() -> None:
    threads = np.array([1, 2], np.int32)
    starts, ends = np.array([0, 5]), np.array([20, 8])
    found = innermost_on(threads, starts, ends, np.array([1, 2, 2, 3], np.int32), np.array([6, 6, 9, 6]))
    assert found.tolist() == [0, 1, UNKNOWN, UNKNOWN]
