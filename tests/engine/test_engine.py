"""The engine in one process, with collectives that are late: order, slots, generations, counting, and refusals.

With one rank, training must equal the bare model's to the bit: every difference is the engine's doing.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import refshard
from refshard.analysis.labels import meaning_of
from refshard.engine.api import engine_of
from refshard.engine.collectives import Pending
from refshard.engine.executor import Order
from refshard.engine.placement import MODES
from refshard.engine.precision import Precision
from refshard.engine.schedule import Op, OpKind, assign_rings, build, chain_markers
from refshard.engine.unit import Unit
from refshard.errors import EngineError, SpecError
from refshard.events.timeline import Meaning
from tests.engine.fakes import FailingCollectives, LateCollectives, Net, loss_of, make_batch, make_net, train

MODE_NAMES = list(MODES)


@pytest.fixture(params=MODE_NAMES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """A warning from the engine is a finding unless a test asks for it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="refshard")
        yield


def sharded(mode: str, **arguments: bool) -> Net:
    model = make_net(**arguments)
    refshard.shard(model, mode=mode, collectives=LateCollectives(), debug=True)
    return model


def assert_same_parameters(model: nn.Module, bare: nn.Module) -> None:
    found = dict(refshard.full_parameters(model))
    expected = dict(bare.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("tied", [False, True])
def test_training_equals_the_bare_model_to_the_bit(mode: str, tied: bool) -> None:
    bare, model = make_net(tied=tied), sharded(mode, tied=tied)
    assert train(model, 6) == train(bare, 6)
    assert_same_parameters(model, bare)
    assert engine_of(model).executor.order is Order.FOLLOWING


def test_parameters_between_steps_are_local_parts_under_their_own_names(mode: str) -> None:
    bare, model = make_net(), sharded(mode)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in bare.named_parameters()]
    train(model, 2)
    for name, parameter in model.named_parameters():
        assert parameter.shape == bare.get_parameter(name).shape
        assert parameter.is_leaf


def test_executed_stream_is_the_plan_of_a_chain(mode: str) -> None:
    model = sharded(mode)
    train(model, 2)
    engine = engine_of(model)
    markers = chain_markers(len(engine.units))
    facts = [unit.facts for unit in engine.units]
    slots = assign_rings(markers, facts)
    assert engine.executor.stream == build(markers, slots, facts)


def test_collectives_of_a_step_are_the_streams_in_order(mode: str) -> None:
    model = make_net()
    collectives = LateCollectives()
    refshard.shard(model, mode=mode, collectives=collectives, debug=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, 2, optimizer=optimizer)
    collectives.issued.clear()
    train(model, 1, start=2, optimizer=optimizer)
    engine = engine_of(model)
    kinds = {OpKind.GATHER: "all_gather", OpKind.REDUCE: "reduce_scatter"}
    expected = [
        (kinds[op.kind], 4 * engine.units[op.unit].flats[0].layout.numel)
        for op in engine.executor.stream
        if op.kind in kinds and not (op.kind is OpKind.GATHER and engine.units[op.unit].aliased)
    ]
    assert collectives.issued == expected


class Alone(LateCollectives):
    """Nothing is prefetched, because a gather only copies."""

    gathers = False


def test_one_rank_sees_writes_through_data_within_forward(mode: str) -> None:
    losses = []
    for write in (lambda p: p.mul_(0.9), lambda p: p.data.mul_(0.9)):
        model = make_net()
        precision = Precision(parameters=torch.float32)
        refshard.shard(model.double(), mode=mode, precision=precision, collectives=Alone())
        hook = partial(_write_to_all, model.layers[-1], write)
        model.register_forward_pre_hook(hook)
        model.layers[-2].register_forward_hook(hook)
        losses.append(train(model, 4))
    assert losses[0] == losses[1]
    assert losses[0][0] != train(make_net(), 1)[0]


def _write_to_all(module: nn.Module, write: Callable[[torch.Tensor], torch.Tensor], *_: object) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            write(parameter)


def test_evaluation_between_steps_changes_nothing_and_sees_new_weights(mode: str) -> None:
    bare, model = make_net(), sharded(mode)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (bare, model)]
    for step in range(4):
        losses = [train(m, 1, start=step, optimizer=o) for m, o in zip((bare, model), optimizers)]
        assert losses[0] == losses[1]
        with torch.no_grad():
            assert torch.equal(model(make_batch(9)[0]), bare(make_batch(9)[0]))
    assert_same_parameters(model, bare)


