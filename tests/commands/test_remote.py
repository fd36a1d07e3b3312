"""Traces that are not on this machine, read by fsspec; its store in memory stands in for an object store."""

import re
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

from refshard.cli import app
from refshard.commands.remote import local
from refshard.errors import TraceError

TRACE = Path(__file__).parents[2] / "docs" / "examples" / "trace_fsdp2.json.gz"


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    found = fsspec.filesystem("memory")
    for rank in (0, 1):
        found.pipe_file(f"/run/traces/rank{rank}.json.gz", TRACE.read_bytes())
    found.pipe_file("/run/notes.txt", b"no trace")
    yield found
    found.rm("/run", recursive=True)


def test_a_file_and_a_folder_are_copied_and_removed(store: fsspec.AbstractFileSystem) -> None:
    assert store.exists("/run/notes.txt")
    here = Path(__file__)
    with local([here, Path("memory://run/traces/rank1.json.gz"), Path("memory://run/")]) as found:
        assert found[0] == here
        assert found[1].read_bytes() == TRACE.read_bytes()
        assert found[1].name == "rank1.json.gz"
        copies = sorted(str(one.relative_to(found[2])) for one in found[2].rglob("*") if one.is_file())
        assert copies == ["traces/rank0.json.gz", "traces/rank1.json.gz"]
    assert not found[1].exists()


@pytest.mark.usefixtures("store")
def test_a_remote_trace_is_analysed_as_one_on_disk() -> None:
    places = ("memory://run/traces/rank0.json.gz", str(TRACE))
    remote, here = (CliRunner().invoke(app, ["trace", "--csv", place]) for place in places)
    assert remote.exit_code == here.exit_code == 0
    assert re.sub(r"/\S+/rank0", str(TRACE.with_name("trace_fsdp2")), remote.stdout) == here.stdout


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://run/none.json", r"memory://run/none\.json: cannot be read \(FileNotFoundError"),
        ("nowhere://x/y.json", r"nowhere://x/y\.json: cannot be read \(ValueError: Protocol not known: nowhere"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(url: str, message: str) -> None:
    with pytest.raises(TraceError, match=message), local([Path(url)]):
        pass
