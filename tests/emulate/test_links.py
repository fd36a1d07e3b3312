"""Links and communicators serve in the order of arrival; by hand, and whatever arrives."""

from hypothesis import given
from hypothesis import strategies as st

from refshard.costs import CollectiveCost, Link
from refshard.emulate.links import Communicator, Links, Window


def cost(transfer_us: int, latency_us: int = 0, link: Link = "within") -> CollectiveCost:
    return CollectiveCost(link, transfer_us * 1e-6, latency_us * 1e-6, "ring")


def us(window: Window) -> tuple[int, int]:
    return window.start_ns // 1000, window.end_ns // 1000


def test_two_groups_queue_for_one_link_and_not_for_another() -> None:
    links = Links()
    groups = [Communicator(1) for _ in range(3)]
    assert us(links.place(cost(10), groups[0], 0)) == (0, 10)
    assert us(links.place(cost(5), groups[1], 2_000)) == (10, 15)
    assert us(links.place(cost(5, link="between"), groups[2], 2_000)) == (2, 7)


def test_the_next_ones_bytes_move_during_a_latency() -> None:
    links = Links()
    assert us(links.place(cost(10, 8), Communicator(1), 0)) == (0, 18)
    assert us(links.place(cost(10, 8), Communicator(1), 0)) == (10, 28)


def test_a_communicator_of_one_at_a_time_waits_for_the_latency_too() -> None:
    links, group = Links(), Communicator(1)
    links.place(cost(10, 8), group, 0)
    assert us(links.place(cost(10, 8), group, 0)) == (18, 36)


def test_a_communicator_of_two_holds_back_the_third() -> None:
    links, group = Links(), Communicator(2)
    found = [us(links.place(cost(10, 50), group, 0)) for _ in range(3)]
    assert found == [(0, 60), (10, 70), (60, 120)]


def test_what_costs_nothing_waits_for_its_turn_all_the_same() -> None:
    links, group = Links(), Communicator(1)
    links.place(cost(10), group, 0)
    assert us(links.place(cost(0), group, 0)) == (10, 10)


calls = st.lists(
    st.tuples(
        st.integers(0, 30), st.integers(0, 20), st.integers(0, 20), st.sampled_from(["within", "between"]),
        st.integers(0, 2),
    )
)  # fmt: skip


@given(calls, st.integers(1, 3))
def test_a_link_carries_one_at_a_time_and_a_communicator_as_many_as_it_can(
    arriving: list[tuple[int, int, int, Link, int]], at_once: int
) -> None:
    links, groups = Links(), [Communicator(at_once) for _ in range(3)]
    now, carried, running = 0, dict[Link, list[tuple[int, int]]](), dict[int, list[tuple[int, int]]]()
    for after, transfer, latency, link, group in arriving:
        now += after
        start, end = us(links.place(cost(transfer, latency, link), groups[group], now * 1000))
        assert start >= now
        assert end == start + transfer + latency
        assert all(start >= other for _, other in carried.get(link, []))
        assert sum(begun <= start < ended for begun, ended in running.get(group, [])) < at_once
        carried.setdefault(link, []).append((start, start + transfer))
        running.setdefault(group, []).append((start, end))
