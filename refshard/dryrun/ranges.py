"""Where the script's own phases begin and end: ranges of ``record_function`` and of NVTX with the phases' names."""

import re
import sys
import threading
from collections import Counter, defaultdict
from types import ModuleType
from typing import Any

import torch
from torch.autograd.profiler import record_function

from refshard.dryrun.observe import StepsDone
from refshard.dryrun.recording import BEGINS, ENDS

_OF_LIBRARIES = re.compile(r"[.:#(]")
"""In names that libraries give to ranges: ``FSDP::pre_forward``, ``Optimizer.step#AdamW.step``."""
_MOST_SEEN = 100


class Ranges:
    """Marks the ranges of ``phases`` through the device's extension ``ext``, and ends the script when the phase
    ``until[0]`` has ended ``until[1]`` times without an error. Of ranges of one name within each other, the outermost
    counts.

    ``seen`` are the names of the script's ranges, in the order in which they first began.
    """

    def __init__(self, ext: ModuleType, phases: tuple[str, ...], until: tuple[str, int] | None) -> None:
        self._ext, self._phases, self._until = ext, frozenset(phases), until
        self._depths, self._ended = Counter[str](), Counter[str]()
        self._pushed: defaultdict[int, list[str]] = defaultdict(list)
        self.seen: dict[str, None] = {}

    def install(self) -> None:
        """Follow ranges until this process ends."""
        nvtx: Any = torch.cuda.nvtx
        enter, leave, push, pop = record_function.__enter__, record_function.__exit__, nvtx.range_push, nvtx.range_pop

        def entered(range_: record_function) -> record_function:
            self._begin(range_.name)
            return enter(range_)  # type: ignore[no-any-return, no-untyped-call]

        def left(range_: record_function, kind: Any, *raised: Any) -> None:
            leave(range_, kind, *raised)
            self._end(range_.name, kind)

        def pushed(name: str) -> Any:
            self._pushed[threading.get_ident()].append(name)
            self._begin(name)
            return push(name)

        def popped() -> Any:
            depth = pop()
            if names := self._pushed[threading.get_ident()]:
                self._end(names.pop(), sys.exc_info()[0])
            return depth

        record_function.__enter__, record_function.__exit__ = entered, left  # type: ignore[method-assign]
        nvtx.range_push, nvtx.range_pop = pushed, popped

    def _begin(self, name: str) -> None:
        if len(self.seen) < _MOST_SEEN and not _OF_LIBRARIES.search(name):
            self.seen[name] = None
        if name in self._phases:
            self._depths[name] += 1
            if self._depths[name] == 1:
                self._ext.mark(BEGINS + name)

    def _end(self, name: str, raised: type[BaseException] | None) -> None:
        """If the run is over, the phase was cut and does not end."""
        if name not in self._phases or (raised is not None and issubclass(raised, StepsDone)):
            return
        self._depths[name] -= 1
        if not self._depths[name]:
            self._ext.mark(ENDS + name)
            self._ended[name] += raised is None
            if raised is None and (name, self._ended[name]) == self._until:
                raise StepsDone
