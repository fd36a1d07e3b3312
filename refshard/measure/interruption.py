"""Signals that ask this process to end: noted where nothing may be cut short, raised elsewhere."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_Handler = Callable[[int, FrameType | None], object] | int | None


class Interruption:
    """Notes signals that ask this process to end, and passes the first on at its end: to the previous handler, or as
    KeyboardInterrupt without one.

    Nothing is raised in between, so that processes, a network or a line of a file are completed or removed undisturbed,
    whenever and however often a signal comes. Signals that are ignored (``nohup``) stay so. Outside the main thread it
    does nothing, since Python handles no signal there.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._kept: dict[int, _Handler] = {}

    @property
    def received(self) -> bool:
        """Whether this process got a signal to end."""
        return bool(self._received)

    def __enter__(self) -> "Interruption":
        self._kept = _handle(lambda number, _frame: self._received.append(number))
        return self

    def __exit__(self, *exc_info: object) -> None:
        _restore(self._kept)
        if not self._received:
            return
        before = self._kept[self._received[0]]
        if callable(before):
            before(self._received[0], None)
        else:
            raise KeyboardInterrupt(signal.Signals(self._received[0]).name)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let every such signal raise KeyboardInterrupt, as SIGINT does by itself."""
    with _handled(_interrupt):
        yield


@contextmanager
def mortal() -> Iterator[None]:
    """Let every such signal end this process at once while there is nothing to clean up: while modules are imported,
    which may take an exception for a missing library, or swallow it.
    """
    with _handled(signal.SIG_DFL):
        yield


def ignore_more() -> None:
    """Ignore further signals: this process is about to end."""
    _handle(signal.SIG_IGN)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def _handled(handler: _Handler) -> Iterator[None]:
    kept = _handle(handler)
    try:
        yield
    finally:
        _restore(kept)


def _handle(handler: _Handler) -> dict[int, _Handler]:
    """Set it for every signal that is not ignored, and return what was set before."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    kept: dict[int, _Handler] = {n: signal.getsignal(n) for n in _INTERRUPTIONS}
    kept = {number: before for number, before in kept.items() if before not in (signal.SIG_IGN, None)}
    for number in kept:
        signal.signal(number, handler)
    return kept


def _restore(kept: dict[int, _Handler]) -> None:
    for number, handler in kept.items():
        signal.signal(number, handler)
