"""Times of collectives over the real backend, alone and together with compute, and of compute together with them.

All ranks agree on what was measured at the store where they met: that takes neither a collective nor memory.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from refshard.engine.collectives import GroupCollectives, Pending, Together, all_gather_call, reduce_scatter_call
from refshard.measure.calibration.samples import ELSEWHERE, Beside, Calibration, TimedCollective, Traffic, groups_of
from refshard.measure.rank import describe
from refshard.quantities import KIB, MIB, format_bytes
from refshard.specs.cluster import CollectiveOp

T = TypeVar("T")
_PATIENCE = timedelta(minutes=10)
"""How much longer one rank may take than another."""


class FailedOnSomeRankError(Exception):
    """Raised on all ranks, which go on together; the message says why on the rank that failed."""


class Agreement:
    """Each rank has one, and all of them must call it in the same order."""

    def __init__(self, store: Store, ranks: int) -> None:
        self._store, self._ranks, self._turn = store, ranks, 0

    def all_well(self, *, well: bool = True) -> bool:
        """Wait for all ranks to come here, and return whether all of them are ``well``."""
        turn, self._turn = f"turn/{self._turn}", self._turn + 1
        if not well:
            self._store.add(f"{turn}/unwell", 1)
        if self._store.add(f"{turn}/arrived", 1) == self._ranks:
            self._store.set(f"{turn}/go", "")
        else:
            self._store.wait([f"{turn}/go"], _PATIENCE)
        return self._store.add(f"{turn}/unwell", 0) == 0

    def made_by_all(self, what: str, make: Callable[[], T]) -> T:
        """What ``make`` makes for ``what``, once all ranks have made theirs.

        Raises:
            FailedOnSomeRankError: a rank could not.
        """
        failure = ""
        try:
            made = make()
        except Exception as error:
            failure = f"{what}: {describe(error)}"
        if not self.all_well(well=not failure):
            raise FailedOnSomeRankError(failure or ELSEWHERE)
        return made


_MOST_REPEATS = 15
Issue = Callable[[], Pending]


@dataclass(frozen=True, slots=True)
class Group:
    """A process group of this rank; all groups of its kind communicate at once."""

    group: dist.ProcessGroup
    ranks: int
    nodes: int


def make_groups(ranks: int, nodes: int, rank: int) -> dict[tuple[int, int], Group]:
    """The groups that this rank is in, by their ranks and nodes, as :func:`groups_of` lists them.

    Every rank must call this. Nodes hold consecutive ranks.
    """
    assert dist.group.WORLD is not None
    per_node = ranks // nodes
    members = {
        (per_node, 1): [list(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)],
        (nodes, nodes): [list(range(place, ranks, per_node)) for place in range(per_node)],
    }
    made = {}
    for shape in groups_of(ranks, nodes):
        if shape[0] == ranks:
            made[shape] = Group(dist.group.WORLD, *shape)
            continue
        groups = [dist.new_group(one) for one in members[shape]]  # every rank takes part in making each
        mine = next(index for index, one in enumerate(members[shape]) if rank in one)
        made[shape] = Group(groups[mine], *shape)
    return made


def traffic(device: str, *, quick: bool) -> Traffic:
    """Sizes that a device of this type sends in training."""
    largest, steps = (256 * MIB, 11) if device == "cuda" else (4 * MIB, 9)
    return Traffic(
        sizes=(KIB, 64 * KIB, largest) if quick else tuple(KIB * 4**power for power in range(steps)),
        budget_s=0.1 if quick else 0.2,
        beside_width=4096 if device == "cuda" else 256,
        beside_bytes=(256 if device == "cuda" else 4 if quick else 16) * MIB,
    )


def divisible(numel: int, ranks: int) -> int:
    """The largest multiple of ``ranks`` up to ``numel``, but at least one element a rank."""
    return max(ranks, numel // ranks * ranks)


def time_collective(
    calibration: Calibration, group: Group, op: CollectiveOp, device: torch.device, agreement: Agreement
) -> Iterator[TimedCollective]:
    """One operation at each size. All ranks must ask for the same, in the same order.

    Raises:
        FailedOnSomeRankError: on all ranks, if one of them had no room for the tensors of a size.
    """
    for size in calibration.traffic.sizes:
        numel = divisible(size // 4, group.ranks)
        issue = agreement.made_by_all(format_bytes(4 * numel), partial(_issuer, op, numel, group.group, device))
        seconds = tuple(_repeats(issue, group.group, device, calibration.traffic.budget_s))
        yield TimedCollective(op=op, ranks=group.ranks, nodes=group.nodes, bytes=4 * numel, seconds=seconds)


def _issuer(op: CollectiveOp, numel: int, group: dist.ProcessGroup, device: torch.device) -> Issue:
    """A call that starts ``op`` on ``numel`` fp32 elements of the unsharded tensor, and returns at once.

    The ranks of the group must divide ``numel``.
    """
    full, other = torch.randn(numel, device=device), torch.empty(numel, device=device)
    part = numel // group.size()
    own = full[group.rank() * part : (group.rank() + 1) * part]
    if op == "all_gather":
        call, shard = all_gather_call(group, handles=True), own.clone()
        return lambda: call(full, shard)
    if op == "reduce_scatter":
        scatter, output = reduce_scatter_call(group, dist.ReduceOp.SUM, handles=True), torch.empty_like(own)
        return lambda: scatter(output, full)
    if op == "exchange":
        collectives = GroupCollectives(group, device=device)
        return lambda: collectives.all_gather(full, own)
    plain: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=group, async_op=True),
        "broadcast": lambda: dist.broadcast(full, group_src=0, group=group, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(other, full, group=group, async_op=True),
    }
    return plain[op]


def _repeats(issue: Issue, group: dist.ProcessGroup, device: torch.device, budget_s: float) -> Iterator[float]:
    """Seconds of one call, again and again: several in a row where one is short, as nccl-tests takes them."""

    def call() -> None:
        issue().wait()

    _run(call, 1, device)
    probe = torch.tensor(_run(call, 1, device), dtype=torch.float64, device=device)
    dist.all_reduce(probe, op=dist.ReduceOp.MAX, group=group)  # all ranks must repeat as often
    in_a_row = max(1, min(20, round(2e-3 / max(probe.item(), 1e-6))))
    for _ in range(max(3, min(_MOST_REPEATS, round(budget_s / max(probe.item() * in_a_row, 1e-6))))):
        dist.barrier(group)
        yield _run(call, in_a_row, device) / in_a_row


def _run(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Wall seconds of ``count`` calls on an idle device: other work on the cores counts here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def measure_beside(calibration: Calibration, device: torch.device, agreement: Agreement) -> Iterator[Beside]:
    """Run matrix products and collectives together, and compare each with its time alone.

    Raises:
        FailedOnSomeRankError: on all ranks, if one of them had no room for the tensors.
    """
    group = dist.group.WORLD
    assert group is not None
    width, numel = calibration.traffic.beside_width, divisible(calibration.traffic.beside_bytes // 4, group.size())
    op: CollectiveOp = "all_gather" if device.type == "cuda" else "exchange"

    def make() -> tuple[torch.Tensor, torch.Tensor, Issue]:
        a, b = torch.randn(2 * width, width, device=device), torch.randn(width, width, device=device)
        return a, b, _issuer(op, numel, group, device)

    a, b, issue = agreement.made_by_all(f"{op} of {format_bytes(4 * numel)}", make)
    measure = _beside_on_cuda if device.type == "cuda" else _beside_on_cpu
    found = []
    for _ in range(3):
        dist.barrier(group)
        communication_s = _run(lambda: issue().wait(), 2, device) / 2
        product_s = _run(lambda: torch.mm(a, b), 20, device) / 20
        dist.barrier(group)
        found.append(measure(a, b, issue, product_s, communication_s))
    compute, communication = (median(part) for part in zip(*found))
    yield Beside(compute=min(max(compute, 0.01), 1.0), communication=min(max(communication, 0.01), 1.0))


def _beside_on_cpu(
    a: torch.Tensor, b: torch.Tensor, issue: Issue, product_s: float, communication_s: float
) -> tuple[float, float]:
    """Multiply until three collectives are done."""
    started, done = time.perf_counter(), 0
    pending = [issue() for _ in range(3)]
    works = [work for one in pending for work in (one.works if isinstance(one, Together) else (one,))]
    while not all(work.is_completed() for work in works):  # type: ignore[attr-defined]
        torch.mm(a, b)
        done += 1
    taken = time.perf_counter() - started
    for one in pending:
        one.wait()
    return done * product_s / taken, len(pending) * communication_s / taken


def _beside_on_cuda(
    a: torch.Tensor, b: torch.Tensor, issue: Issue, product_s: float, communication_s: float
) -> tuple[float, float]:
    """As much of both as takes equally long alone; the first to end ran together with the other all the time."""
    count = max(1, round(3 * communication_s / product_s))
    begin, computed, communicated = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    side = torch.cuda.Stream(a.device)
    begin.record()
    pending = [issue() for _ in range(3)]
    for _ in range(count):
        torch.mm(a, b)
    computed.record()
    with torch.cuda.stream(side):
        for one in pending:
            one.wait()
        communicated.record()
    torch.cuda.synchronize(a.device)
    compute_s, comm_s = begin.elapsed_time(computed) / 1e3, begin.elapsed_time(communicated) / 1e3
    if compute_s >= comm_s:
        return (count * product_s - (compute_s - comm_s)) / comm_s, 3 * communication_s / comm_s
    return count * product_s / compute_s, (3 * communication_s - (comm_s - compute_s)) / compute_s
