"""What scripts ask of ``torch.cuda`` and ``torch.accelerator``, for :mod:`tests.fakecuda.test_torch_cuda`."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.fakecuda.child import check
from tests.fakecuda.recorded import recorded

MIB = 1 << 20


def error_of(function: Callable[[], object]) -> str:
    """The type and the first line of what a function raises; empty if it does not."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


@check
def device_facts() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(3)
    return {
        "available": torch.cuda.is_available(), "count": torch.cuda.device_count(),
        "current": torch.cuda.current_device(), "name": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability("cuda:1"), "bf16": torch.cuda.is_bf16_supported(),
        "total": properties.total_memory, "multiprocessors": properties.multi_processor_count,
        "architecture": f"sm_{properties.major}{properties.minor}" in torch.cuda.get_arch_list(),
        "cuda": torch.version.cuda is not None, "nccl": torch.cuda.nccl.version() >= (2, 20),
        "cudnn": torch.backends.cudnn.version(), "built": torch.backends.cuda.is_built(),
    }  # fmt: skip


@check
def devices() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with torch.cuda.device(2):
        found["in context"] = [torch.cuda.current_device(), torch.empty(1, device="cuda").device.index]
    torch.cuda.set_device(torch.device("cuda:5"))
    found["set"] = [torch.cuda.current_device(), torch.ones(2).cuda().device.index]
    with torch.cuda.device_of(torch.empty(1, device="cuda:1")):
        found["of a tensor"] = torch.cuda.current_device()
    with torch.device("cuda"):
        found["default device"] = [torch.ones(1).device.type, nn.Linear(2, 2).weight.device.index]
    torch.cuda.set_device(0)
    moved = torch.arange(3, device="cuda:0").to("cuda:7")
    found["moved"] = [moved.device.index, moved.tolist()]
    found["invalid"] = [error_of(lambda: torch.cuda.set_device(8)), error_of(lambda: torch.empty(1, device="cuda:8"))]
    found["after all"] = torch.cuda.current_device()
    return found


@check
def accelerator() -> dict[str, Any]:
    current = torch.accelerator.current_accelerator()
    found: dict[str, Any] = {
        "available": torch.accelerator.is_available(), "type": current.type if current else None,
        "count": torch.accelerator.device_count(),
        "stream": torch.accelerator.current_stream().stream_id == torch.cuda.current_stream().stream_id,
    }  # fmt: skip
    torch.accelerator.set_device_index(1)
    found["set"] = [torch.accelerator.current_device_index(), torch.cuda.current_device()]
    side = torch.Stream(device="cuda:1")
    with side:
        found["in a stream"] = torch.cuda.current_stream().stream_id == side.stream_id
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize()
    held = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    found["memory"] = torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() >= MIB
    del held
    torch.accelerator.empty_cache()
    return found


@check
def streams() -> dict[str, Any]:
    current, default = torch.cuda.current_stream(), torch.cuda.default_stream()
    side, other = torch.cuda.Stream(priority=-1), torch.cuda.Stream(device=1)
    found: dict[str, Any] = {
        "default is current": current == default, "side is not": side != default, "device": other.device.index,
        "priority": side.priority, "idle": side.query(), "made again": side == torch.cuda.Stream(
            stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type),
        "usable as a key": len({side, torch.cuda.current_stream(), default}),
    }  # fmt: skip
    with torch.cuda.stream(side):
        found["inside"] = torch.cuda.current_stream() == side
        with torch.cuda.stream(other):
            found["nested"] = [torch.cuda.current_device(), torch.cuda.current_stream() == other]
        found["back"] = [torch.cuda.current_device(), torch.cuda.current_stream() == side]
        with torch.cuda.stream(None):
            found["none"] = torch.cuda.current_stream() == side
    torch.cuda.set_stream(side)
    found["set"] = torch.cuda.current_stream() == side
    torch.cuda.set_stream(default)
    return found


