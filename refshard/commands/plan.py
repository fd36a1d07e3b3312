"""``refshard plan``: what every strategy would take on a cluster, simulated."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec

from refshard.errors import SpecError
from refshard.folders import replace_file
from refshard.plan.checkpointing import checkpointing_of
from refshard.plan.recipe import RECIPES, Recipe, find_recipe, no_closed_form
from refshard.report.answer import Answer
from refshard.report.plan.table import plan_answer
from refshard.simulate.forecast import Job, simulate
from refshard.simulate.ranking import Checkpoint, Plan, rank_strategies
from refshard.simulate.trace import as_kineto
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.hardware import Dtype
from refshard.specs.model import ModelSpec, load_model
from refshard.specs.reading import within
from refshard.strategies import check_name

MOST_MICROBATCHES = 256
"""Each is simulated."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, as the command line has it."""

    model: str
    cluster: str
    seq_len: int
    microbatch: int
    accumulate: int
    strategies: str | None
    checkpoint: str
    checkpoint_layers: int | None
    replicas: int
    dtype: str | None
    reduction: str
    compiled: bool
    price_usd: float

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            SpecError: one is out of range.
        """
        try:
            for field in ("seq_len", "microbatch", "replicas"):
                within(field, getattr(self, field), 1)
            within("accumulate", self.accumulate, 1, most=MOST_MICROBATCHES)
        except ValueError as error:
            raise SpecError(str(error)) from None
        if not 0 <= self.price_usd < float("inf"):
            raise SpecError(f"price must be >= 0 USD per GPU-hour, and finite, got {self.price_usd}")


def plan(asked: Asked, *, page: Path | None = None, traces: Path | None = None) -> Answer:
    """Forecast the strategies asked for; the status is 1 if none fits.

    ``page`` is an HTML file to write, ``traces`` a folder to write a trace of each simulated step to.

    Raises:
        SpecError: the model, the cluster, a strategy or another value does not exist, or they do not fit each other.
    """
    if page is not None and page.is_dir():
        raise SpecError(f"html: {page} is a folder; name the file to write")
    model, cluster = load_model(asked.model), load_cluster(asked.cluster)
    job = Job(
        model=model,
        cluster=cluster,
        seq_len=asked.seq_len,
        sequences=asked.microbatch,
        microbatches=asked.accumulate,
        dtype=_dtype_of(asked, cluster),
        reduction=_known_dtype("reduction", asked.reduction),
        replicas=asked.replicas,
        compiled=asked.compiled,
    )
    recipes, unplanned = _chosen(asked.strategies)
    found = rank_strategies(job, recipes, _checkpoint(asked, model), asked.price_usd)
    found = msgspec.structs.replace(found, unplanned=unplanned)
    if traces is not None:
        _write_traces(job, found, traces, asked)
    title = _title(asked, job)
    if page is not None:
        _write_page(found, job, title, page)
    return plan_answer(found, job, title, model=asked.model, cluster=asked.cluster)


def _name_of(model: str) -> str:
    """A preset's own name, or a file's without its folder and ending."""
    return Path(model).stem if model.endswith((".toml", ".json")) else Path(model).name


def _chosen(given: str | None) -> tuple[list[Recipe], tuple[str, ...]]:
    """The recipes of the strategies asked for, and the names of those that have none.

    Raises:
        SpecError: a strategy does not exist, or none of them has a recipe.
    """
    if given is None:
        return list(RECIPES.values()), ()
    names = dict.fromkeys(name.strip() for name in given.split(",") if name.strip())
    if not names:
        raise SpecError(f"strategy: no name in {given!r}; separate names by commas, or leave the option out")
    for name in names:
        check_name(name)
    without = tuple(name for name in names if name not in RECIPES)
    known = [RECIPES[name] for name in names if name in RECIPES]
    if not known:
        raise SpecError(f"strategy: {no_closed_form(without[0])}")
    return known, without


def _checkpoint(asked: Asked, model: ModelSpec) -> Checkpoint:
    layers, policy = asked.checkpoint_layers, asked.checkpoint
    if layers is not None and policy != "auto":
        raise SpecError(f"checkpoint-layers and checkpoint both name layers, got {layers} and '{policy}'; give one")
    if layers is None and policy == "auto":
        return "auto"
    if layers is None and not re.fullmatch(r"none|full|selective|every-\d+", policy):
        raise SpecError(
            f"checkpoint must be auto, none, full, selective or every-K, got '{policy}'; for a number of layers give "
            "--checkpoint-layers"
        )
    return checkpointing_of(policy if layers is None else layers, model.n_layers)


def _dtype_of(asked: Asked, cluster: ClusterSpec) -> Dtype:
    """The dtype asked for; else bf16 on an accelerator, fp32 on a CPU."""
    if asked.dtype is not None:
        return _known_dtype("dtype", asked.dtype)
    return "bf16" if cluster.accelerator.device == "cuda" else "fp32"


def _known_dtype(field: str, given: str) -> Dtype:
    known: tuple[Dtype, ...] = get_args(Dtype)
    for dtype in known:
        if dtype == given:
            return dtype
    raise SpecError(f"{field} must be {' or '.join(known)}, got '{given}'; choose one of them")


def _title(asked: Asked, job: Job) -> str:
    ranks = job.cluster.world_size
    tokens: Any = f"{job.microbatches} x {job.sequences}" if job.microbatches > 1 else job.sequences
    hybrid = f", {job.replicas} replicas of {ranks // job.replicas} shards" if job.replicas > 1 else ""
    sequences = "sequence" if tokens == 1 else "sequences"
    return (
        f"{asked.model} on {asked.cluster}: {ranks:,} ranks, {tokens} {sequences} of {job.seq_len} tokens each{hybrid}"
    )


def _write_page(found: Plan, job: Job, title: str, path: Path) -> None:
    from refshard.report.plan.page import page  # pandas takes longer to import than a plan takes

    try:
        replace_file(path, page(found, job, title, shlex.join(["refshard", *sys.argv[1:]])))
    except OSError as error:
        raise SpecError(
            f"html: {path} cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from None


def _write_traces(job: Job, found: Plan, folder: Path, asked: Asked) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for row in found.rows:
            run = simulate(job, find_recipe(row.strategy), row.checkpointing)
            text = as_kineto(run.items, run.times, job.cluster)
            replace_file(folder / f"{row.strategy}-{_name_of(asked.model)}.json", [text])
    except OSError as error:
        raise SpecError(f"trace: {folder} cannot be written ({error.strerror}); name a writable folder") from None
