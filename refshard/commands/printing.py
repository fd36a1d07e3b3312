"""How commands print: one set of options for all that return an :class:`refshard.report.blocks.Answer`."""

import copy
import functools
import inspect
import logging
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args

import typer

from refshard.errors import SpecError
from refshard.folders import STDOUT, check_replaceable_file, replace_file
from refshard.quantities import format_duration
from refshard.report import forms
from refshard.report.blocks import Answer

LOG = logging.getLogger("refshard")
"""Its level is what ``--quiet`` and ``--verbose`` set: WARNING, INFO by default, DEBUG."""
LOG.setLevel(logging.INFO)

_OPTIONS: dict[str, Any] = {
    "as_json": Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel="Output")],
    "as_csv": Annotated[bool, typer.Option("--csv", help="Print CSV (RFC 4180).", rich_help_panel="Output")],
    "as_markdown": Annotated[
        bool, typer.Option("--markdown", help="Print Markdown, for a pull request.", rich_help_panel="Output")
    ],
    "verbose": Annotated[bool, typer.Option("--verbose", "-v", help="Print details too.", rich_help_panel="Output")],
    "quiet": Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print the verdict only, and no progress.", rich_help_panel="Output"),
    ],
}

OUTPUT_OPTIONS = frozenset(f"--{name.removeprefix('as_')}" for name in _OPTIONS)
"""Their long names."""


def in_panels(panels: dict[str, str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Show options of a command in panels of its help: by title, the parameters' names, separated by spaces.

    Options that are not named stay in the first panel; "Output" has :data:`_OPTIONS` too.
    """

    def placed(parameter: inspect.Parameter, title: str) -> inspect.Parameter:
        kind, option = get_args(parameter.annotation)
        option = copy.copy(option)  # commands share some
        option.rich_help_panel = title
        return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option])

    def apply(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        left = dict(signature.parameters)
        options = [placed(left.pop(name), title) for title, names in panels.items() for name in names.split()]
        output = [left.pop(name) for name in _OPTIONS]
        command.__signature__ = signature.replace(parameters=[*left.values(), *options, *output])  # type: ignore[attr-defined]
        return command

    return apply


def printed(command: Callable[..., Answer]) -> Callable[..., None]:
    """A command that prints the answer of ``command`` as its options say, and exits with the answer's status."""
    own = inspect.signature(command)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = {name: bool(given.pop(name)) for name in _OPTIONS}
        _check(options)
        for name, value in given.items():
            if value == "" != own.parameters[name].default:
                shown = name.strip("_").replace("_", "-")
                raise SpecError(f"{shown}: '' given; name a value, or leave it out (is a variable empty?)")
        LOG.setLevel(logging.WARNING if options["quiet"] else logging.DEBUG if options["verbose"] else logging.INFO)
        answer = command(**given)
        stream = sys.stderr if STDOUT in given.values() else sys.stdout  # a file that goes there has it for itself
        put_out(rendered(answer, command.__name__.strip("_"), options, stream), stream)
        if answer.status:
            raise typer.Exit(answer.status)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    # Lines of a paragraph are joined, so that help wraps at the terminal's width.
    run.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.__doc__ or ""))
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, **_OPTIONS}
    return run


def rendered(answer: Answer, name: str, options: dict[str, bool], stream: TextIO) -> str:
    """The answer of the command ``name`` in the requested format, for ``stream``."""
    if options["as_json"]:
        return forms.as_json(answer, name)
    if options["as_csv"]:
        return forms.as_csv(answer)
    if options["as_markdown"]:
        return forms.as_markdown(answer, name)
    return forms.as_text(answer, paper(stream), verbose=options["verbose"], quiet=options["quiet"])


def paper(stream: TextIO) -> forms.Paper:
    """The terminal that ``stream`` leads to, or a file's endless lines; ``COLUMNS`` and https://no-color.org are
    honoured.
    """
    if not stream.isatty():
        columns = os.environ.get("COLUMNS", "")
        return forms.Paper(width=int(columns) if columns.isdigit() and int(columns) else None)
    colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return forms.Paper(width=shutil.get_terminal_size().columns, colours=colours)


def check_writable(**files: Path | None) -> None:
    """Refuse, before anything runs, files that cannot be written, by their option.

    Raises:
        SpecError: one cannot be written.
    """
    for option, path in files.items():
        try:
            if path is not None:
                check_replaceable_file(path)
        except OSError as error:
            raise SpecError(f"{option}: {path} cannot be written ({error.strerror}); name a writable file") from None


def write_page(answer: Answer, path: Path, product: str) -> None:
    """Write an answer of the command ``product`` to ``path`` as a page, whole or not at all.

    Raises:
        SpecError: the folder does not exist or cannot be written; what was at ``path`` stays.
    """
    from refshard.report.page import as_page  # plotly takes a second to import

    try:
        replace_file(path, as_page(answer, product=product, command=shlex.join(["refshard", *sys.argv[1:]])))
    except OSError as error:
        raise SpecError(f"html: {path} cannot be written ({error.strerror}); name a writable file") from None


def put_out(text: str, stream: TextIO) -> None:
    """Write to ``stream``; a reader that has seen enough (``head``) is no error."""
    try:
        print(text, end="" if text.endswith("\n") else "\n", file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is still buffered has nowhere to go


def tell(text: str) -> None:
    """Say something of a long command's progress, unless ``--quiet`` forbids it."""
    if LOG.isEnabledFor(logging.INFO):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def elapsed(what: Callable[[], str], stream: TextIO = sys.stderr, every_s: float = 10.0) -> Iterator[None]:
    """On a terminal, print every ``every_s`` seconds ``what`` runs and for how long, unless ``--quiet`` forbids it."""
    ended, began = threading.Event(), time.monotonic()

    def report() -> None:
        while not ended.wait(every_s):
            print(f"{what()}: {format_duration(time.monotonic() - began)}", file=stream, flush=True)

    if not (stream.isatty() and LOG.isEnabledFor(logging.INFO)):
        yield
        return
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()


def warn(text: str) -> None:
    """Print on standard error what must be seen in every output format."""
    print(text, file=sys.stderr, flush=True)


def _check(options: dict[str, bool]) -> None:
    forms_asked = [f"--{name.removeprefix('as_')}" for name in ("as_json", "as_csv", "as_markdown") if options[name]]
    if len(forms_asked) > 1:
        raise SpecError(f"{forms_asked[0]} and {forms_asked[1]}: only one format can be printed; leave out one of them")
    if options["verbose"] and options["quiet"]:
        raise SpecError("--verbose and --quiet exclude each other; leave out one of them")
