"""Columns, held against a replay of the op streams, and against plans worked out by hand."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from refshard.engine.arena import Arena, aligned, plan_arena
from refshard.engine.placement import find_mode
from refshard.engine.schedule import Op, OpKind, PassKind, UnitFacts, assign_rings, build, chain_markers
from tests.engine.test_schedule import sized

YAFSDP = find_mode("yafsdp")
KINDS = (PassKind(training=False, reduce=False), PassKind(), PassKind(forward=False))


def chain(embed: int, block: int, head: int, *, blocks: int, times: int = 1, mixed: bool = True) -> Arena:
    """The arena of a chain of units of so many bytes, whose gradients take ``times`` as many."""
    sizes = dict(enumerate([embed, *[block] * blocks, head]))
    ends = UnitFacts(YAFSDP, "embed", read_in_backward=False), UnitFacts(YAFSDP, "head")
    facts = [ends[0], *[UnitFacts(YAFSDP, "block")] * blocks, ends[1]]
    markers = chain_markers(len(sizes))
    rings = assign_rings(markers, facts)
    streams = [build(markers, rings, facts, kind) for kind in KINDS]
    return plan_arena(streams, rings, sizes, {unit: times * size for unit, size in sizes.items()}, mixed=mixed)


def test_columns_of_llama_3_8b_by_hand() -> None:
    """In MiB, bf16 parameters and fp32 gradients: both ends take turns, the blocks do in a ring of two, and their
    gradients likewise.
    """
    arena = chain(1002, 416, 1002, blocks=32, times=2)
    assert [column.nbytes for column in arena.columns] == [1002, 416, 416, 2004, 832]
    assert [len(column.parameters) for column in arena.columns] == [2, 16, 16, 0, 0]
    assert [len(column.gradients) for column in arena.columns] == [0, 0, 0, 2, 32]
    assert arena.bound == 2004 + 2 * 416, "while the head's gradients are reduced, two blocks' parameters are there"


def test_in_fp32_gradients_lie_where_parameters_of_their_size_lay() -> None:
    arena = chain(16, 7, 16, blocks=8)
    assert [column.nbytes for column in arena.columns] == [16, 7, 7, 7]
    assert Counter(arena.columns[0].parameters) == Counter(arena.columns[0].gradients) == Counter([0, 9])
    assert arena.bound == 16 + 2 * 7


def test_gradients_keep_to_themselves_where_they_must() -> None:
    arena = chain(16, 7, 16, blocks=8, mixed=False)
    assert not any(column.parameters and column.gradients for column in arena.columns)
    assert [column.nbytes for column in arena.columns] == [16, 7, 7, 16, 7]


def test_sizes_that_differ_little_share_a_column_and_others_do_not() -> None:
    assert [column.nbytes for column in chain(97, 7, 100, blocks=4, mixed=False).columns][:2] == [100, 7]
    assert [column.nbytes for column in chain(89, 7, 100, blocks=4, mixed=False).columns][:2] == [100, 89]


def test_what_is_used_a_few_times_is_given_back_after_each_use() -> None:
    columns = chain(1002, 416, 1002, blocks=32, times=2).columns
    few, often = "per use", "per pass"
    assert [column.lasting for column in columns] == [few, often, often, few, often]


@st.composite
def ordered(draw: st.DrawFn) -> tuple[tuple[Op, ...], list[UnitFacts], dict[int, int], dict[int, int]]:
    """Markers in any order, what the units are, and bytes of parameters (equal in a size class) and of gradients."""
    n_units = draw(st.integers(2, 8))
    markers = tuple(
        Op(kind, unit, phase)
        for phase in ("forward", "backward")
        for unit in draw(st.permutations(range(n_units)))
        for kind in (OpKind.BEGIN, OpKind.END)
    )
    legs = st.just(draw(st.sampled_from([1, 2])))
    one = st.builds(
        UnitFacts, st.just(YAFSDP), st.sampled_from([500, 700, 900]), read_in_backward=st.booleans(), legs=legs
    )
    facts = draw(st.lists(one, min_size=n_units, max_size=n_units))
    parameters = {unit: int(str(one.size_class)) for unit, one in enumerate(facts)}
    gradients = {unit: draw(st.sampled_from([1, 2])) * size for unit, size in parameters.items()}
    return markers, facts, parameters, gradients


@given(ordered(), st.booleans())
def test_no_two_are_in_a_column_at_once(
    case: tuple[tuple[Op, ...], list[UnitFacts], dict[int, int], dict[int, int]], mixed: bool
) -> None:
    markers, facts, parameters, gradients = case
    rings = assign_rings(markers, facts)
    streams = [build(markers, rings, facts, kind) for kind in KINDS]
    arena = plan_arena(streams, rings, parameters, gradients, mixed=mixed)
    of_parameters = {unit: i for i, column in enumerate(arena.columns) for unit in column.parameters}
    of_gradients = {unit: i for i, column in enumerate(arena.columns) for unit in column.gradients}
    assert of_parameters.keys() == of_gradients.keys() == parameters.keys()
    assert all(parameters[unit] <= arena.columns[i].nbytes for unit, i in of_parameters.items())
    assert all(gradients[unit] <= arena.columns[i].nbytes for unit, i in of_gradients.items())
    most = 0
    for stream in streams:
        held: dict[int, int] = {}  # bytes by column
        for op in stream:
            if op.kind is OpKind.GATHER:
                assert held.setdefault(of_parameters[op.unit], 0) == 0, f"{op} while its column is taken"
                held[of_parameters[op.unit]] = parameters[op.unit]
            elif op.kind is OpKind.RELEASE:
                held[of_parameters[op.unit]] = 0
            elif op.kind is OpKind.REDUCE:
                assert held.setdefault(of_gradients[op.unit], 0) == 0, f"{op} while its column is taken"
                held[of_gradients[op.unit]] = gradients[op.unit]
            elif op.kind is (OpKind.COMBINE if facts[op.unit].legs == 2 else OpKind.FINISH):
                held[of_gradients[op.unit]] = 0
            most = max(most, sum(held.values()))
    assert arena.bound == most <= arena.nbytes


def test_alignment() -> None:
    assert [aligned(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_units_of_one_slot_of_a_ring_share_a_column() -> None:
    facts = sized([*[500] * 5, 900], YAFSDP)
    markers = chain_markers(6)
    rings = assign_rings(markers, facts)
    sizes = {unit: int(str(one.size_class)) for unit, one in enumerate(facts)}
    arena = plan_arena([build(markers, rings, facts)], rings, sizes, {}, mixed=True)
    assert [sorted(column.parameters) for column in arena.columns] == [[5], [0, 2, 4], [1, 3]]
