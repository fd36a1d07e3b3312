"""Commands in this process, which has imported what they need."""

import logging
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess

import pytest

from refshard.cli import main
from refshard.commands.printing import LOG

Command = Callable[..., CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _as_talkative_as_before() -> Iterator[None]:
    """What ``--quiet`` or ``--verbose`` of a test set does not outlast it."""
    yield
    LOG.setLevel(logging.INFO)


@pytest.fixture
def refshard(capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line: ``refshard("trace", "a.json")``."""

    def run(*arguments: str) -> CompletedProcess[str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return CompletedProcess(arguments, int(ended.value.code or 0), *capsys.readouterr())

    return run
