"""Launchers as they are: where one would start a process for each rank, this process becomes the rank.

``accelerate launch``, ``deepspeed``, ``tune run`` and their like read options and files of their own and set an
environment of their own. Nothing of that is repeated here: the launcher itself runs, and what it starts is followed. It
starts ranks in one of three ways: torch's elastic agent, ``torch.multiprocessing.spawn``, or a process of Python's.
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
"""Options of Python without a value."""


def is_program(path: str) -> bool:
    """Whether a script is a program that was installed beside this Python, such as ``accelerate``."""
    return Path(path).parent == Path(sys.executable).parent


def find_program(name: str) -> str | None:
    """The script of a program that was installed beside this Python."""
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
    """Follows launchers until the first rank starts; ``rank`` is the environment that torchrun gives this rank."""

    def __init__(self, rank: Mapping[str, str]) -> None:
        self._rank = dict(rank)
        self._replaced: list[tuple[Any, str, Any]] = []

    @contextmanager
    def following(self, *, program: bool) -> Iterator[None]:
        """Stand where ranks are started; with ``program`` also where any process of this Python is."""
        import torch.distributed.launcher.api as elastic
        import torch.multiprocessing as multiprocessing

        try:
            self._replace(elastic, "launch_agent", self._launch_agent)
            self._replace(multiprocessing, "spawn", self._spawn)
            if program:
                self._replace(subprocess, "Popen", self._popen_class())
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
        """What the script starts from here on is its own affair."""
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
        asked = self._rank["WORLD_SIZE"]
        if str(ranks) != asked:
            print(
                f"refshard: the launcher would start {ranks} ranks; this dry run has {asked}: see --world-size",
                file=sys.stderr,
            )

    def _popen_class(self) -> type:
        launchers, real = self, subprocess.Popen

        class Followed(real):  # type: ignore[misc, valid-type]
            """A process of this Python is run here, but not those of other ranks; any other program is started."""

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

    def _follow_process(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """A process with a ``LOCAL_RANK`` of its own is a rank, after which nothing is left to launch; one without is a
        launcher's next part.
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
    """Run a command line of Python's in this process."""
    left = [str(word) for word in command]
    if not _is_this_python(left):
        raise SpecError(f"dryrun: the launcher starts '{left[0]}', which is no Python; give the script itself")
    left = left[1:]
    while left and left[0] in _ALONE:
        left = left[1:]
    module = left[:1] == ["-m"]
    run_python(left[1:] if module else left, module=module)
