"""Prices from a trace: which kernels it prices and with what, against traces with a known answer."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refshard.dryrun.as_trace import as_trace
from refshard.dryrun.device import Rates
from refshard.dryrun.measured_prices import (
    Call,
    calls_of,
    check_device,
    coverage,
    measured_seconds,
    read_measured,
    seconds_of,
)
from refshard.dryrun.price import Doubt, price
from refshard.dryrun.recording import Flag, Phase, Recording
from refshard.dryrun.replay import replay
from refshard.dryrun.steps import Step, steps_of
from refshard.errors import SpecError, TraceError
from refshard.events.writer import as_kineto
from refshard.specs.cluster import load_cluster
from tests.dryrun.made import Made

H100 = load_cluster("dgx-h100")
MM, MM_BACK = "bf16[64,512] bf16[512,512] bf16[64,512]", "bf16[512,64] bf16[64,512] bf16[512,512]"
LIST = " ".join(["fp32[512,512]"] * 10)
"""So many tensors that a dry run's trace leaves their shapes out."""
Event = dict[str, Any]


def trained(steps: int = 3, world_size: int = 8, layers: int = 3) -> Recording:
    """Steps without concurrency: products, an addition, an optimizer, a copy from the host."""
    made = Made(world_size=world_size)
    for _ in range(steps):
        made.launch("aten::copy_", signature="bf16[64,512] bf16[64,512]", reads=65536, flags=Flag.HOST_TO_DEVICE)
        made.phase = Phase.FORWARD
        for _ in range(layers):
            made.launch("aten::mm", signature=MM, reads=2**20, writes=2**16)
            made.launch("aten::add", signature="bf16[64,512] bf16[64,512] bf16[64,512]", reads=2**17, writes=2**16)
        made.phase = Phase.BACKWARD
        for _ in range(layers):
            made.launch("aten::mm", signature=MM_BACK, reads=2**17, writes=2**20)
        made.phase = Phase.OPTIMIZER
        made.launch("aten::_fused_adamw_", signature=LIST, reads=2**24, writes=2**24)
        made.phase = Phase.OTHER
        made.mark()
    return made.recording()


def traced(path: Path, recording: Recording, change: Callable[[Event], Event | None]) -> Path:
    """A replay's trace, each event as ``change`` returns it."""
    replayed = replay(recording, price(recording, H100), Rates.of(H100))
    whole = json.loads(as_kineto(as_trace(recording, replayed, device="NVIDIA H100 80GB HBM3")))
    whole["traceEvents"] = [new for event in whole["traceEvents"] if (new := change(event)) is not None]
    path.write_text(json.dumps(whole))
    read_measured.cache_clear()
    return path


def scaled(factors: dict[str, float]) -> Callable[[Event], Event]:
    def change(event: Event) -> Event:
        factor = factors.get(event["name"], 1.0) if event.get("cat") in ("kernel", "gpu_memcpy") else 1.0
        return {**event, "dur": round(event["dur"] * factor, 3)} if factor != 1.0 else event

    return change


def shapeless(event: Event) -> Event:
    """As without ``record_shapes=True``, and products take twice as long."""
    kept = {key: value for key, value in event.get("args", {}).items() if not key.startswith("Input ")}
    return scaled({"aten::mm": 2.0})({**event, "args": kept})


def last(recording: Recording) -> Step:
    return steps_of(recording, "step")[-1]


def of(recording: Recording, name: str, seconds: "np.ndarray[Any, Any]") -> list[float]:
    """The last step's launches of an operator."""
    step = last(recording)
    named = [recording.name_table[code] == name for code in recording.names[step.first : step.end]]
    found: list[float] = seconds[step.first : step.end][named].tolist()
    return found


def test_kernels_take_what_they_took_in_the_trace(tmp_path: Path) -> None:
    factors = {"aten::mm": 2.0, "aten::add": 0.5, "aten::_fused_adamw_": 3.0}
    recording = trained()
    path = traced(tmp_path / "trace.json", recording, scaled(factors))
    known, model = seconds_of(recording, last(recording), read_measured(path)), price(recording, H100)
    for name, factor in factors.items():
        expected = [factor * each for each in of(recording, name, model.seconds)]
        assert of(recording, name, known) == pytest.approx(expected, abs=2e-9)  # a trace has whole nanoseconds
    with_prices = price(recording, H100, known)
    assert with_prices.seconds[~np.isnan(known)].tolist() == known[~np.isnan(known)].tolist()
    assert with_prices.flops.tolist() == model.flops.tolist()


def test_copies_from_the_host_keep_the_model_and_price_no_other_copy(tmp_path: Path) -> None:
    made = Made()
    for _ in range(3):
        for flags in (Flag.HOST_TO_DEVICE, Flag(0)):
            made.launch("aten::copy_", signature="bf16[512] bf16[512]", reads=2**20, writes=2**20, flags=flags)
        made.mark()
    recording = made.recording()
    path = traced(
        tmp_path / "trace.json", recording,
        lambda event: {**event, "dur": 9 * event["dur"]} if event.get("cat") == "gpu_memcpy" else event,
    )  # fmt: skip
    from_host, within = of(recording, "aten::copy_", seconds_of(recording, last(recording), read_measured(path)))
    assert np.isnan(from_host)
    assert within == pytest.approx(of(recording, "aten::copy_", price(recording, H100).seconds)[1], abs=2e-9)


