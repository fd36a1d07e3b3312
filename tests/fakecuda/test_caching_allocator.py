"""The simulated caching allocator against torch 2.13's own, against a naive model, and by cases with known numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from tests.fakecuda import allocator_programs as programs
from tests.fakecuda.allocator_device import BASE, Clock, Device
from tests.fakecuda.allocator_model import ModelAllocator, ModelOutOfMemoryError
from tests.fakecuda.allocator_programs import MIB, ModelSettings, Step

pytestmark = pytest.mark.processes

GIB = 1 << 30
CONTEXT = 30 * MIB
"""What the device has beyond what the allocator may use."""
RECORDED = json.loads(Path(__file__).with_name("torch_allocator.json").read_text())
"""What torch's own allocator did; the file says how it was run."""


class Pair:
    """The allocator and the model, which must agree after every step."""

    def __init__(self, settings: ModelSettings, capacity: int) -> None:
        self.capacity = capacity
        self.device = Device(capacity, settings.text(), capacity + CONTEXT)
        clock = self.model_clock = Clock()
        self.model = ModelAllocator(
            BASE, capacity, capacity + CONTEXT, settings, clock.position, clock.passed, clock.synchronise
        )
        self.held: dict[int, tuple[int, int]] = {}

    def step(self, step: Step) -> None:
        held = list(self.held)
        if step.action == "allocate":
            self.allocate(step.size, step.stream)
        elif step.action == "launch":
            self.device.clock.launch(step.stream)
            self.model_clock.launch(step.stream)
        elif step.action == "advance":
            for clock in (self.device.clock, self.model_clock):
                clock.come_to(step.stream, clock.done.get(step.stream, 0) + 1)
        elif step.action == "empty_cache":
            self.device.allocator.empty_cache()
            self.model.empty_cache()
        elif held and step.action == "record":
            address = held[step.pick % len(held)]
            self.device.allocator.record_stream(address, step.stream)
            self.model.record_stream(address, step.stream)
        elif held:
            address = held[step.pick % len(held)]
            assert self.device.allocator.free(address) == self.model.free(address) == self.held.pop(address)[1]
        self.compare()

    def allocate(self, size: int, stream: int) -> None:
        try:
            expected = self.model.allocate(size, stream)
        except ModelOutOfMemoryError:
            with pytest.raises(self.device.out_of_memory):
                self.device.allocator.allocate(size, stream)
            return
        assert self.device.allocator.allocate(size, stream) == expected
        self.held[expected[0]] = (expected[1], expected[2])

    def compare(self) -> None:
        statistics = self.device.allocator.statistics()
        assert statistics.pop("max_split_size") is not None
        assert statistics.pop("reserved_bytes_by_private_pools") == {}
        assert statistics == self.model.statistics()
        assert self.device.layout() == self.model.layout()
        assert self.device.clock.done == self.model_clock.done

    def check_invariants(self) -> None:
        reserved = self.device.reserved
        assert sum(self.device.segments) == reserved <= self.capacity
        assert self.device.current("allocated_bytes") <= self.device.current("active_bytes") <= reserved
        end = 0
        for segment in self.device.allocator.snapshot():
            assert segment["address"] >= end, "segments overlap"
            end = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == end, "blocks do not tile their segment"
                end += block["size"]
                self.check_found(block)
            assert end == segment["address"] + segment["total_size"]

    def check_found(self, block: dict[str, Any]) -> None:
        size, name = self.held.get(block["address"], (0, 0))
        expected = (block["address"], size, name) if block["state"] == "active_allocated" else None
        for address in (block["address"], block["address"] + block["size"] - 1):
            assert self.device.allocator.find(address) == expected


@given(settings=programs.settings, capacity=programs.capacities, program=programs.programs)
def test_every_decision_and_statistic_is_the_models(
    settings: ModelSettings, capacity: int, program: list[Step]
) -> None:
    pair = Pair(settings, capacity)
    for step in program:
        pair.step(step)
    pair.check_invariants()


