"""Which trace files are the ranks of one job."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from refshard.analysis.kineto import rank_of
from refshard.errors import TraceError
from refshard.events.table import DRY_RUN, WRITER, TraceFile, whole

_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a trace says of the job that it belongs to.

    ``start`` and ``end`` are nanoseconds since 1970, if the trace was recorded by a clock that counts them. ``facts``
    must be equal between the ranks of a job. ``is_dry_run``: ``refshard dryrun --trace`` wrote it.
    """

    path: Path
    rank: int | None
    world_size: int | None
    backend: str | None
    start: int
    end: int
    facts: str
    is_dry_run: bool = False


def identity_of(trace: TraceFile) -> Identity:
    """Read a trace's distributed metadata."""
    info = trace.metadata.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    base = trace.metadata.get("baseTimeNanoseconds")
    base = base if isinstance(base, int) else 0
    # What all ranks of a job say alike: the default group's ranks, NCCL's version and the kind of device.
    groups, devices = info.get("pg_config"), trace.metadata.get("deviceProperties")
    default = next((g for g in groups if isinstance(g, dict)), {}) if isinstance(groups, list) else {}
    names = sorted({str(d.get("name")) for d in devices if isinstance(d, dict)}) if isinstance(devices, list) else []
    tables = [events for events in (trace.host, trace.device) if len(events.starts)]
    return Identity(
        path=trace.path, rank=rank_of(trace), world_size=whole(info.get("world_size")),
        backend=info["backend"] if isinstance(info.get("backend"), str) else None,
        start=base + min((int(events.starts.min()) for events in tables), default=0),
        end=base + max((int(events.ends.max()) for events in tables), default=0),
        facts=msgspec.json.encode([default.get("ranks"), info.get("nccl_version"), names]).decode(),
        is_dry_run=trace.metadata.get(WRITER) == DRY_RUN,
    )  # fmt: skip


def group(identities: Sequence[Identity], *, one_job: bool = False) -> list[int]:
    """The number of each trace's job, from 0 in order of appearance.

    Traces form one job if they name the same world size, backend, process groups and kind of device, different ranks,
    and were recorded at overlapping times. A trace that names no rank or no world size is a job of its own. With
    ``one_job`` all traces are one job.

    Raises:
        TraceError: ``one_job``, but two traces name the same rank.
    """
    seen: dict[int, Path] = {}
    for one in identities if one_job else ():
        rank = one.rank if one.rank is not None else rank_in_name(one.path)
        if rank is not None and seen.setdefault(rank, one.path) is not one.path:
            raise TraceError(
                f"--job takes each rank once, but {seen[rank]} and {one.path} are both rank {rank}; leave one out, or "
                "omit --job to analyse them as separate jobs"
            )
    if one_job:
        return [0] * len(identities)
    jobs: list[list[int]] = []
    # In order of time, one that overlaps any of a job overlaps one that came before: the files' order does not matter.
    for place in sorted(range(len(identities)), key=lambda place: identities[place].start):
        members = next((m for m in jobs if _belongs(identities[place], [identities[other] for other in m])), None)
        if members is None:
            jobs.append(members := [])
        members.append(place)
    numbers = {place: job for job, members in enumerate(sorted(jobs, key=min)) for place in members}
    return [numbers[place] for place in range(len(identities))]


def rank_in_name(path: Path) -> int | None:
    """The rank in a file's name, for traces that do not name one.

    >>> rank_in_name(Path("trace_rank3.json.gz"))
    3
    """
    match = _RANK_IN_NAME.search(path.name)
    return int(match[1]) if match else None


def _belongs(one: Identity, members: Sequence[Identity]) -> bool:
    first = members[0]
    return (
        None not in (one.rank, one.world_size, first.rank, first.world_size)
        and (one.world_size, one.backend, one.facts) == (first.world_size, first.backend, first.facts)
        and all(one.rank != other.rank for other in members)
        and any(one.start < other.end and other.start < one.end for other in members)
    )
