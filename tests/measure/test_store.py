"""The store: what is read is a prefix of what was written, or an error."""

import re
import resource
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.errors import StoreError
from refshard.measure.launchers.base import LaunchOutcome
from refshard.measure.run import resume_run, run_suite
from refshard.measure.store import RECORDS, RunWriter, read_run
from refshard.records import SCHEMA, EndRecord, LaunchRecord, Record, Run, RunRecord, State
from refshard.specs.case import Case
from tests.measure.fakes import ENVIRONMENT, FakeLauncher, Silent, good, make_suite

RECORDED = Path(__file__).parents[2] / "profiles" / "recorded"

SUITE = make_suite(matrix={"strategy": ["single", "ddp"], "gpus": [2], "model": ["llama-tiny"]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_suite(SUITE, tmp_path / "run", FakeLauncher(), Silent(), ENVIRONMENT)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which one launch failed, was repeated once it was resumed, and failed again: two closing records."""
    folder = tmp_path_factory.mktemp("store") / "run"

    def failing(case: Case, work: Path) -> LaunchOutcome:
        job = case.job
        return good(case, work) if job.strategy == "single" else LaunchOutcome(failed_rank=1, error="rank 1 failed")

    run_suite(SUITE, folder, FakeLauncher(failing), Silent(), ENVIRONMENT)
    resume_run(folder, FakeLauncher(failing), Silent(), ENVIRONMENT)
    assert (folder / RECORDS).read_bytes().count(b'{"type":"end"') == 2
    return folder


def states(data: bytes) -> list[Run | None]:
    """What a reader may see: the run as it was after each of its lines; None before the first."""
    found: list[Run | None] = [None]
    launches: dict[tuple[str, int], LaunchRecord] = {}
    for line in data.splitlines():
        record = msgspec.json.decode(line, type=Record)
        if isinstance(record, RunRecord):
            header = record
        if isinstance(record, LaunchRecord):
            launches.pop((record.spec_hash, record.round), None)  # the later one stands later
            launches[record.spec_hash, record.round] = record
        end = record if isinstance(record, EndRecord) else None
        found.append(Run(header=header, launches=tuple(launches.values()), end=end))
    return found


def read(folder: Path, data: bytes) -> Run | None:
    """What is read back of ``data``; None where that is an error."""
    (folder / RECORDS).write_bytes(data)
    try:
        return read_run(folder)
    except StoreError:
        return None


def test_each_state_is_what_the_writer_meant(resumed: Path) -> None:
    """The reference that the following tests hold the store against."""
    found = states((resumed / RECORDS).read_bytes())
    counts = [(len(run.launches), run.end and run.end.states) for run in found if run]
    ended = {"ok": 1, "failed": 1}
    assert counts == [(0, None), (1, None), (2, None), (2, ended), (2, None), (2, ended)]
    assert found[-1] == read_run(resumed)


# Steps between the bytes that are tried: a prime, which meets every field of a line somewhere, and each byte.
STRIDES = pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.full)])


@STRIDES
def test_cut_at_any_byte_it_is_a_prefix_or_an_error(resumed: Path, tmp_path: Path, stride: int) -> None:
    data = (resumed / RECORDS).read_bytes()
    expected = states(data)
    ends = {end for place, byte in enumerate(data) if byte == ord("\n") for end in (place, place + 1)}
    for length in sorted({*range(0, len(data) + 1, stride), *ends}):
        whole = expected[data[:length].count(b"\n")]
        torn = length and data[length - 1 : length] != b"\n"
        assert read(tmp_path, data[:length]) == (whole and msgspec.structs.replace(whole, end=None) if torn else whole)


@STRIDES
@pytest.mark.parametrize("flip", [0x01, 0x80, ord("\n") ^ ord(" ")])
def test_with_any_byte_changed_it_is_a_prefix_or_an_error(
    resumed: Path, tmp_path: Path, flip: int, stride: int
) -> None:
    data = (resumed / RECORDS).read_bytes()
    expected, errors = states(data), 0
    places = sorted({*range(0, len(data), stride), *(at for at, byte in enumerate(data) if byte == ord("\n"))})
    for place in places:
        found = read(tmp_path, data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :])
        errors += found is None
        assert is_one_of(found, expected), place
    assert errors > 0.9 * len(places)


def is_one_of(found: Run | None, expected: list[Run | None]) -> bool:
    """Whether it is one of the states, perhaps with a torn line after it."""
    return found in expected or found in [run and msgspec.structs.replace(run, end=None) for run in expected]


def is_part_of(found: Run | None, data: bytes) -> bool:
    """Whether it is a run without an end, each of whose launches is one that ``data`` holds a record of."""
    records = [msgspec.json.decode(line, type=Record) for line in data.splitlines()]
    return found is not None and found.end is None and all(r in records for r in (found.header, *found.launches))


@given(st.data())
def test_with_any_piece_replaced_it_is_a_prefix_or_an_error(resumed: Path, draw: st.DataObject) -> None:
    """Lost, repeated or overwritten: bytes of any length, or whole lines.

    Whole lines that are lost together with the closing record leave a run that has no end, and lacks those launches.
    """
    data = (resumed / RECORDS).read_bytes()
    lines = [0, *(place + 1 for place, byte in enumerate(data) if byte == ord("\n"))]
    places = st.one_of(st.integers(0, len(data)), st.sampled_from(lines))
    (start, stop), (from_, to) = (sorted([draw.draw(places), draw.draw(places)]) for _ in range(2))
    piece = draw.draw(st.one_of(st.just(data[from_:to]), st.binary(max_size=200)))
    with TemporaryDirectory() as name:
        found = read(Path(name), data[:start] + piece + data[stop:])
    assert is_one_of(found, states(data)) or is_part_of(found, data)


def test_whatever_a_kill_left_the_next_writer_goes_on_from_there(resumed: Path, tmp_path: Path) -> None:
    """Cut in each line at its start, in its midst, and before its end; then the last record once more, and closed."""
    data = (resumed / RECORDS).read_bytes()
    expected, record = states(data), read_run(resumed).launches[-1]
    lines = data.splitlines(keepends=True)
    for number in range(1, len(lines) + 1):
        following = lines[number] if number < len(lines) else b'{"type":'
        for torn in (b"", following[:1], following[: len(following) // 2], following[:-1]):
            (tmp_path / RECORDS).write_bytes(b"".join(lines[:number]) + torn)
            with RunWriter(tmp_path, reopen=True) as writer:
                writer.append(record)
                writer.close("run", interrupted=False)
            found, before = read_run(tmp_path), expected[number]
            assert before is not None
            others = [r for r in before.launches if r.spec_hash != record.spec_hash]
            assert found.launches == (*others, record)
            assert found.end is not None
            assert (found.end.cases, found.end.interrupted) == (len(found.launches), False)


def test_a_line_that_is_missing_is_noticed_once_the_run_is_closed(folder: Path) -> None:
    """Before, nothing vouches for it: it is a launch to be made."""
    path, whole = folder / RECORDS, read_run(folder)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(
        StoreError, match=r"SHA-256 of the lines before this closing record does not match; restore the file"
    ):
        read_run(folder)
    path.write_bytes(b"".join([lines[0], *lines[2:-1]]))
    assert read_run(folder) == msgspec.structs.replace(whole, launches=whole.launches[1:], end=None)


def test_fields_of_a_newer_refshard_do_not_disturb(folder: Path) -> None:
    path = folder / RECORDS
    whole = read_run(folder)
    lines = path.read_bytes().splitlines(keepends=True)[:-1]
    path.write_bytes(b"".join(line[:-2] + b',"new":{"a":1}}\n' for line in lines))
    assert read_run(folder).launches == whole.launches


def test_a_run_has_one_writer(folder: Path) -> None:
    with RunWriter(folder, reopen=True), pytest.raises(StoreError, match="another process is writing this run"):
        RunWriter(folder, reopen=True)
    with RunWriter(folder, reopen=True):
        pass  # the lock went with the first one


def test_a_full_disk_leaves_whole_lines(folder: Path) -> None:
    """A limit on the file's size stands for the disk's end."""
    whole, size = read_run(folder), (folder / RECORDS).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with RunWriter(folder, reopen=True) as writer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
            with pytest.raises(StoreError, match=r"cannot be written .*; make room and resume the run"):
                writer.append(whole.launches[0])
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
    with pytest.raises(StoreError, match="does not begin with a run record"):
        read_run(tmp_path)


def test_each_record_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        header = RunRecord(
            run_id="x", refshard="", started_at="", suite=make_suite(), environment=ENVIRONMENT, planned=0
        )
        writer.append(header)
        assert (tmp_path / "run" / RECORDS).read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("state", get_args(State))
def test_a_run_went_well_if_every_launch_is_ok_or_a_result(state: State, folder: Path) -> None:
    """By this `refshard run` exits, and so does every process of a torchrun that runs it."""
    run = read_run(folder)
    last = msgspec.structs.replace(run.launches[-1], state=state)
    changed = msgspec.structs.replace(run, launches=(*run.launches[:-1], last))
    assert changed.well == (state in ("ok", "unsupported", "skipped"))


@pytest.mark.slow
def test_recorded_runs_are_read_and_their_cases_keep_their_hashes() -> None:
    """Recorded runs of earlier versions; the hash names a case in baselines, folders and other people's notes."""
    launches = [launch for path in RECORDED.glob("*/*/records.jsonl") for launch in read_run(path.parent).launches]
    assert {launch.schema for launch in launches} == {1, 2}
    assert len(launches) > 900
    assert [launch.case.hash for launch in launches] == [launch.spec_hash for launch in launches]
    assert {launch.case.job.tp for launch in launches} == {1, 8}
    assert {launch.case.job.dp_replicate for launch in launches} == {1, 8, 32, 64}


def test_a_damaged_record_of_schema_1_is_named(tmp_path: Path) -> None:
    for line in ('{"type":"case","schema":1,"case":3}', '{"type":"run","schema":1,"suite":{"matrix":[1]}}'):
        (tmp_path / "records.jsonl").write_text(line + "\n")
        with pytest.raises(StoreError, match=r"records\.jsonl:1: damaged record"):
            read_run(tmp_path)
