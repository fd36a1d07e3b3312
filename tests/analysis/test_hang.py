"""Flight recorder dumps: real hangs of gloo, and NCCL's entries made by hand, with known answers."""

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.hang import Hang, find_hang
from refshard.analysis.mismatch import Fault, Mismatch
from refshard.errors import TraceError
from refshard.events.flight import Flight, flight_of, read_flights

RECORDED = Path(__file__).parents[2] / "docs" / "examples" / "flight_recorder"
STEP = "all_reduce of 4.00 KiB fp32 (flight_recorder/record.py:31 in step)"


class Made:
    """One rank's NCCL dump: calls are numbered by group, as torch does."""

    def __init__(self, rank: int, groups: dict[str, list[int]] | None = None) -> None:
        self.rank, self.groups = rank, {"0": [0, 1, 2]} if groups is None else groups
        self.entries: list[dict[str, Any]] = []
        self._numbers: dict[tuple[str, bool], int] = {}

    def call(
        self, op: str = "all_reduce", *, group: str = "0", numel: int = 1024, dtype: str = "Float", ended: bool = True,
        line: int = 7, message: bool = False, same: bool = False, **changes: Any,
    ) -> "Made":  # fmt: skip
        """``same``: another entry of the coalesced call before."""
        number = self._numbers.get((group, message), 0) + (not same)
        self._numbers[group, message] = number
        frames = [
            {
                "name": "all_reduce",
                "filename": "/venv/lib/python3.12/site-packages/torch/distributed/c10d.py",
                "line": 1,
            },
            {"name": "train", "filename": "/home/me/job/train.py", "line": line},
        ]
        described = "default_pg" if group == "0" else group
        self.entries.append({
            "record_id": len(self.entries), "pg_id": 0, "process_group": (group, described),
            "collective_seq_id": 0 if message else number, "p2p_seq_id": number if message else 0, "op_id": number,
            "profiling_name": f"nccl:{op}", "time_created_ns": 1_000_000_000 * len(self.entries),
            "input_sizes": [[numel]], "output_sizes": [[numel]], "input_dtypes": [dtype], "output_dtypes": [dtype],
            "state": "completed" if ended else "scheduled", "retired": ended, "timeout_ms": 600_000,
            "is_p2p": message, "frames": frames, **changes,
        })  # fmt: skip
        return self

    def dump(self, *, lost: int = 0) -> dict[str, Any]:
        config = {name: {"name": name, "desc": name, "ranks": str(ranks)} for name, ranks in self.groups.items()}
        return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": self.entries[lost:]}

    def flight(self, *, lost: int = 0, written_ns: int = 0) -> Flight:
        return flight_of(self.rank, self.dump(lost=lost), written_ns)


def hang_of(*made: Made | Flight) -> Hang:
    return find_hang({one.rank: one if isinstance(one, Flight) else one.flight() for one in made})


def only(found: Iterable[Mismatch]) -> Mismatch:
    (one,) = found
    return one


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("leaves_early", f"ranks 0 to 2 wait in {STEP}; rank 3 does not call it (last call: {STEP}); call 4, "
         "in the group of ranks 0 to 3"),
        ("data_loader", f"ranks 0 and 2 wait in {STEP}; rank 1 does not call it (last call: {STEP}); call 6, "
         "in the group of ranks 0 to 2"),
        ("other_order", "rank 0 calls broadcast of 4 B fp32 (flight_recorder/record.py:35 in validate) where ranks 1 "
         f"and 2 call {STEP}; call 2, in the group of ranks 0 to 2"),
        ("circle", "rank 0 waits for rank 1 in all_reduce of 4.00 KiB fp32 (flight_recorder/record.py:78 in circle), "
         "while rank 1 waits for rank 0 in all_reduce of 4.00 KiB fp32 (flight_recorder/record.py:78 in circle); in "
         "the group of ranks 0 and 1"),
        ("older_dump", f"rank 1 waits in {STEP}; rank 0 does not call it (last call: {STEP}); call 10, "
         "in the group of ranks 0 to 2"),
    ],
)  # fmt: skip
def test_recorded_hangs_have_their_cause(case: str, says: str) -> None:
    assert str(only(find_hang(read_flights([RECORDED / case])).mismatches)) == says


