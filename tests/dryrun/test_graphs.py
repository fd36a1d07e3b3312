"""Replayed CUDA graphs: what they cost the host, which steps count, and how they look in a trace."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refshard.analysis.analyse import analyse
from refshard.dryrun.as_trace import as_trace
from refshard.dryrun.device import Rates
from refshard.dryrun.held_back import NotReproducedError, settle
from refshard.dryrun.price import COSTS, GRAPH_NODE_S, PER_KERNEL_S, Prices, host_seconds, host_work
from refshard.dryrun.races import find_races
from refshard.dryrun.recording import GRAPH_LAUNCH, Category, Flag, Kind, Recording
from refshard.dryrun.replay import NEVER, replay
from refshard.dryrun.steps import settled, steps_of
from refshard.events.table import LAUNCH
from refshard.specs.cluster import load_cluster
from tests.dryrun import scripts
from tests.dryrun.made import Made, prices
from tests.fakecuda.needs import needs_device

US = 1e-6
TAKEN_IN = Flag.CAPTURED | Flag.HOST_ONLY


def replayed_graph(made: Made, nodes: int = 3, stream: int = 0) -> list[int]:
    """The rows of a graph's kernels."""
    made.launch(GRAPH_LAUNCH, stream=stream, flags=Flag.HOST_ONLY, host_calls=5)
    return [made.launch("aten::add", stream=stream, flags=Flag.OF_GRAPH) for _ in range(nodes)]


def priced(recording: Recording, seconds: dict[int, float]) -> Prices:
    return replace(prices(recording, seconds), host_seconds=host_seconds(recording, PER_KERNEL_S))


def test_a_graph_is_one_launch_for_the_host() -> None:
    made = Made()
    replayed_graph(made)
    made.launch("aten::add", flags=TAKEN_IN, host_operators=1)
    expected = [COSTS.graph_s + 5 * COSTS.call_s, *3 * [GRAPH_NODE_S], COSTS.launch_s + COSTS.operator_s]
    assert host_seconds(made.recording(), PER_KERNEL_S).tolist() == pytest.approx(expected)
    assert host_work(made.recording()).sum(axis=1).tolist() == [6, 0, 0, 0, 2]


def test_a_replayed_step_is_as_long_as_its_kernels() -> None:
    """Ten kernels of 1 us: launched one by one they wait for the host, as nodes for each other."""
    ends = {}
    for name in ("eager", "graph"):
        made = Made()
        rows = replayed_graph(made, 10) if name == "graph" else [made.launch() for _ in range(10)]
        recording = made.recording()
        found = replay(recording, priced(recording, dict.fromkeys(rows, US)), Rates())
        ends[name] = int(max(found.ends.max(), found.host_ends.max()))
    assert ends["eager"] == pytest.approx(10 * COSTS.launch_s * 1e9 + 1000, abs=2)
    assert ends["graph"] == pytest.approx((COSTS.graph_s + 5 * COSTS.call_s) * 1e9 + 10_001, abs=2)


def test_steps_that_capture_are_not_those_of_the_figures() -> None:
    def numbers(*captures: bool) -> list[int]:
        made = Made()
        for capture in captures:
            made.launch(flags=TAKEN_IN if capture else 0)
            made.mark()
        recording = made.recording()
        return [step.number for step in settled(recording, steps_of(recording))]

    assert numbers(False, False, False) == [1, 2]
    assert numbers(False, True, False, False) == [2, 3]
    assert numbers(True, False) == numbers(False, True) == [1]
    assert numbers(True) == [0]


def test_each_node_of_a_graph_has_a_call_in_the_trace() -> None:
    made = Made()
    for _ in range(3):
        rows = replayed_graph(made)
        made.launch("aten::mul")
        made.mark()
    recording = made.recording()
    ran = np.flatnonzero(recording.kinds == Kind.LAUNCH).tolist()
    found = replay(recording, priced(recording, dict.fromkeys(ran, 20 * US)), Rates())
    assert found.starts[rows[0] - 1] == NEVER
    trace = as_trace(recording, found, device="")
    calls = trace.host.categories == LAUNCH
    names = [trace.names[code] for code in trace.host.names[calls].tolist()]
    assert names == 3 * [GRAPH_LAUNCH, *3 * ["cudaLaunchKernel"]]
    assert sorted(trace.host.correlations[calls].tolist()) == sorted(trace.device.correlations.tolist())
    lengths = (trace.host.ends - trace.host.starts)[calls]
    assert lengths[0] == pytest.approx((COSTS.graph_s + 5 * COSTS.call_s) * 1e9, abs=3)
    assert analyse(trace).figures.warnings == ()


def test_a_workspace_is_touched_by_replays_and_not_by_the_capture() -> None:
    def races(flags: Flag) -> int:
        made = Made()
        made.allocate(512, Category.WORKSPACE, stream=7, flags=flags, address=4096)
        made.launch(stream=0, accesses=[(4096, 512, True)])
        return len(find_races(made.recording()))

    assert (races(Flag(0)), races(Flag.CAPTURED)) == (1, 0)


def test_blocks_in_private_pools_are_not_allocated_again() -> None:
    made = Made()
    made.allocate(512, flags=Flag.PRIVATE_POOL)
    with pytest.raises(NotReproducedError, match="pools of their own"):
        settle((made.recording(),), load_cluster("dgx-h100"), json, 0, as_run_bytes=0, total_bytes=0)


def _run(folder: Path, how: str) -> dict[str, Any]:
    (folder / "train.py").write_text(scripts.GRAPHED)
    asked = ("--cluster", "dgx-h100", "--gpus", "1", "--steps", "6", "--races", "--json")
    command = [sys.executable, "-m", "refshard", "dryrun", *asked, "--", "train.py", how]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=1800)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run(tmp_path_factory.mktemp("eager"), "eager")


@needs_device
@pytest.mark.processes
@pytest.mark.parametrize("how", ["whole", "callables"])
def test_a_replayed_step_does_what_an_eager_one_does(tmp_path: Path, eager: dict[str, Any], how: str) -> None:
    found = _run(tmp_path, how)
    assert (found["answer"]["outcome"], found["answer"]["steps_taken"]) == ("stepped", 6)
    for name in ("tokens", "parameters"):
        assert found["answer"][name] == eager["answer"][name]
    assert found["model_flops"] == eager["model_flops"] > 0
    assert found["races"] == []
    assert found["step_s"] < (0.5 if how == "whole" else 0.95) * eager["step_s"]


@needs_device
@pytest.mark.processes
def test_a_capture_that_fails_names_the_line(tmp_path: Path) -> None:
    answer = _run(tmp_path, "item")["answer"]
    assert answer["error"] == "AcceleratorError: CUDA error: operation not permitted when stream is capturing"
    assert answer["where"] == "train.py:31 in step"
