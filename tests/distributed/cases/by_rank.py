"""Ranks that use different parts of a model: experts, heads, blocks.

The rows say which part they use, so that the bare side, which has all rows, uses all parts: with two ranks, the first
rank has rows 0 to 2 and the second has rows 3 to 5.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.distributed.cases.case import EVALUATED, PLAIN, case
from tests.distributed.cases.models import Block, Checkpointing, Stack, mean_square, sgd, train
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
