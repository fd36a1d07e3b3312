"""The command line: parse, call one command, print. Exit statuses are :class:`refshard.errors.Status`."""

import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from refshard import resources
from refshard.commands.printing import OUTPUT_OPTIONS, elapsed, in_panels, printed
from refshard.errors import STATUSES, RefshardError, SpecError, Status
from refshard.measure.interruption import ignore_more, interruptible, mortal
from refshard.quantities import parse_count
from refshard.report.blocks import Answer
from refshard.version import __version__

app = typer.Typer(
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\n\n".join(["Exit status of every command:", *(f"{status:>3}  {STATUSES[status]}" for status in Status)]),
)  # fmt: skip
FIT, FASTEST, SLOW, SLOWER, MACHINES = (
    "Will it fit, and how fast?", "Which is fastest here?", "Why is it slow?", "Did it get slower?",
    "Machines and profiles",
)  # fmt: skip
"""The questions that commands answer."""


_SCRIPT = {"allow_interspersed_args": False}
"""Of commands that run a script: what follows the first word that is no option belongs to the script."""
_UsageError: Any = typer.BadParameter.__base__
"""Of the click that typer uses, which may be its own."""


def _starting_with(names: Callable[[], Sequence[str]]) -> Callable[[str], list[str]]:
    """For shell completion: the names that begin as the word does, and after a comma as its last part does."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


def _strategy_names() -> Sequence[str]:
    from refshard.strategies.table import ROWS

    return list(ROWS)


_suite_names = _starting_with(lambda: list(resources.suites()))
_cluster_names = _starting_with(lambda: list(resources.cluster_profiles()))
_model_names = _starting_with(lambda: list(resources.model_profiles()))
_some_strategies = _starting_with(_strategy_names)


def _counted(text: str) -> Any:
    """An option that takes a count, such as 8k."""
    return typer.Option(parser=_parser(parse_count), metavar="N", help=text)


def _number(kind: Callable[[str], float], text: str) -> Any:
    """An option that takes any number: ``kind`` is int or float."""
    return typer.Option(parser=_parser(kind), metavar="N", help=text)


def _parser(parse: Callable[[str], float]) -> Callable[[object], float]:
    def parsed(text: object) -> float:
        try:
            return parse(str(text))
        except ValueError as error:
            ours = str(error) if parse is parse_count else f"must be a number, got '{text}'; write, for example, 2"
            raise typer.BadParameter(ours) from None

    return parsed


_Baselines = Annotated[Path, typer.Option(help="Folder of accepted baselines and of machines' noise.")]
_SeqLen = Annotated[int, _counted("Tokens per sequence; 8k is 8,192.")]
_OF_AXIS = "numbers or all (default: 1; all with --search)."
_Html = Annotated[Path | None, typer.Option(help="Write a page with charts: one file, no network ('-': stdout).")]
_Suite = Annotated[
    str, typer.Option(help="A suite's TOML file, or a name (`refshard list suites`).", autocompletion=_suite_names)
]
_CLUSTER = "GPUs (8xh100, rtx4090), a cluster profile (dgx-h100x4 for 4 nodes) or a TOML file."
_MODEL = "A model preset (`refshard list models`) or its id on Hugging Face, TOML file, config.json or module:function."
_Cluster = Annotated[str, typer.Option(help=_CLUSTER, autocompletion=_cluster_names)]
_Oversubscribe = Annotated[bool, typer.Option("--oversubscribe", help="Allow more ranks than the machine has cores.")]
_Launcher = Annotated[str | None, typer.Option(help="What starts ranks: local, torchrun or slurm.")]
_Strategies = Annotated[
    str | None, typer.Option(help="Strategies, separated by commas.", autocompletion=_some_strategies)
]
_Models = Annotated[str | None, typer.Option(help="Models, separated by commas.", autocompletion=_model_names)]
_Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the suite's cases; may be repeated."),
]
_Only = Annotated[list[str] | None, typer.Option(help="Measure only this case, by name or hash; may be repeated.")]
_DryRunOn = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="Dry-run the cases on this cluster; needs no GPU.",
        autocompletion=_cluster_names,
    ),
]
_DryRunFirst = Annotated[
    str | None,
    typer.Option(
        metavar="CLUSTER",
        help="Dry-run the cases on this cluster first and skip those that will not fit. 'auto': the first cluster "
        "with this machine's GPUs; 'no': none (default: what the suite says).",
    ),
]
_Sbatch = Annotated[str | None, typer.Option(help="Options for sbatch, with --launcher slurm.")]


@contextmanager
def _interruptible(left: str) -> Iterator[None]:
    """A signal that asks this process to end does so in order, with one line: what the command says of what is saved,
    else what is ``left``.
    """
    try:
        with interruptible():
            yield
    except KeyboardInterrupt as error:
        ignore_more()
        text = str(error) if " " in str(error) else left  # alone it is only the signal's name
        print(f"Interrupted: {text}", file=sys.stderr)
        raise typer.Exit(Status.INTERRUPTED) from None


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Measure, dry-run, plan and analyse sharded training: which strategy is fastest on your cluster, and why.

    Start here: refshard fit llama3-8b 8xh100
    """
    if version:
        print(f"refshard {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(Status.WRONG_CALL)


def _given(context: typer.Context) -> set[str]:
    """The options on the command line."""
    sources = {p.opts[0]: context.get_parameter_source(p.name or "") for p in context.command.params}
    return {option for option, source in sources.items() if source and source.name == "COMMANDLINE"}


@app.command(rich_help_panel=FIT)
@in_panels({"Output": "html"})
@printed
def fit(
    model: Annotated[str, typer.Argument(help=_MODEL, autocompletion=_model_names)],
    cluster: Annotated[str, typer.Argument(help=_CLUSTER, autocompletion=_cluster_names)],
    strategy: _Strategies = None,
    seq_len: _SeqLen = 8192,
    microbatch: Annotated[str | None, typer.Option(help="Sequences per rank and microbatch (default: 1).")] = None,
    html: _Html = None,
) -> Answer:
    """Whether a model fits on a cluster, how fast it trains, and the command that trains it.

    It dry-runs what `refshard plan` says to use; no script and no GPU are needed.

    Exit status: 0 if it fits, 1 if nothing does.

    Example: refshard fit llama3-8b 8xh100
    """
    from refshard.commands import fit as command
    from refshard.commands.plan import Options

    options = Options(model=model, cluster=cluster, strategies=strategy, seq_len=seq_len, microbatch=microbatch, top=1)
    with _interruptible("nothing is written"), elapsed(lambda: "dry run"):
        return command.fit(options, html=html)


@app.command(rich_help_panel=FIT)
@in_panels({
    "Parallelism": "strategy tp cp pp interleave schedule ep dp_replicate",
    "Training": "microbatch microbatches checkpointing precision reduction compile_ offload optimizer implementation",
    "Fine-tuning": "tuning lora_rank lora_targets frozen",
    "Cost": "usd_per_gpu_hour mtbf",
    "Output": "top emit out html",
})  # fmt: skip
@printed
def plan(
    model: Annotated[str, typer.Option(help=_MODEL, autocompletion=_model_names)],
    cluster: _Cluster,
    gpus: Annotated[
        str | None, typer.Option(help="Numbers of GPUs: 8,16,32 or 64..2048, doubling (default: the profile's).")
    ] = None,
    nodes: Annotated[int | None, _counted("Instead of --gpus: number of nodes.")] = None,
    seq_len: _SeqLen = 8192,
    tokens_per_step: Annotated[
        int | None,
        _counted(
            "Tokens per step over all ranks; 4M is 2^22 (default: microbatch x microbatches x ranks x seq-len; "
            "with --search 4M, 16M from 100 B parameters on)."
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Try every size of every axis that is not given, and every microbatch.")
    ] = False,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Data-parallel strategies, separated by commas (default: all with a closed form).",
            autocompletion=_some_strategies,
        ),
    ] = None,
    tp: Annotated[
        str | None,
        typer.Option(
            help="Ranks of tensor parallelism: numbers or all (default: 1; all with --tokens-per-step or --search)."
        ),
    ] = None,
    cp: Annotated[str | None, typer.Option(help=f"Ranks of context parallelism: {_OF_AXIS}")] = None,
    pp: Annotated[str | None, typer.Option(help=f"Ranks of pipeline parallelism: {_OF_AXIS}")] = None,
    interleave: Annotated[
        str | None, typer.Option(help=f"Stages per pipeline rank (virtual stages): {_OF_AXIS}")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Pipeline schedules: 1f1b, interleaved, zero-bubble (default: all).")
    ] = None,
    ep: Annotated[str | None, typer.Option(help="Ranks of expert parallelism: numbers or all (default: all).")] = None,
    dp_replicate: Annotated[
        str | None, typer.Option(help="Number of model replicas, each sharded (HSDP): numbers or all (default: all).")
    ] = None,
    microbatch: Annotated[
        str | None,
        typer.Option(
            help="Sequences per rank and microbatch: numbers or all "
            "(default: 1; all with --tokens-per-step or --search)."
        ),
    ] = None,
    microbatches: Annotated[int, _counted("Microbatches per rank and step, unless --tokens-per-step decides.")] = 1,
    checkpointing: Annotated[
        str | None,
        typer.Option(
            help="Activation checkpointing: auto (as few layers as fit), none, full, selective (by operator), every-K "
            "or first-N; several are separated by commas (default: auto; with --search also selective)."
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precisions of matrix products: bf16, fp8, mxfp8, nvfp4, fp32, separated by commas (default: bf16; "
            "fp32 on a CPU)."
        ),
    ] = None,
    reduction: Annotated[str, typer.Option(help="Gradient reduction dtype: bf16 or fp32.")] = "fp32",
    compile_: Annotated[str, typer.Option("--compile", help="Blocks under torch.compile: yes, no or both.")] = "no",
    offload: Annotated[
        bool, typer.Option("--offload", help="Keep masters, gradients and optimizer state in the host's memory.")
    ] = False,
    tuning: Annotated[str, typer.Option(help="What is trained: full, lora, or qlora (LoRA on NF4 weights).")] = "full",
    lora_rank: Annotated[int, _counted("Rank of LoRA's adapters.")] = 8,
    lora_targets: Annotated[
        str, typer.Option(help="Layers with adapters: all-linear, or some, such as q_proj,v_proj.")
    ] = "all-linear",
    frozen: Annotated[
        str, typer.Option(help="Parts that are not trained: embedding, head, first-N (layers), separated by commas.")
    ] = "",
    optimizer: Annotated[str, typer.Option(help="adamw, adamw-8bit, muon, adafactor or sgd.")] = "adamw",
    implementation: Annotated[
        list[str] | None,
        typer.Option(
            help="What your code decides, FIELD=VALUE, repeated for several: expert_tp=1, stages=4*15,2, "
            "graphs=blocks, dispatch=once ...; docs/how-to/plan.md lists them."
        ),
    ] = None,
    usd_per_gpu_hour: Annotated[float, _number(float, "Price of a GPU, for the cost.")] = 2.5,
    mtbf: Annotated[float, _number(float, "Hours between failures of one GPU, for goodput and cost.")] = 50_700.0,
    top: Annotated[int, _counted("Number of configurations to list.")] = 8,
    dry_runs: Annotated[
        int | None,
        _number(
            int,
            "Number of configurations to dry-run with the real code on fake GPUs, and rank by that "
            "(default: 4 with --search, else 0).",
        ),
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            help="Write the best configuration that a tool can run: torchtitan, accelerate, megatron, deepspeed or "
            "refshard; plan with its strategies and checkpointing policies by default."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --emit: the folder to write to (default: runs/emitted/TOOL).")
    ] = None,
    html: _Html = None,
) -> Answer:
    """Find the fastest way to train a model on a cluster: closed forms for all configurations, dry runs for the best.

    Dry runs need --search or --dry-runs. --tp, --cp, --pp, --interleave, --ep, --dp-replicate and --microbatch take
    numbers separated by commas, or `all`; each option states its default.

    Exit status: 0 if a configuration fits, 1 if none does.

    Example: refshard plan --model llama3-8b --cluster 8xh100
    """
    from refshard.commands import plan as command

    options = command.Options(
        model=model, cluster=cluster, gpus=gpus, nodes=nodes, seq_len=seq_len, tokens_per_step=tokens_per_step,
        search=search,
        strategies=strategy, microbatch=microbatch, microbatches=microbatches, checkpointing=checkpointing,
        dp_replicate=dp_replicate, tp=tp, cp=cp, pp=pp, interleave=interleave, schedule=schedule, ep=ep,
        precision=precision, reduction=reduction, compiled=compile_, offload=offload, tuning=tuning,
        lora_rank=lora_rank, lora_targets=lora_targets, frozen=frozen, optimizer=optimizer,
        implementation=tuple(implementation or ()), price_usd=usd_per_gpu_hour, mtbf_hours=mtbf, top=top,
        dry_runs=dry_runs,
    )  # fmt: skip
    with _interruptible("nothing is written"):
        return command.plan(options, page=html, tool=emit, out=out)


@app.command(context_settings=_SCRIPT, rich_help_panel=FIT)
@in_panels({
    "Without a script: --model": "model strategy seq_len microbatch microbatches precision checkpointing changes",
    "What to find out": "rank ranks phases until_phase races against explain_oom advise",
    "Several dry runs": "sweep largest jobs resume",
    "Output": "trace html",
})  # fmt: skip
@printed
def dryrun(
    context: typer.Context,
    cluster: _Cluster,
    command: Annotated[
        list[str] | None, typer.Argument(help="After `--`: SCRIPT ARGS, -m MODULE ARGS, or a launcher's command line.")
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"Instead of a script: {_MODEL[0].lower()}{_MODEL[1:]}")] = None,
    strategy: Annotated[str, typer.Option(help="How it is sharded (`refshard list strategies`).")] = "fsdp2",
    seq_len: _SeqLen = 8192,
    microbatch: Annotated[int, _counted("Sequences per rank and microbatch.")] = 1,
    microbatches: Annotated[int, _counted("Microbatches per rank and step.")] = 1,
    precision: Annotated[str, typer.Option(help="bf16 or fp32, for compute.")] = "bf16",
    checkpointing: Annotated[str, typer.Option(help="none, full, selective, every-K or first-N.")] = "none",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set any key of a case (tp=2, ...); may be repeated."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(help="Number of GPUs, or several: 8,16,64 (default: torchrun's options, or the whole cluster)."),
    ] = None,
    rank: Annotated[int | None, _number(int, "The rank to run (default: 0).")] = None,
    ranks: Annotated[
        str | None,
        typer.Option(help="Instead, run several and match their collectives: all, distinct or numbers (0,1,7)."),
    ] = None,
    steps: Annotated[
        str, typer.Option(help="Stop after this many optimizer steps; auto: once the peak of memory is stable.")
    ] = "3",
    phases: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Account memory by phase: names of record_function or NVTX ranges in the script (generate,train).",
        ),
    ] = None,
    until_phase: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Stop when this phase ends (evaluate:2: its second time), or after --steps (then 50 by default).",
        ),
    ] = None,
    tokens_per_step: Annotated[
        int | None, _counted("Tokens per step over all ranks (default: counted from the model's input).")
    ] = None,
    routing: Annotated[
        str,
        typer.Option(help="Which experts tokens are assumed to choose: balanced, zipf:S or worst (all on this rank)."),
    ] = "balanced",
    prices: Annotated[
        Path | None,
        typer.Option(
            help="A Kineto trace of the same job, on any number of GPUs: its kernels' times replace the model's."
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the replayed steps as a Kineto trace.")] = None,
    html: _Html = None,
    races: Annotated[
        bool, typer.Option("--races", help="Report unordered accesses to the same memory from two streams.")
    ] = False,
    compile_: Annotated[
        str, typer.Option("--compile", help="Let the script's torch.compile compile: yes, no (run eagerly) or both.")
    ] = "yes",
    against: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Also run another command, and report which modules differ.")
    ] = None,
    explain_oom: Annotated[
        Path | None,
        typer.Option(help="Explain why the real run ran out of memory, by the CUDA memory snapshot that it wrote."),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIONS",
            help="Run all combinations, as in '--batch {1,2,4} {,--checkpoint}', each in place of {}.",
        ),
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option(
            metavar="OPTION", help="Find the largest number that fits, as in '--batch {}' or '--seq-len {1024}'."
        ),
    ] = None,
    advise: Annotated[
        bool | None,
        typer.Option(
            "--advise/--no-advise",
            help="Try what could make it fit, or use the memory that is left (default: if it does not fit).",
        ),
    ] = None,
    jobs: Annotated[int | None, _counted("With several runs: how many at a time (default: one per core).")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="The folder of an interrupted sweep: run only what is missing.")
    ] = None,
) -> Answer:
    """Run one rank of an unmodified training script on fake GPUs, and report whether it fits and how fast it is.

    With --model, a model is trained under one strategy, and no script is needed. --sweep and --largest run the command
    several times, with other options in place of the word {}.

    With --ranks, several ranks run, and collectives that do not match are named: they hang on GPUs.

    With --phases, ranges that the script annotates (torch.profiler.record_function, torch.cuda.nvtx) are accounted each
    by itself: its peak, and what it carries over from others.

    Exit status: 0 if it fits; 1 if it does not, the script fails, --races finds a race or --ranks a mismatch; 3 if
    no optimizer step had work on the GPU, or a phase that is named did not run.

    Example: refshard dryrun --cluster 8xh100 -- train.py --batch 4

    Example: refshard dryrun --cluster 8xh100 --largest "--batch {}" -- train.py {}
    """
    from refshard.commands import dryrun as made
    from refshard.commands.dryrun_model import OPTIONS_OF_MODEL, Training

    if steps != "auto" and not re.fullmatch(r"-?\d+", steps):
        raise SpecError(f"dryrun: steps must be a number or auto, got '{steps}'")
    if until_phase is not None and steps == "auto":
        raise SpecError("dryrun: --until-phase and --steps auto exclude each other, got both; leave one out")
    if until_phase is not None and "--steps" not in _given(context):
        steps = str(made.MOST_STEPS)
    words, training = made.words_of(command or []), None
    if model is not None:
        if words:
            raise SpecError("dryrun: --model and a script exclude each other, got both; leave one out")
        training = Training(
            model=model, strategy=strategy, seq_len=seq_len, microbatch=microbatch, microbatches=microbatches,
            precision=precision, checkpointing=checkpointing, set=tuple(changes or ()),
        )  # fmt: skip
    elif extra := _given(context) & OPTIONS_OF_MODEL:
        raise SpecError(f"dryrun: {', '.join(sorted(extra))} needs --model; a script has options of its own")
    options = made.Options(
        words=words, training=training, against=() if against is None else made.words_of_text(against),
        cluster=cluster, rank=rank, ranks=ranks, steps=None if steps == "auto" else int(steps),
        phases=() if phases is None else tuple(name.strip() for name in phases.split(",")),
        until_phase=until_phase, races=races, compile=compile_, routing=routing,
        tokens_per_step=tokens_per_step,
        prices=prices, explain_oom=explain_oom, advise=advise, jobs=jobs or resources.available_cores(),
    )  # fmt: skip
    with _interruptible("nothing is written"):
        one = sweep is None and largest is None and "," not in cluster and (gpus is None or gpus.isdigit())
        if not one:
            from refshard.commands import sweep as several

            if trace is not None or against is not None or explain_oom is not None:
                raise SpecError("dryrun: --trace, --against and --explain-oom are for a single dry run; leave them out")
            varied = several.Sweep(sweep=sweep, largest=largest, clusters=cluster, gpus=gpus, resume=resume)
            return several.sweep(options, varied, html=html)
        if resume is not None:
            raise SpecError("dryrun: --resume needs the --sweep or the --largest that was interrupted")
        with elapsed(lambda: "dry run"):
            return made.dryrun(replace(options, gpus=None if gpus is None else int(gpus)), trace=trace, html=html)