@check
def recorded_waits() -> dict[str, list[str]]:
    """What streams and events put into the recording, which is all that a replay knows of them."""
    tensor, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side_event, found = torch.cuda.Event(), {}
    with recorded() as found["wait_stream"]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.mul_(2)
            side_event.record()
        torch.cuda.current_stream().wait_event(side_event)
        tensor.add_(1)
    with recorded() as found["event"]:
        event = torch.cuda.current_stream().record_event()
        event.wait(side)
        event.synchronize()
    with recorded() as found["host"]:
        torch.cuda.synchronize()
        side.synchronize()
        tensor.sum().item()
        tensor.cpu()
        tensor.to("cpu", non_blocking=True)
    with recorded() as found["views"]:
        tensor.view(2, 2).t()[0].unsqueeze(0).expand(3, 2)
        torch.empty(3, device="cuda")
    return found


@check
def events() -> dict[str, Any]:
    start, end, plain = (torch.cuda.Event(enable_timing=timed) for timed in (True, True, False))
    never = error_of(lambda: start.elapsed_time(end))
    start.record()
    end.record()
    end.synchronize()
    return {
        "elapsed": start.elapsed_time(end) >= 0, "done": end.query(), "unrecorded": never,
        "untimed": error_of(lambda: start.elapsed_time(plain)), "generic": isinstance(end, torch.Event),
    }  # fmt: skip


@check
def memory() -> dict[str, Any]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found: dict[str, Any] = {}
    held = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    small = torch.empty(1, device="cuda")
    found["held"] = torch.cuda.memory_allocated() - before
    del held
    found["after"] = [torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before]
    reserved, most = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    found["given back"] = [reserved - torch.cuda.memory_reserved(), most == reserved]
    torch.cuda.reset_peak_memory_stats()
    found["peak reset"] = torch.cuda.max_memory_allocated() - before
    free, total = torch.cuda.mem_get_info()
    found["free"] = [
        total - free == torch.cuda.memory_reserved(),
        total == torch.cuda.get_device_properties(0).total_memory,
    ]
    elsewhere = torch.empty(1, device="cuda:1")
    found["of device 1"] = torch.cuda.memory_allocated(1)
    found["freed elsewhere"] = [small.nbytes, elsewhere.nbytes]
    raw = torch.cuda.caching_allocator_alloc(2048)
    found["raw"] = torch.cuda.memory_allocated() - before
    torch.cuda.caching_allocator_delete(raw)
    found["raw deleted"] = torch.cuda.memory_allocated() - before
    return found


@check
def memory_reports() -> dict[str, Any]:
    held = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    segments = [one for one in torch.cuda.memory_snapshot() if one["device"] == 0]
    where = [block for one in segments for block in one["blocks"] if block["address"] == held.data_ptr()]
    return {
        "keys": sorted(torch.cuda.memory_stats()), "summary": "Allocated memory" in torch.cuda.memory_summary(),
        "block": [(block["state"], block["size"]) for block in where],
        "all segments": sum(one["total_size"] for one in segments) == torch.cuda.memory_reserved(),
    }  # fmt: skip


@check
def storages() -> dict[str, Any]:
    """FSDP frees and gets back the memory of a tensor that lives on."""
    before = torch.cuda.memory_allocated()
    tensor = torch.arange(4096.0, device="cuda")
    storage, view = tensor.untyped_storage(), tensor[8:16]
    whole = torch.cuda.memory_allocated() - before
    storage.resize_(0)
    freed = torch.cuda.memory_allocated() - before
    storage.resize_(4096 * 4)
    tensor.fill_(3)
    again = [torch.cuda.memory_allocated() - before, view.sum().item(), storage.size()]
    grown = torch.ones(2, device="cuda")
    grown.resize_(5, 2).fill_(1)
    source = torch.arange(6.0, device="cuda")
    target = torch.empty(0, device="cuda").set_(source.untyped_storage(), 2, (2, 2), (2, 1))
    return {"sizes": [whole, freed], "again": again, "resize_": grown.sum().item(), "set_": target.tolist()}


