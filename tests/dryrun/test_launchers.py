"""Launchers start ranks in three ways; in each this process becomes the rank."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.launcher.api as elastic

from refshard.dryrun.launchers import Launchers, find_program, is_program
from tests.dryrun import scripts
from tests.fakecuda.needs import needs_device

pytestmark = pytest.mark.processes

RANK = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8"}
MULTIPROCESSING: Any = torch.multiprocessing
SEEN: list[Any] = []
"""What scripts under test leave."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script that notes its arguments and its rank; the process is as before afterwards."""
    SEEN.clear()
    for name in (*RANK, "OF_LAUNCHER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    noting = "SEEN.append((sys.argv[1:], dict(os.environ)))"
    (tmp_path / "train.py").write_text(f"import os, sys\nfrom tests.dryrun.test_launchers import SEEN\n{noting}\n")
    return tmp_path


def launch(script: str, *arguments: str, ranks: int = 8) -> None:
    """As torchrun does, and Accelerate and torchtune after it."""
    config = elastic.LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=ranks)
    elastic.elastic_launch(config, sys.executable)("-u", script, *arguments)


def test_where_torchs_agent_starts_ranks_the_script_runs_here(here: Path) -> None:
    os.environ["OF_LAUNCHER"] = "1"
    with Launchers(RANK).following(program=False):
        launch("train.py", "--lr", "1")
    ((arguments, environment),) = SEEN
    assert arguments == ["--lr", "1"]
    assert {name: environment[name] for name in RANK} == RANK
    assert environment["OF_LAUNCHER"] == "1"


def test_where_it_starts_modules_and_functions_they_run_here(here: Path) -> None:
    config = elastic.LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=8)
    with Launchers(RANK).following(program=False):
        elastic.elastic_launch(config, sys.executable)("-u", "-m", "train", "x")
    assert SEEN[0][0] == ["x"]
    with Launchers(RANK).following(program=False):
        assert elastic.elastic_launch(config, lambda a: a + 1)(1) == {3: 2}


def test_where_spawn_starts_ranks_the_function_runs_as_this_one(here: Path) -> None:
    with Launchers(RANK).following(program=False):
        MULTIPROCESSING.spawn(lambda rank, size: SEEN.append((rank, size)), args=(8,), nprocs=8)
    assert SEEN == [(3, 8)]


def test_a_program_that_starts_processes_of_python_is_followed_to_this_rank(here: Path) -> None:
    """As DeepSpeed: one process that starts eight."""
    (here / "part.py").write_text(
        "import os, subprocess, sys\n"
        "for rank in range(8):\n"
        "    environment = {**os.environ, 'LOCAL_RANK': str(rank), 'WORLD_SIZE': '8'}\n"
        "    subprocess.Popen([sys.executable, '-u', 'train.py', f'--local_rank={rank}'], env=environment)\n"
    )
    with Launchers(RANK).following(program=True), pytest.raises(SystemExit):
        subprocess.Popen([sys.executable, "part.py"], env={**os.environ, "OF_LAUNCHER": "1"}).wait()
    ((arguments, environment),) = SEEN  # once, and nothing is started after it
    assert arguments == ["--local_rank=3"]
    assert {name: environment[name] for name in RANK} == RANK
    assert environment["OF_LAUNCHER"] == "1"


@pytest.mark.parametrize("first", ["accelerate", sys.executable])
def test_a_launcher_that_replaces_itself_by_another_is_followed(
    here: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Axolotl's."""
    monkeypatch.setattr("runpy.run_path", lambda path, **_: SEEN.append((Path(path).name, sys.argv[1:])))
    with Launchers(RANK).following(program=True), pytest.raises(SystemExit):
        os.execvpe(first, [first, "train.py", "x"], {**os.environ, "OF_LAUNCHER": "1"})
    ((ran, arguments),) = SEEN
    assert [ran, *arguments] == (["accelerate", "train.py", "x"] if first == "accelerate" else ["train.py", "x"])
    assert os.environ["OF_LAUNCHER"] == "1"


def test_other_programs_are_started_and_all_is_as_before_afterwards(here: Path) -> None:
    before = (elastic.launch_agent, MULTIPROCESSING.spawn, subprocess.Popen)
    with Launchers(RANK).following(program=True):
        assert subprocess.run(["echo", "hello"], capture_output=True, text=True).stdout == "hello\n"
        assert subprocess.Popen is not before[2]
    assert (elastic.launch_agent, MULTIPROCESSING.spawn, subprocess.Popen) == before


def test_what_the_script_starts_is_its_own_affair(here: Path) -> None:
    (here / "train.py").write_text(
        "import subprocess, sys\n"
        "from tests.dryrun.test_launchers import SEEN\n"
        "SEEN.append(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True, text=True).stdout)\n"
    )
    with Launchers(RANK).following(program=True):
        launch("train.py")
    assert SEEN == ["1\n"]


def test_another_number_of_ranks_than_asked_for_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Launchers(RANK).following(program=False):
        launch("train.py", ranks=8)
    assert capsys.readouterr().err == ""
    with Launchers(RANK).following(program=False):
        launch("train.py", ranks=4)
    assert "would start 4 ranks; this dry run has 8" in capsys.readouterr().err


def test_a_program_is_a_script_beside_this_python() -> None:
    found = find_program("accelerate")
    assert found is not None
    assert is_program(found)
    assert not is_program("accelerate")
    assert find_program("python") is None
    assert find_program("nothere") is None


@needs_device
@pytest.mark.full
def test_accelerate_launch_runs_as_it_is_under_a_dry_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.TRAIN + "    assert os.environ['FSDP_VERSION'] == '2'\n")
    (tmp_path / "config.yaml").write_text(
        "{compute_environment: LOCAL_MACHINE, distributed_type: FSDP, mixed_precision: bf16, num_machines: 1, "
        "num_processes: 4, machine_rank: 0, fsdp_config: {fsdp_version: 2, fsdp_cpu_ram_efficient_loading: false}}"
    )
    command = [sys.executable, "-m", "refshard", "dryrun", "--cluster", "dgx-h100", "--gpus", "4", "--json", "--"]
    launcher = ["accelerate", "launch", "--config_file", "config.yaml", "train.py"]
    done = subprocess.run([*command, *launcher], capture_output=True, text=True, cwd=tmp_path, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["answer"]["outcome"] == "stepped"
    assert found["peak_by_category"]["parameters"] == 4 * 1024 * 1024 * 4 // 4
