"""Where a script reads values that a dry run does not compute, and whether one of them ended it.

The device gives the host a placeholder, or what follows from one. The first such read is told as it happens, since what
the script prints next means nothing. A check that such a value cannot pass ends the script with an error of its own;
the line that read the value is then named.
"""

import dis
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

from refshard.fakecuda.torch_c import is_internal, script_frame, short

_MOST_READS = 1_000
"""The last reads, which are remembered; a loop may make many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """``place`` reads, ``functions`` are the one that reads and the one that called it."""

    place: str
    functions: tuple[CodeType, ...]
    value: float | None
    step: int


class UnknownValues:
    """Follows reads from the device's extension ``ext``; ``steps_taken`` tells how many steps were taken by then."""

    def __init__(self, ext: ModuleType, steps_taken: Callable[[], int]) -> None:
        self._ext, self._steps_taken = ext, steps_taken
        self._reads: deque[_Read] = deque(maxlen=_MOST_READS)

    def install(self) -> None:
        """Follow reads until this process ends."""
        self._ext.set_unknown_value_callback(self._read)

    def _read(self, value: float | None) -> None:
        if (frame := script_frame()) is None:
            return
        place = f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        if not self._reads:
            print(
                f"refshard: {place} reads a value that a dry run does not compute; it gets a placeholder "
                f"({self._ext.PLACEHOLDER}, or what follows from it), so what is printed from it means nothing",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        functions = tuple(one.f_code for one in (frame, frame.f_back) if one is not None)
        self._reads.append(_Read(place=place, functions=functions, value=value, step=self._steps_taken()))

    def blamed(self, error: BaseException) -> str:
        """The line that read the value to which a check of the script objected, or an empty text.

        The script must have raised on purpose, or for a number out of range. The value is in a variable where it
        raised, or was read in the same function since the step before.
        """
        raised = [one for one in _walk(error.__traceback__) if not is_internal(one.tb_frame.f_code.co_filename)]
        if not raised or not _objects(error):
            return ""
        frame = raised[-1].tb_frame
        held = set(_numbers(frame))
        recent = [read for read in self._reads if self._steps_taken() - read.step <= 1]
        in_variables = [read.place for read in recent if read.value in held]
        return next(iter(in_variables), "") or next(
            (read.place for read in reversed(recent) if frame.f_code in read.functions), ""
        )


def _objects(error: BaseException) -> bool:
    """Whether a ``raise``, an ``assert`` or ``sys.exit()`` ended it, or arithmetic on a number out of range."""
    if isinstance(error, (ArithmeticError, ValueError, SystemExit)):
        return True
    *_, last = _walk(error.__traceback__)
    code = last.tb_frame.f_code.co_code
    return isinstance(error, Exception) and dis.opname[code[last.tb_lasti]] == "RAISE_VARARGS"


def _walk(rest: TracebackType | None) -> Iterator[TracebackType]:
    while rest is not None:
        yield rest
        rest = rest.tb_next


def _numbers(frame: FrameType) -> Iterator[float]:
    """Fractions in a function's variables, or in the lists and dictionaries there: others may be there by chance."""
    for held in frame.f_locals.values():
        inside: Any = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else (held,)
        yield from (one for one in inside if isinstance(one, float) and math.isfinite(one) and not one.is_integer())
