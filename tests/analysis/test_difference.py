"""A difference of two jobs: works matched by what they do, and parts that add up to the change of the mean step."""

from dataclasses import replace
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.attribution import Attribution, Owner, Work, attribute, family
from refshard.analysis.difference import Change, Difference, Unlike, difference, mean_steps, unlike
from refshard.analysis.figures import TraceFigures
from tests.analysis.builder import Training
from tests.report import traces

Side = list[tuple[dict[Work, tuple[int, int]], int]]

works = st.builds(
    Work, kind=st.sampled_from(("compute", "comm", "idle")),
    operator=st.sampled_from(("aten::mm", "aten::add", "gather")),
    unit=st.sampled_from((None, "layers.0", "layers.1", "layers.2", "layers.3", "head")),
    phase=st.sampled_from((None, "forward", "backward")), dims=st.sampled_from(("", "[2,2]", "[4]")),
    dtype=st.sampled_from(("", "bf16", "fp32")), ordinal=st.sampled_from((None, 0, 1)),
    bytes=st.sampled_from((None, 8)), bound=st.sampled_from((None, "launch")),
)  # fmt: skip
owned = st.dictionaries(works, st.tuples(st.integers(0, 10**12), st.integers(0, 9)), max_size=12)
ranks = st.lists(st.tuples(owned, st.integers(1, 999)), min_size=1, max_size=3)


def made(owned: dict[Work, tuple[int, int]], steps: int) -> Attribution:
    """Owners of steps, the first of which takes all the time."""
    total = sum(ns for ns, _ in owned.values())
    owners = (Owner(work=w, ns=ns, count=n, kernels=(("k", ns),)) for w, (ns, n) in owned.items())
    return Attribution(step_ns=(total, *[0] * (steps - 1)), owners=tuple(owners))


def mean(side: Side, place: int) -> Fraction:
    of_ranks = [Fraction(sum(row[place] for row in owned.values()), steps) for owned, steps in side]
    return sum(of_ranks, Fraction(0)) / len(side)


def total(found: Difference, what: str) -> Fraction:
    return sum((Fraction(getattr(change, what)) for change in found.changes), Fraction(0))


@given(ranks, ranks)
def test_the_changes_add_up_to_the_change_of_the_mean_step(a: Side, b: Side) -> None:
    """To the rounding of floats, of which each part has one."""
    found = difference([made(*one) for one in a], [made(*one) for one in b])
    mean_a, mean_b = mean(a, 0), mean(b, 0)
    rounding = (mean_a + mean_b) / 2**52
    assert abs(total(found, "delta_ns") - (mean_b - mean_a)) <= rounding
    assert abs(Fraction(found.delta_ns) - (mean_b - mean_a)) <= rounding
    assert abs(total(found, "a_ns") - mean_a) <= rounding
    assert abs(total(found, "b_ns") - mean_b) <= rounding
    assert float(total(found, "a_count")) == pytest.approx(float(mean(a, 1)))
    assert float(total(found, "b_count")) == pytest.approx(float(mean(b, 1)))


@given(st.lists(st.tuples(owned, owned, st.integers(1, 99), st.integers(1, 99)), min_size=1, max_size=3))
def test_ranks_that_are_paired_change_by_what_each_changes_by(
    pairs: list[tuple[dict[Work, tuple[int, int]], dict[Work, tuple[int, int]], int, int]],
) -> None:
    a = [made(owned, steps) for owned, _, steps, _ in pairs]
    b = [made(owned, steps) for _, owned, _, steps in pairs]
    found = difference(a, b, range(len(pairs)))
    by_rank = [
        Fraction(sum(ns for ns, _ in y.values()), steps_y) - Fraction(sum(ns for ns, _ in x.values()), steps_x)
        for x, y, steps_x, steps_y in pairs
    ]
    assert [one.rank for one in found.ranks] == list(range(len(pairs)))
    assert [one.delta_ns for one in found.ranks] == [float(change) for change in by_rank]
    for change in found.changes:
        assert change.most_rank in range(len(pairs))
        assert abs(change.most_ns or 0) >= abs(change.delta_ns) * (1 - 2**-50)


@given(ranks)
def test_a_job_does_not_differ_from_itself(side: Side) -> None:
    same = [made(*one) for one in side]
    found = difference(same, same, range(len(side)))
    assert found.delta_ns == 0
    assert all(change.delta_ns == change.most_ns == 0 and not change.new | change.gone for change in found.changes)
    assert {change.matched for change in found.changes} <= {"inputs"}


def least(work: Work) -> tuple[object, ...]:
    return work.kind, work.phase, family(work.operator), work.bound