def test_an_evaluation_alone_is_observed_and_then_prefetched() -> None:
    """Its blocks take turns in a ring; the training that follows observes for itself."""
    bare, model = make_net(), sharded("yafsdp")
    executor = engine_of(model).executor
    with torch.no_grad():
        for batch in range(3):
            assert torch.equal(model(make_batch(batch)[0]), bare(make_batch(batch)[0]))
            assert executor.order is Order.OBSERVING
    blocks = engine_of(model).units[1:-1]
    assert len({id(unit.slot.pool) for unit in blocks}) == 2
    assert executor.stream == ()
    issued: list[str] = []
    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, i=index: issued.append(f"{i}: {gathering(blocks)}"))
    with torch.no_grad():
        model(make_batch(3)[0])
    assert issued == ["0: [1]", "1: [2]", "2: [3]", "3: []"]
    assert train(model, 4) == train(bare, 4)
    assert executor.order is Order.FOLLOWING
    assert_same_parameters(model, bare)


def gathering(units: Sequence[Unit]) -> list[int]:
    return [index for index, unit in enumerate(units) if unit.gathering is not None]


def test_gradient_accumulation_adds_microbatches(mode: str) -> None:
    bare, model = make_net(), sharded(mode)
    for m in (bare, model):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        for step in range(3):
            for microbatch in range(3):
                (loss_of(m, make_batch(10 * step + microbatch)) / 3).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
    assert_same_parameters(model, bare)


def test_forward_without_backward_is_forgotten(mode: str) -> None:
    bare, model = make_net(), sharded(mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(4):
        model(make_batch(99)[0])
        found += train(model, 1, start=step, optimizer=optimizer)
    assert found == train(bare, 4)


def test_an_exception_in_forward_leaves_the_model_usable(mode: str) -> None:
    bare, model = make_net(), sharded(mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = train(model, 2, optimizer=optimizer)
    with pytest.raises(IndexError):
        model(torch.full((1, 3), 99))
    found += train(model, 2, start=2, optimizer=optimizer)
    assert found == train(bare, 4)


def test_a_block_left_out_at_first_and_used_later_stays_correct(mode: str) -> None:
    """A block that is left out from the start, then used: the order changes, the result does not."""
    bare, model = make_net(), sharded(mode)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (bare, model)]
    for m, optimizer in zip((bare, model), optimizers):
        m.skip = {1}
        train(m, 2, optimizer=optimizer)
    bare.skip = model.skip = set()
    with pytest.warns(UserWarning, match="the order of execution changed"):
        train(model, 2, start=2, optimizer=optimizers[1])
    train(bare, 2, start=2, optimizer=optimizers[0])
    assert_same_parameters(model, bare)
    assert engine_of(model).executor.order is Order.ON_DEMAND


def test_a_parameter_without_gradient_is_zeroed_not_stale(mode: str) -> None:
    """And has none, as in the bare model: weight decay must not touch it."""

    class GatedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.both = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.a(x) + (self.b(x) if self.both else 0)
            return out

    models = []
    for _ in range(2):
        model = make_net()
        torch.manual_seed(5)
        model.layers = nn.ModuleList(GatedBlock() for _ in range(4))
        models.append(model)
    bare, model = models
    collectives = KeepingCollectives()
    refshard.shard(model, mode=mode, collectives=collectives, debug=True)
    for m in models:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1)
        train(m, 2, optimizer=optimizer)
        for layer in m.layers:
            assert isinstance(layer, GatedBlock)
            layer.both = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            collectives.reduced.clear()
            train(m, 2, start=2, optimizer=optimizer)
    assert_same_parameters(model, bare)
    (flat,) = engine_of(model).units[1].flats
    sent = next(full for full in reversed(collectives.reduced) if full.numel() == flat.layout.numel)
    for place in flat.layout.parameters:
        part = sent[place.offset : place.offset + place.numel]
        assert bool(part.any()) == place.name.startswith("layers.0.a"), place.name


