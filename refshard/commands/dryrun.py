"""``refshard dryrun``: run a training script on GPUs that are not here, and say what would happen there."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from refshard.commands.dryrun_model import Training, training_command
from refshard.commands.printing import check_writable, write_page
from refshard.dryrun.advice import Advice, Choices, advise
from refshard.dryrun.analyse import Analysis
from refshard.dryrun.command_line import TrainingCommand, read_command
from refshard.dryrun.explain import explain, read_real_run
from refshard.dryrun.measured_prices import check_share, read_measured
from refshard.dryrun.ranks import RanksRun, read_ranks, run_ranks
from refshard.dryrun.request import request_on
from refshard.dryrun.run import DryRun, dry_run
from refshard.dryrun.template import find_batch
from refshard.dryrun.trials import Laboratory, Trial
from refshard.errors import RefshardError, SpecError, TraceError
from refshard.events.writer import as_kineto
from refshard.folders import replace_file
from refshard.report.blocks import Answer
from refshard.report.dryrun.against import Against
from refshard.report.dryrun.answer import dryrun_answer
from refshard.report.dryrun.explain import explained_answer
from refshard.report.dryrun.prices import prices_answer
from refshard.report.dryrun.ranks import ranks_answer
from refshard.specs.cluster import load_cluster

MOST_STEPS = 50
"""After which it stops even if its peak still rises, or the phase has not ended."""
_EAGER = {"TORCHDYNAMO_DISABLE": "1"}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line: the ``words`` of a command, or a ``training`` in its place; with ``against``,
    those of another command to compare with. ``steps`` is None for auto, ``tokens_per_step`` are those of all ranks.
    ``phases`` are ranges of the script to account, and it stops when ``until_phase`` (``NAME`` or ``NAME:2``) ends.
    One of ``rank`` and ``ranks`` may be given; rank 0 is the default. ``prices`` is a trace that prices kernels, and
    ``explain_oom`` a memory snapshot of the real run, to explain by the dry run. ``advise`` says whether to try
    remedies, None: if it does not fit. ``environment`` is added to the script's variables. Several runs go on ``jobs``
    at a time.
    """

    words: tuple[str, ...] = ()
    training: Training | None = None
    against: tuple[str, ...] = ()
    cluster: str
    gpus: int | None = None
    rank: int | None = None
    ranks: str | None = None
    steps: int | None = 3
    phases: tuple[str, ...] = ()
    until_phase: str | None = None
    tokens_per_step: int | None = None
    races: bool = False
    compile: str = "yes"
    environment: dict[str, str] = {}
    routing: str = "balanced"
    prices: Path | None = None
    advise: bool | None = None
    jobs: int = 1
    explain_oom: Path | None = None


def dryrun(options: Options, *, trace: Path | None = None, html: Path | None = None) -> Answer:
    """Run the script that the words name; the status is 0 if it fits, 1 if it does not, failed or, where races were
    asked for, has some or, where several ranks run, their collectives do not match, and 3 without a verdict.

    With ``compile`` "both" it runs a second time, without torch.compile, to compare; or another command runs.

    ``trace`` is a file to write the replayed steps to, as a Kineto trace; ``html`` one for a page of everything.

    Raises:
        SpecError: the command, the cluster or another value is wrong, or the trace or the page cannot be written.
        TraceError: the trace with prices is damaged, shows no kernels of a GPU, or is of another job; or the snapshot
            to explain is none, damaged, or has no stacks.
        RefshardError: the fake device cannot be made.
    """
    check_writable(trace=trace, html=html)
    if options.ranks is not None and (options.rank is not None or options.compile == "both"):
        excluded = "--rank" if options.rank is not None else "--compile both"
        raise SpecError(f"dryrun: --ranks and {excluded} exclude each other, got both; leave one out")
    if options.against and (options.training is not None or options.ranks is not None or options.compile == "both"):
        raise SpecError(
            "dryrun: --against compares two scripts by one rank; leave out --model, --ranks, --compile both"
        )
    if options.explain_oom is not None and (options.ranks is not None or options.compile == "both" or options.against):
        raise SpecError("dryrun: --explain-oom explains one run; leave out --ranks, --compile both, --against")
    real = None if options.explain_oom is None else read_real_run(options.explain_oom)
    trial = trial_of(options)
    theirs = trial_of(replace(options, words=options.against)) if options.against else None
    request = replace(trial.request, sites=real is not None)
    trial.check_prices()
    try:
        ranks = None if options.ranks is None else read_ranks(options.ranks, request.world_size)
    except ValueError as error:
        raise SpecError(f"dryrun: {error}") from None
    ran = None if ranks is None else run_ranks(request, ranks, options.jobs)
    run = dry_run(request) if ran is None else ran.runs[ran.largest]
    found, alone = _analysed(trial, run, races=options.races)
    if trace is not None:
        replace_file(trace, [as_kineto(found.trace)])
    against = None
    if options.compile == "both" and found.run.answer.compiled is not None:
        other = trial.analyse(dry_run(replace(request, environment={**request.environment, **_EAGER})))
        against = Against(varied="torch.compile", names=("compiled", "eager"), other=other)
    elif theirs is not None:
        other = theirs.analyse(dry_run(theirs.request))
        against = Against(varied="command", names=(shlex.join(options.words), shlex.join(options.against)), other=other)
    more = f"page: {html}" if html is not None else ""
    if real is not None:
        explanation = explain(real, found)
        if found.fits and (explanation.scale or 0) > 1:  # what batch would fit is then the question
            options = replace(options, advise=options.advise is not False)
        answer = explained_answer(real, found, explanation, _advice(options, found), more)
    elif ran is None:
        answer = dryrun_answer(found, more, against, _advice(options, found), alone=alone)
    else:
        answer = ranks_answer(ran, found, _step_times(ran, found, trial), more)
    if html is not None:
        write_page(answer, html, "dryrun")
    return answer


