"""The fingerprint of machine and software."""

import platform
import sys

import pytest
import torch
from msgspec.structs import replace

from refshard.harness.environment import available_cores, capture_environment, changes, measure_gemm
from tests.harness.fakes import ENVIRONMENT


@pytest.mark.processes
def test_environment_describes_this_machine() -> None:
    found = capture_environment(threads_per_rank=1)
    assert found.python == platform.python_version()
    assert found.torch == torch.__version__
    assert found.logical_cores == available_cores() >= 1
    assert found.memory_bytes > 2**30
    assert "gloo" in found.backends
    assert found.argv == ("refshard", *sys.argv[1:])
    assert found.gemm_flops_per_s > 1e9


@pytest.mark.processes
def test_the_id_is_that_of_what_must_match_and_not_of_the_moment() -> None:
    first, again = capture_environment(1), capture_environment(1)
    assert first.id == again.id
    assert capture_environment(2).id != first.id


@pytest.mark.processes
def test_times_over_a_network_are_not_comparable_with_others() -> None:
    alone, joined = capture_environment(1), capture_environment(1, "2 hosts joined at 2 Gbit/s")
    assert (alone.network, joined.network) == ("", "2 hosts joined at 2 Gbit/s")
    assert joined.id not in (alone.id, capture_environment(1, "2 hosts joined at 1 Gbit/s").id)


def test_gemm_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    measure_gemm(1, size=64, seconds=0.01)
    assert torch.get_num_threads() == before


BEFORE = replace(ENVIRONMENT, memory_bytes=10**9, git_commit="aa", git_dirty=False, code_sha256="c0")


@pytest.mark.parametrize(
    "now",
    [
        {"git_commit": "bb", "git_dirty": True},  # a page of documentation
        {"hostname": "other", "argv": ("refshard", "run", "--resume", "x"), "gemm_flops_per_s": 2e11},
        {"memory_bytes": 10**9 - 10**6},  # another boot of the same machine
    ],
)
def test_what_changes_no_measurement_is_no_change(now: dict[str, object]) -> None:
    assert changes(BEFORE, replace(BEFORE, **now)) == []


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"code_sha256": "c1"}, "code_sha256 was 'c0' and is 'c1'"),  # an edit, committed or not
        ({"memory_bytes": 2 * 10**9}, "memory_bytes was 1000000000 and is 2000000000"),
        ({"network": "2 hosts"}, "network was '' and is '2 hosts'"),
        ({"packages": {"numpy": "2"}}, "packages was {} and is {'numpy': '2'}"),
    ],
)
def test_what_changes_a_measurement_is_told(now: dict[str, object], words: str) -> None:
    assert changes(BEFORE, replace(BEFORE, **now)) == [words]


def test_a_record_from_before_code_was_recorded_has_but_its_commit() -> None:
    older = replace(BEFORE, code_sha256="")
    assert changes(older, BEFORE) == []
    assert changes(older, replace(BEFORE, git_commit="bb")) == ["git_commit was 'aa' and is 'bb'"]
