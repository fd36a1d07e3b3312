"""The op stream, held against the rules that it states and against streams worked out by hand."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from refshard.engine.placement import MODES, Mode, find_mode
from refshard.engine.schedule import (
    MARKERS,
    Op,
    OpKind,
    PassKind,
    Presence,
    Rings,
    UnitFacts,
    assign_rings,
    build,
    chain_markers,
    on_demand,
)
from refshard.errors import SpecError

modes = st.sampled_from(sorted(MODES.values(), key=lambda m: m.name))
sharding = st.sampled_from([m for m in MODES.values() if m.storage != "persistent"])
kinds = st.builds(PassKind, forward=st.booleans(), reduce=st.booleans())


def chain(n_blocks: int, mode: Mode) -> tuple[tuple[Op, ...], Rings]:
    """Stream and rings of an embedding, ``n_blocks`` blocks and a head."""
    markers = chain_markers(n_blocks + 2)
    facts = sized([900, *[500] * n_blocks, 700], mode)
    rings = assign_rings(markers, facts)
    return build(markers, rings, facts), rings


def sized(sizes: list[int], mode: Mode, legs: int = 1) -> list[UnitFacts]:
    """Ordinary units of these sizes."""
    return [UnitFacts(mode, size, legs=legs) for size in sizes]


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[tuple[Op, ...], list[UnitFacts]]:
    """Markers of units that run in any order forward and in any other order backward, and what they are."""
    n_units = draw(st.integers(2, 9))
    markers = [
        Op(kind, unit, phase)
        for phase in ("forward", "backward")
        for unit in draw(st.permutations(range(n_units)))
        for kind in (OpKind.BEGIN, OpKind.END)
    ]
    facts = st.builds(
        UnitFacts, draw(st.sampled_from([modes, st.just(draw(modes))])), st.sampled_from([500, 700]),
        trained=st.booleans(), read_in_backward=st.booleans(), legs=st.sampled_from([1, 2]),
    )  # fmt: skip
    return tuple(markers), draw(st.lists(facts, min_size=n_units, max_size=n_units))


def short(stream: tuple[Op, ...]) -> str:
    """One letter an op, g(ather) w(ait) ( ) r(elease) R(educe) c(ombine) f(inish), the unit, and b in backward."""
    letters = {
        OpKind.GATHER: "g", OpKind.WAIT: "w", OpKind.BEGIN: "(", OpKind.END: ")",
        OpKind.RELEASE: "r", OpKind.REDUCE: "R", OpKind.COMBINE: "c", OpKind.FINISH: "f",
    }  # fmt: skip
    return " ".join(f"{letters[op.kind]}{op.unit}{'b' if op.phase == 'backward' else ''}" for op in stream)


def test_yafsdp_stream_by_hand() -> None:
    stream, _ = chain(3, find_mode("yafsdp"))
    assert short(stream) == (
        "g0 g1 w0 (0 )0 r0 g2 w1 (1 )1 r1 g3 g4 w2 (2 )2 r2 w3 (3 )3 w4 (4 )4 "
        "(4b )4b r4b R4b g2b (3b f4b )3b r3b g1b g0b R3b w2b (2b f3b )2b r2b R2b w1b (1b f2b )1b r1b R1b w0b "
        "(0b f1b )0b r0b R0b f0b"
    )


def test_a_ring_that_is_kept_holds_the_last_blocks_over_the_turn_and_reduces_two_units_at_once() -> None:
    stream, _ = chain(3, replace(find_mode("yafsdp"), keep=True, gradient_slots=2))
    assert short(stream) == (
        "g0 g1 w0 (0 )0 r0 g2 w1 (1 )1 r1 g3 g4 w2 (2 )2 w3 (3 )3 w4 (4 )4 "
        "(4b )4b r4b R4b (3b )3b r3b g1b g0b R3b (2b f4b )2b r2b R2b w1b (1b f3b )1b r1b R1b w0b "
        "(0b f2b )0b r0b R0b f1b f0b"
    )


def test_fsdp_stream_by_hand() -> None:
    stream, _ = chain(2, find_mode("fsdp"))
    assert short(stream) == (
        "g0 g1 w0 (0 )0 r0 g2 w1 (1 )1 r1 g3 w2 (2 )2 r2 w3 (3 )3 "
        "g2b (3b )3b r3b g1b R3b w2b (2b f3b )2b r2b g0b R2b w1b (1b f2b )1b r1b R1b w0b (0b f1b )0b r0b R0b f0b"
    )


@given(shuffled(), kinds)
def test_compute_finds_its_unit_gathered_and_alone_in_its_slot(
    given_order: tuple[tuple[Op, ...], list[UnitFacts]], kind: PassKind
) -> None:
    markers, facts = given_order
    rings = assign_rings(markers, facts)
    state: dict[int, str] = {}
    for op in build(markers, rings, facts, kind):
        match op.kind:
            case OpKind.GATHER:
                assert state.get(op.unit) is None
                rivals = [u for u in state if rings.get(u, u) == rings.get(op.unit, op.unit)]
                assert not rivals, f"{op} while {rivals} hold its slot"
                state[op.unit] = "gathering"
            case OpKind.WAIT:
                assert state[op.unit] == "gathering"
                state[op.unit] = "ready"
            case OpKind.BEGIN | OpKind.END:
                unread = op.phase == "backward" and not facts[op.unit].read_in_backward
                assert unread or state[op.unit] == "ready"
            case OpKind.RELEASE:
                assert state.pop(op.unit) == "ready"
    read = {u for u, f in enumerate(facts) if kind.forward or f.read_in_backward}
    kept = {unit for unit in read if facts[unit].mode.parameters == "replicate"}
    assert state.keys() == kept, "sharded parameters stay unsharded after the step, or replicated ones do not"


@given(shuffled(), kinds)
def test_gradients_are_reduced_once_and_so_many_at_a_time(
    given_order: tuple[tuple[Op, ...], list[UnitFacts]], kind: PassKind
) -> None:
    markers, facts = given_order
    rings = assign_rings(markers, facts)
    held: list[int] = []
    legs: dict[int, list[OpKind]] = {}
    for op in build(markers, rings, facts, kind):
        if op.kind in (OpKind.REDUCE, OpKind.COMBINE, OpKind.FINISH):
            legs.setdefault(op.unit, []).append(op.kind)
        if op.kind is OpKind.REDUCE:
            held.append(op.unit)
            bounded = [u for u in held if facts[u].mode.gradient_storage != "persistent"]
            assert len(bounded) <= facts[op.unit].mode.gradient_slots
        elif op.kind in (OpKind.COMBINE, OpKind.FINISH) and op.unit in held:
            held.remove(op.unit)
    assert not held
    combine = {1: [], 2: [OpKind.COMBINE]}
    reduced = [u for u, f in enumerate(facts) if f.reduces(kind)]
    assert legs == {u: [OpKind.REDUCE, *combine[facts[u].legs], OpKind.FINISH] for u in reduced}


@given(st.integers(3, 12), sharding)
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
    assert len(waited) >= n_blocks + 2
    for index in waited[1:]:
        op = stream[index]
        issued = max(i for i in range(index) if stream[i].kind is OpKind.GATHER and stream[i].unit == op.unit)
        assert any(o.kind is OpKind.BEGIN for o in stream[issued:index]), f"{op} overlaps no compute"


def test_ring_serves_the_repeated_size_only() -> None:
    _, rings = chain(4, find_mode("yafsdp"))
    assert rings == {1: (500, 0), 2: (500, 1), 3: (500, 0), 4: (500, 1)}


def test_an_enclosing_unit_stays_gathered_from_first_to_last_use_and_out_of_the_ring() -> None:
    mode = find_mode("yafsdp")
    markers = chain_markers(5, enclosing=True)
    facts = sized([500] * 5, mode)
    rings = assign_rings(markers, facts)
    assert 0 not in rings
    stream = build(markers, rings, facts)
    assert [op.phase for op in stream if op.kind is OpKind.GATHER and op.unit == 0] == ["forward"]
    assert [op.kind for op in stream if op.unit == 0][-3:] == [OpKind.RELEASE, OpKind.REDUCE, OpKind.FINISH]


def test_evaluation_gives_up_what_is_sharded_and_reduces_nothing() -> None:
    for mode in MODES.values():
        markers, facts = chain_markers(5), sized([500] * 5, mode)
        kind = PassKind(training=False, reduce=False)
        stream = build(markers, assign_rings(markers, facts), facts, kind)
        assert {op.phase for op in stream} == {"forward"}
        counts = Counter(op.kind for op in stream)
        assert counts[OpKind.GATHER] == 5
        assert counts[OpKind.RELEASE] == (0 if mode.parameters == "replicate" else 5)


def test_backward_alone_gathers_ahead_of_itself() -> None:
    markers, facts = chain_markers(5), sized([900, 500, 500, 500, 700], find_mode("yafsdp"))
    stream = build(markers, assign_rings(markers, facts), facts, PassKind(forward=False))
    assert short(stream) == (
        "g4b g3b w4b (4b )4b r4b R4b g2b w3b (3b f4b )3b r3b g1b g0b R3b w2b (2b f3b )2b r2b R2b w1b (1b f2b )1b r1b "
        "R1b w0b (0b f1b )0b r0b R0b f0b"
    )


def test_markers_come_through_unchanged() -> None:
    for mode in MODES.values():
        stream, _ = chain(3, mode)
        assert tuple(op for op in stream if op.kind in MARKERS) == chain_markers(5)


def test_zero2_keeps_parameters_from_forward_to_backward() -> None:
    stream, _ = chain(2, find_mode("zero2"))
    assert short(stream) == (
        "g0 g1 w0 (0 )0 g2 w1 (1 )1 g3 w2 (2 )2 w3 (3 )3 "
        "(3b )3b r3b R3b (2b f3b )2b r2b R2b (1b f2b )1b r1b R1b (0b f1b )0b r0b R0b f0b"
    )


def test_zero1_keeps_parameters_from_step_to_step_and_finishes_when_all_is_issued() -> None:
    stream, _ = chain(1, find_mode("zero1"))
    assert short(stream) == "g0 g1 w0 (0 )0 g2 w1 (1 )1 w2 (2 )2 (2b )2b R2b (1b )1b R1b (0b )0b R0b f2b f1b f0b"
    unreduced = build(chain_markers(3), {}, sized([1, 2, 3], find_mode("zero1")), PassKind(reduce=False))
    assert short(unreduced) == "g0 g1 w0 (0 )0 g2 w1 (1 )1 w2 (2 )2 (2b )2b (1b )1b (0b )0b"


def test_the_second_leg_overlaps_the_backward_after_the_next() -> None:
    markers, facts = chain_markers(4), sized([900, 500, 500, 700], find_mode("fsdp"), legs=2)
    stream = build(markers, {}, facts)
    assert short(stream).partition("(3b")[2] == (
        " )3b r3b g1b R3b w2b (2b c3b )2b r2b g0b R2b w1b (1b f3b c2b )1b r1b R1b w0b (0b f2b c1b )0b r0b R0b "
        "f1b c0b f0b"
    )


def test_an_embedding_is_not_gathered_for_its_backward() -> None:
    mode = find_mode("fsdp")
    facts = [UnitFacts(mode, 900, read_in_backward=False), *sized([500, 500, 700], mode)]
    stream = build(chain_markers(4), {}, facts)
    assert [op.phase for op in stream if op.unit == 0 and op.kind is OpKind.GATHER] == ["forward"]


def test_frozen_units_are_gathered_for_backward_and_reduce_nothing() -> None:
    facts = [UnitFacts(find_mode("fsdp"), 500, trained=False)] * 4
    stream = build(chain_markers(4), {}, facts)
    counts = Counter(op.kind for op in stream)
    assert (counts[OpKind.GATHER], counts[OpKind.REDUCE], counts[OpKind.FINISH]) == (7, 0, 0)


def test_on_demand_gathers_what_is_not_there_and_prefetches_nothing() -> None:
    kind = PassKind()

    def ops(
        marker: Op, presence: Presence, reducing: list[int], mode: str = "yafsdp", kind: PassKind = kind, legs: int = 1
    ) -> str:
        return short(on_demand(marker, presence, reducing, sized([500] * 3, find_mode(mode), legs), kind))

    begin, end = Op(OpKind.BEGIN, 1, "forward"), Op(OpKind.END, 1, "forward")
    last = Op(OpKind.END, 1, "backward")
    assert ops(begin, Presence.SHARDED, []) == "g1 w1 (1"
    assert ops(begin, Presence.GATHERING, []) == "w1 (1"
    assert ops(begin, Presence.UNSHARDED, []) == "(1"
    assert ops(end, Presence.UNSHARDED, []) == ")1 r1"
    assert ops(last, Presence.UNSHARDED, [2]) == ")1b r1b f2b R1b"
    assert ops(end, Presence.UNSHARDED, [], "zero2") == ")1"
    assert ops(end, Presence.UNSHARDED, [], "zero2", PassKind(training=False)) == ")1 r1"
    assert ops(last, Presence.UNSHARDED, [], "zero1") == ")1b R1b"
    assert ops(last, Presence.UNSHARDED, [], "zero1", PassKind(reduce=False)) == ")1b"
    assert ops(last, Presence.UNSHARDED, [2], "fsdp", legs=2) == ")1b r1b c2b f2b R1b"
    unread = [UnitFacts(find_mode("fsdp"), 500, read_in_backward=False)] * 2
    begin_backward = Op(OpKind.BEGIN, 1, "backward")
    assert on_demand(begin_backward, Presence.SHARDED, [], unread, kind) == (begin_backward,)


def test_gradients_accumulate_where_they_are_told_to() -> None:
    assert find_mode("fsdp", "unsharded").gradient_storage == "persistent"
    assert find_mode("zero1", "shard").gradients == "shard"
    assert find_mode("yafsdp", "shard") == find_mode("yafsdp")
    with pytest.raises(SpecError, match=r"accumulation: mode 'yafsdp' reuses its gradient buffers .* mode='fsdp'"):
        find_mode("yafsdp", "unsharded")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(SpecError, match=r"mode: no mode 'yafsdpp'; did you mean 'yafsdp'\?"):
        find_mode("yafsdpp")