@app.command(rich_help_panel=FASTEST)
@in_panels({
    "Without a suite": "strategy model seq_len microbatch microbatches precision checkpointing",
    "How ranks start": "launcher sbatch oversubscribe",
    "Dry runs": "cluster dry_run_first launch_all",
})  # fmt: skip
@printed
def run(
    suite: Annotated[
        str | None,
        typer.Argument(
            help="A suite's TOML file, the name of one that ships, or - for standard input.",
            autocompletion=_suite_names,
        ),
    ] = None,
    strategy: _Strategies = None,
    model: _Models = None,
    gpus: Annotated[str | None, typer.Option(help="Numbers of GPUs (ranks, on a CPU): 8,16,32 or 64..512.")] = None,
    seq_len: Annotated[str | None, typer.Option(help="Tokens per sequence; 8k is 8,192.")] = None,
    microbatch: Annotated[str | None, typer.Option(help="Sequences per rank and microbatch.")] = None,
    microbatches: Annotated[str | None, typer.Option(help="Microbatches per rank and step.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16 or fp32.")] = None,
    checkpointing: Annotated[str | None, typer.Option(help="none, full, selective, every-K or first-N.")] = None,
    rounds: Annotated[int | None, _counted("Rounds; each launches every case once. 3 or more give intervals.")] = None,
    changes: _Changes = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the run (default: a new one).")] = None,
    resume: Annotated[Path | None, typer.Option(help="Measure only what is missing in this run's folder.")] = None,
    only: _Only = None,
    list_: Annotated[bool, typer.Option("--list", help="Only list the cases and the expected duration.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write the suite to this TOML file.")] = None,
    oversubscribe: _Oversubscribe = False,
    launcher: _Launcher = None,
    sbatch: _Sbatch = None,
    cluster: _DryRunOn = None,
    dry_run_first: _DryRunFirst = None,
    launch_all: Annotated[bool, typer.Option("--launch-all", help="Also launch cases that will not fit.")] = False,
) -> Answer:
    """Measure every case of a suite and compare them.

    Without a suite, options describe one; each takes several values, separated by commas.

    Example: refshard run --strategy ddp,fsdp2 --model llama-mini --gpus 2
    """
    with mortal():
        from refshard.commands import matrix
        from refshard.commands import run as command
        from refshard.commands.launching import serve_rank

    if (status := serve_rank(launcher)) is not None:
        raise typer.Exit(status)
    keys = {
        "strategy": strategy, "model": model, "gpus": gpus, "seq_len": seq_len, "microbatch": microbatch,
        "microbatches": microbatches, "precision": precision, "checkpointing": checkpointing,
    }  # fmt: skip
    of_suite = matrix.Options(keys=keys, rounds=rounds, changes=tuple(changes or ()))
    options = command.Options(
        suite=matrix.chosen_suite(suite, of_suite), output=out, resume=resume, oversubscribe=oversubscribe,
        launcher=launcher, sbatch=sbatch, only=tuple(only or ()), cluster=cluster, dry_run_first=dry_run_first,
        launch_all=launch_all,
    )  # fmt: skip
    if write is not None and (chosen := command.chosen(options)) is not None:
        matrix.keep(chosen, write)
    if list_:
        return command.listed(options)
    with _interruptible("finished launches are saved. Resume with: refshard run --resume FOLDER"):
        return command.run(options)


