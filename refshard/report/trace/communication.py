"""Exposed communication, divided, and how fast messages move: tables, and one sentence that answers what bounds it."""

from collections.abc import Sequence

from refshard.analysis.figures import CommunicationFigures, ExposedSplit, MessageFigures, TraceFigures
from refshard.quantities import format_bytes, format_ns, format_percent, format_rate
from refshard.report.blocks import Section
from refshard.report.trace.wording import per, section

_UNITS = 1e9
"""Bus bandwidths are in GB/s, as nccl-tests and data sheets give them."""


def exposed_section(figures: TraceFigures) -> Section | None:
    """Where exposed communication goes, per step; None for a trace without any."""
    found = figures.communication
    if found is None or not found.whole.exposed_ns:
        return None
    rows = [_row(f"step {one.step}", one) for one in found.steps] or [_row("whole trace", found.whole)]
    kept = [key for key in rows[0] if key in ("", "exposed") or any(row[key] != "-" for row in rows)]
    return section(
        title="Exposed communication",
        caption="transfer, waiting for a rank to enter, and what may be either; besides, idle time before a collective "
        "that the host launched late",
        rows=[{key: row[key] for key in kept} for row in rows],
        sentences=_unknown(found, figures),
        text=("waits for",),
    )


def _unknown(found: CommunicationFigures, figures: TraceFigures) -> list[str]:
    """Why a part of what is shown is not divided, and how large it is unless it is all."""
    parts = found.steps or (found.whole,)
    exposed, undivided = sum(one.exposed_ns for one in parts), sum(one.undivided_ns for one in parts)
    some = "" if undivided == exposed else f"In {format_ns(undivided)} of {format_ns(exposed)}, "
    of = "" if all(one.launch_ns is None for one in parts) else " of some steps"
    apart = f"{some}{'t' if some else 'T'}ransfer and waiting cannot be told apart"
    return [
        *([f"{apart}: {found.missing}. {_record(figures)}"] if found.missing and undivided else []),
        *([f"Late launches{of} are unknown: {found.no_launch}."] if found.no_launch else []),
    ]


def _row(name: str, one: ExposedSplit) -> dict[str, str]:
    peers = ", ".join(f"rank {peer.rank} {format_ns(peer.waited_ns)}" for peer in one.waits_for[:2])
    more = f" and {len(one.waits_for) - 2} more" if len(one.waits_for) > 2 else ""
    return {
        "": name,
        "exposed": format_ns(one.exposed_ns),
        "transfer": format_ns(one.transfer_ns),
        "waiting": format_ns(one.waiting_ns),
        "waits for": f"{peers}{more}" or "-",
        "transfer or waiting": format_ns(one.undivided_ns) if one.undivided_ns else "-",
        "idle before late launch": format_ns(one.launch_ns),
    }


def messages_section(figures: TraceFigures) -> Section | None:
    """Bus bandwidths by operation, size and group, beside the link's; None for a trace without collectives."""
    found = figures.communication
    if found is None or not found.messages:
        return None
    steps = max(1, len(found.steps))
    rows = [_message_row(one, steps, per(figures)) for one in found.messages]
    kept = [key for key in rows[0] if key in ("collective", "count in all") or any(row[key] != "-" for row in rows)]
    link = [f"The link's bandwidth is that of the cluster profile {found.profile}."] if "link GB/s" in kept else []
    return section(
        title="Messages",
        caption="bus bandwidths in GB/s, medians; without waiting: by the rank that entered last",
        rows=[{key: row[key] for key in kept} for row in rows],
        sentences=link,
        text=("size", "group", "spans"),
    )


def _message_row(one: MessageFigures, steps: int, head: str) -> dict[str, str]:
    return {
        "collective": short(one.op),
        "size": size_of(one),
        "group": group_name(one) or "-",
        "spans": reach(one) or "-",
        "count in all": f"{one.count:,}",
        f"exposed {head}": format_ns(one.exposed_ns / steps),
        "waiting": "-" if one.waiting_ns is None else format_ns(one.waiting_ns / steps),
        "GB/s": _rate(one.bus_bandwidth),
        "without waiting": _rate(one.transfer_bandwidth),
        "best GB/s": _rate(one.largest_bandwidth),
        "link GB/s": _rate(one.link_bandwidth),
        "latency-bound": {True: "yes", False: "no", None: "-"}[one.is_latency_bound],
    }


def short(op: str) -> str:
    """An operation; a kernel's name without its arguments."""
    return op.partition("(")[0].partition("<")[0]


