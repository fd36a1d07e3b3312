"""The bytes that each rank sends in a step, counted where torch dispatches collectives, against the closed form.

Over W ranks, of a unit of n elements (with padding): a gather sends this rank's shard to each other rank, and a
reduction each other rank its shard of the gradients: (W - 1) * n / W elements each. An all-reduce is gloo's affair; by
a ring it sends 2 * (W - 1) / W * n, which is what is counted for one.
"""

from collections import defaultdict
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import refshard
from refshard.engine.api import engine_of
from refshard.engine.placement import MODES
from tests.distributed.ranks import run_ranks
from tests.engine.fakes import loss_of, make_batch, make_net

pytestmark = pytest.mark.processes

N_BLOCKS = 4
MICROBATCHES = 3


class SentBytes(TorchDispatchMode):
    """Counts what this rank sends, by kind of collective: what a gather receives lies in a slot that is held."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._units = engine_of(model).units
        self.sent: dict[str, Fraction] = defaultdict(Fraction)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "c10d::alltoall_base_":
            # Of (output, input, group, output split, input split): what goes to this rank itself is not sent.
            size, rank = dist.get_world_size(), dist.get_rank()
            split = args[4] or [args[1].numel() // size] * size
            gathering = [unit.slot for unit in self._units if unit.slot.owner is not None]
            exchange = "gather" if any(slot.holds(args[0].data_ptr()) for slot in gathering) else "reduce"
            self.sent[exchange] += (sum(split) - split[rank]) * args[1].element_size()
        elif name == "c10d::allreduce_":
            size = dist.get_world_size()
            self.sent["all-reduce"] += sum(Fraction(2 * (size - 1) * t.nbytes, size) for t in args[0])
        else:
            assert not name.startswith("c10d::"), name
        return func(*args, **(kwargs or {}))


def count(mode: str, **arguments: Any) -> dict[str, Any]:
    """Sizes of the units' flat buffers, and what the third step sends, and an evaluation after it."""
    model = make_net()
    refshard.shard(model, mode=mode, **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    microbatches = MICROBATCHES if "accumulation" in arguments else 1
    for step in range(3):
        with SentBytes(model) as training:
            for microbatch in range(microbatches):
                with nullcontext() if microbatch == microbatches - 1 else refshard.no_sync(model):
                    loss_of(model, make_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with SentBytes(model) as evaluation, torch.no_grad():
        model(make_batch(0)[0])
    units = {unit.name: sum(flat.layout.numel for flat in unit.flats) for unit in engine_of(model).units}
    told = len(list(model.parameters()))  # a byte for each: whether this rank has used it
    return {"training": dict(training.sent), "evaluation": dict(evaluation.sent), "units": units, "told": told}


NARROW = refshard.Precision(parameters=torch.bfloat16, reduction=torch.float32)
NARROWER = refshard.Precision(parameters=torch.bfloat16, reduction=torch.bfloat16)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16 reduced in fp32": {"precision": NARROW},
    "bf16 reduced in bf16": {"precision": NARROWER},
    "accumulation in the shard": {"accumulation": "shard"},
    "accumulation unsharded": {"accumulation": "unsharded"},
}
CASES = [(mode, name) for mode in MODES for name in VARIANTS if (mode, name) != ("yafsdp", "accumulation unsharded")]


def count_all() -> dict[tuple[str, str], dict[str, Any]]:
    return {(mode, name): count(mode, **VARIANTS[name]) for mode, name in CASES}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.full)])
def counted(request: pytest.FixtureRequest) -> tuple[int, list[dict[tuple[str, str], dict[str, Any]]]]:
    return request.param, run_ranks(request.param, count_all)


def gathered_again_for_backward(mode: str, units: dict[str, int]) -> int:
    """Elements of the units whose backward finds them given up: never the embedding's, which does not read them.

    The unit that computes last in forward computes first in backward, and stays; a ring still holds the last block;
    persistent storage still holds all.
    """
    blocks = [units[f"layers.{i}"] for i in range(N_BLOCKS)]
    return {"fsdp": sum(blocks), "yafsdp": sum(blocks[:-1])}.get(mode, 0)


@pytest.mark.parametrize(("mode", "name"), CASES, ids=lambda value: value.replace(" ", "_"))
def test_each_rank_sends_what_the_closed_form_says(
    counted: tuple[int, list[dict[tuple[str, str], dict[str, Any]]]], mode: str, name: str
) -> None:
    world_size, ranks = counted
    units = ranks[0][mode, name]["units"]
    assert list(units) == ["embed", *(f"layers.{i}" for i in range(N_BLOCKS)), "norm+head"]
    precision = VARIANTS[name].get("precision")
    gathered_bytes, reduced_bytes = (2 if precision else 4), (2 if precision is NARROWER else 4)
    passes = MICROBATCHES if "accumulation" in VARIANTS[name] else 1
    # Replicated parameters are gathered after an optimizer step, not again for the microbatches after the first.
    gathers = passes if MODES[mode].parameters == "shard" else 1
    reductions = passes if name == "accumulation in the shard" else 1
    whole, sent_share = sum(units.values()), Fraction(world_size - 1, world_size)
    once = sent_share * whole * gathered_bytes
    again = sent_share * gathered_again_for_backward(mode, units) * gathered_bytes
    reduced = sent_share * whole * reduced_bytes * reductions
    told = 2 * sent_share * ranks[0][mode, name]["told"] * reductions
    if MODES[mode].optimizer == "replicate":
        # In bf16 replicas compute with a cast of the masters; casting sends nothing.
        training, evaluation = {"all-reduce": 2 * reduced + told}, {}
    else:
        training = {"gather": gathers * (once + again), "reduce": reduced, "all-reduce": told}
        evaluation = {"gather": once}
    for rank in ranks:
        assert rank[mode, name]["training"] == training
        assert rank[mode, name]["evaluation"] == evaluation


def count_owners() -> tuple[dict[str, int], dict[str, Fraction], int]:
    """What a step of whole tensors sends: by this rank's elements of what others own, and by what it owns."""
    model = refshard.shard(make_net(), mode="fsdp")
    optimizer = refshard.whole_tensors(torch.optim.Adafactor, model)
    loss_of(model, make_batch(0)).backward()
    with SentBytes(model) as step:
        optimizer.step()
    rank = dist.get_rank()
    elements = {"given": 0, "returned": 0}
    for member in optimizer.members:
        if member.owner == rank:
            elements["returned"] += member.parameter.numel() - member.length(rank)
        else:
            elements["given"] += member.length(rank)
    return elements, dict(step.sent), sum(member.parameter.numel() for member in optimizer.members)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_owners_are_sent_gradients_and_parameters_and_send_parameters_back(world_size: int) -> None:
    """Of fp32 masters. All ranks together move each element three times, but for those that its owner holds already;
    and 16 bytes by which the ranks agree on what is stepped.
    """
    ranks = run_ranks(world_size, count_owners)
    for elements, sent, _ in ranks:
        # What receives nothing has no storage, like a slot that was given up.
        assert sent["reduce"] + sent.get("gather", 0) == 4 * (2 * elements["given"] + elements["returned"])
        assert sent["all-reduce"] == Fraction(2 * (world_size - 1) * 16, world_size)
    given, returned = (sum(elements[key] for elements, _, _ in ranks) for key in ("given", "returned"))
    assert given == returned
    assert 0 < given < ranks[0][2]