@app.command(rich_help_panel=FASTEST)
@printed
def show(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a folder of runs.")] = Path("runs/latest"),
) -> Answer:
    """Print a run's tables and verdict, or list the runs in a folder.

    Example: refshard show runs/latest
    """
    from refshard.commands import show as command

    return command.show(run)


@app.command(rich_help_panel=FASTEST)
@printed
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="The baseline: a run's folder, or a strategy.")],
    b: Annotated[
        list[str] | None, typer.Argument(metavar="B", help="Another run, or strategies (default: all of the run).")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="With strategies: the run to take (default: latest).")] = None,
) -> Answer:
    """Compare two runs, or strategies of one run: ratios with their intervals.

    Example: refshard compare runs/before runs/after

    Example: refshard compare ddp fsdp2 --run runs/latest
    """
    from refshard.commands import compare as command

    return command.compare(a, tuple(b or ()), run)


@app.command(rich_help_panel=FASTEST)
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, such as runs/latest.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="page.html, a folder, a .zip to send, or '-' for stdout (default: in the last run's folder).",
        ),
    ] = None,
    against: Annotated[Path | None, typer.Option(help="An earlier run: say what changed since.")] = None,
) -> None:
    """Draw the dashboard of a run as one HTML file, or of several runs as a folder; both work offline.

    Example: refshard report runs/latest --out dashboard.html
    """
    from refshard.commands import report as command

    written = command.report(runs, out, against=against)
    if str(out) != "-":
        print(written)


