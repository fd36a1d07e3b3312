"""Who comes last, and why: jobs of four ranks made by hand, in which one does a known thing longer than the others."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from refshard.analysis.analyse import analyse, join
from refshard.analysis.figures import Lateness, TraceFigures
from refshard.quantities import format_ns
from refshard.report.trace.findings import findings
from tests.analysis.handmade import event, note, shaped, step, write

US = 1000
RANKS, STEPS = 4, 6
TRANSFER = 50
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass(frozen=True, kw_only=True)
class Does:
    """What one rank does in one step, in microseconds; ``products`` and ``rest`` are factors of kernels' times.
    ``experts`` are tokens of another product.
    """

    loading: int = 10
    allocating: int = 0
    host: int = 20
    tokens: int = 1000
    products: float = 1.0
    rest: float = 1.0
    experts: int = 0


class Rank:
    """One rank of a job under DDP: forward, half of backward, a reduction beside the rest of it, and another one.

    The host waits for the optimizer before the next step. Its clock is 7 ms per rank ahead.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.events, self.count, self.now = rank, list[dict[str, Any]](), 0, 0.0

    def event(self, make: Callable[..., dict[str, Any]], name: str, start: float, ns: float, **args: Any) -> None:
        self.events.append(make(name, start + 7000 * self.rank, ns, **args))

    def kernel(
        self, operator: str, name: str, launch: float, start: float, us: float, tokens: int, **args: Any
    ) -> None:
        self.count += 1
        link = {"correlation": self.count, "External id": self.count}
        stream = 20 if args else 7
        dims: dict[str, Any] = {} if args else shaped([[tokens, 64], [64, 64]], ["float", "float"])
        self.event(event, operator, launch, 2, **dims, **{"External id": self.count})
        self.event(event, "cudaLaunchKernel", launch, 1, cat="cuda_runtime", **link)
        where = {"tid": stream, "device": 0, "stream": stream, "grid": [8, 1, 1], "block": [128, 1, 1]}
        self.event(event, name, start, us, cat="kernel", **where, **link, **args)

    def begin(self, does: Does) -> None:
        """Up to where the reductions could start."""
        self.began, self.does, t = self.now, does, self.now
        self.event(note, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", t, does.loading)
        t += does.loading
        if does.allocating:
            self.event(event, "cudaMalloc", t, does.allocating, cat="cuda_runtime", correlation=10**6)
        self.launch = t = t + does.allocating + does.host
        more = does.tokens / 1000
        self.enters = []
        t += 2
        for _ in range(2):
            for operator, us in (("aten::mm", 100 * does.products), ("aten::add", 50 * does.rest)):
                self.kernel(operator, f"{operator[6:]}_kernel", self.launch, t, us * more, does.tokens)
                self.launch, t = self.launch + 2, t + us * more
            if does.experts:
                us = does.experts / 10
                self.kernel("aten::mm", "mm_kernel", self.launch, t, us, does.experts)
                self.launch, t = self.launch + 2, t + us
            self.enters.append(t)

    def end(self, ends: list[float], number: int) -> None:
        for place, (enter, end) in enumerate(zip(self.enters, ends)):
            start = enter if place == 0 else max(enter, ends[0])
            message = {"In msg nelems": 1000, "Out msg nelems": 1000, "Group size": RANKS, "dtype": "Float",
                       "Process Group Name": "0", "Process Group Ranks": str(list(range(RANKS)))}  # fmt: skip
            self.kernel(
                "c10d::allreduce_", REDUCE, self.launch, start, end - start, 0, collective="allreduce", **message
            )
            self.launch += 2
        self.kernel("aten::mul_", "adam_kernel", self.launch, ends[1] + 1, 20, 64)
        self.now = ends[1] + 21
        wait = self.now - self.launch - 3
        self.event(event, "cudaDeviceSynchronize", self.launch + 3, wait, cat="cuda_runtime", correlation=10**7)
        self.event(step, number, self.began, self.now - self.began)  # type: ignore[arg-type]


def job(path: Path, does: Callable[[int, int], Does]) -> list[TraceFigures]:
    """The figures of four ranks; ``does`` says what a rank does in a step."""
    ranks = [Rank(rank) for rank in range(RANKS)]
    for number in range(STEPS):
        for one in ranks:
            one.begin(does(one.rank, number))
        first = max(one.enters[0] for one in ranks) + TRANSFER
        second = max(first, *(one.enters[1] for one in ranks)) + TRANSFER
        for one in ranks:
            one.end([first, second], number)
    device = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}
    paths = [write(path / f"rank{one.rank}.json", one.events, rank=one.rank, **device) for one in ranks]
    return [one.figures for one in join([analyse(path) for path in paths], one_job=True)]


def only(rank: int, **changes: Any) -> Callable[[int, int], Does]:
    """One rank that differs from the others in all steps."""
    return lambda one, _: Does(**changes) if one == rank else Does()


