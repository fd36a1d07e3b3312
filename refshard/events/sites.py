"""Lines of Python in the stacks that torch records."""

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import msgspec

_OF_TORCH = re.compile(
    r"(?:^|/)(?:site|dist)-packages/(?:torch|triton|functorch)/|(?:^|/)py?torch/torch/|^torch/|/torchinductor_"
    r"|/lib/python3[.\d]*t?/(?!(?:site|dist)-packages/)"
)
"""Python's own files as well, which torch calls user code through."""
_NO_PYTHON = re.compile(r"^\?\?$|^$|\.(?:c|cc|cpp|cu|h|hpp|cuh|so)(?:\.\d+)*$|^<frozen ")


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """A line of Python."""

    file: str
    line: int
    function: str

    @property
    def is_of_torch(self) -> bool:
        """Whether it is of torch's own code or Python's, as where autograd's thread allocates."""
        return _OF_TORCH.search(self.file) is not None

    @property
    def short(self) -> str:
        """The line by its file's last two parts, as in ``project/train.py:31``."""
        return f"{'/'.join(PurePath(self.file).parts[-2:])}:{self.line}"


def sites_of(frames: Any) -> Iterator[Site]:
    """The lines of Python in a stack as torch writes it, innermost first; what is damaged is left out."""
    for frame in frames if isinstance(frames, list) else ():
        if not isinstance(frame, dict):
            continue
        file, line, function = frame.get("filename"), frame.get("line"), frame.get("name")
        if isinstance(file, str) and isinstance(line, int) and not _NO_PYTHON.search(file):
            yield Site(file=file, line=line, function=str(function))
