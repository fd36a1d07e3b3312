"""``refshard fit MODEL CLUSTER``: whether a model fits and how fast it trains: the best of a plan, dry-run."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from refshard.commands.dryrun import Options as DryRunOptions
from refshard.commands.dryrun import dryrun
from refshard.commands.dryrun_model import Training
from refshard.commands.plan import Options, plan
from refshard.commands.printing import check_writable, tell, write_page
from refshard.outside_memory import EXPANDABLE_SEGMENTS
from refshard.quantities import format_seconds
from refshard.report.blocks import Answer, Section, Text, Verdict
from refshard.specs.cluster import load_cluster
from refshard.specs.job import Job


def fit(options: Options, *, html: Path | None = None) -> Answer:
    """The dry run of what the plan says to use, and the command that trains it; the plan's answer if nothing fits.
    ``html`` is a file for a page of everything.

    Raises:
        SpecError: as :func:`refshard.commands.plan.plan`, or the page cannot be written.
        RefshardError: the fake device cannot be made.
    """
    check_writable(html=html)
    planned = plan(options)
    size = planned.data["sizes"][-1]
    if not size["rows"]:
        if html is not None:
            write_page(planned, html, "fit")
        return planned
    best, job = size["rows"][0], msgspec.convert(size["rows"][0]["job"], Job)
    training = training_of(job)
    tell(f"dry run: {job.strategy} on {job.gpus:,} of {job.cluster}")
    name, _, value = EXPANDABLE_SEGMENTS.partition("=")  # which the plan assumes
    found = dryrun(
        DryRunOptions(training=training, cluster=job.cluster, gpus=job.gpus, advise=False, environment={name: value})
    )
    said = [block if isinstance(block, Verdict) else replace(block, where="detail") for block in found.blocks]
    train = f"{EXPANDABLE_SEGMENTS} {shlex.join(train_command(training, job))}"
    use = Verdict(
        sentences=[f"Plan, by closed forms: {planned.data['verdict'][0]}", *beyond(found.data["step_s"], best)],
        style="plain",
    )
    if html is not None:
        assert planned.cover is not None
        assert found.cover is not None
        whole = [use, *found.blocks, Section(title="Train it", id="train", nav="Train it",
                                             blocks=[Text(text=train, style="command")])]  # fmt: skip
        cover = replace(found.cover, title=planned.cover.title)
        write_page(replace(found, blocks=whole, cover=cover), html, "fit")
    more = [Text(text=f"page: {html}")] if html is not None else []
    blocks = [use, *said, Text(text=f"Train it: {train}"), *more]
    return replace(found, data={**found.data, "plan": best, "train": train}, blocks=blocks)


def beyond(step_s: float | None, row: Mapping[str, Any]) -> list[str]:
    """A warning if a dry run's step time lies outside of the range of the plan's ``row``.

    >>> beyond(0.838, {"low_s": 1.02, "high_s": 1.13})  # doctest: +ELLIPSIS
    ["The dry run's step time, 838 ms, lies outside of the plan's range, 1.02 s to 1.13 s. ..."]
    >>> beyond(1.1, {"low_s": 1.02, "high_s": 1.13}), beyond(1.1, {"low_s": None, "high_s": None})
    ([], [])
    """
    low_s, high_s = row["low_s"], row["high_s"]
    if not step_s or low_s is None or low_s <= step_s <= high_s:
        return []
    time, low, high = map(format_seconds, (step_s, low_s, high_s))
    return [
        f"The dry run's step time, {time}, lies outside of the plan's range, {low} to {high}. Plans follow published "
        "runs, most with older software; dry runs follow the kernels of today's torch."
    ]


def training_of(job: Job) -> Training:
    """The training of a planned job, as ``refshard dryrun --model`` has it."""
    named = ("strategy", "model", "seq_len", "microbatches", "precision", "checkpointing")
    given = {key: value for key, value in msgspec.to_builtins(job).items() if key not in ("implementation", *named)}
    others = {key: value for key, value in given.items() if key not in ("gpus", "cluster", "global_batch")}
    return Training(
        **{key: getattr(job, key) for key in named},
        microbatch=job.global_batch // (job.data_ranks * job.microbatches),
        set=tuple(f"{key}={str(value).lower()}" for key, value in others.items()),
    )


def train_command(training: Training, job: Job) -> list[str]:
    """The words of ``refshard run`` that train it on the job's GPUs."""
    options = {key: value for key, value in msgspec.to_builtins(training).items() if key != "set"}
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    several = job.gpus > load_cluster(job.cluster).ranks_per_node
    return [
        "refshard", "run", *words, "--gpus", str(job.gpus), *(word for one in training.set for word in ("--set", one)),
        *(["--launcher", "slurm"] if several else []),
    ]  # fmt: skip
