"""Who holds memory at the peak of a trace: blocks made by hand, and a walk through all of them in Python."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.analyse import analyse
from refshard.analysis.figures import MemoryPeak
from refshard.analysis.memory_peaks import memory_peaks
from refshard.events.reader import read_events
from tests.analysis.handmade import event, note, step, write

BEFORE, RESERVED = 1000, 5000
MAIN, AUTOGRAD = 1, 2


class Allocator:
    """Writes the profiler's events of an allocator that already holds :data:`BEFORE` bytes."""

    def __init__(self, *, device: int = 1) -> None:
        self.events: list[dict[str, Any]] = []
        self._held, self._device = BEFORE, device
        self._blocks: dict[int, int] = {}

    def make(self, at: float, size: int, *, thread: int = MAIN) -> int:
        address = next(one for one in range(512, 1 << 30, 512) if one not in self._blocks)
        self._blocks[address] = size
        self._add(at, size, address, thread)
        return address

    def free(self, at: float, address: int, *, thread: int = MAIN, size: int | None = None) -> None:
        self._add(at, -(self._blocks.pop(address) if size is None else size), address, thread)

    def _add(self, at: float, change: int, address: int, thread: int) -> None:
        self._held += change
        args = {"Device Type": self._device, "Device Id": 0, "Bytes": change, "Addr": address}
        args |= {"Total Allocated": self._held, "Total Reserved": RESERVED if self._device else 0}
        moment = {
            key: value for key, value in event("[memory]", at, 0, tid=thread).items() if key not in ("cat", "dur")
        }
        self.events.append({**moment, "ph": "i", "s": "t", "args": args})


def peaks_of(path: Path, events: list[dict[str, Any]]) -> tuple[MemoryPeak, ...]:
    return memory_peaks(read_events(write(path, events)))


def held(peak: MemoryPeak) -> dict[tuple[str, str | None], int]:
    """Bytes by purpose and unit."""
    found: dict[tuple[str, str | None], int] = {}
    for one in peak.holders:
        found[one.category, one.unit] = found.get((one.category, one.unit), 0) + one.bytes
    return found


