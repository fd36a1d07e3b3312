"""Run launchers unmodified: where one would start a process for each rank, this process becomes the rank.

``accelerate launch``, ``deepspeed``, ``tune run`` and similar launchers read their own options and files, and set their
own environment variables. This module reimplements none of that: it runs the launcher, and intercepts the calls that
start ranks. These are torch's elastic agent, ``torch.multiprocessing.spawn`` and ``subprocess.Popen``. Where a launcher
replaces itself by another one (``os.execvp``, as ``axolotl train`` does), that one runs here.
"""

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from refshard.errors import SpecError

_ALONE = frozenset({"-u", "-O", "-B", "-E", "-s", "-I"})
"""Python's options that take no value."""


def is_program(path: str) -> bool:
    """Whether a script is a program installed in the same folder as this Python, such as ``accelerate``."""
    return Path(path).parent == Path(sys.executable).parent


def find_program(name: str) -> str | None:
    """The path of a program installed in the same folder as this Python, if it is a script."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    return found if found and Path(found).read_bytes()[:2] == b"#!" else None


def run_python(command: Sequence[str], *, module: bool) -> None:
    """Run a script or a module with its arguments, in this process, as Python would."""
    target = command[0]
    sys.argv = list(command)
    sys.path[0] = str(Path.cwd()) if module else str(Path(target).resolve().parent)
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


class Launchers:
    """Follows launchers until they start this rank; ``rank`` holds the variables that torchrun sets for it."""

    def __init__(self, rank: Mapping[str, str]) -> None:
        self._rank = dict(rank)
        self._replaced: list[tuple[Any, str, Any]] = []

    @contextmanager
    def following(self, *, program: bool) -> Iterator[None]:
        """Intercept the calls that start ranks; with ``program``, also calls that start any process of this Python."""
        import torch.distributed.launcher.api as elastic
        import torch.multiprocessing as multiprocessing

        try:
            self._replace(elastic, "launch_agent", self._launch_agent)
            self._replace(multiprocessing, "spawn", self._spawn)
            if program:
                self._replace(subprocess, "Popen", self._popen_class())
                self._replace(os, "_execvpe", self._replacing(os._execvpe))  # type: ignore[attr-defined]
            yield
        finally:
            self._stand_aside()

    def _replace(self, owner: Any, name: str, ours: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, ours)

    def _stand_aside(self) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())

    def _become_rank(self) -> None:
        """Set the rank's environment variables, and stop intercepting: the script's own processes start as usual."""
        os.environ.update(self._rank)
        self._stand_aside()

    def _launch_agent(self, config: Any, entrypoint: Any, args: Sequence[Any], **_: Any) -> dict[int, Any]:
        self._notice(config.max_nodes * config.nproc_per_node)
        self._become_rank()
        if callable(entrypoint):
            return {int(self._rank["LOCAL_RANK"]): entrypoint(*args)}
        _follow([entrypoint, *args])
        return {}

    def _spawn(
        self, function: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, *_: Any, **__: Any
    ) -> None:
        self._notice(nprocs)
        self._become_rank()
        function(int(self._rank["LOCAL_RANK"]), *args)

    def _notice(self, ranks: int) -> None:
        gpus = self._rank["WORLD_SIZE"]
        if str(ranks) != gpus:
            print(
                f"refshard: the launcher would start {ranks} ranks; this dry run has {gpus} (set by --gpus)",
                file=sys.stderr,
            )

    def _popen_class(self) -> type:
        launchers, real = self, subprocess.Popen

        class Followed(real):  # type: ignore[misc, valid-type]
            """Runs this Python's processes here, but skips those of other ranks; starts all other programs."""

            def __init__(self, args: Any, *rest: Any, env: Mapping[str, str] | None = None, **options: Any) -> None:
                self.followed = _is_this_python(args)
                if not self.followed:
                    super().__init__(args, *rest, env=env, **options)
                    return
                self.args, self.pid, self.returncode = args, os.getpid(), 0
                self.stdin = self.stdout = self.stderr = None
                launchers._follow_process(args, env or {})

            def __del__(self, *_: Any) -> None:
                if not self.followed:
                    super().__del__()

            def poll(self) -> int | None:
                return 0 if self.followed else super().poll()

            def wait(self, timeout: float | None = None) -> int:
                return 0 if self.followed else super().wait(timeout)

        return Followed

    def _replacing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """What ``os.execvp`` and ``os.execvpe`` call."""

        def execute(file: str, args: Sequence[str], env: Mapping[str, str] | None = None) -> None:
            program = find_program(file)
            command = [sys.executable, program, *args[1:]] if program and is_program(program) else [file, *args[1:]]
            if not _is_this_python(command):
                real(file, args, env)
            os.environ.update(env or {})
            _follow(command)
            sys.exit()

        return execute

    def _follow_process(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run a process of this Python here. With a ``LOCAL_RANK`` it is a rank: others are skipped, and the launcher
        ends after this one. Without a ``LOCAL_RANK`` it is the launcher's next stage.
        """
        local = environment.get("LOCAL_RANK")
        if local is not None and local != self._rank["LOCAL_RANK"]:
            return
        os.environ.update(environment)
        if local is None:
            _follow(command)
            return
        self._notice(int(environment.get("WORLD_SIZE", self._rank["WORLD_SIZE"])))
        self._become_rank()
        _follow(command)
        sys.exit()


def _is_this_python(args: Any) -> bool:
    if isinstance(args, str) or not isinstance(args, Sequence) or not args:
        return False
    return Path(str(args[0])).resolve() == Path(sys.executable).resolve()


def _follow(command: Sequence[Any]) -> None:
    """Run a Python command line in this process."""
    left = [str(word) for word in command]
    if not _is_this_python(left):
        raise SpecError(f"dryrun: the launcher starts '{left[0]}', which is not this Python; give the script itself")
    left = left[1:]
    while left and left[0] in _ALONE:
        left = left[1:]
    module = left[:1] == ["-m"]
    run_python(left[1:] if module else left, module=module)