class KeepingCollectives(LateCollectives):
    """Keeps what was reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.reduced: list[torch.Tensor] = []

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, scratch: torch.Tensor | None = None) -> Pending:
        self.reduced.append(full.clone())
        return super().reduce_scatter(output, full)


def test_changed_order_warns_once_and_stays_correct(mode: str) -> None:
    bare, model = make_net(), sharded(mode)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (bare, model)]
    for m, optimizer in zip((bare, model), optimizers):
        train(m, 2, optimizer=optimizer)
        m.order = [2, 0, 3, 1]
    with pytest.warns(UserWarning, match=r"begin\(1, forward\) came where step 0 had begin\(4, forward\)") as caught:
        found = train(model, 3, start=2, optimizer=optimizers[1])
    assert len(caught) == 1
    assert found == train(bare, 3, start=2, optimizer=optimizers[0])
    assert_same_parameters(model, bare)


def test_a_module_that_runs_twice(mode: str) -> None:
    bare, model = make_net(), sharded(mode)
    bare.order = model.order = [0, 1, 1, 2, 3]
    assert train(model, 4) == train(bare, 4)
    assert_same_parameters(model, bare)


@pytest.mark.parametrize("early_stop", [False, True])
def test_activation_checkpointing_recomputes_inside_the_schedule(mode: str, early_stop: bool) -> None:
    class CheckpointedNet(Net):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            logits: torch.Tensor = self.head(self.norm(x))
            return logits

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(CheckpointedNet())
    bare, model = models
    refshard.shard(model, mode=mode, collectives=LateCollectives(), debug=True)
    with set_checkpoint_early_stop(early_stop):
        assert train(model, 4) == train(bare, 4)
    assert_same_parameters(model, bare)
    assert engine_of(model).executor.order is Order.FOLLOWING


def test_a_gradient_that_comes_in_two_parts_is_added_up(mode: str) -> None:
    """Reentrant checkpoints run backward within backward: each adds its part to the weight that they share."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(2):
                x = checkpoint(self.shared, x, use_reentrant=True).tanh()
            return x

    models = []
    for _ in range(2):
        model = make_net()
        torch.manual_seed(5)
        model.layers = nn.ModuleList(Shared() for _ in range(3))
        models.append(model)
    bare, model = models
    refshard.shard(model, mode=mode, collectives=LateCollectives(), debug=True)
    assert train(model, 4) == train(bare, 4)
    assert_same_parameters(model, bare)


def test_ring_slots_are_two_buffers_however_many_blocks() -> None:
    model = sharded("yafsdp")
    train(model, 2)
    blocks = engine_of(model).units[1:-1]
    assert len({id(u.slot.pool) for u in blocks}) == 2


def test_transient_storage_is_gone_between_steps() -> None:
    model = sharded("fsdp")
    train(model, 2)
    for unit in engine_of(model).units:
        for slot in (unit.slot, unit.gradients.slot):
            assert [flat.untyped_storage().nbytes() for flat in slot.flats] == [0]