@given(ranks, ranks)
def test_no_operator_is_both_new_and_gone(a: Side, b: Side) -> None:
    changes = difference([made(*one) for one in a], [made(*one) for one in b]).changes
    new, gone = ({least(c.work) for c in changes if getattr(c, what)} for what in ("new", "gone"))
    assert not new & gone
    assert all((not c.matched) == (c.new or c.gone) for c in changes)
    assert all(not ((c.new and c.a_count) or (c.gone and c.b_count)) for c in changes)


def mm(**fields: object) -> Work:
    return msgspec.structs.replace(Work(kind="compute", operator="aten::mm", phase="forward"), **fields)


def one_step(*rows: tuple[Work, int], kernel: str = "k") -> list[Attribution]:
    owners = tuple(Owner(work=work, ns=ns, count=1, kernels=((kernel, ns),)) for work, ns in rows)
    return [Attribution(step_ns=(sum(ns for _, ns in rows),), owners=owners)]


def summary(changes: tuple[Change, ...]) -> list[tuple[str, float, str]]:
    return [(change.label, change.delta_ns, change.matched) for change in changes]


def test_another_gpus_kernels_are_the_same_work() -> None:
    work = mm(unit="layers.0", dims="[8,4]x[4,2]", dtype="bf16", ordinal=0)
    (change,) = difference(one_step((work, 9), kernel="sm80_gemm"), one_step((work, 7), kernel="Cijk_Alik")).changes
    assert change.label == "aten::mm [8,4]x[4,2] bf16 in layers.0, forward"
    assert (change.a_ns, change.b_ns, change.matched) == (9, 7, "inputs")
    assert (change.a_kernels, change.b_kernels) == (("sm80_gemm",), ("Cijk_Alik",))


def test_works_are_matched_by_the_closest_description_that_both_have() -> None:
    a = one_step(
        (mm(dims="[8,4]", dtype="bf16"), 100), (mm(dims="[8,8]", dtype="fp32"), 200),
        (mm(unit="head", dims="[1]", ordinal=0), 300), (mm(unit="head", dims="[2]", ordinal=1), 400),
        (mm(unit="body", dims="[3]", ordinal=0), 500), (mm(operator="aten::add", unit="tail"), 600),
        (mm(operator="aten::sum"), 700),
    )  # fmt: skip
    b = one_step(
        (mm(dims="[8,4]", dtype="bf16"), 101), (mm(dims="[8,8]", dtype="bf16"), 210),
        (mm(unit="head", dims="[7]", ordinal=0), 311), (mm(unit="head", dims="[6]", ordinal=1), 412),
        (mm(unit="body", dims="[5]", ordinal=0), 260), (mm(unit="body", dims="[5]", ordinal=1), 260),
        (mm(operator="aten::add", unit="other"), 630), (mm(operator="aten::mul"), 50),
    )  # fmt: skip
    assert summary(difference(a, b).changes) == [
        ("aten::sum, forward", -700, ""),
        ("aten::mul, forward", 50, ""),
        ("aten::add, forward", 30, "operator"),
        ("aten::mm [3] -> [5] in body, forward", 20, "unit"),
        ("aten::mm [2] -> [6] #2 in head, forward", 12, "order"),
        ("aten::mm [1] -> [7] #1 in head, forward", 11, "order"),
        ("aten::mm [8,8] fp32 -> bf16, forward", 10, "shapes"),
        ("aten::mm [8,4] bf16, forward", 1, "inputs"),
    ]


def test_operators_of_different_libraries_are_the_same_work() -> None:
    a = one_step((mm(operator="aten::cudnn_convolution", dims="[8]"), 5), (mm(operator="aten::_flash_attention"), 9))
    b = one_step(
        (mm(operator="aten::miopen_convolution", dims="[8]"), 8), (mm(operator="aten::_efficient_attention"), 8)
    )
    assert summary(difference(a, b).changes) == [
        ("aten::cudnn_convolution -> aten::miopen_convolution [8], forward", 3, "shapes"),
        ("aten::_flash_attention -> aten::_efficient_attention, forward", -1, "shapes"),
    ]
    several = one_step((mm(operator="aten::_flash_attention"), 9), (mm(operator="aten::_cudnn_attention"), 9))
    (change,) = difference(several, one_step((mm(operator="aten::_efficient_attention"), 8))).changes
    assert (change.label, change.delta_ns) == ("aten::attention, forward", -10)


def test_phases_count_only_if_both_sides_tell_them() -> None:
    a = one_step((mm(), 5), (mm(phase="backward"), 6))
    (change,) = difference(a, one_step((mm(phase=None), 12))).changes
    assert (change.label, change.a_ns, change.b_ns) == ("aten::mm", 11, 12)


