"""Every code block in README and docs runs, parses or names a command that exists."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from refshard.cli import app
from refshard.specs.suite import load_suite
from tests.distributed.ranks import run_script

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(language, code, id=f"{page.name}-{index}-{language}")
    for page in PAGES
    for index, (language, code) in enumerate(re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S))
]


def of_language(language: str) -> list[object]:
    return [block for block in BLOCKS if block.values[0] == language]


@pytest.mark.parametrize(("language", "code"), of_language("python")[1:])
@pytest.mark.processes
def test_python_blocks_run_on_two_ranks(tmp_path: Path, language: str, code: str) -> None:
    """The first, which is the README's, is started below."""
    script = tmp_path / "train.py"
    script.write_text(code)
    assert "UserWarning" not in run_script(2, script)


@pytest.mark.full
def test_the_readmes_first_python_block_starts_as_it_says(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text()
    block = re.search(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert block is not None
    assert "Start it with `torchrun --nproc-per-node 2 train.py`" in page
    (tmp_path / "train.py").write_text(block[1])
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr


@pytest.mark.parametrize(("language", "code"), of_language("toml"))
def test_toml_blocks_are_suites(tmp_path: Path, language: str, code: str) -> None:
    suite = tmp_path / "suite.toml"
    suite.write_text(code)
    assert load_suite(suite).cases()


@pytest.mark.parametrize(("language", "code"), of_language("console"))
def test_console_blocks_name_what_exists(language: str, code: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in code.splitlines():
        program, command, *rest = line.split()
        if program == "make":
            assert re.search(rf"^{command}:", makefile, re.M)
            continue
        if program == "accelerate":
            accelerate = pytest.importorskip("accelerate.commands.launch", reason="it comes with the extra 'peers'")
            given = accelerate.launch_command_parser().parse_args(rest)
            assert given.no_python
            program, command = given.training_script, given.training_script_args[0]
        if program == "torchrun":
            given = get_args_parser().parse_args([command, *rest])
            assert given.no_python
            program, command = given.training_script, given.training_script_args[0]
        assert program == "refshard"
        done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert done.exit_code == 0
        words = shlex.split(line, comments=True)
        own = words[words.index("refshard") : words.index("--") if "--" in words else None]  # a script's are its own
        for option in re.findall(r"^--[\w-]+$", "\n".join(own), re.M):
            assert option in done.output, f"{command} has no {option}"


@pytest.mark.processes
@pytest.mark.parametrize(("language", "code"), of_language("sbatch"))
def test_sbatch_blocks_are_a_shells(language: str, code: str) -> None:
    """A real Slurm runs them in ``tests/harness/launchers/test_slurm.py``."""
    assert subprocess.run(["sh", "-n"], input=code, capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(("language", "code"), of_language("yaml"))
def test_workflows_call_what_exists(language: str, code: str) -> None:
    workflow = yaml.safe_load(code)
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    calls = [shlex.split(step) for step in steps if step.startswith("refshard")]
    assert calls
    for _, command, *arguments in calls:
        known = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        for option in (argument for argument in arguments if argument.startswith("--")):
            assert option in known


def test_no_other_kind_of_block_goes_untested() -> None:
    assert {block.values[0] for block in BLOCKS} <= {"python", "toml", "console", "sbatch", "text", "yaml"}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


PRINTED = {
    "README.md": [
        "refshard plan --model llama3-70b --cluster dgx-h100x32 --seq-len 8192",
        "refshard trace profiles/recorded/epyc-2-cores/engine_network",
        "refshard show profiles/recorded/epyc-2-cores/quickstart",
        "refshard show profiles/recorded/dryrun/llama3_8b_h100",
    ],
    "validation.md": [
        "refshard validate",
        "refshard validate profiles/recorded/epyc-2-cores/validation",
        "refshard validate profiles/recorded/epyc-2-cores/validation_network",
        "refshard validate profiles/recorded/epyc-2-cores/memory",
    ],
}
"""Commands whose output a page shows, in blocks of text."""


@pytest.mark.parametrize("page", PRINTED)
def test_a_page_shows_what_its_commands_print(page: str) -> None:
    """Every line of every block of text that begins with a line of theirs; a command may print more."""
    printed: list[list[str]] = []
    for command in PRINTED[page]:
        done = CliRunner().invoke(app, command.split()[1:])
        assert done.exit_code == 0, done.output
        printed.append(done.stdout.splitlines())
    path = next(path for path in PAGES if path.name == page)
    blocks: list[str] = re.findall(r"^```text\n(.*?)^```", path.read_text(), re.M | re.S)
    shown = [list(filter(None, block.splitlines())) for block in blocks]
    for command, lines in zip(PRINTED[page], printed):
        assert any(set(block) <= set(lines) for block in shown), f"{page} shows nothing that {command} prints"
    for block in shown:
        if any(block[0] in lines for lines in printed):
            assert any(set(block) <= set(lines) for lines in printed), f"{page}: {block[0]} ..."