@pytest.mark.parametrize("mode", ["zero2", "fsdp", "yafsdp"])
def test_autograd_takes_saved_weights_where_the_slot_holds_the_same_values_again_and_only_there(mode: str) -> None:
    """The version of a unit's views is that of what the slot holds; saved weights are read past the engine here."""
    model = sharded(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, 2, optimizer=optimizer)
    saved = []
    model.get_submodule("layers.1.down").register_forward_hook(
        lambda module, args, _: saved.append((args[0].sum() * module.weight).sum())
    )
    loss_of(model, make_batch(2))
    for released in (False, True, False):
        unit, executor = engine_of(model).units[2], engine_of(model).executor
        if released:
            executor.abandon_pass()
        else:
            executor.begin_call(unit, object(), training=True)
            executor.mark(Op(OpKind.BEGIN, unit.index, "forward"))
        weight = next(p.unsharded for p in unit.parameters if p.layout.name.endswith("down.weight"))
        assert (weight._version % 2 == 1) == released
        if released:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(saved[0], weight, retain_graph=True)
    executor.abandon_pass()
    loss_of(model, make_batch(2)).backward()
    optimizer.step()
    loss_of(model, make_batch(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(saved[0], weight)


def test_weights_changed_between_forward_and_backward_are_refused(mode: str) -> None:
    model = sharded(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, 2, optimizer=optimizer)
    loss_of(model, make_batch(3)).backward()
    loss = loss_of(model, make_batch(2))
    optimizer.step()
    with pytest.raises(EngineError, match=r"changed between forward and backward; call backward before optimizer.step"):
        loss.backward()


def test_a_failing_collective_names_unit_and_collective() -> None:
    model = make_net()
    refshard.shard(model, collectives=FailingCollectives())
    with pytest.raises(EngineError, match=r"all_gather of unit 'embed' failed on rank 0.*Connection closed by peer"):
        model(make_batch(0)[0])


def test_outputs_without_tensors_do_no_harm(mode: str) -> None:
    """Backward begins with the gradient of a tensor that an object holds."""

    class Opaque:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    class Wrapping(nn.Linear):
        def forward(self, x: torch.Tensor) -> Opaque:  # type: ignore[override]
            return Opaque(super().forward(x))

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Wrapping(3, 3), Wrapping(3, 3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).x
            return x

    found = []
    for shards in (False, True):
        torch.manual_seed(0)
        model = Holder()
        if shards:
            refshard.shard(model, mode=mode, collectives=LateCollectives())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = model(torch.full((2, 3), 1.0 + step)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert found[:3] == found[3:]


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    hooked, sparse = make_net(), make_net()
    hooked.get_parameter("layers.1.up.weight").register_hook(lambda gradient: gradient)
    sparse.embed.sparse = True
    for model, message in (
        (hooked, r"parameter 'layers\.1\.up\.weight' has hooks"),
        (sparse, r"parameter 'embed\.weight' has sparse gradients; set sparse=False"),
    ):
        with pytest.raises(EngineError, match=message):
            refshard.shard(model, collectives=LateCollectives())
    with pytest.raises(SpecError, match=r"mode: no mode 'yafdsp'; did you mean 'yafsdp'\?"):
        refshard.shard(make_net(), mode="yafdsp", collectives=LateCollectives())
    with pytest.raises(EngineError, match="is sharded already; shard a fresh one"):
        refshard.shard(sharded("fsdp"), collectives=LateCollectives())
    with pytest.raises(EngineError, match="the model is not sharded"):
        dict(refshard.full_parameters(make_net()))
    with pytest.raises(EngineError, match=r"call torch\.distributed\.init_process_group"):
        refshard.shard(make_net())


def test_unknown_markers_do_not_advance_the_stream() -> None:
    """A marker out of order executes nothing of the stream: no rank issues a collective that another does not."""
    model = sharded("yafsdp")
    train(model, 2)
    executor = engine_of(model).executor
    executor.begin_pass(object(), training=True)
    for kind in (OpKind.BEGIN, OpKind.END):
        executor.mark(Op(kind, 0, "forward"))
    with pytest.warns(UserWarning, match="the order of execution changed"):
        executor.mark(Op(OpKind.BEGIN, 0, "forward"))


def test_on_demand_no_units_gradients_share_memory_with_anything() -> None:
    """Where the order is not known, any other unit may be gathered or reduced meanwhile."""
    model = sharded("yafsdp")
    train(model, 3)
    executor, units = engine_of(model).executor, engine_of(model).units
    planned = {id(unit.gradients.slot.pool) for unit in units}
    assert len(planned) < len(units)
    executor.begin_pass(object(), training=True)
    for kind in (OpKind.BEGIN, OpKind.END):
        executor.mark(Op(kind, 0, "forward"))
    with pytest.warns(UserWarning, match="the order of execution changed"):
        executor.mark(Op(OpKind.BEGIN, 0, "forward"))
    own = {id(unit.gradients.slot.pool) for unit in units}
    assert len(own) == len(units)
    assert not own & {id(unit.slot.pool) for unit in units}


@pytest.mark.parametrize("mode", ["replicate", "zero1", "zero2", "yafsdp"])  # a slot that is freed cannot be read
def test_a_gradient_that_comes_before_that_of_the_units_output_is_reduced_too(mode: str) -> None:
    model = sharded(mode)
    train(model, 2)
    refshard.unshard(model.layers[1]).wait()  # torch makes views only where storage is
    weight = engine_of(model).units[2].parameters[0]
    (weight.unsharded.expand(2, -1) * 3).sum().backward()
    given = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert list(given) == ["layers.1.norm.weight"]
    assert torch.equal(given["layers.1.norm.weight"], torch.full((6,), 6.0))


def test_a_trace_names_the_unit_that_computes(mode: str) -> None:
    """Forward and backward of every unit begin and end under its name, whatever else is labelled in between."""
    model = sharded(mode)
    train(model, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(model, 1)
    found = [meaning_of(event.name) for event in sorted(profiler.events(), key=lambda e: e.time_range.start)]
    units, inside = [unit.name for unit in engine_of(model).units], list[str]()
    seen: dict[Meaning, list[str]] = {Meaning.FORWARD: [], Meaning.BACKWARD: []}
    for meaning, unit in (one for one in found if one is not None and one[1] is not None):
        if meaning in seen:
            seen[meaning].append(str(unit))
            inside.append(str(unit))
        elif meaning is Meaning.LEAVE:
            inside.remove(str(unit))
    assert inside == []
    assert seen[Meaning.FORWARD] == units
    assert seen[Meaning.BACKWARD] == units[::-1]


def test_outputs_are_cast_and_inputs_are_not_where_precision_says_so() -> None:
    seen: list[torch.dtype] = []
    for cast_inputs in (True, False):
        model = make_net()
        model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        precision = refshard.Precision(parameters=torch.bfloat16, output=torch.float64, cast_inputs=cast_inputs)
        refshard.shard(model, mode="fsdp", precision=precision, collectives=LateCollectives())
        model.embed.register_forward_hook(lambda _, __, output: output.float())
        if cast_inputs:
            assert model(make_batch(0)[0]).dtype == torch.float64
        else:
            with pytest.raises(RuntimeError, match="dtype"):
                model(make_batch(0)[0])
    assert seen == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("mode", ["fsdp", "yafsdp"])
def test_a_unit_with_frozen_parameters_ends_with_its_inputs_gradients(mode: str) -> None:
    """None of them has to stay gathered until the backward ends, since nothing is read after it."""
    model = make_net()
    for layer in model.layers:
        layer.get_submodule("norm").requires_grad_(False)  # read after the last gradient of the others
    refshard.shard(model, mode=mode, collectives=LateCollectives())
    train(model, 3)
    assert not any(unit.lasts for unit in engine_of(model).units)
