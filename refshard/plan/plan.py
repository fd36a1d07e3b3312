"""A plan: the best configurations for each size of a cluster, their cost and error bars, and what does not fit.

The error bars say how far published step times lie from their predictions, by kind of configuration. ``python -m
validation.fit --write-spread`` writes them to ``profiles/spread.toml``, from published runs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import sqrt
from typing import Literal, TypeVar

import msgspec
import numpy as np

from refshard import resources
from refshard.flops import CONVENTION, Convention, flops_of
from refshard.plan.estimate import checkpointed_layers
from refshard.plan.memory import PARTS, fixed_segments
from refshard.plan.search import Found
from refshard.plan.space import Candidates
from refshard.specs.choice import OWN, leanest
from refshard.specs.cluster import ClusterSpec
from refshard.specs.counted import AnyModel, CountedModel
from refshard.specs.hardware import HardwareSpec
from refshard.specs.job import Job
from refshard.specs.reading import convert, read_toml

T = TypeVar("T")


class KindSpread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The median absolute error, and the 10th and 90th percentile of published over predicted step time, of published
    runs of ``sources`` that count the same; ``count`` runs were held out of the fit. ``within`` is the median error
    without each source's own: how far configurations on one machine are predicted wrongly relative to each other.
    """

    count: int
    sources: int
    median: float
    within: float
    low: float
    high: float


LEAST_RUNS = 5
"""Fewest runs of a kind that say how far off its predictions are."""


class Spread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """By kind. No kind stands for another."""

    kinds: dict[str, KindSpread]

    def of(self, kind: str) -> KindSpread | None:
        """The figures of a kind; None if fewer than :data:`LEAST_RUNS` runs were published of it."""
        found = self.kinds.get(kind)
        return found if found is not None and found.count >= LEAST_RUNS else None

    def lead(self, kind: str) -> float:
        """The lead that a strategy without any GPU run must have to count, relative to its step time: 9 of 10
        published runs of its kind were slower by less; if its kind is not known, those of all kinds.
        """
        known = {name: one.high for name, one in self.kinds.items() if one.count >= LEAST_RUNS}
        return max(0.0, known.get(kind, max(known.values(), default=1.0)) - 1)

    def why_unknown(self, kind: str) -> str:
        """Why there are no figures of a kind."""
        count = self.kinds[kind].count if kind in self.kinds else 0
        return (
            f"only {count} published run{'s' * (count > 1)} of this kind" if count else "no published run of this kind"
        )

    def bounds(self, kind: str) -> tuple[float, float] | None:
        """Factors from a prediction to its lower and upper bound: at most 1, and at least 1; None if not known."""
        found = self.of(kind)
        return None if found is None else (min(found.low, 1.0), max(found.high, 1.0))


_FAMILIES = {
    (8, 0): "A100", (8, 9): "Ada", (9, 0): "Hopper", (9, 4): "MI300", (10, 0): "Blackwell", (10, 3): "Blackwell",
    (12, 0): "RTX 50",
}  # fmt: skip
"""Families of GPUs that are predicted about equally well, by their compute capability."""
_FEWEST = 100
"""Multiprocessors of a family's GPUs at least: an H20 has 78, and no published run."""


def kind_of(job: Job, model: AnyModel, hardware: HardwareSpec) -> str:
    """The kind of a job: one kind is predicted about equally well. It tells mixtures of experts, the axes that divide
    the model, the precision, the family of GPUs, adapters and frozen parts; modules that are counted are a kind by
    themselves.
    """
    if job.pp > 1:
        divided = "pipeline"
    elif job.tp > 1 or job.cp > 1:
        divided = "tensor or context"
    else:
        divided = "data"
    known = _FAMILIES.get(hardware.capability) if hardware.multiprocessors >= _FEWEST else None
    family = known or hardware.device_name or hardware.device.upper()
    tuning = "" if job.tuning == "full" else f", {job.tuning}"
    tuning += ", frozen parts" if job.frozen else ""
    kind = "operators counted" if isinstance(model, CountedModel) else "experts" if model.experts else "dense"
    return f"{kind}, {divided} parallel, {job.precision}, {family}{tuning}"


def load_spread() -> Spread:
    """The figures that ship with refshard.

    Raises:
        SpecError: the file breaks its schema.
    """
    return convert(read_toml(resources.spread()), Spread, where="spread")


