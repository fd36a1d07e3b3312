"""``refshard trace --hang`` as a user meets it."""

import json
import pickle
from pathlib import Path

import pytest

from tests.analysis.test_hang import Made
from tests.commands.conftest import Command

DUMPS = Path(__file__).parents[2] / "docs" / "examples" / "flight_recorder"


def test_a_hang_is_a_sentence_a_table_and_status_1(refshard: Command) -> None:
    done = refshard("trace", "--hang", str(DUMPS / "chain"))
    assert done.returncode == 1
    assert "HANGS: rank 2 waits in all_reduce of 4.00 KiB fp32" in done.stdout
    assert "Where ranks 0 to 3 stand" in done.stdout
    assert "Held up by these\n\n* rank 0 waits in all_reduce" in done.stdout
    quiet = refshard("trace", "--hang", str(DUMPS / "leaves_early"), "-q")
    assert quiet.stdout.startswith(
        "HANGS: ranks 0 to 2 wait in all_reduce of 4.00 KiB fp32 (flight_recorder/record.py:"
    )


def test_json_has_the_mismatches_of_dry_runs_and_each_ranks_place(refshard: Command) -> None:
    found = json.loads(refshard("trace", "--hang", str(DUMPS / "older_dump"), "--json").stdout)
    assert found["hangs"] is True
    (one,) = found["mismatches"]
    assert (one["fault"], one["hangs"], one["number"], one["group"]["ranks"]) == ("missing", True, 10, [0, 1, 2])
    assert one["says"] == found["verdict"][0].removeprefix("HANGS: ")
    assert [(rank["rank"], rank["waits"], rank["number"]) for rank in found["ranks"]] == [
        (0, False, 9), (1, True, 10), (2, False, found["ranks"][2]["number"]),
    ]  # fmt: skip
    assert found["ranks"][1]["places"][0].endswith(" in step")
    assert len(found["doubts"]) == 1


def test_without_a_hang_the_status_is_0(refshard: Command, tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(Made(rank).call().dump()))
    done = refshard("trace", "--hang", str(tmp_path), "-q")
    assert (done.returncode, done.stdout) == (
        0,
        "No hang found: the 3 calls of ranks 0 to 2 match, and all have ended.\n",
    )
    (tmp_path / "nccl_trace_rank_2").unlink()
    assert "Rank 2 left no dump." in refshard("trace", "--hang", str(tmp_path), "-q").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hang", ".", "--html", "a.html"), "hang: dumps take no option of traces; leave out --html"),
        (("--hang", "."), ".: no flight recorder dumps; their names end with the rank, as nccl_trace_rank_3"),
        (("--hang", "missing_0"), "missing_0: cannot be read ([Errno 2] No such file or directory: 'missing_0')"),
        ((str(DUMPS / "circle" / "nccl_trace_rank_0"),), "is a flight recorder dump; analyse it with"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    refshard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = refshard("trace", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
