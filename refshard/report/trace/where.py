"""Where the mean step of a trace goes: the parts of the bar that its page begins with."""

from collections.abc import Sequence
from statistics import fmean

from refshard.analysis.analyse import Analysis
from refshard.analysis.attribution import Attribution, Work, attribute, class_of_work
from refshard.analysis.figures import Cause, TraceFigures
from refshard.report.draw.palette import RED, SPANS, STEP, Look
from refshard.report.draw.palette import WORK as WORKS
from refshard.report.trace.findings import WORK
from refshard.report.trace.text import IDLE

RECOMPUTATION = "recomputation"
"""The part that a dry run knows apart; in a trace it is work of its class."""
LOOKS = {
    **WORKS, RECOMPUTATION: Look("#4d4d9f", "x"), "copies": SPANS["copy"], "preparation of a reduction": SPANS["prep"],
    "communication: transfer": STEP["exposed communication"], "communication: waiting": Look(RED, "x"),
    "communication: transfer or waiting": Look(RED, "."), **{name: STEP[name] for name in IDLE.values()},
}  # fmt: skip
"""Looks of the parts of a step."""
_CAUSES = {cause.replace("_", " "): name for cause, name in IDLE.items()}


def where_parts(figures: TraceFigures, found: Attribution) -> dict[str, float]:
    """The mean step in seconds, every nanosecond of it once: compute by class, what is exposed, idle time by cause."""
    parts = dict.fromkeys(LOOKS, 0.0)
    for owner in found.owners:
        for name, share in parts_of(owner.work, figures).items():
            parts[name] += share * owner.ns / found.steps / 1e9
    return parts


def where_means(side: Sequence[Analysis]) -> dict[str, float]:
    """The means of :func:`where_parts` over the ranks of a job, as far as they are analysed to be compared or drawn."""
    found = [(one.figures, one.attribution or (attribute(one.kept) if one.kept else None)) for one in side]
    every = [where_parts(figures, attribution) for figures, attribution in found if attribution]
    return {name: fmean(parts[name] for parts in every) for name in LOOKS}


def parts_of(work: Work, figures: TraceFigures) -> dict[str, float]:
    """The parts that own the time of a work, with their shares of it."""
    if work.kind == "idle":
        return {_CAUSES.get(work.bound or "", IDLE[Cause.UNKNOWN]): 1.0}
    if work.kind == "comm":
        return {f"communication: {name}": share for name, share in _exposed_shares(figures).items()}
    if work.kind in ("prep", "copy"):
        return {"copies" if work.kind == "copy" else "preparation of a reduction": 1.0}
    return {WORK.get(class_of_work(work), "other kernels") if work.kind == "compute" else "other kernels": 1.0}


def _exposed_shares(figures: TraceFigures) -> dict[str, float]:
    """Shares of exposed communication that are transfer, waiting for other ranks, or either."""
    found = figures.communication
    every = () if found is None else found.steps or (found.whole,)
    sums = {
        "transfer": sum(one.transfer_ns or 0 for one in every), "waiting": sum(one.waiting_ns or 0 for one in every),
        "transfer or waiting": sum(one.undivided_ns for one in every),
    }  # fmt: skip
    total = sum(sums.values())
    return {name: ns / total for name, ns in sums.items()} if total else {"transfer or waiting": 1.0}
