"""Every strategy's forecast for one job, ranked: what fits goes first, then what takes least time."""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from refshard.plan.checkpointing import Checkpointing
from refshard.plan.recipe import Recipe
from refshard.simulate.forecast import Job, StepForecast, forecast_step
from refshard.simulate.memory import MemoryForecast, forecast_memory, usable

Checkpoint = Literal["auto"] | Checkpointing
"""Which layers are checkpointed, or as few as fit."""
TRILLION = 10**12
HOUR = 3600.0


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy, whether it shards anything, and what of the model's ``layers`` recomputes.

    ``gpu_hours`` and ``cost_usd`` are those of a trillion tokens.
    """

    strategy: str
    sharded: bool
    layers: int
    fits: bool
    checkpointing: Checkpointing
    step: StepForecast
    memory: MemoryForecast
    gpu_hours: float
    cost_usd: float

    @property
    def checkpointed(self) -> int:
        """How many layers recompute."""
        return len(self.checkpointing.layers)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Every strategy's row, best first; ``available_bytes`` is the memory of each rank, ``usable_bytes`` what of it
    tensors can fill. ``unplanned`` are strategies that were asked for and have no recipe.
    """

    rows: tuple[PlanRow, ...]
    world_size: int
    available_bytes: int
    usable_bytes: int
    price_usd: float
    unplanned: tuple[str, ...] = ()


def rank_strategies(job: Job, recipes: Sequence[Recipe], checkpoint: Checkpoint, price_usd: float) -> Plan:
    """Forecast every recipe; ``price_usd`` is that of a GPU and hour."""
    rows = [_row(job, recipe, checkpoint, price_usd) for recipe in recipes]
    return Plan(
        rows=tuple(sorted(rows, key=lambda row: (not row.fits, row.step.step_time_s if row.fits else row.memory.peak))),
        world_size=job.cluster.world_size,
        available_bytes=job.cluster.accelerator.memory_bytes,
        usable_bytes=usable(job.cluster.accelerator),
        price_usd=price_usd,
    )


def _row(job: Job, recipe: Recipe, checkpoint: Checkpoint, price_usd: float) -> PlanRow:
    limit = usable(job.cluster.accelerator)
    if checkpoint == "auto":
        checkpoint = _first(fewest(job.model.n_layers, lambda n: forecast_memory(job, recipe, _first(n)).peak <= limit))
    memory = forecast_memory(job, recipe, checkpoint)
    step = forecast_step(job, recipe, checkpoint)
    hours = TRILLION / step.tokens_per_s_gpu / HOUR
    return PlanRow(
        strategy=recipe.name,
        sharded=recipe.mode.optimizer == "shard",
        layers=job.model.n_layers,
        fits=memory.peak <= limit,
        checkpointing=checkpoint,
        step=step,
        memory=memory,
        gpu_hours=hours,
        cost_usd=hours * price_usd,
    )


def _first(layers: int) -> Checkpointing:
    return Checkpointing(frozenset(range(layers)))


def fewest(most: int, enough: Callable[[int], bool]) -> int:
    """The least n from 0 to ``most`` for which ``enough(n)``, which holds from some n on; ``most`` if for none.

    >>> fewest(80, lambda n: n >= 10), fewest(80, lambda n: False)
    (10, 80)
    """
    low, high = 0, most
    while low < high:
        middle = 0 if (low, high) == (0, most) else (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low