def _trace_schema(asked: bool) -> None:
    if asked:
        from refshard.commands.printing import put_out
        from refshard.report.trace.schema import trace_schema

        put_out(json.dumps(trace_schema(), indent=2), sys.stdout)
        raise typer.Exit


@app.command(rich_help_panel=SLOW)
@in_panels({
    "What to look at": "job window gpu communication",
    "What to compare with": "against calibration cross_check",
    "Output": "html json_schema",
})  # fmt: skip
@printed
def trace(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Kineto traces (.json, .json.gz), exports of nsys (.sqlite), folders or URLs of them, or memory "
            "snapshots."
        ),
    ],
    context: typer.Context,
    hang: Annotated[
        bool,
        typer.Option("--hang", help="Files are flight recorder dumps of ranks (nccl_trace_rank_*): why the job hangs."),
    ] = False,
    html: _Html = None,
    job: Annotated[bool, typer.Option("--job", help="Treat all files as ranks of one job.")] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A trace recorded with CUDA_LAUNCH_BLOCKING=1, to time kernels before a reduction alone (give-way)."
        ),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Compare with this trace or job: explain the change in step time.")
    ] = None,
    cross_check: Annotated[
        str | None, typer.Option(help="Show another analyser's figures too: hta (Holistic Trace Analysis).")
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            help="Use as steps: annotations that match a regular expression ('^decode'), or a range of time from the "
            "trace's start (1.5s..2s). For inference."
        ),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Look at one GPU of a file that holds several (0, 1, ...).")] = None,
    communication: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Count kernels with this regular expression in their names as communication too; may be repeated.",
        ),
    ] = None,
    json_schema: Annotated[  # noqa: ARG001 -- it has printed already
        bool, typer.Option("--json-schema", is_eager=True, callback=_trace_schema, help="Print the schema of --json.")
    ] = False,
) -> Answer:
    """Analyse profiler traces: overlap, idle time, give-way, stragglers, and warnings about the trace.

    With --hang, exit status 1 if the dumps show why the job hangs, else 0.

    Example: refshard trace rank0.json.gz --html trace.html
    """
    from refshard.commands import trace as command
    from refshard.commands.remote import local

    if hang:
        if extra := _given(context) - {"paths", "--hang", *OUTPUT_OPTIONS}:
            raise SpecError(f"hang: dumps take no option of traces; leave out {', '.join(sorted(extra))}")
        with local(paths) as files:
            return command.hang(files)
    with _interruptible("nothing is written"), local([*paths, *([] if against is None else [against])]) as files:
        other = None if against is None else files.pop()
        return command.trace(
            files, page=html, one_job=job, calibration=calibration, against=other, cross_check=cross_check,
            window=window, device=gpu, communication=communication or (),
        )  # fmt: skip


