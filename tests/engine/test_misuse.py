"""What users do to a model beside an ordinary loop: it stays correct, or is refused by name."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import refshard
from refshard.engine.api import engine_of
from refshard.engine.executor import Order
from refshard.engine.placement import MODES
from refshard.errors import EngineError, SpecError
from tests.engine.fakes import LateCollectives, Net, loss_of, make_batch, make_net, train


class Cut(Net):
    """Can cut the graph below a block, so that what lies before it takes no part in backward."""

    cut: int | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x.detach() if index == self.cut else x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Failing(Net):
    """Raises in backward when told to: below block 2, or within the last unit, between its head and its norm."""

    fail: str | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                x.register_hook(lambda _: self.maybe_fail("between units"))
        x = self.norm(x)
        x.register_hook(lambda _: self.maybe_fail("within a unit"))
        logits: torch.Tensor = self.head(x)
        return logits

    def maybe_fail(self, place: str) -> None:
        if self.fail == place:
            raise ValueError("told to")


IN_ONE_MODE = pytest.mark.parametrize(
    "mode",
    [pytest.param(m, marks=pytest.mark.slow if m == "yafsdp" else pytest.mark.full) for m in MODES],
    indirect=True,
)


@pytest.fixture(params=list(MODES))
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pair(mode: str, make: Callable[[], Net] = make_net) -> tuple[Net, Net]:
    """A bare model and the same one sharded."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    refshard.shard(models[1], mode=mode, collectives=LateCollectives(), debug=True)
    return models[0], models[1]


def assert_same_gradients(bare: nn.Module, model: nn.Module) -> None:
    """A parameter that took no part has no gradient on either side."""
    found = dict(model.named_parameters())
    for name, parameter in bare.named_parameters():
        mine, theirs = found[name].grad, parameter.grad
        assert (mine is None) == (theirs is None), name
        if mine is not None and theirs is not None:
            assert torch.equal(mine, theirs), name


def test_units_that_backward_never_reaches_get_no_gradient_of_another_unit(mode: str) -> None:
    bare, model = pair(mode, Cut)
    assert isinstance(bare, Cut)
    assert isinstance(model, Cut)
    for step in range(4):
        for m in (bare, model):
            m.cut = 2 if step == 2 else None
            m.zero_grad()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="refshard: (the order .* changed|unit .* was left out)")
                loss_of(m, make_batch(step)).backward()
        assert_same_gradients(bare, model)


@pytest.mark.parametrize("first", [0, 2])
def test_a_second_backward_through_a_retained_graph_adds_up(mode: str, first: int) -> None:
    bare, model = pair(mode)
    for step in range(4):
        for m in (bare, model):
            m.zero_grad()
            loss = loss_of(m, make_batch(step))
            if step >= first:
                loss.backward(retain_graph=True)
            loss.backward()
        assert_same_gradients(bare, model)
    assert engine_of(model).executor.order is Order.FOLLOWING


