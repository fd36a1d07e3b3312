"""Whatever is done to the events of a valid trace, reading and analysing it gives figures or one clear error."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refshard.analysis.analyse import analyse, join
from refshard.analysis.figures import TraceFigures
from refshard.errors import TraceError
from refshard.report.trace.answer import trace_answer
from refshard.report.trace.sections import sections_of
from tests.analysis.builder import Training
from tests.analysis.handmade import event, note, shaped, step, write

Trace = dict[str, Any]
HUGE = [2**31, 2**53 + 1, 2**62, 2**63, -(2**63), 2**64, 10**30, 1e300, -1e300, 1e-300]
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 0.5, "", "7", "x", "NaN", "1e5", [], [1], {}, {"a": 1}, [[]], [None], *HUGE,
    float("nan"), float("inf"), float("-inf"), "é\u2028", "a" * 5000, "kernel,foo", "ProfilerStep#1", "nccl:all_reduce",
]  # fmt: skip
KEYS = [
    "ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "correlation", "External id", "stream", "device", "grid",
    "Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Process Group Name",
    "Process Group Ranks", "Input Dims", "Input type", "bytes", "rank", "world_size", "backend", "pg_config",
    "deviceProperties", "distributedInfo", "baseTimeNanoseconds", "with_stack",
]  # fmt: skip


CAPTURE_AND_REPLAY = ("cudaStreamBeginCapture", "cudaLaunchKernel", "cudaStreamEndCapture", "cudaGraphLaunch")


def gpu(path: Path) -> Trace:
    """Two steps of a sharded model, with a capture, a replay, a peer copy and memory events beside them."""
    found: Trace = json.loads(Training(layers=1, steps=2).trace().write(path).read_text())
    first = found["traceEvents"][0]["ts"]
    graph = [
        {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 4242, "tid": 4242, "ts": first + at, "dur": 1,
         "args": {"correlation": 900 + at}}
        for at, name in enumerate(CAPTURE_AND_REPLAY)
    ]  # fmt: skip
    device = {"pid": 0, "tid": 7, "dur": 2, "ph": "X"}
    found["traceEvents"] += [
        *graph,
        {**device, "cat": "kernel", "name": "gemm", "ts": first + 60, "args": {"correlation": 903, "stream": 7}},
        {**device, "cat": "gpu_memcpy", "name": "Memcpy PtoP", "ts": first + 63, "args": {"bytes": 8, "stream": 7}},
        {"ph": "i", "name": "[memory]", "ts": first, "args": {"Bytes": 5, "Total Allocated": 9, "Device Type": 1}},
    ]
    found["deviceProperties"] = [{"id": 0, "name": "GPU"}]
    found["distributedInfo"]["pg_config"] = [{"pg_name": "0", "ranks": [0, 1]}]
    return found


def cpu(path: Path) -> Trace:
    """A step of a gloo rank."""
    made = write(path, [
        step(0, 0, 100), event("aten::mm", 2, 30),
        event("c10d::allreduce_", 33, 2, **shaped([[[25]], []], ["TensorList", ""])),
        note("FSDP::all_gather (layers.0)", 36, 5), note("gloo:all_reduce", 40, 50, tid=2, **shaped([[25]], ["float"])),
    ])  # fmt: skip
    found: Trace = json.loads(made.read_text())
    return found


def launches_only(path: Path) -> Trace:
    """What remains where the device's events were not collected."""
    found = gpu(path)
    found["traceEvents"] = [one for one in found["traceEvents"] if one.get("cat") not in ("kernel", "gpu_memcpy")]
    return found


def kernels_only(path: Path) -> Trace:
    """What remains without host events."""
    found = gpu(path)
    found["traceEvents"] = [one for one in found["traceEvents"] if one.get("cat") in ("kernel", "gpu_memcpy")]
    return found


SEEDS: tuple[Callable[[Path], Trace], ...] = (gpu, cpu, launches_only, kernels_only)


def outcome(path: Path) -> TraceFigures | str:
    """The figures, told and laid out as a user sees them, or the reason why there are none."""
    try:
        (one,) = join([analyse(path)])
    except TraceError as error:
        return str(error)
    figures = one.figures
    answer = trace_answer([one])
    json.dumps(answer.data, allow_nan=False)
    assert all(section.title for section in sections_of(figures))
    return figures


