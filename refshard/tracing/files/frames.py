"""The Python functions that a trace recorded ``with_stack=True`` shows, as far as they are the user's code.

Nine of ten frames are torch's own, built-in functions or the standard library's. They are left out while the file is
read: their names alone, each with an address in it, would take more memory than all else.
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CATEGORY = "python_function"

_STANDARD = (
    "abc", "asyncio", "collections", "concurrent", "contextlib", "copy", "dataclasses", "enum", "functools",
    "importlib", "inspect", "json", "logging", "multiprocessing", "pickle", "re", "runpy", "subprocess", "tempfile",
    "threading", "typing", "typing_extensions", "warnings", "weakref",
)  # fmt: skip
"""Modules of the standard library that torch calls, or that call the user's code. The profiler cuts their folder off.

Not all of the library: a user may have a ``profile.py`` or ``test.py`` too.
"""
_OTHERS = re.compile(
    rf"<|nn\.Module: |(?:torch|triton)/|(?:{'|'.join(_STANDARD)})(?:\.py\(|/)"
    r"|.*?torchinductor_|.*?/(?:site|dist)-packages/(?:torch|triton)/|.*?/lib/python3\.\d+/(?!site-packages/|dist-packages/)"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frames:
    """Calls of Python functions, in the file's order.

    ``names`` index :attr:`name_table`, ``threads`` :attr:`~refshard.tracing.files.events.TraceFile.threads`.
    """

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    names: npt.NDArray[np.int32]
    threads: npt.NDArray[np.int32]
    name_table: tuple[str, ...]


NO_FRAMES = Frames(
    starts=np.empty(0, np.int64),
    ends=np.empty(0, np.int64),
    names=np.empty(0, np.int32),
    threads=np.empty(0, np.int32),
    name_table=(),
)


def is_own(name: str) -> bool:
    """Whether a frame is of the user's code, which every package but torch and triton counts as.

    What torch.compile generated does not.
    The profiler names a function ``file.py(line): function``, with what is in ``sys.path`` cut off the file.

    >>> is_own("train.py(12): step"), is_own("torch/cuda/__init__.py(975): synchronize"), is_own("nn.Module: GPT_0")
    (True, False, False)
    """
    return _OTHERS.match(name) is None
