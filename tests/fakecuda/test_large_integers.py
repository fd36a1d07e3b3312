"""Integer tensors too large to be resident keep values in a dry run, as long as they consist of few runs."""

import pytest

from tests.fakecuda.fresh import Seen, see
from tests.fakecuda.integer_programs import LARGE

pytestmark = pytest.mark.full

UNKNOWN_WITHIN = [True, False, True]
"""Whether elements before, in and after those that were written to are known."""
SYNCHRONISED = ["launch aten::nonzero s0", "synchronise aten::nonzero s0"]


@pytest.fixture(scope="module")
def seen() -> Seen:
    return see("tests.fakecuda.large_integer_checks", mode="dry")


@pytest.mark.parametrize("check", ["random_programs", "random_programs_at_full_size"])
def test_values_are_the_cpus_on_random_programs(seen: Seen, check: str) -> None:
    assert seen(check) > 20


def test_shares_of_parameters_are_counted_as_yafsdp_counts_them(seen: Seen) -> None:
    found = seen("shares_of_parameters")
    half = (1 << 30) + 1
    assert found.pop("of 16 GiB") == {"counts": [[half, 0, 0], [2, 5, half - 7]], "firsts": [half, 0, 0]}
    assert set(map(tuple, found.values())) == {(True, True)}


def test_launches_and_host_waits_are_as_for_other_tensors(seen: Seen) -> None:
    assert seen("launches") == {
        "by mask": ["launch aten::arange s0", "launch aten::gt s0", *SYNCHRONISED, "launch aten::index s0"],
        "small": ["launch aten::arange s0", "launch aten::gt s0", *SYNCHRONISED, "launch aten::index s0"],
        "reduced": [
            "launch aten::eq s0", "launch aten::sum s0", "launch aten::_local_scalar_dense s0", "synchronise item s0",
        ],
        "copied": [
            "launch aten::copy_ s0", "synchronise copy from host s0", "launch aten::copy_ s0",
            "synchronise copy to host s0",
        ],
    }  # fmt: skip


def test_a_mask_of_known_values_selects_as_many_elements_as_on_a_gpu(seen: Seen) -> None:
    ones = LARGE // 2 + 3
    assert seen("sizes") == {
        "rows": [ones, 3], "column": [ones], "bytes": True, "positions": [[ones, 1], [ones, 2]],
        "masked_select": [[ones], [10_000]], "of a small mask": [[10_000, 3], [10_000, 1]], "nothing": [0, 3],
    }  # fmt: skip


def test_values_are_known_or_marked(seen: Seen) -> None:
    found = seen("values")
    assert {name: value for name, (known, value) in found.items() if known} == {
        "element": True, "list": [13, 14, 15], "down": True, "from one element of it": True, "as another type": 7,
        "extremes": False,
    }  # fmt: skip
    assert set(found) == {
        "element", "list", "down", "from one element of it", "as another type", "extremes", "of many runs", "wrapped",
        "transposed", "by row",
    }  # fmt: skip


@pytest.mark.parametrize("check", ["writes", "collectives"])
def test_what_is_written_by_other_means_is_unknown(seen: Seen, check: str) -> None:
    found = seen(check)
    assert found
    assert {name: known for name, known in found.items() if known != UNKNOWN_WITHIN} == {}


def test_bytes_written_as_another_type_are_unknown(seen: Seen) -> None:
    assert seen("other_types") == [False, False, [True, 2 * LARGE], False]


def test_new_memory_at_an_address_has_no_values(seen: Seen) -> None:
    assert seen("addresses") == {"freed": [True, False], "view": [True], "grown": [False], "emptied": [False]}


def test_small_results_are_written_to_memory_when_the_host_uses_them(seen: Seen) -> None:
    assert seen("results_in_memory") == {
        "by an operator of their own": [True, True], "in part": [True, True], "as bytes": [True, True],
        "after a copy": [True, True], "sent": [True, True], "at an address used again": [True, False],
    }  # fmt: skip
