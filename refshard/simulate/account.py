"""Where the time of a simulated step goes: parts that add up to the whole, to the nanosecond."""

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from refshard.simulate.clock import NS, Schedule
from refshard.simulate.program import Item
from refshard.timeline import Kind

Cause = Literal["first gather", "gather in forward", "gather in backward", "reduction in backward", "last reductions"]
"""What compute waits for: the gathers before anything can run, those that did not end in time, gradient storage that a
reduction still holds, and what is left of the reductions when backward is over.
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step. ``compute_s`` and ``optimizer_s`` are as long as undisturbed, ``contention_s`` is what
    collectives and the kernels that prepare them add by running beside; ``copies_s`` are copies that compute makes for
    collectives; ``waits_by_cause_s`` is how long compute stands still for them.
    """

    compute_s: float
    optimizer_s: float
    copies_s: float
    contention_s: float
    waits_by_cause_s: dict[str, float]

    @property
    def waits_s(self) -> float:
        """How long compute stands still in all."""
        return sum(self.waits_by_cause_s.values())


def account(items: Sequence[Item], times: Schedule) -> Account:
    """Split the step's time. A wait is put down to what ended last of all that was waited for."""
    waits, end = dict.fromkeys(CAUSES, 0), 0
    parts = {"compute": 0.0, "optimizer": 0.0, "copies": 0.0}
    busy, computed = 0, False
    for index, item in enumerate(items):
        if item.lane != "compute":
            continue
        start = int(times.starts[index])
        if start > end:
            last = max((other for other in item.after), key=lambda other: times.ends[other], default=None)
            waits[_cause(item, items[last] if last is not None else None, first=not computed)] += start - end
        end = int(times.ends[index])
        busy += end - start
        part = "optimizer" if item.stage == "optimizer" else "compute" if item.kind is Kind.COMPUTE else "copies"
        parts[part] += item.seconds
        computed |= item.kind is Kind.COMPUTE
    waits["last reductions"] += times.length - end
    return Account(
        compute_s=parts["compute"],
        optimizer_s=parts["optimizer"],
        copies_s=parts["copies"],
        contention_s=max(0.0, busy / NS - sum(parts.values())),
        waits_by_cause_s={cause: ns / NS for cause, ns in waits.items()},
    )


def _cause(item: Item, awaited: Item | None, *, first: bool) -> Cause:
    """What ``item`` waited for; ``first``, nothing was computed before it."""
    if item.stage == "optimizer":
        return "last reductions"
    if awaited is not None and awaited.call is not None and awaited.call.op != "all_gather":
        return "reduction in backward"
    if first:
        return "first gather"
    return "gather in forward" if item.stage == "forward" else "gather in backward"
