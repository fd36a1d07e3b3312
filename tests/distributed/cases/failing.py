"""Forwards and backwards that raise, and what comes after."""

import torch
from torch import nn

from refshard.engine.collectives import Pending
from refshard.errors import EngineError
from tests.distributed.cases.case import ALL, EVALUATED, PLAIN, Case, case
from tests.distributed.cases.models import Block, Stack, adapted, mean_square, raises, sgd, train
from tests.distributed.cases.sides import DIM, Side
from tests.engine.fakes import LateCollectives


class ToldError(Exception):
    """What the model raises when it is told to."""


class Failing(Stack):
    """Raises in forward after a block, or in backward ahead of it."""

    where: str | None = None

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for index, layer in enumerate(self.layers):
            x = self.call(layer, x)
            if index == 1 and self.where == "forward":
                raise ToldError
            if index == 1 and self.where == "backward":
                x.register_hook(self._raise)
        return x

    def _raise(self, _: torch.Tensor) -> None:
        raise ToldError


def _fails(side: Side, model: Failing, where: str, step: int) -> None:
    model.where = where
    try:
        mean_square(model(side.x(step))).backward()
    except ToldError:
        side.log("raised", 1.0)
    model.where = None


@case(variants=ALL)
def forward_raises(side: Side) -> None:
    model = side.shard(Failing(), side.x())
    for step in range(3):
        train(side, model, start=step, steps=1)
        _fails(side, model, "forward", step)
    train(side, model, start=3, steps=2)


@case(variants=EVALUATED)
def first_forward_raises(side: Side) -> None:
    model = side.shard(Failing(), side.x())
    _fails(side, model, "forward", 0)
    train(side, model, optimizer=sgd(model))


@case(variants=ALL)
def backward_raises(side: Side) -> None:
    """Whatever it had brought is cleared before the next."""
    model = side.shard(Failing(), side.x())
    for step in range(3):
        train(side, model, start=step, steps=1)
        _fails(side, model, "backward", step)
        model.zero_grad()
    train(side, model, start=3, steps=2)


@case(variants=EVALUATED)
def first_backward_raises(side: Side) -> None:
    model = side.shard(Failing(), side.x())
    _fails(side, model, "backward", 0)
    model.zero_grad()
    train(side, model, optimizer=sgd(model))


class Interruptible(Block):
    """Is interrupted from the keyboard when it is told to, which module hooks do not see."""

    interrupted = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.interrupted:
            raise KeyboardInterrupt
        return out


def _interrupt(side: Side, model: Stack) -> None:
    model.layers[1].interrupted = True
    try:
        model(side.x(9))
    except KeyboardInterrupt:
        side.log("interrupted", 1.0)
    model.layers[1].interrupted = False


@case(variants=EVALUATED)
def forward_interrupted(side: Side) -> None:
    """The first one, and later ones."""
    model = side.shard(Stack([Interruptible() for _ in range(3)]), side.x())
    optimizer = sgd(model)
    for step in range(3):
        _interrupt(side, model)
        train(side, model, optimizer=optimizer, start=step, steps=1)
    left = torch._C._autograd._top_saved_tensors_default_hooks(False)
    side.log("hooks left on saved tensors", float(left is not None))


@case(variants=EVALUATED, refuses="was built over the gathered parameters")
def optimizer_made_after_an_interruption(side: Side) -> None:
    model = side.shard(Stack([Interruptible() for _ in range(3)]), side.x())
    train(side, model, steps=1)
    _interrupt(side, model)
    train(side, model, optimizer=sgd(model), start=1)


@case(variants=EVALUATED)
def wrong_input_raises(side: Side) -> None:
    model = side.shard(adapted(), side.x())
    for step in range(3):
        try:
            model(side.put(torch.ones(2, 3)))
        except RuntimeError:
            side.log("raised", 1.0)
        train(side, model, start=step, steps=1)


@case(variants=EVALUATED)
def evaluation_raises(side: Side) -> None:
    model = side.shard(Failing(), side.x())
    for step in range(3):
        train(side, model, start=step, steps=1)
        model.where = "forward"
        with torch.no_grad():
            try:
                model(side.x(9))
            except ToldError:
                side.log("raised", 1.0)
        model.where = None


@case(variants=PLAIN)
def block_raises_when_called_by_itself(side: Side) -> None:
    model = side.shard(Stack())
    for step in range(3):
        try:
            model.layers[1](side.put(torch.ones(2, 3)))
        except RuntimeError:
            side.log("raised", 1.0)
        train(side, model, start=step, steps=1)