@pytest.mark.parametrize("after", [1, 2])
def test_evaluation_in_inference_mode(mode: str, after: int) -> None:
    bare, model = pair(mode)
    found = []
    for m in (bare, model):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        losses = train(m, after, optimizer=optimizer)
        with torch.inference_mode():
            logits = m(make_batch(9)[0])
        found.append((losses + train(m, 2, start=after, optimizer=optimizer), logits.clone()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_an_evaluation_by_another_way_leaves_trainings_order_alone(mode: str) -> None:
    bare, model = pair(mode)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (bare, model)]
    for m, optimizer in zip((bare, model), optimizers):
        train(m, 2, optimizer=optimizer)
        m.skip = {1, 2}
    with torch.no_grad(), pytest.warns(UserWarning, match=r"unit 'layers\.1' was left out, unlike in step 0"):
        assert torch.equal(model(make_batch(0)[0]), bare(make_batch(0)[0]))
    bare.skip = model.skip = set()
    assert train(model, 2, optimizer=optimizers[1]) == train(bare, 2, optimizer=optimizers[0])
    assert engine_of(model).executor.order is Order.FOLLOWING


def test_a_loss_older_than_the_weights_is_refused_even_after_a_newer_forward(mode: str) -> None:
    _, model = pair(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, 2, optimizer=optimizer)
    old = loss_of(model, make_batch(5))
    train(model, 1, optimizer=optimizer)
    loss_of(model, make_batch(6))
    with pytest.raises(EngineError, match="changed between forward and backward"):
        old.backward()


def test_zero_grad_after_a_failed_forward_clears_the_gradients(mode: str) -> None:
    bare, model = pair(mode)
    for m in (bare, model):
        train(m, 2)
        loss_of(m, make_batch(3)).backward()
        with pytest.raises(IndexError):
            m(torch.full((1, 3), 99))
        m.zero_grad()
        loss_of(m, make_batch(4)).backward()
    assert_same_gradients(bare, model)


@pytest.mark.parametrize("place", ["between units", "within a unit"])
def test_gradients_of_a_failed_backward_are_dropped(mode: str, place: str) -> None:
    bare, model = pair(mode, Failing)
    for m in (bare, model):
        assert isinstance(m, Failing)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        train(m, 2, optimizer=optimizer)
        m.fail = place
        with pytest.raises(ValueError, match="told to"):
            loss_of(m, make_batch(3)).backward()
        m.fail = None
        optimizer.zero_grad()
        loss_of(m, make_batch(4)).backward()
    assert_same_gradients(bare, model)


def test_full_parameters_can_be_had_at_any_time(mode: str) -> None:
    bare, model = pair(mode)
    model(make_batch(0)[0])
    expected = {name: parameter.detach() for name, parameter in bare.named_parameters()}
    for _ in range(2):
        found = dict(refshard.full_parameters(model))
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert train(model, 3) == train(bare, 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.float64),
        lambda m: m.head._parameters.update(weight=nn.Parameter(torch.zeros(11, 6))),
    ],
)
def test_what_the_engine_cannot_follow_is_refused(mode: str, change: Callable[[Net], object]) -> None:
    _, model = pair(mode)
    train(model, 2)
    change(model)
    with pytest.raises(EngineError, match=r"parameter '.*' was replaced or moved after sharding"):
        model(make_batch(0)[0])


def test_a_frozen_parameter_of_which_a_cast_is_kept_cannot_be_trained(mode: str) -> None:
    model = make_net()
    model.layers[0].requires_grad_(False)
    refshard.shard(
        model, mode=mode, precision=refshard.Precision(parameters=torch.bfloat16), collectives=LateCollectives()
    )
    model.layers[0].requires_grad_(True)
    with pytest.raises(EngineError, match=r"'layers\.0.*' was unfrozen after sharding, but .* only a cast"):
        model(make_batch(0)[0])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: setattr(m, "head", nn.Linear(6, 11)), r"module 'head' is put into a Net"),
        (lambda m: m.layers.append(nn.Linear(6, 6)), r"module '4' is put into a ModuleList"),
        (lambda m: setattr(m, "head", nn.Sequential(m.head, nn.Linear(11, 11))), r"module 'head' is put into a Net"),
        (lambda m: setattr(m, "other", m.head), r"module 'other' is put into a Net"),
        (lambda m: setattr(m, "layers", m.layers[:3]), r"module 'layers' is put into a Net"),
        (
            lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros(11, 6))),
            r"parameter 'weight' is put into a Lin",
        ),
        (lambda m: prune.l1_unstructured(m.head, "weight", 0.5), r"parameter 'weight_orig' is put into a Linear"),
        (
            lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
            "parameter 'weight' is put into a Embedding",
        ),
    ],
)
def test_what_is_put_into_a_sharded_model_is_refused_and_the_model_stays_as_it_was(
    mode: str, change: Callable[[Net], object], what: str
) -> None:
    bare, model = pair(mode)
    with pytest.raises((EngineError, RuntimeError), match=what):
        change(model)
    model.loss = nn.CrossEntropyLoss()  # of no parameters
    assert train(model, 2) == train(bare, 2)


def test_parametrizing_a_sharded_model_is_refused(mode: str) -> None:
    _, model = pair(mode)
    with pytest.raises(EngineError, match="module 'parametrizations' is put into a ParametrizedLinear"):
        parametrizations.orthogonal(model.head)


