"""The GitHub action and the workflow call what exists, and the action's scripts do what it says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from refshard.cli import app

ROOT = Path(__file__).parents[1]
ACTION = ROOT / ".github" / "actions" / "gate"
STUB = """#!/bin/sh
printf '%s\\n' "$0" "$@" >> "$CALLS"
for last; do
  [ "$previous" = --summary ] && echo "verdict of $*" > "$last"
  previous=$last
done
case "$*" in *gate_cuda*) exit "${ENDS_WITH:-0}";; esac
"""


def action() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ACTION / "action.yml").read_text())
    return read


def scripts() -> dict[str, dict[str, Any]]:
    return {step["name"]: step for step in action()["runs"]["steps"] if "run" in step}


def run_step(
    name: str, tmp_path: Path, *, path: str, cwd: Path = ROOT, given: dict[str, str] | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a step's script as GitHub runs bash, with the inputs' defaults where none are ``given``."""
    inputs = {key: str(spec.get("default", "")) for key, spec in action()["inputs"].items()} | (given or {})
    step = scripts()[name]
    assert step["shell"] == "bash"
    environment = {
        key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: inputs[m[1]], str(value))
        for key, value in step.get("env", {}).items()
    }
    script = tmp_path / "step.sh"
    script.write_text(step["run"])
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", str(script)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            **environment,
            "PATH": path,
            "GITHUB_ACTION_PATH": str(ACTION),
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
            "RUNNER_TEMP": str(tmp_path),
            "CALLS": str(tmp_path / "calls"),
            **more,
        },
    )


@pytest.fixture
def stubs(tmp_path: Path) -> str:
    """A PATH whose ``refshard`` and ``python`` write down how they are called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("refshard", "python"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def calls(tmp_path: Path) -> list[list[str]]:
    """The words of each call of a stub."""
    written = (tmp_path / "calls").read_text().split(str(tmp_path / "bin"))[1:]
    return [call.removesuffix("\n").split("\n")[1:] for call in written]


@pytest.mark.processes
def test_the_action_gates_exact_metrics_and_dry_runs(tmp_path: Path, stubs: str) -> None:
    done = run_step("Gate", tmp_path, path=stubs)
    assert done.returncode == 0, done.stderr
    gate = typer.main.get_command(app).commands["gate"]  # type: ignore[attr-defined]
    made = calls(tmp_path)
    assert [call[call.index("--suite") + 1] for call in made] == ["gate", "gate_cuda"]
    for call in made:
        assert call[0] == "gate"
        assert "--portable" in call
        assert call[call.index("--candidate") + 1] == "."
        gate.make_context("gate", call[1:])  # it raises on an option or a word that the command does not take
    summary = (tmp_path / "summary.md").read_text()
    assert summary.index("## Gate: gate\n") < summary.index("## Gate: gate_cuda\n")
    assert summary.count("verdict of gate") == 2


@pytest.mark.processes
def test_the_action_ends_with_the_worst_status_and_keeps_every_verdict(tmp_path: Path, stubs: str) -> None:
    done = run_step("Gate", tmp_path, path=stubs, given={"suites": "gate_cuda gate"}, ENDS_WITH="1")
    assert done.returncode == 1
    assert (tmp_path / "summary.md").read_text().count("verdict of gate") == 2


@pytest.mark.processes
def test_a_baseline_and_a_suite_of_another_repository(tmp_path: Path, stubs: str) -> None:
    given = {"suites": "suites/mine.toml", "baseline": "origin/main"}
    assert run_step("Gate", tmp_path, path=stubs, cwd=tmp_path, given=given).returncode == 0
    (call,) = calls(tmp_path)
    assert call[call.index("--baseline") + 1] == "origin/main"
    assert "--exact" in call
    assert Path(call[call.index("--candidate") + 1], "refshard", "measure").is_dir(), "refshard comes with the action"
    assert "## Gate: mine" in (tmp_path / "summary.md").read_text()


@pytest.mark.processes
def test_the_action_installs_the_refshard_that_it_comes_with(tmp_path: Path, stubs: str) -> None:
    done = run_step("Install refshard", tmp_path, path=stubs)
    assert done.returncode == 0, done.stderr
    uv, call = calls(tmp_path)
    assert uv[:3] == ["-m", "pip", "install"]
    assert uv[-1] == "uv"
    assert call[:4] == ["-m", "uv", "pip", "install"]
    assert call[call.index("--constraint") + 1] == str(ROOT / "constraints.txt")
    assert call[call.index("--editable") + 1] == str(ROOT)


@pytest.mark.full
def test_the_action_passes_on_this_checkout(tmp_path: Path) -> None:
    """With refshard itself, on the suite that needs a compiler."""
    if shutil.which("g++") is None:
        pytest.skip("dry runs need g++")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "refshard").write_text(f'#!/bin/sh\nexec {sys.executable} -m refshard.cli "$@"\n')
    (folder / "refshard").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    done = run_step("Gate", tmp_path, path=path, given={"suites": "gate_cuda"}, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "## Gate: gate_cuda" in (tmp_path / "summary.md").read_text()


def test_the_projects_workflow_uses_the_action_and_runs_every_check() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert "pull_request" in workflow[True]  # YAML 1.1 reads the key `on` as true
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    local = [step["uses"] for step in steps if step.get("uses", "").startswith("./")]
    assert local == ["./.github/actions/gate"]
    assert (ROOT / local[0] / "action.yml").is_file()
    assert ".ci/run" in [step.get("run") for step in steps]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
