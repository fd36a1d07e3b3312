"""A run's folder: ``records.jsonl``, one record a line, appended and synced as each case ends.

One writer at a time appends, under a kernel lock that ends with its process. After a crash the last line may be torn:
readers skip it, and the next writer cuts it off. Each line ends in a checksum of itself, and
the closing record holds the SHA-256 of all lines before it, so that a closed run misses none. In a run that is not
closed, a lost line is a launch to be repeated.
"""

import fcntl
import hashlib
import os
import re
from collections import Counter
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType

import msgspec

from refshard.errors import StoreError
from refshard.measure.interruption import Interruption
from refshard.records import (
    SCHEMA,
    EndRecord,
    LaunchRecord,
    Record,
    Run,
    RunRecord,
    State,
    from_schema_1,
    timestamp,
)

RECORDS = "records.jsonl"
_CHECK = re.compile(rb',"check":"([0-9a-f]{16})"}$')


class _Version(msgspec.Struct):
    schema: int = SCHEMA


_versions = msgspec.json.Decoder(_Version)
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def check_unused(folder: Path) -> None:
    """Refuse a folder that is not empty; it need not exist.

    Raises:
        StoreError: it is not empty, or is no folder.
    """
    try:
        used = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise StoreError(f"{folder}: not usable for a run ({error.strerror}); name a writable folder") from None
    if used:
        raise StoreError(f"{folder}: the folder is not empty; name a new one, or resume the run in it")


def holds_run(folder: Path) -> bool:
    """Whether a run was begun in ``folder``."""
    return (folder / RECORDS).is_file()


class RunWriter:
    """Appends records to a run's folder. Use it as a context: the file is closed on every path."""

    def __init__(self, folder: Path, *, reopen: bool = False) -> None:
        """Create ``folder``; or ``reopen`` the run in it, to append to its whole lines.

        Raises:
            StoreError: it exists and is not empty; or holds no run, is damaged, or is being written.
        """
        self.folder = folder
        try:
            if not reopen:
                folder.mkdir(parents=True, exist_ok=True)
                check_unused(folder)
            self._file: FileIO = (folder / RECORDS).open("r+b" if reopen else "x+b", buffering=0)
        except OSError as error:
            raise StoreError(f"{folder}: not usable for a run ({error.strerror}); name a writable folder") from None
        try:
            self._lock()
            found = read_run(folder).launches if reopen else ()
            self._states: dict[tuple[str, int], State] = {(r.spec_hash, r.round): r.state for r in found}
            written, _, _ = self._file.read().rpartition(b"\n")
            self._digest = hashlib.sha256(written + b"\n" if written else b"")
            self._file.truncate(self._file.seek(len(written) + bool(written)))
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{self.folder}: another process is writing this run; wait for it or stop it") from None
        except OSError as error:
            raise StoreError(
                f"{self.folder}: cannot be locked ({error.strerror}); use a file system that supports flock"
            ) from None

    def append(self, record: RunRecord | LaunchRecord) -> None:
        """Write one record durably.

        Raises:
            StoreError: the disk is full, or fails.
        """
        with Interruption():  # the line is written and counted, or neither
            self._write(record)
            if isinstance(record, LaunchRecord):
                self._states[record.spec_hash, record.round] = record.state

    def close(self, run_id: str, *, interrupted: bool) -> None:
        """Write the closing record, which counts the launches in the file.

        Raises:
            StoreError: the disk is full, or fails.
        """
        states = Counter[str](self._states.values())
        end = EndRecord(
            run_id=run_id,
            ended_at=timestamp(),
            cases=states.total(),
            states=dict(states),
            interrupted=interrupted,
            sha256=self._digest.hexdigest(),
        )
        with Interruption():
            self._write(end)

    def _write(self, record: Record) -> None:
        line = _checked(msgspec.json.encode(record)) + b"\n"
        whole, left = self._file.tell(), memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):  # what was written of the line is no record
                self._file.truncate(self._file.seek(whole))
            raise StoreError(
                f"{self.folder}: cannot be written ({error.strerror}); make room and resume the run"
            ) from None
        self._digest.update(line)

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # a full disk: what could not be flushed was reported
            self._file.close()


def read_run(folder: Path) -> Run:
    """Read a run back, without a torn last line; of a repeated launch, the last record. Unknown fields are ignored.

    Raises:
        StoreError: there is no run in ``folder``, a line is damaged, or a refshard with a newer schema wrote it.
    """
    path = folder / RECORDS
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{folder}: holds no run ({error.strerror}: {RECORDS}); give a folder under runs/") from None
    *lines, torn = data.split(b"\n")
    records = [_decode(path, number, line) for number, line in enumerate(lines, start=1)]
    headers = [r for r in records if isinstance(r, RunRecord)]
    if len(headers) != 1 or records[0] is not headers[0]:
        raise StoreError(
            f"{path}: does not begin with a run record: it is not a run, or was cut before the first launch; "
            "remove the folder and start a new one"
        )
    _check_digests(path, lines, records)
    launches = {(r.spec_hash, r.round): r for r in records if isinstance(r, LaunchRecord)}
    last = records[-1]
    return Run(
        header=headers[0],
        launches=tuple(r for r in records if isinstance(r, LaunchRecord) and launches[r.spec_hash, r.round] is r),
        end=last if isinstance(last, EndRecord) and not torn else None,
    )


def _check_digests(path: Path, lines: list[bytes], records: list[Record]) -> None:
    digest = hashlib.sha256()
    for number, (line, record) in enumerate(zip(lines, records), start=1):
        if isinstance(record, EndRecord) and record.sha256 and record.sha256 != digest.hexdigest():
            raise StoreError(
                f"{path}:{number}: SHA-256 of the lines before this closing record does not match; restore the file"
            )
        digest.update(line + b"\n")


def _checked(encoded: bytes) -> bytes:
    """The JSON object with one more field: the first 16 hexadecimal digits of its SHA-256."""
    return encoded[:-1] + b',"check":"%s"}' % hashlib.sha256(encoded).hexdigest()[:16].encode()


def _decode(path: Path, number: int, line: bytes) -> Record:
    if (check := _CHECK.search(line)) and line != _checked(line[: check.start()] + b"}"):
        raise StoreError(f"{path}:{number}: damaged record (its check does not match); the lines before it are good")
    try:
        first = _versions.decode(line).schema == 1
        record = from_schema_1(msgspec.json.decode(line)) if first else _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}:{number}: damaged record ({error}); the lines before it are good") from None
    if record.schema > SCHEMA:
        raise StoreError(f"{path}:{number}: schema {record.schema} is newer than {SCHEMA}; update refshard")
    return record
