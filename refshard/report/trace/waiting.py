"""Which rank the others wait for, and why, in sentences."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from refshard.quantities import format_ns, format_percent
from refshard.report.trace.jobs import capital, mean, parts, who
from refshard.report.trace.per_step import in_each
from refshard.tracing.figures import Cause, TraceFigures
from refshard.tracing.names import name_in_words

LONGER = 1.02
"""A rank that computes so many times as long as another computes longer."""


def exposed_waits(one: TraceFigures) -> dict[int, int]:
    """Exposed nanoseconds in which a rank waited for others, by rank, the longest first; over its steps."""
    sums: Counter[int] = Counter()
    told = one.communication
    for part in () if told is None else told.steps or (told.whole,):
        for peer in part.waits_for:
            sums[peer.rank] += peer.waited_ns
    return dict(sums.most_common())


def balance(members: Sequence[TraceFigures], worst: TraceFigures, exposed: float, waits: dict[int, int]) -> str:
    """Why the ``worst`` rank, which exposes so many nanoseconds a step, ``waits`` (by rank), and what to look at."""
    a, steps = in_each(worst), len(parts(worst))
    last = next(iter(waits))
    told = (
        f"{capital(who(worst))} exposes {format_ns(exposed)} {a}, {format_ns(sum(waits.values()) / steps)} of it "
        f"waiting in collectives for {_for_whom(waits, last, steps)} to enter. "
    )
    late_one = next((one for one in members if one.rank == last), None)
    if late_one is None:
        return f"{told}Balance the work, or look at the host of rank {last}."
    its, own = (mean([one], lambda part: part.compute_ns) for one in (late_one, worst))
    times = f"{format_ns(its)} {a} against {format_ns(own)}"
    waited = sum(waits.values()) / steps
    # Compute explains a wait only if there is enough of it: 1 ms more does not hold another rank up for a second.
    if its > LONGER * own and its - own >= waited / 2:
        return f"{told}{capital(who(late_one))} computes {times}: balance the work, or look at that host."
    how = "less" if own > LONGER * its else "more" if its > LONGER * own else "about as long"
    told += f"{capital(who(late_one))} computes {how} ({times})"
    idle = mean([late_one], lambda part: part.idle_ns)
    if idle >= waited / 2 and late_one.idle:
        return f"{told} but idles for {format_ns(idle)}, {_mostly(late_one)}"
    return f"{told}: look at what else delays that host."


def _mostly(one: TraceFigures) -> str:
    """What a rank that others wait for idled for most, and what to do about it."""
    most = max(one.idle, key=lambda idle: idle.ns)
    place = "in" if most.cause == Cause.CALL else "before"
    what = name_in_words(most.what) if most.what else "the next kernel"
    return (
        f"{format_ns(most.ns / len(parts(one)))} of it {place} {what}: look at what that host does there, not at the "
        "network."
    )


def _for_whom(waits: dict[int, int], last: int, steps: int) -> str:
    if len(waits) == 1:
        return f"rank {last}"
    return f"the last rank (longest for rank {last}: {format_ns(waits[last] / steps)})"


def late(members: Sequence[TraceFigures]) -> str:
    """The rank that the others wait for longest, in a sentence; empty where none waits.

    The time is a mean over the other ranks and their steps, so that it never exceeds a step.
    """
    total: Counter[int] = Counter()
    of_rank: dict[int, float] = defaultdict(float)
    for one in members:
        for wait in one.waits_for:
            total[wait.rank] += wait.waited_ns
            of_rank[wait.rank] += wait.waited_ns / len(parts(one))
    if not total.total():
        return ""
    last, waited = total.most_common(1)[0]
    others = [one for one in members if one.rank != last]
    on_average = "" if len(others) == 1 else " on average"
    waiting = f"{who(others[0])} waits" if len(others) == 1 else f"the {len(others)} others wait"
    return (
        f"Of the {len(members)} ranks here, rank {last} is waited for longest: {waiting} "
        f"{format_ns(of_rank[last] / len(others))} {in_each(members[0])} for it{on_average} "
        f"({format_percent(waited / total.total(), 0)} of all waiting between them)."
    )
