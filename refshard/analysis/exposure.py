"""Exposed communication: which collectives cause it, how much is waiting for a rank, and how fast messages move.

Clocks of hosts cannot be compared to the microsecond, durations can. If every rank needs every other, a collective ends
for all ranks at once. So the last rank to enter has the shortest duration, and each other rank waited for its own
duration minus the shortest.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import cast

import msgspec
import numpy as np

from refshard.analysis.collectives import NS, bus_factor, ran
from refshard.analysis.figures import (
    Bound,
    CollectiveFigures,
    CommunicationFigures,
    ExposedSplit,
    MessageFigures,
    PeerWait,
    RankWait,
    TraceFigures,
    TraceWarning,
)
from refshard.analysis.kineto import Group
from refshard.analysis.overlap import ended_by_launch, knows_launches
from refshard.costs import GroupShape, bus_bandwidth, collective_cost, group_shape
from refshard.errors import SpecError
from refshard.events.timeline import UNKNOWN, Intervals, Ints, Kind, Mask, Nanoseconds, Rows, Timeline, ranges
from refshard.specs.cluster import COLLECTIVES, ClusterSpec, CollectiveOp, cluster_of_device, load_cluster

_MOST_CELLS = 4_000_000
"""Size limit of the tables that align two sequences; longer sequences that differ are not matched."""
_UNEVEN = "all_to_all"
"""Ranks may each move another number of bytes in it."""

Place = int
"""Index of a trace in the given list."""
Sequences = Mapping[Place, Sequence[tuple[int, CollectiveFigures]]]
"""The collectives of one group by trace, each with its number in that trace, in order."""
Match = dict[Place, int]
"""One collective: its number in each of the traces that has it."""


def match(of_trace: Sequences, steps: Mapping[Place, frozenset[int | None]]) -> list[Match]:
    """The collectives that at least two traces have. ``steps`` are the steps marked in each trace, if any.

    With sequence numbers in all traces, collectives of one number and operation are one, coalesced ones in their order.
    Else steps of one number are compared, and what lies outside of the steps is not; traces without steps are compared
    as a whole. See :func:`_align`.
    """
    if all(one.sequence is not None for own in of_trace.values() for _, one in own):
        found: dict[tuple[int | None, str, int], Match] = defaultdict(dict)
        for place, own in of_trace.items():
            seen = Counter[tuple[int | None, str]]()
            for number, one in own:
                found[one.sequence, one.op, seen[one.sequence, one.op]][place] = number
                seen[one.sequence, one.op] += 1
        return [one for one in found.values() if len(one) > 1]
    known = {place: steps[place] - {None} for place in of_trace}
    if not all(known.values()):
        return _align(of_trace)
    aligned = list[Match]()
    for step in sorted(set[int | None]().union(*known.values())):  # type: ignore[type-var]
        of_step = {place: [pair for pair in own if pair[1].step == step] for place, own in of_trace.items()}
        inside = {place: own for place, own in of_step.items() if step in known[place]}
        aligned += _align(inside) if len(inside) > 1 else []
    return aligned


def _align(of_trace: Sequences) -> list[Match]:
    """Match by order.

    Traces whose sequences of operation, size and dtype are equal are matched one by one; the sizes of an all-to-all may
    differ there. Any other is compared with the sequence that most traces have (of several, the first trace's): matched
    is what every longest common subsequence of the two pairs alike. What could be matched in several ways is not.
    """
    exact = {place: [(one.op, one.bytes, one.dtype) for _, one in own] for place, own in of_trace.items()}
    plain = {
        place: tuple((op, None if op == _UNEVEN else size, dtype) for op, size, dtype in own)
        for place, own in exact.items()
    }
    common = Counter(plain.values())
    reference = max(common, key=lambda one: common[one]) if len(common) < len(plain) else next(iter(plain.values()))
    chosen = next(place for place, one in plain.items() if one == reference)
    found: list[Match] = [{} for _ in reference]
    for place, own in of_trace.items():
        if plain[place] == reference:
            pairs = [(k, k) for k in range(len(reference))]
        else:
            pairs = certain_pairs(exact[chosen], exact[place])
        for k, theirs in pairs:
            found[k][place] = own[theirs][0]
    return [one for one in found if len(one) > 1]


def certain_pairs(a: Sequence[object], b: Sequence[object]) -> list[tuple[int, int]]:
    """The places in ``a`` and ``b`` that every longest common subsequence of them pairs with each other.

    >>> certain_pairs("xabc", "abc"), certain_pairs("aab", "ab")
    ([(1, 0), (2, 1), (3, 2)], [(2, 1)])
    """
    if not a or not b or len(a) * len(b) > _MOST_CELLS:
        return []
    codes: dict[object, int] = {}
    first, second = (np.array([codes.setdefault(x, len(codes)) for x in one]) for one in (a, b))
    ahead = _common_lengths(first, second)
    behind = _common_lengths(first[::-1], second[::-1])[::-1, ::-1]
    on_longest = (first[:, None] == second) & (ahead[:-1, :-1] + 1 + behind[1:, 1:] == ahead[-1, -1])
    rows, columns = np.nonzero(on_longest)
    # The k-th pair of each longest subsequence has k common places before it: certain is the only one with as many.
    levels = ahead[rows, columns]
    _, place, times = np.unique(levels, return_index=True, return_counts=True)
    alone = place[times == 1]
    return list(zip(rows[alone].tolist(), columns[alone].tolist()))


def _common_lengths(a: Rows, b: Rows) -> Ints:
    """At ``[i, j]`` the length of the longest common subsequence of the first i of ``a`` and the first j of ``b``."""
    found = np.zeros((len(a) + 1, len(b) + 1), np.int32)
    for i, one in enumerate(a):
        extended = np.maximum(found[i, 1:], found[i, :-1] + (b == one))
        found[i + 1, 1:] = np.maximum.accumulate(extended)
    return found


_POINT_TO_POINT = frozenset(("send", "recv", "send_recv", "peer_copy"))
_ONE_SIDED = frozenset(("broadcast", "reduce", "gather", "scatter"))
"""In these a rank may leave before another has entered, so durations do not show waiting."""

Key = tuple[str, str]
"""A group, and within an unnamed one the operation."""


class Entered(msgspec.Struct, frozen=True, kw_only=True):
    """What the traces of other ranks say about one collective of a trace.

    It ``waited_ns`` at its beginning for ``rank`` (None if it was the last itself), which was in it for
    ``shortest_ns``. Where not ``is_complete``, ranks of the group are missing, so that it may have waited longer.
    """

    waited_ns: int
    rank: int | None
    shortest_ns: int
    is_complete: bool


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """For each of the traces given, in their order, whom its rank waited for, the longest first; and the doubts.

    ``entered`` tells the same of each trace's matched collectives, by their number in it. ``matches`` are those
    in which every rank needs every other.
    """

    waits_for: tuple[tuple[RankWait, ...], ...]
    warnings: tuple[TraceWarning, ...]
    entered: tuple[dict[int, Entered], ...] = ()
    matches: tuple[Match, ...] = ()


def rank_waits(figures: Sequence[TraceFigures]) -> Waits:
    """How long each rank of one job stood in collectives that another was the last to enter.

    Collectives are matched by :func:`match` within a group; where groups are unnamed, within
    an operation over the whole job. Of ranks that entered last together the lowest is named. A rank waits at the
    beginning of a collective, and waits that run at once, in collectives of several streams or threads, count once. A
    wait of nothing is no wait. In traces with steps, only waits in collectives of the steps count.
    """
    steps = {place: frozenset(step.step for step in one.steps) for place, one in enumerate(figures)}
    entered: list[dict[int, Entered]] = [{} for _ in figures]
    warnings, lonely, every, kept = [], 0, 0, list[Match]()
    for key, of_trace in _by_group(figures).items():
        if len(of_trace) < 2:
            continue
        sizes = [c.group_size for sequence in of_trace.values() for _, c in sequence if c.group_size is not None]
        count = sum(map(len, of_trace.values()))
        if sizes and len(of_trace) > min(sizes):  # several groups share one name
            name = f"group {key[0]}" if key[0] else f"the unnamed group of {key[1]}"
            text = f"{name} is of {min(sizes)} ranks but appears on {len(of_trace)}: several groups share the name, so "
            text += "waits in them are not attributed to ranks"
            warnings.append(TraceWarning(code="groups_alike", message=text, count=count))
            continue
        matches = match(of_trace, steps)
        every, lonely = every + count, lonely + count - sum(map(len, matches))
        for one in matches:
            ran = {place: figures[place].collectives[number] for place, number in one.items()}
            first = next(iter(ran.values()))
            if first.op in _ONE_SIDED:
                continue
            kept.append(one)
            last = min(ran, key=lambda place: (ran[place].duration_ns, figures[place].rank))
            size = first.group_size or figures[last].world_size
            for place, number in one.items():
                waited = ran[place].duration_ns - ran[last].duration_ns
                entered[place][number] = Entered(
                    waited_ns=waited, rank=figures[last].rank if waited else None,
                    shortest_ns=ran[last].duration_ns, is_complete=size is not None and len(one) >= size,
                )  # fmt: skip
    if lonely:
        text = (
            f"{lonely} of {every} collectives could not be matched with those of the other ranks here, so waits in "
            "them are unknown: they lie outside the steps or in steps that only some ranks have, or the ranks' "
            "sequences of operation and size differ there. Check that the traces are of the same steps"
        )
        warnings.append(TraceWarning(code="collectives_differ", message=text, count=lonely))
    waits_for = []
    for trace, own in zip(figures, entered):
        waits, in_steps = (
            defaultdict[int, list[tuple[int, int]]](list),
            any(one.step is not None for one in trace.steps),
        )
        for number, wait in own.items():
            collective = trace.collectives[number]
            if wait.waited_ns and wait.rank is not None and (collective.step is not None or not in_steps):
                waits[wait.rank].append((collective.start_ns, collective.start_ns + wait.waited_ns))
        found = [
            RankWait(rank=rank, waited_ns=Intervals.of(pairs).length, collectives=len(pairs))
            for rank, pairs in waits.items()
        ]
        waits_for.append(tuple(sorted(found, key=lambda one: (-one.waited_ns, one.rank))))
    return Waits(waits_for=tuple(waits_for), warnings=tuple(warnings), entered=tuple(entered), matches=tuple(kept))


def _by_group(figures: Sequence[TraceFigures]) -> dict[Key, dict[int, list[tuple[int, CollectiveFigures]]]]:
    """The collectives of each group whose partners are known, by trace, the lowest rank first."""
    present = [i for i, trace in enumerate(figures) if trace.rank is not None]
    found: dict[Key, dict[int, list[tuple[int, CollectiveFigures]]]] = defaultdict(lambda: defaultdict(list))
    for i in sorted(present, key=lambda i: (figures[i].rank, i)):
        for number, collective in enumerate(figures[i].collectives):
            size, world_size = collective.group_size, figures[i].world_size
            # One of an unnamed subgroup may have any partners.
            is_known = collective.group is not None or size is None or world_size is None or size == world_size
            if collective.op not in _POINT_TO_POINT and is_known:
                key = ("", collective.op) if collective.group is None else (collective.group, "")
                found[key][i].append((number, collective))
    return found


NO_HOST = "nothing is launched on a CPU"
NO_LAUNCHES = "the trace has no launches; record CPU activities too"
_EVER = np.iinfo(np.int64)
SOME_LAUNCHES = "some collectives have no launch in the trace"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Disjoint intervals ``[starts[i], ends[i])`` of exposed communication, in order.

    ``owners`` are the numbers of the collectives that they belong to, in the order of the trace's figures: of several
    that run, the one that started first.
    """

    starts: Nanoseconds
    ends: Nanoseconds
    owners: Rows

    def within(self, start: int, end: int) -> "Pieces":
        """What lies in one window."""
        first, last = np.searchsorted(self.ends, start, side="right"), np.searchsorted(self.starts, end, side="left")
        rows = slice(int(first), max(int(first), int(last)))
        return Pieces(
            starts=np.maximum(self.starts[rows], start), ends=np.minimum(self.ends[rows], end), owners=self.owners[rows]
        )

    def waited(self, until: Nanoseconds) -> Nanoseconds:
        """Nanoseconds of each piece before ``until[owner]``."""
        return np.maximum(0, np.minimum(self.ends, until[self.owners]) - self.starts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exposure:
    """The exposed communication of a trace, and the windows that figures are about: the whole trace, then its steps.

    ``launch`` is the time of each window in which nothing ran because the next collective was launched late; None, and
    ``no_launch`` says why, where that is unknown.
    """

    pieces: Pieces
    steps: tuple[int | None, ...]
    starts: Nanoseconds
    ends: Nanoseconds
    launch: tuple[int | None, ...]
    no_launch: str | None


def exposure_of(timeline: Timeline, steps: Sequence[int | None], starts: Nanoseconds, ends: Nanoseconds) -> Exposure:
    """Find the exposed communication of a timeline; windows are ``[starts[i], ends[i])``, of ``steps[i]``."""
    spans, compute = timeline.spans, timeline.busy(Kind.COMPUTE)
    # Each nanosecond of communication counts for the collective whose span started first.
    owner_of = np.full(len(spans), UNKNOWN, np.int64)
    for number, (collective, *_) in enumerate(ran(timeline)):
        owner_of[list(collective.rows)] = number
    rows = np.flatnonzero((owner_of != UNKNOWN) & spans.of_kind(Kind.COMM))
    begins = spans.starts[rows].copy()
    begins[1:] = np.maximum(begins[1:], np.maximum.accumulate(spans.ends[rows])[:-1])
    rows, begins = rows[spans.ends[rows] > begins], begins[spans.ends[rows] > begins]
    # Without what compute hides.
    free_starts = np.concatenate(([_EVER.min], compute.ends))
    free_ends = np.concatenate((compute.starts, [_EVER.max]))
    first = np.searchsorted(free_ends, begins, side="right")
    mine, free = ranges(first, np.searchsorted(free_starts, spans.ends[rows], side="left"))
    pieces = Pieces(
        starts=np.maximum(free_starts[free], begins[mine]), ends=np.minimum(free_ends[free], spans.ends[rows][mine]),
        owners=owner_of[rows][mine],
    )  # fmt: skip
    launch, why = _launch(timeline, starts, ends)
    return Exposure(pieces=pieces, steps=tuple(steps), starts=starts, ends=ends, launch=tuple(launch), no_launch=why)


def _launch(timeline: Timeline, starts: Nanoseconds, ends: Nanoseconds) -> tuple[list[int | None], str | None]:
    """Idle time per window that ends with a collective launched after the idle time began."""
    spans, busy = timeline.spans, timeline.busy(*Kind)
    if not timeline.on_device or not knows_launches(spans):
        return [None] * len(starts), NO_LAUNCHES if timeline.on_device else NO_HOST
    rows = np.flatnonzero(spans.of_kind(Kind.COMM) & (spans.ends > spans.starts))
    place = np.searchsorted(busy.starts, spans.starts[rows])
    ending = (place > 0) & (busy.starts[np.minimum(place, len(busy.starts) - 1)] == spans.starts[rows])
    rows, place = rows[ending], place[ending]
    # If several start at once, the one launched first; one with an unknown launch may be it.
    order = np.lexsort((spans.queued[rows], place))
    place, first = np.unique(place[order], return_index=True)
    began, until, queued = busy.ends[place - 1], busy.starts[place], spans.queued[rows[order][first]]
    found, doubts = (
        Intervals(began[which], until[which]).within(starts, ends).tolist()
        for which in (ended_by_launch(began, until, queued), queued == UNKNOWN)
    )
    known = [None if doubt else ns for ns, doubt in zip(found, doubts)]
    return known, SOME_LAUNCHES if None in known else None


def split(exposure: Exposure, begins: Nanoseconds, entered: Mapping[int, Entered]) -> tuple[ExposedSplit, ...]:
    """Divide the exposed communication of each window.

    ``begins`` are the starts of the trace's collectives, ``entered`` says, by number, when others entered.
    """
    until, peers, is_complete = _waits(begins, entered)
    found = []
    for step, start, end, launch in zip(
        exposure.steps, exposure.starts.tolist(), exposure.ends.tolist(), exposure.launch
    ):
        pieces = exposure.pieces.within(start, end)
        lengths, waited, owners = pieces.ends - pieces.starts, pieces.waited(until), pieces.owners
        exposed, waiting = int(lengths.sum()), int(waited.sum())
        transfer = int((lengths - waited)[is_complete[owners]].sum())
        of_peer = [(int(peer), int(waited[peers[owners] == peer].sum())) for peer in np.unique(peers[owners])]
        waits_for = [PeerWait(rank=peer, waited_ns=ns) for peer, ns in of_peer if peer != UNKNOWN and ns]
        found.append(
            ExposedSplit(
                step=step, exposed_ns=exposed, transfer_ns=transfer if is_complete.any() else None,
                waiting_ns=waiting if entered else None, undivided_ns=exposed - waiting - transfer, launch_ns=launch,
                waits_for=tuple(sorted(waits_for, key=lambda one: (-one.waited_ns, one.rank))),
            )
        )  # fmt: skip
    return tuple(found)


def _waits(begins: Nanoseconds, entered: Mapping[int, Entered]) -> tuple[Nanoseconds, Rows, Mask]:
    """Until when each collective waited, for which rank, and whether its whole group is known."""
    until, peers, is_complete = begins.copy(), np.full(len(begins), UNKNOWN, np.int64), np.zeros(len(begins), np.bool_)
    for number, one in entered.items():
        until[number] += one.waited_ns
        peers[number] = UNKNOWN if one.rank is None else one.rank
        is_complete[number] = one.is_complete
    return until, peers, is_complete


_LARGE = 2**36
"""Bytes of a message so large that latency does not matter."""
_MOST_IN_A_HOST = 16
"""Accelerators of one host; a profile with more on a node joins several hosts by what usually joins one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """How the ranks of a trace are joined.

    ``profile`` names the cluster profile of the device, None if no profile has it. ``ranks_per_node`` is how many
    consecutive ranks share a node, None if that is unknown.
    """

    profile: str | None = None
    cluster: ClusterSpec | None = None
    ranks_per_node: int | None = None

    def nodes(self, ranks: Sequence[int]) -> int | None:
        """How many nodes these ranks lie on; None where the trace does not list them, or not the devices of a node."""
        if not ranks or self.ranks_per_node is None:
            return None
        return len({rank // self.ranks_per_node for rank in ranks})

    def bandwidth(self, op: str, ranks: Sequence[int]) -> float | None:
        """Bus bandwidth that large messages reach in this group, bytes per second."""
        cluster, shape = self._shape(op, ranks)
        if cluster is None or shape is None:
            return None
        known = cast(CollectiveOp, op)
        return bus_bandwidth(known, _LARGE, shape.ranks, collective_cost(cluster, known, _LARGE, shape).transfer_s)

    def latency_s(self, op: str, nbytes: int, ranks: Sequence[int]) -> float | None:
        """What ``op`` takes in this group however little it moves, seconds, by the way that is best for ``nbytes``."""
        cluster, shape = self._shape(op, ranks)
        if cluster is None or shape is None:
            return None
        return collective_cost(cluster, cast(CollectiveOp, op), nbytes, shape).latency_s

    def _shape(self, op: str, ranks: Sequence[int]) -> tuple[ClusterSpec | None, GroupShape | None]:
        if self.cluster is None or len(ranks) < 2 or op not in COLLECTIVES or self.ranks_per_node is None:
            return None, None
        cluster = msgspec.structs.replace(self.cluster, ranks_per_node=self.ranks_per_node)
        shape = group_shape(cluster, ranks)
        return (None, None) if shape.nodes > 1 and cluster.between is None else (cluster, shape)


@lru_cache(maxsize=64)
def links_of(device: str, devices: int | None) -> Links:
    """The links of a trace of ``device`` by a process that sees ``devices`` of them, None if the trace lists none.

    A process that sees one device only may have been shown no more: then the ranks of a node are unknown.
    """
    try:
        profile = cluster_of_device(device)
    except SpecError:
        return Links(ranks_per_node=devices if devices and devices > 1 else None)
    cluster = load_cluster(profile)
    seen = devices if devices and devices > 1 else None
    joined = cluster.ranks_per_node if cluster.ranks_per_node > _MOST_IN_A_HOST else seen
    return Links(profile=profile, cluster=cluster, ranks_per_node=joined)


NEAR = 0.7
"""From this share of the link's bandwidth on, bandwidth is what bounds a message."""
HALF = 0.5
_BUCKETS = (2**16, 2**20, 2**24, 2**28)
"""Sizes in bytes at which another class of messages begins."""
_LEAST_SIZES, _LEAST_SPREAD = 3, 8
"""A line needs this many sizes of one operation, the largest at least this many times the smallest."""
ALONE = "the traces of the other ranks are not here"
NO_PARTNER = "no collective could be matched with another rank's"
SOME = "some ranks of its groups are not here, or some collectives could not be matched"

_Key = tuple[str, str | None, int | None, int | None]


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
    """The communication of one trace; ``entered`` is what its peers' traces add, ``alone`` if there are none."""
    begins = np.array([one.start_ns for one in collectives], np.int64)
    whole, *steps = split(traffic.exposure, begins, entered)
    parts = steps or [whole]
    # Exposed nanoseconds of each collective within the steps, and those of them in which it waited.
    exposure, (until, _, _) = traffic.exposure, _waits(begins, entered)
    exposed, waited = np.zeros(len(begins), np.int64), np.zeros(len(begins), np.int64)
    for start, end in zip(exposure.starts[-len(parts) :].tolist(), exposure.ends[-len(parts) :].tolist()):
        pieces = exposure.pieces.within(start, end)
        np.add.at(exposed, pieces.owners, pieces.ends - pieces.starts)
        np.add.at(waited, pieces.owners, pieces.waited(until))
    messages = _messages(traffic, collectives, entered, (exposed, waited))
    missing = ALONE if alone else NO_PARTNER if not entered else SOME
    return CommunicationFigures(
        whole=whole, steps=tuple(steps), messages=messages, bound=_bound(parts, messages),
        profile=traffic.links.profile, missing=missing if whole.undivided_ns else None,
        no_launch=traffic.exposure.no_launch,
    )  # fmt: skip


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
        text = None if group is None else traffic.groups.get(group)
        ranks = text.ranks if text is not None else ()
        sizes = [one.bytes for one in members if one.bytes is not None]
        rates = [one.bus_bandwidth for one in members if one.bus_bandwidth is not None]
        partners = [entered[number] for number in numbers if number in entered]
        # By the duration of the rank that entered last.
        transfers = [
            size * factor / (partner.shortest_ns * NS)
            for number in numbers
            for factor, size, partner in [(bus_factor(op, group_size), collectives[number].bytes, entered.get(number))]
            if partner and partner.is_complete and partner.shortest_ns and factor is not None and size is not None
        ]
        found.append(
            MessageFigures(
                op=op, group=group, description=None if text is None else text.description, group_size=group_size,
                nodes=traffic.links.nodes(ranks), count=len(members), bytes=sum(sizes) if sizes else None,
                least_bytes=min(sizes, default=None), most_bytes=max(sizes, default=None),
                exposed_ns=int(times[0][numbers].sum()),
                waiting_ns=int(times[1][numbers].sum()) if partners else None,
                bus_bandwidth=median(rates) if rates else None,
                transfer_bandwidth=median(transfers) if transfers else None,
                largest_bandwidth=max(rates, default=None), link_bandwidth=traffic.links.bandwidth(op, ranks),
                is_latency_bound=_is_latency_bound(members, partners, fits.get((op, group)), traffic.links, ranks),
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda one: -one.exposed_ns))


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
    """Latency in ns and ns per byte of each operation of each group: a robust line fit.

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
            # Theil and Sen's line: the median of all slopes, never below 0, and the median of what is left.
            x, y = np.array([(size, median(of_size[size])) for size in sizes], np.float64)[:256].T
            i, j = np.triu_indices(len(x), 1)
            beta = max(0.0, float(np.median((y[j] - y[i]) / (x[j] - x[i]))))
            found[key] = max(0.0, float(np.median(y - beta * x))), beta
    return found


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
