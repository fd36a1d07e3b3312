"""Memory of a GPU by kind, against tensors of known size on a fake device."""

import pytest

from refshard.quantities import MIB
from tests.fakecuda.fresh import Seen, see

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def seen() -> Seen:
    return see("tests.analysis.gpu_memory_checks", mode="host", memory_bytes=200 * MIB, context_bytes=30 * MIB)


def test_peaks_are_over_what_was_held_before_the_model_but_all_that_is_reserved_counts(seen: Seen) -> None:
    kinds = seen("kinds")
    assert kinds["allocated_bytes"] == kinds["active_bytes"] == (24 + 30) * MIB
    assert kinds["requested_bytes"] == (24 + 30) * MIB - 100
    assert kinds["reserved_bytes"] == (12 + 24 + 30) * MIB


def test_what_the_device_holds_outside_the_allocator_is_told_apart(seen: Seen) -> None:
    kinds = seen("kinds")
    assert kinds["total_bytes"] == 200 * MIB
    assert kinds["outside_bytes"] == 30 * MIB
    assert kinds["used_bytes"] == (12 + 24 + 30) * MIB + 30 * MIB


def test_what_a_stream_still_needs_is_active_and_not_allocated(seen: Seen) -> None:
    found = seen("freed_while_another_stream_uses_it")
    assert found["allocated_bytes"] == 20 * MIB
    assert found["active_bytes"] == (16 + 20) * MIB


def test_retries_and_failures_are_those_of_the_window(seen: Seen) -> None:
    found = seen("retries")
    assert (found["retries"], found["ooms"]) == (3, 1), "one more for what failed"


def test_memory_is_read_without_a_window(seen: Seen) -> None:
    assert seen("now")["allocated_bytes"] == seen("now")["reserved_bytes"] == 26 * MIB


def test_a_cpu_has_none(seen: Seen) -> None:
    assert seen("on_a_cpu")


def test_a_snapshot_tells_what_the_allocator_counts(seen: Seen) -> None:
    found = seen("snapshot")
    assert found["told"] == found["counted"]
    active, in_use, rounding = found["requested"]
    assert active == in_use + 5 * MIB - 3, "the allocator counts what is pending among what is requested"
    assert in_use + rounding == found["told"]["allocated"]
    assert (found["pending"], found["history"]) == (5 * MIB, None)
    assert found["unused"] > 0
    assert (found["streams"], found["kinds"]) == (2, ["large", "small"])
