"""CONTRIBUTING.md, "Add a strategy", as a reader follows it: its file and its row, in a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from refshard.measure.store import read_run
from refshard.records import LaunchRecord
from refshard.specs.suite import load_suite
from tests.fakecuda.needs import needs_device

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a strategy")[2].partition("\n## ")[0]
FILE = "refshard/strategies/late.py"
TABLE = "refshard/strategies/table.py"

pytestmark = [needs_device, pytest.mark.full]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the page's strategy, and the page's suite beside it."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "refshard", folder / "refshard")
    for name in ("suites", "profiles", "dashboards"):
        (folder / name).symlink_to(ROOT / name)
    code, row = blocks("python")
    assert f"`{FILE}`" in PAGE
    assert f"`{TABLE}`" in PAGE
    (folder / FILE).write_text(code)
    (entry,) = re.findall(r"^rows = \{\n(.*)^\}", row, re.M | re.S)
    table, start = (folder / TABLE).read_text(), "ROWS: dict[str, Row] = {\n"
    assert table.count(start) == 1
    (folder / TABLE).write_text(table.replace(start, start + entry))
    (suite,) = blocks("toml")
    (folder / "late.toml").write_text(suite)
    return folder


def refshard(checkout: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "refshard", *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def told(checkout: Path) -> str:
    """What the page's command prints, of its strategy alone and the rank that this is held against."""
    command = "refshard run late.toml"
    assert f"{command}\n" in blocks("console")
    names = [case.name for case in load_suite(checkout / "late.toml").cases() if case.job.strategy == "late"]
    only = [word for name in names for word in ("--only", name)]
    return refshard(checkout, *command.split()[1:], "--out", "run", *only).stdout


@pytest.fixture(scope="module")
def records(checkout: Path, told: str) -> dict[str, LaunchRecord]:
    """What was recorded of the page's strategy, by fidelity."""
    del told
    cases = [case for case in read_run(checkout / "run").launches if case.case.job.strategy == "late"]
    return {case.fidelity: case for case in cases}


def test_it_trains_on_two_ranks_with_its_proof(records: dict[str, LaunchRecord]) -> None:
    record = records["measured"]
    assert (record.state, record.error) == ("ok", None)
    assert record.proof is not None
    assert record.proof.loss_parity is not None
    assert record.proof.loss_parity <= 1e-5
    assert record.proof.announced == record.proof.traced != ()


def test_it_is_dry_run_on_eight_gpus_with_its_proof(records: dict[str, LaunchRecord]) -> None:
    record = records["dryrun"]
    assert (record.state, record.error, record.device) == ("ok", None, "NVIDIA H100 80GB HBM3")
    assert record.proof is not None
    assert record.proof.announced == record.proof.traced != ()
    assert record.proof.failures == ()
    assert (record.metrics["peak_memory_bytes"] or 0) > 4 * 4 * 4_951_296  # parameters, gradients and AdamW's state


def test_tables_pages_and_lists_show_it(checkout: Path, told: str) -> None:
    assert len(re.findall(r"^late +(?:2|8)  ok ", told, re.M)) == 2
    assert "late, 8 ranks" in (checkout / "run" / "dashboard.html").read_text()
    assert "all-reduces each gradient at once" in refshard(checkout, "list", "strategies").stdout


def test_a_plan_refuses_it_and_names_the_dry_run(checkout: Path) -> None:
    words = ("plan", "--model", "llama3.2-1b", "--cluster", "dgx-h100", "--strategy", "late,ddp")
    told = " ".join(refshard(checkout, *words, status=2).stderr.split())
    assert "'late' has no closed form; dry-run it: refshard dryrun --cluster dgx-h100" in told
    assert told.endswith("--model llama3.2-1b --strategy late")
