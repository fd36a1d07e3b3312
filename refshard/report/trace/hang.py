"""What flight recorder dumps tell of a hang, and mismatches in general: those of dry runs, too."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from refshard.analysis.hang import Hang, Stand
from refshard.analysis.mismatch import Mismatch, name_ranks
from refshard.plain import plain
from refshard.report.blocks import Answer, Block, Notes, Row, Section, Text, Verdict, table

_SHOWN = 8
"""Mismatches with their stacks; first of each kind are enough to act on."""
_FOLLOWERS = 5


def hang_answer(hang: Hang) -> Answer:
    """The mismatches, where ranks stand, and what is not known. The status is 1 if the job hangs."""
    blocks: list[Block] = [mismatch_section(hang.mismatches)] if hang.mismatches else []
    ranks = [stand.rank for stand in hang.stands]
    title = f"Where {name_ranks(ranks)} stand{'s' if len(ranks) == 1 else ''}"
    blocks.append(Section(title=title, id="ranks", nav="Ranks", blocks=[table(_rows(hang.stands), text=_TEXT)]))
    held = [plain(str(one)) for one in hang.followers]
    more = len(held) - _FOLLOWERS
    few = [*held[:_FOLLOWERS], *([f"{more} more."] if more > 0 else [])]
    blocks.append(Notes(title="Held up by these", sentences=few, where="always" if len(held) < 3 else "detail"))
    blocks.append(Notes(title="Not known", sentences=[plain(doubt) for doubt in hang.doubts]))
    verdict = Verdict(sentences=_verdict(hang), style="bad" if hang.mismatches else "strong")
    stands = [
        {**msgspec.to_builtins(stand), "call": None if stand.call is None else str(stand.call)} for stand in hang.stands
    ]
    data = {
        "hangs": any(one.hangs for one in hang.mismatches),
        "verdict": list(verdict.sentences),
        "mismatches": mismatch_objects(hang.mismatches),
        "held_up": mismatch_objects(hang.followers),
        "doubts": list(hang.doubts),
        "silent": list(hang.silent),
        "ranks": [
            {**built, "places": [] if s.call is None else s.call.places} for built, s in zip(stands, hang.stands)
        ],
    }
    rows = [{**_object(stand), "places": " | ".join(_object(stand)["places"])} for stand in hang.stands]
    return Answer(data=data, rows=rows, blocks=[*blocks, verdict], status=1 if data["hangs"] else 0)


def mismatch_sentences(mismatches: Sequence[Mismatch]) -> list[str]:
    """The first one, and how many there are besides."""
    first, *others = mismatches
    more = f"{len(others)} more {'mismatch' if len(others) == 1 else 'mismatches'} in other groups."
    return [f"{'HANGS' if first.hangs else 'WRONG VALUES'}: {plain(str(first))}", *([more] if others else [])]


def mismatch_section(mismatches: Sequence[Mismatch]) -> Section:
    """Mismatches, each with the lines of the script that lead to its calls."""
    title = "MISMATCHES: calls of collectives that differ between ranks"
    lines = "\n\n".join(map(_with_stacks, mismatches[:_SHOWN]))
    return Section(title=title, id="mismatches", nav="Mismatches", blocks=[Text(text=plain(lines), style="code")])


def mismatch_objects(mismatches: Sequence[Mismatch]) -> list[dict[str, Any]]:
    """For ``--json``."""
    return [{**msgspec.to_builtins(one), "says": str(one), "hangs": one.hangs} for one in mismatches]


def _object(stand: Stand) -> dict[str, Any]:
    call, group = stand.call, stand.group
    return {
        "rank": stand.rank, "waits": stand.waits, "op": None if call is None else call.op,
        "bytes": None if call is None or call.bytes < 0 else call.bytes, "dtype": "" if call is None else call.dtype,
        "number": stand.number or None, "group": None if group is None else str(group), "created_ns": stand.created_ns,
        "calls": stand.calls, "lost": stand.lost, "places": () if call is None else call.places,
    }  # fmt: skip


def _with_stacks(one: Mismatch) -> str:
    lines = [str(one)]
    for side in one.sides:
        if side.call is not None and side.call.places:
            lines.append(f"  {name_ranks(side.ranks)}: {'after ' if side.passed else ''}{side.call.op}")
            lines += [f"    {place}" for place in side.call.places]
    return "\n".join(lines)


def _verdict(hang: Hang) -> list[str]:
    calls, ranks = sum(stand.calls for stand in hang.stands), [stand.rank for stand in hang.stands]
    silent = [f"{name_ranks(hang.silent).capitalize()} left no dump."] if hang.silent else []
    if hang.mismatches:
        return [*mismatch_sentences(hang.mismatches), *silent]
    if hang.doubts:
        return ["No hang can be proved from these dumps: see above.", *silent]
    return [f"No hang found: the {calls:,} calls of {name_ranks(ranks)} match, and all have ended.", *silent]


_TEXT = ("stands", "call", "group", "called (UTC)")


def _rows(stands: Sequence[Stand]) -> list[Row]:
    """Ranks that stand at the same place share a row; those that wait for nobody come first."""
    found: dict[object, list[Stand]] = defaultdict(list)
    for stand in sorted(stands, key=lambda one: one.waits):
        found[stand.waits, str(stand.call), stand.group, stand.number].append(stand)
    rows: list[Row] = []
    for same in found.values():
        one = same[0]
        times = [stand.created_ns for stand in same if stand.created_ns is not None]
        rows.append(
            {
                "ranks": name_ranks(stand.rank for stand in same).partition(" ")[2],
                "stands": "waits in" if one.waits else "after" if one.call is not None else "recorded no call",
                "call": "-" if one.call is None else plain(str(one.call)),
                "number": one.number or None,
                "group": "-" if one.group is None else plain(str(one.group).removeprefix("the group of ")),
                "called (UTC)": f"{datetime.fromtimestamp(min(times) / 1e9, UTC):%H:%M:%S.%f}"[:-3] if times else "-",
            }
        )
    return rows
