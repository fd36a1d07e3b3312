"""Races: recordings made by hand, with known answers."""

from typing import Any

import pytest

from refshard.dryrun.races import Conflict, find_races
from refshard.dryrun.recording import NO_STREAM, Category, Flag, Phase
from tests.dryrun.made import Made
from tests.dryrun.touching import GATHER, MAIN, NBYTES, REDUCE, WEIGHT, Touching


def found(made: Made) -> list[str]:
    return [
        f"{race.conflict.value}: {race.earlier.operator}, {race.later.operator} ({race.times})"
        for race in find_races(made.recording())
    ]


def test_nothing_is_found_in_nothing() -> None:
    assert find_races(Made().recording()) == ()


def test_a_gather_that_nobody_waits_for_races_with_what_reads_its_result() -> None:
    made = Touching()
    made.phase, made.module = Phase.FORWARD, "layers.3"
    group = made.group(range(8))
    gather = made.collective("all_gather", group, nbytes=NBYTES, stream=GATHER, accesses=[(WEIGHT, NBYTES, True)])
    made.launch("aten::mm", accesses=[(WEIGHT, 256, False), (0x9000, 64, True)])
    last = made.launch("aten::mm", accesses=[(WEIGHT + 256, 256, False), (0x9040, 64, True)])
    (race,) = find_races(made.recording())
    assert (race.conflict, race.times, race.rows, race.nbytes) == (Conflict.READ_WRITE, 2, (gather, last - 1), 256)
    assert (race.earlier.operator, race.earlier.stream, race.earlier.writes) == ("all_gather", GATHER, True)
    assert (race.later.operator, race.later.stream, race.later.writes) == ("aten::mm", MAIN, False)
    assert {(side.module, side.phase) for side in (race.earlier, race.later)} == {("layers.3", Phase.FORWARD)}
    assert str(race) == (
        "read-write, 2 times: all_gather (writes, forward of layers.3, stream 20), "
        "then aten::mm (reads, forward of layers.3, stream 0)"
    )


def test_a_wait_orders() -> None:
    made = Touching()
    made.write(GATHER)
    made.order(GATHER, MAIN)
    made.read(MAIN)
    assert found(made) == []


def test_a_wait_for_an_event_that_was_recorded_too_early_or_elsewhere_does_not_order() -> None:
    made = Touching()
    early = made.record(GATHER)
    made.write(GATHER)
    elsewhere = made.record(REDUCE)
    made.record(GATHER)
    made.wait(MAIN, early)
    made.wait(MAIN, elsewhere)
    made.wait(MAIN, 12345)  # never recorded
    made.read(MAIN)
    assert found(made) == ["read-write: write on 20, read on 0 (1)"]


def test_a_stream_that_waits_too_late_has_raced() -> None:
    made = Touching()
    made.write(GATHER)
    event = made.record(GATHER)
    made.read(MAIN, name="early")
    made.wait(MAIN, event)
    made.read(MAIN, name="late")
    assert found(made) == ["read-write: write on 20, early (1)"]


def test_order_goes_through_a_third_stream_that_touches_nothing() -> None:
    for through in ((REDUCE,), (REDUCE, 22)):
        made = Touching()
        made.write(GATHER)
        for before, after in zip((GATHER, *through), (*through, MAIN)):
            made.order(before, after)
        made.read(MAIN)
        assert found(made) == []


def test_order_does_not_go_through_a_stream_that_recorded_first() -> None:
    made = Touching()
    made.write(GATHER)
    passed_on = made.record(REDUCE)
    made.order(GATHER, REDUCE)
    made.wait(MAIN, passed_on)
    made.read(MAIN)
    assert found(made) == ["read-write: write on 20, read on 0 (1)"]


@pytest.mark.parametrize("waits_for", ["the stream", "the event", "the device", "memory going back"])
def test_what_the_host_waited_for_comes_before_what_it_launches(waits_for: str) -> None:
    made = Touching()
    made.write(GATHER)
    event = made.record(GATHER)
    made.read(MAIN, name="before")
    if waits_for == "memory going back":
        made.segment(-(2 << 20))
    else:
        given: dict[str, dict[str, Any]] = {"the stream": {"stream": GATHER}, "the event": {"event": event}}
        made.synchronise(**given.get(waits_for, {}))
    made.read(MAIN, name="after")
    made.write(REDUCE, nbytes=1, name="a stream that is new")
    assert found(made) == [
        "read-write: write on 20, before (1)",
        *(["read-write: before, a stream that is new (1)"] if waits_for in ("the stream", "the event") else []),
        "read-write: after, a stream that is new (1)",
    ]


def test_the_host_waits_for_what_the_event_stood_for_then() -> None:
    made = Touching()
    event = made.record(GATHER)
    made.write(GATHER)
    made.synchronise(event=event)
    made.segment(2 << 20)  # memory that the allocator takes: no wait
    made.synchronise(stream=MAIN)
    made.read(MAIN)
    assert found(made) == ["read-write: write on 20, read on 0 (1)"]


def test_an_event_recorded_again_leaves_earlier_waits_as_they_were() -> None:
    made = Touching()
    made.write(GATHER, name="first")
    event = made.record(GATHER)
    made.wait(MAIN, event)
    made.write(GATHER, name="second")
    made.record(GATHER, event)
    made.read(MAIN, name="between")
    made.wait(MAIN, event)
    made.read(MAIN, name="last")
    assert found(made) == ["read-write: second, between (1)"]


def test_an_event_recorded_again_on_another_stream_means_that_one() -> None:
    made = Touching()
    made.write(GATHER)
    event = made.record(GATHER)
    made.record(REDUCE, event)
    made.wait(MAIN, event)
    made.read(MAIN)
    assert found(made) == ["read-write: write on 20, read on 0 (1)"]


