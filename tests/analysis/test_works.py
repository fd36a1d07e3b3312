"""What spans do: operators, phases and the order of calls, against loops over rows."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.attribution import Work, plain_name, works_of
from refshard.events.timeline import KINDS, UNKNOWN, Collective, Inputs, Kind, Meaning, Spans, Timeline

NAMES = ("aten::mm", "aten::add", "volta_sgemm_128x64_nn", "ampere_sgemm_64x32_nn")
UNITS = ("layers.0", "layers.1")
INPUTS = (Inputs("[8,4]x[4,2]", "bf16"), Inputs("[8]", "fp32"))
MEANINGS = (0, Meaning.FORWARD, Meaning.BACKWARD, Meaning.OPTIMIZER, Meaning.REDUCE, Meaning.REDUCE | Meaning.FORWARD)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One span; UNKNOWN where nothing is told."""

    kind: Kind
    name: int
    operator: int
    launch: int
    step: int
    unit: int
    under: int
    call: int
    inputs: int
    autograd: bool


rows = st.lists(
    st.builds(
        Row, kind=st.sampled_from((Kind.COMPUTE, Kind.COPY, Kind.COMM)), name=st.integers(2, 3),
        operator=st.integers(UNKNOWN, 1), launch=st.integers(UNKNOWN, 30), step=st.integers(UNKNOWN, 1),
        unit=st.integers(UNKNOWN, 1), under=st.sampled_from(MEANINGS).map(int), call=st.integers(UNKNOWN, 9),
        inputs=st.integers(UNKNOWN, 1), autograd=st.booleans(),
    ),
    max_size=14,
)  # fmt: skip


def timeline_of(found: list[Row], collectives: tuple[Collective, ...] = ()) -> Timeline:
    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(row, name) for row in found], dtype)

    places = np.arange(len(found), dtype=np.int64)
    return Timeline(rank=0, windows=(), spans=Spans(
        starts=places, ends=places + 1, kinds=np.array([KINDS.index(row.kind) for row in found], np.int8),
        lanes=np.zeros(len(found), np.int32), names=column("name", np.int32), operators=column("operator", np.int32),
        launches=column("launch", np.int64), queued=column("launch", np.int64), steps=column("step", np.int32),
        units=column("unit", np.int32), under=column("under", np.int16), signatures=column("name", np.int32),
        lane_names=("stream 7",), name_table=NAMES, unit_names=UNITS, calls=column("call", np.int32),
        inputs=column("inputs", np.int32), in_autograd=column("autograd", np.bool_), input_names=INPUTS,
    ), collectives=collectives, on_device=True)  # fmt: skip


def is_backward(row: Row) -> bool:
    return bool(row.autograd or row.under & (Meaning.BACKWARD | Meaning.REDUCE))


def phase(row: Row, found: list[Row]) -> str | None:
    if row.under & Meaning.OPTIMIZER:
        return "optimizer"
    if is_backward(row):
        return "backward"
    later = any(is_backward(x) and x.step == row.step and x.launch > row.launch for x in found)
    return "forward" if row.under & Meaning.FORWARD or (row.launch != UNKNOWN and later) else None


def expected(found: list[Row]) -> list[Work]:
    by_name = [row.operator == UNKNOWN or row.kind is Kind.COMM for row in found]
    names = ["sgemm_nn" if nameless else NAMES[row.operator] for row, nameless in zip(found, by_name)]
    calls: dict[object, list[tuple[int, int]]] = defaultdict(list)
    for place in sorted(range(len(found)), key=lambda place: (found[place].launch, found[place].call)):
        row = found[place]
        if UNKNOWN not in (row.launch, row.call, row.unit):
            of = calls[row.step, row.unit, phase(row, found), names[place]]
            of.append((row.call, place))
    ordinals: dict[int, int] = {}
    for of in calls.values():
        number = -1
        for i, (call, place) in enumerate(of):
            number += i == 0 or call != of[i - 1][0]
            ordinals[place] = number
    return [
        Work(
            kind=row.kind.value, operator=names[place], unit=None if row.unit == UNKNOWN else UNITS[row.unit],
            phase=phase(row, found), dims="" if row.inputs == UNKNOWN else INPUTS[row.inputs].dims,
            dtype="" if row.inputs == UNKNOWN else INPUTS[row.inputs].dtype, ordinal=ordinals.get(place),
            by_name=by_name[place],
        )
        for place, row in enumerate(found)
    ]  # fmt: skip


@given(rows)
def test_each_span_does_what_a_loop_over_rows_says(found: list[Row]) -> None:
    works, codes = works_of(timeline_of(found))
    assert [works[code] for code in codes] == expected(found)
    assert len(set(works)) == len(works)


@given(rows.filter(bool), st.booleans())
def test_a_collectives_spans_do_what_it_does(found: list[Row], sized: bool) -> None:
    works, codes = works_of(timeline_of(found, (Collective(
        op="all_gather", bytes=64 if sized else None, step=0, group="tp", group_size=8, unit="layers.0", rows=(0,)
    ),)))  # fmt: skip
    assert works[codes[0]] == Work(
        kind="comm", operator="all_gather", unit="layers.0", phase=phase(found[0], found), bytes=64 if sized else None,
        group="tp, 8 ranks",
    )  # fmt: skip
    assert [works[code] for code in codes[1:]] == expected(found)[1:]


def test_a_sharded_unit_reduces_in_its_backward() -> None:
    """Over gloo the span is of another thread, and tells no phase."""
    row = Row(
        kind=Kind.COMM, name=2, operator=0, launch=0, step=0, unit=0, under=0, call=0, inputs=UNKNOWN, autograd=False
    )
    for unit, expected_phase in (("layers.0", "backward"), (None, None)):
        collective = Collective(op="reduce_scatter", bytes=64, step=0, unit=unit, rows=(0,))
        works, codes = works_of(timeline_of([row], (collective,)))
        assert works[codes[0]].phase == expected_phase


@pytest.mark.parametrize(("kernel", "plain"), [
    ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_stage4_warpsize2x2x1_tensor16x8x16_kernel",
     "xmma_gemm_bf16bf16_bf16f32_f32_tn_n_stage4_kernel"),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(T::Params)",
     "cutlass::Kernel2"),
    ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::O<2u>, 4>(O*)",
     "at::native::CatArrayBatchedCopy"),
    ("void f<g<(x)1, {lambda(int)#1}>, int (*)(int)>(h)", "f"),
    ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
    ("attn_fwd", "attn_fwd"),
    ("", ""),
    ("128x64", "128x64"),
])  # fmt: skip
def test_a_kernels_plain_name_has_no_arguments_and_no_tiles(kernel: str, plain: str) -> None:
    assert plain_name(kernel) == plain
