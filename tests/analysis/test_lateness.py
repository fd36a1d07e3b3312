"""Who comes last, and why: jobs of four ranks made by hand, in which one does a known thing longer than the others."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from refshard.analysis.analyse import analyse, join
from refshard.analysis.figures import Lateness, TraceFigures
from refshard.report.trace.findings import findings
from tests.analysis.handmade import event, note, shaped, step, write

US = 1000
RANKS, STEPS = 4, 6
TRANSFER = 50
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass(frozen=True, kw_only=True)
class Does:
    """What one rank does in one step, in microseconds; ``products`` and ``rest`` are factors of kernels' times."""

    loading: int = 10
    allocating: int = 0
    host: int = 20
    tokens: int = 1000
    products: float = 1.0
    rest: float = 1.0


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


def parts(one: TraceFigures) -> dict[str, int]:
    assert one.lateness is not None
    return {part.cause: part.ns for part in one.lateness.parts}


def late(one: TraceFigures) -> Lateness:
    assert one.lateness is not None
    return one.lateness


def test_slow_hardware(tmp_path: Path) -> None:
    ranks = job(tmp_path, only(2, products=1.4, rest=1.4))
    print(findings(ranks)[0].lead)
    print(late(ranks[2]))
    assert 0
