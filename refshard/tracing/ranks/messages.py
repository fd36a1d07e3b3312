"""Messages by group, operation and size: how fast they move, and what holds exposed communication up."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from refshard.events.timeline import Nanoseconds
from refshard.tracing.collectives import NS, bus_factor
from refshard.tracing.figures import CollectiveFigures
from refshard.tracing.ranks.exposure import Exposure, split
from refshard.tracing.ranks.exposure_figures import Bound, CommunicationFigures, ExposedSplit, MessageFigures
from refshard.tracing.ranks.links import Links
from refshard.tracing.ranks.stragglers import Entered

NEAR = 0.7
"""From this share of the link's bandwidth on, bandwidth is what bounds a message."""
HALF = 0.5
_BUCKETS = (2**16, 2**20, 2**24, 2**28)
"""Sizes in bytes at which another class of messages begins."""
_LEAST_SIZES, _LEAST_SPREAD = 3, 8
"""Of sizes of one operation: how many a line needs, and how many times the smallest the largest must be."""
ALONE = "the traces of the other ranks are not here"
NO_PARTNER = "no collective could be matched with another rank's"
SOME = "some ranks of its groups are not here, or some collectives could not be matched"

_Key = tuple[str, str | None, int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What the trace tells of a process group."""

    ranks: tuple[int, ...]
    description: str | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """What the communication figures of one trace are made of, before its peers are known.

    ``groups`` are those of the trace that have a name, by it.
    """

    exposure: Exposure
    groups: Mapping[str, Group]
    links: Links


def communication(
    traffic: Traffic, collectives: Sequence[CollectiveFigures], entered: Mapping[int, Entered], *, alone: bool
) -> CommunicationFigures:
    """The communication of one trace; ``entered`` is what its peers tell of it, ``alone`` says that there are none."""
    begins = np.array([one.start_ns for one in collectives], np.int64)
    whole, *steps = split(traffic.exposure, begins, entered)
    parts = steps or [whole]
    messages = _messages(traffic, collectives, entered, _of_collectives(traffic.exposure, begins, entered))
    missing = ALONE if alone else NO_PARTNER if not entered else SOME
    return CommunicationFigures(
        whole=whole,
        steps=tuple(steps),
        messages=messages,
        bound=_bound(parts, messages),
        profile=traffic.links.profile,
        missing=missing if whole.undivided_ns else None,
        no_launch=traffic.exposure.no_launch,
    )


def _of_collectives(
    exposure: Exposure, begins: Nanoseconds, entered: Mapping[int, Entered]
) -> tuple[Nanoseconds, Nanoseconds]:
    """Exposed nanoseconds of each collective within the steps, and those of them in which it waited."""
    until = begins.copy()
    for number, one in entered.items():
        until[number] += one.waited_ns
    exposed, waited = np.zeros(len(begins), np.int64), np.zeros(len(begins), np.int64)
    first = 1 if len(exposure.steps) > 1 else 0
    for start, end in zip(exposure.starts[first:].tolist(), exposure.ends[first:].tolist()):
        pieces = exposure.pieces.within(start, end)
        np.add.at(exposed, pieces.owners, pieces.ends - pieces.starts)
        np.add.at(waited, pieces.owners, pieces.waited(until))
    return exposed, waited


def _messages(
    traffic: Traffic,
    collectives: Sequence[CollectiveFigures],
    entered: Mapping[int, Entered],
    times: tuple[Nanoseconds, Nanoseconds],
) -> tuple[MessageFigures, ...]:
    of_key: dict[_Key, list[int]] = defaultdict(list)
    for number, one in enumerate(collectives):
        size = None if one.bytes is None else sum(one.bytes >= bound for bound in _BUCKETS)
        of_key[one.op, one.group, one.group_size, size].append(number)
    fits = _fits(collectives, entered)
    found = []
    for (op, group, group_size, _), numbers in of_key.items():
        members = [collectives[number] for number in numbers]
        told = None if group is None else traffic.groups.get(group)
        ranks = told.ranks if told is not None else ()
        sizes = [one.bytes for one in members if one.bytes is not None]
        partners = [entered[number] for number in numbers if number in entered]
        found.append(
            MessageFigures(
                op=op,
                group=group,
                description=None if told is None else told.description,
                group_size=group_size,
                nodes=traffic.links.nodes(ranks),
                count=len(members),
                bytes=sum(sizes) if sizes else None,
                least_bytes=min(sizes, default=None),
                most_bytes=max(sizes, default=None),
                exposed_ns=int(times[0][numbers].sum()),
                waiting_ns=int(times[1][numbers].sum()) if partners else None,
                bus_bandwidth=_middle(one.bus_bandwidth for one in members),
                transfer_bandwidth=_middle(_transfer(collectives[n], entered.get(n)) for n in numbers),
                largest_bandwidth=max((b for one in members if (b := one.bus_bandwidth) is not None), default=None),
                link_bandwidth=traffic.links.bandwidth(op, ranks),
                is_latency_bound=_is_latency_bound(members, partners, fits.get((op, group)), traffic.links, ranks),
            )
        )
    return tuple(sorted(found, key=lambda one: -one.exposed_ns))


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _transfer(one: CollectiveFigures, entered: Entered | None) -> float | None:
    """Bus bandwidth by the duration of the rank that entered last."""
    factor = bus_factor(one.op, one.group_size)
    if entered is None or not entered.is_complete or not entered.shortest_ns or factor is None or one.bytes is None:
        return None
    return one.bytes * factor / (entered.shortest_ns * NS)


def _is_latency_bound(
    members: Sequence[CollectiveFigures],
    partners: Sequence[Entered],
    fit: tuple[float, float] | None,
    links: Links,
    ranks: Sequence[int],
) -> bool | None:
    """Whether at least half of what a typical one takes without waiting does not grow with its size.

    By the line through the trace's own sizes, or else by the profile's latency.
    """
    sizes = [one.bytes for one in members if one.bytes is not None]
    if not sizes:
        return None
    middle = int(median(sizes))
    if fit is not None:
        alpha, beta = fit
        return alpha >= HALF * (alpha + beta * middle)
    latency = links.latency_s(members[0].op, middle, ranks)
    complete = [one.shortest_ns for one in partners if one.is_complete]
    duration = median(complete or [one.duration_ns for one in members])
    return None if latency is None else latency >= HALF * duration * NS


def _fits(
    collectives: Sequence[CollectiveFigures], entered: Mapping[int, Entered]
) -> dict[tuple[str, str | None], tuple[float, float]]:
    """Nanoseconds at no size and per byte, for each operation of each group: a line that outliers do not move.

    Only of durations without waiting. None for too few sizes, or such as hardly differ.
    """
    points: dict[tuple[str, str | None], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, partner in entered.items():
        one = collectives[number]
        if partner.is_complete and one.bytes:
            points[one.op, one.group][one.bytes].append(partner.shortest_ns)
    found = {}
    for key, of_size in points.items():
        sizes = sorted(of_size)
        if len(sizes) >= _LEAST_SIZES and sizes[-1] >= _LEAST_SPREAD * sizes[0]:
            found[key] = _line([(size, median(of_size[size])) for size in sizes])
    return found


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Theil and Sen's: the median of all slopes, never below 0, and the median of what is left."""
    x, y = np.array(points, np.float64)[:256].T
    i, j = np.triu_indices(len(x), 1)
    beta = max(0.0, float(np.median((y[j] - y[i]) / (x[j] - x[i]))))
    return max(0.0, float(np.median(y - beta * x))), beta


def _bound(parts: Sequence[ExposedSplit], messages: Sequence[MessageFigures]) -> Bound | None:
    """Skew where waiting is at least half of the exposed time, latency where messages that it bounds are; else what the
    group, operation and size with most exposed time reach of their link.
    """
    exposed = sum(part.exposed_ns for part in parts)
    if not exposed:
        return None
    if sum(part.waiting_ns or 0 for part in parts) >= HALF * exposed:
        return "skew"
    if sum(one.exposed_ns for one in messages if one.is_latency_bound) >= HALF * exposed:
        return "latency"
    most = messages[0]
    reached = most.transfer_bandwidth if most.transfer_bandwidth is not None else most.bus_bandwidth
    if reached is None or most.link_bandwidth is None:
        return "unknown"
    return "bandwidth" if reached >= NEAR * most.link_bandwidth else "below"
