"""How fast messages move, beside the link, and what bounds exposed communication."""

import numpy as np
import pytest

from refshard.tracing.exposure import Exposure, Links, Pieces, Traffic, communication, links_of
from refshard.tracing.figures import CollectiveFigures, CommunicationFigures, MessageFigures
from refshard.tracing.issued import Group
from refshard.tracing.skew import Entered

US, MIB = 1000, 2**20
H100, MI300X = "NVIDIA H100 80GB HBM3", "AMD Instinct MI300X"
NODE, PAIR, ACROSS = tuple(range(8)), (0, 1), tuple(range(16))


def ran(op: str, nbytes: int | None, ns: int, group: str = "0 [0-7]", size: int = 8) -> CollectiveFigures:
    factor = {"all_reduce": 2 * (size - 1) / size, "all_gather": (size - 1) / size}.get(op, 1.0)
    return CollectiveFigures(
        op=op, unit=None, step=None, group=group, group_size=size, dtype="Float", lane="stream 7", start_ns=0,
        duration_ns=ns, exposed_ns=ns, exposed_any_ns=ns, queued_ns=None, bytes=nbytes, algorithm_bandwidth=None,
        bus_bandwidth=None if nbytes is None else factor * nbytes / (ns * 1e-9), gap_ns=None, gap_blocking=None,
    )  # fmt: skip


def told(
    *collectives: CollectiveFigures, device: str = MI300X, devices: int | None = 8,
    shortest: dict[int, int] | None = None, ranks: tuple[int, ...] = NODE,
) -> CommunicationFigures:  # fmt: skip
    """The communication of collectives that follow one another, all exposed; ``shortest`` durations are the peers'."""
    ends = np.cumsum([one.duration_ns for one in collectives])
    starts = ends - [one.duration_ns for one in collectives]
    placed = [
        CollectiveFigures(**{**{f: getattr(one, f) for f in one.__struct_fields__}, "start_ns": int(start)})
        for one, start in zip(collectives, starts)
    ]
    exposure = Exposure(
        pieces=Pieces(starts=starts, ends=ends, owners=np.arange(len(collectives))), steps=(None,),
        starts=starts[:1], ends=ends[-1:], launch=(0,), no_launch=None,
    )  # fmt: skip
    groups = {one.group: Group(ranks=ranks, description="mesh_tp") for one in placed if one.group is not None}
    entered = {
        number: Entered(
            waited_ns=placed[number].duration_ns - ns, rank=1 if placed[number].duration_ns > ns else None,
            shortest_ns=ns, is_complete=True,
        )
        for number, ns in (shortest or {}).items()
    }  # fmt: skip
    traffic = Traffic(exposure=exposure, groups=groups, links=links_of(device, devices))
    return communication(traffic, placed, entered, alone=not entered)


def test_messages_are_told_by_group_operation_and_size() -> None:
    found = told(
        ran("all_reduce", 16 * MIB, 100 * US),
        ran("all_reduce", 20 * MIB, 300 * US),
        ran("all_gather", 16 * MIB, 50 * US),
        ran("all_reduce", 2 * MIB, 10 * US),
        ran("all_reduce", 16 * MIB, 40 * US, group="1 [0-7]"),
    )
    rows = [(m.op, m.group, m.count, m.least_bytes, m.most_bytes, m.bytes, m.exposed_ns) for m in found.messages]
    assert rows == [
        ("all_reduce", "0 [0-7]", 2, 16 * MIB, 20 * MIB, 36 * MIB, 400 * US),
        ("all_gather", "0 [0-7]", 1, 16 * MIB, 16 * MIB, 16 * MIB, 50 * US),
        ("all_reduce", "1 [0-7]", 1, 16 * MIB, 16 * MIB, 16 * MIB, 40 * US),
        ("all_reduce", "0 [0-7]", 1, 2 * MIB, 2 * MIB, 2 * MIB, 10 * US),
    ]
    assert {m.description for m in found.messages} == {"mesh_tp"}
    assert sum(m.exposed_ns for m in found.messages) == found.whole.exposed_ns


def first(**given: object) -> MessageFigures:
    found: MessageFigures = told(ran("all_reduce", 16 * MIB, 200 * US), **given).messages[0]  # type: ignore[arg-type]
    return found


def test_bandwidth_without_waiting_is_that_of_the_rank_that_entered_last() -> None:
    alone, together = first(), first(shortest={0: 100 * US})
    assert alone.bus_bandwidth == together.bus_bandwidth == pytest.approx(1.75 * 16 * MIB / 200e-6)
    assert (alone.transfer_bandwidth, alone.waiting_ns) == (None, None)
    assert together.transfer_bandwidth == pytest.approx(1.75 * 16 * MIB / 100e-6)
    assert together.waiting_ns == 100 * US


