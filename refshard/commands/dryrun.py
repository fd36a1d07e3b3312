"""``refshard dryrun``: run a training script on GPUs that are not here, and say what would happen there."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from refshard.dryrun.analyse import Analysis, analyse
from refshard.dryrun.command_line import TrainingCommand, read_command
from refshard.dryrun.overheads import overheads
from refshard.dryrun.request import Request
from refshard.dryrun.run import dry_run
from refshard.errors import SpecError
from refshard.folders import replace_file
from refshard.report.answer import Answer
from refshard.report.dryrun.words import dryrun_blocks, sentences
from refshard.report.trace.terminal import as_objects
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.tracing.files.writer import as_kineto


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, as the command line has it. ``tokens_per_step`` are those of all ranks."""

    words: tuple[str, ...]
    cluster: str
    world_size: int | None = None
    rank: int = 0
    steps: int = 3
    tokens_per_step: int | None = None
    races: bool = False


def dryrun(asked: Asked, *, trace: Path | None = None, html: Path | None = None) -> Answer:
    """Run the script that the words name; the status is 0 if it fits, 1 if it does not, failed or, where races were
    asked for, has some.

    ``trace`` is a file to write the replayed steps to, as a Kineto trace; ``html`` one for a page of everything.

    Raises:
        SpecError: the command, the cluster or another value is wrong, or the trace or the page cannot be written.
        RefshardError: the fake device cannot be made.
    """
    for option, path in (("trace", trace), ("html", html)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise SpecError(f"{option}: {path} cannot be written; name a file in a folder that exists")
    command, whole = read_command(asked.words), load_cluster(asked.cluster)
    cluster = whole.of_world_size(_world_size(asked, command, whole))
    try:
        request = _request(asked, command, cluster)
    except ValueError as error:
        raise SpecError(f"dryrun: {error}") from None
    found = analyse(dry_run(request), cluster, global_tokens=asked.tokens_per_step, races=asked.races)
    if trace is not None:
        replace_file(trace, [as_kineto(found.trace)])
    if html is not None:
        _write_page(found, html)
    data = as_object(found)
    return Answer(
        data=data,
        rows=[{key: value for key, value in data.items() if not isinstance(value, (dict, list))}],
        blocks=dryrun_blocks(found, f"page: {html}" if html is not None else ""),
        status=0 if found.fits and found.run.answer.outcome != "failed" and not found.races else 1,
    )


def _world_size(asked: Asked, command: TrainingCommand, cluster: ClusterSpec) -> int:
    """As given, else as torchrun was told, else the whole cluster."""
    if asked.world_size is not None:
        if asked.world_size < 1:
            raise SpecError(f"dryrun: world-size must be >= 1, got {asked.world_size}")
        return asked.world_size
    if command.ranks_per_node is None and command.nodes is None:
        return cluster.world_size
    return (command.nodes or 1) * (command.ranks_per_node or cluster.ranks_per_node)


def _request(asked: Asked, command: TrainingCommand, cluster: ClusterSpec) -> Request:
    world_size = cluster.world_size
    return Request(
        command=command.command, module=command.module, cluster=asked.cluster, world_size=world_size,
        local_ranks=cluster.ranks_per_node, rank=asked.rank, steps=asked.steps,
        unusable_bytes=sum(one.bytes for one in overheads(world_size)),
    )  # fmt: skip


def _write_page(found: Analysis, path: Path) -> None:
    from refshard.report.dryrun.page import page  # plotly and pandas take a second to import

    try:
        replace_file(path, page(found, shlex.join(["refshard", *sys.argv[1:]])))
    except OSError as error:
        raise SpecError(f"html: {path} cannot be written ({error.strerror}); name a writable file") from None


def as_object(found: Analysis) -> dict[str, Any]:
    """Everything, for ``--json``; bytes and seconds."""
    answer, traced = found.run.answer, found.traced
    steps = [] if traced is None else [step.breakdown for step in traced.figures.steps]

    def seconds(key: str) -> float | None:
        return sum(getattr(step, key) or 0 for step in steps) / len(steps) / 1e9 if steps else None

    return {
        "request": msgspec.to_builtins(found.run.request),
        "answer": msgspec.to_builtins(answer),
        "outcome": answer.outcome,
        "fits": found.fits,
        "peak_reserved_bytes": answer.peak.reserved,
        "peak_allocated_bytes": answer.peak.allocated,
        "refused": msgspec.to_builtins(found.run.refused),
        "usable_bytes": found.usable_bytes,
        "headroom_bytes": found.headroom_bytes,
        "overheads": [{"name": o.name, "bytes": o.bytes, "source": o.source} for o in found.overheads],
        "peak_by_category": {category.name.lower(): size for category, size in found.memory.by_category().items()},
        "peak_by_module": found.memory.by_module(),
        "step_s": found.step_s,
        "tokens_per_s_gpu": found.tokens_per_s,
        "mfu": found.mfu,
        "model_flops": found.model_flops,
        "compute_s": seconds("compute_ns"),
        "comm_s": seconds("comm_ns"),
        "exposed_comm_s": seconds("exposed_ns"),
        "idle_s": seconds("idle_ns"),
        "host_bound_s": seconds("idle_host_ns"),
        "trace": None if traced is None else as_objects([traced.figures])[0],
        "host_synchronisations": [
            {"why": s.why, "site": s.site, "count": s.count, "value_unknown": s.unknown} for s in found.synchronisations
        ],
        "races": None if found.races is None else [str(race) for race in found.races],
        "says": sentences(found),
        "doubts": [msgspec.to_builtins(doubt) for doubt in found.prices.doubts],
    }


def words_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """What follows the two dashes, which the command line may have kept."""
    return tuple(arguments[1:] if arguments[:1] == ["--"] else arguments)
