"""What the device recorded while a block ran, in few words; and the races in it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from refshard.dryrun.races import find_races
from refshard.dryrun.recording import Kind, collect
from refshard.fakecuda.build import NAME


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Lines such as ``launch aten::mul s0``, ``record e3 s0``, ``wait e3 s1`` and ``collective all_reduce s1``.

    Streams and events are numbered in the order in which they appear, the default stream being ``s0``.
    """
    ext: Any = sys.modules[NAME]
    lines: list[str] = []
    ext.clear_recording()
    ext.record(True)
    try:
        yield lines
    finally:
        ext.record(False)
    lines.extend(_lines(ext.recording()))
    ext.clear_recording()


@contextmanager
def racing() -> Iterator[list[str]]:
    """The races between streams in what this process does, of all its threads; see :mod:`refshard.dryrun.races`."""
    ext: Any = sys.modules[NAME]
    found: list[str] = []
    ext.clear_recording()
    ext.record(True)
    try:
        yield found
    finally:
        ext.record(False)
    found.extend(map(str, find_races(collect(ext, 0, 1))))
    ext.clear_recording()


def _lines(table: dict[str, Any]) -> Iterator[str]:
    streams: dict[int, str] = {0: "s0"}
    events: dict[int, str] = {}
    columns = (table[name].tolist() for name in ("kinds", "names", "streams", "subjects"))
    for kind, name, stream, subject in zip(*columns):
        on = streams.setdefault(stream, f"s{len(streams)}") if stream >= 0 else "host"
        match Kind(kind):
            case Kind.LAUNCH | Kind.COLLECTIVE | Kind.SYNCHRONISE:
                yield f"{Kind(kind).name.lower()} {table['name_table'][name]} {on}"
            case Kind.RECORD | Kind.WAIT:
                yield f"{Kind(kind).name.lower()} {events.setdefault(subject, f'e{len(events) + 1}')} {on}"
            case _:
                pass
