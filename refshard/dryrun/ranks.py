"""Dry-run several ranks of a script, and match their collectives.

Ranks run in processes of their own. The first one runs alone, because most values that
ranks send each other come from it. A rank that was given other values than the others have in the end runs again.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from refshard.analysis.mismatch import Mismatch
from refshard.dryrun.exchange import Values, unsettled
from refshard.dryrun.matching import Matched, Ran, match
from refshard.dryrun.price import is_message
from refshard.dryrun.recording import GROUP, Kind, Recording
from refshard.dryrun.request import Request
from refshard.dryrun.run import DryRun, dry_run_among

ALL, DISTINCT = "all", "distinct"
_MOST_ROUNDS = 4
"""In which ranks exchange values; what has not settled by then is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RanksRun:
    """The runs by rank, and where their collectives do not match. Values that ``unsettled`` ranks were given are not
    those that the others have in the end: nothing is blamed on them. ``again`` counts runs that were repeated.
    """

    runs: Mapping[int, DryRun]
    matched: Matched
    unsettled: tuple[int, ...] = ()
    again: int = 0

    @property
    def mismatches(self) -> tuple[Mismatch, ...]:
        """Where collectives do not match."""
        return self.matched.mismatches

    @property
    def collectives(self) -> int:
        """How many calls of collectives all ranks made together."""
        return sum(int((run.recording.kinds == Kind.COLLECTIVE).sum()) for run in self.runs.values())

    @property
    def failed(self) -> int | None:
        """The first rank with a script that failed."""
        return next((rank for rank, run in self.runs.items() if run.answer.outcome == "failed"), None)

    @property
    def largest(self) -> int:
        """The rank with the highest peak of reserved memory; the first of those that failed or ran out of memory."""
        if self.failed is not None:
            return self.failed
        return max(self.runs, key=lambda rank: _memory(self.runs[rank]))


def _memory(run: DryRun) -> tuple[bool, int, int]:
    peak = run.answer.peak
    return run.refused is not None or run.answer.outcome == "oom", peak.reserved, peak.allocated


def read_ranks(text: str, world_size: int) -> str | tuple[int, ...]:
    """The value of ``--ranks``: :data:`ALL`, :data:`DISTINCT`, or numbers.

    >>> read_ranks("7,0,1", 8)
    (0, 1, 7)

    Raises:
        ValueError: it is none of these, or there is no such rank.
    """
    if text in (ALL, DISTINCT):
        return text
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() for word in words):
        raise ValueError(f"ranks must be all, distinct or numbers such as 0,1,7, got '{text}'")
    found = tuple(sorted({int(word) for word in words}))
    if found[-1] >= world_size:
        raise ValueError(f"ranks must be from 0 to {world_size - 1} with {world_size} GPUs, got {found[-1]}")
    return found


def distinct(recording: Recording, local_ranks: int) -> tuple[int, ...]:
    """Ranks that can differ from the one that ran, by its process groups.

    These are the first two ranks and the last one, the first one of the second node, and from each group its second
    and its last rank. Where ranks of a group send each other messages, as the stages of a pipeline do, all of them.
    """
    last = recording.world_size - 1
    found = {recording.rank, 0, min(1, last), last, min(local_ranks, last)}
    messages = set((recording.subjects[is_message(recording)] & GROUP).tolist())
    for number, group in recording.groups.items():
        found |= set(group.ranks if number in messages else (*group.ranks[1:2], group.ranks[-1]))
    return tuple(sorted(found))


def run_ranks(request: Request, which: str | tuple[int, ...], jobs: int) -> RanksRun:
    """Run the ranks that ``which`` names (:func:`read_ranks`), ``jobs`` at a time; that of ``request`` does not matter.

    Raises:
        RefshardError: as :func:`refshard.dryrun.run.dry_run`.
    """
    everyone = range(request.world_size if which == ALL else 1)
    chosen: Sequence[int] = which if isinstance(which, tuple) else everyone
    first = chosen[0]
    runs = {first: dry_run_among(msgspec.structs.replace(request, rank=first), {}, quiet=False)}
    if which == DISTINCT:
        chosen = distinct(runs[first].recording, request.local_ranks)
    given: dict[int, Values] = {first: {}}
    rest = [rank for rank in chosen if rank != first]
    again = -len(rest)
    for _ in range(_MOST_ROUNDS):
        again += len(rest)
        values = _sent(runs)
        given |= dict.fromkeys(rest, values)
        runs |= _run_all(request, rest, values, jobs)
        if not (rest := [rank for rank in runs if unsettled(rank, given[rank], _sent(runs))]):
            break
    for rank, run in sorted(runs.items()):
        if run.answer.outcome == "failed" and run.output:
            print(f"refshard: output of rank {rank}:\n{run.output}", file=sys.stderr, flush=True)
    ordered = dict(sorted(runs.items()))
    known = {
        rank: Ran(recording=run.recording, whole=run.answer.outcome == "ended")
        for rank, run in ordered.items()
        if rank not in rest
    }
    return RanksRun(runs=ordered, matched=match(known), unsettled=tuple(sorted(rest)), again=again)


def _run_all(request: Request, ranks: Iterable[int], values: Values, jobs: int) -> dict[int, DryRun]:
    def run(rank: int) -> DryRun:
        return dry_run_among(msgspec.structs.replace(request, rank=rank), values, quiet=True)

    ranks = list(ranks)
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(ranks, pool.map(run, ranks)))


def _sent(runs: Mapping[int, DryRun]) -> Values:
    return {rank: run.sent for rank, run in runs.items()}
