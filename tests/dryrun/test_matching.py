"""Calls of collectives that do or do not meet: recordings made by hand, with known answers."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.mismatch import Fault, Mismatch
from refshard.dryrun.matching import Ran, match
from refshard.dryrun.recording import Flag
from tests.dryrun.made import Made

WORLD = range(4)
COMM, SIDE = 20, 21


def ran(made: Mapping[int, Made], *, whole: bool = True) -> dict[int, Ran]:
    return {rank: Ran(recording=one.recording(), whole=whole) for rank, one in made.items()}


def ranks(count: int = 4) -> tuple[dict[int, Made], int]:
    """Recordings of ranks in one group, and its id."""
    made = {rank: Made(rank=rank, world_size=count) for rank in range(count)}
    (group,) = {one.group(range(count), "0") for one in made.values()}
    return made, group


def only(found: tuple[Mismatch, ...]) -> Mismatch:
    (one,) = found
    return one


def reduces(made: Made, group: int, *, nbytes: int = 4096, place: str = "train.py:7 in main") -> None:
    made.collective("all_reduce", group, nbytes=nbytes, stream=COMM, signature="fp32[1024] -> fp32[1024]", site=place)


def test_the_same_calls_match() -> None:
    made, group = ranks()
    for one in made.values():
        for _ in range(3):
            reduces(one, group)
            one.synchronise(stream=COMM)
            one.mark()
    assert match(ran(made)).mismatches == ()


def test_a_call_under_a_condition_meets_the_next_call_of_the_others() -> None:
    made, group = ranks()
    for rank, one in made.items():
        one.mark()
        if rank == 0:
            one.collective("barrier", group, nbytes=4, stream=COMM, site="train.py:5 in log\ntrain.py:9 in <module>")
        reduces(one, group)
    found = only(match(ran(made)).mismatches)
    assert (found.fault, found.step, found.number) == (Fault.DIFFERS, 2, 1)
    assert [side.ranks for side in found.sides] == [(0,), (1, 2, 3)]
    assert str(found) == (
        "rank 0 calls barrier (train.py:5 in log) where ranks 1 to 3 call all_reduce of 4.00 KiB fp32 "
        "(train.py:7 in main); from step 2 on, in the group of ranks 0 to 3"
    )


@pytest.mark.parametrize(
    ("op", "first", "second"),
    [
        ("all_reduce", {"nbytes": 4096}, {"nbytes": 8192}),
        ("all_reduce", {"signature": "fp32[8] -> fp32[8]"}, {"signature": "bf16[16] -> bf16[16]"}),
        ("broadcast", {"peer": 0}, {"peer": 1}),
    ],
)
def test_size_dtype_and_root_must_be_the_same(op: str, first: dict[str, int], second: dict[str, int]) -> None:
    made, group = ranks(2)
    for one, given_ in zip(made.values(), (first, second)):
        one.collective(op, group, **{"nbytes": 4096, "stream": COMM, **given_})  # type: ignore[arg-type]
    assert only(match(ran(made)).mismatches).fault == Fault.DIFFERS


def test_an_all_to_all_may_move_other_bytes_on_each_rank() -> None:
    made, group = ranks(2)
    for rank, one in made.items():
        one.collective("all_to_all", group, nbytes=4096 * (1 + rank), stream=COMM)
    assert match(ran(made)).mismatches == ()


def test_a_rank_that_ends_early_is_waited_for() -> None:
    made, group = ranks()
    for rank, one in made.items():
        for _ in range(2 if rank == 3 else 3):
            reduces(one, group)
            one.mark()
    found = only(match(ran(made)).mismatches)
    assert (found.fault, found.step) == (Fault.MISSING, 3)
    assert [side.ranks for side in found.sides] == [(0, 1, 2), (3,)]
    assert "rank 3 ends without it (last call: all_reduce" in str(found)


def test_nothing_is_known_of_a_rank_after_it_was_cut_off_or_that_did_not_run() -> None:
    made, group = ranks()
    for rank, one in made.items():
        for _ in range(2 if rank == 3 else 3):
            reduces(one, group)
    known = ran(made)
    assert match({**known, 3: replace(known[3], whole=False)}).mismatches == ()
    assert match({rank: known[rank] for rank in (0, 1, 2)}).mismatches == ()
    assert only(match({rank: known[rank] for rank in (0, 3)}).mismatches).fault == Fault.MISSING


def test_two_ranks_that_send_first_wait_for_each_other() -> None:
    made, group = ranks(2)
    for rank, one in made.items():
        for op in ("send", "recv"):
            one.wait(COMM, one.record(0))
            one.collective(op, group, nbytes=4096, stream=COMM, peer=1 - rank, site=f"train.py:{rank} in swap")
            one.wait(0, one.record(COMM))
    found = only(match(ran(made)).mismatches)
    assert found.fault == Fault.DEADLOCK
    assert str(found).startswith(
        "rank 0 waits for rank 1 in send to rank 1 of 4.00 KiB (train.py:0 in swap), while rank 1 waits for rank 0"
    )


@pytest.mark.parametrize("joined", [False, True])
def test_messages_of_one_batch_do_not_wait_for_each_other(joined: bool) -> None:
    made, group = ranks(2)
    for rank, one in made.items():
        one.collective("send", group, nbytes=8, stream=COMM, peer=1 - rank)
        one.wait(COMM, one.record(0))
        one.collective("recv", group, nbytes=8, stream=COMM, peer=1 - rank, flags=Flag.JOINED if joined else 0)
    assert bool(match(ran(made)).mismatches) != joined


def test_messages_on_streams_of_their_own_may_cross() -> None:
    made, group = ranks(2)
    for rank, one in made.items():
        one.collective("send", group, nbytes=8, stream=COMM, peer=1 - rank)
        one.collective("recv", group, nbytes=8, stream=SIDE, peer=1 - rank)
    assert match(ran(made)).mismatches == ()


def test_a_message_that_nobody_receives() -> None:
    made, group = ranks(2)
    made[0].collective("send", group, nbytes=8, stream=COMM, peer=1)
    found = only(match(ran(made)).mismatches)
    assert found.fault == Fault.MISSING
    assert str(found).startswith("rank 0 waits in send to rank 1 of 8 B; rank 1 ends without it and made no call")


def test_a_message_of_another_size_than_is_received() -> None:
    made, group = ranks(2)
    made[0].collective("send", group, nbytes=8, stream=COMM, peer=1)
    made[1].collective("recv", group, nbytes=16, stream=COMM, peer=0)
    assert only(match(ran(made)).mismatches).fault == Fault.DIFFERS


def test_groups_that_two_ranks_use_in_opposite_orders() -> None:
    """Each group's calls match, but a host waits for one before it issues the other."""
    made = {rank: Made(rank=rank, world_size=2) for rank in range(2)}
    for rank, one in made.items():
        groups = [one.group(range(2), "0"), one.group(range(2), "1")]
        for number, group in enumerate(groups if rank == 0 else groups[::-1]):
            one.collective("all_reduce", group, nbytes=8, stream=COMM + number)
            one.synchronise(stream=COMM + number)
    assert only(match(ran(made)).mismatches).fault == Fault.DEADLOCK


