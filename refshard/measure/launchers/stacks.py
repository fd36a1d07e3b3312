"""Where each rank of a launch stands: the stack that a worker writes when it is sent a signal."""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from refshard.measure.flight import flight_file
from refshard.measure.worker import ASK, stack_file

_ANSWER_S = 5.0
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_COLLECTIVES = ("/torch/distributed/", "/refshard/engine/collectives.py")
_BACKWARD = "/torch/autograd/graph.py"


def ask_for_stacks(pids: Mapping[int, int], folder: Path) -> dict[int, tuple[str, ...]]:
    """Each rank's stack of its main thread, innermost frame first; empty of a rank that does not answer.

    A rank that cannot write it yet ends by the signal: ask those only that are to be ended.
    """
    for pid in pids.values():
        with suppress(ProcessLookupError):
            os.kill(pid, ASK)
    return stacks(pids, folder, _ANSWER_S, lambda rank: _has_ended(pids[rank]))


def stacks(
    ranks: Iterable[int], folder: Path, limit_s: float, has_ended: Callable[[int], bool]
) -> dict[int, tuple[str, ...]]:
    """The stacks that ``ranks`` write, which were asked; see :func:`ask_for_stacks`."""
    files = {rank: stack_file(folder, rank) for rank in ranks}
    flights = [flight_file(folder, rank) for rank in files]
    before: dict[int, str] = {}
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        texts = {rank: _text(file) for rank, file in files.items()}
        answered = all(text or has_ended(rank) for rank, text in texts.items())
        if texts == before and answered and not any(file.exists() and not _text(file) for file in flights):
            break
        before = texts
        time.sleep(0.1)
    return {rank: _main_thread(text) for rank, text in before.items()}


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:  # not yet there, or removed by another host
        return ""


def _has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def _main_thread(text: str) -> tuple[str, ...]:
    """The frames of the thread that was there first, which faulthandler writes last."""
    _, _, last = text.rpartition("(most recent call first):\n")
    return tuple(line for line in last.splitlines() if _FRAME.fullmatch(line))


def standing(stacks: Mapping[int, tuple[str, ...]]) -> str:
    """Where all ranks are, in words; those first that the others may be waiting for.

    >>> standing({0: ('  File "/torch/distributed/c.py", line 5 in barrier',), 1: ('  File "/a/b.py", line 7 in f',)})
    'rank 1 in f (b.py:7), rank 0 waiting in barrier (c.py:5)'
    """
    places: dict[tuple[int, str], list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        places.setdefault(_place(stack), []).append(rank)
    return ", ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} {words}"
        for (_, words), ranks in sorted(places.items())
    )


def _place(stack: tuple[str, ...]) -> tuple[int, str]:
    """How surely the others are not being waited for here, and the place in words."""
    innermost = _FRAME.fullmatch(stack[0]) if stack else None
    if innermost is None:
        return 0, "not answering (stopped or exiting)"
    file, words = innermost["file"], f"{innermost['function']} ({Path(innermost['file']).name}:{innermost['line']})"
    if any(place in file for place in _COLLECTIVES):
        return 2, f"waiting in {words}"
    if file.endswith(_BACKWARD):  # torch's own code, which waits there for DDP's all-reduces
        return 1, "in backward or waiting for its collective"
    return 0, f"in {words}"
