"""What is said of operators and kernels: by figures whose answer is known."""

from typing import Any

import msgspec

from refshard.analysis.figures import (
    ClassFigures,
    Contention,
    KernelFigures,
    OperatorFigures,
    OperatorReport,
    OperatorTotal,
    Slowdown,
    TraceFigures,
)
from refshard.report.trace.operators import (
    class_section,
    contention_section,
    shape_section,
)
from tests.report import traces
from tests.report.printed import opened

MS = 1_000_000
GPU = traces.figures(traces.gpu(layers=2, steps=2))


def mm(**others: Any) -> OperatorFigures:
    known: dict[str, Any] = {
        "name": "aten::mm", "kind": "GEMM", "shapes": "[64, 32], [32, 16]", "dtype": "bf16", "calls": 4, "ns": 120 * MS,
        "share": 0.6, "flops": 10**13, "bytes": 10**9, "flops_per_s": 333e12, "of_peak": 0.337, "of_roofline": 0.337,
        "bound": "compute",
    }  # fmt: skip
    return OperatorFigures(**{**known, **others})


def told(**others: Any) -> TraceFigures:
    """Two steps of 100 ms of work each: 60 % of it GEMMs."""
    known: dict[str, Any] = {
        "steps": 2,
        "work_ns": 200 * MS,
        "classes": (
            ClassFigures(name="GEMM", count=4, ns=120 * MS, share=0.6),
            ClassFigures(name="elementwise", count=7, ns=80 * MS, share=0.4),
            ClassFigures(name="communication", count=2, ns=50 * MS, share=None),
        ),
        "totals": (OperatorTotal(name="aten::mm", kind="GEMM", calls=4, shapes=1, ns=120 * MS, share=0.6),),
        "total_count": 1,
        "operators": (mm(), mm(name="my::op", shapes=None, dtype=None, ns=80 * MS, of_roofline=None, bound=None)),
        "operator_count": 2,
        "kernels": (KernelFigures(name="x" * 300, short="x", kind="GEMM", count=4, ns=120 * MS, share=0.6),),
        "kernel_count": 1,
        "contention": None,
        "hardware": "h100-sxm-80gb",
        "has_shapes": True,
    }
    return msgspec.structs.replace(GPU, operators=OperatorReport(**{**known, **others}))


def slowdown(kind: Any, beside: int, alone: int, name: str = "x") -> Slowdown:
    return Slowdown(name=name, kind=kind, runs=8, beside_ns=beside * MS, alone_ns=alone * MS, slower=beside > alone)


def test_the_first_is_what_gains_most_not_what_takes_longest() -> None:
    fast = mm(name="fast", of_roofline=0.95)
    slow = mm(name="slow", ns=60 * MS, of_roofline=0.1, bound="memory")
    section = opened(class_section(told(operators=(fast, slow))))
    assert section.sentences[1].startswith("The operator that could gain most is slow of")
    assert section.sentences[1].endswith("at 10 % of its roofline (memory-bound), so at most 27.0 ms can be gained.")


def test_what_is_missing_is_named() -> None:
    without = opened(class_section(told(has_shapes=False, operators=(mm(of_roofline=None),))))
    assert without is not None
    assert list(without.sentences[1:]) == [
        "Among operators, aten::mm takes most: 60 % of the work.",
        "No FLOPs: the trace has no shapes; record it with record_shapes=True.",
    ]
    unknown = opened(class_section(told(hardware=None, operators=(mm(of_roofline=None),))))
    assert unknown is not None
    assert unknown.sentences[-1] == f"No shares of a peak: there is no hardware profile of {GPU.device}."
    assert class_section(GPU) is None


def test_columns_that_hold_nothing_are_left_out() -> None:
    whole = opened(shape_section(told()))
    part = opened(shape_section(told(operators=(mm(flops_per_s=None, of_peak=None),))))
    assert [row["TFLOPS"] for row in whole.rows] == ["333", "333"]
    assert set(whole.rows[0]) - set(part.rows[0]) == {"TFLOPS", "of peak"}
    assert shape_section(told(operators=(mm(shapes=None),))) is None


def test_contention_names_gemms_first() -> None:
    found = Contention(
        classes=(slowdown("elementwise", 40, 20), slowdown("GEMM", 118, 100), slowdown("copies", 9, 10)),
        kernels=(slowdown("GEMM", 118, 100, "nvjet"),),
        compared_ns=167 * MS,
        beside_ns=334 * MS,
        shapeless_ns=100 * MS,
    )
    section = opened(contention_section(told(contention=found)))
    assert [row["kernels"] for row in section.rows] == ["all GEMMs", "all elementwise kernels", "all copies", "nvjet"]
    assert list(section.rows[0].values()) == ["all GEMMs", "4", "59.0 ms", "50.0 ms", "1.18x", "9.00 ms"]
    assert list(section.rows[2].values()) == ["all copies", "4", "4.50 ms", "5.00 ms", "no", "none"]
    assert list(section.sentences) == [
        "GEMMs are 1.18x slower beside communication: 9.00 ms a step.",
        "Elementwise kernels are 2.00x slower beside communication: 10.0 ms a step.",
        "Compared: 50 % of the time of kernels beside communication.",
        "For 30 % of that time the shapes are unknown, and nothing else tells which kernels do the same work; record "
        "the trace with record_shapes=True.",
    ]


def test_without_a_loss_it_says_so() -> None:
    found = Contention(
        classes=(slowdown("GEMM", 100, 100),), kernels=(), compared_ns=100, beside_ns=100, shapeless_ns=0
    )
    section = opened(contention_section(told(contention=found)))
    assert section.sentences[0] == "No class of kernels is slower beside communication."
    assert section.rows[0]["lost"] == "none"


def test_what_cannot_be_compared_is_said() -> None:
    found = Contention(classes=(), kernels=(), compared_ns=0, beside_ns=100, shapeless_ns=90)
    section = opened(contention_section(told(contention=found)))
    assert (section.rows, section.caption) == ([], "")
    assert [sentence.split(":")[0] for sentence in section.sentences] == [
        "No kernel can be compared",
        "For 90 % of that time the shapes are unknown, and nothing else tells which kernels do the same work; record "
        "the trace with record_shapes=True.",
    ]
