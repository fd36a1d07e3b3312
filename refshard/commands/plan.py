"""``refshard plan``: the best ways to train a model on a cluster, found by closed forms."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from refshard.commands.printing import check_writable, tell, write_page
from refshard.commands.sizes import sized
from refshard.emit.table import POLICIES, RUNS, TOOLS, emit
from refshard.emit.tool import Setting as EmitSetting
from refshard.engine.placement import MODES
from refshard.errors import SpecError, nearest
from refshard.folders import replace_file
from refshard.outside_memory import EXPANDABLE_SEGMENTS
from refshard.plan.cost_models import COST_MODELS, find_cost_model
from refshard.plan.memory import FRAGMENTATION
from refshard.plan.plan import VARIANTS, Failures, Plan, Reader, Row, Size, listed, load_spread, with_dry_rows
from refshard.plan.search import AUTO, search
from refshard.plan.space import ALL, Space, candidates, wrong_axis
from refshard.quantities import GIB, parse_counts
from refshard.report.blocks import Answer, Text
from refshard.report.plan.answer import plan_answer
from refshard.report.plan.text import short_text
from refshard.specs.cluster import ClusterSpec, cluster_name, load_cluster, with_nodes
from refshard.specs.counted import AnyModel, CountedModel
from refshard.specs.hardware import ELEMENT_BYTES
from refshard.specs.job import (
    REFERENCE_STRATEGY,
    WHOLE_MATRICES,
    Implementation,
    Job,
    Optimizer,
    Precision,
    Schedule,
    Tuning,
)
from refshard.specs.layers import POLICY
from refshard.specs.model import ModelSpec, is_factory, load_model, model_name
from refshard.specs.reading import convert, read_as, within
from refshard.specs.tuning import ALL_LINEAR, Lora
from refshard.strategies.table import ROWS

DRY_RUNS, DRY_RUN_S, DRY_RUNS_S = 4, 120.0, 60.0
"""Configurations that ``--search`` dry-runs by default, the time limit of each of the first, and how long further ones
are tried if some do not fit."""
MOST_READ = 2000
"""The best configurations, from which those to show, to emit and to dry-run are chosen."""
PLANNED = ("ddp", "fsdp1", "fsdp2", "fsdp2-tuned", *(f"refshard-{mode}" for mode in MODES))
SEARCHED = ("ddp", "fsdp1", "fsdp2", "megatron", "refshard-zero1", "refshard-zero2", "refshard-fsdp", "refshard-yafsdp")
"""Strategies of a plan, and of one with ``--search``, unless some are named."""
LARGE_MODEL, TOKENS, LARGE_TOKENS = 100 * 10**9, 4 * 2**20, 16 * 2**20
"""Tokens of a step of ``--search`` where none are given, and those of a model of 100 B parameters and more: the batch
that Llama 3 405B was trained with in the end (Grattafiori et al., 2024)."""
ONE_GPU_SEQUENCES = 16
"""Sequences of one GPU's step where no batch is given, in microbatches of any size: QLoRA's (Dettmers et al., 2023).
"""
_OWN_OPTIONS = {
    "compiled": "use --compile", "reduction": "use --reduction", "reduce_each": "the plan tries both",
}  # fmt: skip
"""Fields of the implementation that ``--implementation`` does not set, and what to do instead."""
YES_NO_BOTH = ("yes", "no", "both")
"""Values of ``--compile``."""
UPSTREAM = "yafsdp"
"""Also the end of the name of one of the engine's strategies."""
Name = TypeVar("Name", bound=str)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line.

    Lists are separated by commas; ``all`` is every size that can run. An axis that is None is 1, or ``all`` with
    ``search``; ``dp_replicate`` is ``all`` in any case, and so are ``ep`` of a mixture of experts, and ``tp`` and
    microbatches of a given batch.
    ``compiled`` is ``no``, ``yes`` or ``both``. ``implementation`` has other fields of
    :class:`~refshard.specs.job.Implementation`, each as ``FIELD=VALUE``.
    """

    model: str
    cluster: str
    gpus: str | None = None
    nodes: int | None = None
    seq_len: int = 8192
    tokens_per_step: int | None = None
    search: bool = False
    strategies: str | None = None
    microbatch: str | None = None
    microbatches: int = 1
    checkpointing: str | None = None
    dp_replicate: str | None = None
    tp: str | None = None
    cp: str | None = None
    pp: str | None = None
    interleave: str | None = None
    schedule: str | None = None
    ep: str | None = None
    precision: str | None = None
    reduction: str = "fp32"
    compiled: str = "no"
    offload: bool = False
    tuning: str = "full"
    lora_rank: int = Lora().rank
    lora_targets: str = ALL_LINEAR
    frozen: str = ""
    optimizer: str = "adamw"
    implementation: tuple[str, ...] = ()
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
            for field in ("seq_len", "microbatches", "top", "lora_rank"):
                within(_option(field), getattr(self, field), 1)
            within(_option("dry_runs"), self.dry_runs or 0, 0)
            within(_option("nodes"), 1 if self.nodes is None else self.nodes, 1)
        except ValueError as error:
            raise SpecError(f"{error}; give a number in this range") from None
        if not 0 <= self.price_usd < float("inf"):
            raise SpecError(f"--usd-per-gpu-hour must be >= 0, and finite, got {self.price_usd}; give such a number")
        if not 0 < self.mtbf_hours < float("inf"):
            raise SpecError(f"--mtbf must be > 0 hours, and finite, got {self.mtbf_hours}; give such a number")


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def plan(options: Options, *, page: Path | None = None, tool: str | None = None, out: Path | None = None) -> Answer:
    """Search for each size of the cluster; the status is 1 if nothing fits.

    ``page`` is an HTML file to write. For a ``tool``, its configuration files are written to the folder ``out``.

    Raises:
        SpecError: the model, the cluster, a strategy or another value does not exist, or they do not fit each other.
    """
    check_writable(html=page)
    if out is not None and tool is None:
        raise SpecError(f"out: '{out}' is for the files of --emit, got no --emit; add it, or leave --out out")
    dimensions = _model(options)
    options = _with_names(options)
    cluster, spread = load_cluster(options.cluster), load_spread()
    sizes = sized(options.gpus, cluster)
    failures = Failures(mtbf_hours=options.mtbf_hours)
    if tool is not None and dimensions is None:
        raise SpecError(f"emit: {tool} needs the dimensions of a model, got '{options.model}'; leave --emit out")
    model: AnyModel
    if dimensions is not None:
        model = dimensions
    else:
        model, options = _counted(options, cluster, sizes[-1].world_size)
    options = _for_tool(options, tool, sizes[-1].world_size)
    # By default, --search dry-runs some if the fake device can be made.
    fakes = cluster.accelerator.device == "cuda" and bool(cluster.accelerator.device_name)
    count = options.dry_runs if options.dry_runs is not None else DRY_RUNS if options.search and fakes else 0
    varied = varied_fields(options, cluster)
    made = [_size(options, model, on, failures) for on in sizes]
    if not made[-1].considered and (mistake := wrong_axis(space_of(options, model, sizes[-1]), model, sizes[-1])):
        raise SpecError(mistake)
    if count and isinstance(model, ModelSpec):
        made[-1] = _with_dry_runs(made[-1], options, model, sizes[-1], count)
    most, shown = options.top + count, []
    for size in made:
        rows = tuple(size.rows[place] for place in listed(size.rows, most, varied, spread))
        shown.append(msgspec.structs.replace(size, rows=rows, unfit=size.unfit[:most]))
    found = Plan(
        sizes=tuple(shown), global_batch=global_batch_of(options, model, sizes[-1]), seq_len=options.seq_len,
        available_bytes=cluster.accelerator.memory_bytes,
        price_usd=options.price_usd, failures=failures, varied=varied,
    )  # fmt: skip
    title = (
        f"{options.model} on {options.cluster}: {found.global_batch:,} sequences of {found.seq_len:,} tokens a step "
        f"({found.global_batch * found.seq_len:,} tokens)"
    )
    answer = plan_answer(found, spread, title, model=options.model, cluster=options.cluster)
    if page is not None:
        write_page(answer, page, "plan")
    if tool is not None and isinstance(model, ModelSpec):
        best = [row for size in reversed(made) for row in size.rows]
        text = _emitted(tool, options, model, cluster, best, out or Path("runs") / "emitted" / tool)
        answer = replace(answer, blocks=[*answer.blocks, Text(text=text)])
    return answer


def _model(options: Options) -> ModelSpec | None:
    """The dimensions of the model; None for a factory's module that none describe.

    Raises:
        SpecError: it does not exist, or cannot be read.
    """
    if not is_factory(options.model):
        return load_model(options.model)
    from refshard.models.dimensions import NotRecognisedError, read_dimensions  # torch takes seconds to import

    try:
        return read_dimensions(options.model)
    except NotRecognisedError:
        return None


def _counted(options: Options, cluster: ClusterSpec, ranks: int) -> tuple[CountedModel, Options]:
    """The operators of the factory's module, and the options with data parallelism alone where they leave it open.

    Raises:
        SpecError: the module does not run on the meta device, or dry runs are requested.
    """
    if options.dry_runs:
        raise SpecError(
            f"dry-runs: within a plan they are of models with dimensions, got '{options.model}'; dry-run the module: "
            f"refshard dryrun --cluster {options.cluster} --model {options.model} --strategy fsdp2"
        )
    from refshard.dryrun.counted import count_model

    open_axes = {axis: "1" for axis in ("tp", "cp", "pp", "ep") if getattr(options, axis) is None}
    given = options.strategies or (",".join(PLANNED) if ranks > 1 else None)
    options = msgspec.structs.replace(
        options, **open_axes, strategies=given, checkpointing=options.checkpointing or AUTO, dry_runs=0
    )
    casting = {bool(find_cost_model(name).casts) for name in strategies_of(options, ranks)}
    variants = [
        f"autocast {precision}" if casts and precision != "fp32" else precision
        for precision in _precisions(options, cluster) for casts in sorted(casting)
    ]  # fmt: skip
    return count_model(options.model, options.seq_len, [*dict.fromkeys(variants)], cluster.accelerator), options


def _with_names(options: Options) -> Options:
    """The options with the model by its profile's name, and the cluster with its number of nodes.

    Raises:
        SpecError: both the nodes and the GPUs are given.
    """
    cluster = cluster_name(options.cluster)
    if options.nodes is not None:
        if options.gpus is not None:
            raise SpecError("plan: --nodes and --gpus exclude each other, got both; leave one out")
        cluster = with_nodes(cluster, options.nodes)
    return msgspec.structs.replace(options, model=model_name(options.model), cluster=cluster, nodes=None)


def _for_tool(options: Options, tool: str | None, ranks: int) -> Options:
    """The options with the tool's strategies and checkpointing policies, unless some are named.

    Raises:
        SpecError: there is no such tool.
    """
    if tool is None:
        return options
    if tool not in TOOLS:
        raise SpecError(f"emit: no tool '{tool}'; {nearest(tool, list(TOOLS))}")
    if options.strategies is None:
        # "megatron" is otherwise only in searches.
        considered = dict.fromkeys((*strategies_of(options, ranks), *(["megatron"] if tool == "megatron" else [])))
        runs = [name for name in considered if name in RUNS.get(tool, (name,))]
        options = msgspec.structs.replace(options, strategies=",".join(runs) or None)
    if options.checkpointing is None and tool in POLICIES:
        options = msgspec.structs.replace(options, checkpointing=",".join(POLICIES[tool]))
    return options


def _size(options: Options, model: AnyModel, cluster: ClusterSpec, failures: Failures) -> Size:
    found = candidates(space_of(options, model, cluster), model, cluster)
    if not len(found):
        return Size(gpus=cluster.world_size, considered=0, fitting=0, rows=(), front=(), unfit=())
    best = search(model, cluster, options.seq_len, found)
    reader = Reader(
        model=model, cluster=cluster, seq_len=options.seq_len, price_usd=options.price_usd, failures=failures,
        spread=load_spread(),
    )  # fmt: skip
    return reader.size(best, MOST_READ)


def _with_dry_runs(size: Size, options: Options, model: ModelSpec, cluster: ClusterSpec, count: int) -> Size:
    """The size with its first ``count`` rows that can be dry-run and fit, and how their closed forms compare."""
    from refshard.fakecuda.build import extension
    from refshard.measure.dry.many import dry_run_many
    from refshard.measure.dry.proxies import Extrapolated, Setting
    from refshard.measure.dry.rounds import Rounds, dry_run_rounds

    extension()  # builds the fake device if it is missing
    setting = Setting(model=model, cluster=cluster)
    rounds = Rounds(
        count=count, usable_bytes=size.usable_bytes, each_s=DRY_RUN_S, all_s=DRY_RUNS_S
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="refshard-plan-") as made:
        run = partial(dry_run_many, on_progress=tell, environment=dict([EXPANDABLE_SEGMENTS.split("=")]))
        jobs, step_s = [row.job for row in size.rows], [row.step_s for row in size.rows]
        found = dry_run_rounds(jobs, step_s, setting, Path(made), rounds, run)
    rows = []
    for place, row in enumerate(size.rows):
        dry = found.get(place, "not among the first; raise --dry-runs")
        if isinstance(dry, Extrapolated):
            rows.append(row.dried(dry.step_s, dry.allocated_bytes, dry.reserved_bytes))
        elif place < options.top:
            rows.append(msgspec.structs.replace(row, not_dry=dry))
    return with_dry_rows(size, rows, load_spread())


def _emitted(
    tool: str, options: Options, model: ModelSpec, cluster: ClusterSpec, rows: Sequence[Row], folder: Path
) -> str:
    """Write the first configuration that the tool can run; returns what to do with it, as text.

    Raises:
        SpecError: the tool can run none of them, or none fits with what the tool takes beyond the plan's memory; the
            message is about the first.
    """
    refused: SpecError | None = None
    for row in rows:
        job = msgspec.structs.replace(row.job, cluster=options.cluster)
        try:
            emitted = emit(tool, EmitSetting(job=job, model=model, cluster=cluster))
            if emitted.extra_bytes <= max(0, row.headroom_bytes - FRAGMENTATION * row.usable_bytes):
                break
            raise SpecError(
                f"emit: {tool} takes {emitted.extra_bytes / GIB:.2f} GiB more than the plan's "
                f"{row.memory_bytes / GIB:.2f} GiB, too much for {row.usable_bytes / GIB:.2f} GiB of usable memory; "
                "plan with a smaller --microbatch or with --checkpointing full"
            )
        except SpecError as error:
            refused = refused or error
    else:
        nothing = f"emit: no configuration fits, so there is nothing to write for {tool}; change the plan"
        raise refused or SpecError(nothing)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in emitted.files.items():
            replace_file(folder / name, [text])
    except OSError as error:
        raise SpecError(f"out: {folder} cannot be written ({error.strerror}); name a writable folder") from None
    files = ", ".join(str(folder / name) for name in emitted.files)
    what = short_text(row.job, varied_fields(options, cluster))
    notes = "".join(f"\n* {note}" for note in emitted.notes)
    return f"Written for {tool} {emitted.version}: {files} ({what}). Start it with:\n{emitted.command}{notes}"


def varied_fields(options: Options, cluster: ClusterSpec) -> tuple[str, ...]:
    """The fields of :data:`VARIANTS` with several values."""
    values = (_precisions(options, cluster), _compiled(options))
    return tuple(field for field, of_field in zip(VARIANTS, values) if len(of_field) > 1)


def space_of(options: Options, model: AnyModel, cluster: ClusterSpec) -> Space:
    """What to search on the cluster.

    Raises:
        SpecError: a value is not known, or they do not fit each other.
    """
    axes: dict[str, Any] = {
        name: _axis(name, getattr(options, name), searched=_searched(name, options, model, cluster))
        for name in ("tp", "cp", "pp", "interleave", "ep", "dp_replicate", "microbatch")
    }
    tuned: dict[str, Any] = {
        "tuning": _known("tuning", options.tuning, get_args(Tuning)),
        "optimizer": _known("optimizer", options.optimizer, get_args(Optimizer)),
        "lora_rank": options.lora_rank, "lora_targets": options.lora_targets, "frozen": options.frozen,
    }  # fmt: skip
    strategies = strategies_of(options, cluster.world_size)
    whole = {"strategy": strategies[0], "model": options.model, "gpus": 1, "seq_len": 1, "global_batch": 1}
    convert({**whole, **tuned}, Job, where="plan")  # what a job of any size refuses
    return Space(
        strategies=strategies, schedules=_schedules(options),
        checkpointing=_checkpointing(options),
        precisions=_precisions(options, cluster), compiled=_compiled(options), model=options.model,
        gpus=cluster.world_size, cluster=_sized_name(options.cluster, cluster), seq_len=options.seq_len,
        global_batch=global_batch_of(options, model, cluster), offload=options.offload,
        implementation=_implementation(options), **axes, **tuned,
    )  # fmt: skip


def _implementation(options: Options) -> Implementation:
    given: dict[str, str] = {"reduction": _known("reduction", options.reduction, tuple(ELEMENT_BYTES))}
    for one in options.implementation:
        name, equals, value = one.partition("=")
        if not equals or name in _OWN_OPTIONS:
            remedy = _OWN_OPTIONS.get(name, "separate the field and its value by '='")
            raise SpecError(f"implementation must be FIELD=VALUE, for a field without an option, got '{one}'; {remedy}")
        given[name] = value
    found = convert(given, Implementation, where="implementation", strict=False)
    if found.stages and not options.search and options.pp is None:
        raise SpecError(f"stages need a pipeline, got {found.stages!r} without one; add --pp")
    return found


def _sized_name(given: str, cluster: ClusterSpec) -> str:
    """The name of the cluster with the number of nodes that is planned."""
    return given if cluster == load_cluster(given) else with_nodes(given, cluster.nodes)


def _searched(name: str, options: Options, model: AnyModel, cluster: ClusterSpec) -> bool:
    """Whether an axis that is not given takes all sizes."""
    if options.search or name == "dp_replicate" or (name == "ep" and model.experts):
        return True
    if name == "microbatch" and _chooses_batch(options, cluster):
        return True
    return options.tokens_per_step is not None and name in ("tp", "microbatch")


def _axis(name: str, given: str | None, *, searched: bool) -> tuple[int, ...]:
    if given is None:
        return ALL if searched else (1,)
    return ALL if given.strip() == "all" else tuple(read_as(parse_counts, name, given))


def _chooses_batch(options: Options, cluster: ClusterSpec) -> bool:
    """Whether the batch of one GPU is not given in any way."""
    given = options.tokens_per_step is not None or options.microbatch is not None or options.microbatches > 1
    return cluster.world_size == 1 and not options.search and not given


def global_batch_of(options: Options, model: AnyModel, cluster: ClusterSpec) -> int:
    """Sequences of a step.

    Raises:
        SpecError: the tokens are no whole number of sequences.
    """
    if _chooses_batch(options, cluster):
        return ONE_GPU_SEQUENCES
    if options.tokens_per_step is None and not options.search:
        microbatch = max(_axis("microbatch", options.microbatch, searched=False))
        return cluster.world_size * max(microbatch, 1) * options.microbatches
    if options.tokens_per_step is None:
        tokens = LARGE_TOKENS if model.params >= LARGE_MODEL else TOKENS
    else:
        tokens = options.tokens_per_step
    sequences, rest = divmod(tokens, options.seq_len)
    if rest or not sequences:
        raise SpecError(
            f"tokens-per-step must be a multiple of seq-len = {options.seq_len:,}, got {tokens:,}; change either"
        )
    return sequences


def strategies_of(options: Options, ranks: int) -> tuple[str, ...]:
    """The strategies to plan on so many ranks.

    Raises:
        SpecError: one has no closed form, or not of this, or does not exist.
    """
    whole = options.optimizer in WHOLE_MATRICES
    if options.frozen and (options.tuning != "full" or options.offload):
        raise SpecError("frozen: frozen parts go neither with adapters nor with --offload; leave these out")
    if options.strategies is None:
        if ranks == 1:
            return (REFERENCE_STRATEGY,)
        names = SEARCHED if options.search else PLANNED
        return tuple(
            name for name in names
            if not (whole and find_cost_model(name).shards_optimizer) and not _cannot_freeze(name, options)
        )  # fmt: skip
    names = _names(options.strategies)
    if not names:
        raise SpecError(
            f"strategy: no name in {options.strategies!r}; separate names by commas, or leave the option out"
        )
    for name in names:
        if name in ROWS and name not in COST_MODELS:
            raise SpecError(f"strategy: {_without_form(name, options)}")
        if name == REFERENCE_STRATEGY and ranks > 1:
            raise SpecError(f"strategy: '{name}' is one GPU's, got {ranks} GPUs; give --gpus 1, or another strategy")
        if _cannot_freeze(name, options):
            freezes = ", ".join(one for one in COST_MODELS if not _cannot_freeze(one, options))
            raise SpecError(f"frozen: frozen parts have no closed form in '{name}'; plan one of {freezes}")
        if find_cost_model(name).shards_optimizer and whole:
            other = ", or dry-run it" if name in ROWS and options.optimizer in ROWS[name].axes else ""
            raise SpecError(
                f"optimizer: {options.optimizer} has no closed form where its state is sharded, as '{name}' does; plan "
                f"'ddp' or 'refshard-replicate'{other}"
            )
    return names


def _cannot_freeze(name: str, options: Options) -> bool:
    """Whether parts are to be frozen and a strategy, of those with a closed form, has none for that."""
    return bool(options.frozen) and not (name in ROWS and "frozen" in ROWS[name].axes)


def _without_form(name: str, options: Options) -> str:
    """Why a strategy that refshard can run has no closed form, and what to do instead."""
    plain = name.removesuffix("-compiled")
    if plain in COST_MODELS:
        return f"'{name}' has no closed form of its own; plan {plain} with --compile yes"
    if ROWS[name].compiles:
        return f"'{name}' has no closed form and cannot be dry-run; measure it on GPUs: refshard run --strategy {name}"
    dry = f"refshard dryrun --cluster {options.cluster} --model {options.model} --strategy {name}"
    if name == UPSTREAM:
        return (
            f"'{name}' is upstream's package, which has no closed form; plan the engine's mode refshard-yafsdp, or, "
            f"where the package is installed, dry-run it: {dry}"
        )
    return f"'{name}' has no closed form; dry-run it: {dry}"


def _schedules(options: Options) -> tuple[Schedule, ...]:
    known: tuple[Schedule, ...] = get_args(Schedule)
    if options.schedule is None:
        return known
    return tuple(_known("schedule", name, known) for name in _named("schedule", options.schedule))


def _checkpointing(options: Options) -> tuple[str, ...]:
    if options.checkpointing is None:
        return (AUTO, "selective") if options.search else (AUTO,)
    names = _named("checkpointing", options.checkpointing)
    for name in names:
        if name != AUTO and not POLICY.fullmatch(name):
            raise SpecError(
                "checkpointing must be auto, none, selective, full, every-K or first-N, separated by commas, "
                f"got '{name}'; choose one of them"
            )
    return names


def _precisions(options: Options, cluster: ClusterSpec) -> tuple[Precision, ...]:
    """The precisions to plan; by default bf16 on an accelerator, fp32 on a CPU.

    Raises:
        SpecError: one does not exist, or the hardware's profile has no rate for it.
    """
    hardware, known = cluster.accelerator, get_args(Precision)
    given = options.precision if options.precision is not None else "bf16" if hardware.device == "cuda" else "fp32"
    chosen: tuple[Precision, ...] = tuple(_known("precision", name, known) for name in _named("precision", given))
    if unknown := next((name for name in chosen if name not in hardware.matmul), None):
        raise SpecError(
            f"precision: the hardware profile has rates for {', '.join(hardware.matmul)}, got {unknown}; choose one of "
            "these, or add the rate"
        )
    return chosen


def _compiled(options: Options) -> tuple[bool, ...]:
    """Whether blocks are compiled, each value to plan.

    Raises:
        SpecError: it is neither no, yes nor both.
    """
    return {"no": (False,), "yes": (True,), "both": (False, True)}[_known("compile", options.compiled, YES_NO_BOTH)]


def _names(given: str) -> tuple[str, ...]:
    """Names separated by commas, each once."""
    return tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))


def _named(field: str, given: str) -> tuple[str, ...]:
    """The names of a list.

    Raises:
        SpecError: there are none.
    """
    if not (names := _names(given)):
        raise SpecError(f"{field}: no word in {given!r}; separate words by commas, or leave the option out")
    return names


def _known(field: str, given: str, known: tuple[Name, ...]) -> Name:
    for name in known:
        if name == given:
            return name
    raise SpecError(f"{field} must be {', '.join(known[:-1])} or {known[-1]}, got '{given}'; choose one of them")