def test_groups_in_opposite_orders_on_streams_of_their_own_do_not_hang() -> None:
    made = {rank: Made(rank=rank, world_size=2) for rank in range(2)}
    for rank, one in made.items():
        groups = [(one.group(range(2), "0"), COMM), (one.group(range(2), "1"), SIDE)]
        for group, stream in groups if rank == 0 else groups[::-1]:
            one.collective("all_reduce", group, nbytes=8, stream=stream)
        one.synchronise()
    assert match(ran(made)).mismatches == ()


def test_a_group_that_each_rank_creates_for_itself() -> None:
    made = {rank: Made(rank=rank, world_size=4) for rank in WORLD}
    for rank, one in made.items():
        one.group(WORLD, "0")
        mine = one.group((0, 3) if rank in (0, 3) else (1, 2), "1")
        one.collective("barrier", mine, nbytes=4, stream=COMM)
    found = only(match(ran(made)).mismatches)
    assert found.fault == Fault.GROUP
    assert str(found).startswith("rank 0 creates group 1 of ranks 0 and 3; rank 1 creates group 1 of ranks 1 and 2")


def test_groups_that_are_created_in_another_order() -> None:
    made = {rank: Made(rank=rank, world_size=2) for rank in range(2)}
    for rank, one in made.items():
        one.group(range(2), "0")
        one.collective("barrier", one.group(range(2), "1" if rank == 0 else "2"), nbytes=4, stream=COMM)
    found = only(match(ran(made)).mismatches)
    assert str(found).startswith("rank 0 creates group 1 of ranks 0 and 1; rank 1 creates it as group 2")