def test_disjoint_bytes_and_two_reads_do_not_race() -> None:
    made = Touching()
    made.write(GATHER, WEIGHT, 512)
    made.write(MAIN, WEIGHT + 512, 512)
    made.read(REDUCE, WEIGHT + 1024, 512)
    made.read(MAIN, WEIGHT + 1024, 512)
    assert found(made) == []
    made.write(MAIN, WEIGHT + 511, 1, name="one byte more")
    assert found(made) == ["write-write: write on 20, one byte more (1)"]


def test_a_collective_on_the_current_stream_is_a_launch_there() -> None:
    made = Touching()
    made.write(MAIN)
    made.collective("all_reduce", 1, nbytes=NBYTES, stream=MAIN, accesses=[(WEIGHT, NBYTES, w) for w in (False, True)])
    made.read(MAIN)
    assert found(made) == []


def test_what_reads_and_writes_the_same_bytes_counts_as_writing_them() -> None:
    made = Touching()
    made.write(MAIN)
    in_place = [(WEIGHT, NBYTES, False), (WEIGHT, NBYTES, True)]
    made.collective("all_reduce", 1, nbytes=NBYTES, stream=REDUCE, accesses=in_place)
    made.read(MAIN, nbytes=8)
    assert found(made) == ["write-write: write on 0, all_reduce (1)", "read-write: all_reduce, read on 0 (1)"]


def test_two_rows_count_once_for_each_kind_of_conflict() -> None:
    made = Touching()
    accesses = [(0, 16, True), (32, 16, True), (64, 16, True), (96, 8, False)]
    made.launch("all", stream=GATHER, accesses=accesses)
    made.launch("all", stream=MAIN, accesses=[(0, 12, True), (32, 16, True), (64, 16, False), (96, 16, False)])
    written, read = find_races(made.recording())
    assert (written.conflict, written.times, written.nbytes) == (Conflict.WRITE_WRITE, 1, 16)
    assert (read.conflict, read.times, read.nbytes) == (Conflict.READ_WRITE, 1, 16)


def test_what_takes_only_the_hosts_time_touches_nothing() -> None:
    made = Touching()
    made.write(GATHER)
    made.launch("aten::record_stream", flags=Flag.HOST_ONLY, accesses=[(WEIGHT, NBYTES, True)])
    made.launch("nothing", accesses=[(WEIGHT, 0, True)])
    made.collective("gloo", 1, nbytes=1, stream=NO_STREAM, accesses=[(WEIGHT, NBYTES, True)])
    assert found(made) == []


def freed_while_reduced(*, deferred: bool) -> Touching:
    """Written on the main stream, reduced on another, freed by the host, and handed out again on the main stream.

    Deferred, as by ``record_stream``, the allocator keeps it from being handed out until the host has waited.
    """
    made = Touching()
    made.hand_out()
    made.write(MAIN)
    made.order(MAIN, REDUCE)
    made.read(REDUCE)
    made.give_back()
    if deferred:
        made.hand_out(WEIGHT + NBYTES)
        made.write(MAIN, WEIGHT + NBYTES)
        made.synchronise(stream=REDUCE)
    made.hand_out(nbytes=256)
    made.write(MAIN, nbytes=256, name="the next owner")
    return made


def test_memory_that_was_freed_while_another_stream_used_it_races_with_its_next_owner() -> None:
    assert found(freed_while_reduced(deferred=False)) == [
        "memory handed on by the allocator: read on 21, the next owner (1)"
    ]


def test_memory_that_is_kept_until_the_other_stream_is_done_does_not_race() -> None:
    assert found(freed_while_reduced(deferred=True)) == []


def test_a_stream_that_frees_and_takes_its_own_memory_needs_no_event() -> None:
    made = Touching()
    for _ in range(3):
        made.hand_out()
        made.write(MAIN)
        made.give_back()
    assert found(made) == []


def test_only_memory_that_was_freed_in_between_was_handed_on() -> None:
    made = Touching()
    made.give_back()
    made.write(GATHER, name="gather")
    made.give_back(WEIGHT + NBYTES)
    made.write(MAIN, name="no reuse")
    made.give_back()
    made.write(MAIN, name="reuse")
    made.give_back()
    assert found(made) == ["write-write: gather, no reuse (1)", "memory handed on by the allocator: gather, reuse (1)"]


def test_a_workspace_is_written_by_what_it_was_allocated_for() -> None:
    made = Touching()
    made.read(REDUCE)
    made.give_back()
    made.hand_out(category=Category.WORKSPACE, name="aten::mm")
    made.give_back()
    made.hand_out(category=Category.WORKSPACE, name="nccl::all_gather")
    made.hand_out(category=Category.ACTIVATIONS)
    assert found(made) == ["memory handed on by the allocator: read on 21, aten::mm (1)"]


def test_two_steps_that_race_alike_are_one_finding_and_other_places_another() -> None:
    made = Touching()
    for _ in range(2):
        for made.module in ("layers.0", "layers.1"):
            made.write(GATHER)
            made.read(MAIN)
            made.order(GATHER, MAIN)
            made.order(MAIN, GATHER)
    assert [(race.later.module, race.times) for race in find_races(made.recording())] == [
        ("layers.0", 2),
        ("layers.1", 2),
    ]


def test_more_accesses_than_are_compared_at_a_time() -> None:
    made, slots, reads = Touching(), 700, 20_000
    for slot in range(slots):
        made.write(GATHER, WEIGHT + NBYTES * slot)
    for read in range(reads):
        made.read(MAIN, WEIGHT + NBYTES * (read % slots), nbytes=8)
    assert found(made) == [f"read-write: write on 20, read on 0 ({reads})"]
