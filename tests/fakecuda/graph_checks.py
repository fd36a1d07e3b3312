"""CUDA graphs as scripts capture and replay them, for :mod:`tests.fakecuda.test_graphs`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from refshard.dryrun.recording import Flag, Kind
from refshard.fakecuda.build import NAME
from tests.fakecuda.child import check
from tests.fakecuda.recorded import racing, recorded

MIB = 1 << 20
WORK, ANY = (Kind.LAUNCH, Kind.COLLECTIVE), Flag(0)


def work_of(run: Callable[[], object], flag: Flag = ANY) -> list[list[Any]]:
    """Name, signature, bytes and sizes of accesses of each launch or collective that runs and has the flag."""
    ext: Any = sys.modules[NAME]
    ext.clear_recording()
    ext.record(True)
    run()
    ext.record(False)
    columns = ext.recording()
    begins = [0, *columns["access_ends"].tolist()]
    found = []
    for row, (kind, flags) in enumerate(zip(columns["kinds"].tolist(), columns["flags"].tolist())):
        if kind in WORK and not flags & Flag.HOST_ONLY and flags & flag == flag:
            touched = slice(begins[row], begins[row + 1])
            found.append([
                columns["name_table"][columns["names"][row]], columns["signature_table"][columns["signatures"][row]],
                int(columns["reads"][row]), int(columns["writes"][row]), columns["access_sizes"][touched].tolist(),
            ])  # fmt: skip
    return found


def captured(run: Callable[[], Any], **options: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    ext: Any = sys.modules[NAME]
    ext.record(True)  # else nothing is kept
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        result = run()
    return graph, result


def error_of(run: Callable[[], object]) -> str:
    """The first line of what a function raises, and of what came before it."""
    try:
        run()
    except Exception as error:
        before = f" <- {_line(error.__context__)}" if error.__context__ is not None else ""
        return _line(error) + before
    return ""


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _ones(mib: int = 4) -> torch.Tensor:
    return torch.ones(mib * MIB // 4, device="cuda")


@check
def replays() -> dict[str, Any]:
    weight, x = torch.ones(1024, 1024, device="cuda"), torch.ones(512, 1024, device="cuda")

    def run() -> torch.Tensor:
        return torch.relu(x @ weight).sum(0)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()  # cuBLAS's workspace of this stream
        eager = work_of(run)
    graphs: list[torch.cuda.CUDAGraph] = []
    while_captured = work_of(lambda: graphs.append(captured(run, stream=side)[0]))

    def thrice() -> None:
        for _ in range(3):
            graphs[0].replay()

    return {"eager": eager, "while captured": while_captured, "replayed": work_of(thrice, Flag.OF_GRAPH)}


@check
def workspaces() -> dict[str, list[int]]:
    """Sizes of what the replayed product touches that an eager one takes as workspace, in its capture."""
    weight, x = torch.ones(1024, 1024, device="cuda"), torch.ones(512, 1024, device="cuda")
    graph, _ = captured(lambda: x @ weight, stream=torch.cuda.Stream())
    ((_, _, _, _, sizes),) = work_of(graph.replay, Flag.OF_GRAPH)
    return {"touched": sizes}


@check
def branches() -> dict[str, Any]:
    """A graph that forks and joins, replayed on the default stream."""
    x, y, side = _ones(), _ones(), torch.cuda.Stream()

    def run(joins: bool = True) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.mul_(2)
        x.add_(1)
        if joins:
            torch.cuda.current_stream().wait_stream(side)
        x.add_(y)

    graph, _ = captured(run)
    with recorded() as lines:
        graph.replay()
        x.mul_(3)
    with racing() as races:
        graph.replay()
        x.add_(y)
    with racing() as with_side:
        with torch.cuda.stream(side):
            y.mul_(2)
        graph.replay()
    unjoined = error_of(lambda: captured(lambda: run(joins=False)))
    return {"lines": list(lines), "races": list(races), "with side": len(with_side), "unjoined": unjoined}


@check
def not_permitted() -> dict[str, str]:
    x, host, uncaptured, event = _ones(), torch.ones(4), torch.cuda.Stream(), torch.cuda.Event()
    event.record(uncaptured)

    def of_another_stream() -> None:
        uncaptured.synchronize()
        x.mul_(2)

    def with_event() -> None:
        ours = torch.cuda.Event()
        ours.record()
        ours.synchronize()

    tried: dict[str, Callable[[], object]] = {
        "item": lambda: x.sum().item(),
        "synchronise": torch.cuda.synchronize,
        "stream": lambda: torch.cuda.current_stream().synchronize(),
        "query": lambda: torch.cuda.current_stream().query(),
        "event": with_event,
        "pageable": host.cuda,
        "pageable, not blocking": lambda: x[:4].copy_(host, non_blocking=True),
        "equal": lambda: torch.equal(x, x),
        "work from before": lambda: torch.cuda.current_stream().wait_event(event),
        "other stream": of_another_stream,
        "pinned": lambda: x[:4].copy_(host.pin_memory(), non_blocking=True),
    }
    found = {name: error_of(lambda run=run: captured(run)) for name, run in tried.items()}  # type: ignore[misc]
    torch.cuda.set_stream(torch.cuda.default_stream())
    found["default stream"] = error_of(lambda: torch.cuda.CUDAGraph().capture_begin())
    found["replayed too early"] = error_of(torch.cuda.CUDAGraph().replay)
    graph, _ = captured(lambda: x.mul_(2))
    found["captured twice"] = error_of(lambda: graph.capture_begin())
    torch.cuda.synchronize()  # nothing is captured any longer
    return found


@contextmanager
def reserving() -> Iterator[list[int]]:
    """MiB that the block reserved, with whatever was cached given back before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, found = torch.cuda.memory_reserved(), list[int]()
    yield found
    found.append((torch.cuda.memory_reserved() - before) // MIB)


@check
def pools() -> dict[str, Any]:
    x = _ones(12)
    with reserving() as of_one:
        first, y = captured(lambda: (x + 1) * 2)  # 12 MiB each
    pool = [segment["segment_pool_id"] == first.pool() for segment in torch.cuda.memory_snapshot()].count(True)
    with reserving() as of_shared:
        second, z = captured(lambda: x * 3, pool=first.pool())  # where x + 1 was
    with reserving() as of_another:
        third, w = captured(lambda: x * 3, pool=torch.cuda.graph_pool_handle())
    key = "reserved_bytes_by_private_pools.{}_{}.all.current".format(*first.pool())
    of_pool = torch.cuda.memory_stats()[key] // MIB
    released = []
    for name in ("first", "second and its tensors"):
        with reserving() as found:
            if name == "first":
                del first
            else:
                del second, y, z
            torch.cuda.empty_cache()
        released += found
    with reserving() as found:
        del third  # its tensor lives on
        torch.cuda.empty_cache()
    kept = w.sum().shape
    return {
        "segments": pool, "reserved": [*of_one, *of_shared, *of_another], "of the pool": of_pool,
        "released": [*released, *found], "kept": list(kept), "gone": torch.cuda.memory_stats()[key],
    }  # fmt: skip


@check
def mem_pool() -> dict[str, Any]:
    pool = torch.cuda.MemPool()
    with reserving() as taken:
        with torch.cuda.use_mem_pool(pool):
            x = _ones(12)
        outside = _ones(14)
    sizes, users = [segment["total_size"] // MIB for segment in pool.snapshot()], pool.use_count()
    del x
    with reserving() as released:
        del pool
    return {"taken": taken, "sizes": sizes, "users": users, "released": released, "outside": outside.numel() * 4 // MIB}


@check
def values() -> dict[str, Any]:
    """A counter that a replay changes is no longer known; what it does not touch is."""
    counter, other = torch.zeros(1, device="cuda"), torch.full((1,), 7.0, device="cuda")
    graph, _ = captured(lambda: counter.add_(1))
    counter.zero_()

    def read() -> list[bool]:
        ext: Any = sys.modules[NAME]
        ext.clear_recording()
        ext.record(True)
        _, known = counter.item(), other.item()
        ext.record(False)
        columns = ext.recording()
        waits = columns["kinds"] == Kind.SYNCHRONISE
        return [known == 7.0, *(columns["flags"][waits] & Flag.VALUE_UNKNOWN != 0).tolist()]

    before = read()
    graph.replay()
    return {"before": before, "after": read()}


@check
def random_numbers() -> dict[str, list[str]]:
    x = _ones()
    with_numbers, _ = captured(lambda: torch.dropout(x, 0.5, train=True))
    without, _ = captured(lambda: torch.relu(x))
    return {
        "with": [name for name, *_ in work_of(with_numbers.replay)],
        "without": [name for name, *_ in work_of(without.replay)],
    }


@check
def graphed_callables() -> dict[str, Any]:
    layer, x = nn.Linear(1024, 1024, device="cuda"), torch.ones(8, 1024, device="cuda", requires_grad=True)
    gradient = torch.ones_like(x)

    def step() -> None:
        layer(x).backward(gradient)

    def products(run: Callable[[], None], flag: Flag) -> list[Any]:
        return [about for *about, _ in work_of(run, flag) if about[0] in ("aten::mm", "aten::addmm")]

    step()
    eager = products(step, ANY)
    layer.zero_grad(set_to_none=True)
    ext: Any = sys.modules[NAME]
    ext.record(True)
    torch.cuda.make_graphed_callables(layer, (x,))
    return {"eager": eager, "graphed": products(step, Flag.OF_GRAPH)}


@check
def collectives() -> dict[str, Any]:
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    x, out = _ones(), torch.empty(2 * MIB, device="cuda")

    def run() -> None:
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        y = x * 2
        work.wait()
        out.add_(1)
        del y

    eager = work_of(run)
    graph, _ = captured(run)
    with recorded() as lines:
        graph.replay()
    with racing() as races:
        graph.replay()
    unwaited = error_of(lambda: captured(lambda: dist.all_gather_into_tensor(out, x, async_op=True)))
    barrier = error_of(lambda: captured(dist.barrier))
    torch.cuda.set_stream(torch.cuda.default_stream())
    return {
        "same": work_of(graph.replay, Flag.OF_GRAPH) == eager, "lines": list(lines), "races": list(races),
        "unwaited": unwaited, "barrier": barrier,
    }  # fmt: skip


@check
def trees() -> dict[str, Any]:
    """What inductor's cudagraph trees do: capture, make the replay's tensors from addresses, set the pool back."""
    c: Any = torch._C
    handle, stream, x = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), _ones(12)
    keeper = captured(lambda: (x * 1).shape, pool=handle, stream=stream)

    def about(tensor: torch.Tensor) -> dict[str, Any]:
        storage = tensor.untyped_storage()
        return {
            "nbytes": storage.nbytes(), "data_ptr": storage.data_ptr(), "size": tensor.shape,
            "stride": tensor.stride(), "dtype": tensor.dtype, "device": tensor.device, "storage_offset": 0,
        }  # fmt: skip

    graph, y = captured(lambda: (x * 2).view(-1, 1024), pool=handle, stream=stream)
    metadata, state = about(y), c._cuda_getCheckpointState(0, handle)
    live = {metadata["data_ptr"]}
    found: dict[str, Any] = {"live": c._cuda_checkPoolLiveAllocations(0, handle, live)}
    c._free_And_Remove_DeleterFn(y.untyped_storage()._cdata)
    c._set_storage_access_error_msg(y, "overwritten by a later run")
    found["dead"] = c._cuda_checkPoolLiveAllocations(0, handle, set())
    found["touched"] = error_of(lambda: y + 1)
    graph.replay()
    storage = c._construct_storage_from_data_pointer(metadata["data_ptr"], metadata["device"], metadata["nbytes"])
    again = c._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)
    found["again"] = [list(again.shape), again.dtype == x.dtype, again.is_cuda]
    found["same addresses"] = [
        c._tensors_data_ptrs_at_indices_equal([again, x], [metadata["data_ptr"], 0], places) for places in ([0], [0, 1])
    ]
    found["owned"] = [c._has_Standard_Deleter(storage._cdata)]
    c._cuda_setCheckpointPoolState(0, state, [], [storage._cdata])
    found["owned"] += [c._has_Standard_Deleter(storage._cdata)]
    found["restored"] = c._cuda_checkPoolLiveAllocations(0, handle, live)
    del again, storage
    found["freed"] = c._cuda_checkPoolLiveAllocations(0, handle, set())
    with torch.cuda.stream(stream):
        c._cuda_beginAllocateCurrentThreadToPool(0, handle)
        z = x * 3
        c._cuda_endAllocateToPool(0, handle)
        c._cuda_releasePool(0, handle)
    found["in the thread's pool"] = z.data_ptr() == metadata["data_ptr"]
    del keeper
    return found