def validate_prices(options: Options) -> Answer:
    """A dry run on as many GPUs as its trace of prices is of, against that trace.

    Raises:
        SpecError, TraceError, RefshardError: as :func:`dryrun`, or the trace shows no step or the script took none.
    """
    assert options.prices is not None
    measured = read_measured(options.prices)
    if measured.step_s is None:
        raise TraceError(
            f"prices: the trace must show a step, got none in {options.prices}; record a whole optimizer step"
        )
    trial = trial_of(replace(options, gpus=measured.world_size))
    trial.check_prices()
    run = dry_run(trial.request)
    found, alone = _analysed(trial, run, races=False)
    if alone is None:
        why = run.answer.error or "no optimizer step ran"
        raise RefshardError(f"prices: the command must take an optimizer step, got: {why}; see `refshard dryrun`")
    return prices_answer(found, alone)


def _analysed(trial: Trial, run: DryRun, *, races: bool) -> tuple[Analysis, Analysis | None]:
    """The analysis; also one without the trace of prices, if that shows a step of as many ranks.

    Raises:
        TraceError: the trace is of another job.
    """
    found = trial.analyse(run, races=races)
    if found.measured is None or found.coverage is None:
        return found, None
    assert trial.prices is not None
    check_share(found.coverage.share, trial.prices)
    comparable = found.measured.world_size == trial.request.world_size and found.measured.step_s is not None
    return found, replace(trial, prices=None).analyse(run) if comparable else None


def _step_times(ran: RanksRun, found: Analysis, trial: Trial) -> dict[int, float | None]:
    """Seconds of a step by rank."""
    one = found.run.request.rank
    return {rank: found.step_s if rank == one else trial.analyse(run).step_s for rank, run in ran.runs.items()}


def _advice(options: Options, found: Analysis) -> Advice | None:
    if found.fits is None or not (found.fits is False if options.advise is None else options.advise):
        return None
    with Laboratory(options.jobs) as laboratory:
        return advise(found, choices(options), laboratory)


def choices(options: Options) -> Choices:
    """What can be varied of a command without a change of its script: of a model its fields, else what the words show.
    Tokens that were given are those of the command as it is, and are counted for others.
    """
    as_counted = replace(options, tokens_per_step=None)

    def on_gpus(count: int) -> Trial:
        return trial_of(replace(as_counted, gpus=count))

    if (training := options.training) is not None:
        return Choices(
            on_gpus=on_gpus, batch_name="--microbatch", batch=training.microbatch, checkpoints=True,
            with_batch=lambda n: trial_of(replace(options, training=replace(training, microbatch=n))),
            others={} if training.checkpointing == "full" else {
                "--checkpointing full": trial_of(replace(options, training=replace(training, checkpointing="full")))
            },
        )  # fmt: skip
    if (number := find_batch(options.words)) is None:
        return Choices(on_gpus=on_gpus)
    return Choices(
        on_gpus=on_gpus, batch_name=number.name, batch=number.value,
        with_batch=lambda n: trial_of(replace(as_counted, words=number.words(n))),
    )  # fmt: skip


def trial_of(options: Options) -> Trial:
    """What to run.

    Raises:
        SpecError: the command, the cluster or another value is wrong.
    """
    if options.compile not in ("yes", "no", "both"):
        raise SpecError(f"dryrun: compile must be yes, no or both, got '{options.compile}'")
    words, tokens = options.words, options.tokens_per_step
    if options.training is not None:
        words, tokens = training_command(options.training, options.cluster, options.gpus)
    command = read_command(words)
    gpus = _gpus(options, command)
    request = request_on(
        options.cluster, gpus, command=command.command, module=command.module, rank=options.rank or 0,
        routing=options.routing, steps=MOST_STEPS if options.steps is None else options.steps,
        until_stable=options.steps is None,
        environment={**options.environment, **command.environment, **(_EAGER if options.compile == "no" else {})},
        rank_variables=gpus != 1 or not command.python, phases=options.phases, until_phase=options.until_phase,
    )  # fmt: skip
    return Trial(request=request, global_tokens=tokens, prices=options.prices)


def _gpus(options: Options, command: TrainingCommand) -> int:
    """As given, else torchrun's number, else the whole cluster."""
    cluster = load_cluster(options.cluster)
    if options.gpus is not None:
        if options.gpus < 1:
            raise SpecError(f"dryrun: gpus must be >= 1, got {options.gpus}")
        return options.gpus
    if command.ranks_per_node is None and command.nodes is None:
        return cluster.world_size
    return (command.nodes or 1) * (command.ranks_per_node or cluster.ranks_per_node)


def words_of_text(text: str) -> tuple[str, ...]:
    """The words of a command that is one option's value.

    Raises:
        SpecError: it has none, or a quote is not closed.
    """
    try:
        words = words_of(shlex.split(text))
    except ValueError as error:
        raise SpecError(f"dryrun: against must be a command, got '{text}' ({error})") from None
    if not words:
        raise SpecError("dryrun: against must be a command, got none; give the words of the other script's run")
    return words


def words_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """What follows the two dashes, which the command line may have kept."""
    return tuple(arguments[1:] if arguments[:1] == ["--"] else arguments)
