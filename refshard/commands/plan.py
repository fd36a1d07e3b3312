"""``refshard plan``: the best ways to train a model on a cluster, found by closed forms."""

import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec

from refshard import resources
from refshard.commands.printing import tell
from refshard.emit.job import Emitted
from refshard.emit.job import Job as EmitJob
from refshard.emit.table import RUNS, TOOLS, emit
from refshard.errors import SpecError, nearest
from refshard.estimate.limits import usable
from refshard.estimate.plan import VARIANTS, Failures, Plan, Reader, Row, Size, listed, with_dry_rows
from refshard.estimate.search import AUTO, search
from refshard.estimate.space import ALL, Space, configurations
from refshard.estimate.spread import load_spread
from refshard.estimate.ways import WAYS, find_way
from refshard.folders import replace_file
from refshard.plan.recipe import RECIPES
from refshard.report.answer import Answer, Text
from refshard.report.plan.table import plan_answer
from refshard.report.plan.words import short_words
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.configuration import Precision, Schedule
from refshard.specs.hardware import ELEMENT_BYTES
from refshard.specs.model import ModelSpec, is_factory, load_model
from refshard.specs.reading import within
from refshard.strategies.table import ROWS

if TYPE_CHECKING:
    from refshard.harness.dry.proxies import Extrapolated

SEARCHED = ("ddp", "fsdp1", "fsdp2", "megatron", "refshard-zero1", "refshard-zero2", "refshard-fsdp", "refshard-yafsdp")
"""Strategies of ``--search``, unless some are named."""
LARGE_MODEL, TOKENS, LARGE_TOKENS = 100 * 10**9, 4 * 2**20, 16 * 2**20
"""Tokens of a step of ``--search`` where none are given, and those of a model of 100 B parameters and more: the batch
that Llama 3 405B was trained with in the end (Grattafiori et al., 2024)."""
UPSTREAM = "yafsdp"
"""The strategy whose name is also the end of one of the engine's."""
Word = TypeVar("Word", bound=str)
DRY_RUNS, DRY_RUN_S, DRY_RUNS_S = 4, 120.0, 60.0
"""Configurations that ``--search`` dry-runs by default, how long each of the first may take, and for how long more of
them are dry-run where some do not fit."""
MOST_READ = 2000
"""Configurations, the best first, among which those are sought that a tool can run, or a dry run."""
_FACTORS = {"": 1, "K": 2**10, "M": 2**20}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, as the command line has it.

    Lists are separated by commas; ``all`` is every size that can run. An axis that is None is 1, or ``all`` with
    ``search``; replicas are ``all`` in any case, and so are tensor parallelism and microbatches of a given batch.
    ``compiled`` is a list of ``no`` and ``yes``; None is ``no``.
    """

    model: str
    cluster: str
    nodes: str | None = None
    seq_len: int = 8192
    tokens_per_step: str | None = None
    search: bool = False
    strategies: str | None = None
    microbatch: str | None = None
    accumulate: int = 1
    checkpoint: str | None = None
    replicas: str | None = None
    tensor: str | None = None
    context: str | None = None
    pipeline: str | None = None
    interleave: str | None = None
    schedule: str | None = None
    expert: str | None = None
    dtype: str | None = None
    reduction: str = "fp32"
    compiled: str | None = None
    offload: bool = False
    price_usd: float = 2.5
    mtbf_hours: float = Failures().mtbf_hours
    top: int = 8
    dry_runs: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            SpecError: one is out of range.
        """
        try:
            for field in ("seq_len", "accumulate", "top"):
                within(field, getattr(self, field), 1)
            within("dry_runs", self.dry_runs or 0, 0)
        except ValueError as error:
            raise SpecError(str(error)) from None
        if not 0 <= self.price_usd < float("inf"):
            raise SpecError(f"price must be >= 0 USD per GPU-hour, and finite, got {self.price_usd}")
        if not 0 < self.mtbf_hours < float("inf"):
            raise SpecError(f"mtbf must be > 0 hours, and finite, got {self.mtbf_hours}")


