"""Private pools of the simulated caching allocator: who gets their memory, when it is given back, and checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakecuda import allocator_programs as programs
from tests.fakecuda.allocator_device import BASE, Device
from tests.fakecuda.allocator_programs import MIB, ModelSettings, Step

pytestmark = pytest.mark.processes

POOL, OTHER = (1, 0), (0, 1)
GIB = 1 << 30


@contextmanager
def taking(device: Device, pool: tuple[int, int] = POOL, *streams: int) -> Iterator[None]:
    """The pool serves these streams, all by default."""
    device.allocator.begin_allocate_to_pool(pool, lambda stream: not streams or stream in streams)
    yield
    device.allocator.end_allocate_to_pool(pool)


def reserved_by(device: Device, pool: tuple[int, int] = POOL) -> int:
    return int(device.allocator.statistics()["reserved_bytes_by_private_pools"][pool]["all"]["current"])


def blocks_of(device: Device, pool: tuple[int, int] = POOL) -> dict[int, tuple[int, str]]:
    segments = device.allocator.snapshot(pool)
    return {b["address"]: (b["size"], b["state"]) for segment in segments for b in segment["blocks"]}


def test_a_capture_takes_segments_of_its_own() -> None:
    device = Device()
    device.free(device.allocate(12 * MIB), device.allocate(1000))
    with taking(device):
        assert device.allocate(12 * MIB) == 14 * MIB  # not the 12 MiB that lie free
        device.allocate(1000)
        device.allocate(3 * MIB)
    assert device.segments == [12 * MIB, 2 * MIB, 12 * MIB, 2 * MIB, 20 * MIB]
    assert (device.reserved, reserved_by(device)) == (48 * MIB, 34 * MIB)
    found = [(segment["segment_pool_id"], segment["total_size"]) for segment in device.allocator.snapshot()]
    assert found == [((0, 0), 12 * MIB), ((0, 0), 2 * MIB), (POOL, 12 * MIB), (POOL, 2 * MIB), (POOL, 20 * MIB)]
    of_pool = device.allocator.statistics()["reserved_bytes_by_private_pools"][POOL]
    assert (of_pool["small_pool"]["peak"], of_pool["large_pool"]["allocated"]) == (2 * MIB, 32 * MIB)


def test_captures_that_share_a_pool_reuse_what_was_freed_and_nobody_else_does() -> None:
    device = Device()
    with taking(device):
        first, kept = device.allocate(12 * MIB), device.allocate(14 * MIB)
        device.free(first)
        assert device.allocate(12 * MIB) == first
        device.free(first)
    assert device.allocate(12 * MIB) not in (first, kept)
    with taking(device, OTHER):
        assert device.allocate(12 * MIB) not in (first, kept)
    with taking(device):
        assert device.allocate(12 * MIB) == first
    assert reserved_by(device) == 26 * MIB


def test_a_pool_serves_the_streams_that_it_is_begun_for_and_the_last_begun_goes_first() -> None:
    device = Device()
    with taking(device, POOL, 1, 2):
        device.allocate(12 * MIB, 0)
        device.allocate(14 * MIB, 1)
        with taking(device, OTHER, 2):
            device.allocate(16 * MIB, 2)
            device.allocate(18 * MIB, 1)
    assert (reserved_by(device), reserved_by(device, OTHER), device.reserved) == (32 * MIB, 16 * MIB, 60 * MIB)


def test_memory_is_given_back_when_nobody_uses_the_pool() -> None:
    device = Device()
    with taking(device):
        free, held = device.allocate(12 * MIB), device.allocate(14 * MIB)
    with taking(device):  # a second graph
        device.free(free)
    for users in (2, 1):
        assert device.allocator.users_of_pool(POOL) == users
        device.allocator.empty_cache()
        assert reserved_by(device) == 26 * MIB
        device.allocator.release_pool(POOL)
    device.allocator.empty_cache(OTHER)
    assert reserved_by(device) == 26 * MIB
    device.allocator.empty_cache()
    assert reserved_by(device) == 14 * MIB  # a tensor of the capture still lives
    device.free(held)
    device.allocator.empty_cache(POOL)
    assert (reserved_by(device), device.reserved) == (0, 0)
    with pytest.raises(ValueError, match="does not exist"):
        device.allocator.users_of_pool(POOL)


def test_the_cache_stays_during_a_capture() -> None:
    device = Device(100 * MIB)
    device.free(device.allocate(60 * MIB))
    with taking(device):
        device.free(device.allocate(24 * MIB))
        device.allocator.empty_cache()
        with pytest.raises(device.out_of_memory, match=r"is allocated by PyTorch, with 24.00 MiB allocated in private"):
            device.allocate(50 * MIB)
    assert device.reserved == 84 * MIB
    assert device.allocator.statistics()["num_alloc_retries"] == 0
    device.allocate(76 * MIB)
    assert device.segments[-2:] == [-60 * MIB, 76 * MIB]


@pytest.mark.parametrize("named_before", [True, False])
def test_what_streams_use_in_a_capture_comes_free_after_it(named_before: bool) -> None:
    device = Device()
    with taking(device):
        address = device.allocate(12 * MIB)
    if named_before:
        device.allocator.record_stream(BASE + address, 2)
    with taking(device):
        device.allocator.record_stream(BASE + address, 1)
        device.clock.launch(1)
        device.clock.launch(2)
        device.free(address)
        assert device.allocate(12 * MIB) != address  # no event can be recorded
    device.allocate(512)
    assert blocks_of(device)[BASE + address][1] == ("active_pending_free" if named_before else "inactive")
    device.clock.come_to(2, 1)
    device.allocate(512)
    assert blocks_of(device)[BASE + address][1] == "inactive"


def test_a_pool_that_does_not_split_hands_out_segments() -> None:
    device = Device()
    device.allocator.retain_pool(POOL, splits=False)
    with taking(device):
        device.allocate(3 * MIB)
    assert device.current("allocated_bytes") == 20 * MIB


def test_a_pool_that_lends_serves_what_the_device_refuses() -> None:
    device = Device(100 * MIB)
    device.allocator.retain_pool(POOL, lends=True)
    with taking(device):
        lent = device.allocate(60 * MIB)
        device.free(lent)
    assert device.allocate(30 * MIB) != lent
    assert device.allocate(50 * MIB) == lent
    assert device.allocator.statistics()["num_alloc_retries"] == 0


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_a_checkpoint_restores_which_blocks_are_held(conf: str) -> None:
    device = Device(GIB, conf)
    with taking(device):
        addresses = [device.allocate(4 * MIB) for _ in range(4)]
        device.free(addresses[1])
    state, blocks = device.allocator.checkpoint(POOL), blocks_of(device)
    ids = {address: device.allocator.find(BASE + address)[2] for address in (addresses[0], addresses[3])}
    with taking(device):
        device.free(addresses[2], addresses[0])
        later = [device.allocate(3 * MIB), device.allocate(30 * MIB)]
    freed, held = device.allocator.restore(state)
    assert freed == sorted(BASE + address for address in (*later, addresses[3]))
    assert held == [BASE + addresses[place] for place in (0, 2, 3)]
    now = blocks_of(device)
    assert {address: now[address] for address in list(blocks)[:-1]} == dict(list(blocks.items())[:-1])
    assert [state for _, state in now.values()].count("active_allocated") == 3
    assert device.allocator.find(BASE + addresses[3])[2] == ids[addresses[3]]  # held throughout
    assert device.allocator.find(BASE + addresses[0])[2] != ids[addresses[0]]
    assert device.current("allocated_bytes") == 12 * MIB


def test_pools_in_the_wrong_state_are_refused() -> None:
    allocator = Device().allocator
    with pytest.raises(ValueError, match=r"releasePool|the memory pool \(1, 0\) does not exist"):
        allocator.release_pool(POOL)
    with pytest.raises(ValueError, match="takes no allocations"):
        allocator.end_allocate_to_pool(POOL)
    allocator.begin_allocate_to_pool(POOL, lambda _: True)
    with pytest.raises(ValueError, match="takes allocations already"):
        allocator.begin_allocate_to_pool(POOL, lambda _: True)
    allocator.end_allocate_to_pool(POOL)
    allocator.allocate(512, 0)
    allocator.release_pool(POOL)
    for call in (allocator.retain_pool, allocator.checkpoint):
        with pytest.raises(ValueError, match="has been released"):
            call(POOL)


class Run:
    """A program whose allocations a private pool serves, or the allocator's own."""

    def __init__(self, settings: ModelSettings, private: bool) -> None:
        self.device = Device(4 * GIB, settings.text(), 4 * GIB + MIB)
        self.private = private
        self.held: list[int] = []

    def step(self, step: Step) -> None:
        device, clock = self.device, self.device.clock
        if step.action == "allocate":
            self.held.append(self._allocate(step))
        elif step.action == "launch":
            clock.launch(step.stream)
        elif step.action == "advance":
            clock.come_to(step.stream, clock.done.get(step.stream, 0) + 1)
        elif self.held and step.action == "record":
            device.allocator.record_stream(BASE + self.held[step.pick % len(self.held)], step.stream)
        elif self.held and step.action == "free":
            device.free(self.held.pop(step.pick % len(self.held)))

    def _allocate(self, step: Step) -> int:
        if not self.private:
            return self.device.allocate(step.size, step.stream)
        self.device.allocator.allocate(512, 99)  # as an allocation of the own pool, it sees which streams have passed
        with taking(self.device):
            return self.device.allocate(step.size, step.stream)

    def statistics(self) -> dict[str, Any]:
        return {name: self.device.current(name, "large_pool") for name in ("reserved_bytes", "active_bytes", "segment")}