def test_an_operator_that_the_trace_lacks_keeps_the_model_and_is_named(tmp_path: Path) -> None:
    recording = trained()
    path = traced(tmp_path / "trace.json", recording, lambda event: event if event["name"] != "aten::add" else None)
    known = seconds_of(recording, last(recording), read_measured(path))
    model, mixed = price(recording, H100).seconds, price(recording, H100, known).seconds
    assert of(recording, "aten::add", mixed) == of(recording, "aten::add", model)
    found = coverage(recording, last(recording), mixed, known)
    added = sum(of(recording, "aten::add", model))
    assert (found.launches, found.matched) == (10, 7)
    assert dict(found.unmatched) == pytest.approx({"aten::add": added})
    total = sum(sum(of(recording, name, mixed)) for name in ("aten::mm", "aten::add", "aten::_fused_adamw_"))
    assert found.share == pytest.approx(1 - added / total)


def test_a_price_that_is_measured_is_no_longer_in_doubt() -> None:
    made = Made()
    rows = [made.launch("mylib::conv2d", signature="bf16[8,8]", reads=64, writes=64) for _ in range(2)]
    recording = made.recording()
    known = np.full(len(recording), np.nan)
    known[rows[0]] = 1.0
    (doubt,) = price(recording, H100, known).doubts
    assert isinstance(doubt, Doubt)
    assert (doubt.name, doubt.count) == ("mylib::conv2d", 1)


def test_without_shapes_calls_match_in_order_if_steps_have_as_many(tmp_path: Path) -> None:
    recording = trained()
    measured = read_measured(traced(tmp_path / "trace.json", recording, shapeless))
    model = price(recording, H100).seconds
    doubled = [2 * each for each in of(recording, "aten::mm", model)]
    assert of(recording, "aten::mm", seconds_of(recording, last(recording), measured)) == pytest.approx(
        doubled, abs=2e-9
    )
    longer = trained(layers=4)
    found = seconds_of(longer, last(longer), measured)
    assert np.isnan(of(longer, "aten::mm", found)).all()
    assert not np.isnan(of(longer, "aten::_fused_adamw_", found)).any()


def test_on_another_number_of_ranks_only_known_shapes_match(tmp_path: Path) -> None:
    trace, recording = trained(world_size=8), trained(world_size=64, layers=4)
    measured = read_measured(traced(tmp_path / "trace.json", trace, scaled({"aten::mm": 2.0})))
    assert measured.world_size == 8
    known = seconds_of(recording, last(recording), measured)
    assert not np.isnan(of(recording, "aten::mm", known)).any()
    assert np.isnan(of(recording, "aten::_fused_adamw_", known)).all()  # its shards are smaller


def one_step(*launches: tuple[str, str]) -> Recording:
    made = Made()
    for name, signature in launches:
        made.launch(name, signature=signature)
    made.mark()
    return made.recording()


def matched(recording: Recording, calls: Sequence[Call]) -> list[float]:
    """Nanoseconds of each launch."""
    found = measured_seconds(recording, last(recording), calls, same_size=True)[:-1] * 1e9
    return [round(each) if each == each else -1 for each in found]


def calls(name: str, tensors: tuple[str, ...], *ns: int) -> list[Call]:
    return [Call(name=name, tensors=tensors, ns=each) for each in ns]


def test_undisturbed_instances_count_if_there_are_three() -> None:
    recording = one_step(("aten::silu", "bf16[8] bf16[8]"))
    disturbed = [replace(call, alone=False) for call in calls("aten::silu", ("bf16[8]",), 30, 30, 40, 40)]
    two, three = (calls("aten::silu", ("bf16[8]",), *ns) for ns in ((10, 10), (10, 10, 12)))
    assert matched(recording, [*disturbed, *three]) == [10]
    assert matched(recording, [*disturbed, *two]) == [30]


def test_order_tells_apart_lists_of_one_shape_and_two_dtypes() -> None:
    recording = one_step(("aten::_foreach_copy_", "bf16[8] fp32[8]"), ("aten::_foreach_copy_", "bf16[8] bf16[8]"))
    lists = ("[8]", "[8]")
    assert matched(recording, calls("aten::_foreach_copy_", lists, 10, 20)) == [10, 20]
    assert matched(recording, calls("aten::_foreach_copy_", lists, 10, 20, 30)) == [-1, -1]


def test_launches_of_one_shape_have_a_price_for_each_phase() -> None:
    made = Made()
    for phase in (Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD):
        made.phase = phase
        made.launch("aten::mm", signature=MM)
    made.mark()
    assert matched(made.recording(), calls("aten::mm", ("bf16[64,512]", "bf16[512,512]"), 10, 12, 30)) == [11, 11, 30]


