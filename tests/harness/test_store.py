"""The store: what is read is a prefix of what was written, or an error."""

from pathlib import Path

import pytest

from refshard.errors import StoreError
from refshard.harness.run import run_suite
from refshard.harness.store import RECORDS, RunWriter, read_run
from refshard.records import SCHEMA, EndRecord
from tests.harness.fakes import ENVIRONMENT, FakeLauncher, Silent, make_suite


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_suite(make_suite(), tmp_path / "run", FakeLauncher(), Silent(), ENVIRONMENT)
    return tmp_path / "run"


def test_cut_anywhere_it_is_a_prefix_or_an_error(folder: Path) -> None:
    path = folder / RECORDS
    whole, data = read_run(folder), path.read_bytes()
    header = data.index(b"\n") + 1
    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        if length < header:
            with pytest.raises(StoreError):
                read_run(folder)
        else:
            found = read_run(folder)
            assert found.cases == whole.cases[: len(found.cases)]
            assert found.end is None


def test_damage_names_the_line(folder: Path) -> None:
    path = folder / RECORDS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:50] + b"\xff" + lines[1][50:] + b"".join(lines[2:]))
    with pytest.raises(StoreError, match=r"records.jsonl:2: damaged record"):
        read_run(folder)


def test_newer_schemas_are_refused(folder: Path) -> None:
    path = folder / RECORDS
    path.write_bytes(path.read_bytes().replace(b'"schema":%d' % SCHEMA, b'"schema":%d' % (SCHEMA + 1)))
    with pytest.raises(StoreError, match=rf"schema {SCHEMA + 1} is newer than {SCHEMA}; update refshard"):
        read_run(folder)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        read_run(tmp_path)
    (tmp_path / RECORDS).write_text('{"type":"end","run_id":"x","ended_at":"","cases":0,"states":{}}\n')
    with pytest.raises(StoreError, match="does not begin with one run record"):
        read_run(tmp_path)


def test_each_record_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.append(EndRecord(run_id="x", ended_at="", cases=0, states={}))
        assert (tmp_path / "run" / RECORDS).read_bytes().count(b"\n") == 1
