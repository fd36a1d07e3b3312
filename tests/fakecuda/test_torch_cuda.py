"""The face of ``torch.cuda`` that scripts see, on fake GPUs."""

from itertools import product
from typing import Any

import pytest

from refshard.specs.hardware import load_hardware
from tests.fakecuda.fresh import Seen, see

pytestmark = pytest.mark.processes

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(scope="module")
def seen() -> Seen:
    return see("tests.fakecuda.torch_cuda_checks", mode="host")


@pytest.fixture(scope="module")
def of_1_gib() -> Seen:
    """In a dry run, with 100 MiB of the GPU taken by what no allocator sees."""
    return see("tests.fakecuda.out_of_memory_checks", mode="dry", memory_bytes=GIB, context_bytes=100 * MIB)


def test_devices_are_those_of_the_profile(seen: Seen) -> None:
    hardware, found = load_hardware("h100-sxm-80gb"), seen("device_facts")
    assert found["available"] is found["built"] is found["cuda"] is found["nccl"] is found["bf16"] is True
    assert (found["count"], found["current"]) == (8, 0)
    assert (found["name"], tuple(found["capability"])) == (hardware.device_name, hardware.capability)
    assert (found["total"], found["multiprocessors"]) == (hardware.memory_bytes, hardware.multiprocessors)
    assert found["architecture"]
    assert found["cudnn"] >= 90000


def test_devices_are_set_and_left(seen: Seen) -> None:
    found = seen("devices")
    assert found["in context"] == [2, 2]
    assert found["set"] == [5, 5]
    assert found["of a tensor"] == 1
    assert found["default device"] == ["cuda", 5]
    assert found["moved"] == [7, [0, 1, 2]]
    assert found["after all"] == 0
    for error in found["invalid"]:
        assert error == "RuntimeError: CUDA error: invalid device ordinal 8; this process sees 8 GPUs"


def test_the_accelerator_is_cuda(seen: Seen) -> None:
    assert seen("accelerator") == {
        "available": True, "type": "cuda", "count": 8, "stream": True, "set": [1, 1], "in a stream": True,
        "memory": True,
    }  # fmt: skip


def test_streams(seen: Seen) -> None:
    assert seen("streams") == {
        "default is current": True, "side is not": True, "device": 1, "priority": -1, "idle": True, "made again": True,
        "usable as a key": 2, "inside": True, "nested": [1, True], "back": [0, True], "none": True, "set": True,
    }  # fmt: skip


def test_waits_are_recorded_in_order(seen: Seen) -> None:
    found = seen("recorded_waits")
    assert found["wait_stream"] == [
        "record e1 s0", "wait e1 s1", "launch aten::mul s1", "record e2 s1", "wait e2 s0", "launch aten::add s0",
    ]  # fmt: skip
    assert found["event"] == ["record e1 s0", "wait e1 s1", "synchronise event host"]
    assert found["host"] == [
        "synchronise device host", "synchronise stream s1", "launch aten::sum s0",
        "launch aten::_local_scalar_dense s0", "synchronise item s0", "launch aten::copy_ s0",
        "synchronise copy to host s0", "launch aten::copy_ s0",
    ]  # fmt: skip
    assert found["views"] == []


def test_events(seen: Seen) -> None:
    found = seen("events")
    assert found["elapsed"] is found["done"] is found["generic"] is True
    assert found["unrecorded"] == "ValueError: Both events must be recorded before calculating elapsed time."
    assert found["untimed"] == "ValueError: Both events must be created with argument 'enable_timing=True'."


def test_memory_is_counted(seen: Seen) -> None:
    found = seen("memory")
    assert found["held"] == 3 * MIB + 512
    assert found["after"] == [512, 3 * MIB + 512]
    assert found["given back"] == [20 * MIB, True]  # a tensor of 1 to 10 MiB takes a segment of 20
    assert found["peak reset"] == 512
    assert found["free"] == [True, True]
    assert found["of device 1"] == 512
    assert (found["raw"], found["raw deleted"]) == (512 + 2048, 512)


