"""Files of object stores and web servers, copied here by fsspec, which torch installs."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from refshard.analysis.frames import SUFFIXES
from refshard.errors import TraceError, first_line

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(?=[^/])")
"""A path keeps one of the two slashes of a URL."""


@contextmanager
def local(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """The same paths, but a copy of each that is a URL, such as ``s3://bucket/run/`` with the traces below it.

    Raises:
        TraceError: fsspec, or its package for this kind of store, is not installed, or the store refuses.
    """
    with tempfile.TemporaryDirectory(prefix="refshard-remote-") as folder:
        local_paths = []
        for place, path in enumerate(paths):
            url = _URL.match(str(path))
            rest = str(path)[url.end() :] if url else ""
            local_paths.append(_copied(f"{url[1]}://{rest}", Path(folder, str(place))) if url else path)
        yield local_paths


def _copied(url: str, folder: Path) -> Path:
    try:
        from fsspec.core import url_to_fs

        store, root = url_to_fs(url)
        folder.mkdir()
        if not store.isdir(root):
            store.get_file(root, str(folder / Path(root).name))
            return folder / Path(root).name
        for file in store.find(root):
            if file.endswith(SUFFIXES):
                to = folder / file.removeprefix(root).lstrip("/")
                to.parent.mkdir(parents=True, exist_ok=True)
                store.get_file(file, str(to))
    except ImportError as error:
        raise TraceError(f"{url}: cannot be read: {first_line(error)}") from None  # it names what to install
    except Exception as error:  # each store has its own kinds
        raise TraceError(f"{url}: cannot be read ({type(error).__name__}: {first_line(error)})") from None
    return folder
