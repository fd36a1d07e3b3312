"""Values of integer tensors too large to be resident, for :mod:`tests.fakecuda.test_large_integers`."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings

from refshard.dryrun.recording import Flag, Kind
from refshard.fakecuda.build import NAME
from tests.fakecuda import integer_programs as programs
from tests.fakecuda.child import check
from tests.fakecuda.integer_programs import LARGE, Pool, Step
from tests.fakecuda.recorded import recorded

GROUP = 4
"""Ranks, of which this is the first."""


def known(read: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether the host got values that were computed, and what it got."""
    ext: Any = sys.modules[NAME]
    ext.clear_recording()
    ext.record(True)
    value = read()
    ext.record(False)
    table = ext.recording()
    waits = table["flags"][table["kinds"] == Kind.SYNCHRONISE]
    ext.clear_recording()
    return not any(flags & Flag.VALUE_UNKNOWN for flags in waits), value


def agree(length: int, examples: int) -> int:
    """Runs programs on the device and on the CPU. What the device knows is right, and what it should know it does.

    Returns how many readings were compared.
    """
    read = 0

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(programs.programs)
    def same(program: list[Step]) -> None:
        nonlocal read
        pool = Pool(length)
        for step in program:
            pool.run(step)
        for pair in pool.pairs:
            for of in programs.readings(pair.host):
                is_known, value = known(partial(of, pair.device))
                if is_known:
                    assert value == of(pair.host.long()), (program, pair.host.dtype)
                    read += 1
                else:
                    assert pair.doubtful, (program, pair.host.dtype)

    same()
    return read


@check
def random_programs() -> int:
    return agree(length=3000, examples=300)


@check
def random_programs_at_full_size() -> int:
    return agree(length=LARGE, examples=12)