def test_loading_a_state_dict_in_place_works(mode: str) -> None:
    bare, model = pair(mode)
    other = make_net(seed=7)
    refshard.shard(other, mode=mode, collectives=LateCollectives())
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(other(make_batch(0)[0]), bare(make_batch(0)[0]))


def test_copies_and_parts_are_refused(mode: str) -> None:
    _, model = pair(mode)
    with pytest.raises(EngineError, match="cannot be copied or pickled"):
        copy.deepcopy(model)
    whole = make_net()
    refshard.shard(whole.layers[0], mode=mode, blocks=["up", "down"], collectives=LateCollectives())
    with pytest.raises(EngineError, match=r"parts of the model are sharded already \('layers\.0'\)"):
        refshard.shard(whole, mode=mode, collectives=LateCollectives())


class Recomputing(Net):
    """Checkpoints its blocks."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@pytest.mark.slow
@IN_ONE_MODE
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_that_is_let_go_is_collected(mode: str, checkpointed: bool) -> None:
    model = Recomputing() if checkpointed else Net()
    model.layers[0].requires_grad_(False)
    refshard.shard(model, mode=mode, collectives=LateCollectives())
    train(model, 3)
    loss_of(model, make_batch(3))  # without a backward
    alive = [weakref.ref(unit) for unit in engine_of(model).units]
    del model
    gc.collect()
    assert not any(ref() for ref in alive)


@pytest.mark.slow
@IN_ONE_MODE
def test_compiled_blocks_call_the_hooks(mode: str) -> None:
    bare, model = pair(mode)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    assert train(model, 3) == pytest.approx(train(bare, 3), rel=1e-5)


@pytest.mark.slow
@IN_ONE_MODE
def test_compiled_models_compile_nothing_of_the_engine(mode: str) -> None:
    bare, model = pair(mode)
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    model.compile(backend="eager")
    assert train(model, 3) == pytest.approx(train(bare, 3), rel=1e-5)
    compiled = {str(one.co_filename) for one in torch._dynamo.utils.get_compilation_metrics()}
    assert any(path.endswith("tests/engine/fakes.py") for path in compiled), compiled
    assert not any("refshard/engine/" in path for path in compiled), compiled


def test_what_is_no_part_of_a_sharded_model_is_not_unsharded(mode: str) -> None:
    bare, model = pair(mode)
    outer = nn.Sequential(model)
    for module in (bare, bare.layers[0], outer):
        for call in (refshard.unshard, refshard.reshard, lambda m: refshard.register_forward_method(m, "forward")):
            with pytest.raises(EngineError, match=rf"the {type(module).__name__} is no part of a sharded model; call"):
                call(module)


def test_a_module_that_computes_is_not_resharded(mode: str) -> None:
    bare, model = pair(mode)
    hook = model.layers[1].register_forward_pre_hook(lambda module, _: refshard.reshard(module))
    with pytest.raises(EngineError, match=r"unit 'layers\.1' is computing, and cannot be resharded"):
        loss_of(model, make_batch(0))
    hook.remove()
    assert train(model, 2) == train(bare, 2)


def test_in_debug_another_rank_that_unshards_another_module_is_noticed() -> None:
    class Disagreeing(LateCollectives):
        def agree(self, value: int) -> bool:
            return value != 2

    model = make_net()
    refshard.shard(model, mode="fsdp", collectives=Disagreeing(), debug=True)
    refshard.unshard(model.layers[0])
    with pytest.raises(EngineError, match=r"rank 0 unshards unit 'layers\.1' where another rank does something else"):
        refshard.unshard(model.layers[1])


class Described(nn.Linear):
    """Has methods that cannot be called like forward."""

    def describe(self) -> str:
        return f"{self.weight.sum().item():.3f}"

    def rows(self) -> Iterator[torch.Tensor]:
        yield from self.weight

    async def later(self) -> torch.Tensor:
        return self.weight * 2


def test_methods_that_cannot_be_called_like_forward_are_refused(mode: str) -> None:
    head = Described(6, 6)
    model = WithHead(head)
    refshard.shard(model, mode=mode, collectives=LateCollectives())
    for name in ("rows", "later"):
        with pytest.raises(EngineError, match=f"method '{name}' of Described is a generator or a coroutine"):
            refshard.register_forward_method(model.head, name)
    with pytest.raises(SpecError, match="Described has no method 'descibe'; did you mean 'describe'"):
        refshard.register_forward_method(model.head, "descibe")
    with pytest.raises(SpecError, match="WithHead has no method 'head'"):
        refshard.register_forward_method(model, "head")
    refshard.register_forward_method(model.head, "describe")
    assert head.describe() == f"{dict(refshard.full_parameters(model))['head.weight'].sum().item():.3f}"
    steps(model)


class Around(nn.Module):
    """Computes with a parameter of its own around a module that has some too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.full((6,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * self.scale
        return out


class WithHead(nn.Module):
    """Blocks between an input layer and a head of any kind."""

    def __init__(self, head: nn.Module, blocks: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.inputs = nn.Linear(6, 6)
        self.layers = nn.ModuleList(blocks or [nn.Linear(6, 6) for _ in range(3)])
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x).tanh()
        out: torch.Tensor = self.head(x)
        return out


class Returning(nn.Module):
    """Returns a view of its parameter, as positional embeddings do, or an object that holds one."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any] = lambda table: table) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(64, 6))
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.table[: x.shape[0]])


def steps(model: nn.Module, n: int = 3) -> list[torch.Tensor]:
    """Train on a fixed input; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(n):
        loss = model(torch.linspace(-1, 1, 12).view(2, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def assert_trains_like_bare(mode: str, make: Callable[[], nn.Module]) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    refshard.shard(models[1], mode=mode, collectives=LateCollectives(), debug=True)
    assert steps(models[1]) == steps(models[0])


def test_a_unit_lasts_while_the_module_around_it_computes(mode: str) -> None:
    assert_trains_like_bare(mode, lambda: WithHead(Around()))


class Encoder(nn.Module):
    """Blocks between a frozen weight of its own, and a trained one, whose gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.base
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.scale


@pytest.mark.parametrize("mode", ["fsdp", "yafsdp"])
def test_a_unit_that_is_called_by_itself_around_others_lasts_until_its_inputs_gradients_are_there(mode: str) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = nn.Linear(6, 6)
            self.encoder = Encoder()

    model, collectives = Whole(), LateCollectives()
    refshard.shard(model, mode=mode, collectives=collectives, debug=True)
    model.encoder(model.inputs(torch.ones(2, 6))).square().mean().backward()
    gathers = [what for what, _ in collectives.issued if what == "all_gather"]
    flats = sum(len(unit.flats) for unit in engine_of(model).units)
    assert len(gathers) == 2 * flats  # once in forward and once in backward


def test_a_module_that_several_blocks_share(mode: str) -> None:
    def make() -> nn.Module:
        shared = nn.Linear(6, 6)
        return WithHead(nn.Linear(6, 6), [nn.Sequential(nn.Linear(6, 6), shared) for _ in range(3)])

    assert_trains_like_bare(mode, make)


@pytest.mark.parametrize("head", [Returning(), Returning(lambda table: SimpleNamespace(table=table))])
def test_a_parameter_as_output_is_refused(mode: str, head: nn.Module) -> None:
    model = WithHead(copy.deepcopy(head))
    refshard.shard(model, mode=mode, collectives=LateCollectives())
    with pytest.raises(EngineError, match="unit 'head' returns a parameter of its own, or a view of it"):
        steps(model)


def test_gradients_of_gradients_are_refused(mode: str) -> None:
    _, model = pair(mode)
    train(model, 2)
    with pytest.raises(EngineError, match="compute gradients of gradients on an unsharded model"):
        loss_of(model, make_batch(0)).backward(create_graph=True)


def test_parameters_with_hooks_are_refused(mode: str) -> None:
    hooked = make_net()
    hooked.head.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(EngineError, match=r"parameter 'head\.weight' has hooks"):
        refshard.shard(hooked, mode=mode, collectives=LateCollectives())