class Replay:
    """Runs a recorded program."""

    def __init__(self, program: dict[str, Any]) -> None:
        self.device = Device(program["capacity"], program["settings"], program["device_total"])
        self.held: dict[int, int] = {}
        self.addresses: list[int | None] = []

    def step(self, action: str, *numbers: int) -> None:
        if action == "a":
            self.allocate(*numbers)
        elif action == "l":
            self.device.clock.launch(*numbers)
        elif action == "p":
            self.device.clock.come_to(*numbers)
        elif action == "e":
            self.device.allocator.empty_cache()
        elif numbers[0] in self.held:  # what got no memory is not freed
            if action == "f":
                self.device.free(self.held.pop(numbers[0]))
            else:
                self.device.allocator.record_stream(BASE + self.held[numbers[0]], numbers[1])

    def allocate(self, number: int, size: int, stream: int) -> None:
        try:
            address = self.held[number] = self.device.allocate(size, stream)
            self.addresses.append(address)
        except self.device.out_of_memory:
            self.addresses.append(None)

    def statistics(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in self.device.allocator.statistics().items():
            if isinstance(value, int):
                found[name] = value
            elif "current" in value:
                found[name] = list(value.values())
            else:
                found |= {f"{name}.{pool}": list(stat.values()) for pool, stat in value.items()}
        return found


@pytest.mark.parametrize("program", RECORDED["programs"], ids=lambda program: program["settings"] or "default")
def test_does_what_torchs_own_allocator_did(program: dict[str, Any]) -> None:
    replay = Replay(program)
    for step in program["steps"].split("; "):
        action, *numbers = step.split()
        replay.step(action, *map(int, numbers))
    assert replay.addresses == program["addresses"]
    statistics = replay.statistics()
    del statistics["max_split_size"]
    assert statistics == program["statistics"]


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (3 * MIB // 2, 3 * MIB // 2, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (23 * MIB + MIB // 2, 24 * MIB, 24 * MIB),  # a rest of at most 1 MiB stays with the block
        (22 * MIB + MIB // 2, 22 * MIB + MIB // 2, 24 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(requested: int, block: int, segment: int) -> None:
    device = Device()
    device.allocate(requested)
    assert (device.current("allocated_bytes"), device.reserved) == (block, segment)
    assert device.current("requested_bytes") == requested
    assert device.segments == [segment]


def test_the_smallest_block_that_fits_is_split_and_neighbours_unite() -> None:
    device = Device()
    small, large, _ = device.allocate(2 * MIB), device.allocate(6 * MIB), device.allocate(7 * MIB)
    device.free(small, large)  # side by side, hence one block of 8 MiB; the rest of the segment is 5 MiB
    assert device.allocate(5 * MIB) == 15 * MIB
    assert device.allocate(5 * MIB) == 0
    assert device.current("inactive_split_bytes") == 3 * MIB
    assert device.reserved == 20 * MIB


def test_of_equal_blocks_the_one_of_the_oldest_segment_is_taken() -> None:
    device = Device()
    first, second = device.allocate(12 * MIB, 1), device.allocate(12 * MIB)
    device.free(first)
    device.allocator.empty_cache()
    third = device.allocate(12 * MIB)
    assert third == first < second
    device.free(second, third)
    assert device.allocate(12 * MIB) == second


def test_a_stream_gets_no_block_of_another() -> None:
    device = Device()
    device.free(device.allocate(12 * MIB))
    assert device.allocate(12 * MIB, 1) == 12 * MIB
    assert device.reserved == 24 * MIB


def test_a_block_that_another_stream_uses_comes_free_when_that_has_passed() -> None:
    device = Device()
    address = device.allocate(12 * MIB)
    device.allocator.record_stream(BASE + address, 1)
    device.allocator.record_stream(BASE + address, 0)  # its own stream, which is in order anyway
    device.clock.launch(1)
    device.free(address)
    assert (device.current("allocated_bytes"), device.current("active_bytes")) == (0, 12 * MIB)
    assert device.allocator.find(BASE + address) is None
    assert device.allocate(12 * MIB) == 12 * MIB
    device.clock.come_to(1, 1)
    assert device.allocate(12 * MIB) == address


def test_expandable_segments_grow_page_by_page() -> None:
    device = Device(GIB, "expandable_segments:True")
    assert device.allocate(3 * MIB // 2) == 0
    assert device.reserved == 20 * MIB
    assert device.allocate(30 * MIB) == 3 * MIB // 2  # begins in the rest of the first page
    assert device.reserved == 40 * MIB
    assert device.current("segment") == 0
    assert device.allocate(1000) == 1160 * MIB  # after the large pool's addresses: 9/8 GiB, in whole pages
    assert device.reserved == 42 * MIB


def test_pages_are_unmapped_one_by_one_and_holes_are_filled_first() -> None:
    device = Device(GIB, "expandable_segments:True")
    addresses = [device.allocate(20 * MIB) for _ in range(4)]
    device.free(*addresses[1:3])
    device.allocator.empty_cache()
    assert device.segments == [20 * MIB] * 4 + [-40 * MIB]
    assert [segment["total_size"] for segment in device.allocator.snapshot()] == [20 * MIB, 20 * MIB]
    assert device.allocate(30 * MIB) == addresses[1]
    assert device.reserved == 80 * MIB
    device.free(addresses[0], addresses[1], addresses[3])
    device.allocator.empty_cache()
    assert device.reserved == 0


def test_the_cache_is_released_before_memory_runs_out() -> None:
    device = Device(100 * MIB)
    device.free(device.allocate(60 * MIB))
    device.allocate(80 * MIB)
    assert device.allocator.statistics()["num_alloc_retries"] == 1
    assert device.segments == [60 * MIB, -60 * MIB, 80 * MIB]


def test_out_of_memory_is_said_in_torchs_words() -> None:
    """The text is torch 2.13's, with the sentence on the process that it adds where it finds NVML."""
    device = Device(100 * MIB, total=130 * MIB)
    device.allocate(60 * MIB)
    device.allocate(5 * MIB)
    with pytest.raises(device.out_of_memory) as raised:
        device.allocate(2 * GIB)
    assert str(raised.value) == (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 130.00 MiB of which 20.00 MiB "
        "is free. Including non-PyTorch memory, this process has 110.00 MiB memory in use. Of the allocated memory "
        "65.00 MiB is allocated by PyTorch, and 15.00 MiB is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )
    assert device.allocator.statistics()["num_ooms"] == 1
    with pytest.raises(device.out_of_memory, match="more than 1EB"):
        device.allocate(1 << 60)


def test_the_memory_fraction_limits_what_is_reserved() -> None:
    device = Device(100 * MIB, "per_process_memory_fraction:0.5", total=120 * MIB)
    device.allocate(50 * MIB)
    with pytest.raises(device.out_of_memory, match=r"70.00 MiB memory in use. 60.00 MiB allowed; Of the allocated"):
        device.allocate(20 * MIB)
    assert device.allocator.memory_fraction == 0.5
    device.allocator.memory_fraction = 1.0
    device.allocate(50 * MIB)
    with pytest.raises(ValueError, match="Please set within"):
        device.allocator.memory_fraction = 1.5


def test_throw_on_oom_refuses_before_the_cache_is_released() -> None:
    device = Device(100 * MIB, "throw_on_cudamalloc_oom:True")
    device.free(device.allocate(60 * MIB))
    with pytest.raises(device.out_of_memory, match=r"preemptively rejected .* Requested size: 80.00 MiB"):
        device.allocate(80 * MIB)
    assert device.reserved == 60 * MIB
    statistics = device.allocator.statistics()
    assert (statistics["num_oom_rejections"], statistics["num_ooms"]) == (1, 0)


def test_oversize_blocks_serve_only_requests_of_nearly_their_size() -> None:
    device = Device(conf="max_split_size_mb:40")
    device.free(device.allocate(80 * MIB))
    assert device.allocate(30 * MIB) == 80 * MIB
    assert device.allocate(60 * MIB) == 110 * MIB  # it would waste 20 MiB
    assert device.allocate(60 * MIB + 512) == 0
    assert device.current("allocated_bytes") == (30 + 60 + 80) * MIB


def test_garbage_collection_releases_what_lay_idle_longest() -> None:
    device = Device(200 * MIB, "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9", total=200 * MIB)
    old, young = device.allocate(40 * MIB), device.allocate(50 * MIB)
    device.free(old)
    for _ in range(3):
        device.free(device.allocate(12 * MIB, stream=1))  # what is searched for in the large pool is its clock
    device.free(young)
    device.allocate(60 * MIB)  # 102 MiB are reserved, and the threshold is 90
    assert device.segments == [40 * MIB, 50 * MIB, 12 * MIB, -40 * MIB, 60 * MIB]


def test_settings_change_what_comes_after() -> None:
    device = Device(GIB, "expandable_segments:True")
    device.free(device.allocate(12 * MIB))
    device.allocator.set_settings("expandable_segments:False")
    assert device.allocate(12 * MIB) != 0
    device.allocator.set_settings("expandable_segments:True")
    assert device.allocate(12 * MIB) == 0


def test_addresses_that_were_given_back_are_used_again() -> None:
    """A program that empties the cache in every step must not use up the device's addresses."""
    device = Device(1 << 36, "expandable_segments:True")
    for _ in range(300):
        device.free(device.allocate(30 * MIB))
        device.allocator.empty_cache()
    assert device.allocate(30 * MIB) == 0


def test_what_is_not_held_cannot_be_freed_or_recorded() -> None:
    device = Device()
    address = device.allocate(1000)
    for wrong in (address + 512, address + 1, 5 * GIB):
        with pytest.raises(ValueError, match="no allocation of the fake device begins at 0x1"):
            device.free(wrong)
    device.free(address)
    with pytest.raises(ValueError, match="it was freed before"):
        device.allocator.record_stream(BASE + address, 1)
    assert device.allocator.allocate(0, 0) == (0, 0, 0)


def test_statistics_and_snapshot_have_torchs_names() -> None:
    device = Device(conf="max_split_size_mb:40")
    device.allocate(3 * MIB // 2)
    device.allocator.reset_accumulated_statistics()
    device.free(device.allocate(2 * MIB))
    device.allocator.reset_peak_statistics()
    statistics = device.allocator.statistics()
    allocated = {"current": 3 * MIB // 2, "peak": 3 * MIB // 2, "allocated": 2 * MIB, "freed": 2 * MIB}
    assert statistics["allocated_bytes"]["all"] == statistics["allocated_bytes"]["large_pool"] == allocated
    assert statistics["allocated_bytes"]["small_pool"] == dict.fromkeys(allocated, 0)
    assert (statistics["max_split_size"], statistics["num_device_alloc"]) == (40 * MIB, 0)
    (segment,) = device.allocator.snapshot()
    assert {name: segment[name] for name in ("address", "total_size", "stream", "segment_type", "is_expandable")} == {
        "address": BASE, "total_size": 20 * MIB, "stream": 0, "segment_type": "large", "is_expandable": False,
    }  # fmt: skip
    assert (segment["allocated_size"], segment["active_size"], segment["requested_size"]) == (3 * MIB // 2,) * 3
    assert [block["state"] for block in segment["blocks"]] == ["active_allocated", "inactive"]