@app.command(context_settings=_SCRIPT, rich_help_panel=SLOWER)
@in_panels({
    "Suites": "suite candidate strategy exact portable oversubscribe",
    "Scripts": "cluster gpus accept",
    "Output": "summary junit annotate",
})  # fmt: skip
@printed
def gate(
    context: typer.Context,
    command_words: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="After `--`: a training script and its arguments, to be dry-run."),
    ] = None,
    suite: _Suite = "gate",
    baseline: Annotated[
        str | None, typer.Option(help="A revision or a checkout (default: the accepted exact metrics).")
    ] = None,
    candidate: Annotated[str, typer.Option(help="A revision or a checkout.")] = ".",
    strategy: Annotated[str | None, typer.Option(help="Compare two strategies instead: BASELINE,CANDIDATE.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Exact metrics only: one launch of each case.")] = False,
    portable: Annotated[
        bool,
        typer.Option(
            "--portable", help="If this machine has no baseline, compare machine-independent metrics with another's."
        ),
    ] = False,
    oversubscribe: _Oversubscribe = False,
    baselines: _Baselines = resources.BASELINES,
    summary: Annotated[Path | None, typer.Option(help="Write the report as Markdown to this file.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.")] = None,
    annotate: Annotated[
        bool, typer.Option("--annotate", help="Print GitHub workflow commands that annotate the job.")
    ] = False,
    cluster: Annotated[
        str, typer.Option(help="The cluster to dry-run it on.", autocompletion=_cluster_names)
    ] = "dgx-h100",
    gpus: Annotated[int | None, _counted("Number of GPUs (default: the whole cluster).")] = None,
    accept: Annotated[str | None, typer.Option(metavar="REASON", help="Accept the figures of this run.")] = None,
) -> Answer:
    """Compare two revisions, or one with its baseline: the cases of a suite, or a dry run of a training script.

    Of a script, memory, operators, collectives and waits are compared with what was accepted (--accept REASON), or
    with a revision of its repository (--baseline).

    Exit status: 0 pass, 1 regression, 3 inconclusive, no comparable baseline or an error of the harness.

    Example: refshard gate --baseline main

    Example: refshard gate --cluster 8xh100 -- train.py --batch 4
    """
    with mortal():
        from refshard.commands import gate as command

    outputs = command.Outputs(summary=summary, junit=junit, annotate=annotate)
    given = _given(context)
    if words := [word for word in command_words or [] if word != "--"]:
        from refshard.commands import gate_script as script

        if extra := given & {"--suite", "--candidate", "--strategy", "--exact", "--portable", "--oversubscribe"}:
            raise SpecError(f"gate: {', '.join(sorted(extra))} is for suites; leave it out with a script")
        asked = script.Options(
            words=tuple(words), cluster=cluster, gpus=gpus, baseline=baseline, accept=accept, baselines=baselines
        )
        with _interruptible("there is no verdict"):
            return script.gate_script(asked, outputs)
    if extra := given & {"--cluster", "--gpus", "--accept"}:
        raise SpecError(f"gate: {', '.join(sorted(extra))} needs a script: refshard gate -- train.py --its args")
    options = command.Options(
        suite=suite, baseline=baseline, candidate=candidate, strategies=command.two_strategies(strategy),
        exact=exact, portable=portable, oversubscribe=oversubscribe, baselines=baselines,
    )  # fmt: skip
    with _interruptible("finished launches are saved; there is no verdict"):
        return command.gate(options, outputs)


