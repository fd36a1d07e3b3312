"""Where a simulated step's time goes, on programs made by hand."""

import pytest

from refshard.simulate.account import CAUSES, account
from refshard.simulate.clock import Rates, schedule
from refshard.timeline import Kind
from tests.simulate.test_clock import comm, item


def waits(**found: float) -> dict[str, float]:
    return {**dict.fromkeys(CAUSES, 0.0), **{cause.replace("_", " "): seconds for cause, seconds in found.items()}}


def test_what_compute_waits_for_first_is_the_first_gather() -> None:
    items = [comm("gather", 3), item("compute", 2, 0)]
    spent = account(items, schedule(items))
    assert spent.exposed_s == waits(first_gather=3)
    assert (spent.compute_s, spent.copies_s, spent.optimizer_s, spent.contention_s) == (2, 0, 0, 0)


def test_a_later_gather_is_put_down_to_its_phase() -> None:
    items = [item("compute", 1), comm("gather", 3), item("compute", 2, 1)]
    assert account(items, schedule(items)).exposed_s == waits(gather_in_forward=2)


def test_what_nothing_follows_is_the_last_reductions() -> None:
    items = [item("compute", 1), comm("reduce", 4, 0)]
    assert account(items, schedule(items)).exposed_s == waits(last_reductions=4)


def test_copies_and_contention_are_told_apart_from_compute() -> None:
    items = [item("compute", 4), comm("gather", 4), item("compute", 1, kind=Kind.COPY)]
    spent = account(items, schedule(items, Rates(compute=0.5)))
    assert (spent.compute_s, spent.copies_s) == (4, 1)
    assert spent.contention_s == pytest.approx(2)
    assert spent.waits_s == 0
