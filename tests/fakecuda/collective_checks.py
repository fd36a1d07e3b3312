"""Collectives on fake GPUs, for :mod:`tests.fakecuda.test_collectives`: each check returns what this rank got."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.fakecuda.child import check
from tests.fakecuda.recorded import recorded

LARGE = 1 << 21
"""Elements of a message that no socket holds while nobody reads it."""


def wait(work: dist.Work | None) -> None:
    """For a collective that was issued with ``async_op``."""
    assert work is not None
    work.wait()


def rank() -> int:
    return int(os.environ["RANK"])


def size() -> int:
    return int(os.environ["WORLD_SIZE"])


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """This rank's number, counted from 1."""
    return torch.full(shape, rank() + 1, dtype=dtype, device="cuda")


@check
def init() -> list[Any]:
    """Some scripts bind a device to the group, from which NCCL then splits others."""
    torch.cuda.set_device(rank())
    bound = torch.device("cuda", rank()) if size() % 2 == 0 else None
    dist.init_process_group("nccl", timeout=timedelta(seconds=600), device_id=bound)
    return [dist.get_backend(), dist.get_rank(), dist.get_world_size(), torch.cuda.current_device()]


@check
def all_reduce() -> dict[str, Any]:
    found = {}
    for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        tensor = mine(2)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        found[name] = tensor.tolist()
    tensor = mine(2)
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(0.5))  # type: ignore[attr-defined]
    found["PREMUL_SUM"] = tensor.tolist()
    tensor = mine(2)
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(torch.tensor(0.25, device="cuda")))  # type: ignore[attr-defined]
    found["PREMUL_SUM of a tensor"] = tensor.tolist()
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.float64):
        tensor = mine(1, dtype=dtype)
        dist.all_reduce(tensor)
        found[str(dtype)] = tensor.tolist()
    tensor = torch.tensor([complex(1, rank())], device="cuda")
    dist.all_reduce(tensor)
    found["complex"] = torch.view_as_real(tensor).tolist()
    return found


@check
def gathers() -> dict[str, Any]:
    whole = torch.empty(2 * size(), device="cuda")
    dist.all_gather_into_tensor(whole, mine(2))
    stacked = torch.empty(size(), 2, device="cuda")
    dist.all_gather_into_tensor(stacked, mine(2))
    parts = [torch.empty(2, device="cuda") for _ in range(size())]
    dist.all_gather(parts, mine(2))
    uneven = [torch.empty(other + 1, device="cuda") for other in range(size())]
    dist.all_gather(uneven, mine(rank() + 1))
    to_one = [torch.empty(1, device="cuda") for _ in range(size())] if rank() == 1 else None
    dist.gather(mine(1), to_one, dst=1)
    return {
        "into tensor": whole.tolist(), "stacked": stacked.tolist(), "list": [part.tolist() for part in parts],
        "uneven": [part.tolist() for part in uneven], "to rank 1": to_one and [part.item() for part in to_one],
    }  # fmt: skip


@check
def scatters() -> dict[str, Any]:
    count = size()
    source = torch.arange(2 * count, device="cuda", dtype=torch.float32) * (rank() + 1)
    part = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(part, source)
    mean = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(mean, source, op=dist.ReduceOp.AVG)
    largest = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(largest, source, op=dist.ReduceOp.MAX)
    listed = torch.empty(2, device="cuda")
    dist.reduce_scatter(listed, list(source.clone().chunk(count)))
    scattered = torch.empty(2, device="cuda")
    dist.scatter(scattered, list(source.chunk(count)) if rank() == 0 else None, src=0)
    return {
        "reduce": part.tolist(), "mean": mean.tolist(), "max": largest.tolist(), "list": listed.tolist(),
        "scatter": scattered.tolist(), "source": source.tolist(),
    }  # fmt: skip


@check
def to_and_from_one() -> list[Any]:
    sent = mine(2)
    dist.broadcast(sent, src=1)
    reduced = mine(2)
    dist.reduce(reduced, dst=1)
    return [sent.tolist(), reduced.tolist()]


@check
def all_to_all() -> dict[str, Any]:
    count, me = size(), rank()
    even = torch.empty(count, device="cuda")
    dist.all_to_all_single(even, torch.arange(count, device="cuda", dtype=torch.float32) + 10 * me)
    # Rank r sends r + d rows to rank d.
    sends, receives = [me + other for other in range(count)], [other + me for other in range(count)]
    given = torch.full((sum(sends), 3), float(me), device="cuda")
    taken = torch.empty(sum(receives), 3, device="cuda")
    dist.all_to_all_single(taken, given, receives, sends)
    lists = [torch.empty(other + 1, device="cuda") for other in range(count)]
    dist.all_to_all(lists, [mine(me + 1) for _ in range(count)])
    return {"even": even.tolist(), "uneven": taken[:, 0].tolist(), "lists": [one.tolist() for one in lists]}


