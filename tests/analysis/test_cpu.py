"""Traces of compiled code on a CPU, made by hand with known answers."""

from pathlib import Path

from refshard.analysis.kineto import read_timeline
from refshard.analysis.overlap import step_breakdowns
from refshard.events.timeline import Kind
from tests.analysis.handmade import BASE_US, event, note, shaped, step, write

SHAPES = shaped([[[16]], [[8]]], ["TensorList", "TensorList"])


def test_compiled_code_computes_where_it_neither_issues_a_collective_nor_waits(tmp_path: Path) -> None:
    """Forward [10, 60), of which [14, 18) issues a gather and [30, 45) waits for it; backward [65, 95) waits in
    [90, 95) for a reduction. gloo gathers [16, 44) and reduces [80, 94).
    """
    timeline = read_timeline(write(tmp_path / "t.json", [
        step(1, 0, 100),
        event("aten::slice", 5, 2),
        event("Torch-Compiled Region: 0/0", 10, 50),
        note("## Call CompiledFxGraph fabc", 12, 46),
        event("_c10d_functional::all_gather_into_tensor", 14, 4),
        event("aten::empty", 14.5, 0.5),
        event("c10d::allgather_into_tensor_coalesced_", 15, 2, **SHAPES),
        event("_c10d_functional::wait_tensor", 30, 15),
        event("aten::mm", 46, 8),
        event("CompiledFunctionBackward", 64, 32),
        note("## Call CompiledFxGraph bdef", 65, 30),
        event("_c10d_functional::wait_tensor", 90, 5),
        event("aten::add", 97, 2),
        note("gloo:all_gather", 16, 28, tid=2, **shaped([[8]], ["float"])),
        note("gloo:all_reduce", 80, 14, tid=2, **shaped([[16]], ["float"])),
        # Another thread's waits are none of the main thread's.
        event("_c10d_functional::wait_tensor", 66, 4, tid=3),
    ]))  # fmt: skip
    spans, base = timeline.spans, BASE_US * 1000
    computed = spans.of_kind(Kind.COMPUTE)
    assert list(zip((spans.starts[computed] - base).tolist(), (spans.ends[computed] - base).tolist())) == [
        (5_000, 7_000), (10_000, 14_000), (18_000, 30_000), (45_000, 60_000), (65_000, 90_000), (97_000, 99_000),
    ]  # fmt: skip
    assert [spans.name_table[name].partition(":")[0] for name in spans.names[computed].tolist()] == [
        "aten", *["Torch-Compiled Region"] * 3, "## Call CompiledFxGraph bdef", "aten",
    ]  # fmt: skip
    (found,) = step_breakdowns(timeline)
    assert (found.compute_ns, found.comm_ns) == (60_000, 42_000)
    # Beside no compute: [16, 18) + [30, 44), and [90, 94).
    assert found.exposed_ns == 20_000
    gather = next(one for one in timeline.collectives if one.announced)
    assert (gather.op, gather.bytes, gather.start) == ("all_gather", 64, base + 16_000)


def test_an_operator_on_dtensors_computes_where_it_neither_issues_a_collective_nor_waits(tmp_path: Path) -> None:
    """As in Muon's products: [10, 60), of which [14, 18) issues a gather and [20, 45) waits for it."""
    (found,) = step_breakdowns(read_timeline(write(tmp_path / "t.json", [
        step(1, 0, 100), event("aten::mm", 10, 50), event("PythonSubclass", 11, 48),
        event("_c10d_functional::all_gather_into_tensor", 14, 4), event("_c10d_functional::wait_tensor", 20, 25),
        event("aten::mm", 46, 8), event("aten::mm", 60, 10),
        note("gloo:all_gather", 16, 28, tid=2, **shaped([[8]], ["float"])),
    ])))  # fmt: skip
    # [10, 14) + [18, 20) + [45, 60) + [60, 70); beside no compute: [16, 18) + [20, 44).
    assert (found.compute_ns, found.exposed_ns) == (31_000, 26_000)


def test_collectives_outside_of_compiled_code_cut_nothing(tmp_path: Path) -> None:
    (found,) = step_breakdowns(read_timeline(write(
        tmp_path / "t.json", [step(1, 0, 50), event("_c10d_functional::wait_tensor", 5, 20), event("aten::mm", 10, 30)]
    )))  # fmt: skip
    assert found.compute_ns == 30_000
