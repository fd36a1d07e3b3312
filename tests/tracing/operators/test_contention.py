"""How much slower kernels are beside communication, and which may be compared: by hand, in a loop, and by scipy."""

from collections import defaultdict
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, norm

from refshard.events.timeline import UNKNOWN, Kind
from refshard.tracing.figures import Contention, Slowdown
from refshard.tracing.operators import find_contention, same_work
from tests.tracing.small import NAMES, Row, timeline_of

Run = tuple[int, int, int]
"""Of which operands a kernel ran, how long, and how much of that within communication."""


def compared(runs: list[Run]) -> Contention | None:
    """Runs of one kernel, one after the other."""
    rows, operands = [], []
    for n, (code, length, part) in enumerate(runs):
        rows.append(Row(kind=Kind.COMPUTE, lane=0, start=100 * n, end=100 * n + length, launch=0))
        operands.append(code)
        if part:
            rows.append(Row(kind=Kind.COMM, lane=1, start=100 * n, end=100 * n + part, launch=0, name=2))
    rows.sort(key=lambda row: (row.start, row.end, row.lane))
    timeline = timeline_of(rows)
    mine = np.flatnonzero(timeline.spans.of_kind(Kind.COMPUTE))
    classes = np.zeros(len(mine), np.int8)
    return find_contention(timeline, mine, classes, np.array(operands, np.int32), dict(enumerate(NAMES)))


def only(found: Contention | None) -> Slowdown:
    assert found is not None
    (one,) = found.kernels
    assert found.classes == (Slowdown(**{**{f: getattr(one, f) for f in one.__struct_fields__}, "name": one.kind}),)
    return one


def rank_sums(groups: list[tuple[list[int], list[int]]]) -> float:
    """The one-sided chance of ranks as high beside, group by group as scipy has it, joined with weights 1 / (n + 1)."""
    excess = variance = 0.0
    for beside, alone in groups:
        count = len(beside) + len(alone)
        u, p = mannwhitneyu(beside, alone, use_continuity=False, alternative="greater", method="asymptotic")
        off = u - len(beside) * len(alone) / 2
        excess += off / (count + 1)
        if off:
            variance += (off / norm.isf(p) / (count + 1)) ** 2
        else:  # z is 0, so that p does not tell the spread
            _, ties = np.unique([*beside, *alone], return_counts=True)
            spread = count + 1 - float((ties**3 - ties).sum()) / (count * (count - 1))
            variance += len(beside) * len(alone) / 12 * spread / (count + 1) ** 2
    return 1.0 if variance == 0 else float(norm.sf(excess / variance**0.5))


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 9)).map(lambda r: (r[0], r[1], min(r[1:]))),
        max_size=40,
    )
)
def test_it_is_the_difference_of_medians_where_rank_sums_tell_one(runs: list[Run]) -> None:
    found = compared(runs)
    groups: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for code, length, part in runs:
        if 2 * part > length or not part:
            groups[code][part == 0].append(length)
    alike = [pair for pair in groups.values() if min(map(len, pair)) >= 3]
    everything = sum(length for _, length, part in runs if 2 * part > length)
    if not everything:
        assert found is None
        return
    assert found is not None
    assert (found.beside_ns, found.shapeless_ns) == (everything, 0)
    assert found.compared_ns == sum(sum(beside) for beside, _ in alike)
    if not alike:
        assert found.kernels == found.classes == ()
        return
    one = only(found)
    assert one.runs == sum(len(beside) for beside, _ in alike)
    assert one.beside_ns == round(sum(len(beside) * median(beside) for beside, _ in alike))
    assert one.alone_ns == round(sum(len(beside) * median(alone) for beside, alone in alike))
    if abs((chance := rank_sums(alike)) - 0.025) > 1e-6:
        assert one.slower == (one.beside_ns > one.alone_ns and chance < norm.sf(1.96))
    assert found.lost_ns == one.lost_ns == (one.beside_ns - one.alone_ns if one.slower else 0)


def test_a_run_is_beside_communication_if_more_than_half_of_it_is() -> None:
    """The median of 4 runs is half-way between the middle two. Of a run half within communication nothing is said."""
    alone = [(1, length, 0) for length in (10, 10, 12, 14)]
    one = only(compared([*alone, (1, 20, 11), (1, 20, 20), (1, 26, 20), (1, 30, 16), (1, 40, 20)]))
    assert (one.runs, one.beside_ns, one.alone_ns, one.lost_ns) == (4, 4 * 23, 4 * 11, 4 * 12)
    few = compared([*alone, (1, 20, 11), (1, 20, 20), (1, 20, 10)])
    assert few is not None
    assert (few.kernels, few.beside_ns, few.compared_ns) == ((), 40, 0)


@pytest.mark.parametrize(
    ("beside", "alone", "lost"),
    [
        ((11, 12, 13), (8, 9, 10), 9),  # 3 above 3: z = 1.964
        ((11, 12, 9), (8, 10, 10), 0),  # mixed: chance
        ((8, 9, 10), (11, 12, 13), 0),  # faster: nothing is lost, and nothing won
        ((10, 10, 10), (10, 10, 10), 0),
    ],
)
def test_a_difference_within_noise_or_the_wrong_way_is_no_loss(
    beside: tuple[int, ...], alone: tuple[int, ...], lost: int
) -> None:
    one = only(compared([*((1, ns, ns) for ns in beside), *((1, ns, 0) for ns in alone)]))
    assert (one.lost_ns, one.slower, one.times is None) == (lost, lost > 0, lost == 0)


