"""Which traces are the ranks of one job."""

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from refshard.analysis.jobs import Identity, group, identity_of, rank_in_name
from refshard.errors import TraceError
from refshard.events.reader import read_events
from tests.analysis.handmade import BASE_US, event, write


def identity(rank: int | None = 0, start: int = 0) -> Identity:
    return Identity(
        path=Path(f"{rank}.json"), rank=rank, world_size=2, backend="nccl", start=start, end=start + 100, facts="A100"
    )


def test_ranks_of_one_run_are_one_job() -> None:
    assert group([identity(0), identity(1, start=50)]) == [0, 0]


@pytest.mark.parametrize(
    "other",
    [
        identity(0),
        identity(None),
        identity(1, start=100),
        replace(identity(1), world_size=4),
        replace(identity(1), world_size=None),
        replace(identity(1), backend="gloo"),
        replace(identity(1), facts="B200"),
    ],
    ids=["same rank", "no rank", "later", "other world", "no world", "other backend", "other device"],
)
def test_what_contradicts_is_a_job_of_its_own(other: Identity) -> None:
    assert group([identity(0), other]) == [0, 1]


def test_interleaved_jobs_are_told_apart_by_their_times() -> None:
    ranks = [identity(0), identity(0, start=1000), identity(1, start=1010), identity(1, start=20)]
    assert group(ranks) == [0, 1, 1, 0]


def test_one_job_is_taken_at_its_word_but_for_a_rank_given_twice() -> None:
    assert group([identity(0), replace(identity(1), backend="gloo"), identity(None)], one_job=True) == [0, 0, 0]
    with pytest.raises(TraceError, match=r"--job takes each rank once, but 1.json and 1.json are both rank 1"):
        group([identity(1), identity(1)], one_job=True)


def test_identity_comes_from_the_metadata(tmp_path: Path) -> None:
    info, device = {"rank": 5, "world_size": 8, "backend": "nccl"}, [{"name": "A100"}]
    events = [event("aten::mm", 3, 4)]
    path = write(tmp_path / "t.json", events, baseTimeNanoseconds=7, deviceProperties=device)
    path.write_text(path.read_text().replace('{"rank": 0}', json.dumps(info)))
    found = identity_of(read_events(path))
    assert (found.rank, found.world_size, found.backend) == (5, 8, "nccl")
    assert (found.start, found.end) == (BASE_US * 1000 + 3007, BASE_US * 1000 + 7007)
    assert "A100" in found.facts


@pytest.mark.parametrize("odd", ['"x"', "[1]", '{"rank": "zero", "world_size": true}', '{"pg_config": [3]}', "null"])
def test_odd_metadata_tells_nothing(tmp_path: Path, odd: str) -> None:
    path = write(tmp_path / "t.json", [event("aten::mm", 3, 4)])
    path.write_text(path.read_text().replace('{"rank": 0}', odd))
    found = identity_of(read_events(path))
    assert (found.rank, found.world_size) == (None, None)


def test_a_rank_in_a_files_name() -> None:
    names = ("rank3.json", "a/trace_RANK-12.json.gz", "rank0/t.json")
    assert [rank_in_name(Path(name)) for name in names] == [3, 12, None]


def test_the_files_order_does_not_matter() -> None:
    """Rank 2 was recorded while both others were, which did not overlap."""
    ranks = [identity(0), identity(1, start=150), replace(identity(2, start=50), end=200)]
    for order in permutations(range(3)):
        assert group([ranks[place] for place in order]) == [0, 0, 0]


def test_ranks_that_only_the_names_tell_may_not_repeat_either() -> None:
    nameless = replace(identity(None), path=Path("rank1.json"))
    with pytest.raises(TraceError, match="are both rank 1"):
        group([identity(1), nameless], one_job=True)
