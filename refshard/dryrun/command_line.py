"""Read a training command: a script, a module, or the command line of torchrun or another launcher.

This module parses torchrun's options. Other launchers that are Python programs run unmodified; see
:mod:`refshard.dryrun.launchers`.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from refshard.dryrun.launchers import find_program
from refshard.errors import SpecError

_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_FLAGS = frozenset({"standalone", "module", "m", "no_python", "run_path", "use_env", "virtual_local_rank"})
"""Options of torchrun that take no value."""
_OTHER_LAUNCHERS = frozenset({"srun", "mpirun", "mpiexec", "horovodrun", "ray"})
"""Launchers that a dry run cannot follow."""
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_NOT_PYTHON = {
    ".ipynb": "a notebook; make a script of it: jupyter nbconvert --to script NOTEBOOK",
    ".sh": "a shell script; give the command in it that starts the training",
    ".yaml": "a file of settings; give the program that reads it, then the file",
    ".yml": "a file of settings; give the program that reads it, then the file",
    ".toml": "a file of settings; give the program that reads it, then the file",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCommand:
    """``command`` is a script (with ``module``, a module) and its arguments. ``nodes`` and ``ranks_per_node`` are
    torchrun's options, None if not given. With ``python`` the command line began with that word: no launcher.
    ``environment`` has the variables that were set before it, as in a shell.
    """

    command: tuple[str, ...]
    module: bool = False
    nodes: int | None = None
    ranks_per_node: int | None = None
    python: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Torchrun:
    options: dict[str, str] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)


def read_command(words: Sequence[str]) -> TrainingCommand:
    """Find out what a command line runs.

    >>> read_command(["N=1", "torchrun", "--nproc-per-node", "8", "-m", "a.b"])
    TrainingCommand(command=('a.b',), module=True, nodes=None, ranks_per_node=8, python=False, environment={'N': '1'})

    Raises:
        SpecError: it names no script, a script that does not exist, or an unsupported launcher.
    """
    left = list(words)
    if left and _VARIABLE.match(left[0]):
        name, _, value = left[0].partition("=")
        found = read_command(left[1:])
        return replace(found, environment={name: value, **found.environment})
    if python := bool(left) and Path(left[0]).name.startswith("python"):
        left = left[1:]
        while left and left[0] in ("-u", "-O", "-B"):
            left = left[1:]
    if left and (Path(left[0]).name == "torchrun" or (left[0] == "-m" and left[1:2] and left[1] in _TORCHRUN_MODULES)):
        return _read_torchrun(left[2:] if left[0] == "-m" else left[1:])
    return replace(_read_script(left), python=python)


def _read_script(
    words: Sequence[str], *, nodes: int | None = None, ranks_per_node: int | None = None
) -> TrainingCommand:
    if words and words[0] == "-m":
        if len(words) < 2:
            raise SpecError(
                "dryrun: -m must be followed by a module; write `refshard dryrun --cluster CLUSTER -- -m package.train`"
            )
        return TrainingCommand(command=tuple(words[1:]), module=True, nodes=nodes, ranks_per_node=ranks_per_node)
    if not words:
        raise SpecError(
            "dryrun: no script was given; write `refshard dryrun --cluster CLUSTER -- train.py --args`, or give --model"
        )
    if Path(words[0]).suffix in _NOT_PYTHON and Path(words[0]).exists():
        raise SpecError(f"dryrun: '{words[0]}' is {_NOT_PYTHON[Path(words[0]).suffix]}")
    if Path(words[0]).is_dir():
        raise SpecError(f"dryrun: '{words[0]}' is a folder; give the script in it, or -m and the package's name")
    if Path(words[0]).is_file():
        return TrainingCommand(command=tuple(words), nodes=nodes, ranks_per_node=ranks_per_node)
    if words[0].startswith("-"):
        raise SpecError(f"dryrun: no option {words[0]}; see `refshard dryrun --help`")
    if (name := words[0]) in _OTHER_LAUNCHERS:
        raise SpecError(
            f"dryrun: a dry run cannot follow the processes that '{name}' starts; give the script that it starts"
        )
    if (program := find_program(name)) is None:
        path = Path(name)
        if close := get_close_matches(path.name, [one.name for one in path.parent.glob("*.py")], n=1):
            raise SpecError(f"dryrun: there is no script '{name}'; did you mean '{path.with_name(close[0])}'?")
        raise SpecError(
            f"dryrun: there is no script '{name}', and no program of that name is installed with this Python "
            f"({sys.executable}); to run a module, write -m before it"
        )
    return TrainingCommand(command=(program, *words[1:]), nodes=nodes, ranks_per_node=ranks_per_node)


def _read_torchrun(words: Sequence[str]) -> TrainingCommand:
    read = _options(words)
    module = "module" in read.options or "m" in read.options
    return _read_script(
        ["-m", *read.rest] if module else read.rest,
        nodes=_count(read.options, "nnodes"),
        ranks_per_node=_count(read.options, "nproc_per_node"),
    )


def _options(words: Sequence[str]) -> _Torchrun:
    """Split torchrun's own options from the words after them."""
    read, left = _Torchrun(), list(words)
    while left and left[0].startswith("-"):
        name, has_value, value = left.pop(0).lstrip("-").replace("-", "_").partition("=")
        if not has_value and name not in _FLAGS and left:
            value = left.pop(0)
        read.options[name] = value
    read.rest = left
    return read


def _count(options: dict[str, str], name: str) -> int | None:
    given = options.get(name)
    if given is None or given in ("gpu", "auto"):
        return None
    most = given.rpartition(":")[2]  # MAX of MIN:MAX nodes
    if not most.isdigit() or int(most) < 1:
        raise SpecError(f"dryrun: torchrun's --{name.replace('_', '-')} must be a number >= 1, got '{given}'")
    return int(most)
