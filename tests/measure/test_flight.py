"""Which collective the ranks of a launch wait for, from what their flight recorders left."""

import json
from pathlib import Path

from refshard.measure.flight import flight_file, waited_for
from tests.analysis.test_hang import Made


def leave(folder: Path, *made: Made) -> None:
    for one in made:
        flight_file(folder, one.rank).write_text(json.dumps(one.dump()))


def test_a_collective_that_a_rank_never_called_is_what_the_others_wait_for(tmp_path: Path) -> None:
    leave(tmp_path, *(Made(rank).call().call("_reduce_scatter_base", ended=False) for rank in (0, 2)), Made(1).call())
    assert waited_for(tmp_path) == (
        "ranks 0 and 2 wait in reduce_scatter of 4.00 KiB fp32 (job/train.py:7 in train); rank 1 does not call it "
        "(last call: all_reduce of 4.00 KiB fp32 (job/train.py:7 in train)); call 2, in the group of ranks 0 to 2"
    )


def test_where_nothing_waits_nothing_is_said(tmp_path: Path) -> None:
    assert waited_for(tmp_path) == ""
    leave(tmp_path, *(Made(rank).call() for rank in range(3)))
    assert waited_for(tmp_path) == ""


def test_what_a_rank_did_not_leave_is_left_out(tmp_path: Path) -> None:
    leave(tmp_path, Made(0).call(ended=False))
    flight_file(tmp_path, 1).touch()
    flight_file(tmp_path, 2).write_text('{"entries": [')
    assert "ranks 1 and 2 left no dump" in waited_for(tmp_path)
