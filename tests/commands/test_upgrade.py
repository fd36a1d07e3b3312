"""``refshard upgrade-check A B -- train.py``, with a package of two versions that pip installs without a network."""

import json
from pathlib import Path
from zipfile import ZipFile

import pytest

from refshard.cli import main
from refshard.fakecuda.build import extension
from tests.fakecuda.needs import needs_device

pytestmark = [needs_device, pytest.mark.processes]
SCRIPT = """
import losses
import torch
from torch import nn

model = nn.ModuleDict({"body": nn.Linear(1024, 1024), "head": nn.Linear(1024, 4096)}).cuda().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(3):
    x = torch.ones(2048, 1024, device="cuda", dtype=torch.bfloat16)
    loss = losses.loss(model["head"](model["body"](x)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
VERSIONS = {
    "1.0": "def loss(logits):\n    return logits.square().mean()\n",
    "2.0": "def loss(logits):\n    found = logits.float().square().mean()\n    found.item()\n    return found\n",
    "3.0": "raise ValueError('of another world')\n",
}


def wheel(folder: Path, version: str, code: str) -> None:
    """A wheel of one module, as a build would make it."""
    about = f"losses-{version}.dist-info"
    with ZipFile(folder / f"losses-{version}-py3-none-any.whl", "w") as file:
        file.writestr("losses.py", code)
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: losses\nVersion: {version}\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", f"losses.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels next to the script; environments are made in a cache of the test's own."""
    device = extension().parents[1]
    (tmp_path / "cache" / "refshard").mkdir(parents=True)
    (tmp_path / "cache" / "refshard" / "fakecuda").symlink_to(device)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    for version, code in VERSIONS.items():
        wheel(tmp_path, version, code)
    return tmp_path


def check(before: str, after: str, *options: str) -> object:
    """The exit status."""
    pip = f"--no-index --find-links {Path.cwd()}"
    words = ["upgrade-check", before, after, "--gpus", "1", "--pip", pip, *options, "--", "train.py"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code or 0


@pytest.mark.slow
def test_what_an_upgrade_changes_is_named(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check("losses==1.0", "losses==2.0", "--json", "--html", "page.html") == 1
    assert "losses.py in loss" in (index / "page.html").read_text()
    found = json.loads(capfd.readouterr().out)
    assert found["packages"] == {"losses": ["1.0", "2.0"]}
    changes = {change["figure"]: (change["before"], change["after"]) for change in found["changes"]}
    assert changes["host synchronisations"] == (0, 1)
    assert changes["peak allocated"][1] - changes["peak allocated"][0] >= 2048 * 4096 * 4
    before, after = (found[side]["operators"] for side in ("before", "after"))
    assert after["aten::copy_ in no module"][1] > before["aten::copy_ in no module"][1]
    assert found["after"]["functions"]["losses.py in loss"][0] >= 2048 * 4096 * 4

    made = list((index / "cache" / "refshard" / "environments").glob("*/venv/pyvenv.cfg"))
    times = {path: path.stat().st_mtime_ns for path in made}
    assert len(times) == 2
    assert check("losses==2.0", "losses==1.0") == 0
    printed = capfd.readouterr().out
    assert "losses.py in loss" in printed
    assert "PASS: no figure became worse with losses==1.0" in printed
    assert "host synchronisations -1" in printed
    assert {path: path.stat().st_mtime_ns for path in made} == times


@pytest.mark.full
def test_a_script_that_an_upgrade_breaks(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check("losses==1.0", "losses==3.0") == 1
    said = "REGRESSION: with losses==3.0, the script failed: ValueError: of another world at losses.py:1"
    assert said in " ".join(capfd.readouterr().out.split())
    assert check("losses==3.0", "losses==1.0") == 3
    assert "NO VERDICT: with losses==3.0, the script failed" in " ".join(capfd.readouterr().out.split())


def test_what_pip_cannot_install_is_one_sentence(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check("current", "losses==9.9") == 2
    said = capfd.readouterr().err
    assert "refshard: pip cannot install 'losses==9.9': Could not find a version that satisfies" in said
    assert "Traceback" not in said
