"""The order between lanes: no two accesses race in any mode, and without any one of the waits some do."""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import refshard
from refshard.engine.api import engine_of, no_sync
from refshard.engine.placement import MODES, Accumulation
from refshard.engine.precision import Precision
from tests.engine.fakes import Net, loss_of, make_batch
from tests.engine.lanes import LANES_WAITS, WAITS, DroppingLanes, Race, RaceDetector, WatchedCollectives

STEPS = 4


class Careful(Net):
    """Three blocks; can checkpoint them, and can fail in backward below the second."""

    checkpointed = False
    reentrant = False
    fail = False
    writes = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.writes:
            with torch.no_grad():
                for parameter in self.layers[2].parameters():
                    parameter.mul_(0.99)
        for index in self.order or range(len(self.layers)):
            layer = self.layers[index]
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.checkpointed else layer(x)
            if self.fail and index == 1:
                x = x * 1.0  # so that backward fails between two blocks
                x.register_hook(_fail)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _fail(_: torch.Tensor) -> None:
    raise ValueError("told to")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One way to train: what is sharded how, and what happens beside the plain loop."""

    mode: str
    bf16: bool = False
    microbatches: int = 1
    accumulation: Accumulation | None = None
    zero_grad_to_none: bool = True
    tied: bool = False
    frozen: bool = False
    checkpointed: bool = False
    evaluates: bool = False
    reads_parameters: bool = False
    abandons: bool = False
    fails: bool = False
    changes_order: bool = False
    reentrant: bool = False
    runs_twice: bool = False
    two_backwards: bool = False
    asks_ahead: bool = False
    writes_in_forward: bool = False
    leaves_one_out: bool = False
    world_size: int = 2
    replicas: int = 1
    streams: int = 2
    offload: bool = False
    debug: bool = False


def races(scenario: Scenario, *, dropped: str | None = None) -> list[Race]:
    """Train as the scenario says, without the waits of one place; return what raced."""
    detector = RaceDetector()
    lanes = detector.lanes(scenario.streams)
    with detector:
        model = make_model(scenario)
        refshard.shard(
            model,
            mode=scenario.mode,
            accumulation=scenario.accumulation,
            precision=Precision(parameters=torch.bfloat16, reduction=torch.bfloat16) if scenario.bf16 else None,
            offload=scenario.offload,
            collectives=WatchedCollectives(
                detector, world_size=scenario.world_size, replicas=scenario.replicas, streams=scenario.streams
            ),
            lanes=DroppingLanes(lanes, dropped) if dropped else lanes,
            debug=scenario.debug,
        )
        if scenario.asks_ahead:
            ask_ahead(model)
        for flat in (f for unit in engine_of(model).units for f in unit.flats if scenario.offload):
            detector.keep_on_host(flat.shard)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            train_step(model, optimizer, scenario, step)
    return detector.races


def make_model(scenario: Scenario) -> Careful:
    torch.manual_seed(0)
    model = Careful(n_blocks=3, tied=scenario.tied)
    model.checkpointed, model.reentrant = scenario.checkpointed, scenario.reentrant
    model.order = [0, 1, 1, 2] if scenario.runs_twice else None
    model.writes = scenario.writes_in_forward
    if scenario.leaves_one_out:
        model.layers[1].get_submodule("norm").register_parameter("spare", nn.Parameter(torch.ones(3)))
    if scenario.frozen:
        for layer in model.layers:
            layer.get_submodule("up").requires_grad_(False)
    return model


def ask_ahead(model: Careful) -> None:
    """In forward have each block unshard all that follow, and in backward all before it."""
    layers = list(model.layers)
    for place, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(_unshard, layers[place + 1 :]))
        layer.register_full_backward_pre_hook(partial(_unshard, layers[:place]))


def _unshard(modules: list[nn.Module], *_: object) -> None:
    for module in modules:
        refshard.unshard(module)


def train_step(model: Careful, optimizer: torch.optim.Optimizer, scenario: Scenario, step: int) -> None:
    """One step, with what comes between."""
    if scenario.changes_order and step == 2:
        model.order = [1, 0, 2]
    for microbatch in range(scenario.microbatches):
        with no_sync(model) if microbatch + 1 < scenario.microbatches else warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="refshard: (the order .* changed|unit .* was left out)")
            loss = loss_of(model, make_batch(step))
            if scenario.two_backwards:
                loss.backward(retain_graph=True)
            loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=scenario.zero_grad_to_none)
    if scenario.asks_ahead:
        refshard.unshard(model.layers[1])
        refshard.reshard(model.layers[1])  # under way
        refshard.unshard(model.layers[0])
        refshard.unshard(model.layers[2]).wait()
    if scenario.evaluates:
        with torch.no_grad():
            model(make_batch(step)[0])
            for parameter in model.parameters():
                parameter.mul_(0.99)
    if scenario.abandons:
        model(make_batch(step)[0])
    if scenario.reads_parameters:
        dict(refshard.full_parameters(model))
    if scenario.fails and step > 1:
        model.fail = True
        with pytest.raises(ValueError, match="told to"):
            loss_of(model, make_batch(step)).backward()
        model.fail = False
        optimizer.zero_grad()
        if scenario.asks_ahead:
            refshard.unshard(model)


WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "one stream": {"streams": 1},
    "bf16": {"bf16": True},
    "bf16, one stream": {"bf16": True, "streams": 1},
    "accumulation in the shard": {"microbatches": 2, "accumulation": "shard"},
    "accumulation unsharded": {"microbatches": 2, "accumulation": "unsharded"},
    "gradients that stay": {"zero_grad_to_none": False, "bf16": True},
    "tied": {"tied": True},
    "frozen": {"frozen": True, "bf16": True},
    "checkpointed": {"checkpointed": True},
    "evaluation": {"evaluates": True},
    "evaluation, bf16": {"evaluates": True, "bf16": True},
    "full parameters": {"reads_parameters": True, "abandons": True},
    "abandoned": {"abandons": True, "debug": True},
    "failing": {"fails": True},
    "failing, hybrid": {"fails": True, "replicas": 2, "debug": True},
    "failing, asked ahead, bf16": {"fails": True, "asks_ahead": True, "bf16": True},
    "another order": {"changes_order": True},
    "a block twice": {"runs_twice": True},
    "a block twice, hybrid, backward in parts": {
        "runs_twice": True,
        "checkpointed": True,
        "reentrant": True,
        "replicas": 2,
    },
    "asked ahead": {"asks_ahead": True, "evaluates": True},
    "asked ahead, bf16, checkpointed": {"asks_ahead": True, "bf16": True, "checkpointed": True},
    "asked ahead, another order": {"asks_ahead": True, "changes_order": True},
    "asked ahead, offload": {"asks_ahead": True, "offload": True},
    "two backwards": {"two_backwards": True, "bf16": True},
    "weights written in forward": {"writes_in_forward": True},
    "a parameter without use": {"leaves_one_out": True},
    "a parameter without use, hybrid, accumulation": {"leaves_one_out": True, "replicas": 2, "microbatches": 2},
    "hybrid": {"replicas": 2},
    "hybrid, bf16, accumulation, one stream": {"replicas": 2, "bf16": True, "microbatches": 2, "streams": 1},
    "replicas only": {"world_size": 1, "replicas": 2, "bf16": True},
    "offload": {"offload": True},
    "offload, bf16, accumulation": {"offload": True, "bf16": True, "microbatches": 2},
    "offload, evaluation": {"offload": True, "evaluates": True},
    "offload, two backwards": {"offload": True, "two_backwards": True},
    "offload, hybrid": {"offload": True, "replicas": 2, "bf16": True},
    "debug": {"debug": True},
}


def scenario_of(mode: str, way: str) -> Scenario:
    scenario = replace(Scenario(mode=mode), **WAYS[way])  # type: ignore[arg-type]
    if MODES[mode].optimizer == "replicate":
        # Nothing is sharded: all ranks are replicas.
        scenario = replace(scenario, world_size=1, replicas=2)
    return scenario


CASES = [(m, w) for m in MODES for w in WAYS if (m, w) != ("yafsdp", "accumulation unsharded")]


@pytest.mark.parametrize(
    ("mode", "way"),
    [pytest.param(*case, marks=[pytest.mark.full] if place % 3 else []) for place, case in enumerate(CASES)],
)
def test_nothing_races(mode: str, way: str) -> None:
    assert [str(race) for race in races(scenario_of(mode, way))] == []


NEEDED = {
    # Without the wait of this place, in this mode and way, the second access no longer comes after the first.
    "masters_changed": ("yafsdp", "plain", "add_ (writes, on compute)", "all_gather (reads,"),
    "_gather": ("yafsdp", "plain", "mm, in freed memory (", "all_gather (writes,"),
    "_wait": ("yafsdp", "plain", "all_gather (writes,", "(reads, on compute)"),
    "_reduce": ("yafsdp", "plain", "mul (writes, on compute)", "reduce_scatter (reads,"),
    "_combine": ("fsdp", "hybrid", "reduce_scatter, in freed memory (", "(writes, on compute)"),
    "_finish": ("yafsdp", "plain", "reduce_scatter, in freed memory (writes,", "(reads, on compute)"),
    "claim_gradients": (
        "yafsdp", "a parameter without use", "all_reduce_max, in freed memory (writes,", "(writes, on compute)"
    ),
    "abandon_pass": ("fsdp", "failing", "reduce_scatter, in freed memory (", "(writes, on compute)"),
    "settle": ("fsdp", "offload, evaluation", "copy_ (reads, on gather)", "mul_ (writes, on host)"),
    "issued": ("yafsdp", "plain", "all_gather (writes,", "(reads, on compute)"),
    "follow": ("yafsdp", "hybrid", "reduce_scatter (writes,", "all_reduce (writes,"),
}  # fmt: skip


@pytest.mark.parametrize("wait", WAITS + LANES_WAITS)
def test_without_any_one_wait_something_races(wait: str) -> None:
    mode, way, earlier, later = NEEDED[wait]
    found = races(scenario_of(mode, way), dropped=wait)
    assert any(earlier in str(race.earlier) and later in str(race.later) for race in found), set(map(str, found))


def test_an_optimizer_may_race_only_with_a_gather_that_nobody_awaits() -> None:
    """A step after a forward that got no backward writes what that forward's prefetch still reads, and nobody uses."""
    detector = RaceDetector()
    with detector:
        model = make_model(Scenario(mode="fsdp"))
        refshard.shard(model, mode="fsdp", collectives=WatchedCollectives(detector), lanes=detector.lanes(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            loss_of(model, make_batch(step)).backward()
            model(make_batch(step)[0])
            optimizer.step()
    assert {str(race) for race in detector.races} == {
        "all_gather (reads, on group of the shard axis) and add_ (writes, on compute)"
    }


def written_and_read(*, ordered: bool, again: bool = False) -> list[Race]:
    """Written on the gather stream, read on the compute stream."""
    detector = RaceDetector()
    lanes = detector.lanes(2)
    with detector:
        x = torch.zeros(4)
        lanes.wait("gather", lanes.record("compute"))
        with lanes.use("gather"):
            x.fill_(1.0)
        event = lanes.record("gather")
        if ordered:
            lanes.wait("compute", event)
        if again:
            lanes.record("reduce", event)
        x.sum()
    return detector.races


def test_the_detector_sees_what_no_event_orders() -> None:
    assert [str(race) for race in written_and_read(ordered=False)] == [
        "fill_ (writes, on gather) and sum (reads, on compute)"
    ]
    assert written_and_read(ordered=True) == []
    assert written_and_read(ordered=True, again=True) == [], "recording an event again leaves earlier waits alone"


def test_the_detector_sees_memory_that_the_allocator_hands_out_again() -> None:
    """Freed on the host while another stream still reads it, then allocated again on its own stream."""
    for ordered in (False, True):
        detector = RaceDetector()
        lanes = detector.lanes(2)
        with detector:
            x = torch.zeros(4)
            lanes.wait("reduce", lanes.record("compute"))
            with lanes.use("reduce"):
                x.sum()
            if ordered:
                lanes.wait("compute", lanes.record("reduce"))
            del x
            torch.zeros(8)
        expected = [] if ordered else ["sum, in freed memory (writes, on reduce) and zeros (writes, on compute)"]
        assert [str(race) for race in detector.races] == expected


def test_the_detector_knows_the_hosts_time() -> None:
    """The host writes its memory at once; a copy that does not block reads it later."""
    for waits in (False, True):
        detector = RaceDetector()
        lanes = detector.lanes(2)
        with detector:
            master, slot = torch.zeros(4), torch.zeros(4)
            detector.keep_on_host(master)
            slot.copy_(master, non_blocking=True)
            if waits:
                lanes.synchronise(lanes.record("compute"))
            master.add_(1.0)
        assert [str(race) for race in detector.races] == (
            [] if waits else ["copy_ (reads, on compute) and add_ (writes, on host)"]
        )


class Stack(nn.Module):
    """Blocks and a head; backward can fail between two blocks."""

    fails_after: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(8))
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x))
            if index == self.fails_after:
                x.register_hook(_fail)
        loss: torch.Tensor = self.head(x).square().mean()
        return loss


def test_a_gather_that_is_asked_for_after_a_failed_backward_waits_for_what_compute_wrote() -> None:
    """Gradients were copied to memory that parameters are gathered to next."""
    detector = RaceDetector()
    with detector:
        model = Stack()
        refshard.shard(
            model, mode="yafsdp", precision=Precision(parameters=torch.bfloat16, reduction=torch.float32),
            collectives=WatchedCollectives(detector), lanes=detector.lanes(2),
        )  # fmt: skip
        for step in range(STEPS):
            model.fails_after = 3 if step == STEPS - 1 else None
            with pytest.raises(ValueError, match="told to") if model.fails_after else nullcontext():
                model(torch.randn(4, 32)).backward()
        refshard.unshard(model.layers[0])
    assert [str(race) for race in detector.races] == []
