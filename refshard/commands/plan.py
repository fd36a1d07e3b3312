"""``refshard plan``: the best ways to train a model on a cluster, found by closed forms."""

import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from refshard import resources
from refshard.commands.plan_asked import Asked, global_batch_of, sized, space_of, strategies_of, varied_fields
from refshard.commands.printing import tell
from refshard.emit.job import Emitted
from refshard.emit.job import Job as EmitJob
from refshard.emit.table import POLICIES, RUNS, TOOLS, emit
from refshard.errors import SpecError, nearest
from refshard.estimate.limits import usable
from refshard.estimate.plan import Failures, Plan, Reader, Row, Size, listed, with_dry_rows
from refshard.estimate.search import search
from refshard.estimate.space import configurations
from refshard.estimate.spread import load_spread
from refshard.folders import replace_file
from refshard.report.blocks import Answer, Text
from refshard.report.plan.table import plan_answer
from refshard.report.plan.words import short_words
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.model import ModelSpec, is_factory, load_model

if TYPE_CHECKING:
    from refshard.measure.dry.proxies import Extrapolated

DRY_RUNS, DRY_RUN_S, DRY_RUNS_S = 4, 120.0, 60.0
"""Configurations that ``--search`` dry-runs by default, how long each of the first may take, and for how long more of
them are dry-run where some do not fit."""
MOST_READ = 2000
"""Configurations, the best first, among which those are sought that are shown, that a tool can run, or a dry run."""


def plan(asked: Asked, *, page: Path | None = None, tool: str | None = None, out: Path | None = None) -> Answer:
    """Search for each size of the cluster; the status is 1 if nothing fits.

    ``page`` is an HTML file to write. ``tool`` is whose configuration to write to the folder ``out`` for the first row.

    Raises:
        SpecError: the model, the cluster, a strategy or another value does not exist, or they do not fit each other.
    """
    if page is not None and page.is_dir():
        raise SpecError(f"html: {page} is a folder; name the file to write")
    model, cluster, spread = _model(asked.model), load_cluster(asked.cluster), load_spread()
    sizes = sized(asked.nodes, cluster)
    failures = Failures(mtbf_hours=asked.mtbf_hours)
    asked = _for_tool(asked, tool)
    count, varied = _dry_runs(asked, cluster), varied_fields(asked, cluster)
    made = [_size(asked, model, on, failures) for on in sizes]
    if count:
        made[-1] = _with_dry_runs(made[-1], asked, model, sizes[-1], count)
    found = Plan(
        sizes=tuple(_shown(size, asked.top + count, varied) for size in made),
        global_batch=global_batch_of(asked, model, sizes[-1]), seq_len=asked.seq_len,
        available_bytes=cluster.accelerator.memory_bytes, usable_bytes=usable(cluster.accelerator),
        price_usd=asked.price_usd, failures=failures, varied=varied,
    )  # fmt: skip
    title = _title(asked, found)
    if page is not None:
        _write_page(found, title, page)
    answer = plan_answer(found, spread, title, model=asked.model, cluster=asked.cluster)
    if tool is not None:
        rows = [row for size in reversed(made) for row in size.rows]
        text = _emitted(tool, asked, model, cluster, rows, out or Path("runs") / "emitted" / tool)
        answer = replace(answer, blocks=[*answer.blocks, Text(text=text)])
    return answer


def _model(name: str) -> ModelSpec:
    if not is_factory(name):
        return load_model(name)
    from refshard.models.dimensions import read_dimensions  # torch takes seconds to import

    return read_dimensions(name)


def _for_tool(asked: Asked, tool: str | None) -> Asked:
    """What is asked for, with the tool's strategies and checkpointing policies unless some are named.

    Raises:
        SpecError: there is no such tool.
    """
    if tool is None:
        return asked
    if tool not in TOOLS:
        raise SpecError(f"emit: no tool '{tool}'; {nearest(tool, list(TOOLS))}")
    if asked.strategies is None:
        runs = [name for name in strategies_of(asked) if name in RUNS.get(tool, (name,))]
        asked = msgspec.structs.replace(asked, strategies=",".join(runs) or None)
    if asked.checkpoint is None and tool in POLICIES:
        asked = msgspec.structs.replace(asked, checkpoint=",".join(POLICIES[tool]))
    return asked


def _size(asked: Asked, model: ModelSpec, cluster: ClusterSpec, failures: Failures) -> Size:
    space = space_of(asked, model, cluster)
    candidates = configurations(space, model, cluster, asked.seq_len)
    if not len(candidates):
        return Size(world_size=cluster.world_size, considered=0, fitting=0, rows=(), front=(), unfit=())
    found = search(model, cluster, asked.seq_len, candidates, usable(cluster.accelerator))
    reader = Reader(
        model=model, cluster=cluster, seq_len=asked.seq_len, price_usd=asked.price_usd, failures=failures,
        spread=load_spread(),
    )  # fmt: skip
    return reader.size(found, MOST_READ)


