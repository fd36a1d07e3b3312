"""``python -m tests.distributed.cures``: shows what fails without each of the engine's cures.

A *cure* is a piece of the engine that keeps it from training wrong, or from failing with an obscure error, where people
do something out of the ordinary. ``cures.toml`` lists them: an edit that takes the cure out, and the cases of the
corpus and the unit tests that must fail then. This command makes each edit in a copy of the package and of its tests,
and runs those cases and tests there. That takes minutes, so no other command runs the whole table.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.distributed.cases.case import PLAIN
from tests.distributed.cases.corpus import CASES
from tests.distributed.cases.run import Run, run_all
from tests.distributed.ranks import TORCH_MODULES

CONTROL = "ordinary"
"""A case that must stay right, so that an edit which breaks everything is not taken for one that takes a cure out."""
ENGINE = Path("refshard") / "engine"
_ROOT = Path(__file__).parents[2]
_COPIED = ("refshard", "tests", "pyproject.toml")


class Cure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cure, and the edit that takes it out.

    ``row`` says what people do, ``cure`` what the engine does about it. ``old`` occurs once in ``file``, which is in
    ``refshard/engine``; ``new`` stands in its place without the cure. Then each of ``cases`` must end in a way that the
    case does not accept, in one of ``modes`` and of its variants at least, and each of ``tests`` must fail: node ids of
    pytest without parameters. An edit that is to break ordinary training has no control.
    """

    row: str
    cure: str
    file: str
    old: str
    new: str
    modes: tuple[str, ...] = ("fsdp", "yafsdp")
    cases: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    control: bool = True

    @property
    def title(self) -> str:
        """The cure in a line."""
        return f"{self.file}: {self.row}: {self.cure}"


TABLE = Path(__file__).with_suffix(".toml")


def read_cures(table: Path = TABLE) -> list[Cure]:
    """The cures that a table lists."""
    return msgspec.toml.decode(table.read_bytes(), type=dict[str, list[Cure]])["cures"]


def failures(cure: Cure) -> dict[str, str]:
    """How each case and test ends without the cure, by name, among the named ones and the control; only bad ends."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _copy(folder)
        edited = folder / ENGINE / cure.file
        edited.write_text(edited.read_text().replace(cure.old, cure.new))
        with _first_on_path(folder):
            return _failing_cases(cure) | _failing_tests(cure, folder)


def _copy(folder: Path) -> None:
    for name in _COPIED:
        if (_ROOT / name).is_dir():
            shutil.copytree(_ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(_ROOT / name, folder)


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """For processes that are started within: multiprocessing hands them this one's path, and they have yet to import
    what they find there.
    """
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _failing_cases(cure: Cure) -> dict[str, str]:
    control = [Run(CONTROL, mode, PLAIN[0]) for mode in cure.modes if cure.control]
    runs = [
        Run(name, mode, variant)
        for name in cure.cases
        for mode in cure.modes
        if mode in CASES[name].modes
        for variant in CASES[name].variants
    ]
    found: dict[str, dict[str, None]] = {}
    for run, outcome in run_all(2, list(dict.fromkeys([*control, *runs])), collective_s=5, run_s=30).items():
        if not CASES[run.case].accepts(run.way, outcome.kind, outcome.message):
            found.setdefault(run.case, {})[f"{outcome.kind} in {run.way} ({outcome.message})"] = None
    return {name: ", ".join(ends) for name, ends in found.items()}


def _failing_tests(cure: Cure, folder: Path) -> dict[str, str]:
    if not cure.tests:
        return {}
    context = get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_tests, args=(cure.tests, folder, sender))
    process.start()
    sender.close()
    found, running = {}, ""
    with suppress(EOFError):
        while True:
            test, what = receiver.recv()
            running = test if what == "starts" else ""
            if what == "fails":
                found[test] = what
    process.join()
    if running:
        found[running] = "crashes"
    return found


def _run_tests(tests: Sequence[str], folder: Path, sender: Any) -> None:
    """In a process of its own, in the copy."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)  # of the processes that tests start
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[_Telling(sender)])


class _Telling:
    """A plugin that tells how tests go, by node id without parameters; an error in a fixture is no failure."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def _tell(self, nodeid: str, what: str) -> None:
        self._sender.send((nodeid.partition("[")[0], what))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell(nodeid, "starts")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.failed:
            self._tell(report.nodeid, "fails")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tell(nodeid, "ends")


def show(cure: Cure) -> bool:
    """Take the cure out, print what fails, and say whether all that must fail does and the control does not."""
    fails = failures(cure)
    missed = [name for name in (*cure.cases, *cure.tests) if name not in fails]
    broken = CONTROL in fails and CONTROL not in cure.cases
    print(cure.title)
    if broken:
        print(f"    BREAKS ORDINARY TRAINING: {fails.pop(CONTROL)}")
    for name, how in fails.items():
        print(f"    {name}: {how}")
    for name in missed or ([] if fails else ["anything"]):
        print(f"    NOT CAUGHT by {name}")
    sys.stdout.flush()
    return bool(fails) and not missed and not broken


def main(arguments: Sequence[str] | None = None) -> int:
    """Take out the cures that the arguments name; 1 if one of them is not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.cures", description=__doc__)
    parser.add_argument("--only", default="", help="cures with this in their file, row or name")
    parser.add_argument("--table", type=Path, default=TABLE, help="a table of other cures")
    chosen = parser.parse_args(arguments)
    # One that has imported torch, which takes seconds, and nothing of what is copied.
    get_context("forkserver").set_forkserver_preload(list(TORCH_MODULES))
    forkserver.ensure_running()
    cures = [cure for cure in read_cures(chosen.table) if chosen.only in cure.title]
    caught = [show(cure) for cure in cures]
    print(f"{sum(caught)} of {len(cures)} cures are caught when they are taken out")
    return 0 if all(caught) else 1


if __name__ == "__main__":
    sys.exit(main())