@app.command(rich_help_panel=SLOWER)
def accept(
    run: Annotated[Path, typer.Argument(help="A run's folder, such as runs/latest.")],
    reason: Annotated[str, typer.Option(help="Why the new metrics are correct.")],
    baselines: _Baselines = resources.BASELINES,
) -> None:
    """Make a run's exact metrics the baseline for `refshard gate`.

    Example: refshard accept runs/latest --reason "larger buckets"
    """
    from refshard.commands import gate as command

    print(command.accept(run, reason, baselines))


@app.command(rich_help_panel=SLOWER)
@printed
def noise(
    suite: _Suite = "gate",
    rounds: Annotated[int, _counted("Rounds; each launches both sides of every case once.")] = 150,
    permutations: Annotated[int, _counted("Number of gates to simulate from them.")] = 1000,
    earlier: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Launch nothing: use the rounds in this earlier run's folder; may be repeated."),
    ] = None,
    oversubscribe: _Oversubscribe = False,
    baselines: _Baselines = resources.BASELINES,
) -> Answer:
    """Launch the same code against itself, to learn how often gates on this machine would be wrong.

    Example: refshard noise --rounds 150
    """
    with mortal():
        from refshard.commands import noise as command

    with _interruptible("finished rounds are saved. Use them with: refshard noise --from FOLDER"):
        return command.noise(
            suite, rounds=rounds, permutations=permutations, recorded=earlier or [],
            oversubscribe=oversubscribe, baselines=baselines,
        )  # fmt: skip


