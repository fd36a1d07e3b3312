"""What several ranks' dry runs tell: where their collectives do not match, and which of them needs the most."""

from dataclasses import replace
from typing import Any

from refshard.analysis.mismatch import name_ranks
from refshard.dryrun.analyse import Analysis
from refshard.dryrun.ranks import RanksRun
from refshard.quantities import format_seconds
from refshard.report.blocks import Answer, Block, Notes, Quantity, Row, Section, Verdict, table
from refshard.report.dryrun.answer import dryrun_answer
from refshard.report.trace.hang import mismatch_objects, mismatch_section, mismatch_sentences


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
    return Verdict(sentences=[*mismatch_sentences(ran.mismatches), first, *rest], style="bad")


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
        blocks.append(mismatch_section(ran.mismatches))
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


def _as_object(ran: RanksRun, step_s: dict[int, float | None]) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "hangs": any(one.hangs for one in ran.mismatches),
        "collectives": ran.collectives,
        "mismatches": mismatch_objects(ran.mismatches),
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
