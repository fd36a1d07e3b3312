"""How layers are dealt, and the laws of pipelines, against schedules that are played event by event."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.errors import SpecError
from refshard.plan.stages import deal, delayed_weights, held_by_first_backward, in_flight, step_seconds
from refshard.specs.job import Job
from tests.plan.made import columns, job


@dataclass(frozen=True, slots=True)
class Task:
    """One microbatch's forward or backward of one stretch of layers."""

    forward: bool
    stretch: int
    microbatch: int


def order(rank: int, ranks: int, parts: int, microbatches: int) -> list[Task]:
    """What a rank does, as Megatron orders it: warm-up, one forward and one backward in turn, and the rest.

    Stretches are numbered along the model; rank r has r, r + ranks, and so on.
    """
    total = microbatches * parts
    warm_up = ranks - rank - 1 if parts == 1 else 2 * (ranks - rank - 1) + (parts - 1) * ranks
    forward, backward = ([_task(place, f, rank, ranks, parts) for place in range(total)] for f in (True, False))
    warm_up = min(warm_up, total)
    tasks = forward[:warm_up]
    for f, b in zip(forward[warm_up:], backward):
        tasks += [f, b]
    return tasks + backward[total - warm_up :]


def _task(place: int, forward: bool, rank: int, ranks: int, parts: int) -> Task:
    """Microbatches pass in groups of as many as there are ranks, each group through one stretch after the other."""
    group, within = divmod(place, ranks * parts)
    part = within // ranks if forward else parts - 1 - within // ranks
    return Task(forward, part * ranks + rank, group * ranks + within % ranks)


def played(times: Sequence[float], parts: int, microbatches: int) -> float:
    """When all is done: each rank takes a third of ``times`` for its stretches' forwards, and then backwards."""
    ranks = len(times)
    waiting = [iter(order(rank, ranks, parts, microbatches)) for rank in range(ranks)]
    following = [next(tasks, None) for tasks in waiting]
    free = [0.0] * ranks
    done: dict[Task, float] = {}
    while any(following):
        before = len(done)
        for rank, tasks in enumerate(waiting):
            while (task := following[rank]) and all(need in done for need in _needs(task, ranks * parts)):
                begin = max([free[rank], *(done[need] for need in _needs(task, ranks * parts))])
                free[rank] = done[task] = begin + times[rank] / parts * (1 if task.forward else 2) / 3
                following[rank] = next(tasks, None)
        assert len(done) > before, "the schedule is stuck"
    return max(free)


def _needs(task: Task, stretches: int) -> Iterator[Task]:
    if task.forward and task.stretch:
        yield Task(True, task.stretch - 1, task.microbatch)
    if not task.forward:
        yield Task(True, task.stretch, task.microbatch)
        if task.stretch < stretches - 1:
            yield Task(False, task.stretch + 1, task.microbatch)


def pipelined(ranks: int, parts: int = 1, microbatches: int = 8, **fields: str) -> Job:
    schedule = "interleaved" if parts > 1 else "1f1b"
    given = {"schedule": schedule, **fields}
    return job(strategy="megatron", pp=ranks, interleave=parts, microbatches=microbatches, **given)


def law(times: Sequence[float], parts: int, microbatches: int) -> float:
    rows = columns(pipelined(len(times), parts, microbatches))
    step, _ = step_seconds(rows, np.array([max(times)]), np.array([sum(times)]), np.array([max(times) / 3]))
    return float(step[0])


@given(ranks=st.integers(2, 6), groups=st.integers(1, 4), parts=st.integers(1, 4))
def test_stages_that_take_as_long_are_timed_exactly(ranks: int, groups: int, parts: int) -> None:
    times = [3.0] * ranks
    assert law(times, parts, groups * ranks) == pytest.approx(played(times, parts, groups * ranks))


@given(times=st.lists(st.integers(3, 9), min_size=2, max_size=6), more=st.integers(0, 12))
def test_uneven_stages_take_as_long_at_most_and_the_slowests_work_at_least(times: list[int], more: int) -> None:
    microbatches = len(times) + more
    found = played(list(map(float, times)), 1, microbatches)
    slowest, expected = max(times) * microbatches, law(list(map(float, times)), 1, microbatches)
    assert slowest - 1e-9 <= found <= expected + 1e-9
    if more > 2 * len(times):
        assert found == pytest.approx(expected, rel=0.2)


@given(ranks=st.integers(2, 6), groups=st.integers(1, 4), parts=st.integers(1, 4))
def test_each_rank_holds_as_many_microbatches_as_the_schedule_leaves_open(ranks: int, groups: int, parts: int) -> None:
    for rank in range(ranks):
        held = most = 0
        for task in order(rank, ranks, parts, groups * ranks):
            held += 1 if task.forward else -1
            most = max(most, held)
        found = in_flight(columns(pipelined(ranks, parts, groups * ranks)), rank)
        assert float(found[0]) == pytest.approx(min(most / parts, groups * ranks))


@given(ranks=st.integers(2, 6), groups=st.integers(1, 4), parts=st.integers(1, 4))
def test_what_the_first_rank_holds_when_its_first_layers_end_their_first_backward(
    ranks: int, groups: int, parts: int
) -> None:
    held = 0
    for task in order(0, ranks, parts, groups * ranks):
        held += 1 if task.forward else -1
        if not task.forward and task.stretch == 0:
            break
    found = held_by_first_backward(columns(pipelined(ranks, parts, groups * ranks)))
    assert float(found[0]) == pytest.approx(held / parts)


