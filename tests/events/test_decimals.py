"""Nanoseconds from decimal text, against Python's own decimals."""

from decimal import ROUND_HALF_UP, Decimal

from hypothesis import given
from hypothesis import strategies as st

from refshard.events.decimals import nanoseconds

numbers = st.one_of(
    st.integers(-(10**15), 2 * 10**15).map(str),
    st.tuples(st.integers(0, 2 * 10**15), st.integers(0, 999)).map(lambda p: f"{p[0]}.{p[1]:03d}"),
    st.decimals(-(10**9), 4 * 10**15, places=6).map(str),
    st.floats(0, 4e15).map(repr),
    st.sampled_from(
        ["0", "-0.5", "0.0005", "1e3", "4458676522690.655", "1790857026000000.125", "4611686018427387.903"]
    ),
)


@given(st.lists(numbers, max_size=20))
def test_nanoseconds_equal_exact_decimals(texts: list[str]) -> None:
    found, known = nanoseconds([text.encode() for text in texts])
    assert known.all()
    assert found.tolist() == [int((Decimal(t) * 1000).to_integral_value(ROUND_HALF_UP)) for t in texts]


def test_what_is_no_time_is_marked_and_costs_its_neighbours_nothing() -> None:
    texts = [
        b"7.5", b"null", b"[1, 2]", b'"12.5"', b"", b"1e999", b"99999999999999999999", b"8", b"9223372036854775.807",
    ]  # fmt: skip
    found, known = nanoseconds(texts)
    assert known.tolist() == [True, False, False, True, False, False, False, True, False]
    assert found[known].tolist() == [7500, 12500, 8000]
    assert not found[~known].any()


def test_a_number_beyond_any_clock_is_no_time_among_plain_ones() -> None:
    found, known = nanoseconds([b"9223372036854775.807", b"99999999999999999999", b"7"])
    assert known.tolist() == [False, False, True]
    assert found.tolist() == [0, 0, 7000]


def test_none_is_none() -> None:
    found, known = nanoseconds([])
    assert len(found) == len(known) == 0
