"""``refshard upgrade-check A B -- train.py``: a script dry-run in two environments, before a library is upgraded."""

import shlex
from pathlib import Path

import msgspec

from refshard.commands.dryrun import Options as DryRunOptions
from refshard.commands.dryrun import trial_of
from refshard.commands.printing import check_writable, tell, write_page
from refshard.dryrun.environments import Environment, find_environment, program_in
from refshard.dryrun.launchers import is_program
from refshard.dryrun.run import dry_run
from refshard.dryrun.trials import Trial
from refshard.errors import RefshardError, SpecError
from refshard.report.blocks import Answer
from refshard.report.dryrun.upgrade import Side, upgrade_answer


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The environments ``before`` and ``after``, as :func:`refshard.dryrun.environments.find_environment` reads them,
    with more options for ``pip``; and the ``words`` of the command, on ``gpus`` GPUs of ``cluster``.
    """

    before: str
    after: str
    words: tuple[str, ...]
    cluster: str
    gpus: int | None = None
    pip: str = ""


def upgrade_check(options: Options, *, html: Path | None = None) -> Answer:
    """Compare; ``html`` is a file for a page of everything.

    Raises:
        SpecError: the command, the cluster or an environment is wrong, pip fails, or the page cannot be written.
        RefshardError: an environment cannot run dry runs, or the script's process ended without an answer.
    """
    check_writable(html=html)
    trial = trial_of(DryRunOptions(words=options.words, cluster=options.cluster, gpus=options.gpus))
    try:
        pip = shlex.split(options.pip)
    except ValueError as error:
        raise SpecError(f"pip must be options of `pip install`, got '{options.pip}' ({error})") from None
    before, after = (_environment(text, pip) for text in (options.before, options.after))
    answer = upgrade_answer(_side(before, trial), _side(after, trial), more=f"page: {html}" if html is not None else "")
    if html is not None:
        write_page(answer, html, "upgrade-check")
    return answer


def _environment(text: str, pip: list[str]) -> Environment:
    tell(f"environment: {text}")
    return find_environment(text, pip)


def _side(environment: Environment, trial: Trial) -> Side:
    tell(f"dry run: {environment.name}")
    request = msgspec.structs.replace(trial.request, python=environment.python, sites=True)
    if not request.module and is_program(request.command[0]):
        program = program_in(environment, request.command[0])
        request = msgspec.structs.replace(request, command=(program, *request.command[1:]))
    try:
        return Side(environment=environment, found=trial.analyse(dry_run(request, quiet=True)))
    except RefshardError as error:
        raise type(error)(f"{environment.name}: {error}") from None
