"""Layouts: every element in exactly one place, aligned, whatever the shapes and the world size."""

from hypothesis import given
from hypothesis import strategies as st

from refshard.engine.layout import NARROWEST_BYTES, lay_out

shapes = st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes, st.integers(1, 9))
def test_every_element_has_exactly_one_place(given_shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = lay_out([(f"p{i}", s) for i, s in enumerate(given_shapes)], world_size)
    taken = [e for p in layout.parameters for e in range(p.offset, p.offset + p.numel)]
    assert len(taken) == len(set(taken))
    assert all(0 <= e < layout.numel for e in taken)
    assert [p.shape for p in layout.parameters] == given_shapes


@given(shapes, st.integers(1, 9))
def test_alignment_holds_in_the_narrowest_dtype(given_shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = lay_out([(f"p{i}", s) for i, s in enumerate(given_shapes)], world_size)
    assert all(p.offset * NARROWEST_BYTES % 128 == 0 for p in layout.parameters)
    assert layout.shard_numel * world_size == layout.numel
    assert layout.shard_numel * NARROWEST_BYTES % 16 == 0


@given(shapes, st.integers(1, 9))
def test_local_parts_of_all_ranks_tile_each_parameter(given_shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = lay_out([(f"p{i}", s) for i, s in enumerate(given_shapes)], world_size)
    for parameter in layout.parameters:
        tiled: list[int] = []
        for rank in range(world_size):
            start, stop = layout.local_range(parameter, rank)
            assert 0 <= start <= stop <= layout.shard_numel
            tiled += range(rank * layout.shard_numel + start, rank * layout.shard_numel + stop)
        assert tiled == list(range(parameter.offset, parameter.offset + parameter.numel))


def test_padding_is_small() -> None:
    layout = lay_out([("weight", (100, 100)), ("bias", (100,))], 3)
    assert [p.offset for p in layout.parameters] == [0, 10048]
    assert (layout.numel, layout.shard_numel) == (10152, 3384)