def _shown(size: Size, most: int, varied: Sequence[str]) -> Size:
    rows = tuple(size.rows[place] for place in listed(size.rows, most, varied, load_spread()))
    return msgspec.structs.replace(size, rows=rows, unfit=size.unfit[:most])


def _dry_runs(asked: Asked, cluster: ClusterSpec) -> int:
    """How many configurations to dry-run: with ``search`` some by default, where the fake device can be made."""
    hardware = cluster.accelerator
    if asked.dry_runs is not None:
        return asked.dry_runs
    return DRY_RUNS if asked.search and hardware.device == "cuda" and hardware.device_name else 0


def _with_dry_runs(size: Size, asked: Asked, model: ModelSpec, cluster: ClusterSpec, count: int) -> Size:
    """The size with its first ``count`` rows that can be dry-run and fit, and how their closed forms compare."""
    from refshard.fakecuda.build import extension
    from refshard.measure.dry.many import dry_run_many
    from refshard.measure.dry.proxies import Extrapolated, Setting
    from refshard.measure.dry.rounds import Rounds, dry_run_rounds

    extension()  # builds the fake device if there is none
    name = asked.cluster if cluster == load_cluster(asked.cluster) else f"{_profile(asked.cluster)}x{cluster.nodes}"
    setting = Setting(model=model, cluster=cluster, cluster_name=name, seq_len=asked.seq_len)
    rounds = Rounds(
        count=count, usable_bytes=usable(cluster.accelerator), each_s=DRY_RUN_S, all_s=DRY_RUNS_S
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="refshard-plan-") as made:
        run = partial(dry_run_many, on_progress=tell)
        configurations, step_s = [row.configuration for row in size.rows], [row.step_s for row in size.rows]
        found = dry_run_rounds(configurations, step_s, setting, Path(made), rounds, run)
    ran = [place for place, one in found.items() if isinstance(one, Extrapolated)]
    kept = sorted({*range(min(asked.top, len(size.rows))), *ran})
    return with_dry_rows(size, [_dried(size.rows[place], found.get(place), rounds.usable_bytes) for place in kept])


def _profile(cluster: str) -> str:
    """A cluster's name without its number of nodes."""
    return cluster if cluster in resources.cluster_profiles() else re.sub(r"x\d{1,7}$", "", cluster)


def _dried(row: Row, found: "Extrapolated | str | None", usable_bytes: int) -> Row:
    """The row by its dry run, or with the reason why it has none."""
    if found is None:
        return msgspec.structs.replace(row, not_dry="not among the first; raise --dry-runs")
    if isinstance(found, str):
        return msgspec.structs.replace(row, not_dry=found)
    return row.dried(found.step_s, found.allocated_bytes, found.reserved_bytes, usable_bytes)


def _title(asked: Asked, found: Plan) -> str:
    tokens = found.global_batch * found.seq_len
    return (
        f"{asked.model} on {asked.cluster}: {found.global_batch:,} sequences of {found.seq_len:,} tokens a step "
        f"({tokens:,} tokens)"
    )


def _emitted(tool: str, asked: Asked, model: ModelSpec, cluster: ClusterSpec, rows: Sequence[Row], folder: Path) -> str:
    """Write the first configuration that the tool can run; returns what to do with it, in words.

    Raises:
        SpecError: the tool can run none of them; the message is about the first.
    """
    refused: SpecError | None = None
    for row in rows:
        job = EmitJob(
            configuration=row.configuration, model=model, model_name=asked.model, cluster=cluster,
            cluster_name=asked.cluster, seq_len=asked.seq_len,
        )  # fmt: skip
        try:
            return _written(
                tool, emit(tool, job), short_words(row.configuration, varied_fields(asked, cluster)), folder
            )
        except SpecError as error:
            refused = refused or error
    raise refused or SpecError(f"emit: no configuration fits, so there is nothing to write for {tool}; change the plan")


def _written(tool: str, emitted: Emitted, what: str, folder: Path) -> str:
    """Write the tool's files of ``what``; returns what to do with them, in words."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in emitted.files.items():
            replace_file(folder / name, [text])
    except OSError as error:
        raise SpecError(f"out: {folder} cannot be written ({error.strerror}); name a writable folder") from None
    files = ", ".join(str(folder / name) for name in emitted.files)
    notes = "".join(f"\n* {note}" for note in emitted.notes)
    return f"Written for {tool} {emitted.version}: {files} ({what}). Start it with:\n{emitted.command}{notes}"


def _write_page(found: Plan, title: str, path: Path) -> None:
    from refshard.report.plan.page import page  # pandas takes longer to import than a plan takes

    try:
        replace_file(path, page(found, load_spread(), title, shlex.join(["refshard", *sys.argv[1:]])))
    except OSError as error:
        raise SpecError(
            f"html: {path} cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from None
