"""CUDA graphs on the fake device: what a capture keeps, what a replay records, which memory they hold."""

import pytest

from tests.fakecuda.fresh import Seen, see

pytestmark = pytest.mark.processes

UNSUPPORTED = (
    "AcceleratorError: CUDA error: operation failed due to a previous error during capture <- "
    "AcceleratorError: CUDA error: operation not permitted when stream is capturing"
)
PAGEABLE = (
    "RuntimeError: Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
    "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
)


@pytest.fixture(scope="module")
def seen() -> Seen:
    return see("tests.fakecuda.graph_checks", mode="dry", ranks=2, alone=True)


def test_each_replay_is_what_was_captured(seen: Seen) -> None:
    found = seen("replays")
    assert [name for name, *_ in found["eager"]] == ["aten::mm", "aten::relu", "aten::sum"]
    assert found["while captured"] == []
    assert found["replayed"] == 3 * found["eager"]


def test_a_replayed_kernel_touches_its_workspace(seen: Seen) -> None:
    assert 32 << 20 in seen("workspaces")["touched"]


def test_branches_of_a_graph_keep_their_order(seen: Seen) -> None:
    found = seen("branches")
    assert found["lines"] == [
        "launch cudaGraphLaunch s0", "record e1 s0", "wait e1 s1", "launch aten::mul s1", "launch aten::add s0",
        "record e2 s1", "wait e2 s0", "launch aten::add s0", "launch aten::mul s0",
    ]  # fmt: skip
    assert found["races"] == []
    assert found["with side"] > 0  # the side stream itself takes no part in replays
    assert found["unjoined"] == "AcceleratorError: CUDA error: capturing stream has unjoined work"


def test_what_is_not_permitted_in_a_capture_raises_torchs_error(seen: Seen) -> None:
    found = seen("not_permitted")
    event = "operation not permitted on an event last recorded in a capturing stream"
    isolation = "dependency created on uncaptured work in another stream"
    assert found == {
        **dict.fromkeys(("item", "synchronise", "stream", "query", "equal"), UNSUPPORTED),
        **dict.fromkeys(("pageable", "pageable, not blocking"), PAGEABLE),
        "event": UNSUPPORTED.replace("operation not permitted when stream is capturing", event),
        "work from before": UNSUPPORTED.replace("operation not permitted when stream is capturing", isolation),
        "other stream": "", "pinned": "",
        "default stream": "RuntimeError: CUDA graphs must be captured on a non-default stream. (However, after "
        "capture, it's ok to replay them on the default stream.)",
        "replayed too early": "RuntimeError: Called CUDAGraph::replay without a preceding successful capture.",
        "captured twice": "RuntimeError: This CUDAGraph instance already owns a captured graph. To capture a new "
        "graph, create a new instance.",
    }  # fmt: skip


def test_graphs_hold_their_pools(seen: Seen) -> None:
    assert seen("pools") == {
        "segments": 2, "reserved": [24, 0, 12], "of the pool": 24, "released": [0, -24, 0], "kept": [], "gone": 0,
    }  # fmt: skip


def test_a_mem_pool_is_a_private_pool(seen: Seen) -> None:
    assert seen("mem_pool") == {"taken": [26], "sizes": [12], "users": 1, "released": [-12], "outside": 14}


def test_values_that_a_replay_writes_are_unknown(seen: Seen) -> None:
    assert seen("values") == {"before": [True, False, False], "after": [True, True, False]}


def test_a_replay_that_draws_random_numbers_sets_the_generator_s_state(seen: Seen) -> None:
    found = seen("random_numbers")
    assert found["with"][:2] == ["aten::fill_"] * 2
    assert len(found["with"]) > 2
    assert found["without"] == ["aten::relu"]


def test_graphed_callables_launch_what_eager_ones_do(seen: Seen) -> None:
    found = seen("graphed_callables")
    assert len(found["eager"]) == 3
    assert found["graphed"] == found["eager"]


def test_collectives_are_captured(seen: Seen) -> None:
    found = seen("collectives")
    assert found["same"]
    assert found["races"] == []
    launched = [line for line in found["lines"] if line.startswith(("launch", "collective"))]
    assert launched == [
        "launch cudaGraphLaunch s0", "collective all_gather s1", "launch aten::mul s0", "launch aten::add s0",
    ]  # fmt: skip
    assert found["unwaited"] == "AcceleratorError: CUDA error: capturing stream has unjoined work"
    assert found["barrier"] == UNSUPPORTED


def test_what_cudagraph_trees_ask_for(seen: Seen) -> None:
    found = seen("trees")
    assert found.pop("touched").startswith("RuntimeError: overwritten by a later run")
    assert found == {
        "live": True, "dead": True, "again": [[3072, 1024], True, True], "same addresses": [True, False],
        "owned": [False, True], "restored": True, "freed": True, "in the thread's pool": True,
    }  # fmt: skip