def test_collectives_are_matched_by_operation_group_and_size() -> None:
    def gather(size: int, group: str, **fields: object) -> Work:
        return mm(kind="comm", operator="all_gather", bytes=size, group=group, **fields)

    a = one_step(
        (gather(1024, "dp, 8 ranks"), 10), (gather(2048, "dp, 8 ranks"), 20), (gather(1024, "tp, 2 ranks"), 30)
    )
    b = one_step(
        (gather(1024, "dp, 8 ranks"), 11), (gather(2048, "dp, 4 ranks"), 22), (gather(4096, "tp, 2 ranks"), 33)
    )
    assert summary(difference(a, b).changes) == [
        ("all_gather (tp, 2 ranks), forward", 3, "unit"),
        ("all_gather 2.00 KiB (dp, 8 ranks -> dp, 4 ranks), forward", 2, "shapes"),
        ("all_gather 1.00 KiB (dp, 8 ranks), forward", 1, "inputs"),
    ]


@pytest.mark.parametrize(("changes", "expected"), [
    ([10] * 6, {"layers.*": (60, 6)}),
    ([10, 10, 60, 10, 10, 10], {"layers.*": (50, 5), "layers.2": (60, 1)}),
    # Not by more than a quarter of their time, 100 to 130 each.
    ([10, 10, 30, 10, 10, 10], {"layers.*": (80, 6)}),
    # Not by more than five times the median deviation of 10.
    ([0, 10, 20, 40, 50, 60], {"layers.*": (180, 6)}),
    ([0, 90], {"layers.*": (90, 2)}),
])  # fmt: skip
def test_units_that_change_alike_are_one(changes: list[int], expected: dict[str, tuple[int, int]]) -> None:
    a = one_step(*((mm(unit=f"layers.{i}"), 100) for i in range(len(changes))))
    b = one_step(*((mm(unit=f"layers.{i}"), 100 + change) for i, change in enumerate(changes)))
    found = difference(a, b).changes
    assert {change.work.unit: (change.delta_ns, change.units) for change in found} == expected


def test_a_unit_is_not_apart_by_less_than_a_thousandth_of_the_step() -> None:
    a = one_step((mm(), 10**6), *((mm(unit=f"layers.{i}"), 1) for i in range(4)))
    b = one_step((mm(), 10**6), *((mm(unit=f"layers.{i}"), 900 if i == 3 else 1) for i in range(4)))
    assert [change.units for change in difference(a, b).changes] == [4, 1]


def test_only_whole_parts_of_a_units_name_are_numbers() -> None:
    side = one_step(*((mm(unit=f"layers.{i}.w{j}"), 1) for i in range(2) for j in range(2)))
    assert sorted(change.work.unit or "" for change in difference(side, side).changes) == ["layers.*.w0", "layers.*.w1"]


def test_a_training_run_that_changed_names_what_changed_most_first() -> None:
    """A slower reduction shows as its exposed part, that of the last unit; a faster forward as itself."""
    before = Training(layers=4, steps=2)
    after = replace(before, steps=4, reduce=before.reduce + 700, forward=before.forward - 100)
    a, b = ([attribute(plan.trace(rank).timeline()) for rank in range(2)] for plan in (before, after))
    found = difference(a, b, (0, 1))
    first, second = found.changes[:2]
    assert (first.kind, first.work.operator, first.work.unit, first.delta_ns) == (
        "comm", "reduce_scatter", "layers.0", 700,
    )  # fmt: skip
    assert (second.label, second.delta_ns, second.units) == ("aten::gemm_forward in layers.*, forward", -400, 4)
    assert (first.a_count, first.b_count, second.a_count) == (1, 1, 4)
    assert found.delta_ns == after.step_ns - before.step_ns
    assert [(one.rank, one.delta_ns) for one in found.ranks] == [(0, found.delta_ns), (1, found.delta_ns)]
    # Of fewer steps, a greater share is the last.
    (end,) = [change for change in found.changes if change.label == "idle before the end (launch-bound)"]
    assert end.delta_ns == before.tail / 4 - before.tail / 2


def test_a_difference_says_what_is_new_and_what_is_gone() -> None:
    trace = Training(layers=2, steps=1).trace()
    a = attribute(trace.timeline())
    trace.works = [replace(w, operator="aten::fused_adam") if w.operator == "aten::adam" else w for w in trace.works]
    found = {c.label: (c.a_ns, c.b_ns, c.new, c.gone) for c in difference([a], [attribute(trace.timeline())]).changes}
    ns = float(Training().optimizer)
    expected = {"aten::adam": (ns, 0, False, True), "aten::fused_adam": (0, ns, True, False)}
    assert {label: found[label] for label in expected} == expected
    assert not any(new or gone for label, (*_, new, gone) in found.items() if "adam" not in label)


