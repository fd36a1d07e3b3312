"""Which collective ranks wait for, from what flight recorders hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from refshard.measure.flight import flight_file, read_flights, waited_for


def entry(number: int, op: str = "nccl:all_gather", *, group: str = "default_pg", **changes: Any) -> dict[str, Any]:
    """A collective as torch's flight recorder writes it, complete unless ``changes`` say otherwise."""
    return {
        "collective_seq_id": number, "profiling_name": op, "process_group": ["0", group], "input_sizes": [[4, 8]],
        "is_p2p": False, "state": "completed", "retired": True, **changes,
    }  # fmt: skip


def flight(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"version": "2.10", "entries": list(entries)}


PENDING: dict[str, Any] = {"state": "started", "retired": False}


def test_a_collective_that_a_rank_never_called_is_what_the_others_wait_for() -> None:
    done = entry(7)
    flights = {rank: flight(done, entry(8, "nccl:reduce_scatter", **PENDING)) for rank in (0, 2, 3)}
    told = waited_for({**flights, 1: flight(done)})
    assert told == (
        "reduce_scatter of 4x8 elements (number 8 of default_pg) was called by ranks 0, 2, 3 and not by rank 1"
    )


def test_the_first_missing_collective_counts_and_not_the_latest() -> None:
    ahead = flight(entry(8), entry(9, "nccl:all_reduce", **PENDING), entry(10, **PENDING))
    told = waited_for({0: ahead, 1: flight(entry(8))})
    assert told == "all_reduce of 4x8 elements (number 9 of default_pg) was called by rank 0 and not by rank 1"


def test_a_collective_that_all_called_and_none_ended() -> None:
    flights = {rank: flight(entry(3, "gloo:broadcast", **PENDING)) for rank in range(2)}
    assert waited_for(flights) == "broadcast of 4x8 elements (number 3 of default_pg) has not ended on ranks 0, 1"


def test_each_process_group_is_told_by_itself() -> None:
    mine = [entry(1, group="shard", **PENDING)]
    flights = {0: flight(*mine, entry(5, group="replicate")), 1: flight(entry(5, group="replicate"))}
    assert waited_for(flights) == "all_gather of 4x8 elements (number 1 of shard) has not ended on rank 0"


@pytest.mark.parametrize("flights", [{}, {0: {}}, {0: flight()}, {0: flight(entry(1)), 1: flight(entry(1))}])
def test_where_nothing_waits_nothing_is_said(flights: dict[int, Any]) -> None:
    assert waited_for(flights) == ""


def test_messages_between_two_ranks_are_no_collectives() -> None:
    assert waited_for({0: flight(entry(1, is_p2p=True, **PENDING)), 1: flight()}) == ""


def test_what_a_rank_did_not_leave_is_left_out(tmp_path: Path) -> None:
    flight_file(tmp_path, 0).write_text(json.dumps(flight(entry(1))))
    flight_file(tmp_path, 1).touch()
    flight_file(tmp_path, 2).write_text('{"entries": [')
    assert read_flights(tmp_path) == {0: flight(entry(1))}
