"""Replace a folder or a file as a whole: readers find the old content or the new, and a dying writer leaves the old.

The new content of a folder ``name`` is written to ``.name.partial`` next to it. To commit, the old one is renamed to
``.name.previous``, the new one to ``name``, and the old one is deleted. What a kill leaves behind, and who tidies it:

- while writing: ``name`` as it was, and ``.name.partial``, which the next :func:`begin` deletes;
- between the two renames: only ``.name.previous``, which :func:`current` reads and the next :func:`begin` renames back;
- while deleting: the new ``name``, and ``.name.previous``, which the next :func:`begin` deletes.
"""

import errno
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from refshard.errors import CheckpointError

STDOUT = Path("-")
"""Standard output, where a command line names a file."""


def new_run_folder(name: str) -> Path:
    """A new folder name under ``runs/`` of the current directory."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{stamp}-{name}"


def begin(folder: str | Path, contents: Sequence[str]) -> Path:
    """Tidy what a killed writer left, and return the new, empty folder in which to write.

    ``contents`` are glob patterns for the names of what such a folder holds.

    Raises:
        CheckpointError: ``folder`` holds something else, which replacing it would delete.
        OSError: the file system refuses.
    """
    folder = Path(folder).resolve()
    if not folder.exists() and _previous(folder).exists():
        _previous(folder).rename(folder)
    _check_replaceable(folder, contents)
    for left_over in (_previous(folder), partial(folder)):
        if left_over.exists():
            shutil.rmtree(left_over)
    partial(folder).mkdir(parents=True)
    return partial(folder)


def commit(folder: str | Path) -> None:
    """Put what was written in place of ``folder``. Files must be synced already; directories are synced here."""
    folder = Path(folder).resolve()
    _sync(partial(folder))
    if folder.exists():
        folder.rename(_previous(folder))
    partial(folder).rename(folder)
    _sync(folder.parent)
    if _previous(folder).exists():
        shutil.rmtree(_previous(folder))


def abandon(folder: str | Path) -> None:
    """Delete what was written, and keep ``folder`` as it was."""
    shutil.rmtree(partial(folder), ignore_errors=True)


def current(folder: str | Path) -> Path:
    """Where to read: ``folder``, or its old content if a writer was killed in the middle of replacing it."""
    folder = Path(folder).resolve()
    return _previous(folder) if not folder.exists() and _previous(folder).exists() else folder


def partial(folder: str | Path) -> Path:
    """Where the new content of ``folder`` is written."""
    folder = Path(folder).resolve()
    return folder.with_name(f".{folder.name}.partial")


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _check_replaceable(folder: Path, contents: Sequence[str]) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} must be a folder, but it is a file; choose another place")
    for entry in folder.iterdir() if folder.exists() else ():
        if not any(fnmatchcase(entry.name, pattern) for pattern in contents):
            raise CheckpointError(
                f"{folder} holds '{entry.name}', which replacing the folder would delete; only {', '.join(contents)} "
                "may be in it: move the file, or choose another folder"
            )


def _sync(folder: Path) -> None:
    """Make renames and new files in ``folder`` outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, pieces: Iterable[str]) -> None:
    """Write ``pieces`` next to ``path`` and move them there once they are on disk; :data:`STDOUT` gets them at once.

    A reader sees the old file or the new one, and a failure leaves the old one and nothing else. A link stays a link; a
    device or a pipe is written to.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    if path == STDOUT:
        sys.stdout.writelines(pieces)
        return
    if _takes_a_stream(path):
        with path.open("w", encoding="utf-8", errors="replace") as file:
            file.writelines(pieces)
        return
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("x", encoding="utf-8", errors="replace", newline="\n") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def check_replaceable_file(path: Path) -> None:
    """Find out whether :func:`replace_file` can write there, before hours of work.

    Raises:
        OSError: the folder does not exist or cannot be written, or ``path`` is a folder.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path != STDOUT and not _takes_a_stream(path):
        tempfile.TemporaryFile(dir=path.resolve().parent).close()


def _takes_a_stream(path: Path) -> bool:
    """Whether it is a device or a pipe, which is not to be replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()