TRILLION = 10**12
HOUR = 3600.0
TIME_PARTS = ("compute", "exchange", "waiting", "optimizer", "straggling")
SLOW, LESS = 1.5, 0.9
"""The Pareto front ends at this many times the shortest step; each point needs at most this part of the last one's
memory."""
_FAMILY = ("strategy", "tp", "cp", "pp", "schedule", "precision", "compiled")
"""Configurations that differ in none of these are variants; a plan lists the best of them. On one GPU, that has
nothing else to choose, they also differ in their microbatch."""

VARIANTS = ("precision", "compiled")
"""Fields of a configuration that say how a rank computes its part, not which part it has."""


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """How often GPUs fail and what that costs: ``mtbf_hours`` of one GPU, and seconds to save a checkpoint and to
    restart a job.

    By default as in the training of Llama 3 405B: 419 unexpected interruptions in 54 days of 16,384 GPUs (Grattafiori
    et al., "The Llama 3 Herd of Models", 2024, section 3.3.4). The two times are estimates.
    """

    mtbf_hours: float = 50_700.0
    save_s: float = 60.0
    restart_s: float = 600.0

    def goodput(self, ranks: int) -> float:
        """The part of the time that goes into steps which count, with checkpoints as often as is best: every
        ``sqrt(2 * save * mtbf)`` seconds (Young, "A first order approximation to the optimum checkpoint interval",
        1974). 0 if failures are too frequent for any progress.
        """
        between_s = self.mtbf_hours * HOUR / ranks
        interval_s = sqrt(2 * self.save_s * between_s)
        lost = self.save_s / interval_s + (interval_s / 2 + self.restart_s) / between_s
        return max(0.0, 1 - lost)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration on one cluster size.

    ``low_s`` and ``high_s`` bound 8 of 10 published step times of this ``kind`` around their predictions; None if too
    few are published. ``parts`` are
    the step's seconds, ``memory`` the peak's bytes on the rank that needs most, of the ``usable_bytes`` that torch's
    allocator can reserve. ``checkpointed`` of its ``layers``
    layers recompute. ``gpu_hours`` and ``cost_usd`` are those of a trillion tokens, at ``goodput``.

    ``fixed_segments`` is how much more memory its kind needs at most without
    :data:`~refshard.outside_memory.EXPANDABLE_SEGMENTS`, as a fraction.

    If the real code was dry-run, ``dry_step_s`` is its step time and ``reserved_bytes`` what the caching allocator
    reserved, and speed and cost follow from these; ``not_dry`` says why it was not.
    """

    job: Job
    fits: bool
    kind: str
    step_s: float
    low_s: float | None
    high_s: float | None
    tokens_per_s_gpu: float
    tflops: float
    mfu: float
    parts: dict[str, float]
    peak_bytes: int
    usable_bytes: int
    memory: dict[str, int]
    checkpointed: int
    layers: int
    goodput: float
    gpu_hours: float
    cost_usd: float
    flops_convention: Convention | Literal["counted"] = CONVENTION
    fixed_segments: float = 0.0
    dry_step_s: float | None = None
    reserved_bytes: int | None = None
    not_dry: str = ""

    @property
    def variants(self) -> dict[str, object]:
        """The values of :data:`VARIANTS`."""
        return {"precision": self.job.precision, "compiled": self.job.implementation.compiled}

    @property
    def time_s(self) -> float:
        """The step time to rank by: of the dry run if there is one."""
        return self.dry_step_s or self.step_s

    @property
    def memory_bytes(self) -> int:
        """Reserved by the dry run if there is one, else allocated in closed form."""
        return self.reserved_bytes or self.peak_bytes

    @property
    def headroom_bytes(self) -> int:
        """What is left of the usable memory at the peak; below 0 if it does not fit."""
        return self.usable_bytes - self.memory_bytes

    def same_mesh(self, other: "Row") -> bool:
        """Whether the two differ in their strategies alone."""
        jobs = (msgspec.structs.asdict(row.job) | {"strategy": "", "implementation": None} for row in (self, other))
        return next(jobs) == next(jobs) and self.variants == other.variants

    def dried(self, step_s: float, allocated_bytes: int, reserved_bytes: int) -> "Row":
        """This row by a dry run. An allocator with nothing left to reserve gives back what it does not use."""
        usable_bytes = self.usable_bytes
        times = step_s / self.step_s
        return msgspec.structs.replace(
            self, dry_step_s=step_s, fits=allocated_bytes <= usable_bytes,
            reserved_bytes=reserved_bytes if allocated_bytes > usable_bytes else min(reserved_bytes, usable_bytes),
            low_s=None if self.low_s is None else self.low_s * times,
            high_s=None if self.high_s is None else self.high_s * times, tokens_per_s_gpu=self.tokens_per_s_gpu / times,
            tflops=self.tflops / times, mfu=self.mfu / times, gpu_hours=self.gpu_hours * times,
            cost_usd=self.cost_usd * times,
        )  # fmt: skip


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for one number of ranks: how many configurations were ``considered`` and how many are ``fitting``;
    the best rows, the Pareto front of step time and memory, and the rows that come closest to fitting.
    """

    gpus: int
    considered: int
    fitting: int
    rows: tuple[Row, ...]
    front: tuple[Row, ...]
    unfit: tuple[Row, ...]

    @property
    def usable_bytes(self) -> int:
        """The least that any of its rows can reserve; 0 without one."""
        return min((row.usable_bytes for row in (*self.rows, *self.unfit)), default=0)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for each size, in ascending order; memory is in bytes of one rank, the price in USD per
    GPU-hour. ``varied`` names the :data:`VARIANTS` with several values tried.
    """

    sizes: tuple[Size, ...]
    global_batch: int
    seq_len: int
    available_bytes: int
    price_usd: float
    failures: Failures
    varied: tuple[str, ...] = ()

    @property
    def largest(self) -> Size:
        """The size with most ranks."""
        return self.sizes[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Makes rows of a search's columns."""

    model: AnyModel
    cluster: ClusterSpec
    seq_len: int
    price_usd: float
    failures: Failures
    spread: Spread

    def size(self, found: Found, most: int) -> Size:
        """Read the best ``most`` families, the front, and the least memory of each strategy that does not fit."""
        candidates = found.estimates.candidates
        family = _FAMILY if candidates["gpus"][0] > 1 else (*_FAMILY, "microbatch")
        best = _firsts(candidates, family, found.order)
        strategies = candidates["strategy"]
        left = np.flatnonzero(~found.fits & ~np.isin(strategies, strategies[found.fits]))
        smallest = left[np.argsort(found.estimates.memory.peak[left], kind="stable")]
        closest = _firsts(candidates, ("strategy",), smallest)
        front = _front(found)
        return Size(
            gpus=int(candidates["gpus"][0]),
            considered=len(candidates), fitting=int(found.fits.sum()),
            rows=_settled([self.row(found, place) for place in best[:most]], self.spread),
            front=tuple(self.row(found, place) for place in front),
            unfit=tuple(self.row(found, place) for place in closest[:most]),
        )  # fmt: skip

    def row(self, found: Found, place: int) -> Row:
        """One configuration's row."""
        estimates = found.estimates
        job, step_s = estimates.candidates.job(place), float(estimates.step_s[place])
        speed = float(found.tokens_per_s_gpu[place])
        model = self.model
        convention: Convention | Literal["counted"]
        if isinstance(model, CountedModel):
            convention, each = "counted", model.flops_per_token
        else:
            convention, each = CONVENTION, flops_of(job, model)
        flops = speed * each
        kind = kind_of(job, self.model, self.cluster.accelerator)
        bounds = self.spread.bounds(kind)
        goodput = self.failures.goodput(job.gpus)
        hours = TRILLION / speed / HOUR / goodput if goodput else float("inf")
        precision = job.precision if job.precision in self.cluster.accelerator.matmul else "bf16"
        layers = -(-self.model.n_layers // job.pp)
        return Row(
            job=job, fits=bool(found.fits[place]), kind=kind, step_s=step_s,
            low_s=step_s * bounds[0] if bounds else None, high_s=step_s * bounds[1] if bounds else None,
            tokens_per_s_gpu=speed, tflops=flops / 1e12,
            mfu=flops / self.cluster.accelerator.matmul[precision].peak,
            parts={part: float(getattr(estimates, f"{part}_s")[place]) for part in TIME_PARTS},
            peak_bytes=int(estimates.memory.peak[place]), usable_bytes=int(found.usable_bytes[place]),
            memory={part: int(getattr(estimates.memory, part)[place]) for part in PARTS},
            checkpointed=checkpointed_layers(job.checkpointing, layers), layers=layers, goodput=goodput,
            gpu_hours=hours, cost_usd=hours * self.price_usd, flops_convention=convention,
            fixed_segments=fixed_segments(job, self.model) if self.cluster.accelerator.device == "cuda" else 0.0,
        )  # fmt: skip


def _firsts(candidates: Candidates, fields: Sequence[str], order: Iterable[int]) -> list[int]:
    """The first, in order, of each combination of the fields' values."""
    columns = [candidates[field].tolist() for field in fields]
    seen: set[tuple[int, ...]] = set()
    firsts = []
    for place in map(int, order):
        values = tuple(column[place] for column in columns)
        if values not in seen:
            seen.add(values)
            firsts.append(place)
    return firsts


def _settled(rows: Sequence[Row], spread: Spread) -> tuple[Row, ...]:
    """The rows, the one to use first, then the fastest. That is the fastest one; but where one of this project's own
    engine leads by less than the model's error, the fastest that others have measured on GPUs, since no GPU has shown
    such a lead. Of strategies that tie with it on the same mesh, memory decides.
    """
    if not rows:
        return ()
    first = rows[0]
    if first.job.strategy.startswith(OWN):
        most = first.time_s * (1 + spread.lead(first.kind))
        first = next((row for row in rows if row.time_s <= most and not row.job.strategy.startswith(OWN)), first)
    error = spread.of(first.kind)
    most = first.time_s * (1 + error.within if error else 1)
    others = (row for row in rows if row is not first and row.time_s <= most and row.same_mesh(first))
    best = leanest([first, *others], lambda row: row.memory_bytes, lambda row: row.job.strategy)
    return (best, *(row for row in rows if row is not best))


def _front(found: Found) -> list[int]:
    """The Pareto front of time and memory, without rows that are much slower than the fastest."""
    peak, step_s = found.estimates.memory.peak, found.estimates.step_s
    near = takewhile(lambda place: step_s[place] <= SLOW * step_s[found.order[0]], map(int, found.order))
    return _with_less_memory(near, lambda place: float(peak[place]))


def _with_less_memory(fastest_first: Iterable[T], memory: Callable[[T], float]) -> list[T]:
    """Those with relevantly less memory than the last one before them."""
    front: list[T] = []
    for one in fastest_first:
        if not front or memory(one) < LESS * memory(front[-1]):
            front.append(one)
    return front


def with_dry_rows(size: Size, rows: Sequence[Row], spread: Spread) -> Size:
    """The size with these rows instead of its own: dry-run ones by their dry run, then those in closed form only. Dry
    runs that do not fit join those out of memory, and the Pareto front is by dry run where there is one.
    """
    dry = sorted((row for row in rows if row.dry_step_s and row.fits), key=lambda row: row.time_s)
    closed = [row for row in rows if not row.dry_step_s]
    unfit, jobs = [row for row in rows if not row.fits], {row.job for row in rows}
    by_time = sorted((*dry, *closed, *(row for row in size.front if row.job not in jobs)), key=lambda row: row.time_s)
    front = tuple(_with_less_memory(by_time, lambda row: row.memory_bytes))
    return msgspec.structs.replace(
        size, rows=(*_settled(dry, spread), *closed), front=front, unfit=(*unfit, *size.unfit)
    )


def ranked(rows: Sequence[Row], spread: Spread) -> tuple[list[Row], Row | None]:
    """The rows that tie with the first, because their time is within the median error of its kind, and the next one.
    A row ties only if the errors of its kind and of the first's are known.

    If the first was dry-run, rows in closed form only are left out.
    """
    best = rows[0]
    others = [row for row in rows[1:] if row.dry_step_s or not best.dry_step_s]
    error = spread.of(best.kind)
    most = best.time_s * (1 + error.within) if error else 0.0
    tied = [row for row in others if row.time_s <= most and spread.of(row.kind)]
    return tied, next((row for row in others if row not in tied), None)


def listed(rows: Sequence[Row], most: int, varied: Sequence[str], spread: Spread) -> list[int]:
    """Places of the rows to show: the first ``most``, the first that does not tie with the best, and the best in each
    of the values that are ``varied``.
    """
    if not rows:
        return []
    _, after = ranked(rows, spread)
    firsts: dict[object, int] = {"after": rows.index(after)} if after is not None else {}
    for place, row in enumerate(rows):
        firsts.setdefault(tuple(row.variants[field] for field in varied), place)
    return sorted({*range(min(most, len(rows))), *firsts.values()})


def fastest(plan: Plan) -> Row | None:
    """The row with the shortest step on the largest size that has one."""
    return next((size.rows[0] for size in reversed(plan.sizes) if size.rows), None)


def cheapest(plan: Plan) -> Row | None:
    """The row with the lowest cost of a token, of all sizes."""
    rows = [size.rows[0] for size in plan.sizes if size.rows]
    return min(rows, key=lambda row: row.gpu_hours) if rows else None
