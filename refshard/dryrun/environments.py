"""Python environments in which dry runs of one script are compared: those that exist, and those made of requirements.

An environment of requirements is a virtual environment in the user's cache. What pip installs there comes before the
packages of this Python, so it holds only what differs. Each environment runs this very refshard, whichever it has.
``python -m refshard.dryrun.environments`` prints what an environment holds.
"""

import fcntl
import hashlib
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import msgspec

from refshard.errors import RefshardError, SpecError

CURRENT = "current"
"""Names the environment that refshard runs in."""
OLDEST_TORCH = (2, 11)
_PACKAGE = Path(__file__).resolve().parents[1]
_TORCH = re.compile(r"torch([^\w.-].*)?")


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """An environment: how the command line names it, its ``python``, and its distributions' versions."""

    name: str
    python: str
    packages: dict[str, str]


class _Found(msgspec.Struct):
    packages: dict[str, str]
    wrong: str


def find_environment(text: str, pip: Sequence[str] = ()) -> Environment:
    """The environment that ``text`` names: :data:`CURRENT`, a folder with ``bin/python``, a Python, or requirements, as
    in ``transformers==4.57.1 tokenizers==0.22``, for which it is made. ``pip`` are more options for ``pip install``.

    Raises:
        SpecError: there is no such environment, pip cannot install the requirements, or torch is of another range.
        RefshardError: it cannot run refshard, or has no CPU build of torch.
    """
    python = Path(sys.executable) if text == CURRENT else _existing(text) or _made(text, pip)
    with this_refshard() as variables:
        command = [str(python), "-m", "refshard.dryrun.environments"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise RefshardError(f"{text}: {python} cannot run refshard ({why}); install msgspec, numpy and torch there")
    found = msgspec.json.decode(done.stdout, type=_Found)
    torch = found.packages.get("torch", "")
    if (read := re.match(r"(\d+)\.(\d+)", torch)) and (int(read[1]), int(read[2])) < OLDEST_TORCH:
        raise SpecError(f"{text}: torch must be {'.'.join(map(str, OLDEST_TORCH))} or newer, got {torch}")
    if found.wrong:
        raise RefshardError(f"{text}: {found.wrong}")
    return Environment(name=text, python=str(python), packages=found.packages)


def program_in(environment: Environment, program: str) -> str:
    """Where an environment has a ``program`` of this Python, such as ``accelerate``. One that was made for what differs
    gets a copy of this Python's.

    Raises:
        SpecError: one that exists has no such program.
    """
    own = Path(environment.python).parent / Path(program).name
    if not own.exists() and own.is_relative_to(_cache()):
        own.write_bytes(Path(program).read_bytes())
    if not own.exists():
        raise SpecError(f"{environment.name}: there is no {own}; install it there, or give the script that it starts")
    return str(own)


@contextmanager
def this_refshard() -> Iterator[dict[str, str]]:
    """The environment variables with which any Python imports this refshard, and nothing else of its folder."""
    with tempfile.TemporaryDirectory(prefix="refshard-path-") as folder:
        (Path(folder) / "refshard").symlink_to(_PACKAGE, target_is_directory=True)
        paths = (folder, os.environ.get("PYTHONPATH", ""))
        yield {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _existing(text: str) -> Path | None:
    """The Python of an environment that is there, by its own path: of a virtual environment, it is a link."""
    path = Path(text).expanduser()
    python = path / "bin" / "python" if path.is_dir() else path
    if python.is_file() and os.access(python, os.X_OK):
        return python.absolute()
    if text.startswith((".", "/", "~")) and not path.exists():
        raise SpecError(f"there is no environment '{text}'; give a folder with bin/python, or requirements for pip")
    return None


def _made(text: str, pip: Sequence[str]) -> Path:
    """The Python of the environment that has these requirements on top of this one. It is made once; if a requirement
    is a file or a folder, which may have changed, anew.
    """
    try:
        requirements = shlex.split(text)
    except ValueError as error:
        raise SpecError(f"requirements must be words for pip, got '{text}' ({error})") from None
    if not requirements:
        raise SpecError("an environment must be a folder or requirements for pip, got none (is a variable empty?)")
    below = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    depends_on = (requirements, tuple(pip), sys.version, below, sorted(_installed().items()))
    name = re.sub(r"[^\w.-]+", "-", text)[:40].strip("-")
    digest = hashlib.sha256(msgspec.json.encode(depends_on)).hexdigest()[:16]
    folder = _cache() / f"{name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    python, complete = folder / "venv" / "bin" / "python", folder / "complete"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists() or any(Path(word).exists() for word in requirements):
            complete.unlink(missing_ok=True)
            venv.EnvBuilder(clear=True, symlinks=True, with_pip=find_spec("pip") is None).create(folder / "venv")
            own = next((folder / "venv" / "lib").glob("python*/site-packages"))
            lines = (f"import site; site.addsitedir({entry!r})\n" for entry in below)
            (own / "of_the_environment_below.pth").write_text("".join(lines))
            _install(python, requirements, pip, folder / "pip.log")
            complete.touch()
    return python


def _install(python: Path, requirements: list[str], pip: Sequence[str], log: Path) -> None:
    """Torch stays as it is, unless a requirement names it: another one would be a CUDA build of gigabytes."""
    words = [*pip, *requirements]
    torch = _installed().get("torch")
    if torch is not None and not any(_TORCH.fullmatch(word) for word in requirements):
        constraints = log.with_name("constraints.txt")
        constraints.write_text(f"torch=={torch}\n")
        words = ["-c", str(constraints), *words]
    with log.open("w") as output:
        command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *words]
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        lines = log.read_text().splitlines()
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        causes = [line.strip() for line in lines if " depends on " in line or "The user requested" in line]
        why = " ".join([*errors[:1], "; ".join(causes[:3])]).strip() or f"exit status {done.returncode}"
        raise SpecError(f"pip cannot install '{shlex.join(requirements)}': {why} (full log: {log})")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "refshard" / "environments"


def _installed() -> dict[str, str]:
    """The versions of distributions by name; of one that is there twice, the one that is imported."""
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        if one.name:  # a damaged one has none
            found.setdefault(re.sub(r"[-_.]+", "-", one.name).lower(), one.version)
    return found


def main() -> None:
    """Print what this Python's environment holds, and why dry runs cannot run there, if so."""
    import refshard.dryrun.child  # noqa: F401  (so that what it needs is missing here, and not later)
    from refshard.fakecuda.build import check

    try:
        check()
        wrong = ""
    except RefshardError as error:
        wrong = str(error)
    sys.stdout.write(msgspec.json.encode(_Found(packages=_installed(), wrong=wrong)).decode())


if __name__ == "__main__":
    main()
