"""What several ranks' dry runs tell: where their collectives do not match, and which of them needs the most."""

from dataclasses import replace
from typing import Any

import msgspec

from refshard.dryrun.analyse import Analysis
from refshard.dryrun.matching import Mismatch, name_ranks
from refshard.dryrun.ranks import RanksRun
from refshard.quantities import format_seconds
from refshard.report.blocks import Answer, Block, Notes, Quantity, Row, Section, Text, Verdict, table
from refshard.report.dryrun.answer import dryrun_answer

_SHOWN = 8
"""Mismatches with their stacks; first of each kind are enough to act on."""


def ranks_answer(ran: RanksRun, found: Analysis, step_s: dict[int, float | None], more: str = "") -> Answer:
    """The report of the rank with the largest peak, ``found``, and what all ranks tell. ``step_s`` are step times by
    rank. The status is 1 if collectives do not match.
    """
    answer = dryrun_answer(found, more, ranks=name_ranks(ran.runs))
    *blocks, last = answer.blocks
    assert isinstance(last, Verdict)
    verdict = _verdict(ran, found, step_s, last)
    data = {**answer.data, "ranks": _as_object(ran, step_s)}
    return replace(
        answer, data=data, blocks=[*blocks[:1], *_sections(ran, step_s), *blocks[1:], verdict],
        status=1 if ran.mismatches else answer.status,
    )  # fmt: skip


def _verdict(ran: RanksRun, found: Analysis, step_s: dict[int, float | None], alone: Verdict) -> Verdict:
    """Hangs first, then what the rank with the largest peak says."""
    rank = found.run.request.rank
    first, *rest = alone.sentences
    if len(ran.runs) > 1:
        first = f"{first} (rank {rank}{'' if ran.failed is not None else ', the largest peak'})"
    slowest = _slowest(step_s)
    if slowest is not None and slowest != rank:
        rest.append(f"The slowest is rank {slowest}: step time {format_seconds(step_s[slowest])}.")
    if not ran.mismatches:
        return replace(alone, sentences=[first, *rest, *_matched(ran)])
    worst = ran.mismatches[0]
    head = f"{'HANGS' if worst.hangs else 'WRONG VALUES'}: {worst}"
    others = len(ran.mismatches) - 1
    more = [f"{others} more {'mismatch' if others == 1 else 'mismatches'} in other groups."] if others else []
    return Verdict(sentences=[head, *more, first, *rest], style="bad")


def _matched(ran: RanksRun) -> list[str]:
    if ran.failed is not None:
        return []
    if ran.matched.doubts:
        return ["No hang found, but ranks made different numbers of calls: see above."]
    return [f"No hang found: the {ran.collectives:,} collectives of {name_ranks(ran.runs)} match."]


def _slowest(step_s: dict[int, float | None]) -> int | None:
    known = {rank: seconds for rank, seconds in step_s.items() if seconds is not None}
    return max(known, key=lambda rank: known[rank]) if known else None


def _sections(ran: RanksRun, step_s: dict[int, float | None]) -> list[Block]:
    rows: list[Row] = [
        {"rank": rank, "outcome": _outcome(ran, rank), "steps": run.answer.steps_taken,
         "peak reserved": Quantity(run.answer.peak.reserved, "B"),
         "peak allocated": Quantity(run.answer.peak.allocated, "B"), "step time": Quantity(step_s.get(rank), "s")}
        for rank, run in ran.runs.items()
    ]  # fmt: skip
    blocks: list[Block] = []
    if ran.mismatches:
        title = "MISMATCHES: calls of collectives that do not meet their like on other ranks"
        lines = "\n\n".join(_with_stacks(one) for one in ran.mismatches[:_SHOWN])
        blocks.append(Section(title=title, id="mismatches", nav="Mismatches", blocks=[Text(text=lines, style="code")]))
    notes = [*ran.matched.doubts]
    if ran.again:
        notes.append(
            f"{ran.again} {'run' if ran.again == 1 else 'runs'} repeated with the values that other ranks sent."
        )
    if ran.unsettled:
        notes.append(
            f"The values that {name_ranks(ran.unsettled)} got from others had not settled after several runs: their "
            "collectives are not matched."
        )
    within: list[Block] = [table(rows), *([Notes(sentences=notes)] if notes else [])]
    blocks.append(Section(title=f"{len(ran.runs)} ranks ran", id="ranks", nav="Ranks", blocks=within))
    return blocks


def _outcome(ran: RanksRun, rank: int) -> str:
    run = ran.runs[rank]
    return "out of memory" if run.refused is not None else run.answer.outcome


def _with_stacks(one: Mismatch) -> str:
    """A mismatch, and the lines of the script that lead to each side's call."""
    lines = [str(one)]
    for side in one.sides:
        if side.call is not None and side.call.places:
            lines.append(f"  {name_ranks(side.ranks)}: {side.call.op}")
            lines += [f"    {place}" for place in side.call.places]
    return "\n".join(lines)


def _as_object(ran: RanksRun, step_s: dict[int, float | None]) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "hangs": any(one.hangs for one in ran.mismatches),
        "collectives": ran.collectives,
        "mismatches": [
            {**msgspec.to_builtins(one), "says": str(one), "hangs": one.hangs} for one in ran.mismatches
        ],
        "doubts": list(ran.matched.doubts),
        "unsettled": list(ran.unsettled),
        "slowest": _slowest(step_s),
        "largest": ran.largest,
        "by_rank": [
            {"rank": rank, "outcome": run.answer.outcome, "steps_taken": run.answer.steps_taken,
             "error": run.answer.error, "where": run.answer.where,
             "peak_reserved_bytes": run.answer.peak.reserved, "peak_allocated_bytes": run.answer.peak.allocated,
             "fits": run.refused is None and run.answer.outcome != "oom", "step_s": step_s.get(rank)}
            for rank, run in ran.runs.items()
        ],
    }  # fmt: skip
