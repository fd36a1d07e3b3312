"""Command lines as users have them, and what they run."""

import sys
from pathlib import Path

import pytest

from refshard.dryrun.command_line import TrainingCommand, read_command
from refshard.errors import SpecError

BIN = Path(sys.executable).parent


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def test_a_script_and_a_module_are_taken_as_they_are(script: str) -> None:
    assert read_command([script, "--lr", "1"]) == TrainingCommand(command=(script, "--lr", "1"))
    assert read_command(["python", "-u", script]) == TrainingCommand(command=(script,), python=True)
    by_shell = TrainingCommand(command=("a.b",), module=True, environment={"A": "1", "B": "x=y"})
    assert read_command(["A=1", "B=x=y", "-m", "a.b"]) == by_shell
    assert read_command(["-m", "a.b", "x"]) == TrainingCommand(command=("a.b", "x"), module=True)


@pytest.mark.parametrize("launcher", ["torchrun", "-m torch.distributed.run", "python3 -m torch.distributed.run"])
def test_torchrun_says_how_many_ranks_there_are(script: str, launcher: str) -> None:
    words = [*launcher.split(), "--nnodes", "1:4", "--nproc-per-node=8", "--standalone", script, "--lr", "1"]
    assert read_command(words) == TrainingCommand(command=(script, "--lr", "1"), nodes=4, ranks_per_node=8)
    by_module = [*launcher.split(), "--nproc_per_node", "gpu", "-m", "a.b", "--lr", "1"]
    assert read_command(by_module) == TrainingCommand(command=("a.b", "--lr", "1"), module=True)


def test_another_launcher_runs_as_it_is_installed_with_this_python(script: str) -> None:
    words = ["accelerate", "launch", "--num_processes", "8", script]
    assert read_command(words) == TrainingCommand(command=(str(BIN / "accelerate"), *words[1:]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothere"], "no program of that name is installed with this Python"),
        (["nothere.py"], "there is no script 'nothere.py'"),
        (["srun", "train.py"], "a dry run cannot follow the processes that 'srun' starts"),
        (["torchrun", "--nproc-per-node", "many", "train.py"], "--nproc-per-node must be a number >= 1, got 'many'"),
        (["-m"], "-m must be followed by a module"),
        ([], "no script was given"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(words: list[str], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        read_command(words)
