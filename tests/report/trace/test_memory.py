"""What is told of memory at the peak of a trace."""

from collections.abc import Sequence
from typing import Any

import msgspec

from refshard.analysis.figures import Category, Holder, MemoryPeak, TraceFigures
from refshard.quantities import GIB
from refshard.report.trace.memory import memory_at_peak, memory_by_unit
from tests.report import traces
from tests.report.printed import opened


def holder(category: Category, gib: int, unit: str | None = None, operator: str | None = None) -> Holder:
    return Holder(category=category, unit=unit, operator=operator, bytes=gib * GIB, blocks=gib)


HOLDERS = (
    Holder(category="before, kept", unit=None, operator=None, bytes=4 * GIB, blocks=None),
    holder("activations", 8, "layers.0", "aten::linear"),
    holder("activations", 4, "layers.1", "aten::gelu"),
    holder("backward", 4, "layers.1", "autograd::engine::evaluate_function: MmBackward0"),
)


def figures(holders: Sequence[Holder] = HOLDERS, **changed: Any) -> TraceFigures:
    """20 of 40 GiB reserved are allocated at the peak."""
    peak = MemoryPeak(
        device="device 0", ns=5, step=3, phase="backward", operator="aten::mm", unit="layers.1",
        allocated_bytes=20 * GIB, risen_bytes=16 * GIB, reserved_bytes=40 * GIB, most_reserved_bytes=41 * GIB,
        holders=tuple(holders),
    )  # fmt: skip
    peaks = (msgspec.structs.replace(peak, **changed),)
    return msgspec.structs.replace(traces.figures(traces.gpu(), file="t.json"), memory_peaks=peaks)


def test_moment_unused_memory_and_a_remedy_for_what_holds_half() -> None:
    moment, unused, remedy = opened(memory_at_peak(figures())).sentences
    assert moment == (
        "Peak in step 3, in backward, of layers.1, under aten::mm: 20.0 GiB allocated, 16.0 GiB more than when the "
        "trace began."
    )
    assert unused.startswith("20.0 of 40.0 GiB reserved are not allocated then")
    assert "_dump_snapshot" in unused
    assert remedy.startswith("Most is activations: checkpoint them")
    assert "(60 % of the peak)" in remedy


def test_little_unused_memory_has_no_advice_and_neither_has_an_even_spread() -> None:
    holders = [holder("activations", 4), holder("gradients", 4), holder("backward", 4)]
    _, unused = opened(memory_at_peak(figures(holders, reserved_bytes=21 * GIB))).sentences
    assert unused == "1.00 of 21.0 GiB reserved are not allocated then: cache and fragmentation."


def test_a_cpus_memory_is_said_to_be_counted_from_the_profilers_begin() -> None:
    assert "counts a CPU's memory from when it begins" in opened(memory_at_peak(figures(device="cpu"))).sentences[-1]
    assert not any("CPU" in told for told in opened(memory_at_peak(figures())).sentences)


def test_what_a_trace_does_not_tell_is_not_said() -> None:
    found = opened(memory_at_peak(figures((), allocated_bytes=None, reserved_bytes=None, step=None, unit=None)))
    assert list(found.rows) == [{"held for": "not known: the trace has no addresses or totals"}]
    assert list(found.sentences) == ["Peak in backward, under aten::mm: 16.0 GiB more than when the trace began."]
    assert memory_by_unit(figures(())) is None
    without = msgspec.structs.replace(figures(), memory_peaks=())
    assert memory_at_peak(without) is memory_by_unit(without) is None