def test_who_only_waits_for_a_rank_that_waits_itself_is_no_cause() -> None:
    found = find_hang(read_flights([RECORDED / "chain"]))
    assert [[side.ranks for side in one.sides] for one in found.mismatches] == [[(2,), (3,)], [(1,), (3,)]]
    follower = only(found.followers)
    assert follower.group.ranks == (0, 2)
    assert "rank 2 does not call it: it waits in all_reduce of 4.00 KiB fp32" in str(follower)
    assert [(stand.rank, stand.waits) for stand in found.stands] == [(0, True), (1, True), (2, True), (3, False)]


def test_the_cause_leads_to_the_line_of_the_script() -> None:
    places = only(find_hang(read_flights([RECORDED / "leaves_early"])).mismatches).sides[0].call
    assert places is not None
    assert [place.partition(" in ")[2] for place in places.places[:2]] == ["step", "leaves_early"]


def test_a_rank_with_an_older_dump_is_not_blamed() -> None:
    found = find_hang(read_flights([RECORDED / "older_dump"]))
    (doubt,) = found.doubts
    assert doubt.startswith("Ranks 0 and 1 ended")
    assert "which rank 2's dump does not show" in doubt


def test_a_ring_that_dropped_the_beginning_is_read_from_its_first_call_on() -> None:
    found = find_hang(read_flights([RECORDED / "data_loader"]))
    assert {stand.rank: stand.lost for stand in found.stands} == {0: 2, 1: 1, 2: 2}


def test_calls_that_ended_are_no_hang() -> None:
    found = hang_of(*(Made(rank).call().call("broadcast") for rank in range(3)))
    assert (found.mismatches, found.followers, found.doubts, found.silent) == ((), (), (), ())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"numel": 1024}, {"numel": 512}),
        ({"dtype": "Float"}, {"dtype": "BFloat16", "numel": 2048}),
        ({"op": "all_reduce"}, {"op": "all_reduce_barrier"}),
        ({"op": "_all_gather_base"}, {"op": "_reduce_scatter_base"}),
    ],
)
def test_calls_that_meet_must_be_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    made = [Made(rank).call().call(**(other if rank == 2 else one), ended=False) for rank in range(3)]
    found = only(hang_of(*made).mismatches)
    assert (found.fault, found.number) == (Fault.DIFFERS, 2)
    assert [side.ranks for side in found.sides] == [(2,), (0, 1)]


def test_the_same_calls_in_another_order_are_called_so() -> None:
    first, second = {"op": "all_reduce", "line": 7}, {"op": "broadcast", "line": 9}
    made = [Made(0), Made(1), Made(2)]
    for one in made:
        for call in (second, first) if one.rank == 1 else (first, second):
            one.call(**call, ended=False)  # type: ignore[arg-type]
    assert str(only(hang_of(*made).mismatches)) == (
        "rank 1 calls broadcast of 4.00 KiB fp32 (job/train.py:9 in train) where ranks 0 and 2 call all_reduce of 4.00 "
        "KiB fp32 (job/train.py:7 in train) (the same calls in another order); call 1, in the group of ranks 0 to 2"
    )


@pytest.mark.parametrize(
    ("op", "root", "others"),
    [
        (
            "gather",
            {"input_sizes": [[8]], "output_sizes": [[8], [8], [8]]},
            {"input_sizes": [[8]], "output_sizes": [[0]]},
        ),
        ("scatter", {"input_sizes": [[8]] * 3, "output_sizes": [[8]]}, {"input_sizes": [], "output_sizes": [[8]]}),
        ("all_to_all", {"input_sizes": [[8]], "output_sizes": [[8]]}, {"input_sizes": [[4]], "output_sizes": [[12]]}),
    ],
)
def test_what_only_the_root_holds_is_no_difference(op: str, root: dict[str, Any], others: dict[str, Any]) -> None:
    made = [Made(rank).call(op, **(others if rank else root)) for rank in range(3)]
    assert hang_of(*made).mismatches == ()


def test_a_rank_without_a_dump_is_named_and_nothing_else_is_said_of_it() -> None:
    found = hang_of(*(Made(rank).call().call(ended=False) for rank in (0, 2)))
    assert found.silent == (1,)
    assert str(only(found.mismatches)) == (
        "ranks 0 and 2 wait in all_reduce of 4.00 KiB fp32 (job/train.py:7 in train); rank 1 left no dump; call 2, in "
        "the group of ranks 0 to 2"
    )