@check
def sub_groups() -> list[Any]:
    found = []
    for members in ([0, 1], list(range(1, size()))):
        group = dist.new_group(members)
        tensor = mine(1)
        if rank() in members:
            dist.all_reduce(tensor, group=group)
        found.append(tensor.item())
    return found


@check
def ring() -> dict[str, Any]:
    """Each rank sends to the next; large messages, which block where somebody sends without receiving."""
    after, before = (rank() + 1) % size(), (rank() - 1) % size()
    received = torch.empty(LARGE, device="cuda")
    works = [dist.isend(mine(LARGE), after), dist.irecv(received, before)]
    for work in works:
        wait(work)
    both = torch.empty(2, LARGE, device="cuda")
    batch = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, mine(LARGE), after), dist.P2POp(dist.irecv, both[0], before),
        dist.P2POp(dist.isend, mine(LARGE) * 10, before), dist.P2POp(dist.irecv, both[1], after),
    ])  # fmt: skip
    for work in batch:
        work.wait()
    values = [received, *both]
    return {"values": [one[0].item() for one in values], "all": all(bool((one == one[0]).all()) for one in values)}


@check
def point_to_point() -> list[float]:
    """In turns from rank to rank, each adding 1; two messages of one pair stay in order."""
    token = torch.zeros(1, device="cuda")
    if rank() > 0:
        dist.recv(token, rank() - 1)
    token += 1
    if rank() < size() - 1:
        dist.send(token, rank() + 1)
    first, second = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    if rank() == 0:
        works = [dist.isend(torch.full((1,), value, device="cuda"), 1) for value in (7.0, 8.0)]
    else:
        works = [dist.irecv(into, 0) for into in (first, second)] if rank() == 1 else []
    for work in works:
        wait(work)
    return [token.item(), first.item(), second.item()]


@check
def coalesced() -> dict[str, Any]:
    """Several collectives in one launch, as FSDP's and DTensor's helpers issue them."""
    tensors = [mine(2), mine(3) * 10]
    with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as manager:  # type: ignore[attr-defined]
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    gathered = [torch.empty(size(), device="cuda") for _ in range(2)]
    with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as manager:  # type: ignore[attr-defined]
        for factor, into in enumerate(gathered, start=1):
            dist.all_gather_into_tensor(into, mine(1) * factor)
    manager.wait()
    scattered = [torch.empty(1, device="cuda") for _ in range(2)]
    with dist._coalescing_manager(device=torch.device("cuda")):  # type: ignore[attr-defined]
        for factor, into in enumerate(scattered, start=1):
            dist.reduce_scatter_tensor(into, mine(size()) * factor)
    return {
        "all_reduce": [tensor.tolist() for tensor in tensors], "all_gather": [one.tolist() for one in gathered],
        "reduce_scatter": [one.item() for one in scattered],
    }  # fmt: skip


@check
def objects() -> list[Any]:
    gathered: list[Any] = [None] * size()
    dist.all_gather_object(gathered, {"rank": rank(), "words": ["a"] * rank()})
    told = [f"from {rank()}", rank()]
    dist.broadcast_object_list(told, src=0)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"for {other}" for other in range(size())] if rank() == 0 else None, src=0)
    collected: list[Any] | None = [None] * size() if rank() == 0 else None
    dist.gather_object(rank() * 2, collected, dst=0)
    dist.barrier()
    dist.monitored_barrier(dist.new_group(backend="gloo"), timeout=timedelta(seconds=600))
    return [gathered, told, scattered, collected]


@check
def functional() -> dict[str, Any]:
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    assert group is not None
    found: dict[str, torch.Tensor] = {
        "all_reduce": functional.all_reduce(mine(1), "sum", group),
        "all_gather": functional.all_gather_tensor(mine(1), 0, group),
        "reduce_scatter": functional.reduce_scatter_tensor(mine(size()), "avg", 0, group),
        "broadcast": functional.broadcast(mine(1), 1, group),
        "all_to_all": functional.all_to_all_single(mine(size()), None, None, group),
    }
    return {name: (value * 1).tolist() for name, value in found.items()}


@check
def futures() -> list[Any]:
    tensor = mine(2)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    doubled.wait()
    return [doubled.value().tolist(), work.is_completed(), work.result()[0].tolist()]


@check
def timeouts() -> bool:
    """Inductor gives collectives more time after a hit in its cache."""
    dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    return True