def test_another_number_of_calls_of_one_shape_gives_their_median() -> None:
    recording = one_step(("aten::mm", MM), ("aten::mm", MM))
    assert matched(recording, calls("aten::mm", ("bf16[64,512]", "bf16[512,512]"), 10, 20, 60)) == [20, 20]
    assert matched(recording, calls("aten::mm", ("fp32[64,512]", "fp32[512,512]"), 10, 20)) == [-1, -1]
    assert matched(recording, calls("aten::bmm", ("bf16[64,512]", "bf16[512,512]"), 10, 20)) == [-1, -1]


def test_results_may_be_arguments_in_the_trace() -> None:
    recording = one_step(("aten::_chunk_cat", "bf16[8] bf16[8] fp32[2,8]"))
    assert matched(recording, calls("aten::_chunk_cat", ("[8]", "[8]", "[2,8]"), 10)) == [10]


US, SHAPES = 1000, {"Input Dims": [[8, 8], [8, 8]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}


def kineto(path: Path, *events: tuple[str, str, int, int, dict[str, Any]], **metadata: Any) -> Path:
    """A trace by hand: category, name, start and length in us, arguments."""
    written = [
        {"ph": "X", "cat": cat, "name": name, "ts": at, "dur": long, "pid": 1, "tid": 1, "args": args}
        for cat, name, at, long, args in events
    ]
    properties = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
    path.write_text(json.dumps({"deviceProperties": properties, "traceEvents": written, **metadata}))
    read_measured.cache_clear()
    return path


def launched(number: int, at: int, **kernels: tuple[int, int]) -> list[tuple[str, str, int, int, dict[str, Any]]]:
    """Launches, one each microsecond, and what they ran: start and length."""
    events: list[tuple[str, str, int, int, dict[str, Any]]] = []
    for place, (name, (start, long)) in enumerate(kernels.items(), number):
        stream = 20 if name.startswith("nccl") else 7
        events.append(("cuda_runtime", "cudaLaunchKernel", at + place - number, 1, {"correlation": place}))
        events.append(("kernel", name, start, long, {"correlation": place, "stream": stream, "device": 0}))
    return events


def test_kernels_of_one_call_add_up_and_concurrent_ones_are_marked(tmp_path: Path) -> None:
    path = kineto(
        tmp_path / "trace.json",
        ("user_annotation", "Optimizer.step#AdamW.step", 90, 10, {}),
        ("user_annotation", "Optimizer.step#AdamW.step", 190, 10, {}),
        ("cpu_op", "aten::mm", 100, 20, SHAPES), ("cpu_op", "aten::fill_", 101, 18, {}),
        *launched(1, at=102, memset=(120, 2), gemm=(122, 10)),
        ("cpu_op", "aten::mm", 130, 10, SHAPES), *launched(3, at=131, gemm=(140, 14), ncclAllReduce=(150, 8)),
        ("cpu_op", "aten::mm", 200, 10, SHAPES), *launched(5, at=202, gemm=(210, 11)),
    )  # fmt: skip
    measured = read_measured(path)
    tensors = ("bf16[8,8]", "bf16[8,8]")
    # What comes after the last optimizer step is no whole step's.
    assert calls_of(measured, {"aten::mm", "aten::fill_"}) == [
        Call(name="aten::mm", tensors=tensors, ns=12 * US, alone=True, step=0),
        Call(name="aten::mm", tensors=tensors, ns=14 * US, alone=False, step=0),
        Call(name="aten::mm", tensors=tensors, ns=11 * US, alone=True, step=-1),
    ]
    assert [step.step for step in measured.analysis.figures.steps] == [0]
    assert measured.world_size == 1


def test_generated_kernels_are_known_by_their_own_name(tmp_path: Path) -> None:
    path = kineto(tmp_path / "trace.json", *launched(1, at=0, triton_poi_fused_add_0=(10, 5)))
    names = {"inductor::triton_poi_fused_add_0"}
    assert [(call.name, call.tensors, call.ns) for call in calls_of(read_measured(path), names)] == [
        ("inductor::triton_poi_fused_add_0", None, 5 * US)
    ]
    assert read_measured(path).step_s is None  # nothing says how many steps it shows


def test_a_trace_of_another_gpu_is_refused(tmp_path: Path) -> None:
    measured = read_measured(kineto(tmp_path / "trace.json", *launched(1, at=0, gemm=(10, 5))))
    check_device(measured, H100.accelerator)
    with pytest.raises(SpecError, match="of the cluster's GPU, NVIDIA H200, got one of NVIDIA H100 80GB HBM3"):
        check_device(measured, load_cluster("hgx-h200").accelerator)


def test_a_trace_without_kernels_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="must show kernels of a GPU, got none"):
        read_measured(kineto(tmp_path / "cpu.json", ("cpu_op", "aten::mm", 0, 5, SHAPES)))
    (tmp_path / "damaged.json").write_text('{"traceEvents": [{"ph": ')
    with pytest.raises(TraceError, match="damaged"):
        read_measured(tmp_path / "damaged.json")
    with pytest.raises(TraceError, match="none"):
        read_measured(tmp_path / "none.json")
