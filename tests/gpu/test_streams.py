"""Every mode against one unsharded rank, with communication or compute slowed down so that a missing wait shows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import refshard
from refshard.engine.device import lanes_of
from refshard.engine.precision import Precision
from refshard.plan.placement import MODES
from tests.distributed.cases.optimizers import Orthogonal
from tests.engine.fakes import Net, loss_of, make_batch
from tests.engine.lanes import DroppingLanes
from tests.gpu.threads import Pause, Seat, Table, ThreadCollectives, no_pause, pause_of, run_threads

STEPS = 5
ROWS = 8
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


class _Pausing(torch.autograd.Function):
    """Passes a tensor on; takes its time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pause: Pause) -> torch.Tensor:
        ctx.pause = pause
        pause()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.pause()
        return gradient, None


class SlowBlock(nn.Module):
    """Pauses before it reads its weights, and in backward before it has their gradients."""

    def __init__(self, inner: nn.Module, pause: Pause) -> None:
        super().__init__()
        self.inner, self.pause = inner, pause

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pausing: Callable[[torch.Tensor, Pause], torch.Tensor] = _Pausing.apply
        return pausing(self.inner(pausing(x, self.pause)), self.pause)


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


def make_model(pause: Pause) -> Net:
    """The same weights for every rank. Six blocks, so that a ring's slots go round."""
    torch.manual_seed(0)
    model = Net(n_blocks=6)
    model.layers = nn.ModuleList(SlowBlock(layer, pause) for layer in model.layers)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def orthogonal(model: nn.Module) -> torch.optim.Optimizer:
    return Orthogonal(model.parameters())


def orthogonal_by_owners(model: nn.Module) -> torch.optim.Optimizer:
    return refshard.whole_tensors(Orthogonal, model)


def train(
    model: nn.Module,
    device: torch.device,
    rank: int,
    ranks: int,
    pause: Pause,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> None:
    """Train on this rank's rows; the host never waits for the device."""
    batches = [
        [t.to(device).chunk(ranks)[rank].contiguous() for t in make_batch(step, rows=ROWS)] for step in range(STEPS)
    ]
    optimizer = make(model)
    for inputs, targets in batches:
        loss_of(model, (inputs, targets)).backward()
        pause()
        optimizer.step()
        optimizer.zero_grad()


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


def train_alone(device: torch.device, *, whole: bool = False) -> dict[str, torch.Tensor]:
    """The reference: the whole batch, on one rank without the engine."""
    model = make_model(no_pause).to(device)
    train(model, device, 0, 1, no_pause, orthogonal if whole else sgd)
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of any element; infinite where there is a NaN."""
    assert found.keys() == expected.keys()
    differences = [(found[name] - value).abs().max() for name, value in expected.items()]
    return max(float(d) if not d.isnan() else float("inf") for d in differences)


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


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_slowed_down_training_equals_one_rank(device: torch.device, way: Way) -> None:
    assert furthest(train_sharded(way, device), train_alone(device, whole=way.whole)) < 2e-5


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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", DROPPED, ids=str)
def test_without_any_one_wait_the_numbers_are_wrong(way: Way) -> None:
    device = torch.device("cuda", 0)
    assert furthest(train_sharded(way, device), train_alone(device)) > 1e-3


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=CUDA.marks)])
def group_device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[torch.device]:
    """A real process group of one rank."""
    device = torch.device("cuda", 0) if request.param == "nccl" else torch.device("cpu")
    dist.init_process_group(
        request.param,
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        device_id=device if device.type == "cuda" else None,
    )
    yield device
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", list(MODES))
def test_a_process_group_of_one_rank(group_device: torch.device, mode: str) -> None:
    """NCCL on the lanes' own streams, and its registered memory, where a GPU has such."""
    model = make_model(no_pause).to(group_device)
    refshard.shard(model, mode=mode, debug=True)
    train(model, group_device, 0, 1, no_pause)
    found = {name: value.cpu() for name, value in refshard.full_parameters(model)}
    assert furthest(found, train_alone(group_device)) < 2e-5
