"""Ranks that use different parts of a model: experts, heads, blocks.

The rows say which part they use, so that the bare side, which has all rows, uses all parts: with two ranks, the first
rank has rows 0 to 2 and the second has rows 3 to 5.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import refshard
from tests.distributed.cases.case import EVALUATED, PLAIN, case
from tests.distributed.cases.models import (
    Adapted,
    Block,
    Checkpointing,
    Stack,
    adamw,
    mean_square,
    sgd,
    train,
)
from tests.distributed.cases.sides import DIM, Side

OTHER_UNITS = "all ranks must run the same units in the same order"
"""An error that tells of ranks that run different units."""


def _by_row(side: Side, *values: int) -> torch.Tensor:
    """One value for each of this side's rows."""
    return side.rows(torch.tensor(values)).to(side.device)


class Sparse(nn.Module):
    """Mixtral's loop: each row goes to one expert, and experts that get no row are not called."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 7), nn.Tanh(), nn.Linear(7, DIM)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        out = x.clone()
        for expert in choice.unique().tolist():
            (rows,) = torch.where(choice == expert)
            out.index_add_(0, rows, weights[rows, expert, None] * self.experts[expert](x[rows]))
        return out


class Mixture(Checkpointing):
    """Two blocks of experts, of which the last may be spare: it gets no row."""

    def __init__(self, used: int = 4, spare: int = 1) -> None:
        super().__init__()
        self.used = used
        self.layers = nn.ModuleList(Sparse(used + spare) for _ in range(2))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = self.call(layer, x, (choice + index) % self.used)
        out: torch.Tensor = self.head(x)
        return out


def _choice(side: Side, step: int) -> torch.Tensor:
    """Rows of different ranks hit different experts, which take turns."""
    return (_by_row(side, 0, 0, 0, 1, 1, 1 + step % 2) + step) % 4


def _log_presence(side: Side, model: nn.Module) -> None:
    """Log which parameters have a gradient. A rank that lacks one would keep others waiting for its values."""
    for name, parameter in model.named_parameters():
        side.log(f"has gradient {name}", float(parameter.grad is not None))


def _mixture(side: Side) -> Mixture:
    return side.shard(Mixture(), side.x(), _choice(side, 0), blocks=["layers"], used_by_some_ranks=True)


@case(table=True)
def experts_that_some_ranks_use(side: Side) -> None:
    """An expert that another rank used has a gradient here too; one that no rank used has none, and no momentum."""
    model = _mixture(side)
    train(
        side,
        model,
        lambda step: mean_square(model(side.x(step), _choice(side, step))),
        optimizer=sgd(model, momentum=0.9),
        steps=10,
        before_step=lambda _: _log_presence(side, model),
    )


@case(table=True)
def experts_that_some_ranks_use_accumulated(side: Side) -> None:
    model = _mixture(side)
    optimizer = sgd(model, momentum=0.9)
    for step in range(6):
        for microbatch in range(2):
            number = 2 * step + microbatch
            with side.microbatch(model, last=microbatch == 1):
                loss = mean_square(model(side.x(number), _choice(side, step + 2 * microbatch))) / 2
                loss.backward()
            side.log_mean(f"loss {number}", loss)
        _log_presence(side, model)
        optimizer.step()
        optimizer.zero_grad()


@case(table=True)
def hooks_on_experts_that_some_ranks_use(side: Side) -> None:
    """A parameter's hook runs on every rank if any rank used the parameter."""
    model = _mixture(side)
    calls = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
    for name, parameter in model.named_parameters():

        def count(_: torch.Tensor, name: str = name) -> None:
            calls[name] += 1

        parameter.register_post_accumulate_grad_hook(count)
    train(side, model, lambda step: mean_square(model(side.x(step), _choice(side, step))))
    for name, number in calls.items():
        side.log(f"calls {name}", number)


@case(table=True)
def experts_that_one_rank_uses_all_of(side: Side) -> None:
    """The other rank uses one, so that it alone does not know when its last gradient has come."""
    model, choice = Mixture(used=3, spare=0), _by_row(side, 0, 1, 2, 1, 1, 1)
    side.shard(model, side.x(), choice, blocks=["layers"], used_by_some_ranks=True)
    train(side, model, lambda step: mean_square(model(side.x(step), choice)), optimizer=sgd(model, momentum=0.9))


