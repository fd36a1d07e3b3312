"""A run's folder: ``records.jsonl``, one record a line, appended and synced as each case ends.

One writer appends; a line is complete or, after a crash, the torn last one, which readers leave out.
"""

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from refshard.errors import StoreError
from refshard.records import SCHEMA, CaseRecord, EndRecord, Record, Run, RunRecord

RECORDS = "records.jsonl"
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class RunWriter:
    """Appends records to a new run's folder. Use it as a context: the file is closed on every path."""

    def __init__(self, folder: Path) -> None:
        """Create ``folder``.

        Raises:
            StoreError: it exists and is not empty.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise StoreError(f"{folder}: the folder is not empty; name a new one, or remove it")
            self._file: IO[bytes] = (folder / RECORDS).open("xb")
        except OSError as error:
            raise StoreError(f"{folder}: cannot hold a run ({error.strerror}); name a folder that can") from None
        self.folder = folder

    def append(self, record: Record) -> None:
        """Write one record so that it outlives a crash of this process or machine.

        Raises:
            StoreError: the disk does not take it.
        """
        try:
            self._file.write(msgspec.json.encode(record) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be written ({error.strerror}); make room") from None

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # a full disk: what could not be flushed was reported
            self._file.close()


def read_run(folder: Path) -> Run:
    """Read a run back; a torn last line is left out.

    Raises:
        StoreError: there is no run in ``folder``, a line is damaged, or a newer refshard wrote it.
    """
    path = folder / RECORDS
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StoreError(f"{folder}: holds no run ({error.strerror}: {RECORDS}); give a folder under runs/") from None
    records = [_decode(path, number, line) for number, line in enumerate(lines, start=1)]
    headers = [r for r in records if isinstance(r, RunRecord)]
    if len(headers) != 1 or records[0] is not headers[0]:
        raise StoreError(f"{path}: does not begin with one run record; it is no run, or was cut at its start")
    ends = [r for r in records if isinstance(r, EndRecord)]
    return Run(
        header=headers[0],
        cases=tuple(r for r in records if isinstance(r, CaseRecord)),
        end=ends[-1] if ends and not torn else None,
    )


def _decode(path: Path, number: int, line: bytes) -> Record:
    try:
        record = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}:{number}: damaged record ({error}); the lines before it are good") from None
    if record.schema > SCHEMA:
        raise StoreError(f"{path}:{number}: schema {record.schema} is newer than {SCHEMA}; update refshard")
    return record
