"""The fingerprint of machine and software."""

import platform
import sys

import torch

from refshard.harness.environment import available_cores, capture_environment, measure_gemm


def test_environment_describes_this_machine() -> None:
    found = capture_environment(threads_per_rank=1)
    assert found.python == platform.python_version()
    assert found.torch == torch.__version__
    assert found.logical_cores == available_cores() >= 1
    assert found.memory_bytes > 2**30
    assert "gloo" in found.backends
    assert found.argv == ("refshard", *sys.argv[1:])
    assert found.gemm_flops_per_s > 1e9


def test_the_id_is_that_of_what_must_match_and_not_of_the_moment() -> None:
    first, again = capture_environment(1), capture_environment(1)
    assert first.id == again.id
    assert capture_environment(2).id != first.id


def test_times_over_a_network_are_not_comparable_with_others() -> None:
    alone, joined = capture_environment(1), capture_environment(1, "2 hosts joined at 2 Gbit/s")
    assert (alone.network, joined.network) == ("", "2 hosts joined at 2 Gbit/s")
    assert joined.id not in (alone.id, capture_environment(1, "2 hosts joined at 1 Gbit/s").id)


def test_gemm_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    measure_gemm(1, size=64, seconds=0.01)
    assert torch.get_num_threads() == before