@app.command(rich_help_panel=SLOWER)
@printed
def history(
    runs: Annotated[Path, typer.Argument(help="A folder of runs.")] = Path("runs"),
    metric: Annotated[str, typer.Option(help="A metric, as `refshard show --json` names it.")] = "step_time_s",
    suite: Annotated[str | None, typer.Option(help="Only runs of the suite with this name.")] = None,
) -> Answer:
    """Show each case's trend across the runs of a folder.

    Example: refshard history runs --metric step_time_s
    """
    from refshard.commands import history as command

    return command.history(runs, metric=metric, suite=suite)


@app.command(rich_help_panel=SLOWER)
@in_panels({"Output": "html"})
@printed
def upgrade_check(
    before: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="An environment: a folder with bin/python, `current`, or requirements ('transformers==4.57.1').",
        ),
    ],
    after: Annotated[str, typer.Argument(metavar="B", help="Another, to compare with A.")],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="After `--`: as for `refshard dryrun`.")],
    cluster: _Cluster = "dgx-h100",
    gpus: Annotated[int | None, _counted("Number of GPUs (default: as `refshard dryrun`).")] = None,
    pip: Annotated[
        str, typer.Option(metavar="OPTIONS", help="More options for `pip install`, as in '--index-url URL'.")
    ] = "",
    html: _Html = None,
) -> Answer:
    """Dry-run the same script in two environments, and report what differs: a check before a library is upgraded.

    Memory, operators, collectives, host waits and predicted times are compared, and what accounts for them is named.
    Requirements are installed by pip into an environment of their own, on top of the current one, and kept.

    Exit status: 0 if no figure is worse in B, 1 if one is or the script fails only in B, 3 if the script does not
    train in A.

    Example: refshard upgrade-check current 'transformers==4.57.1' -- train.py
    """
    from refshard.commands import upgrade as made
    from refshard.commands.dryrun import words_of

    options = made.Options(before=before, after=after, words=words_of(command), cluster=cluster, gpus=gpus, pip=pip)
    with _interruptible("nothing is written"):
        return made.upgrade_check(options, html=html)


@app.command(rich_help_panel=MACHINES)
@printed
def doctor() -> Answer:
    """Describe this machine, what can run here, and what would make measurements wrong, each with its remedy.

    Exit status: 1 if something makes measurements wrong or impossible (an "error"), else 0.

    Example: refshard doctor
    """
    from refshard.commands import doctor as command

    return command.doctor()


@app.command(rich_help_panel=MACHINES)
@printed
def calibrate(
    context: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The profile to write ('-': stdout) (default: a new file in runs/)."),
    ] = None,
    gpus: Annotated[
        int | None,
        _counted("Number of GPUs, or of ranks on a CPU (default: all GPUs, or one per core; under torchrun, all)."),
    ] = None,
    threads_per_rank: Annotated[int, _counted("Threads per rank, on a CPU.")] = 1,
    launcher: _Launcher = None,
    sbatch: _Sbatch = None,
    network: Annotated[
        str | None, typer.Option(help="Connect ranks over rate-limited links: HOSTSxRATE, such as 2x2gbit.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure a few shapes and sizes only: seconds, coarse.")
    ] = False,
    rounds: Annotated[
        int | None, _counted("Measure all this often (default: 3; with --quick 1); more if clocks drift.")
    ] = None,
    earlier: Annotated[
        Path | None, typer.Option("--from", help="Launch nothing: make the profile from samples in this folder.")
    ] = None,
    from_trace: Annotated[
        Path | None,
        typer.Option(help="Launch nothing: the device's profile with the rates in this trace of real training."),
    ] = None,
) -> Answer:
    """Measure compute and collectives, here or on several nodes, and write a cluster's profile.

    Example: refshard calibrate --out mine.toml
    """
    for option, path in (("--from", earlier), ("--from-trace", from_trace)):
        if path and (extra := _given(context) - {"--out", option, *OUTPUT_OPTIONS}):
            raise SpecError(f"{option[2:]}: nothing is measured; leave out {', '.join(sorted(extra))}")
    with mortal():
        from refshard.commands import calibrate as command
        from refshard.commands.launching import serve_rank

    if from_trace:
        return command.from_trace(from_trace, out)
    if (status := serve_rank(launcher)) is not None:
        raise typer.Exit(status)
    options = command.Options(
        ranks=gpus, threads=threads_per_rank, network=network, device=command.device(device), quick=quick,
        sweeps=rounds,
        launcher=launcher, sbatch=sbatch,
    )  # fmt: skip
    with _interruptible("samples are saved. Make a profile of them with: refshard calibrate --from FOLDER"):
        return command.from_samples(earlier, out) if earlier else command.calibrate(out, options)


