"""``refshard gate -- train.py``: a gate for a script of one's own, by dry run."""

import json
import subprocess
from pathlib import Path

import pytest

from refshard.cli import main
from tests.dryrun import scripts
from tests.fakecuda.needs import needs_device

pytestmark = [needs_device, pytest.mark.processes]
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one commit; the script is in a folder of it."""
    folder = tmp_path / "own" / "training"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(scripts.BATCHED)
    for words in (("init", "-q", "."), ("add", "-A"), ("commit", "-q", "-m", "first")):
        subprocess.run([*GIT, *words], cwd=folder.parent, check=True)
    monkeypatch.chdir(folder)
    return folder


def gate(*words: str) -> object:
    """The exit status."""
    with pytest.raises(SystemExit) as ended:
        main(["gate", "--gpus", "1", *words])
    return ended.value.code or 0


def test_a_script_is_held_to_what_was_accepted(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = ("--", "train.py", "--batch", "2")
    assert gate(*script) == 3
    assert "no baseline for this command" in " ".join(capfd.readouterr().out.split())
    assert gate("--accept", "the first", *script) == 0
    assert gate(*script) == 0
    assert "* accepted on" in capfd.readouterr().out

    changed = scripts.BATCHED.replace("    del held\n", "    del held\n    print(step, model.weight.sum().item())\n")
    (repository / "train.py").write_text(changed)
    assert gate("--json", *script) == 1
    (case,) = json.loads(capfd.readouterr().out)["cases"]
    found = {change["metric"]: (change["before"], change["after"]) for change in case["changes"]}
    assert found["host synchronisations"] == (0, 1)
    assert found["operators"][1] == found["operators"][0] + 2  # the sum, and the copy of its value
    assert "peak reserved" not in found


def test_a_script_is_compared_with_another_revision(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (repository / "train.py").write_text(scripts.BATCHED.replace("else 9)", "else 10)"))
    assert gate("--baseline", "HEAD", "--json", "--", "train.py") == 1
    found = json.loads(capfd.readouterr().out)
    changes = {change["metric"]: (change["before"], change["after"]) for change in found["cases"][0]["changes"]}
    assert changes["peak allocated"][1] - changes["peak allocated"][0] == 2**30
    assert any("at the peak became" in note for note in found["notes"])
    left = subprocess.run([*GIT, "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert len(left.splitlines()) == 1


REFUSED = [
    (("--suite", "gate_cuda", "--", "train.py"), "--suite is for suites; leave it out with a script"),
    (("--accept", "why"), "--accept, --gpus needs a script"),
    (("--accept", " ", "--", "train.py"), "accept needs a reason"),
    (("--baseline", "no-such", "--", "train.py"), "'no-such' is neither a folder nor a revision"),
    (("--accept", "why", "--", "none.py"), "there is no script 'none.py'"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_wrong_commands_are_refused(
    repository: Path, words: tuple[str, ...], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert gate(*words) == 2
    assert says in " ".join(capfd.readouterr().err.split())


def test_a_script_that_fails_is_no_regression(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (repository / "train.py").write_text("raise ValueError('no data')\n")
    assert gate("--accept", "why", "--", "train.py") == 2
    assert "the script failed: ValueError: no data at train.py:1" in " ".join(capfd.readouterr().err.split())
    (repository / "train.py").write_text("import torch; torch.ones(8, device='cuda')\n")
    assert gate("--accept", "why", "--", "train.py") == 2
    assert "no optimizer step had work on the GPU" in " ".join(capfd.readouterr().err.split())


def test_another_revision_has_another_script(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gate("--baseline", "HEAD", "--", str(repository / "train.py")) == 2
    assert "is this revision's own file; give its path relative to" in " ".join(capfd.readouterr().err.split())
