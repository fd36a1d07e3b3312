"""The store: what is read is a prefix of what was written, or an error."""

import re
import resource
import signal
from pathlib import Path

import pytest

from refshard.errors import StoreError
from refshard.harness.run import run_suite
from refshard.harness.store import RECORDS, RunWriter, read_run
from refshard.records import SCHEMA, Run, RunRecord
from tests.harness.fakes import ENVIRONMENT, FakeLauncher, Silent, make_suite


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    suite = make_suite(matrix={"strategy": ["single", "ddp"], "world_size": [2], "model": ["llama-tiny"]})
    run_suite(suite, tmp_path / "run", FakeLauncher(), Silent(), ENVIRONMENT)
    return tmp_path / "run"


def is_prefix(found: Run, whole: Run) -> bool:
    return (
        found.header == whole.header
        and found.cases == whole.cases[: len(found.cases)]
        and found.end in (None, whole.end if found.cases == whole.cases else None)
    )


def test_cut_at_any_byte_it_is_a_prefix_or_an_error(folder: Path) -> None:
    path = folder / RECORDS
    whole, data = read_run(folder), path.read_bytes()
    header = data.index(b"\n") + 1
    for length in range(len(data)):
        path.write_bytes(data[:length])
        if length < header:
            with pytest.raises(StoreError):
                read_run(folder)
        else:
            found = read_run(folder)
            assert is_prefix(found, whole)
            assert found.end is None


@pytest.mark.parametrize("flip", [0x01, 0x80, ord("\n") ^ ord(" ")])
def test_with_any_byte_changed_it_is_a_prefix_or_an_error(folder: Path, flip: int) -> None:
    path = folder / RECORDS
    whole, data = read_run(folder), path.read_bytes()
    errors = 0
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :])
        try:
            assert is_prefix(read_run(folder), whole), place
        except StoreError:
            errors += 1
    assert errors > 0.9 * len(data)


def test_a_line_that_is_missing_is_noticed_once_the_run_is_closed(folder: Path) -> None:
    path = folder / RECORDS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(StoreError, match=r"not those that it closed \(SHA-256\); restore the file"):
        read_run(folder)


def test_fields_of_a_newer_refshard_do_not_disturb(folder: Path) -> None:
    path = folder / RECORDS
    whole = read_run(folder)
    lines = path.read_bytes().splitlines(keepends=True)[:-1]
    path.write_bytes(b"".join(line[:-2] + b',"new":{"a":1}}\n' for line in lines))
    assert read_run(folder).cases == whole.cases


def test_a_run_has_one_writer(folder: Path) -> None:
    with RunWriter(folder, reopen=True), pytest.raises(StoreError, match="another process writes this run"):
        RunWriter(folder, reopen=True)
    with RunWriter(folder, reopen=True):
        pass  # the lock went with the first one


def test_a_torn_line_is_cut_off_by_the_next_writer(folder: Path) -> None:
    path = folder / RECORDS
    whole = read_run(folder)
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"\n", 0, -1) - 5])
    with RunWriter(folder, reopen=True) as writer:
        writer.append(whole.cases[-1])
    assert read_run(folder).cases == whole.cases


def test_a_full_disk_leaves_whole_lines(folder: Path) -> None:
    """A limit on the file's size stands for the disk's end."""
    whole, size = read_run(folder), (folder / RECORDS).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with RunWriter(folder, reopen=True) as writer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
            with pytest.raises(StoreError, match=r"cannot be written .*; make room and resume the run"):
                writer.append(whole.cases[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert read_run(folder) == whole


def test_damage_names_the_line(folder: Path) -> None:
    path = folder / RECORDS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:50] + b"\xff" + lines[1][50:] + b"".join(lines[2:]))
    with pytest.raises(StoreError, match=r"records.jsonl:2: damaged record"):
        read_run(folder)


def test_newer_schemas_are_refused(folder: Path) -> None:
    path = folder / RECORDS
    unchecked = re.sub(rb',"check":"[0-9a-f]{16}"', b"", path.read_bytes())  # as before lines had checks
    path.write_bytes(unchecked.replace(b'"schema":%d' % SCHEMA, b'"schema":%d' % (SCHEMA + 1)))
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
        header = RunRecord(
            run_id="x", refshard="", started_at="", suite=make_suite(), environment=ENVIRONMENT, planned=0
        )
        writer.append(header)
        assert (tmp_path / "run" / RECORDS).read_bytes().count(b"\n") == 1
