"""Every mode against one unsharded rank, with communication or compute slowed down so that a missing wait shows.

On the fake CUDA device nothing takes time and values are always right; there a missing wait shows as a race. On a GPU
a missing wait shows only if the work that should be waited for is late, so each test of one holds exactly that work.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

import refshard
from refshard.engine.collectives import Pending, Together
from refshard.engine.device import lanes_of
from refshard.engine.placement import MODES
from refshard.engine.precision import Precision
from refshard.fakecuda import is_active
from tests.engine.lanes import AlikeCollectives, DroppingLanes
from tests.fakecuda.recorded import racing
from tests.gpu.needs import needs_values
from tests.gpu.threads import Seat, Table, ThreadCollectives, hold, no_pause, pause_of, run_threads
from tests.gpu.training import SlowBlock, furthest, make_model, orthogonal_by_owners, sgd, train, train_alone

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
pytestmark = needs_values


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Way:
    """How to train: the mode, what is slow, and whether the optimizer needs whole tensors."""

    mode: str
    slow: str = "nothing"
    replicas: int = 1
    bf16: bool = False
    offload: bool = False
    streams: int = 2
    whole: bool = False


def train_sharded(way: Way, device: torch.device) -> dict[str, torch.Tensor]:
    """Train two shards, times replicas, in threads; return the first rank's full parameters."""
    shards = 1 if MODES[way.mode].optimizer == "replicate" else 2
    replicas = 2 if shards == 1 else way.replicas
    size = shards * replicas
    shard_tables = [Table(shards) for _ in range(replicas)]
    replica_tables = [Table(replicas) for _ in range(shards)]
    pause = pause_of(device)
    slow_lanes, slow_compute = (pause if way.slow == what else no_pause for what in ("lanes", "compute"))
    models = [make_model(slow_compute).to(device) for _ in range(size)]

    def rank_main(rank: int) -> dict[str, torch.Tensor]:
        place, replica = rank % shards, rank // shards
        collectives = ThreadCollectives(
            Seat(shard_tables[replica], place) if shards > 1 else None,
            Seat(replica_tables[place], replica) if replicas > 1 else None,
            device,
            slow_lanes,
        )
        refshard.shard(
            models[rank],
            mode=way.mode,
            collectives=collectives,
            lanes=lanes_of(device, way.streams),
            precision=Precision(parameters=torch.bfloat16) if way.bf16 else None,
            offload=way.offload,
            debug=True,
        )
        train(models[rank], device, rank, size, slow_compute, orthogonal_by_owners if way.whole else sgd)
        return {name: value.cpu() for name, value in refshard.full_parameters(models[rank])}

    first: dict[str, torch.Tensor] = run_threads(size, rank_main, device, [*shard_tables, *replica_tables])[0]
    return first


WAYS = [
    *(Way(mode=mode, slow=slow) for mode in MODES for slow in ("lanes", "compute")),
    Way(mode="yafsdp", slow="lanes", replicas=2),
    Way(mode="fsdp", slow="compute", replicas=2),
    Way(mode="yafsdp", slow="lanes", streams=1),
    Way(mode="zero2", slow="lanes", offload=True),
    *(Way(mode=mode, slow="lanes", whole=True) for mode in MODES),
    Way(mode="yafsdp", slow="lanes", replicas=2, whole=True),
    Way(mode="fsdp", slow="lanes", offload=True, whole=True),
]


def watched(device: torch.device) -> AbstractContextManager[list[str]]:
    """The races within, where the device is one that tells of them."""
    return racing() if device.type == "cuda" and is_active() else nullcontext([])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_slowed_down_training_equals_one_rank(device: torch.device, way: Way) -> None:
    with watched(device) as races:
        found = train_sharded(way, device)
    assert furthest(found, train_alone(device, whole=way.whole)) < 2e-5
    assert races == []


@pytest.mark.parametrize("slow", ["lanes", "compute"])
def test_slowed_down_mixed_precision_equals_itself_undisturbed(device: torch.device, slow: str) -> None:
    """Casts in the gather lane: rounding is the same however long things take."""
    undisturbed = train_sharded(Way(mode="fsdp", bf16=True), device)
    slowed = train_sharded(Way(mode="fsdp", bf16=True, slow=slow), device)
    assert furthest(slowed, undisturbed) < 1e-3


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """One wait to leave out, and the work to hold, which it waits for: a collective, the optimizer's ``step``, or a
    ``block`` (the first).
    """

    wait: str
    held: str
    mode: str = "yafsdp"
    replicas: int = 1
    offload: bool = False


DROPPED = [
    Dropped(wait="masters_changed", held="step"),
    Dropped(wait="_gather", held="block"),
    Dropped(wait="_wait", held="all_gather"),
    Dropped(wait="_reduce", held="block"),
    Dropped(wait="_combine", held="reduce_scatter", mode="fsdp", replicas=2),
    Dropped(wait="_finish", held="reduce_scatter"),
    Dropped(wait="follow", held="reduce_scatter", replicas=2),
    Dropped(wait="settle", held="reduce_scatter", mode="zero2", offload=True),
]
"""On the CPU, tests/engine/test_lanes.py shows the same without luck. A lane's own wait is not among them: these
collectives run on the lane itself, as NCCL's do."""


class HeldCollectives(AlikeCollectives):
    """Collectives on the current stream; each ``held`` one starts late."""

    def __init__(self, held: str, replicas: int) -> None:
        super().__init__(replicas=replicas)
        self._held = held

    def _launch(
        self, op: str, reads: list[torch.Tensor], writes: list[torch.Tensor], move: Callable[[], object]
    ) -> Pending:
        if op == self._held:
            hold()
        move()
        return Together(())


def train_held(case: Dropped, device: torch.device, *, drop: bool) -> dict[str, torch.Tensor]:
    """Train one of two shards (times replicas) that are all alike, with or without the wait; return its parameters.

    One process trains one rank: several would meet at each collective, by which time the work that is held could be
    over, and their many streams would share the GPU's few hardware queues and so wait for each other.
    """

    def rank_main(_: int) -> dict[str, torch.Tensor]:
        held_block, held_step = (hold if case.held == what else no_pause for what in ("block", "step"))
        model = make_model(no_pause)
        first = model.layers[0]
        assert isinstance(first, SlowBlock)
        first.pause = held_block
        for parameter in model.parameters():
            nn.init.normal_(parameter)  # the alike ranks' copy of a norm's ones would make a head of equal logits
        model.to(device)
        lanes = lanes_of(device, streams=2)
        refshard.shard(
            model,
            mode=case.mode,
            collectives=HeldCollectives(case.held, case.replicas),
            lanes=DroppingLanes(lanes, case.wait) if drop else lanes,
            offload=case.offload,
        )
        train(model, device, 0, 1, held_step, partial(sgd, lr=2.0))
        return {name: value.cpu() for name, value in refshard.full_parameters(model)}

    found: dict[str, torch.Tensor] = run_threads(1, rank_main, device, [])[0]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", DROPPED, ids=str)
def test_without_any_one_wait_the_numbers_are_wrong(case: Dropped) -> None:
    device = torch.device("cuda", 0)
    if is_active() and case.wait == "settle":
        pytest.skip("the fake device does not see what the host does in its own memory")
    with watched(device) as races:
        expected = train_held(case, device, drop=False)
    assert races == []
    assert all(value.isfinite().all() for value in expected.values())
    with watched(device) as races:
        found = train_held(case, device, drop=True)
    assert races if is_active() else furthest(found, expected) > 1e-3