class Tasks(Stack):
    """Each row belongs to one of two tasks, which have a head each."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.ModuleList(nn.Linear(DIM, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, task: torch.Tensor | None = None) -> torch.Tensor:
        assert task is not None
        x = self.encode(x)
        out = x.new_zeros(len(x), 3)
        for number in task.unique().tolist():
            (rows,) = torch.where(task == number)
            out = out.index_copy(0, rows, self.head[number](x[rows]))
        return out


def _heads(side: Side, *, together: bool) -> None:
    task = _by_row(side, 1, 1, 1, 0, 0, 0)  # so that no rank's part is of the head that it uses
    blocks = ["layers", "head"] if not together else [Block]
    model = side.shard(Tasks(), side.x(), task, blocks=blocks, used_by_some_ranks=True)
    train(side, model, lambda step: mean_square(model(side.x(step), task)), optimizer=sgd(model, momentum=0.9))


@case(table=True)
def heads_by_rank(side: Side) -> None:
    """Both heads are in one unit, and each rank calls one of them."""
    _heads(side, together=True)


@case(table=True, refuses=OTHER_UNITS)
def heads_by_rank_that_are_units(side: Side) -> None:
    _heads(side, together=False)


class Auxiliary(Stack):
    """Beside the blocks one more, of whose output the loss takes rows that have a weight."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x = self.inputs(x)
        for layer in list(self.layers)[:3]:
            x = self.call(layer, x)
        return self.head(x), self.call(self.layers[3], x)


def _auxiliary(side: Side, *, after: int) -> None:
    model = side.shard(Auxiliary(), side.x(), used_by_some_ranks=True)

    def loss(step: int) -> torch.Tensor:
        out, extra = model(side.x(step))
        total = mean_square(out)
        weights = _by_row(side, 1, 1, 0, 0, 0, 0) if step >= after else _by_row(side, 1, 1, 1, 1, 1, 1)
        if weights.any():
            total = total + 0.3 * (extra.square().mean(1) * weights).mean()
        return total

    train(side, model, loss, optimizer=sgd(model, momentum=0.9), steps=5)


@case(table=True, refuses=OTHER_UNITS)
def block_in_the_loss_of_one_rank(side: Side) -> None:
    """All ranks run the block; only the first rank's loss depends on it."""
    _auxiliary(side, after=0)


@case(table=True, refuses=OTHER_UNITS)
def block_in_the_loss_of_one_rank_later(side: Side) -> None:
    """As before, from the third step on."""
    _auxiliary(side, after=2)