@case(variants=PLAIN)
def forward_raises_without_memory(side: Side) -> None:
    """An out-of-memory error stays what it is, and a smaller batch goes on."""

    class Hungry(Failing):
        def _fail(self) -> None:
            raise torch.OutOfMemoryError("told to")

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inputs(x)
            for layer in self.layers:
                x = layer(x)
                if self.where == "forward":
                    self._fail()
            return x

    model = side.shard(Hungry())
    for step in range(3):
        model.where = "forward"
        try:
            model(side.x(step))
        except torch.OutOfMemoryError:
            side.log("out of memory", 1.0)
        model.where = None
        train(side, model, start=step, steps=1)


@case(variants=PLAIN)
def loss_dropped_before_backward(side: Side) -> None:
    """A step is skipped since its loss is not finite."""
    model = side.shard(Stack())
    optimizer = sgd(model)
    for step in range(5):
        loss = mean_square(model(side.x(step)))
        if step % 2:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        side.log_mean("loss", loss)


@case(variants=PLAIN)
def backward_after_the_step(side: Side) -> None:
    """Weights are written between forward and backward: torch refuses it as well."""
    model = side.shard(Stack())
    optimizer = sgd(model, foreach=False)  # whose writes torch does not notice on a GPU
    train(side, model, steps=2)
    old = mean_square(model(side.x(7)))
    train(side, model, start=2, steps=1, optimizer=optimizer)
    with raises(EngineError if side.engine else RuntimeError, r"changed between|modified by an inplace"):
        old.backward()


@case(variants=PLAIN, table=True, only_on_cpu=True)
def backward_of_a_tap_after_the_step(side: Side) -> None:
    """As before, of a loss from within the first block: no gradient of an output tells that backward begins, and
    autograd itself refuses stale weights.
    """
    model = Stack()
    model.inputs = nn.Identity()  # type: ignore[assignment]
    taps: list[torch.Tensor] = []
    model.layers[0].down.register_forward_hook(lambda _, args, __: taps.append(mean_square(args[0])))
    side.shard(model)
    optimizer = sgd(model)
    for step in range(4):
        taps.clear()
        mean_square(model(side.x(7)))
        train(side, model, start=step, steps=1, optimizer=optimizer)
        with raises(RuntimeError, "modified by an inplace"):
            taps[0].backward()
        model.zero_grad()


@case(variants=PLAIN)
def activation_changed_after_it_was_saved(side: Side) -> None:
    """Torch refuses to compute a gradient from it, in the first step and in later ones."""

    class Changing(nn.Module):
        changes = False

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.tanh(self.linear(x))
            total: torch.Tensor = x + out.mul_(2) if self.changes else x + out * 2
            return total

    block = Changing()
    model = side.shard(Stack([block, Block()]))
    for step in range(3):
        block.changes = True
        with raises(RuntimeError, "modified by an inplace"):
            mean_square(model(side.x(step))).backward()
        block.changes = False
        model.zero_grad()
        train(side, model, start=step, steps=1)


class WithoutMemory(LateCollectives):
    """One rank, that runs out of memory in a collective of one kind, when it is issued or awaited."""

    def __init__(self, op: str, *, awaited: bool) -> None:
        super().__init__()
        self.op, self.awaited, self.full = op, awaited, False

    def _issue(self, op: str, target: torch.Tensor, source: torch.Tensor) -> Pending:
        if not self.full or op != self.op:
            return super()._issue(op, target, source)
        if not self.awaited:
            raise torch.OutOfMemoryError("no memory left")

        class Full:
            def wait(self) -> None:
                raise torch.OutOfMemoryError("no memory left")

        return Full()


def _without_memory(op: str, *, awaited: bool) -> Case:
    """A harness tells it from a defect by its type, so it stays what it is."""

    def run(side: Side) -> None:
        collectives = WithoutMemory(op, awaited=awaited)
        model = side.shard(Stack(), collectives=collectives)
        same = side.put(torch.linspace(-1, 1, 4 * DIM).view(4, DIM))
        for step in range(3):
            train(side, model, lambda _: mean_square(model(same)), start=step, steps=1)
        if side.engine:
            collectives.full = True
            with raises(torch.OutOfMemoryError, "no memory left"):
                train(side, model, lambda _: mean_square(model(same)), steps=1)
        side.models.clear()

    run.__name__ = f"no_memory_left_when_{op}_is_{'awaited' if awaited else 'issued'}"
    return case(variants=PLAIN, modes=("zero1", "zero2", "fsdp", "yafsdp"), table=True)(run)


WITHOUT_MEMORY = [
    _without_memory(op, awaited=awaited) for op in ("all_gather", "reduce_scatter") for awaited in (False, True)
]


@case(variants=PLAIN, refuses="inference_mode", only_on_cpu=True)
def sharded_in_inference_mode(side: Side) -> None:
    model = Stack()
    with torch.inference_mode():
        side.shard(model)
    train(side, model)