def test_units_of_one_size_that_meet_have_each_others_values() -> None:
    made, group = ranks(2)
    for rank, one in made.items():
        for number in range(2) if rank == 0 else (1, 0):
            one.module = f"layers.{number}"
            one.collective("all_gather", group, nbytes=8, stream=COMM)
    found = only(match(ran(made)).mismatches)
    assert (found.fault, found.hangs) == (Fault.VALUES, False)
    assert "all_gather of 8 B in layers.0" in str(found)


def test_calls_from_different_lines_that_met_before_are_named() -> None:
    made, group = ranks(2)
    for rank, one in made.items():
        reduces(one, group)
        if rank == 0:
            reduces(one, group, place="train.py:3 in log")
        reduces(one, group)
        one.collective("barrier", group, nbytes=4, stream=COMM)
    found = only(match(ran(made)).mismatches)
    assert found.number == 4 - 1
    assert found.since == "train.py:3 in log on rank 0 and train.py:7 in main on rank 1"


def test_different_numbers_of_calls_until_the_same_step_are_a_doubt() -> None:
    made, group = ranks(2)
    for rank, one in made.items():
        for _ in range(3):
            if rank == 0:
                reduces(one, group)
            one.mark()
    found = match(ran(made, whole=False))
    assert found.mismatches == ()
    (doubt,) = found.doubts
    assert "stopped after 3 steps" in doubt
    assert "rank 1 made 0, rank 0 made 3" in doubt


CALLS = st.lists(st.sampled_from(["all_reduce", "all_gather", "barrier"]), min_size=1, max_size=12)


@given(calls=CALLS, count=st.integers(2, 5), waits=st.lists(st.booleans(), min_size=12, max_size=12))
def test_any_program_matches_itself(calls: list[str], count: int, waits: list[bool]) -> None:
    made, group = ranks(count)
    for one in made.values():
        for op, blocks in zip(calls, waits):
            one.collective(op, group, nbytes=8, stream=COMM)
            if blocks:
                one.synchronise(stream=COMM)
    assert match(ran(made)).mismatches == ()


@given(calls=CALLS, data=st.data())
def test_a_rank_that_leaves_out_any_call_is_found(calls: list[str], data: st.DataObject) -> None:
    out, who = data.draw(st.integers(0, len(calls) - 1)), data.draw(st.integers(0, 2))
    made, group = ranks(3)
    for rank, one in made.items():
        for place, op in enumerate(calls):
            if (rank, place) != (who, out):
                one.collective(op, group, nbytes=8, stream=COMM)
    found = only(match(ran(made)).mismatches)
    assert found.fault in (Fault.DIFFERS, Fault.MISSING)
    assert found.number - 1 >= out
    assert any(side.ranks == (who,) for side in found.sides)