def _keys_of_memory_stats() -> set[str]:
    """As the documentation of ``torch.cuda.memory_stats`` lists them."""
    kinds = (
        "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
        "inactive_split_bytes", "requested_bytes",
    )  # fmt: skip
    counters = ("current", "peak", "allocated", "freed")
    pools = ("all", "large_pool", "small_pool")
    single = {
        "num_alloc_retries", "num_ooms", "num_oom_rejections", "num_sync_all_streams", "num_device_alloc",
        "num_device_free", "max_split_size",
    }  # fmt: skip
    oversize = {f"{kind}.{one}" for kind, one in product(("oversize_allocations", "oversize_segments"), counters)}
    return {".".join(parts) for parts in product(kinds, pools, counters)} | single | oversize


def test_memory_is_reported_as_torch_does(seen: Seen) -> None:
    found = seen("memory_reports")
    assert set(found["keys"]) == _keys_of_memory_stats()
    assert found["block"] == [["active_allocated", 3 * MIB]]
    assert found["summary"] is found["all segments"] is True


def test_storages_are_freed_and_grow(seen: Seen) -> None:
    found = seen("storages")
    assert found["sizes"] == [16384, 0]
    assert found["again"] == [16384, 24.0, 16384]
    assert found["resize_"] == 10.0
    assert found["set_"] == [[2.0, 3.0], [4.0, 5.0]]


def test_random_numbers_follow_from_16_bytes(seen: Seen) -> None:
    found = seen("random_numbers")
    assert found["state"] == [16, "torch.uint8", 7]
    assert found["moves on"] is found["fork"] is found["generator"] is found["other device"] is True
    assert found["again"] == [True, True]  # both draws, in turn
    assert found["seeds"] == [9, 9]
    assert found["offset"] == 64
    assert found["wrong size"] == "RuntimeError: a CUDA generator's state is of 16 bytes, got 4"


def test_pinned_memory(seen: Seen) -> None:
    found = seen("pinned")
    assert found["pinned"] == [False, True, True]
    assert found["a view"] is True
    assert found["loaded"] == [True, True]
    assert found["same"] == found["there"] == [0.0, 1.0, 2.0, 3.0]


def test_tensors_on_different_devices_are_refused(seen: Seen) -> None:
    found = seen("mixed_devices")
    rule = "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
    assert found["two GPUs"] == f"{rule}cuda:1!"
    for name in ("host", "module on the host", "index_select", "loss"):
        assert found[name].startswith(f"{rule}cpu!"), name
    assert found["host's scalar"] == found["index"] == ""
    assert found["numpy"].startswith("TypeError: can't convert cuda:0 device type tensor to numpy")


def test_what_the_device_cannot_do_is_refused(seen: Seen) -> None:
    found = seen("refused")
    assert found["graph"] == (
        "NotImplementedError: the fake CUDA device does not support CUDA graphs where the CPU computes: a capture "
        "computes nothing"
    )
    assert "use DistributedDataParallel" in found["data parallel"]
    assert found["capturing"] == "False"


def test_what_scripts_call_in_passing_is_there(seen: Seen) -> None:
    assert seen("odds_and_ends") == []


def test_memory_that_the_allocator_does_not_see_is_not_free(of_1_gib: Seen) -> None:
    assert of_1_gib("facts") == [GIB - 100 * MIB, GIB, GIB]


def test_out_of_memory_has_torchs_type_and_text(of_1_gib: Seen) -> None:
    found: dict[str, Any] = of_1_gib("too_much")
    assert found["text"].startswith(
        "CUDA out of memory. Tried to allocate 768.00 MiB. GPU 0 has a total capacity of 1024.00 MiB of which 412.00 "
        "MiB is free. Including non-PyTorch memory, this process has 612.00 MiB memory in use. Of the allocated memory "
        "512.00 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
    )
    assert found["alias"] is found["runtime error"] is True
    assert (found["ooms"], found["retries"], found["held"]) == (1, 1, GIB // 2)
    assert found["fits afterwards"] == GIB // 4 * 3


def test_cached_blocks_are_freed_before_memory_is_out(of_1_gib: Seen) -> None:
    assert of_1_gib("cached_blocks_are_freed_first") == {"fits": GIB // 4 * 3, "retries": 1}


def test_an_operators_result_may_be_too_large(of_1_gib: Seen) -> None:
    assert of_1_gib("in_an_operator") == ["Tried to allocate 1024.00 MiB", [1 << 14, 1 << 10]]
