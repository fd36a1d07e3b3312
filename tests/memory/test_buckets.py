"""DDP's buckets: sizes by hand, and those that torch's own assignment makes of a model."""

import pytest
import torch
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from refshard.estimate.recipe import RECIPES
from refshard.memory.buckets import Buckets
from refshard.models.llama import Llama
from refshard.specs.model import load_model

DDP = RECIPES["ddp"]


def test_a_bucket_is_full_with_the_gradient_that_reaches_its_limit_and_the_first_sooner() -> None:
    buckets = Buckets(DDP, 4)
    mib = 2**20 // 4
    assert [buckets.add(numel) for numel in (mib // 2, mib, 24 * mib, mib, 25 * mib, 7)] == [
        0, mib // 2 + mib, 0, 25 * mib, 25 * mib, 0,
    ]  # fmt: skip
    assert (buckets.take_rest(), buckets.take_rest()) == (7, 0)


@pytest.mark.parametrize("model", ["llama-tiny", "llama-mini", "llama3.2-1b-cut4"])
def test_buckets_are_those_that_torch_assigns(model: str) -> None:
    with torch.device("meta"):
        registered = list(Llama(load_model(model)).parameters())
    parameters: list[torch.Tensor] = [*reversed(registered)]
    limits = [DDP.first_bucket_bytes, DDP.bucket_bytes]
    theirs, _ = _compute_bucket_assignment_by_size(parameters, limits, [False] * len(parameters))
    ours = Buckets(DDP, 4)
    full = [ours.add(parameter.numel()) for parameter in parameters]
    sizes = [size for size in (*full, ours.take_rest()) if size]
    assert sizes == [sum(parameters[index].numel() for index in bucket) for bucket in theirs]
    assert len(sizes) >= 2
