"""What commands that launch a suite have in common."""

from pathlib import Path

from refshard.commands.printing import tell
from refshard.errors import SpecError
from refshard.measure.launchers.local import LocalLauncher
from refshard.measure.run import check_suite, new_run_folder
from refshard.specs.case import CaseSpec
from refshard.specs.suite import SuiteSpec


def run_folder(name: str) -> Path:
    """A fresh folder name under ``runs/`` of the current directory, which is told."""
    folder = new_run_folder(name)
    tell(f"run folder: {folder}")
    return folder


def check_gated(suite: SuiteSpec, *, oversubscribe: bool) -> tuple[CaseSpec, ...]:
    """The cases of ``suite``.

    Raises:
        SpecError: a gate cannot launch them, or could not tell them apart.
    """
    if suite.network is not None:
        raise SpecError("suite: a gate launches ranks on this machine only; leave out 'network'")
    cases = check_suite(suite, LocalLauncher(), oversubscribe=oversubscribe)
    names = [case.name for case in cases]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SpecError(f"suite: two cases are named {twice}, but a gate needs unique names; move one to another suite")
    return cases
