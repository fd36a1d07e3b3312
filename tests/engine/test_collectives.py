"""Which algorithm a process group's collectives take: that of the backend that serves the device."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from refshard.engine.collectives import GroupCollectives, failed, library_of, piece_length
from refshard.engine.comm_memory import backend_of


@pytest.fixture(params=["gloo", "cpu:gloo", None])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of one rank; without a backend, torch takes one for each device type."""
    dist.init_process_group(request.param, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


def test_gloo_is_known_however_it_was_asked_for(group: dist.ProcessGroup) -> None:
    assert backend_of(group, torch.device("cpu")) == library_of(group, torch.device("cpu")) == "gloo"


def test_an_axis_of_one_rank_needs_no_collective(group: dist.ProcessGroup) -> None:
    collectives = GroupCollectives(group)
    total, full = torch.empty(4), torch.ones(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        collectives.reduce_scatter(total, full).wait()
        collectives.all_gather(full, full).wait()
    assert not [e.name for e in profile.events() if e.name.startswith("gloo:")]
    assert torch.equal(total, torch.ones(4))


def test_a_group_of_one_rank_is_kept_where_that_is_asked_for(group: dist.ProcessGroup) -> None:
    collectives = GroupCollectives(None, group, groups_of_one=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        collectives.all_reduce(torch.ones(4)).wait()
    assert [e.name for e in profile.events() if e.name.startswith("c10d::")] == ["c10d::allreduce_"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        dist.DistBackendError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_collective_without_memory_is_out_of_memory_whichever_allocator_says_so(error: RuntimeError) -> None:
    found = failed(error, "all_gather of unit 'head'", 3)
    assert type(found) is torch.OutOfMemoryError
    assert str(found) == f"all_gather of unit 'head' failed on rank 3: {error}"


def test_any_other_failure_of_a_collective_names_a_lost_rank_where_it_looks_like_one() -> None:
    told = [str(failed(RuntimeError(text), "all_gather", 0)) for text in ("Socket Timeout", "Invalid scalar type")]
    assert told == [
        "all_gather failed on rank 0; another rank has probably ended: Socket Timeout",
        "all_gather failed on rank 0: Invalid scalar type",
    ]


@pytest.mark.parametrize(
    ("numel", "itemsize", "lengths"),
    [
        (10, 4, [10]),
        (2**18, 4, [2**18]),
        (3 * 2**18 + 2, 4, [2**18 + 1, 2**18 + 1, 2**18]),
        (3 * 2**19, 2, [2**19] * 3),
        (0, 4, [0]),
    ],
)
def test_an_exchange_is_cut_into_pieces_of_about_a_mebibyte(numel: int, itemsize: int, lengths: list[int]) -> None:
    sent = torch.empty(numel, dtype={2: torch.bfloat16, 4: torch.float32}[itemsize])
    assert [piece.numel() for piece in sent.split(piece_length(numel, itemsize))] == lengths


@pytest.mark.parametrize(
    ("error", "suspected"),
    [
        (RuntimeError("Connection closed by peer"), True),
        (RuntimeError("Timed out waiting 10000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("Invalid scalar type"), False),
    ],
)
def test_another_rank_is_suspected_only_where_the_error_says_so(error: RuntimeError, suspected: bool) -> None:
    message = str(failed(error, "all_gather of unit 'head'", 1))
    assert message.startswith("all_gather of unit 'head' failed on rank 1")
    assert message.endswith(str(error))
    assert ("another rank has probably ended" in message) == suspected