class Dropping(Stack):
    """Runs a block only for the rows that keep it (LayerDrop)."""

    def forward(self, x: torch.Tensor, kept: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        x = self.inputs(x)
        for layer, rows in zip(self.layers, kept):
            if rows.any():
                x = torch.where(rows[:, None] > 0, self.call(layer, x), x)
        out: torch.Tensor = self.head(x)
        return out


def _dropping(side: Side, first: int, *kept: tuple[int, ...], widths: Sequence[int] = (), **options: Any) -> None:
    """Train with these rows of each block kept, from step ``first`` on; before, all are."""
    sized = [nn.Sequential(nn.Linear(DIM, width), nn.Tanh(), nn.Linear(width, DIM)) for width in widths]
    everything = [_by_row(side, 1, 1, 1, 1, 1, 1)] * 3
    some = [_by_row(side, *rows) for rows in kept]
    sample = some if first == 0 else everything
    model = side.shard(Dropping(sized or None), side.x(), sample, used_by_some_ranks=True, **options)

    def loss(step: int) -> torch.Tensor:
        return mean_square(model(side.x(step), some if step >= first else everything))

    train(side, model, loss, steps=5)


ALL_ROWS, FIRST_RANK, LAST_RANK = (1, 1, 1, 1, 1, 1), (1, 1, 1, 0, 0, 0), (0, 0, 0, 1, 1, 1)


@case(table=True, refuses=OTHER_UNITS)
def block_skipped_by_one_rank_later(side: Side) -> None:
    """LayerDrop with seeds by rank: from the third step on, one rank skips a block."""
    _dropping(side, 2, ALL_ROWS, FIRST_RANK, ALL_ROWS)


@case(table=True, refuses=OTHER_UNITS)
def last_block_skipped_by_one_rank_later(side: Side) -> None:
    _dropping(side, 2, ALL_ROWS, ALL_ROWS, LAST_RANK)


@case(table=True, refuses=OTHER_UNITS)
def block_skipped_by_one_rank_from_the_start(side: Side) -> None:
    _dropping(side, 0, ALL_ROWS, FIRST_RANK, ALL_ROWS)


@case(variants=EVALUATED, table=True, refuses=OTHER_UNITS)
def other_blocks_on_each_rank(side: Side) -> None:
    """From the first step on, one rank calls the second block and the other rank the third."""
    _dropping(side, 0, ALL_ROWS, FIRST_RANK, LAST_RANK)


@case(variants=EVALUATED, table=True, refuses=OTHER_UNITS)
def other_blocks_of_other_sizes_on_each_rank(side: Side) -> None:
    _dropping(side, 0, ALL_ROWS, FIRST_RANK, LAST_RANK, widths=(4, 9, 23))


@case(variants=EVALUATED, table=True, refuses=OTHER_UNITS)
def other_blocks_of_other_sizes_on_each_rank_in_debug(side: Side) -> None:
    _dropping(side, 0, ALL_ROWS, FIRST_RANK, LAST_RANK, widths=(4, 9, 23), debug=True)


@case(variants=PLAIN, table=True, refuses=OTHER_UNITS)
def other_blocks_on_each_rank_later(side: Side) -> None:
    """Blocks of one size, so that no collective tells them apart."""
    _dropping(side, 2, ALL_ROWS, FIRST_RANK, LAST_RANK)


class Looping(Mixture):
    """Runs its layers twice, each time checkpointed."""

    reentrant = True

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        for loop in range(2):
            for index, layer in enumerate(self.layers):
                given = (choice + index + 2 * loop) % self.used
                x = checkpoint(layer, x, given, use_reentrant=self.reentrant)
        out: torch.Tensor = self.head(x)
        return out


def _looping(side: Side, *, reentrant: bool) -> None:
    model = Looping()
    model.reentrant = reentrant
    side.shard(model, side.x(), _choice(side, 0), blocks=["layers"])
    train(
        side,
        model,
        lambda step: mean_square(model(side.x(step).requires_grad_(), _choice(side, step))),
        optimizer=sgd(model, momentum=0.9),
        steps=6,
        before_step=lambda _: side.log_gradients(model),
    )


class Revisiting(Stack):
    """Runs its blocks twice, each time checkpointed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for layer in [*self.layers, *self.layers]:
            x = checkpoint(layer, x, use_reentrant=True)
        out: torch.Tensor = self.head(x)
        return out


@case(variants=EVALUATED)
def blocks_looped_reentrant(side: Side) -> None:
    train(side, side.shard(Revisiting(), side.x()))


@case(variants=EVALUATED)
def layers_of_experts_by_rank_looped_reentrant(side: Side) -> None:
    """A layer's backward has two parts, in which a rank uses different experts."""
    _looping(side, reentrant=True)


@case(variants=EVALUATED)
def layers_of_experts_by_rank_looped_checkpointed(side: Side) -> None:
    _looping(side, reentrant=False)


@case()
def experts_by_rank_with_gradients_zeroed(side: Side) -> None:
    """``zero_grad(set_to_none=False)``: weight decay goes on for experts that nobody uses."""
    model = side.shard(Mixture(), side.x(), _choice(side, 0), blocks=["layers"])
    optimizer = adamw(model.parameters(), weight_decay=0.1)
    for step in range(8):
        for microbatch in range(2):
            with side.microbatch(model, last=microbatch == 1):
                mean_square(model(side.x(2 * step + microbatch), _choice(side, step + microbatch))).backward()
        _log_presence(side, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@case()
def experts_by_rank_partly_frozen(side: Side) -> None:
    model = Mixture()
    for layer in model.layers:
        assert isinstance(layer, Sparse)
        layer.experts[0].requires_grad_(False)
        next(layer.experts[2].children()).requires_grad_(False)
    side.shard(model, side.x(), _choice(side, 0), blocks=["layers"])
    train(
        side,
        model,
        lambda step: mean_square(model(side.x(step), _choice(side, step))),
        optimizer=sgd(model, momentum=0.9),
        steps=6,
        before_step=lambda _: _log_presence(side, model),
    )


@case()
def experts_by_rank_stepped_in_backward(side: Side) -> None:
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""
    model = side.shard(Mixture(), side.x(), _choice(side, 0), blocks=["layers"])
    optimizers = {p: adamw([p]) for p in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    for step in range(6):
        loss = mean_square(model(side.x(step), _choice(side, step)))
        loss.backward()
        side.log_mean("loss", loss)


@case(variants=EVALUATED)
def experts_by_rank_with_a_scaler(side: Side) -> None:
    model = side.shard(Mixture(), side.x(), _choice(side, 0), blocks=["layers"])
    optimizer = sgd(model, momentum=0.9)
    scaler = torch.amp.GradScaler(side.device.type, init_scale=8.0, growth_interval=2)
    for step in range(6):
        loss = mean_square(model(side.x(step), _choice(side, step)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        side.log("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@case()
def adapters_skipped_by_one_rank_later(side: Side) -> None:
    """LayerDrop by rank over blocks with frozen weights, with microbatches."""
    model = Dropping([Adapted() for _ in range(3)])
    everything = [_by_row(side, 1, 1, 1, 1, 1, 1)] * 3
    some = [everything[0], _by_row(side, 1, 1, 1, 0, 0, 0), _by_row(side, 0, 0, 0, 1, 1, 1)]
    side.shard(model, side.x(), everything)
    optimizer = sgd(model, momentum=0.9)
    for step in range(5):
        for microbatch in range(2):
            with side.microbatch(model, last=microbatch == 1):
                kept = some if step >= 2 and microbatch == step % 2 else everything
                mean_square(model(side.x(2 * step + microbatch), kept)).backward()
        _log_presence(side, model)
        optimizer.step()
        optimizer.zero_grad()


def _weighed(side: Side, model: nn.Module, step: int) -> torch.Tensor:
    """The first rank's rows do not count in the third step."""
    weights = _by_row(side, *((0, 0, 0, 1, 1, 1) if step == 2 else (1,) * 6))
    losses: torch.Tensor = (model(side.x(step)) - 0.3).square().mean(1) * weights
    return losses.mean()


def _skipping(side: Side, **options: Any) -> None:
    model = side.shard(Stack(), **options)
    optimizer = sgd(model)
    for step in range(5):
        loss = _weighed(side, model, step)
        if not side.engine or step != 2 or loss.item() != 0:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        side.log_mean("loss", loss)


@case(variants=PLAIN, refuses="all ranks must|no gradients since")
def backward_skipped_by_one_rank(side: Side) -> None:
    """As after a loss that is not finite, or an error that was caught."""
    _skipping(side)


@case(variants=PLAIN, refuses="all ranks must|no gradients since")
def backward_skipped_by_one_rank_in_debug(side: Side) -> None:
    _skipping(side, debug=True)


def _evaluated_alone(side: Side, **options: Any) -> None:
    model = side.shard(Stack(), **options)
    for step in range(4):
        if step and side.rank == 0:
            with torch.no_grad():
                model(side.x())
        train(side, model, start=step, steps=1)


@case(variants=PLAIN, refuses=dict.fromkeys(("zero2", "fsdp", "yafsdp"), "all ranks must"))
def evaluated_by_the_first_rank_alone_in_debug(side: Side) -> None:
    _evaluated_alone(side, debug=True)


@case(variants=EVALUATED)
def experts_by_rank_in_modes_of_their_own(side: Side) -> None:
    """Each expert is a unit, within a layer in another mode, and some ranks do not call it."""
    model = side.shard(
        Mixture(),
        side.x(),
        _choice(side, 0),
        blocks=["layers"],
        policies={"layers.0": refshard.Policy(mode="zero1"), "layers.1": refshard.Policy(mode="replicate")},
    )
    train(
        side,
        model,
        lambda step: mean_square(model(side.x(step), _choice(side, step))),
        optimizer=sgd(model, momentum=0.9, weight_decay=0.1),
        steps=6,
        before_step=lambda _: _log_presence(side, model),
    )