def test_who_waits_for_a_rank_that_waits_for_one_without_a_dump_is_no_cause() -> None:
    groups = {"a": [0, 1], "b": [1, 2]}
    found = hang_of(Made(0, groups).call(group="a", ended=False), Made(1, groups).call(group="b", ended=False))
    assert "rank 2 left no dump" in str(only(found.mismatches))
    assert only(found.followers).group.name == "a"


def test_a_rank_that_does_not_come_is_a_better_cause_than_one_without_a_dump() -> None:
    found = hang_of(Made(0).call().call(ended=False), Made(2).call())
    assert "rank 2 does not call it" in str(only(found.mismatches))


def test_what_a_ring_dropped_is_not_missing() -> None:
    made = [Made(rank, {"1": [0, 1], "2": [1]}) for rank in (0, 1)]
    made[0].call(group="1", ended=False)
    made[1].call(group="1", ended=False).call(group="2").call(group="2")
    found = find_hang({0: made[0].flight(), 1: made[1].flight(lost=2)})
    assert found.mismatches == ()
    assert found.doubts == (
        "Rank 1's ring dropped its first 2 calls, maybe also call 1 in the group of ranks 0 and 1 (1): record more "
        "(TORCH_FR_BUFFER_SIZE).",
    )


def test_a_dump_from_before_the_others_called_is_no_evidence() -> None:
    called = 5_500_000_000
    waiting = [Made(rank).call(time_created_ns=called, ended=False).flight(written_ns=called + 1) for rank in (0, 1)]
    found = hang_of(*waiting, Made(2).flight(written_ns=called - 1))
    assert found.mismatches == ()
    assert "The dump of rank 2 was written at 00:00:05 UTC" in found.doubts[0]
    assert "rank 2 does not call it" in str(only(hang_of(*waiting, Made(2).flight(written_ns=called + 1)).mismatches))


def test_a_call_that_all_made_and_that_does_not_end_is_stalled() -> None:
    found = only(hang_of(*(Made(rank).call(ended=False) for rank in range(3))).mismatches)
    assert found.fault == Fault.STALLED
    assert "all ranks called it alike, and it does not end" in str(found)


def test_two_groups_in_opposite_orders_on_two_ranks_may_wait_for_each_other() -> None:
    groups = {"0": [0, 1], "1": [0, 1], "2": [0, 1]}
    made = [Made(rank, groups) for rank in (0, 1)]
    for one, order in zip(made, (("1", "2"), ("2", "1"))):
        for group in order:
            one.call(group=group, ended=False)
    assert only(hang_of(*made).mismatches).fault == Fault.DEADLOCK


def test_a_message_without_its_receiver_names_both_ends_by_global_rank() -> None:
    groups = {"0": [0, 1, 2, 3], "pp": [1, 3]}
    made = [Made(1, groups).call("send 0->1", group="pp", message=True, ended=False), Made(3, groups).call()]
    found = only(hang_of(*made).mismatches)
    assert str(found) == (
        "rank 1 waits in send to rank 3 of 4.00 KiB fp32 (job/train.py:7 in train); rank 3 does not call it "
        "(last call: all_reduce of 4.00 KiB fp32 (job/train.py:7 in train)); call 1, in the group of ranks 1 and 3 (pp)"
    )


def test_both_ends_that_receive_first_wait_for_each_other() -> None:
    made = [Made(0, {"0": [0, 1]}), Made(1, {"0": [0, 1]})]
    for one in made:
        one.call(f"recv {one.rank}<-{1 - one.rank}", message=True, ended=False)
    assert str(only(hang_of(*made).mismatches)).startswith(
        "rank 0 waits for rank 1 in recv from rank 1 of 4.00 KiB fp32"
    )