@check
def random_dtensors() -> dict[str, list[float]]:
    """Replicas come out alike on all ranks, shards apart: DTensor moves the generator's offset to the shard's place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, rand

    mesh = init_device_mesh("cuda", (size(),))
    torch.manual_seed(5)
    alike = rand(4, device_mesh=mesh, placements=[Replicate()]).to_local()
    apart = rand(4 * size(), device_mesh=mesh, placements=[Shard(0)]).to_local()
    after = rand(4, device_mesh=mesh, placements=[Replicate()]).to_local()
    return {"alike": alike.tolist(), "apart": apart.tolist(), "after": after.tolist()}


@check
def sync_batch_norm() -> dict[str, Any]:
    """Each rank's rows of a batch, normalised over the rows of all, against the whole batch on the CPU."""
    whole = torch.randn(2 * size(), 3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    plain = torch.nn.BatchNorm1d(3)
    plain(whole).square().sum().backward()
    synced = torch.nn.SyncBatchNorm(3).cuda()
    mine = whole.detach().chunk(size())[rank()].cuda().requires_grad_()
    synced(mine).square().sum().backward()
    assert synced.weight.grad is not None
    assert whole.grad is not None
    dist.all_reduce(synced.weight.grad)
    pairs = {
        "input's gradient": (mine.grad, whole.grad.chunk(size())[rank()]),
        "weight's gradient": (synced.weight.grad, plain.weight.grad),
        "running mean": (synced.running_mean, plain.running_mean),
        "running variance": (synced.running_var, plain.running_var),
    }
    return {
        name: one is not None and other is not None and torch.allclose(one.cpu(), other, atol=1e-5)
        for name, (one, other) in pairs.items()
    }


@check
def streams() -> dict[str, list[str]]:
    """Where collectives run, and who waits for whom."""
    tensor, whole = mine(4), torch.empty(4 * size(), device="cuda")
    wait(dist.all_reduce(tensor, async_op=True))  # makes the communicator's stream
    side = torch.cuda.Stream()
    found = {}
    with recorded() as found["async"]:
        work = dist.all_reduce(tensor, async_op=True)
        tensor.add(1)
        wait(work)
    with recorded() as found["sync"]:
        dist.all_reduce(tensor)
    with recorded() as found["on a side stream"], torch.cuda.stream(side):
        dist.all_gather_into_tensor(whole, tensor)
    with recorded() as found["async, waited for on a side stream"]:
        work = dist.all_gather_into_tensor(whole, tensor, async_op=True)
        with torch.cuda.stream(side):
            wait(work)
    with recorded() as found["coalesced"]:
        with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as manager:  # type: ignore[attr-defined]
            dist.all_reduce(tensor)
            dist.all_reduce(whole)
        manager.wait()
    other = rank() ^ 1
    if other < size():
        with recorded() as found["batch"]:
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, whole[:4], other)]
            )
            for one in works:
                one.wait()
    with recorded() as found["barrier"]:
        dist.barrier()
    return found


@check
def unwaited() -> dict[str, int]:
    """Megabytes that stay allocated when only a work held them, after further collectives of the group."""
    dist.all_reduce(mine(4))
    before = torch.cuda.memory_allocated()

    def held() -> int:
        return round((torch.cuda.memory_allocated() - before) / 2**20)

    def start() -> Any:
        return dist.all_reduce(torch.ones(8 << 18, device="cuda"), async_op=True)  # 8 MiB

    found = {}
    wait(start())
    found["waited for"] = held()
    work = start()
    work.get_future().wait()  # as DDP's reducer: the stream waits, the work is not told
    del work
    found["not waited for"] = held()
    dist.all_reduce(mine(4))
    found["after a collective at once"] = held()
    small, trained = mine(4), torch.ones(4, device="cuda", requires_grad=True)
    trained.register_hook(lambda gradient: wait(dist.all_reduce(gradient, async_op=True)))
    (2 * trained).sum().backward()
    found["after one in a backward"] = held()
    del trained
    start()
    for _ in range(1000):
        small.add_(1)
    found["after a thousand launches"] = held()
    dist.all_reduce(small)
    found["after a collective much later"] = held()
    return found


@check
def meshes() -> dict[str, Any]:
    """Meshes of two dimensions: replicas of shards, and DTensor's way from placement to placement."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    if size() % 2:
        return {}
    mesh = init_device_mesh("cuda", (2, size() // 2), mesh_dim_names=("replicate", "shard"))
    sums = {}
    for name in ("replicate", "shard"):
        tensor = mine(1)
        dist.all_reduce(tensor, group=mesh.get_group(name))
        sums[name] = tensor.item()
    whole = torch.arange(8 * 4, dtype=torch.float32, device="cuda").view(8, 4)
    sharded = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    columns = sharded.redistribute(mesh, [Replicate(), Shard(1)])
    partial = DTensor.from_local(mine(2, 2), mesh, [Replicate(), Partial()])
    rows = distribute_tensor(whole, mesh, [Shard(0), Replicate()])
    product: Any = rows @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate(), Shard(1)])
    return {
        **sums, "rows": list(sharded.to_local().shape), "columns": list(columns.to_local().shape),
        "same": bool((columns.full_tensor() == whole).all()),
        "partial": partial.redistribute(mesh, [Replicate(), Replicate()]).to_local()[0, 0].item(),
        "product": bool(torch.allclose(product.full_tensor(), whole @ whole.t())),
        "mesh of one": mesh["shard"].size(), "flattened": mesh._flatten("all").size(),
    }  # fmt: skip