def size_of(one: MessageFigures) -> str:
    """From the smallest message to the largest."""
    least, most = format_bytes(one.least_bytes), format_bytes(one.most_bytes)
    return least if least == most else f"{least} to {most}"


def group_name(one: MessageFigures) -> str:
    """A group by what the program calls it, else by its id, and with its ranks."""
    if one.group is None:
        return "" if one.group_size is None else f"{one.group_size} ranks"
    identity, bracket, ranks = one.group.partition(" [")
    return f"{one.description or identity}{bracket}{ranks}"


def reach(one: MessageFigures) -> str:
    """Whether the group lies inside a node."""
    return "" if one.nodes is None else "inside a node" if one.nodes == 1 else f"{one.nodes} nodes"


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else format_rate(bytes_per_s / _UNITS)


def answer(figures: TraceFigures) -> str:
    """Bandwidth, latency or skew? Empty without exposed communication, and where nothing can be said of its rate."""
    found = figures.communication
    if found is None or found.bound is None or not found.messages:
        return ""
    parts = found.steps or (found.whole,)
    exposed = sum(part.exposed_ns for part in parts)
    if found.bound == "skew":
        return _skew(parts, exposed)
    if found.bound == "latency":
        share = sum(one.exposed_ns for one in found.messages if one.is_latency_bound) / exposed
        most = next(one for one in found.messages if one.is_latency_bound)
        return (
            f"Latency-bound: {format_percent(share, 0)} of exposed communication is in messages whose time hardly "
            f"depends on their size; most in {_named(most)}."
        )
    return _of_rate(found, figures.device)


def _skew(parts: Sequence[ExposedSplit], exposed: int) -> str:
    waits: dict[int, int] = {}
    for part in parts:
        for peer in part.waits_for:
            waits[peer.rank] = waits.get(peer.rank, 0) + peer.waited_ns
    last = max(waits, key=lambda rank: waits[rank])
    share, most = sum(waits.values()) / exposed, waits[last] / sum(waits.values())
    return (
        f"Skew: {format_percent(share, 0)} of exposed communication is waiting for ranks that enter late, "
        f"{format_percent(most, 0)} of that for rank {last}."
    )


def _of_rate(found: CommunicationFigures, device: str) -> str:
    """What the messages with most exposed time reach of their link."""
    most = found.messages[0]
    alone = most.transfer_bandwidth is not None
    reached = most.transfer_bandwidth if alone else most.bus_bandwidth
    if found.bound == "unknown" and device == "cpu":
        return ""
    if reached is None:
        lacks = "its size" if most.most_bytes is None else "how many ranks its group has"
        return (
            f"Most exposed communication is {_named(most)}; its bandwidth is unknown: the trace does not say {lacks}."
        )
    waiting = "without waiting" if alone else "waiting for other ranks included"
    if found.bound == "unknown" or most.link_bandwidth is None:
        why = f"no cluster profile names {device}" if found.profile is None else "its group's ranks are not known"
        return f"{_named(most)} reaches {_rate(reached)} GB/s, {waiting}; the link's rate is unknown: {why}."
    word = "Bandwidth-bound" if found.bound == "bandwidth" else "Below the link"
    return (
        f"{word}: {_named(most)} reaches {_rate(reached)} of {_rate(most.link_bandwidth)} GB/s "
        f"(profile {found.profile}), {waiting}."
    )


def unknown_waiting(figures: TraceFigures) -> str:
    """That most of exposed communication may be waiting, and how to find out; empty where that is known.

    A link that runs near its peak, or messages that are all latency, leave no room for waiting.
    """
    found = figures.communication
    if found is None or found.missing is None or found.bound not in ("below", "unknown"):
        return ""
    parts = found.steps or (found.whole,)
    if 2 * sum(part.undivided_ns for part in parts) < sum(part.exposed_ns for part in parts):
        return ""
    return f"Waiting for other ranks cannot be told from a slow link: {found.missing}. {_record(figures)}"


def _record(figures: TraceFigures) -> str:
    """How to tell waiting."""
    size = figures.world_size
    ranks = "both ranks" if size == 2 else "all ranks" if size is None else f"all {size} ranks"
    return f"Record the same steps on {ranks}, a file each, and run refshard trace on their folder."


def _named(one: MessageFigures) -> str:
    where = ", ".join(part for part in (group_name(one), reach(one)) if part)
    size = "" if one.least_bytes is None else f" of {size_of(one)}"
    return f"{short(one.op)}{size}{f' ({where})' if where else ''}"