def plan(asked: Asked, *, page: Path | None = None, tool: str | None = None, out: Path | None = None) -> Answer:
    """Search for each size of the cluster; the status is 1 if nothing fits.

    ``page`` is an HTML file to write. ``tool`` is whose configuration to write to the folder ``out`` for the first row.

    Raises:
        SpecError: the model, the cluster, a strategy or another value does not exist, or they do not fit each other.
    """
    if page is not None and page.is_dir():
        raise SpecError(f"html: {page} is a folder; name the file to write")
    model, cluster, spread = _model(asked.model), load_cluster(asked.cluster), load_spread()
    sizes = _sizes(asked.nodes, cluster)
    failures = Failures(mtbf_hours=asked.mtbf_hours)
    asked = _for_tool(asked, tool)
    count, varied = _dry_runs(asked, cluster), _varied(asked, cluster)
    most = MOST_READ if tool or count or varied else asked.top
    made = [_size(asked, model, on, failures, most) for on in sizes]
    if count:
        made[-1] = _with_dry_runs(made[-1], asked, model, sizes[-1], count)
    found = Plan(
        sizes=tuple(_shown(size, asked.top + count, varied) for size in made),
        global_batch=_global_batch(asked, model, sizes[-1]), seq_len=asked.seq_len,
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
    """Unless strategies are named, those that the tool runs.

    Raises:
        SpecError: there is no such tool.
    """
    if tool is None:
        return asked
    if tool not in TOOLS:
        raise SpecError(f"emit: no tool '{tool}'; {nearest(tool, list(TOOLS))}")
    runs = [name for name in _strategies(asked) if name in RUNS.get(tool, (name,))]
    if asked.strategies is not None or not runs:
        return asked
    return msgspec.structs.replace(asked, strategies=",".join(runs))


def _size(asked: Asked, model: ModelSpec, cluster: ClusterSpec, failures: Failures, most: int) -> Size:
    space = _space(asked, model, cluster)
    candidates = configurations(space, model, cluster, asked.seq_len)
    if not len(candidates):
        return Size(world_size=cluster.world_size, considered=0, fitting=0, rows=(), front=(), unfit=())
    found = search(model, cluster, asked.seq_len, candidates, usable(cluster.accelerator))
    reader = Reader(
        model=model, cluster=cluster, seq_len=asked.seq_len, price_usd=asked.price_usd, failures=failures,
        spread=load_spread(),
    )  # fmt: skip
    return reader.size(found, most)


def _shown(size: Size, most: int, varied: Sequence[str]) -> Size:
    rows = tuple(size.rows[place] for place in listed(size.rows, most, varied))
    return msgspec.structs.replace(size, rows=rows, unfit=size.unfit[:most])


def _varied(asked: Asked, cluster: ClusterSpec) -> tuple[str, ...]:
    """Those of :data:`VARIANTS` of which several values are asked for."""
    values = (_precisions(asked, cluster), _compiled(asked))
    return tuple(field for field, of_field in zip(VARIANTS, values) if len(of_field) > 1)


def _dry_runs(asked: Asked, cluster: ClusterSpec) -> int:
    """How many configurations to dry-run: with ``search`` some by default, where the fake device can be made."""
    hardware = cluster.accelerator
    if asked.dry_runs is not None:
        return asked.dry_runs
    return DRY_RUNS if asked.search and hardware.device == "cuda" and hardware.device_name else 0


def _with_dry_runs(size: Size, asked: Asked, model: ModelSpec, cluster: ClusterSpec, count: int) -> Size:
    """The size with its first ``count`` rows that can be dry-run and fit, and how their closed forms compare."""
    from refshard.fakecuda.build import extension
    from refshard.harness.dry.many import dry_run_many
    from refshard.harness.dry.proxies import Extrapolated, Setting
    from refshard.harness.dry.rounds import Rounds, dry_run_rounds

    extension()  # builds the fake device if there is none
    name = asked.cluster if cluster == load_cluster(asked.cluster) else f"{_profile(asked.cluster)}x{cluster.nodes}"
    setting = Setting(model=model, cluster=cluster, cluster_name=name, seq_len=asked.seq_len)
    rounds = Rounds(
        count=count, usable_bytes=usable(cluster.accelerator), each_s=DRY_RUN_S, all_s=DRY_RUNS_S
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="refshard-plan-") as made:
        run = partial(dry_run_many, on_progress=tell)
        found = dry_run_rounds([row.configuration for row in size.rows], setting, Path(made), rounds, run)
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


def _space(asked: Asked, model: ModelSpec, cluster: ClusterSpec) -> Space:
    axes: dict[str, Any] = {
        name: _axis(name, getattr(asked, name), searched=_searched(name, asked))
        for name in ("tensor", "context", "pipeline", "interleave", "expert", "replicas", "microbatch")
    }
    return Space(
        strategies=_strategies(asked), world_sizes=(cluster.world_size,),
        global_batch=_global_batch(asked, model, cluster),
        schedules=_schedules(asked), checkpointing=_checkpointing(asked), precisions=_precisions(asked, cluster),
        compiled=_compiled(asked), reduction=_known("reduction", asked.reduction, tuple(ELEMENT_BYTES)),
        offload=asked.offload, **axes,
    )  # fmt: skip


def _sizes(nodes: str | None, cluster: ClusterSpec) -> list[ClusterSpec]:
    """The cluster with each number of nodes asked for, ascending: ``"1,2,4"``, or ``"64..2048"``, doubling.

    Raises:
        SpecError: it is neither.
    """
    if nodes is None:
        return [cluster]
    if doubled := re.fullmatch(r"(\d{1,7})\.\.(\d{1,7})", nodes.strip()):
        count, most = int(doubled[1]), int(doubled[2])
        if not 1 <= count <= most:
            raise SpecError(f"nodes must ascend from 1 or more, got {nodes!r}; write, for example, 64..2048")
        counts = []
        while count <= most:
            counts.append(count)
            count *= 2
    else:
        counts = sorted(set(_numbers("nodes", nodes)))
    return [cluster.of_nodes(count) for count in counts]


def _numbers(name: str, given: str) -> list[int]:
    words = [word.strip() for word in given.split(",") if word.strip()]
    if not words or any(not re.fullmatch(r"[1-9]\d{0,6}", word) for word in words):
        raise SpecError(f"{name} must be numbers from 1, separated by commas, got {given!r}; write, for example, 1,2,4")
    return [int(word) for word in words]


def _searched(name: str, asked: Asked) -> bool:
    """Whether an axis that is not given takes all sizes."""
    if asked.search or name == "replicas":
        return True
    return asked.tokens_per_step is not None and name in ("tensor", "microbatch")


def _axis(name: str, given: str | None, *, searched: bool) -> tuple[int, ...]:
    if given is None:
        return ALL if searched else (1,)
    return ALL if given.strip() == "all" else tuple(dict.fromkeys(_numbers(name, given)))


def _global_batch(asked: Asked, model: ModelSpec, cluster: ClusterSpec) -> int:
    """Sequences of a step.

    Raises:
        SpecError: the tokens are no whole number of sequences.
    """
    if asked.tokens_per_step is None and not asked.search:
        microbatch = max(_axis("microbatch", asked.microbatch, searched=False))
        return cluster.world_size * max(microbatch, 1) * asked.accumulate
    if asked.tokens_per_step is None:
        tokens = LARGE_TOKENS if model.params >= LARGE_MODEL else TOKENS
    else:
        tokens = tokens_of(asked.tokens_per_step)
    sequences, rest = divmod(tokens, asked.seq_len)
    if rest or not sequences:
        raise SpecError(
            f"tokens-per-step must be a multiple of seq-len = {asked.seq_len:,}, got {tokens:,}; change either"
        )
    return sequences


def tokens_of(given: str) -> int:
    """A number of tokens, with K for 2^10 and M for 2^20.

    >>> tokens_of("4M"), tokens_of("512k"), tokens_of("1000")
    (4194304, 524288, 1000)

    Raises:
        SpecError: it is no such number.
    """
    found = re.fullmatch(r"([1-9]\d{0,11})([KM]?)", given.strip().upper())
    if not found:
        raise SpecError(f"tokens-per-step must be a number, with K for 2^10 or M for 2^20, got {given!r}; write 4M")
    return int(found[1]) * _FACTORS[found[2]]


def _strategies(asked: Asked) -> tuple[str, ...]:
    """The strategies asked for.

    Raises:
        SpecError: one has no closed form, or does not exist.
    """
    if asked.strategies is None:
        return SEARCHED if asked.search else tuple(RECIPES)
    names = _words(asked.strategies)
    if not names:
        raise SpecError(f"strategy: no name in {asked.strategies!r}; separate names by commas, or leave the option out")
    for name in names:
        if name in ROWS and name not in WAYS:
            raise SpecError(f"strategy: {_without_form(name, asked)}")
        find_way(name)
    return names


def _without_form(name: str, asked: Asked) -> str:
    """What a strategy is that refshard runs and has no closed form of, and what to do instead."""
    plain = name.removesuffix("-compiled")
    if plain in WAYS:
        return f"'{name}' has no closed form of its own; plan {plain} with --compiled"
    if ROWS[name].compiles:
        return f"'{name}' has no closed form and cannot be dry-run; measure it on GPUs: refshard run --strategy {name}"
    dry = f"refshard dryrun --cluster {asked.cluster} --model {asked.model} --strategy {name}"
    if name == UPSTREAM:
        return (
            f"'{name}' is upstream's package, which has no closed form; plan the engine's mode refshard-yafsdp, or, "
            f"where the package is installed, dry-run it: {dry}"
        )
    return f"'{name}' has no closed form; dry-run it: {dry}"


def _schedules(asked: Asked) -> tuple[Schedule, ...]:
    known: tuple[Schedule, ...] = get_args(Schedule)
    if asked.schedule is None:
        return known
    return tuple(_known("schedule", name, known) for name in _words(asked.schedule))


def _checkpointing(asked: Asked) -> tuple[str, ...]:
    if asked.checkpoint is None:
        return (AUTO, "selective") if asked.search else (AUTO,)
    names = _words(asked.checkpoint)
    for name in names:
        if not re.fullmatch(r"auto|none|selective|full|every-[1-9]\d{0,5}|[1-9]\d{0,5}", name):
            raise SpecError(
                "checkpoint must be auto, none, selective, full, every-K or a number of layers, separated by commas, "
                f"got '{name}'"
            )
    return names


def _precisions(asked: Asked, cluster: ClusterSpec) -> tuple[Precision, ...]:
    """The precisions asked for; else bf16 on an accelerator, fp32 on a CPU.

    Raises:
        SpecError: one does not exist, or the hardware's profile has no rate for it.
    """
    hardware, known = cluster.accelerator, get_args(Precision)
    given = asked.dtype if asked.dtype is not None else "bf16" if hardware.device == "cuda" else "fp32"
    chosen: tuple[Precision, ...] = tuple(_known("dtype", name, known) for name in _several("dtype", given))
    if unknown := next((name for name in chosen if name not in hardware.matmul), None):
        raise SpecError(
            f"dtype: the hardware's profile knows {', '.join(hardware.matmul)}, got {unknown}; choose one of them"
        )
    return chosen


def _compiled(asked: Asked) -> tuple[bool, ...]:
    """Whether blocks are compiled: each value asked for, else not.

    Raises:
        SpecError: a word is neither no nor yes.
    """
    words = ("no",) if asked.compiled is None else _several("compile", asked.compiled)
    return tuple(_known("compile", word, ("no", "yes")) == "yes" for word in words)


def _words(given: str) -> tuple[str, ...]:
    """What commas separate, each once."""
    return tuple(dict.fromkeys(word.strip() for word in given.split(",") if word.strip()))


def _several(field: str, given: str) -> tuple[str, ...]:
    """The words of a list.

    Raises:
        SpecError: there are none.
    """
    if not (words := _words(given)):
        raise SpecError(f"{field}: no word in {given!r}; separate words by commas, or leave the option out")
    return words


def _known(field: str, given: str, known: tuple[Word, ...]) -> Word:
    for word in known:
        if word == given:
            return word
    raise SpecError(f"{field} must be {', '.join(known[:-1])} or {known[-1]}, got '{given}'; choose one of them")


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
            return _written(emit(tool, job), short_words(row.configuration, _varied(asked, cluster)), folder)
        except SpecError as error:
            refused = refused or error
    raise refused or SpecError(f"emit: no configuration fits, so there is nothing to write for {tool}; change the plan")


def _written(emitted: Emitted, what: str, folder: Path) -> str:
    """Write the files of ``what``; returns what to do with them, in words."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in emitted.files.items():
            replace_file(folder / name, [text])
    except OSError as error:
        raise SpecError(f"out: {folder} cannot be written ({error.strerror}); name a writable folder") from None
    files = ", ".join(str(folder / name) for name in emitted.files)
    notes = "".join(f"\n* {note}" for note in emitted.notes)
    return f"Written for {emitted.version}: {files} ({what}). Start it with:\n{emitted.command}{notes}"


def _write_page(found: Plan, title: str, path: Path) -> None:
    from refshard.report.plan.page import page  # pandas takes longer to import than a plan takes

    try:
        replace_file(path, page(found, load_spread(), title, shlex.join(["refshard", *sys.argv[1:]])))
    except OSError as error:
        raise SpecError(
            f"html: {path} cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from None
