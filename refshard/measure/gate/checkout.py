"""Another revision of the code beside this one, for as long as it is needed."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from refshard.errors import SpecError
from refshard.measure.environment import code_sha256, git_state
from refshard.measure.launchers.local import worker_of
from refshard.records import Environment


@dataclass(frozen=True, slots=True)
class Checkout:
    """A folder that holds a refshard."""

    folder: Path

    def of(self, environment: Environment) -> Environment:
        """This machine's environment for ranks that run the code here."""
        commit, dirty = git_state(self.folder)
        return msgspec.structs.replace(
            environment, git_commit=commit, git_dirty=dirty, code_sha256=code_sha256(self.folder / "refshard")
        )


@contextmanager
def checked_out(revision: str, repository: Path) -> Iterator[Checkout]:
    """Where ``revision`` lies: a folder as it is, or what git has under that name, in a worktree that is removed.

    Raises:
        SpecError: it is neither, or holds no refshard that can be imported.
    """
    if Path(revision).is_dir():
        source = Path(revision).resolve()
        _check_importable(revision, source)
        yield Checkout(source)
        return
    commit = _git(repository, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").stdout.strip()
    if not commit:
        raise SpecError(f"'{revision}' is neither a folder nor a revision of {repository}; name one that git log shows")
    with tempfile.TemporaryDirectory(prefix="refshard-checkout-") as folder:
        source = Path(folder) / "source"
        made = _git(repository, "worktree", "add", "--detach", str(source), commit)
        if made.returncode:
            raise SpecError(f"'{revision}' cannot be checked out ({made.stderr.strip()}); correct that")
        try:
            _check_importable(revision, source)
            yield Checkout(source)
        finally:
            _git(repository, "worktree", "remove", "--force", str(source))


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise SpecError(f"git cannot be started ({error.strerror}); install it, or name folders") from None


def _check_importable(revision: str, source: Path) -> None:
    """What ranks import must lie there, and not, say, beside the installed package."""
    asked = f"import {worker_of(source)} as worker; print(worker.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONSAFEPATH": "1"}
    found = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=False, env=environment, cwd=source
    )
    if not Path(found.stdout.strip() or "/").is_relative_to(source):
        last = found.stderr.strip().rpartition("\n")[2] or f"it is imported from {found.stdout.strip()}"
        raise SpecError(f"'{revision}' has no refshard that can run ({last}); name a refshard checkout")
