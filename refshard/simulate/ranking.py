"""Every strategy's forecast for one job, ranked: what fits goes first, then what takes least time."""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from refshard.plan.recipe import Recipe
from refshard.simulate.forecast import Job, StepForecast, forecast_step
from refshard.simulate.memory import MemoryForecast, fits, forecast_memory

Checkpoint = Literal["auto"] | frozenset[int]
"""The layers (from 0) that are checkpointed, or as few as fit."""
TRILLION = 10**12
HOUR = 3600.0


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy. ``checkpointed`` layers, from the first on, keep their input only.

    ``gpu_hours`` and ``cost_usd`` are those of a trillion tokens.
    """

    strategy: str
    fits: bool
    checkpointed: int
    step: StepForecast
    memory: MemoryForecast
    gpu_hours: float
    cost_usd: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Every strategy's row, best first; ``available_bytes`` is the memory of each rank."""

    rows: tuple[PlanRow, ...]
    world_size: int
    available_bytes: int
    price_usd: float


def rank_strategies(job: Job, recipes: Sequence[Recipe], checkpoint: Checkpoint, price_usd: float) -> Plan:
    """Forecast every recipe; ``price_usd`` is that of a GPU and hour."""
    rows = [_row(job, recipe, checkpoint, price_usd) for recipe in recipes]
    return Plan(
        rows=tuple(sorted(rows, key=lambda row: (not row.fits, row.step.step_time_s if row.fits else row.memory.peak))),
        world_size=job.cluster.world_size,
        available_bytes=job.cluster.accelerator.memory_bytes,
        price_usd=price_usd,
    )


def _row(job: Job, recipe: Recipe, checkpoint: Checkpoint, price_usd: float) -> PlanRow:
    available = job.cluster.accelerator.memory_bytes
    if checkpoint == "auto":
        layers = fewest(job.model.n_layers, lambda n: fits(_memory(job, recipe, n), available))
        checkpointed = frozenset(range(layers))
    else:
        checkpointed = checkpoint
    memory = forecast_memory(job, recipe, checkpointed)
    step = forecast_step(job, recipe, checkpointed)
    hours = TRILLION / step.tokens_per_s_gpu / HOUR
    return PlanRow(
        strategy=recipe.name,
        fits=fits(memory, available),
        checkpointed=len(checkpointed),
        step=step,
        memory=memory,
        gpu_hours=hours,
        cost_usd=hours * price_usd,
    )


def _memory(job: Job, recipe: Recipe, layers: int) -> MemoryForecast:
    return forecast_memory(job, recipe, frozenset(range(layers)))


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
