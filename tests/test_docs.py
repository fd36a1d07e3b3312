"""Every code block in README and docs runs, parses or names a command that exists."""

import ast
import os
import re
import shlex
import shutil
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
from tests.docs_modules import load
from tests.printed import PAGES, Printed, printed, same

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
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
@pytest.mark.parametrize("name", ["README.md", "docs/how-to/engine.md"])
def test_a_pages_first_python_block_starts_as_it_says_and_prints_what_it_shows(tmp_path: Path, name: str) -> None:
    page = (ROOT / name).read_text()
    block = re.search(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert block is not None
    start = "Start it with `torchrun --nproc-per-node 2 train.py`"
    assert start in page
    shown = re.match(r":\n\n```text\n(.*?)^```", page.partition(start)[2], re.M | re.S)
    assert shown or name == "README.md"
    (tmp_path / "train.py").write_text(block[1])
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr
    assert not shown or done.stdout == shown[1]


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
        if program == "pip":
            continue
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
    """A real Slurm runs them in ``tests/measure/launchers/test_slurm.py``."""
    assert subprocess.run(["sh", "-n"], input=code, capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(("language", "code"), of_language("yaml"))
def test_workflows_call_what_exists(language: str, code: str) -> None:
    """They use the project's action, with inputs that it has."""
    workflow = yaml.safe_load(code)
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    used = [step for step in steps if ".github/actions/" in step.get("uses", "")]
    assert used
    for step in used:
        folder = step["uses"].partition(".github/")[2].partition("@")[0]
        action = yaml.safe_load((ROOT / ".github" / folder / "action.yml").read_text())
        assert step.get("with", {}).keys() <= action["inputs"].keys()


def test_no_other_kind_of_block_goes_untested() -> None:
    assert {block.values[0] for block in BLOCKS} <= {"python", "toml", "console", "sbatch", "text", "yaml"}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            path = (page.parent / target).resolve()
            generated = path.is_relative_to(DOCS) and str(path.relative_to(DOCS)) in load("_reference").PAGES
            assert path.exists() or generated, f"{page.name} links to {target}"


SHOWN = [
    pytest.param(block, marks=pytest.mark.full if block.slow else (), id=f"{block.page.name}-{block.command}")
    for page in PAGES
    for block in printed(page)
]


@pytest.mark.parametrize("block", SHOWN)
def test_a_page_shows_what_its_command_prints(block: Printed) -> None:
    """``python -m tests.printed`` rewrites what has changed; with ``--slow``, dry runs too."""
    if block.slow and shutil.which("g++") is None:
        pytest.skip("dry runs need g++")
    assert same(block.shown, block.expected()), "python -m tests.printed"


def test_pages_of_figures_are_printed_from_their_records() -> None:
    """No block of theirs is left unmarked."""
    for name in ("validation.md", "how-to/plan.md", "traces.md"):
        page = next(path for path in PAGES if str(path).endswith(f"/{name}"))
        assert len(list(printed(page))) == page.read_text().count("```text\n") > 0


def test_messages_of_the_troubleshooting_page_exist() -> None:
    """Each quoted message, between its ``...``, stands in one string of refshard's sources."""
    page = (DOCS / "how-to" / "troubleshooting.md").read_text()
    quoted = [cell for row in re.findall(r"^\| (`.*?`) \|", page, re.M) for cell in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) >= 15
    strings = [string for path in (ROOT / "refshard").rglob("*.py") for string in strings_of(path)]
    for message in quoted:
        parts = [part.strip() for part in message.split("...") if part.strip()]
        assert any(holds_in_order(string, parts) for string in strings), message


def holds_in_order(text: str, parts: list[str]) -> bool:
    at = 0
    for part in parts:
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True


def strings_of(path: Path) -> list[str]:
    """The strings of a file, joined as Python joins them; what is formatted into them is left out."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value.replace("\n", " "))
    return found