@pytest.mark.parametrize(
    ("groups", "slower"),
    [
        ([((3, 3, 3, 4, 3), (2, 3, 3, 2, 2))], True),  # but for its ties z would be 1.87
        ([((1, 2, 4, 2), (1, 1, 1)), ((5, 3, 5), (4, 4, 3, 2, 3, 2, 4, 2, 3, 5, 5, 3))], True),  # unweighted 1.86
        ([((2,) * 12, (1,) * 12), ((80, 81, 82), (93, 94, 95))], False),  # most runs are slower, but all take less
    ],
)
def test_rank_sums_are_joined_over_shapes(groups: list[tuple[tuple[int, ...], tuple[int, ...]]], slower: bool) -> None:
    runs = [
        (code, ns, part and ns)
        for code, pair in enumerate(groups)
        for part, lengths in zip((1, 0), pair)
        for ns in lengths
    ]
    assert (rank_sums([(list(beside), list(alone)) for beside, alone in groups]) < norm.sf(1.96)) or not slower
    assert only(compared(runs)).slower is slower


def test_shapes_tell_runs_of_one_kernel_apart() -> None:
    """One kernel with two shapes, the longer only beside communication: nothing can be compared."""
    assert only(compared([*[(1, 1, 0)] * 3, *[(1, 5, 5)] * 3])).lost_ns == 12
    apart = compared([*[(1, 1, 0)] * 3, *[(2, 5, 5)] * 3])
    assert apart is not None
    assert (apart.kernels, apart.compared_ns, apart.beside_ns, apart.shapeless_ns) == ((), 0, 15, 0)
    shapeless = compared([*[(UNKNOWN, 1, 0)] * 3, *[(UNKNOWN, 5, 5)] * 3])
    assert shapeless is not None
    assert (shapeless.kernels, shapeless.shapeless_ns) == ((), 15), "one name alone does not say that work is the same"


class Layers:
    """Kernels of layers in steps, launched in turn: ``(step, unit, kernel)``, each by number."""

    def __init__(self, *kernels: tuple[int, int, int], geometry: str = " [8, 1, 1] [128, 1, 1]") -> None:
        rows = [
            Row(kind=Kind.COMPUTE, lane=0, start=n, end=n + 1, launch=n, unit=unit, name=name)
            for n, (_, unit, name) in enumerate(kernels)
        ]
        steps = np.array([step for step, _, _ in kernels], np.int32)
        signatures = tuple(name + geometry for name in NAMES)
        self.spans = replace(timeline_of(rows).spans, steps=steps, signature_names=signatures)

    def works(self, operands: list[int] | None = None) -> list[int]:
        """The works of the kernels, numbered by their first occurrence."""
        count = len(self.spans)
        codes = np.array(operands or [UNKNOWN] * count, np.int32)
        numbers: dict[int, int] = {UNKNOWN: UNKNOWN}
        found = same_work(self.spans, np.arange(count), codes).tolist()
        return [numbers.setdefault(code, len(numbers) - 1) for code in found]


def test_without_shapes_the_same_place_in_the_same_layer_is_the_same_work() -> None:
    alike = Layers((0, 0, 0), (0, 0, 3), (0, 0, 0), (0, 1, 0), (0, 1, 3), (0, 1, 0), (1, 0, 0), (1, 0, 3), (1, 0, 0))
    assert alike.works() == [0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_layers_that_run_other_kernels_do_other_work() -> None:
    """The second layer has one kernel more, the third has them in another order."""
    assert Layers((0, 0, 0), (0, 0, 3), (0, 1, 0), (0, 1, 3), (0, 1, 3)).works() == [0, 1, 2, 3, 4]
    assert Layers((0, 0, 0), (0, 0, 3), (0, 1, 3), (0, 1, 0)).works() == [0, 1, 2, 3]


def test_without_units_it_is_the_same_place_in_the_same_step() -> None:
    none = UNKNOWN
    assert Layers((0, none, 0), (0, none, 0), (1, none, 0), (1, none, 0)).works() == [0, 1, 0, 1]
    assert Layers((0, none, 0), (0, none, 0), (1, none, 0)).works() == [0, 1, 2]


def test_shapes_decide_where_they_are_known() -> None:
    kernels = ((0, UNKNOWN, 0), (0, UNKNOWN, 0), (1, UNKNOWN, 0), (1, UNKNOWN, 3))
    assert Layers(*kernels).works([5, 5, 5, 5]) == [0, 0, 0, 1]
    assert Layers(*kernels).works([5, 6, 6, UNKNOWN]) == [0, 1, 1, 2]
    assert Layers(*kernels, geometry="  ").works([5, 5, UNKNOWN, UNKNOWN]) == [0, 0, UNKNOWN, UNKNOWN]
