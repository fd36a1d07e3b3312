"""Pickles that torch writes, read without running anything that they could name."""

import gzip
import os
import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from refshard.errors import TraceError
from refshard.plain import plain

_PICKLE, _GZIP, _NEWEST_PROTOCOL = 0x80, b"\x1f\x8b", 5


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle, by its first bytes; it may be gzipped."""
    if not os.path.isfile(path):  # noqa: PTH113 -- never raises; opening a pipe would wait for its writer
        return False
    try:
        with opened(path) as file:
            head = file.read(2)
    except (OSError, EOFError, zlib.error):
        return False
    return len(head) == 2 and head[0] == _PICKLE and head[1] <= _NEWEST_PROTOCOL


def read_pickle(path: Path, what: str, remedy: str) -> Any:
    """The containers, text and numbers of a pickle that should be ``what`` ("a memory snapshot"). ``remedy`` says how
    to make a smaller one.

    Raises:
        TraceError: the file cannot be read, is damaged, does not fit into memory, or holds more than plain values.
    """
    try:
        with opened(path) as file:
            return _PlainUnpickler(file).load()
    except _NotPlainError as error:
        raise TraceError(
            f"{path}: is a pickle that asks for {plain(str(error))[:200]}; {what} holds plain values only, and "
            "anything else is not loaded, because it could run code"
        ) from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
    except MemoryError:
        raise TraceError(f"{path}: does not fit into memory; {remedy}") from None
    except Exception as error:
        reason = plain(str(error) or type(error).__name__)[:200]
        raise TraceError(f"{path}: damaged pickle ({reason}); copy or write it again") from None


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file, unpacked if it is gzipped."""
    with path.open("rb") as raw:
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        yield cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw


class _PlainUnpickler(pickle.Unpickler):
    """Refuses anything but containers, text and numbers: only a name can make an unpickler call something."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse."""
        raise _NotPlainError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse."""
        raise _NotPlainError("an object kept elsewhere")


class _NotPlainError(Exception):
    """What a pickle asks for."""
