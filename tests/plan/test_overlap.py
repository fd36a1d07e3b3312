"""What communication costs beside compute, against its definition."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard import resources
from refshard.plan.layers import hidden
from refshard.specs.cluster import load_cluster
from tests.plan.made import cluster

RATE = st.floats(0.05, 1.0)
SECONDS = st.floats(0.0, 100.0)


def at(compute: float, communication: float) -> Any:
    return cluster(compute_beside_communication=compute, communication_beside_compute=communication)


def until_both_are_done(compute_s: float, comm_s: float, slowed: float, slower: float) -> float:
    """Both run at their reduced rates until one is done; the other goes on at its own."""
    together = min(compute_s / slowed, comm_s / slower)
    return together + (compute_s - slowed * together) + (comm_s - slower * together)


@given(compute_s=SECONDS, comm_s=SECONDS, slowed=RATE, slower=RATE)
def test_it_adds_what_two_that_slow_each_other_take_longer(
    compute_s: float, comm_s: float, slowed: float, slower: float
) -> None:
    found = float(hidden(at(slowed, slower), compute_s, comm_s))
    expected = until_both_are_done(compute_s, comm_s, slowed, slower) - compute_s
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert found >= -1e-9


@given(compute_s=SECONDS, comm_s=SECONDS, more=st.floats(0.0, 10.0), slowed=RATE, slower=RATE)
def test_more_of_either_never_ends_earlier(
    compute_s: float, comm_s: float, more: float, slowed: float, slower: float
) -> None:
    on = at(slowed, slower)
    added = float(hidden(on, compute_s, comm_s))
    assert float(hidden(on, compute_s, comm_s + more)) >= added - 1e-9
    assert compute_s + more + float(hidden(on, compute_s + more, comm_s)) >= compute_s + added - 1e-9


def test_known_values() -> None:
    """At 80 % and 50 %: 2 s of communication take 4 s, in which compute loses 0.8 s."""
    on = at(0.8, 0.5)
    assert float(hidden(on, 10.0, 2.0)) == pytest.approx(0.8)
    assert float(hidden(on, 0.0, 2.0)) == 2.0
    assert float(hidden(on, 1.6, 2.0)) == pytest.approx(2 + 1 - 1.6)
    assert hidden(at(1.0, 1.0), 10.0, 2.0) == 0


def test_arrays_are_taken_entry_by_entry() -> None:
    on, compute, comm = at(0.9, 0.7), np.array([1.0, 5.0, 0.0]), np.array([3.0, 1.0, 2.0])
    assert hidden(on, compute, comm).tolist() == [float(hidden(on, a, b)) for a, b in zip(compute, comm)]


@pytest.mark.parametrize("name", sorted(resources.cluster_profiles()))
def test_on_no_cluster_is_overlap_slower_than_one_after_the_other(name: str) -> None:
    on = load_cluster(name)
    assert float(hidden(on, 10.0, 1.0)) <= 1.0
    assert float(hidden(on, 1.0, 10.0)) <= 10.0