def check(path: Path, trace: Any) -> None:
    path.write_text(json.dumps(trace))
    found = outcome(path)
    if isinstance(found, str):
        assert "\n" not in found
        assert path.name in found
        return
    for part in (found.whole, *(each.breakdown for each in found.steps)):
        assert part.busy_ns + part.idle_ns == part.span_ns
        assert 0 <= part.exposed_any_ns <= part.exposed_ns <= part.comm_ns <= part.span_ns
    assert msgspec.json.decode(msgspec.json.encode(found), type=TraceFigures) == found


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys or indices."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def mutate(trace: Trace, chance: random.Random) -> None:
    """Change one thing: delete, double, replace, rename, swap, or shift."""
    if not trace:
        return
    inside, key = chance.choice(places(trace))
    kind = chance.choice(("delete", "double", "replace", "replace", "rename", "text", "swap", "time"))
    value = inside[key]
    if kind == "delete":
        del inside[key]
    elif kind == "double" and isinstance(inside, list):
        inside.insert(chance.randrange(len(inside) + 1), copy.deepcopy(value))
    elif kind == "rename" and isinstance(inside, dict):
        inside[chance.choice(KEYS)] = inside.pop(key)
    elif kind == "text":
        inside[key] = str(value)
    elif kind == "swap":
        other, place = chance.choice(places(trace))
        if len(places(other[place])) < 30:  # or the trace would grow without end
            inside[key] = copy.deepcopy(other[place])
    elif kind == "time" and isinstance(trace.get("traceEvents"), list) and trace["traceEvents"]:
        one = chance.choice(trace["traceEvents"])
        if isinstance(one, dict):
            one[chance.choice(("ts", "dur"))] = copy.deepcopy(chance.choice(VALUES))
    else:
        inside[key] = copy.deepcopy(chance.choice(VALUES))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_any_change_gives_figures_or_one_clear_error(tmp_path: Path, seed: Callable[[Path], Trace]) -> None:
    """Up to eight changes at once, at random from a fixed start."""
    whole, chance = seed(tmp_path / "seed.json"), random.Random(29)
    for _ in range(100):
        changed = copy.deepcopy(whole)
        for _ in range(chance.randrange(1, 9)):
            mutate(changed, chance)
        check(tmp_path / "t.json", changed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("key", KEYS)
def test_no_value_of_any_field_breaks_it(tmp_path: Path, seed: Callable[[Path], Trace], key: str) -> None:
    """All values, over the events and the metadata that have the field, and each of four of them in all at once."""
    whole = seed(tmp_path / "seed.json")
    values = random.Random(key).sample(range(len(VALUES)), 4)
    for stride, first in [(1, 0), *((0, value) for value in values)]:
        changed = copy.deepcopy(whole)
        having = [(inside, name) for inside, name in places(changed) if name == key]
        for place, (inside, name) in enumerate(having):
            inside[name] = VALUES[(first + stride * place) % len(VALUES)]
        if having:
            check(tmp_path / "t.json", changed)


json_values = st.recursive(
    st.sampled_from(VALUES) | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=5,
)
events = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "X", "X", "i", "B"]), "cat": st.sampled_from(["kernel", "cpu_op", "cuda_runtime",
     "user_annotation", "gpu_memcpy", "overhead", "mtia_ccp_events"]), "name": st.sampled_from(
         ["gemm", "ncclDevKernel_AllReduce", "cudaLaunchKernel", "cudaGraphLaunch", "cudaStreamBeginCapture",
          "cudaStreamEndCapture", "ProfilerStep#1", "ProfilerStep#2", "c10d::allreduce_", "nccl:all_reduce",
          "gloo:all_reduce", "FSDP::all_gather (a)", "FSDP::post_backward_reduce (a)", "aten::mm", "[memory]"])},
    optional={"ts": st.integers(-3, 60) | json_values, "dur": st.integers(0, 30) | json_values,
              "tid": st.integers(1, 2) | json_values, "pid": st.just(1) | json_values,
              "args": json_values | st.dictionaries(st.sampled_from(KEYS), st.integers(1, 3) | json_values)},
)  # fmt: skip


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(events | json_values, max_size=14), st.dictionaries(st.sampled_from(KEYS), json_values, max_size=3))
def test_any_events_at_all(tmp_path: Path, found: list[Any], metadata: Trace) -> None:
    check(tmp_path / "t.json", {**metadata, "traceEvents": found})
