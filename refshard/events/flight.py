"""Flight recorder dumps: the latest collectives of each rank, as torch's process groups record them by themselves.

NCCL's and gloo's groups keep a ring of ``TORCH_FR_BUFFER_SIZE`` (earlier ``TORCH_NCCL_TRACE_BUFFER_SIZE``) entries, and
write it as a pickle with Python frames or as JSON without. The format is that of torch's ``FlightRecorder``, versions
2.1 (torch 2.4) to 2.10 (torch 2.13).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from refshard.errors import TraceError
from refshard.events.pickles import is_pickle, opened, read_pickle
from refshard.events.sites import sites_of

_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|gz|bin))*$")
_MOST_RANKS, _MOST_PLACES = 2**20, 8


class _Frame(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    filename: str
    line: int
    name: str


class Entry(msgspec.Struct, kw_only=True, gc=False):
    """A collective or message as one rank called it. ``record_id`` counts all that the rank called, from 0; times are
    nanoseconds since 1970. Entries of one coalesced call share a ``collective_seq_id``, or ``p2p_seq_id``. ``places``
    are lines of the script, as ``project/train.py:31 in train``, from the innermost on; of torch, only if nothing else
    called.
    """

    record_id: int
    process_group: tuple[str, str]
    collective_seq_id: int
    profiling_name: str
    p2p_seq_id: int = 0
    state: str = "scheduled"
    is_p2p: bool = False
    retired: bool = False
    input_sizes: list[list[int]] = []
    output_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    output_dtypes: list[str] = []
    time_created_ns: int | None = None
    frames: list[_Frame] = []
    places: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether it ended. Gloo never changes a state, and retires what ended; NCCL retires what failed, too."""
        return self.state == "completed" or (self.retired and self.profiling_name.startswith("gloo:"))


class _Group(msgspec.Struct, kw_only=True):
    desc: str = ""
    ranks: str | list[int] = ""


class _Dump(msgspec.Struct, kw_only=True):
    entries: list[Entry] = []
    version: str = ""
    pg_config: dict[str, _Group] = {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flight:
    """One rank's dump. ``groups`` are the global ranks of process groups by name; gloo leaves them empty.
    ``written_ns`` is when the file was last written, in nanoseconds since 1970; 0 if unknown.
    """

    rank: int
    entries: tuple[Entry, ...]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    written_ns: int = 0

    @property
    def lost(self) -> int:
        """How many calls the ring dropped, the earliest."""
        return self.entries[0].record_id if self.entries else 0


def flight_of(rank: int, dump: Any, written_ns: int = 0) -> Flight:
    """A dump that was read already.

    Raises:
        ValueError: it is no dump, or of a version that lacks what is needed.
    """
    if not isinstance(dump, dict) or "version" not in dump:
        raise ValueError("not a flight recorder dump: it has no version")
    if not isinstance(dump.get("entries", []), list):
        raise ValueError("its entries are no list")
    if any(isinstance(one, dict) and "collective_seq_id" not in one for one in dump.get("entries", [])):
        raise ValueError(f"version {dump['version']} does not number the calls of a group; record with torch >= 2.4")
    try:
        found = msgspec.convert(dump, type=_Dump)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    groups = {name: _ranks_of(group.ranks) for name, group in found.pg_config.items()}
    entries = sorted(found.entries, key=lambda entry: entry.record_id)
    for last, one in pairwise(entries):
        # What closes a batch of messages is none to some versions.
        if last.is_p2p and one.profiling_name.endswith(":coalesced") and one.p2p_seq_id == last.p2p_seq_id:
            one.is_p2p = True
    for one in entries:
        one.places, one.frames = _places(tuple(one.frames)), []
    return Flight(
        rank=rank, entries=tuple(entries), groups={name: ranks for name, ranks in groups.items() if ranks},
        written_ns=written_ns,
    )  # fmt: skip


def read_flights(paths: Sequence[Path]) -> dict[int, Flight]:
    """The dumps in files and folders, by rank, which is the number at the end of a file's name.

    Raises:
        TraceError: a file is damaged or no dump, its name has no rank, two files are of one rank, or there is none.
    """
    found: dict[int, tuple[Path, Flight]] = {}
    for path in paths:
        is_folder = path.is_dir()
        for file in sorted(path.rglob("*")) if is_folder else [path]:
            if is_folder and (file.name[0] == "." or not file.is_file()):
                continue
            number = _RANK.search(file.name)
            if number is None or int(number[1]) >= _MOST_RANKS:
                if is_folder:
                    continue
                raise TraceError(f"{file}: a dump's name must end with its rank, as nccl_trace_rank_3; rename it")
            rank = int(number[1])
            if rank in found:
                raise TraceError(f"{file}: is of rank {rank}, as {found[rank][0]} is; name the dumps of one hang only")
            found[rank] = file, _read(file, rank)
    if not found:
        names = ", ".join(map(str, paths))
        raise TraceError(f"{names}: no flight recorder dumps; their names end with the rank, as nccl_trace_rank_3")
    return {rank: flight for rank, (_, flight) in sorted(found.items())}


def _read(file: Path, rank: int) -> Flight:
    if is_pickle(file):
        dump = read_pickle(file, "a flight recorder dump", "record fewer entries (TORCH_FR_BUFFER_SIZE)")
    else:
        try:
            with opened(file) as stream:
                dump = json.loads(stream.read())
        except (OSError, EOFError) as error:
            raise TraceError(f"{file}: cannot be read ({error})") from None
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{file}: neither a pickle nor JSON of a flight recorder ({error})") from None
    try:
        return flight_of(rank, dump, file.stat().st_mtime_ns)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file}: no dump of torch's flight recorder ({error})") from None


@lru_cache(maxsize=1 << 14)
def _places(frames: tuple[_Frame, ...]) -> tuple[str, ...]:
    sites = list(sites_of([msgspec.to_builtins(frame) for frame in frames]))
    own = [site for site in sites if not site.is_of_torch] or sites[:1]
    return tuple(f"{site.short} in {site.function}" for site in own[:_MOST_PLACES])


def _ranks_of(text: str | list[int]) -> tuple[int, ...]:
    return tuple(text) if isinstance(text, list) else tuple(map(int, re.findall(r"\d+", text)))