def shares(device: str, numels: list[int], ranks: int, rank: int) -> dict[str, Any]:
    """What a rank holds of parameters that lie one after another and are cut into equal parts.

    The elements are marked with the number of their parameter and their place in it, and then counted.
    """
    whole = -(-sum(numels) // ranks) * ranks
    data = torch.empty(whole, device=device)
    owners = torch.full_like(data, torch.iinfo(torch.uint16).max, dtype=torch.uint16)
    places = torch.full_like(data, torch.iinfo(torch.int64).max, dtype=torch.int64)
    parts = zip(owners[: sum(numels)].split(numels), places[: sum(numels)].split(numels), strict=True)
    for number, (owner, place) in enumerate(parts):
        owner.copy_(number)
        place.copy_(torch.arange(len(place), dtype=torch.int64, device=device))
    everyone, mine = torch.chunk(owners, ranks), torch.chunk(places, ranks)[rank]
    firsts = []
    for number in range(len(numels)):
        found = mine[everyone[rank].eq(number)]
        firsts.append(found.min().item() if found.numel() > 0 else None)
    counts = [[part.eq(number).sum().item() for number in range(len(numels))] for part in everyone]
    return {"counts": counts, "firsts": firsts}


@check
def shares_of_parameters() -> dict[str, Any]:
    """Some tensors of each case are large, others resident; the last case is too large for the CPU."""
    found = {}
    for numels, ranks, rank in (
        ([LARGE, 4096, 3 * LARGE + 1, 7], 4, 1), ([4096, 700_000, 300_000], 3, 2), ([3000, 200_000, 5], 2, 0),
    ):  # fmt: skip
        is_known, on_device = known(partial(shares, "cuda", numels, ranks, rank))
        found[f"{len(numels)} parameters"] = [is_known, on_device == shares("cpu", numels, ranks, rank)]
    found["of 16 GiB"] = shares("cuda", [(1 << 30) + 3, 5, (1 << 30) - 6], 2, 1)  # type: ignore[assignment]
    return found


@check
def launches() -> dict[str, list[str]]:
    """What is recorded where values are known: the same as where they are not."""
    found = {}
    with recorded() as found["by mask"]:
        large = torch.arange(LARGE, device="cuda")
        large[large > 5]
    with recorded() as found["small"]:
        small = torch.arange(10, device="cuda")
        small[small > 5]
    with recorded() as found["reduced"]:
        large.eq(3).sum().item()
    with recorded() as found["copied"]:
        large[3:7].copy_(torch.tensor(9))
        large[:5].tolist()
    return found


@check
def sizes() -> dict[str, Any]:
    """Shapes and memory of what a mask selects, also of tensors that have no values."""
    mask = torch.zeros(LARGE, dtype=torch.bool, device="cuda")
    mask[5:8].fill_(True)
    mask[LARGE - LARGE // 2 :] = True
    floats = torch.ones(LARGE, 3, device="cuda")
    before = torch.cuda.memory_allocated()
    rows, ones = floats[mask], floats[mask, :][:, 0]
    grown = torch.cuda.memory_allocated() - before
    small = torch.arange(20_000, device="cuda") % 2 == 0  # resident, and 20 KB
    given = torch.ones(10_000, device="cuda", requires_grad=True)
    torch.zeros(20_000, device="cuda").masked_scatter(small, given).sum().backward()
    assert given.grad is not None
    return {
        "masked_select": [list(floats[:, 0].masked_select(mask).shape), list(given.grad.shape)],
        "rows": list(rows.shape), "column": list(ones.shape), "bytes": grown >= rows.nbytes,
        "positions": [list(mask.nonzero().shape), list(mask.view(4, -1).nonzero().shape)],
        "of a small mask": [list(floats[:20_000][small].shape), list(small.nonzero().shape)],
        "nothing": list(floats[torch.zeros(LARGE, dtype=torch.bool, device="cuda")].shape),
    }  # fmt: skip


@check
def values() -> dict[str, list[Any]]:
    """Each a pair: whether it was known, and the value."""
    ramp = torch.arange(3, LARGE + 3, device="cuda")
    many = torch.randint(9, (LARGE,), device="cpu")
    down = torch.arange(10**9, 10**9 - 3 * LARGE, -3, device="cuda")
    two = ramp.view(4, -1)
    seven = ramp[4]
    other = torch.zeros(LARGE, dtype=torch.int32, device="cuda").fill_(seven)
    return {
        name: list(known(read))
        for name, read in {
            "element": lambda: two[1, 2].item() == 3 + LARGE // 4 + 2,
            "list": lambda: ramp[10:13].tolist(),
            "down": lambda: down[-1].item() == 10**9 - 3 * (LARGE - 1),
            "from one element of it": lambda: other.sum().item() == 7 * LARGE,
            "as another type": lambda: other.to(torch.uint8).min().item(),
            "extremes": lambda: ramp.fill_(-(2**63)).ge(2**63 - 1).any().item(),
            "of many runs": lambda: ramp.copy_(many).sum().item(),
            "wrapped": lambda: torch.full((LARGE,), 300, device="cuda").to(torch.uint8).sum().item(),
            "transposed": lambda: two.fill_(1).t().contiguous().sum().item(),
            "by row": lambda: two.sum(0)[0].item(),
        }.items()
    }  # fmt: skip


def written(write: Callable[[torch.Tensor], object]) -> list[bool]:
    """Whether elements before, in and after those that ``write`` is given are known afterwards."""

    def read(part: torch.Tensor) -> list[Any]:
        return [part[0].item(), part.sum().item(), part[-1].item()]

    tensor = torch.full((3 * LARGE,), 4, device="cuda")
    write(tensor[LARGE : 2 * LARGE])
    found = []
    for part in tensor.chunk(3):
        is_known, value = known(partial(read, part))
        assert not is_known or value == [4, 4 * LARGE, 4]
        found.append(is_known)
    return found


@check
def writes() -> dict[str, list[bool]]:
    """Operators that do not compute with runs, and other ways to write: none leaves the values from before."""
    library = torch.library.Library("large_integer_checks", "DEF")
    library.define("undeclared(Tensor x) -> Tensor")
    library.impl("undeclared", lambda x: torch.empty_like(x), "Meta")
    some = torch.full((LARGE,), 4, device="cuda")
    index = torch.arange(10, device="cuda")
    host = torch.randint(9, (LARGE,), device="cpu")
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "in place": lambda x: x.add_(1),
        "in place, of a view of it": lambda x: x.view(4, -1).t().neg_(),
        "out": lambda x: torch.add(some, 1, out=x),
        "out, of one that computes with runs": lambda x: torch.sum(some.view(1, -1), 0, out=x),
        "by index": lambda x: x.index_fill_(0, index, 5),
        "by mask": lambda x: x.masked_fill_(some > 3, 5),
        "by index_put": lambda x: x.__setitem__(index, 5),
        "random": lambda x: x.random_(5),
        "list": lambda x: torch._foreach_add_([x, some.clone()], 1),
        "list of zeros": lambda x: torch._foreach_zero_([x]),
        "list of copies": lambda x: torch._foreach_copy_([x], [some]),
        "copy from floats": lambda x: x.copy_(torch.ones(LARGE, device="cuda")),
        "copy from the host": lambda x: x.copy_(host),
        "copy of a float": lambda x: x.copy_(torch.tensor(1.5)),
        "copy into a transposed view": lambda x: x.view(4, -1).t().copy_(torch.ones(1, device="cuda")),
        "fill with a float": lambda x: x.fill_(1.5),
        "as floats": lambda x: x.view(torch.float64).mul_(2),
        "by an operator that does not declare it": torch.ops.large_integer_checks.undeclared,
    }
    return {name: written(write) for name, write in ways.items()}


@check
def other_types() -> list[Any]:
    """Bytes written as another type are unknown as the first, and the other way round."""
    tensor = torch.full((LARGE,), 4, device="cuda")
    halves = tensor.view(torch.int32)
    found: list[Any] = [known(lambda: halves[0].item())[0]]
    halves.fill_(1)
    found += [known(lambda: tensor[0].item())[0], known(lambda: halves.sum().item())]
    tensor.untyped_storage()[0] = 1
    return [*found, known(lambda: halves[0].item())[0]]


@check
def collectives() -> dict[str, list[bool]]:
    dist.init_process_group("nccl", rank=0, world_size=GROUP)
    try:
        some = torch.full((LARGE,), 4, device="cuda")
        return {
            name: written(write)
            for name, write in {
                "broadcast": lambda x: dist.broadcast(x, 1),
                "all_reduce": dist.all_reduce,
                "all_gather": lambda x: dist.all_gather_into_tensor(x, x[: LARGE // GROUP].clone()),
                "reduce_scatter": lambda x: dist.reduce_scatter_tensor(x, some.repeat(GROUP)),
                "all_to_all": lambda x: dist.all_to_all_single(x, some),
                "recv": lambda x: dist.recv(x, 1),
            }.items()
        }
    finally:
        dist.destroy_process_group()


def _first(tensor: torch.Tensor) -> Any:
    return tensor[0].item()


@check
def addresses() -> dict[str, list[bool]]:
    """Memory that was freed, grown or replaced does not keep what was there; a view keeps what it shows."""
    found = {}
    tensor = torch.full((LARGE,), 4, device="cuda")
    address = tensor.data_ptr()
    del tensor
    again = torch.empty(LARGE, dtype=torch.int64, device="cuda")
    found["freed"] = [again.data_ptr() == address, known(partial(_first, again))[0]]
    view = again.fill_(4)[5:]
    del again
    found["view"] = [known(lambda: view.sum().item() == 4 * (LARGE - 5))[0]]
    grown = torch.full((LARGE,), 4, device="cuda")
    grown.resize_(2 * LARGE)
    found["grown"] = [known(lambda: grown[-1].item())[0]]
    storage = torch.full((LARGE,), 4, device="cuda")
    storage.untyped_storage().resize_(0)
    storage.untyped_storage().resize_(8 * LARGE)
    found["emptied"] = [known(lambda: storage[0].item())[0]]
    return found


@check
def results_in_memory() -> dict[str, list[bool]]:
    """Results that are resident, but come from large tensors: whether they are known, and right."""
    tensor = torch.arange(LARGE, device="cuda")[: LARGE // 50]
    host = torch.arange(LARGE // 50)
    fives, fives_host = tensor.eq(5), host.eq(5)
    found = {}

    def compare(name: str, on_device: torch.Tensor, on_host: torch.Tensor) -> None:
        is_known, values = known(on_device.tolist)
        found[name] = [is_known, values == on_host.tolist()]

    compare("by an operator of their own", fives.logical_not().logical_or(fives), torch.ones_like(fives_host))
    chosen, chosen_host = tensor[tensor.gt(70)], host[host.gt(70)]
    chosen[3:5].mul_(-1)
    chosen_host[3:5].mul_(-1)
    compare("in part", chosen, chosen_host)
    compare("as bytes", tensor.eq(5).view(torch.uint8), fives_host.view(torch.uint8))
    into = torch.zeros_like(chosen)
    into[::2].copy_(tensor[tensor.gt(70)][::2])
    into_host = torch.zeros_like(chosen_host)
    into_host[::2].copy_(host[host.gt(70)][::2])
    compare("after a copy", into, into_host)
    dist.init_process_group("nccl", rank=0, world_size=GROUP)
    sent = tensor[tensor.gt(70)]
    dist.all_reduce(sent)
    dist.destroy_process_group()
    compare("sent", sent, host[host.gt(70)] * GROUP)
    del sent, chosen, into
    freed = tensor[tensor.gt(99)]
    address, numel = freed.data_ptr(), freed.numel()
    del freed
    mask = torch.empty(len(tensor), dtype=torch.bool, device="cuda")  # in the order in which memory was taken before
    again = [torch.empty(numel, dtype=torch.int64, device="cuda") for _ in range(2)]
    reused = [one[0].item() for one in again if one.data_ptr() == address]
    del mask
    found["at an address used again"] = [len(reused) == 1, reused == [100]]
    return found
