"""What torch's compiler takes, whatever an earlier launch has left behind."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def compiling_anew() -> Iterator[Callable[[], float]]:
    """Have torch keep what it compiles in a folder that goes at the end: nothing is taken from an earlier launch.

    The folder lies in torch's own if the environment names one (``TORCHINDUCTOR_CACHE_DIR``), else among the system's
    temporary files. Yields a function that tells the seconds that this process has spent compiling since; 0.0 if it has
    compiled nothing.
    """
    given, before = os.environ.get(_FOLDER), _spent_s()
    if given is not None:
        Path(given).mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="refshard-compiled-", dir=given) as folder:
            os.environ[_FOLDER] = folder
            yield lambda: _spent_s() - before
    finally:
        if given is None:
            os.environ.pop(_FOLDER, None)
        else:
            os.environ[_FOLDER] = given


def _spent_s() -> float:
    """Seconds that this process has spent in torch's compiler."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0.0 if dynamo is None else float(dynamo.calculate_time_spent().get("total_wall_time", 0.0))