def training_step(allocator: Allocator, at: float) -> list[dict[str, Any]]:
    """One FSDP2 step of 100 us: forward of ``a``, backward of it on autograd's thread, an optimizer's step."""
    gathered = allocator.make(at + 2, 10)
    saved = allocator.make(at + 12, 200)
    passing = allocator.make(at + 13, 3)
    allocator.free(at + 14, passing)
    temporary = allocator.make(at + 42, 40, thread=AUTOGRAD)
    sent = allocator.make(at + 52, 7, thread=AUTOGRAD)
    gradient = allocator.make(at + 53, 20, thread=AUTOGRAD)
    allocator.free(at + 54, temporary, thread=AUTOGRAD)
    allocator.free(at + 55, sent, thread=AUTOGRAD)
    allocator.free(at + 56, saved, thread=AUTOGRAD)
    allocator.free(at + 57, gathered, thread=AUTOGRAD)
    allocator.make(at + 72, 60)
    workspace = allocator.make(at + 73, 30)
    allocator.free(at + 74, workspace)
    allocator.free(at + 92, gradient)
    return [
        step(int(at // 100), at, 100),
        note("FSDP::pre_forward (a)", at + 1, 9),
        note("FSDP::all_gather (a)", at + 1, 5),
        event("aten::linear", at + 11, 9),
        note("FSDP::post_forward (a)", at + 21, 1),
        note("FSDP::pre_backward (a)", at + 35, 1, tid=AUTOGRAD),
        event("autograd::engine::evaluate_function: MmBackward0", at + 40, 10, tid=AUTOGRAD),
        event("autograd::engine::evaluate_function: RegisterPostBackwardFunctionBackward", at + 51, 9, tid=AUTOGRAD),
        note("FSDP::post_backward_reduce (a)", at + 51, 8, tid=AUTOGRAD),
        note("Optimizer.step#Adam.step", at + 70, 10),
        event("aten::add", at + 71, 5),
        note("Optimizer.zero_grad#Adam.zero_grad", at + 90, 5),
    ]


def test_every_block_at_the_peak_has_its_purpose_and_its_unit(tmp_path: Path) -> None:
    allocator = Allocator()
    events = training_step(allocator, 0)
    (peak,) = peaks_of(tmp_path / "t.json", [*events, *allocator.events])
    assert (peak.device, peak.step, peak.phase, peak.unit) == ("device 0", 0, "backward", "a")
    assert peak.operator == "autograd::engine::evaluate_function: RegisterPostBackwardFunctionBackward"
    assert (peak.allocated_bytes, peak.risen_bytes) == (BEFORE + 277, 277)
    assert (peak.reserved_bytes, peak.most_reserved_bytes) == (RESERVED, RESERVED)
    assert held(peak) == {
        ("before, kept", None): BEFORE, ("activations", "a"): 200, ("backward", "a"): 40, ("gradients", "a"): 20,
        ("all-gather", "a"): 10, ("reduction", "a"): 7,
    }  # fmt: skip
    assert {one.operator for one in peak.holders if one.category == "activations"} == {"aten::linear"}


def test_optimizer_state_outlives_the_step_and_its_workspace_does_not(tmp_path: Path) -> None:
    allocator = Allocator()
    events = [note("Optimizer.step#Adam.step", 0, 10), event("aten::add", 1, 8)]
    allocator.make(2, 60)
    workspace = allocator.make(3, 30)
    allocator.free(4, workspace)
    (peak,) = peaks_of(tmp_path / "t.json", [*events, *allocator.events])
    assert peak.phase == "optimizer"
    assert held(peak) == {("before, kept", None): BEFORE, ("optimizer state", None): 60, ("optimizer", None): 30}


def test_what_was_there_before_is_told_apart_by_whether_the_trace_frees_it(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.make(1, 5)
    allocator.free(2, 1 << 40, size=300)
    (peak,) = peaks_of(tmp_path / "t.json", [event("aten::mm", 0, 9), *allocator.events])
    assert held(peak) == {
        ("before, freed later", None): 300, ("before, kept", None): BEFORE - 300, ("forward", None): 5,
    }  # fmt: skip
    assert [one.blocks for one in peak.holders if one.category == "before, freed later"] == [1]


def test_gradients_of_a_microbatch_are_gradients_in_the_next_ones_forward(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.make(11, 20, thread=AUTOGRAD)
    allocator.make(21, 100)
    events = [
        event("aten::mm", 0, 5), event("autograd::engine::evaluate_function: MmBackward0", 10, 5, tid=AUTOGRAD),
        event("aten::mm", 20, 5), event("autograd::engine::evaluate_function: MmBackward0", 30, 5, tid=AUTOGRAD),
    ]  # fmt: skip
    (peak,) = peaks_of(tmp_path / "t.json", [*events, *allocator.events])
    assert held(peak) == {("before, kept", None): BEFORE, ("activations", None): 100, ("gradients", None): 20}


def test_what_outlives_an_optimizers_step_is_no_activation(tmp_path: Path) -> None:
    """Parameters that are made in the trace: backward finds them too."""
    allocator = Allocator()
    allocator.make(1, 50)
    allocator.make(21, 100)
    events = [
        event("aten::normal_", 0, 5),
        event("autograd::engine::evaluate_function: MmBackward0", 6, 2, tid=AUTOGRAD),
        note("Optimizer.step#SGD.step", 10, 5),
        event("aten::mm", 20, 5),
        event("autograd::engine::evaluate_function: MmBackward0", 30, 2, tid=AUTOGRAD),
    ]
    (peak,) = peaks_of(tmp_path / "t.json", [*events, *allocator.events])
    assert held(peak) == {("before, kept", None): BEFORE, ("kept", None): 50, ("activations", None): 100}


def test_without_labels_the_annotation_around_a_block_is_its_unit_and_no_operator_leaves_its_purpose_open(
    tmp_path: Path,
) -> None:
    allocator = Allocator()
    allocator.make(2, 5)
    allocator.make(12, 7, thread=AUTOGRAD)
    allocator.make(20, 9)
    events = [
        note("ProfilerStep#0", 0, 30), note("block 3", 1, 15), note("## Call CompiledFxGraph f ##", 1, 9),
        event("aten::mm", 1, 8),
        event("autograd::engine::evaluate_function: MmBackward0", 11, 4, tid=AUTOGRAD),
    ]  # fmt: skip
    (peak,) = peaks_of(tmp_path / "t.json", [*events, *allocator.events])
    told = held(peak)
    assert told["activations", "block 3"] == 5
    assert told["backward", "block 3"] == 7, "autograd's thread has no annotation: the main thread waits under it"
    assert told["other", None] == 9


def test_collectives_that_no_label_announces_are_known_by_their_operator(tmp_path: Path) -> None:
    allocator = Allocator()
    events = []
    for place, name in enumerate(("c10d::_allgather_base_", "c10d::allreduce_", "_c10d_functional::all_to_all_single")):
        events.append(event(name, 10 * place, 5))
        allocator.make(10 * place + 1, 2**place)
    (peak,) = peaks_of(tmp_path / "t.json", [*events, *allocator.events])
    assert [(one.category, one.bytes) for one in peak.holders if one.operator] == [
        ("collective", 4), ("reduction", 2), ("all-gather", 1)
    ]  # fmt: skip


def test_a_gpu_comes_before_the_cpu_and_a_cpu_reserves_nothing(tmp_path: Path) -> None:
    gpu, cpu = Allocator(), Allocator(device=0)
    gpu.make(1, 5)
    cpu.make(2, 500)
    peaks = peaks_of(tmp_path / "t.json", [event("aten::mm", 0, 9), *cpu.events, *gpu.events])
    assert [(peak.device, peak.reserved_bytes) for peak in peaks] == [("device 0", RESERVED), ("cpu", None)]


def test_without_totals_only_the_rise_is_known(tmp_path: Path) -> None:
    allocator = Allocator()
    for size in (100, 50):
        allocator.make(size, size)
    for one in allocator.events:
        one["args"] = {key: one["args"][key] for key in ("Device Type", "Device Id", "Bytes")}
    (peak,) = peaks_of(tmp_path / "t.json", [event("aten::mm", 0, 9), *allocator.events])
    assert (peak.allocated_bytes, peak.risen_bytes, peak.reserved_bytes, peak.holders) == (None, 150, None, ())


def test_a_block_handed_out_twice_is_counted_as_unmatched(tmp_path: Path) -> None:
    allocator = Allocator()
    first = allocator.make(1, 5)
    allocator.events.append({**allocator.events[0], "ts": event("", 3, 0)["ts"]})
    allocator.free(4, first)
    (peak,) = peaks_of(tmp_path / "t.json", [event("aten::mm", 0, 9), *allocator.events])
    assert peak.unmatched == 1


def test_the_figures_of_a_trace_have_its_peaks(tmp_path: Path) -> None:
    allocator = Allocator()
    events = [*training_step(allocator, 0), event("k", 12, 3, cat="kernel", device=0, stream=7)]
    figures = analyse(write(tmp_path / "t.json", [*events, *allocator.events])).figures
    assert [peak.allocated_bytes for peak in figures.memory_peaks] == [BEFORE + 277]
    assert max(point.bytes for point in figures.memory) == BEFORE + 277


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.sampled_from((MAIN, AUTOGRAD))), max_size=40))
def test_what_is_alive_equals_a_walk_through_all_events(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[int, int, int]]
) -> None:
    """Each call frees the block in its slot, one from before the trace at first, or makes one there."""
    allocator, slots = Allocator(), dict[int, int]()
    alive: dict[int, int] = {}
    best = (BEFORE, dict[int, int]())
    early: dict[int, int] = {}
    freed_early: list[int] = []
    for at, (slot, size, thread) in enumerate(calls):
        if slot in slots:
            address = slots.pop(slot)
            allocator.free(at, address, thread=thread)
            del alive[address]
        elif slot == 0 and 0 not in early:
            early[0] = size
            freed_early.append(at)
            allocator.free(at, 1 << 40, thread=thread, size=size)
        else:
            slots[slot] = allocator.make(at, size, thread=thread)
            alive[slots[slot]] = size
        now = allocator.events[-1]["args"]["Total Allocated"]
        if at == 0 or now > best[0]:
            best, best_at = (now, dict(alive)), at
    path = tmp_path_factory.mktemp("held") / "t.json"
    everywhere = [event("aten::mm", 0, 100, tid=thread) for thread in (MAIN, AUTOGRAD)]
    peaks = peaks_of(path, [*everywhere, *allocator.events])
    if not calls:
        assert peaks == ()
        return
    (peak,) = peaks
    later = sum(early.values()) if freed_early and freed_early[0] > best_at else 0
    wanted = {"before, kept": best[0] - sum(best[1].values()) - later, "before, freed later": later}
    wanted |= {"forward": sum(best[1].values())}
    assert peak.allocated_bytes == best[0]
    assert {category: size for (category, _), size in held(peak).items()} == {k: n for k, n in wanted.items() if n}
