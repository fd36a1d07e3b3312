"""Every mode against one unsharded rank, with communication or compute slowed down so that a missing wait shows.

On the fake CUDA device nothing takes time and values are always right; there a missing wait shows as a race.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch

import refshard
from refshard.engine.device import lanes_of
from refshard.engine.precision import Precision
from refshard.fakecuda import is_active
from refshard.plan.placement import MODES
from tests.engine.lanes import DroppingLanes
from tests.fakecuda.recorded import racing
from tests.gpu.needs import needs_values
from tests.gpu.threads import Seat, Table, ThreadCollectives, no_pause, pause_of, run_threads
from tests.gpu.training import furthest, make_model, orthogonal_by_owners, sgd, train, train_alone

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
pytestmark = needs_values


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Way:
    """How to train: the mode, what is slow, which wait is left out, and whether the optimizer needs whole tensors."""

    mode: str
    slow: str = "nothing"
    dropped: str | None = None
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
        lanes = lanes_of(device, way.streams)
        refshard.shard(
            models[rank],
            mode=way.mode,
            collectives=collectives,
            lanes=DroppingLanes(lanes, way.dropped) if way.dropped else lanes,
            precision=Precision(parameters=torch.bfloat16) if way.bf16 else None,
            offload=way.offload,
            debug=way.dropped is None,
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


DROPPED = [
    Way(mode="yafsdp", dropped="masters_changed", slow="compute"),
    Way(mode="yafsdp", dropped="_gather", slow="compute"),
    Way(mode="yafsdp", dropped="_wait", slow="lanes"),
    Way(mode="yafsdp", dropped="_reduce", slow="compute"),
    Way(mode="yafsdp", dropped="_finish", slow="lanes"),
    Way(mode="fsdp", dropped="_combine", slow="lanes", replicas=2),
    Way(mode="fsdp", dropped="follow", slow="lanes", replicas=2),
    Way(mode="zero2", dropped="settle", slow="lanes", offload=True),
]
"""On the CPU, tests/engine/test_lanes.py shows the same without luck. A lane's own wait is not among them: these
collectives run on the lane itself, as NCCL's do."""


@pytest.mark.gpu
@pytest.mark.parametrize("way", DROPPED, ids=str)
def test_without_any_one_wait_the_numbers_are_wrong(way: Way) -> None:
    device = torch.device("cuda", 0)
    if is_active() and way.dropped == "settle":
        pytest.skip("the fake device does not see what the host does in its own memory")
    with watched(device) as races:
        found = train_sharded(way, device)
    assert races if is_active() else furthest(found, train_alone(device)) > 1e-3
