"""The op stream, held against the rules that it states and against streams worked out by hand."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.errors import SpecError
from refshard.plan.placement import MODES, Mode, find_mode
from refshard.plan.schedule import (
    MARKERS,
    Op,
    OpKind,
    Slots,
    assign_slots,
    build,
    chain_markers,
    forward_only,
    on_demand,
)

modes = st.sampled_from(sorted(MODES.values(), key=lambda m: m.name))


def chain(n_blocks: int, mode: Mode) -> tuple[tuple[Op, ...], Slots]:
    """Stream and slots of an embedding, ``n_blocks`` blocks and a head."""
    markers = chain_markers(n_blocks + 2)
    slots = assign_slots(markers, [900, *[500] * n_blocks, 700], mode)
    return build(markers, slots, mode), slots


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[tuple[Op, ...], list[int]]:
    """Markers of units that run in any order forward and in any other order backward, and their sizes."""
    n_units = draw(st.integers(2, 9))
    markers = [
        Op(kind, unit, phase)
        for phase in ("forward", "backward")
        for unit in draw(st.permutations(range(n_units)))
        for kind in (OpKind.BEGIN, OpKind.END)
    ]
    return tuple(markers), draw(st.lists(st.sampled_from([500, 700]), min_size=n_units, max_size=n_units))


def short(stream: tuple[Op, ...]) -> str:
    """One letter an op: g(ather) w(ait) ( ) r(elease) R(educe) f(inish), and the unit; upper-case units in backward."""
    letters = {
        OpKind.GATHER: "g", OpKind.WAIT: "w", OpKind.BEGIN: "(", OpKind.END: ")",
        OpKind.RELEASE: "r", OpKind.REDUCE: "R", OpKind.FINISH: "f",
    }  # fmt: skip
    return " ".join(f"{letters[op.kind]}{op.unit}{'b' if op.phase == 'backward' else ''}" for op in stream)


def test_yafsdp_stream_by_hand() -> None:
    stream, _ = chain(3, find_mode("yafsdp"))
    assert short(stream) == (
        "g0 g1 w0 (0 )0 r0 g2 w1 (1 )1 r1 g3 w2 (2 )2 g4 w3 (3 )3 w4 (4 )4 "
        "(4b )4b r4b R4b (3b )3b r3b g1b R3b f4b (2b )2b r2b g0b R2b w1b f3b (1b )1b r1b R1b w0b f2b (0b )0b r0b R0b "
        "f1b f0b"
    )


def test_fsdp_stream_by_hand() -> None:
    stream, _ = chain(2, find_mode("fsdp"))
    assert short(stream) == (
        "g0 g1 w0 (0 )0 r0 g2 w1 (1 )1 r1 g3 w2 (2 )2 r2 w3 (3 )3 "
        "g2b (3b )3b r3b g1b R3b w2b (2b )2b r2b g0b R2b w1b f3b (1b )1b r1b R1b w0b f2b (0b )0b r0b R0b f1b f0b"
    )


@given(shuffled(), modes)
def test_compute_finds_its_unit_gathered_and_alone_in_its_slot(
    given_order: tuple[tuple[Op, ...], list[int]], mode: Mode
) -> None:
    slots = assign_slots(*given_order, mode)
    stream = build(given_order[0], slots, mode)
    state: dict[int, str] = {}
    for op in stream:
        match op.kind:
            case OpKind.GATHER:
                assert state.get(op.unit) is None
                rivals = [u for u in state if slots.parameters.get(u, u) == slots.parameters.get(op.unit, op.unit)]
                assert not rivals, f"{op} while {rivals} hold its slot"
                state[op.unit] = "gathering"
            case OpKind.WAIT:
                assert state[op.unit] == "gathering"
                state[op.unit] = "ready"
            case OpKind.BEGIN | OpKind.END:
                assert state[op.unit] == "ready"
            case OpKind.RELEASE:
                assert state.pop(op.unit) == "ready"
    assert not state, "something stays unsharded after the step"


@given(shuffled(), modes)
def test_gradients_are_reduced_once_and_finished_before_their_slot_is_written_again(
    given_order: tuple[tuple[Op, ...], list[int]], mode: Mode
) -> None:
    slots = assign_slots(*given_order, mode)
    stream = build(given_order[0], slots, mode)
    reducing: list[int] = []
    for op in stream:
        if op.kind is OpKind.REDUCE:
            reducing.append(op.unit)
        elif op.kind is OpKind.FINISH:
            reducing.remove(op.unit)
        elif op.kind is OpKind.BEGIN and op.phase == "backward":
            assert len(reducing) < mode.gradient_slots
            keys = [slots.gradients.get(u) for u in reducing]
            assert slots.gradients.get(op.unit) is None or slots.gradients[op.unit] not in keys
    assert not reducing
    counts = Counter(op.unit for op in stream if op.kind is OpKind.REDUCE)
    assert counts == dict.fromkeys(range(len(given_order[1])), 1)


@given(st.integers(3, 12), modes)
def test_at_most_two_blocks_are_unsharded_at_once(n_blocks: int, mode: Mode) -> None:
    stream, _ = chain(n_blocks, mode)
    live: set[int] = set()
    for op in stream:
        if op.kind is OpKind.GATHER:
            live.add(op.unit)
        elif op.kind is OpKind.RELEASE:
            live.discard(op.unit)
        assert len(live - {0, n_blocks + 1}) <= 2


@given(st.integers(2, 12), modes)
def test_a_gather_is_under_way_while_the_unit_before_computes(n_blocks: int, mode: Mode) -> None:
    stream, _ = chain(n_blocks, mode)
    waited = [i for i, op in enumerate(stream) if op.kind is OpKind.WAIT]
    for index in waited[1:]:
        op = stream[index]
        issued = max(i for i in range(index) if stream[i].kind is OpKind.GATHER and stream[i].unit == op.unit)
        assert any(o.kind is OpKind.BEGIN for o in stream[issued:index]), f"{op} overlaps no compute"


def test_ring_serves_the_repeated_size_only() -> None:
    _, slots = chain(4, find_mode("yafsdp"))
    assert slots.parameters == {1: (500, 0), 2: (500, 1), 3: (500, 0), 4: (500, 1)}
    assert slots.gradients == slots.parameters


def test_an_enclosing_unit_stays_gathered_from_first_to_last_use_and_out_of_the_ring() -> None:
    mode = find_mode("yafsdp")
    markers = chain_markers(5, enclosing=True)
    slots = assign_slots(markers, [500] * 5, mode)
    assert 0 not in slots.parameters
    stream = build(markers, slots, mode)
    assert [op.phase for op in stream if op.kind is OpKind.GATHER and op.unit == 0] == ["forward"]
    assert [op.kind for op in stream if op.unit == 0][-3:] == [OpKind.RELEASE, OpKind.REDUCE, OpKind.FINISH]


def test_evaluation_releases_everything_and_reduces_nothing() -> None:
    for mode in MODES.values():
        markers = forward_only(chain_markers(5))
        stream = build(markers, assign_slots(markers, [500] * 5, mode), mode)
        assert {op.phase for op in stream} == {"forward"}
        assert sum(op.kind is OpKind.GATHER for op in stream) == sum(op.kind is OpKind.RELEASE for op in stream) == 5


def test_markers_come_through_unchanged() -> None:
    for mode in MODES.values():
        stream, _ = chain(3, mode)
        assert tuple(op for op in stream if op.kind in MARKERS) == chain_markers(5)


def test_on_demand_gathers_what_is_not_there_and_prefetches_nothing() -> None:
    mode = find_mode("yafsdp")
    begin, end = Op(OpKind.BEGIN, 1, "forward"), Op(OpKind.END, 1, "forward")
    assert short(on_demand(begin, False, [], mode)) == "g1 w1 (1"
    assert short(on_demand(begin, None, [], mode)) == "w1 (1"
    assert short(on_demand(begin, True, [], mode)) == "(1"
    assert short(on_demand(end, True, [], mode)) == ")1 r1"
    assert short(on_demand(Op(OpKind.END, 1, "backward"), True, [2], mode)) == ")1b r1b f2b R1b"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(SpecError, match=r"mode: no mode 'yafsdpp'; did you mean 'yafsdp'\?"):
        find_mode("yafsdpp")