def late(one: TraceFigures) -> Lateness:
    assert one.lateness is not None
    return one.lateness


SLOW, TOKENS, READS, LAUNCHES = (
    only(2, products=1.4, rest=1.4),
    only(1, tokens=1500),
    only(0, loading=200),
    only(3, host=120),
)


@pytest.mark.parametrize(
    ("does", "rank", "cause", "us", "says"),
    [
        (SLOW, 2, "slower", 120, "Its kernels take 1.38 times as long as the others' for the same work"),
        (
            only(2, products=1.4),
            2,
            "slower",
            80,
            "matrix products 1.40 times, the rest 1.00 times, as with a lower clock",
        ),
        (TOKENS, 1, "work", 150, "1.50 times the FLOPs of the others', and the same work takes 1.00 times as long"),
        (LAUNCHES, 3, "host", 100, "Python outside of operators 121 us a step against 21.0 us"),
        (READS, 0, "input", 140, "It waits for data loading"),  # 50 of 190 us are beside compute
        (only(0, allocating=150), 0, "allocator", 100, "Its host stands in the allocator's calls"),
    ],
)
def test_a_late_rank_is_named_with_its_cost_and_cause(
    tmp_path: Path, does: Callable[[int, int], Does], rank: int, cause: str, us: int, says: str
) -> None:
    """Steps and backward are equally long on all ranks: the reductions make the others wait."""
    ranks = job(tmp_path, does)
    assert len({part.breakdown.span_ns for one in ranks for part in one.steps[1:]}) == 1
    found = late(ranks[rank])
    assert (found.last, found.collectives, found.leads) == (12, 12, STEPS)
    assert (found.cost_ns, found.grows) == (STEPS * us * US, False)
    assert [(part.cause, part.ns) for part in found.parts] == [(cause, found.cost_ns)]
    assert all((late(one).last, late(one).cost_ns, late(one).parts) == (0, 0, ()) for one in ranks if one.rank != rank)
    lead = findings(ranks)[0].lead
    assert (
        f"Rank {rank} comes last to 100 % of 12 collectives, and the 3 others wait {format_ns(us * US)} a step" in lead
    )
    assert says in lead


def test_uneven_experts_are_no_slow_hardware(tmp_path: Path) -> None:
    """All ranks have the same tokens, but rank 1's experts are given four times as many."""
    ranks = job(tmp_path, lambda rank, _: Does(experts=1000 if rank == 1 else 250))
    found = late(ranks[1])
    assert [part.cause for part in found.parts] == ["work"]
    assert (found.same_work, found.flops) == (1.0, 2000 / 1250)
    assert "so its hardware is not slower" in findings(ranks)[0].lead


def test_ratios_tell_more_work_from_slower_hardware(tmp_path: Path) -> None:
    """Sequences of another length on every rank and in every step, and one rank that is slower besides."""
    ranks = job(tmp_path, lambda rank, number: Does(
        tokens=1000 + 100 * rank + number, products=1.5 if rank == 0 else 1, rest=1.5 if rank == 0 else 1
    ))  # fmt: skip
    found = late(ranks[0])
    assert found.same_work == pytest.approx(1.5, abs=0.01)
    assert found.flops == pytest.approx(1000 / 1200, abs=0.01)
    assert found.parts[0].cause == "slower"


def test_another_rank_in_each_step_is_no_straggler(tmp_path: Path) -> None:
    ranks = job(tmp_path, lambda rank, number: Does(host=120) if rank == 3 * number % RANKS else Does())
    assert [late(one).leads for one in ranks] == [2, 1, 1, 2]
    lead = findings(ranks)[0].lead
    assert "The 4 ranks here hold each other up by turns, 100 us a step" in lead
    assert "Most is for rank 0, 33.3 us, in 2 of 6 steps" in lead


def test_a_growing_lag_is_told(tmp_path: Path) -> None:
    ranks = job(tmp_path, lambda rank, number: Does(products=1.1 + 0.2 * number) if rank == 2 else Does())
    assert late(ranks[2]).grows
    assert list(late(ranks[2]).steps) == sorted(late(ranks[2]).steps)
    assert "more from step to step (20.0 us in the first, 210 us in the last)" in findings(ranks)[0].lead


@pytest.mark.parametrize("does", [only(9), only(1, host=21)])
def test_ranks_that_hardly_wait_are_not_blamed(tmp_path: Path, does: Callable[[int, int], Does]) -> None:
    (found,) = findings(job(tmp_path, does))
    assert "comes last" not in found.lead
    assert found.more[-1].startswith("No rank here holds the others up")


def test_a_rank_alone_is_not_late(tmp_path: Path) -> None:
    job(tmp_path, SLOW)
    (alone,) = join([analyse(tmp_path / "rank2.json")])
    assert alone.figures.lateness is None
