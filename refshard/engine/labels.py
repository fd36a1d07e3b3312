"""Labels in the trace, and nothing where no trace is taken: they would cost more than what they name."""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler
from torch.profiler import record_function

_NO_LABEL = nullcontext()


def label(what: str, unit: str) -> AbstractContextManager[object]:
    """A label around what is done for a unit."""
    return record_function(f"refshard::{what}({unit})") if _traced() else _NO_LABEL


def mark(what: str, unit: str) -> None:
    """A moment of a unit."""
    if _traced():
        with record_function(f"refshard::{what}({unit})"):
            pass


def _traced() -> bool:
    """Whether a trace is taken: torch's flag in Python, since the one in C++ misses a trace of all threads."""
    enabled: bool = profiler._is_profiler_enabled
    return enabled