@check
def random_numbers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    torch.cuda.init()
    generators: Any = torch.cuda.default_generators
    torch.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(5, device="cuda")
    found["state"] = [state.numel(), str(state.dtype), int(state[:8].view(torch.int64).item())]
    found["moves on"] = bool((torch.cuda.get_rng_state() != state).any())
    second = torch.rand(5, device="cuda")
    torch.cuda.set_rng_state(state)
    found["again"] = [bool((torch.rand(5, device="cuda") == one).all()) for one in (first, second)]
    with torch.random.fork_rng(devices=[0]):
        torch.cuda.manual_seed(11)
        inside = torch.rand(5, device="cuda")
    found["fork"] = bool((torch.rand(5, device="cuda") != inside).all())
    generator = torch.Generator(device="cuda").manual_seed(7)
    found["generator"] = bool((torch.rand(5, generator=generator, device="cuda") == first).all())
    torch.cuda.manual_seed_all(9)
    found["seeds"] = [torch.cuda.initial_seed(), generators[3].initial_seed()]
    found["other device"] = torch.rand(5, device="cuda:1").tolist() == torch.rand(5, device="cuda:2").tolist()
    moved = torch.cuda.get_rng_state()
    moved[8:].view(torch.int64).fill_(64)
    torch.cuda.set_rng_state(moved)
    found["offset"] = generators[0].get_offset()
    found["wrong size"] = error_of(lambda: torch.cuda.set_rng_state(torch.zeros(4, dtype=torch.uint8)))
    return found


@check
def pinned() -> dict[str, Any]:
    tensor = torch.arange(4.0)
    fixed = tensor.pin_memory()
    loader: Any = torch.utils.data.DataLoader(TensorDataset(torch.arange(4)), batch_size=2, pin_memory=True)
    return {
        "pinned": [tensor.is_pinned(), fixed.is_pinned(), torch.empty(2, pin_memory=True).is_pinned()],
        "same": fixed.tolist(), "a view": fixed[1:].is_pinned(), "loaded": [batch.is_pinned() for (batch,) in loader],
        "there": fixed.to("cuda", non_blocking=True).tolist(),
    }  # fmt: skip


@check
def mixed_devices() -> dict[str, str]:
    here, there, host = torch.ones(2, 2, device="cuda:0"), torch.ones(2, 2, device="cuda:1"), torch.ones(2, 2)
    return {
        "two GPUs": error_of(lambda: here + there), "host": error_of(lambda: here @ host),
        "module on the host": error_of(lambda: nn.Linear(2, 2)(here)),
        "host's scalar": error_of(lambda: here + torch.tensor(1.0)),
        "index_select": error_of(lambda: here.index_select(0, torch.tensor([0]))),
        "index": error_of(lambda: here[torch.tensor([0])]), "numpy": error_of(lambda: here.numpy()),
        "loss": error_of(lambda: nn.functional.cross_entropy(here, torch.tensor([0, 1]))),
    }  # fmt: skip


@check
def refused() -> dict[str, str]:
    model = nn.DataParallel(nn.Linear(2, 2).cuda())
    x = torch.ones(8, 2, device="cuda")
    return {
        "graph": error_of(lambda: torch.cuda.CUDAGraph().capture_begin()),
        "data parallel": error_of(lambda: model(x)), "capturing": str(torch.cuda.is_current_stream_capturing()),
    }  # fmt: skip


@check
def odds_and_ends() -> list[str]:
    """What scripts call in passing; each has to be there."""
    tries: list[Callable[[], object]] = [
        lambda: torch.cuda.nvtx.range_push("step"), torch.cuda.nvtx.range_pop, lambda: torch.cuda.nvtx.mark("here"),
        lambda: torch.cuda.profiler.start(), torch.cuda.ipc_collect, lambda: torch.cuda.can_device_access_peer(0, 1),
        lambda: torch.cuda.set_sync_debug_mode("warn"), torch.cuda.get_allocator_backend, torch.cuda.host_memory_stats,
        lambda: torch.cuda.memory._record_memory_history(max_entries=10), torch.cuda.memory._snapshot,
        lambda: torch.cuda.memory._record_memory_history(enabled=None), lambda: torch.cuda._sleep(100),
        lambda: torch.cuda.get_stream_from_external(64, 0),
        lambda: torch.backends.cudnn.is_acceptable(torch.ones(1, device="cuda")),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True), torch.cuda.reset_accumulated_memory_stats,
        lambda: torch.set_float32_matmul_precision("high"), torch.cuda.get_gencode_flags, torch.cuda.init,
        lambda: torch.cuda.empty_cache(), torch.cuda.get_per_process_memory_fraction,
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [found for found in map(error_of, tries) if found]
