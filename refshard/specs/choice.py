"""Which of several equally fast options to use: one rule for measured runs, dry runs, sweeps and plans."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
OWN = "refshard-"
"""The names of this project's own strategies begin with it."""
EQUAL_MEMORY = 0.03
"""Relative difference of peak memories under which two options need equally much: between two launches of one case
the figure varies by about 3 % on a CPU."""


def equal_memory(options: Sequence[T], memory: Callable[[T], float | None]) -> list[T]:
    """The options that need at most :data:`EQUAL_MEMORY` more than the least; all if the memory of one is not known."""
    sizes = [size for option in options if (size := memory(option))]
    if len(sizes) < len(options):
        return list(options)
    return [option for option, size in zip(options, sizes) if size <= min(sizes) * (1 + EQUAL_MEMORY)]


def leanest(options: Sequence[T], memory: Callable[[T], float | None], strategy: Callable[[T], str]) -> T:
    """The option to use of equally fast ones, fastest first: the one with the least memory; of several with equally
    much the first of a peer, which users have already, before this project's own.

    >>> sizes = {"refshard-fsdp": 50, "fsdp2": 51, "ddp": 90}
    >>> leanest(list(sizes), sizes.get, str)
    'fsdp2'
    """
    return min(equal_memory(options, memory), key=lambda option: strategy(option).startswith(OWN))
