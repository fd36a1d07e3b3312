"""Programs that put part of a model or of a step on streams of their own, as users do.

Each orders what it does as it would have to without sharding; those in ``UNORDERED`` leave one wait out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import refshard
from refshard.engine.api import engine_of
from refshard.errors import EngineError
from tests.fakecuda.recorded import racing

DIM, ROWS, STEPS = 8, 4, 4
Stream = torch.cuda.Stream


@contextmanager
def beside(side: Stream, *tensors: torch.Tensor, joins: bool = True) -> Iterator[None]:
    """What is launched within runs on ``side``: after what came before, and before what comes after.

    ``tensors`` of the current stream are read there.
    """
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    for tensor in tensors:
        tensor.record_stream(side)
    with torch.cuda.stream(side):
        yield
    if joins:
        current.wait_stream(side)


class Branched(nn.Module):
    """A block of which one branch runs on a side stream. ``joins`` says that its result is waited for within."""

    def __init__(self, side: Stream, *, joins: bool = True, frozen: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.main = nn.Linear(DIM, DIM)
        self.first, self.second = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM, bias=False)
        self.first.requires_grad_(not frozen)
        self.side, self.joins, self.checkpointed = side, joins, checkpointed

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out

    def both(self, x: torch.Tensor, aside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with beside(self.side, aside, joins=self.joins):
            y = self.branch(aside)
        y.record_stream(torch.cuda.current_stream())
        return torch.tanh(self.main(x)), y

    def run(self, x: torch.Tensor) -> torch.Tensor:
        z, y = self.both(x, x)
        return x + z + y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)


class Fed(Branched):
    """The branch reads what needs no gradient, so that nothing in backward goes back from it to the main stream."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        z, y = self.both(x, x.detach())
        return x + z + y


class Paired(Branched):
    """Returns two tensors, of which autograd made one on the side stream."""

    def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return self.both(x[0], x[1])