@app.command(rich_help_panel=MACHINES)
@printed
def validate(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="A run's folder (default: published results, in a checkout). With --prices: `--` and a command.",
        ),
    ] = None,
    fidelity: Annotated[
        str, typer.Option(help="What predicts published results: plan (closed forms) or dryrun.")
    ] = "plan",
    only: Annotated[str | None, typer.Option(help="With dryrun: only published runs with this in their name.")] = None,
    published: Annotated[
        Path | None, typer.Option(help="A table of your own, in TOML (default: the checkout's).")
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            help="A Kineto trace of the command after `--`: compare dry runs with and without its prices with it."
        ),
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="With --prices: where the trace was recorded.")] = None,
) -> Answer:
    """Compare predictions with measurements, or with published results.

    Example: refshard validate runs/latest
    """
    from refshard.commands import validate as command

    with _interruptible("nothing is written"):
        if (prices is None) != (cluster is None):
            raise SpecError("validate: --prices and --cluster go together, got one of them; add the other")
        if prices is not None and cluster is not None:
            from refshard.commands import dryrun as made

            options = made.Options(words=made.words_of(run or []), cluster=cluster, prices=prices)
            return made.validate_prices(options)
        if len(run or []) > 1:
            raise SpecError(f"validate: one run may be given, got {len(run or [])}; a command needs --prices")
        folder = Path(run[0]) if run else None
        return command.validate(folder, fidelity=fidelity, only=only, published=published)


@app.command(name="list", rich_help_panel=MACHINES)
@printed
def list_(
    what: Annotated[
        str,
        typer.Argument(
            help="strategies, models, modes, suites, clusters or hardware",
            autocompletion=_starting_with(lambda: list(_KINDS)),
        ),
    ],
) -> Answer:
    """List strategies, models, modes, suites, clusters or hardware profiles.

    Example: refshard list models
    """
    from refshard.commands import listing

    return listing.listing(what)


_RANKS = {"--world-size": "--gpus", "--ranks": "--gpus"}
_RENAMED = {
    "trace": {"--device": "--gpu"},
    "run": {**_RANKS, "--dry-run-on": "--cluster", "--dry-run": "--list"},
    "plan": {
        **_RANKS, "--tensor": "--tp", "--context": "--cp", "--pipeline": "--pp", "--expert": "--ep",
        "--replicas": "--dp-replicate", "--checkpoint": "--checkpointing", "--dtype": "--precision",
        "--accumulate": "--microbatches", "--freeze": "--frozen", "--price": "--usd-per-gpu-hour",
    },
    "dryrun": {"--world-size": "--gpus", "--dtype": "--precision", "--checkpoint": "--checkpointing"},
    "calibrate": {**_RANKS, "--sweeps": "--rounds", "--threads": "--threads-per-rank"},
    "validate": {"--from-trace": "--prices"},
    "noise": {"--launches": "--rounds (of two launches)"},
    "gate": {"--strategies": "--strategy"},
}  # fmt: skip
"""Options that had another name, by command."""
_REFUSALS = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS)
"""What a file system answers where nothing can be written."""
_KINDS = ("strategies", "models", "modes", "suites", "clusters", "hardware")


def main(arguments: Sequence[str] | None = None, program: typer.Typer = app) -> None:
    """Run the command line, or ``arguments`` in its place; a user's mistake is one line on standard error."""
    try:
        status = program(arguments, standalone_mode=False)
    except _UsageError as error:
        print(f"refshard: {_mistake(error)}", file=sys.stderr)
        status = Status.WRONG_CALL
    except RefshardError as error:
        print(f"refshard: {error}", file=sys.stderr)
        status = error.status
    except BrokenPipeError:  # the reader has seen enough
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        status = Status.NO_VERDICT
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        if error.errno in _REFUSALS:
            remedy = "make room, or go to a folder that can be written"
            print(f"refshard: {where}{error.strerror}; {remedy}", file=sys.stderr)
        else:
            traceback.print_exc()
        status = Status.NO_VERDICT
    except Exception:  # a defect must not end as a "no" does
        traceback.print_exc()
        status = Status.NO_VERDICT
    sys.exit(status)


def _mistake(error: Any) -> str:
    """What is wrong with the words of a command line, and the remedy."""
    command = None if error.ctx is None or error.ctx.parent is None else error.ctx.command
    where = "" if command is None else f"{command.name}: "
    option = getattr(error, "option_name", None)
    if command is None or option is None or not hasattr(error, "possibilities"):
        text: str = error.format_message().replace("\n", " ").rstrip(".")
        if value := re.fullmatch(r"Invalid value for '(\S+)': (.+)", text):
            return f"{where}{value[1]} {value[2]}"
        remedy = "" if text.endswith("?") else f"; see refshard {f'{command.name} ' if command else ''}--help"
        return f"{where}{text[0].lower()}{text[1:]}{remedy}"
    if (now := _RENAMED.get(command.name, {}).get(option)) is not None:
        return f"{where}no option {option}: it is now {now}"
    known = [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
    remedy = f"did you mean {close[0]}?" if (close := get_close_matches(option, known, n=1)) else "see --help"
    script = "" if error.ctx.allow_interspersed_args else " (options of a script, and -m, go after --)"
    return f"{where}no option {option}; {remedy}{script}"


if __name__ == "__main__":
    main()