@pytest.mark.parametrize(
    ("device", "devices", "ranks", "nodes", "gb_per_s"),
    [
        (MI300X, 8, NODE, 1, 300),
        (H100, 8, NODE, 1, 350),
        (H100, 8, ACROSS, 2, 300),  # all eight adapters of a node
        (H100, 8, (0, 8), 2, 37.5),  # one of eight
        (H100, 4, NODE, 2, 300),  # nodes of four
        (H100, 1, NODE, None, None),  # a process that was shown one device
        (H100, None, NODE, None, None),
        ("NVIDIA GB200", 4, NODE, 1, 670),  # NVLink joins several hosts
        ("NVIDIA A100-PG509-200", 8, NODE, 1, None),  # no profile
        (H100, 8, (), None, None),  # a group whose ranks are not listed
    ],
)
def test_the_links_peak_is_the_profiles_and_depends_on_where_the_ranks_are(
    device: str, devices: int | None, ranks: tuple[int, ...], nodes: int | None, gb_per_s: float | None
) -> None:
    one = first(device=device, devices=devices, ranks=ranks)
    assert one.nodes == nodes
    assert one.link_bandwidth == (None if gb_per_s is None else pytest.approx(gb_per_s * 1e9, rel=0.01))


def test_an_operation_that_no_profile_prices_has_no_peak() -> None:
    assert told(ran("send", MIB, US)).messages[0].link_bandwidth is None
    assert Links(ranks_per_node=8).bandwidth("all_reduce", NODE) is None


def at(gb_per_s: float, nbytes: int = 512 * MIB) -> CollectiveFigures:
    """An all-reduce of 8 ranks at this bus bandwidth."""
    return ran("all_reduce", nbytes, round(1.75 * nbytes / gb_per_s))


@pytest.mark.parametrize(
    ("collectives", "given", "bound"),
    [
        ((at(280),), {}, "bandwidth"),
        ((at(209),), {}, "below"),  # 70 % of 300 is 210
        ((at(211),), {}, "bandwidth"),
        ((at(3.5),), {}, "below"),
        ((at(3.5),), {"device": "NVIDIA A100-PG509-200"}, "unknown"),
        ((at(3.5),), {"devices": 1}, "unknown"),
        ((ran("all_reduce", None, US),), {}, "unknown"),
        # Half of the time waiting is skew, a little less is not.
        ((ran("all_reduce", 512 * MIB, 6000 * US),), {"shortest": {0: 3000 * US}}, "skew"),
        ((ran("all_reduce", 512 * MIB, 6000 * US),), {"shortest": {0: 3001 * US}}, "bandwidth"),
        # By the profile: 17 us to launch and 14 hops of 3.6 us are at least half of 100 us, and not of 200.
        ((ran("all_reduce", 4096, 100 * US),), {}, "latency"),
        ((ran("all_reduce", 4096, 200 * US),), {}, "below"),
        ((ran("all_reduce", 4096, 100 * US), at(280)), {}, "bandwidth"),
    ],
)
def test_bandwidth_latency_or_skew(
    collectives: tuple[CollectiveFigures, ...], given: dict[str, object], bound: str
) -> None:
    assert told(*collectives, **given).bound == bound  # type: ignore[arg-type]


def test_latency_is_read_off_the_traces_own_sizes_where_waiting_is_known() -> None:
    """80 us and 1 us per MiB: 64 MiB take longer to move than to start, 4 MiB do not."""
    own = [ran("all_reduce", size * MIB, (80 + size) * US) for size in (4, 40, 160, 640)]
    complete = {number: one.duration_ns for number, one in enumerate(own)}
    found = told(*own, device="a GPU without a profile", shortest=complete)
    assert {m.most_bytes: m.is_latency_bound for m in found.messages} == {
        4 * MIB: True, 160 * MIB: False, 640 * MIB: False,
    }  # fmt: skip
    # By one rank alone waiting may look the same, so without a profile nothing is said.
    alone = told(*own, device="a GPU without a profile")
    assert {m.is_latency_bound for m in alone.messages} == {None}


def test_latency_is_judged_by_the_duration_without_waiting() -> None:
    """Of 500 us the profile's 67 are no half, of the 100 that the last rank took they are."""
    assert told(ran("all_reduce", 4096, 500 * US)).messages[0].is_latency_bound is False
    assert told(ran("all_reduce", 4096, 500 * US), shortest={0: 100 * US}).messages[0].is_latency_bound is True


def test_nothing_bounds_what_is_not_exposed() -> None:
    nothing = Exposure(
        pieces=Pieces(starts=np.array([], np.int64), ends=np.array([], np.int64), owners=np.array([], np.int64)),
        steps=(None,), starts=np.array([0]), ends=np.array([10]), launch=(0,), no_launch=None,
    )  # fmt: skip
    traffic = Traffic(exposure=nothing, groups={}, links=Links())
    hidden = communication(traffic, [ran("all_reduce", MIB, US)], {}, alone=True)
    assert (hidden.bound, hidden.missing, hidden.whole.exposed_ns) == (None, None, 0)