def test_a_zero_bubble_schedule_holds_as_much_on_every_rank() -> None:
    """Later ranks have fewer microbatches before their first backward, and put off as many more gradients."""
    rows = columns(pipelined(4, 2, 8, schedule="zero-bubble"))
    assert [float(in_flight(rows, rank)[0]) for rank in range(4)] == [4.0] * 4
    assert [float(delayed_weights(rows, rank)[0]) for rank in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert float(delayed_weights(columns(pipelined(4, 2, 8)), 3)[0]) == 0.0


def test_interleaving_divides_the_wait() -> None:
    rows = columns(*(pipelined(4, parts) for parts in (1, 2, 4)))
    times = np.full(3, 2.0)
    _, waiting = step_seconds(rows, times, 4 * times, times / 3)
    assert waiting.tolist() == [6.0, 3.0, 1.5]


@given(
    forward=st.floats(0.1, 10), inputs=st.floats(0.1, 10), weights=st.floats(0.1, 10), ranks=st.integers(2, 16),
    parts=st.sampled_from([1, 2]),
)  # fmt: skip
def test_a_zero_bubble_schedule_waits_by_its_law_and_is_never_slower(
    forward: float, inputs: float, weights: float, ranks: int, parts: int
) -> None:
    """(p - 1)(F + B - W) over v (ZB-H1 of Qi et al.), as far as gradients of weights suffice."""
    rows = columns(pipelined(ranks, parts), pipelined(ranks, parts, schedule="zero-bubble"))
    own = np.full(2, forward + inputs + weights)
    (other, filled), (waits, rest) = step_seconds(rows, own, ranks * own, np.full(2, weights))
    assert rest == pytest.approx(max(0.0, (ranks - 1) * (forward + inputs - weights)) / parts, abs=1e-9)
    assert filled <= other
    assert rest <= waits


def test_one_rank_waits_for_nobody() -> None:
    step, waiting = step_seconds(columns(job(microbatches=3)), np.ones(1), np.ones(1), np.ones(1))
    assert (step[0], waiting[0]) == (3.0, 0.0)
    assert in_flight(columns(job(microbatches=3))).tolist() == [1.0]


def dealt(n_layers: int, ranks: int, parts: int = 1) -> list[int]:
    """Layers of each rank."""
    stages = deal(n_layers, columns(pipelined(ranks, parts)))
    middle, first, last = (int(column[0]) for column in (stages.middle, stages.first, stages.last))
    return [first, *[middle] * (ranks - 2), last]


@given(n_layers=st.integers(2, 200), data=st.data())
def test_all_layers_are_dealt_and_no_rank_has_more_than_an_even_share_rounded_up(
    n_layers: int, data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(2, n_layers))
    found = dealt(n_layers, ranks)
    assert max(found) == -(-n_layers // ranks)
    assert n_layers <= sum(found) < n_layers + ranks
    assert min(found) >= (n_layers + 2) // ranks - 1
    if n_layers % ranks == 0 or (n_layers + 2) % ranks == 0:
        assert sum(found) == n_layers


@given(ranks=st.integers(2, 16), parts=st.integers(2, 8), each=st.integers(1, 4), ends=st.booleans())
def test_layers_of_interleaved_stretches_add_up(ranks: int, parts: int, each: int, ends: bool) -> None:
    n_layers = ranks * parts * each - 2 * ends
    assert sum(dealt(n_layers, ranks, parts)) == n_layers


@pytest.mark.parametrize(
    ("ranks", "parts", "given", "held"),
    [
        # Megatron Bridge's layouts of DeepSeek-V3's 61 blocks and its module of multi-token prediction, of which the
        # last stage has one block (recipes/deepseek/h100/deepseek_v3.py at 067f987df), and its "Et|(tt|)*30mL".
        (2, 8, "4*15,2", [32, 30]),
        (4, 4, "4*15,2", [16, 16, 16, 14]),
        (16, 1, "4*15,2", [*[4] * 15, 2]),
        (8, 1, "8*7,6", [*[8] * 7, 6]),
        (8, 4, "1,2*30,1", [7, *[8] * 6, 7]),
    ],
)
def test_stages_that_are_given_are_dealt_in_turn(ranks: int, parts: int, given: str, held: list[int]) -> None:
    stages = deal(62, columns(pipelined(ranks, parts, stages=given)))
    middle, first, last = (int(column[0]) for column in (stages.middle, stages.first, stages.last))
    assert [first, *[middle] * (ranks - 2), last] == held


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("4*15", "must give 62 layers to 16 stages (pp * interleave), got 60 in '4*15', which are 15"),
        ("4,x", "must list the layers of each stage, as '4*15,2', got '4,x'"),
    ],
)
def test_stages_that_do_not_fit_are_refused(given: str, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        deal(62, columns(pipelined(16, 1, stages=given)))
    with pytest.raises(ValueError, match="stages must be empty without a pipeline"):
        job(stages=given)


def test_llama_405b_has_126_layers_so_that_both_ends_count_as_one() -> None:
    assert dealt(126, 16) == [7, *[8] * 14, 7]
    assert dealt(61, 2) == [31, 30]
