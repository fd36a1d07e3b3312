"""Memory over a part of a recording, from recordings made by hand."""

import random

import numpy as np
import pytest

from refshard.dryrun.device import Rates
from refshard.dryrun.memory import (
    MemoryCourse,
    PhaseRun,
    account_memory,
    call_clock,
    gpu_clock,
    held_by_category,
    memory_course,
    phase_runs,
)
from refshard.dryrun.recording import Category, Kind, Phase, Recording
from refshard.dryrun.replay import replay
from refshard.specs.cluster import load_cluster
from tests.dryrun.made import Made, prices

MIB = 2**20


def course_of(recording: Recording, *, first: int = 0, end: int | None = None, bins: int = 300) -> MemoryCourse:
    """Along the calls of the allocator."""
    account = account_memory(recording)
    end = len(recording) if end is None else end
    return memory_course(recording, account, call_clock(recording), first=first, end=end, bins=bins)


def busy(seed: int, events: int = 600) -> Recording:
    """Blocks of all categories that come and go, between launches and segments."""
    chance, made, held = random.Random(seed), Made(), list[int]()
    for _ in range(events):
        draw = chance.random()
        if draw < 0.15:
            made.launch()
        elif draw < 0.25:
            made.segment(chance.choice([20, 2, -2]) * MIB)
        elif draw < 0.65 or not held:
            held.append(made.allocate(chance.randrange(1, 64) * MIB, chance.choice(list(Category))))
        else:
            made.free(held.pop(chance.randrange(len(held))))
    return made.recording()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bins", [1, 7, 400])
def test_each_sample_is_a_state_of_the_allocator_and_the_peak_is_exact(seed: int, bins: int) -> None:
    recording, first, end = busy(seed), 100, 500
    account, course = account_memory(recording), course_of(recording, first=first, end=end, bins=bins)
    assert course.allocated.tolist() == account.allocated[course.counts - 1].tolist()
    assert course.reserved.tolist() == account.reserved[course.counts - 1].tolist()
    assert (course.held >= 0).all()
    assert course.peak_bytes == account.allocated[first - 1 : end].max()
    assert course.peak_reserved_bytes == account.reserved[first - 1 : end].max()
    assert course.allocated.min() == account.allocated[first - 1 : end].min()
    assert (course.counts[0], course.counts[-1]) == (first, end)
    assert (np.diff(course.counts) >= 0).all()
    assert (np.diff(course.places) >= 0).all()


def test_no_more_is_kept_than_a_picture_needs() -> None:
    recording = busy(5, events=4000)
    assert len(course_of(recording, bins=10).counts) <= 10 * 5 + 3
    assert len(course_of(recording).counts) <= 300 * 5 + 3


def test_every_state_is_a_sum_over_the_blocks_that_live() -> None:
    recording = busy(6, events=200)
    found = held_by_category(recording, np.arange(len(recording) + 1))
    live = dict[int, tuple[int, int]]()
    for row in range(len(recording)):
        block = int(recording.subjects[row])
        if recording.kinds[row] == Kind.ALLOCATE:
            live[block] = int(recording.categories[row]), int(recording.sizes[row])
        elif recording.kinds[row] == Kind.FREE:
            del live[block]
        expected = [sum(size for one, size in live.values() if one == category) for category in Category]
        assert found[row + 1].tolist() == expected


def test_a_spike_among_thousands_of_events_is_the_peak() -> None:
    made = Made()
    made.allocate(1 * MIB, Category.PARAMETERS)
    for number in range(3000):
        made.free(made.allocate(MIB if number != 1234 else 77 * MIB, Category.ACTIVATIONS))
    course = course_of(made.recording(), bins=5)
    assert course.peak_bytes == 78 * MIB
    assert course.held[course.peak].tolist() == [
        77 * MIB if one is Category.ACTIVATIONS else MIB if one is Category.PARAMETERS else 0 for one in Category
    ]
    assert course.counts[course.peak] == 1 + 2 * 1234 + 1