_settings = st.builds(ModelSettings, expandable=st.booleans(), max_split=st.sampled_from([programs.NO_LIMIT, 40 * MIB]))


@given(settings=_settings, program=programs.programs)
def test_within_a_private_pool_blocks_are_found_as_in_the_own(settings: ModelSettings, program: list[Step]) -> None:
    private, own = Run(settings, private=True), Run(settings, private=False)
    for step in program:
        private.step(step)
        own.step(step)
        assert private.statistics() == own.statistics()
    sizes = [[size for size, _ in sorted(blocks_of(run.device, pool).values())] for run, pool in (
        (private, POOL), (own, (0, 0)),
    )]  # fmt: skip
    assert sizes[0] == sizes[1]


@given(settings=_settings, first=programs.programs, second=programs.programs)
def test_a_checkpoint_of_any_program_is_restored(
    settings: ModelSettings, first: list[Step], second: list[Step]
) -> None:
    run = Run(settings, private=True)
    plain = [step for step in [*first, Step("allocate", size=512), *second] if step.action != "record"]
    for step in plain[: len(first)]:
        run.step(step)
    run.step(Step("allocate", size=512))
    state, blocks = run.device.allocator.checkpoint(POOL), blocks_of(run.device)
    for step in plain[len(first) :]:
        run.step(step)
    run.device.allocator.restore(state)
    now = blocks_of(run.device)
    held = {address: block for address, block in blocks.items() if block[1] == "active_allocated"}
    assert {address: block for address, block in now.items() if block[1] == "active_allocated"} == held
    assert run.device.current("allocated_bytes") >= sum(size for size, _ in held.values())
