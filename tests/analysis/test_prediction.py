"""What a dry run got wrong: by kind of time, with the number of the profile that governs it."""

import pytest

from refshard.analysis.attribution import Attribution, Owner, Work
from refshard.analysis.prediction import beside, part_of, parts


def step(*owners: tuple[Work, int], kernel: str = "k") -> Attribution:
    """A step of these works' nanoseconds."""
    total = sum(ns for _, ns in owners)
    made = (Owner(work=work, ns=ns, count=1, kernels=((kernel, ns),)) for work, ns in owners)
    return Attribution(step_ns=(total,), owners=tuple(made))


def mm(phase: str | None, dtype: str = "bf16") -> Work:
    return Work(kind="compute", operator="aten::mm", unit="layers.0", phase=phase, dims="[8,4]x[4,2]", dtype=dtype)


def idle(before: str, bound: str) -> Work:
    return Work(kind="idle", operator=before, unit="layers.0", bound=bound)


REAL = step(
    (mm("forward"), 50), (mm("backward"), 60), (Work(kind="copy", operator="aten::copy_", dims="[9]x[9]"), 7),
    (idle("aten::mm", "launch"), 20), (idle("aten::copy_", "launch"), 5), (idle("aten::mm", "back to back"), 3),
    (Work(kind="compute", operator="aten::add_", dims="[4]", phase="backward"), 4),
    (Work(kind="comm", operator="all_gather", bytes=64), 11),
)  # fmt: skip
DRY = step(
    (mm("forward"), 99), (Work(kind="compute", operator="aten::copy_", dims="[9]x[9]", phase="backward"), 14),
    (idle("aten::add", "launch"), 15), (Work(kind="compute", operator="aten::add", dims="[4]", phase="forward"), 4),
    (Work(kind="comm", operator="all_gather", bytes=64), 10),
)  # fmt: skip


def test_each_part_adds_up_and_names_its_constant() -> None:
    """Recomputation is forward in one and backward in the other, copies are another kind, adds in place or not."""
    found = parts(beside([REAL], [DRY]))
    assert [(part.name, part.constant, part.real_ns, part.predicted_ns) for part in found] == [
        ("matrix products, bf16", "matmul.bf16.efficiency", 110, 99),
        ("idle, launch-bound", "host_s", 25, 15),
        ("copies on the device", "memory_bytes_per_s", 7, 14),
        ("idle, back to back", "kernel_s", 3, 0),
        ("communication, exposed", "within, between", 11, 10),
        ("elementwise", "memory_bytes_per_s", 4, 4),
    ]
    assert sum(part.error_ns for part in found) == DRY.span_ns - REAL.span_ns


@pytest.mark.parametrize(
    ("operator", "dtype", "kernel", "expected"),
    [
        ("aten::addmm", "fp16,fp16", "k", ("matrix products, bf16", "matmul.bf16.efficiency")),
        ("aten::_scaled_mm", "fp8,fp8", "k", ("matrix products, fp8", "matmul.fp8.efficiency")),
        ("aten::_fused_adamw_", "fp32", "k", ("optimizer", "optimizer_bytes_per_s")),
        ("aten::_flash_attention_backward", "bf16", "k", ("attention, backward", "attention_points, attention.bf16")),
        ("aten::_fused_rms_norm", "bf16", "k", ("normalisation", "memory_bytes_per_s")),
        ("aten::copy_", "bf16", "Memcpy HtoD (Pinned -> Device)",
         ("copies to and from the host", "host_link_bytes_per_s")),
    ],
)  # fmt: skip
def test_the_constant_of_an_operator(operator: str, dtype: str, kernel: str, expected: tuple[str, str]) -> None:
    side = step((Work(kind="compute", operator=operator, dims="[4]", dtype=dtype), 5), kernel=kernel)
    (change,) = beside([side], [side]).changes
    assert part_of(change) == expected
