"""What is left in memory: by the documented rule, for every byte, and behind autograd's back."""

import pytest
import torch
from torch.distributed import ReduceOp

from refshard.emulate import traffic
from refshard.emulate.traffic import Reduction

RANKS, NUMEL = 4, 6
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8]


def shard(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, NUMEL + 1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gather_fills_every_part_with_this_ranks(dtype: torch.dtype) -> None:
    output = torch.zeros(RANKS * NUMEL, dtype=dtype)
    traffic.spread(output, shard(dtype), 2)
    assert torch.equal(output, shard(dtype).repeat(RANKS))


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_gather_in_place_fills_the_others_from_its_own_part(rank: int) -> None:
    output = torch.zeros(RANKS * NUMEL)
    own = output[rank * NUMEL : (rank + 1) * NUMEL]
    own.copy_(shard())
    traffic.spread(output, own, rank)
    assert torch.equal(output, shard().repeat(RANKS))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ReduceOp.SUM, lambda parts: parts.sum(0)),
        (ReduceOp.AVG, lambda parts: parts.mean(0)),
        (ReduceOp.MAX, lambda parts: parts.amax(0)),
        (ReduceOp.MIN, lambda parts: parts.amin(0)),
        (ReduceOp.PRODUCT, lambda parts: parts.prod(0)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rank", [None, 0, 3])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_reduce_scatter_reduces_its_inputs_parts(kind, expected, rank: int | None, as_list: bool) -> None:  # type: ignore[no-untyped-def]
    full = torch.randn(RANKS * NUMEL, generator=torch.Generator().manual_seed(1))
    reference = expected(full.clone().view(RANKS, NUMEL))
    output = torch.zeros(NUMEL) if rank is None else full[rank * NUMEL : (rank + 1) * NUMEL]
    traffic.combine(output, list(full.split(NUMEL)) if as_list else full, Reduction(kind))
    torch.testing.assert_close(output, reference)


def test_a_gather_and_a_reduce_scatter_are_each_others_adjoint() -> None:
    """So the gradient that a rank gets is that of its own part, of which the others are copies."""
    own, weights = shard().requires_grad_(), torch.randn(RANKS * NUMEL, generator=torch.Generator().manual_seed(2))
    (own.repeat(RANKS) * weights).sum().backward()
    gradient = torch.empty(NUMEL)
    traffic.combine(gradient, weights, Reduction(ReduceOp.SUM))
    torch.testing.assert_close(gradient, own.grad)


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (Reduction(ReduceOp.SUM), [8.0, 12.0]),
        (Reduction(ReduceOp.SUM, 0.25), [2.0, 3.0]),
        (Reduction(ReduceOp.AVG), [2.0, 3.0]),
        (Reduction(ReduceOp.MAX), [2.0, 3.0]),
        (Reduction(ReduceOp.PRODUCT), [16.0, 81.0]),
    ],
)
def test_an_all_reduce_is_over_equal_ranks(by: Reduction, expected: list[float]) -> None:
    tensor = torch.tensor([2.0, 3.0])
    traffic.multiply(tensor, by, RANKS)
    assert tensor.tolist() == expected


def test_flags_stay_flags() -> None:
    flags = torch.tensor([True, False])
    traffic.multiply(flags, Reduction(ReduceOp.SUM), RANKS)
    assert flags.tolist() == [True, False]


def test_a_reduction_that_has_no_meaning_here_is_refused_by_name() -> None:
    for call in (
        lambda: traffic.multiply(torch.ones(2, dtype=torch.int64), Reduction(ReduceOp.BXOR), RANKS),
        lambda: traffic.combine(torch.ones(2), torch.ones(8), Reduction(ReduceOp.BXOR)),
    ):
        with pytest.raises(NotImplementedError, match="BXOR"):
            call()


@pytest.mark.parametrize(("sent", "received"), [(6, 6), (4, 10), (10, 4)])
def test_an_exchange_receives_what_it_sends(sent: int, received: int) -> None:
    given, output = torch.arange(1.0, sent + 1), torch.zeros(received)
    traffic.exchange(output, given)
    assert output.tolist() == [i % sent + 1 for i in range(received)]


def test_what_nobody_here_can_know_is_noise_and_draws_on_no_generator_of_the_training() -> None:
    before = torch.get_rng_state()
    found, flags = torch.zeros(1000), torch.zeros(3, dtype=torch.int64)
    traffic.exchange(found, torch.empty(0))
    traffic.invent(flags)
    assert 0.015 < float(found.std()) < 0.025
    assert bool((found != 0).all())
    assert flags.tolist() == [1, 1, 1]
    assert torch.equal(torch.get_rng_state(), before)


def test_touching_changes_no_bit() -> None:
    tensor = torch.tensor([float("nan"), -0.0, 1e-45, 3.0])
    before = tensor.view(torch.int32).clone()
    traffic.touch(tensor)
    assert torch.equal(tensor.view(torch.int32), before)


def test_no_version_counter_moves() -> None:
    """Autograd would take saved views of what a collective fills for overwritten."""
    tensor, part = torch.ones(8, requires_grad=True), torch.ones(2)
    before = tensor._version, part._version
    traffic.spread(tensor, part, 0)
    traffic.combine(part, tensor, Reduction(ReduceOp.AVG))
    traffic.multiply(tensor, Reduction(ReduceOp.SUM), 4)
    traffic.exchange(tensor, part)
    traffic.invent(tensor)
    traffic.touch(tensor)
    assert (tensor._version, part._version) == before
