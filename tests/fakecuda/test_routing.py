"""Where a dry run has no scores to choose experts by, an assumption chooses, and what follows is computed."""

import pytest

from tests.fakecuda.fresh import Seen, see
from tests.fakecuda.routed_memory_checks import RANKS, SHARES, TOKENS, TOP_K
from tests.fakecuda.routing_checks import MANY

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def seen() -> Seen:
    return see("tests.fakecuda.routing_checks", mode="dry")


def test_experts_of_a_token_differ(seen: Seen) -> None:
    found = seen("distinct")
    assert len(found) == 6
    assert all(found.values()), found


def test_counts_sum_to_choices_and_are_balanced_within_one(seen: Seen) -> None:
    found = seen("counts")
    assert sum(found["balanced"]) == 4100 * 8
    assert set(found["balanced"]) == {256, 257}
    assert found["many"] == [MANY * 8 // 128] * 128


def test_counts_follow_zipf_as_by_hand(seen: Seen) -> None:
    found = seen("counts")
    assert found["zipf, whole"] == [576, 288, 192, 144]  # 1200 * 12/25 * (1, 1/2, 1/3, 1/4)
    # 2402 * 12/25 = 1152.96, and 576.48, 384.32, 288.24
    assert found["zipf, rounded"] == [1153, 577, 384, 288]
    # 2400 * 144/205 are more than there are tokens; 1200 are left to 1/4, 1/9 and 1/16: 708.2, 314.8, 177.0
    assert found["zipf, one with all tokens"] == [1200, 708, 315, 177]


def test_at_worst_all_tokens_go_to_the_first_experts_of_the_rank(seen: Seen) -> None:
    assert seen("counts")["worst"] == [1200, 1200, 0, 0, 0, 0, 0, 0]
    assert seen("worst_of_a_rank") == [[[2, 3]], [[2, 3, 4]]]


def test_all_ways_to_count_agree(seen: Seen) -> None:
    found = seen("ways_to_count")
    assert len(found) == 17
    assert [way for way, right in found.items() if not right] == []


def test_results_that_are_remembered_are_those_of_their_values(seen: Seen) -> None:
    assert seen("remembered") == [True] * 5


def test_other_operators_choose_alike(seen: Seen) -> None:
    found = seen("other_choices")
    even = [128] * 8
    assert found["argmax"] == found["max"] == even
    assert found["multinomial"] == found["first two of an order"] == [256] * 8
    assert found["repeated"] == [2048] * 8
    assert found["bernoulli"] == MANY // 2
    assert (found["order"], found["tokens of an expert"], found["again"]) == (True, True, True)


def test_a_grouped_product_is_one_kernel_in_bf16_and_one_a_group_in_fp32(seen: Seen) -> None:
    assert seen("grouped_products") == {
        "torch.bfloat16": [1, "launch aten::_grouped_mm s0", [1200, 32]],
        "torch.float32": [8, "launch aten::mm s0", [1200, 32]],
    }


def test_tokens_above_an_expert_s_capacity_are_dropped(seen: Seen) -> None:
    assert seen("capacity") == [300 + 288 + 192 + 144] * 2


def test_a_choice_is_named_once_it_is_used(seen: Seen) -> None:
    assert seen("named") == [True, [["aten::topk", "", 5, 12, 1]]]


def test_peers_send_what_the_assumption_says(seen: Seen) -> None:
    found = seen("exchanges")
    for tokens in (1024, MANY):
        even = tokens * 2 // 4
        balanced = {"to": [even] * 4, "from": [even] * 4, "ids": [0, 0, 2 * even, 2 * even, 0, 0, 0, 0]}
        assert found[f"balanced, {tokens}"] == {**balanced, "gathered": True}
        # This rank sends all its tokens to itself, as do the three others.
        worst = {"to": [0, 2 * tokens, 0, 0], "from": [2 * tokens] * 4, "ids": [0, 0, *[4 * tokens] * 2, 0, 0, 0, 0]}
        assert found[f"worst, {tokens}"] == {**worst, "gathered": True}
    assert found["read outside modules"] is False  # though other checks have read many a choice by then
    assert found["place"] == [True, 1, 4]


@pytest.fixture(scope="module")
def peaks() -> list[dict[str, list[int]]]:
    """In a dry run, and as computed by four ranks whose tokens are routed alike."""
    checks = "tests.fakecuda.routed_memory_checks"
    dry = see(checks, mode="dry", ranks=RANKS, alone=True, devices=RANKS)
    return [dry("peaks"), see(checks, mode="host", ranks=RANKS, devices=RANKS)("peaks")]


def test_memory_is_as_where_all_ranks_route_their_tokens_so(peaks: list[dict[str, list[int]]]) -> None:
    dry, computed = peaks
    assert {rule: rows for rule, (_, rows) in computed.items()} == {
        rule: RANKS * sum(shares[:2]) for rule, shares in SHARES.items()
    }
    assert dry == computed
    assert computed["worst"][0] > computed["zipf"][0] > computed["balanced"][0] > RANKS * TOKENS * TOP_K