def test_the_rank_that_changed_most_is_named() -> None:
    a = [*one_step((mm(), 10)), *one_step((mm(), 10)), *one_step((mm(), 10))]
    b = [*one_step((mm(), 12)), *one_step((mm(), 4)), *one_step((mm(), 15))]
    (change,) = difference(a, b, (0, 3, 5)).changes
    assert change.delta_ns == pytest.approx(1 / 3)
    assert (change.most_rank, change.most_ns) == (3, -6)


def test_steps_are_means_over_ranks() -> None:
    sides = [Attribution(step_ns=step_ns, owners=()) for step_ns in ((10, 20, 30), (30, 40))]
    assert mean_steps(sides) == [20, 30]


def test_a_trace_without_steps_has_no_mean_step() -> None:
    whole, nothing = one_step((mm(), 1)), Attribution(step_ns=(), owners=())
    with pytest.raises(ValueError, match="trace B has no step"):
        difference(whole, [nothing])
    with pytest.raises(ValueError, match="trace A has no step"):
        difference([], whole)
    with pytest.raises(ValueError, match="A must have a trace for each of 2 ranks, got 1"):
        difference(whole, whole, (0, 1))


BASE = traces.figures(traces.gpu(layers=2, steps=1))


def figures(device: str = "H100", world_size: int | None = 8) -> list[TraceFigures]:
    return [msgspec.structs.replace(BASE, device=device, world_size=world_size)]


def calls(*rows: tuple[str, str, int]) -> list[Attribution]:
    """A step of compute: operator, shapes and nanoseconds."""
    works = [(Work(kind="compute", operator=operator, dims=dims), ns) for operator, dims, ns in rows]
    owners = tuple(Owner(work=work, ns=ns, count=1) for work, ns in works)
    return [Attribution(step_ns=(sum(ns for _, ns in works),), owners=owners)]


SAME = calls(("aten::mm", "[8,4]x[4,2]", 60), ("aten::add", "[8,2]x[8,2]", 40))


@pytest.mark.parametrize(("a", "b", "found"), [
    (figures(), figures(), ()),
    (figures(), figures("MI300X"), (Unlike(what="device", a="H100", b="MI300X"),)),
    (figures(), figures(world_size=2), (Unlike(what="world size", a="8", b="2"),)),
    (figures(), figures(world_size=None), ()),
    (figures("gpu"), figures(), ()),  # a trace without its device's name
    (figures() + figures("H200"), figures(), (Unlike(what="device", a="H100, H200", b="H100"),)),
])  # fmt: skip
def test_devices_and_sizes_are_compared_where_both_are_known(
    a: list[TraceFigures], b: list[TraceFigures], found: tuple[Unlike, ...]
) -> None:
    assert unlike((a, b), (SAME, SAME)) == found


BATCH = Unlike(what="batch size", a="aten::mm [8,4]x[4,2]", b="aten::mm [16,4]x[4,2]")


@pytest.mark.parametrize(("b", "found"), [
    (calls(("aten::mm", "[16,4]x[4,2]", 60), ("aten::add", "[16,2]x[16,2]", 40)), (BATCH,)),
    (
        calls(("aten::mm", "[8,6]x[6,3]", 60), ("aten::add", "[8,3]x[8,3]", 40)),
        (Unlike(what="input shapes", a="aten::mm [8,4]x[4,2]", b="aten::mm [8,6]x[6,3]"),),
    ),
    # Most time is in shapes that both have.
    (calls(("aten::mm", "[8,4]x[4,2]", 60), ("aten::add", "[16,2]x[16,2]", 40)), ()),
    # An operator that replaces another is what is to be measured.
    (calls(("fused", "[1,1]", 90), ("aten::add", "[8,2]x[8,2]", 10)), ()),
    (calls(("fused", "[1,1]", 900), ("aten::mm", "[8,4]x[4,2]", 60), ("aten::add", "[16,2]x[16,2]", 10)), ()),
    (calls(("aten::mm", "", 60), ("aten::add", "", 40)), ()),
    (calls(), ()),
])  # fmt: skip
def test_shapes_are_compared_by_the_time_in_operators_that_both_call(
    b: list[Attribution], found: tuple[Unlike, ...]
) -> None:
    assert unlike((figures(), figures()), (SAME, b)) == found
