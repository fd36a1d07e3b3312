"""Configurations: what they are made of, and which are refused."""

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.specs.configuration import AXES, Configuration

SIZE = st.integers(1, 16)


@given(sizes=st.fixed_dictionaries(dict.fromkeys(AXES, SIZE)), microbatch=SIZE, microbatches=SIZE)
def test_ranks_are_the_product_of_the_axes_and_the_batch_is_that_of_all_data_ranks(
    sizes: dict[str, Any], microbatch: int, microbatches: int
) -> None:
    made = Configuration(strategy="fsdp2", microbatch=microbatch, microbatches=microbatches, **sizes)
    assert made.world_size == prod(sizes.values())
    assert made.data_ranks == sizes["replicate"] * sizes["shard"]
    assert made.global_batch == made.data_ranks * microbatch * microbatches


def test_expert_ranks_are_among_the_data_and_context_ranks() -> None:
    assert Configuration(strategy="fsdp2", shard=2, replicate=2, context=2, expert=8).world_size == 8


@pytest.mark.parametrize("policy", ["none", "selective", "full", "every-3", "1", "126"])
def test_policies_of_checkpointing(policy: str) -> None:
    assert Configuration(strategy="fsdp2", checkpointing=policy).checkpointing == policy


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shard": 0}, "shard must be >= 1, got 0"),
        ({"tensor": -1}, "tensor must be >= 1, got -1"),
        ({"expert": 0}, "expert must be >= 1, got 0"),
        ({"microbatches": 0}, "microbatches must be >= 1, got 0"),
        (
            {"checkpointing": "every-0"},
            "checkpointing must be 'none', .* of layers, got 'every-0'; choose one",
        ),
        ({"checkpointing": "0"}, "checkpointing must be 'none', .*, got '0'"),
        ({"checkpointing": "auto"}, "checkpointing must be 'none', .*, got 'auto'"),
        (
            {"pipeline": 2, "interleave": 2},
            "must be 1 for schedule '1f1b' .*, got 2 for '1f1b'; change either",
        ),
        ({"pipeline": 2, "schedule": "interleaved"}, "at least 2 for 'interleaved', got 1 for 'interleaved'"),
        ({"interleave": 2, "schedule": "interleaved"}, "interleave must be 1 without a pipeline, got 2; set pipeline"),
        (
            {"shard": 4, "tensor": 2, "expert": 8},
            r"must divide replicate \* shard \* context = 4, got 8; choose",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Configuration(**{"strategy": "fsdp2", **fields})