class Embedded(nn.Module):
    """Two embeddings, one of which is looked up on a side stream, before a network. They are one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, DIM), nn.Embedding(9, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.side = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.mul(5).long().remainder(9)
        with beside(self.side, tokens):
            places = self.places(tokens.flip(0))
        places.record_stream(torch.cuda.current_stream())
        x = self.words(tokens) * places
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Moved(nn.Module):
    """A whole block on a side stream."""

    def __init__(self, side: Stream) -> None:
        super().__init__()
        self.inner, self.side = Branched(torch.cuda.Stream()), side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with beside(self.side, x):
            out: torch.Tensor = self.inner(x)
        out.record_stream(torch.cuda.current_stream())
        return out


class Net(nn.Module):
    """Blocks between two layers. ``aside`` puts the calls of every second block on a side stream."""

    def __init__(self, make: Callable[[Stream], nn.Module], *, aside: bool = False, pairs: bool = False) -> None:
        super().__init__()
        side = torch.cuda.Stream()
        self.inputs, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)
        self.layers = nn.ModuleList(make(side) for _ in range(4))
        self.aside = torch.cuda.Stream() if aside else None
        self.pairs = pairs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        if self.pairs:
            pair = (x, x)
            for layer in self.layers:
                pair = layer(pair)
            return self.head(pair[0] * pair[1])  # type: ignore[no-any-return]
        for index, layer in enumerate(self.layers):
            if self.aside is None or index % 2:
                x = layer(x)
                continue
            with beside(self.aside, x):
                x = layer(x)
            x.record_stream(torch.cuda.current_stream())
        return self.head(x)  # type: ignore[no-any-return]


def make_net(**options: Any) -> Net:
    """A network of :class:`Branched` blocks."""
    return Net(lambda side: Branched(side, **options))


def fetch(step: int) -> torch.Tensor:
    """Rows of a batch, in pinned memory."""
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(step)).pin_memory()


def ordinary(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Steps on the current stream."""
    for step in range(STEPS):
        loss = model(fetch(step).to("cuda", non_blocking=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def loss_aside(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The loss and the call of backward on a side stream, and a copy of the loss for the log on another."""
    side, log, logged = torch.cuda.Stream(), torch.cuda.Stream(), torch.empty(STEPS).pin_memory()
    for step in range(STEPS):
        out = model(fetch(step).to("cuda", non_blocking=True))
        with beside(side, out):
            loss = out.square().mean()
            loss.backward()
        with beside(log, loss, joins=False):
            logged[step].copy_(loss.detach(), non_blocking=True)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def batches_aside(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The next batch is copied while this one is trained on."""
    side = torch.cuda.Stream()

    def copied(step: int) -> torch.Tensor:
        with torch.cuda.stream(side):
            return fetch(step).to("cuda", non_blocking=True)

    following = copied(0)
    for step in range(STEPS):
        torch.cuda.current_stream().wait_stream(side)
        batch = following
        batch.record_stream(torch.cuda.current_stream())
        loss = model(batch).square().mean()
        following = copied(step + 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def optimizer_aside(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, joins: bool = True
) -> Iterator[torch.Tensor]:
    """Clipping and the optimizer's step on a side stream."""
    side = torch.cuda.Stream()
    for step in range(STEPS):
        loss = model(fetch(step).to("cuda", non_blocking=True)).square().mean()
        loss.backward()
        with beside(side, joins=joins):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if not joins:
            yield loss.detach()
            continue
        optimizer.zero_grad()
        yield loss.detach()


def all_aside(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Every step on another stream."""
    losses = ordinary(model, optimizer)
    for _ in range(STEPS):
        with beside(torch.cuda.Stream()):
            loss = next(losses)
        yield loss


def is_sharded(model: nn.Module) -> bool:
    try:
        engine_of(model)
    except EngineError:
        return False
    return True


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Two microbatches a step, the second of which runs on a side stream."""
    side = torch.cuda.Stream()
    for step in range(STEPS):
        with refshard.no_sync(model) if is_sharded(model) else nullcontext():
            model(fetch(step).to("cuda", non_blocking=True)).square().mean().backward()
        with beside(side):
            loss = model(fetch(step + 9).to("cuda", non_blocking=True)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


Train = Callable[[nn.Module, torch.optim.Optimizer], Iterator[torch.Tensor]]
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Train, dict[str, Any]]] = {
    "a branch of each block": (make_net, ordinary, {}),
    "a branch of each block, bf16": (make_net, ordinary, {"precision": refshard.Precision(parameters=torch.bfloat16)}),
    "a branch of each block, offload": (make_net, ordinary, {"offload": True}),
    "a branch of each block, one stream for collectives": (make_net, ordinary, {"communication_streams": 1}),
    "a checkpointed branch": (lambda: make_net(checkpointed=True), ordinary, {}),
    "a branch that is partly frozen": (lambda: make_net(frozen=True), ordinary, {}),
    "a branch that gives no gradient back": (lambda: Net(Fed), ordinary, {}),
    "outputs on two streams": (lambda: Net(Paired, pairs=True), ordinary, {}),
    "embeddings on two streams": (Embedded, ordinary, {}),
    "blocks on a side stream": (lambda: Net(Branched, aside=True), ordinary, {}),
    "blocks that go to a side stream": (lambda: Net(Moved), ordinary, {}),
    "loss and log aside": (make_net, loss_aside, {}),
    "batches aside": (make_net, batches_aside, {}),
    "the optimizer aside": (make_net, optimizer_aside, {}),
    "each step on another stream": (make_net, all_aside, {}),
    "a microbatch aside": (make_net, accumulating, {}),
}
UNORDERED: dict[str, tuple[Callable[[], nn.Module], Train, dict[str, Any]]] = {
    "a branch that nobody waits for": (lambda: make_net(joins=False), ordinary, {}),
    "an optimizer that nobody waits for": (make_net, lambda m, o: optimizer_aside(m, o, joins=False), {}),
}


UNSHARDED = "unsharded"


def run(name: str, mode: str) -> tuple[list[float], list[str]]:
    """Losses of a program and its races, sharded in this mode, or :data:`UNSHARDED`."""
    make, train, options = {**PROGRAMS, **UNORDERED}[name]
    torch.manual_seed(0)
    with racing() as races:
        model = make().to("cuda")
        if mode != UNSHARDED:
            refshard.shard(model, mode=mode, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        losses = list(train(model, optimizer))
    return [loss.item() for loss in losses], races