def test_most_that_was_reserved_is_kept_where_it_is_given_back_at_once() -> None:
    made = Made()
    for nbytes in (2 * MIB, 20 * MIB, -20 * MIB):
        made.segment(nbytes)
    course = course_of(made.recording(), bins=1)
    assert course.peak_reserved_bytes == 22 * MIB
    assert course.reserved[-1] == 2 * MIB


def test_a_step_begins_with_what_is_held_before_it() -> None:
    made = Made()
    made.allocate(8 * MIB, Category.PARAMETERS)
    gradient = made.allocate(2 * MIB, Category.GRADIENTS)
    made.mark()
    made.launch()
    made.free(gradient)
    recording = made.recording()
    course = course_of(recording, first=3, end=5, bins=1)
    assert set(course.held[:, Category.PARAMETERS].tolist()) == {8 * MIB}
    assert [(place, held[Category.GRADIENTS]) for place, held in zip(course.places, course.held)] == [
        (2, 2 * MIB),
        (2, 0),
        (2, 0),
        (3, 0),
    ]


def test_a_block_that_was_never_taken_is_of_no_category() -> None:
    made = Made()
    made.allocate(8 * MIB, Category.PARAMETERS)
    made.free(99)
    assert course_of(made.recording()).held[-1].tolist() == [0, 8 * MIB, 0, 0, 0, 0, 0]


def test_a_state_that_lasts_is_found_wherever_a_reader_points() -> None:
    made = Made()
    early = made.allocate(3 * MIB)
    first = made.launch()
    made.free(early)
    recording = made.recording()
    clock = np.array([0, 0, 1000, 1000])
    course = memory_course(recording, account_memory(recording), clock, first=0, end=len(recording), bins=10)
    assert first == 1
    assert dict(zip(course.places.tolist(), course.allocated.tolist())) == {
        **dict.fromkeys(range(0, 1000, 100), 3 * MIB),
        1000: 0,
    }


def test_without_memory_there_are_only_the_ends() -> None:
    made = Made()
    made.launch()
    course = course_of(made.recording(), bins=1)
    assert course.counts.tolist() == [0, 1, 1, 1]
    assert course.peak_bytes == course.peak_reserved_bytes == 0


def test_on_the_gpu_a_block_comes_when_what_was_launched_before_is_done() -> None:
    made = Made()
    made.allocate(MIB)
    first = made.launch()
    made.allocate(MIB)
    aside = made.launch(stream=20)
    made.allocate(MIB)
    second = made.launch()
    recording = made.recording()
    priced = prices(recording, {first: 3e-3, aside: 6e-3, second: 5e-3}, host_s=1e-6)
    replayed = replay(recording, priced, Rates.of(load_cluster("dgx-h100")))
    assert replayed.main_stream == 0
    assert replayed.ends[aside] > replayed.ends[first]
    clock = gpu_clock(recording, replayed)
    done = int(replayed.ends[first])
    assert clock.tolist() == [0, 0, done, done, done, done, int(replayed.ends[second])]
    course = memory_course(recording, account_memory(recording), clock, first=0, end=len(recording))
    assert course.places[course.counts == 5].min() == done
    assert course.places[-1] == replayed.ends[second]


def test_recomputation_is_a_part_of_backward_and_a_loss_ends_no_phase() -> None:
    made = Made()
    for phase in (
        Phase.OTHER, Phase.FORWARD, Phase.OTHER, Phase.FORWARD, Phase.OTHER, Phase.BACKWARD, Phase.RECOMPUTE,
        Phase.BACKWARD, Phase.OTHER, Phase.OPTIMIZER, Phase.OTHER,
    ):  # fmt: skip
        made.phase = phase
        made.launch()
    recording = made.recording()
    clock = np.arange(len(recording) + 1)
    assert phase_runs(recording, clock, 0, len(recording)) == (
        PhaseRun(phase=Phase.FORWARD, begin=1, end=4),
        PhaseRun(phase=Phase.BACKWARD, begin=5, end=8),
        PhaseRun(phase=Phase.OPTIMIZER, begin=9, end=10),
    )
    assert phase_runs(recording, clock, 6, 9) == (PhaseRun(phase=Phase.BACKWARD, begin=6, end=8),)