@pytest.mark.parametrize("closing_is_message", [True, False])
def test_a_batch_of_messages_has_ended_when_its_closing_entry_has(closing_is_message: bool) -> None:
    """Torch never updates what is inside, and calls the closing entry a message only in some versions."""
    made = [Made(0, {"0": [0, 1]}), Made(1, {"0": [0, 1]})]
    for one in made:
        peer = 1 - one.rank
        one.call(f"send {one.rank}->{peer}", message=True, ended=False)
        one.call(f"recv {one.rank}<-{peer}", message=True, ended=False, same=True)
        one.call("coalesced", message=True, same=True, is_p2p=closing_is_message, input_sizes=[], input_dtypes=[])
    found = hang_of(*made)
    assert (found.mismatches, found.doubts) == ((), ())
    assert not any(stand.waits for stand in found.stands)


def test_a_coalesced_collective_is_one_call_with_the_bytes_of_its_parts() -> None:
    made = [Made(rank) for rank in range(3)]
    for one in made[:2]:
        one.call("_all_gather_base", ended=False).call("_all_gather_base", ended=False, same=True)
        one.call("ALLGATHER_coalesced", ended=False, same=True, input_sizes=[], output_sizes=[])
    assert "wait in all_gather of 8.00 KiB fp32" in str(only(hang_of(*made).mismatches))


def test_groups_of_one_name_that_share_ranks_must_be_the_same() -> None:
    found = hang_of(
        Made(0, {"5": [0, 1]}).call(group="5"), Made(1, {"5": [1, 2]}).call(group="5"), Made(2, {"5": [1, 2]})
    )
    assert found.mismatches[0].fault == Fault.GROUP
    apart = hang_of(*(Made(rank, {"5": [rank]}).call(group="5") for rank in range(3)))
    assert apart.mismatches == ()


def test_a_group_whose_ranks_gloo_does_not_record_is_not_judged() -> None:
    made = Made(0, {}).call("gloo", group="7", ended=False)
    made.entries[0]["profiling_name"] = "gloo:all_reduce"
    assert "no dump says which ranks are in its group" in str(only(hang_of(made).mismatches))


@given(st.integers(2, 5), st.integers(1, 6), st.data())
def test_the_first_call_that_a_rank_lacks_is_found_whatever_the_rings_dropped(
    ranks: int, calls: int, data: st.DataObject
) -> None:
    absent = data.draw(st.integers(0, ranks - 1))
    flights = {}
    for rank in range(ranks):
        made = Made(rank, {"0": list(range(ranks))})
        for number in range(calls + (rank != absent)):
            made.call(ended=number < calls)
        flights[rank] = made.flight(lost=data.draw(st.integers(0, calls - 1)))
    found = only(find_hang(flights).mismatches)
    assert (found.fault, found.number) == (Fault.MISSING, calls + 1)
    assert [side.ranks for side in found.sides] == [tuple(r for r in range(ranks) if r != absent), (absent,)]


def test_pickles_and_json_are_read_alike(tmp_path: Path) -> None:
    for rank in range(2):
        dump = Made(rank, {"0": [0, 1]}).call(ended=False).dump()
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "a" / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
        (tmp_path / "b" / f"rank{rank}.json").write_text(json.dumps(dump))
    (tmp_path / "a" / "notes.txt").write_text("not a dump")
    one, other = (find_hang(read_flights([tmp_path / name])) for name in "ab")
    assert one == other
    assert one.mismatches


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rank0", pickle.dumps({"version": "2.10", "entries": [_Evil()]}), "is a pickle that asks for builtins.print"),
        ("rank0", b"{", "neither a pickle nor JSON"),
        ("rank0", b"[]", "not a flight recorder dump: it has no version"),
        ("rank0", json.dumps({"version": "1.0", "entries": [{"seq_id": 3}]}).encode(), "record with torch >= 2.4"),
        ("rank0", json.dumps({"version": "2.1", "entries": [{"collective_seq_id": 1}]}).encode(), "record_id"),
        ("dump", b"{}", "must end with its rank"),
    ],
)
def test_what_is_no_dump_is_refused_in_a_sentence(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read_flights([tmp_path / name])


def test_two_dumps_of_a_rank_and_folders_without_dumps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no flight recorder dumps"):
        read_flights([tmp_path])
    for name in ("a_0", "b_0"):
        (tmp_path / name).write_text(json.dumps(Made(0).call().dump()))
    with pytest.raises(TraceError, match=r"b_0: is of rank 0, as .*a_0 is"):
        read_flights([tmp_path])
