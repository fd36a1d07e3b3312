"""What collectives take over the real backend, alone and beside compute; what compute takes beside them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from refshard.engine.collectives import GroupCollectives, Pending, Together, all_gather_call, reduce_scatter_call
from refshard.harness.calibration.samples import Beside, Calibration, TimedCollective
from refshard.quantities import KIB, MIB
from refshard.specs.cluster import COLLECTIVES, CollectiveOp

_OF_SUBGROUPS: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter", "all_reduce", "exchange")
_MOST_REPEATS = 15
Issue = Callable[[], Pending]


@dataclass(frozen=True, slots=True)
class Group:
    """A process group that this rank is in, all of whose kind communicate at once."""

    group: dist.ProcessGroup
    ranks: int
    nodes: int


def groups(calibration: Calibration, rank: int) -> Iterator[Group]:
    """All ranks; and where nodes hold several: those of one node, and those of the same place on each node."""
    assert dist.group.WORLD is not None
    yield Group(dist.group.WORLD, calibration.ranks, calibration.nodes)
    nodes, per_node = calibration.nodes, calibration.per_node
    if nodes == 1 or per_node == 1:
        return
    inside = [list(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)]
    across = [list(range(place, calibration.ranks, per_node)) for place in range(per_node)]
    for members, on_nodes in ((inside, 1), (across, nodes)):
        made = [dist.new_group(ranks) for ranks in members]  # every rank takes part in making each
        mine = next(index for index, ranks in enumerate(members) if rank in ranks)
        yield Group(made[mine], len(members[mine]), on_nodes)


def sizes(device: str, *, quick: bool) -> tuple[int, ...]:
    """Bytes of the unsharded tensor, up to what training moves at once."""
    if quick:
        return (KIB, 64 * KIB, 256 * MIB if device == "cuda" else 4 * MIB)
    return tuple(KIB * 4**power for power in range(11 if device == "cuda" else 9))


def divisible(numel: int, ranks: int) -> int:
    """The most elements up to ``numel``, but at least one a rank, that ``ranks`` share evenly."""
    return max(ranks, numel // ranks * ranks)


def time_collectives(calibration: Calibration, group: Group, device: torch.device) -> Iterator[TimedCollective]:
    """Each operation at each size. All ranks must ask for the same, in the same order."""
    whole = group.ranks == calibration.ranks
    for op in COLLECTIVES if whole else _OF_SUBGROUPS:
        if op == "exchange" and device.type == "cuda":
            continue  # the engine exchanges over gloo only
        for size in sizes(device.type, quick=calibration.quick):
            numel = divisible(size // 4, group.ranks)
            issue = _issuer(op, numel, group.group, device)
            seconds = tuple(_repeats(issue, group.group, device, budget_s=0.1 if calibration.quick else 0.2))
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
        scatter, output = reduce_scatter_call(group, handles=True), torch.empty_like(own)
        return lambda: scatter(output, full)
    if op == "exchange":
        collectives = GroupCollectives(group, device=device)
        return lambda: collectives.all_gather(full, own)
    plain: dict[str, Callable[[], dist.Work | None]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=group, async_op=True),
        "broadcast": lambda: dist.broadcast(full, group_src=0, group=group, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(other, full, group=group, async_op=True),
    }
    start = plain[op]

    def issue() -> Pending:
        work: Pending | None = start()
        assert work is not None
        return work

    return issue


def _repeats(issue: Issue, group: dist.ProcessGroup, device: torch.device, budget_s: float) -> Iterator[float]:
    """Seconds of one call, again and again: several in a row where one is short, as nccl-tests takes them."""
    _run(issue, 1, device)
    probe = torch.tensor(_run(issue, 1, device), dtype=torch.float64, device=device)
    dist.all_reduce(probe, op=dist.ReduceOp.MAX, group=group)  # all ranks must repeat as often
    in_a_row = max(1, min(20, round(2e-3 / max(probe.item(), 1e-6))))
    for _ in range(max(3, min(_MOST_REPEATS, round(budget_s / max(probe.item() * in_a_row, 1e-6))))):
        dist.barrier(group)
        yield _run(issue, in_a_row, device) / in_a_row


def _run(issue: Issue, count: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(count):
        issue().wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def measure_beside(calibration: Calibration, group: dist.ProcessGroup, device: torch.device) -> Beside:
    """Run matrix products beside collectives, and say how much slower each is than alone."""
    width = 4096 if device.type == "cuda" else 256
    a, b = torch.randn(2 * width, width, device=device), torch.randn(width, width, device=device)
    op: CollectiveOp = "all_gather" if device.type == "cuda" else "exchange"
    size = (256 if device.type == "cuda" else 4 if calibration.quick else 16) * MIB
    issue = _issuer(op, divisible(size // 4, group.size()), group, device)
    found = []
    for _ in range(3):
        dist.barrier(group)
        communication_s = _run(issue, 2, device) / 2
        product_s = _products(a, b, 20) / 20
        dist.barrier(group)
        measure = _beside_on_cuda if device.type == "cuda" else _beside_on_cpu
        found.append(measure(a, b, issue, product_s, communication_s))
    compute, communication = (median(part) for part in zip(*found))
    return Beside(compute=_part(compute), communication=_part(communication))


def _part(ratio: float) -> float:
    return min(max(ratio, 0.01), 1.0)


def _products(a: torch.Tensor, b: torch.Tensor, count: int) -> float:
    """Seconds of as many products, on the wall's clock: here it counts that something else has the core."""
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
    started = time.perf_counter()
    for _ in range(count):
        torch.mm(a, b)
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - started


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
    """As much of both as takes equally long alone; what ends first ran beside the other all the time."""
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
