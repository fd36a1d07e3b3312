"""The wheel, in an environment outside of the checkout, runs a round of the quickstart: known answers.

What it depends on, that environment borrows from the one of the tests; tests/test_architecture.py holds that all of it
is declared.
"""

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from refshard.records import METRICS

ROOT = Path(__file__).parents[1]
ONCE = ("--rounds", "1", "--set", "time_limit_s=1800")
"""One round shows that the wheel works. The limit ends what hangs, and nothing that is slow beside other tests."""

pytestmark = pytest.mark.full


def run(*command: str | Path, cwd: Path, status: int = 0) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, dict[str, Any]]]:
    """Run folder, what was printed, and ``show --json`` by strategy."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("refshard-*.whl")
    venv.create(folder / "venv", with_pip=True)
    binaries = folder / "venv" / "bin"
    (packages,) = (folder / "venv").glob("lib/python3*/site-packages")
    # A line of a .pth file adds a folder, not what that folder's own .pth files add: refshard's checkout stays outside.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    run(binaries / "pip", "install", "--quiet", "--no-deps", wheel, cwd=folder)
    where = run(binaries / "python", "-c", "import refshard; print(refshard.__file__)", cwd=folder)
    assert Path(where.strip()).is_relative_to(folder / "venv")
    assert "quickstart" in run(binaries / "refshard", "list", "suites", cwd=folder).split()
    printed = run(binaries / "refshard", "run", "quickstart", *ONCE, "--out", "q", cwd=folder)
    shown = json.loads(run(binaries / "refshard", "show", "q", "--json", cwd=folder, status=3))
    assert shown["verdict"][0].startswith("No verdict: n = 1: no interval")
    return folder / "q", printed, {row["strategy"]: row for row in shown["cases"]}


def test_every_case_ends_ok_with_every_metric(quickstart: tuple[Path, str, dict[str, dict[str, Any]]]) -> None:
    _, _, rows = quickstart
    assert len(rows) == 6
    for row in rows.values():
        assert (row["state"], row["error"], row["proof"]) == ("ok", None, "proved")
        assert row.keys() >= METRICS.keys()
        for metric in ("step_time_s", "tokens_per_s_gpu", "tflops", "mfu", "peak_memory_bytes", "rss_bytes"):
            assert row[metric] > 0, metric
        assert row["loss_parity"] <= 1e-5


def test_overlap_has_its_known_answers(quickstart: tuple[Path, str, dict[str, dict[str, Any]]]) -> None:
    """FSDP2's defaults wait for each collective on a CPU; the others must not."""
    _, _, rows = quickstart
    assert rows["single"]["overlap_ratio"] is None
    assert rows["fsdp2"]["overlap_ratio"] == 0
    assert rows["fsdp2"]["exposed_comm_s"] == pytest.approx(rows["fsdp2"]["comm_s"])
    for strategy in ("ddp", "fsdp2-tuned", "refshard-fsdp", "refshard-yafsdp"):
        assert rows[strategy]["overlap_ratio"] > 0.02, strategy


def test_two_ranks_equal_ddp_to_the_bit(quickstart: tuple[Path, str, dict[str, dict[str, Any]]]) -> None:
    _, _, rows = quickstart
    for strategy in ("fsdp2", "fsdp2-tuned", "refshard-fsdp", "refshard-yafsdp"):
        assert rows[strategy]["bit_identical_to_ddp"] is True, rows[strategy]["bits_note"]


def test_it_ends_with_a_dashboard_that_needs_no_network(
    quickstart: tuple[Path, str, dict[str, dict[str, Any]]],
) -> None:
    folder, printed, _ = quickstart
    assert printed.rstrip().endswith("dashboard: q/dashboard.html")
    whole = (folder / "dashboard.html").read_text()
    page = re.sub(r"<script.*?</script>", "", whole, flags=re.S)
    assert len(page) < len(whole)
    assert "default-src 'none'" in page
    assert 'src="http' not in page
    assert 'href="http' not in page


def test_the_runs_traces_are_analysed(quickstart: tuple[Path, str, dict[str, dict[str, Any]]]) -> None:
    folder, _, rows = quickstart
    refshard, page = folder.parent / "venv" / "bin" / "refshard", folder.parent / "page.html"
    traces = json.loads(run(refshard, "trace", folder, "--json", "--html", page, cwd=folder.parent))["traces"]
    assert len(traces) == sum(row["gpus"] for row in rows.values())
    assert len({trace["job"] for trace in traces}) == len(rows)
    assert all((trace["comm_ns"] > 0) == (trace["world_size"] > 1) for trace in traces)
    assert page.read_text().startswith("<!doctype html>")


def test_published_figures_are_not_in_the_wheel_and_a_run_is_validated_without_them(
    quickstart: tuple[Path, str, dict[str, dict[str, Any]]],
) -> None:
    folder = quickstart[0].parent
    (wheel,) = folder.glob("refshard-*.whl")
    titles = [tomllib.loads(path.read_text())["title"] for path in (ROOT / "validation" / "published").glob("*.toml")]
    with ZipFile(wheel) as opened:
        names = opened.namelist()
        texts = {name: opened.read(name).decode() for name in names if name.endswith((".py", ".toml"))}
    assert titles
    assert not [name for name, text in texts.items() if any(title in text for title in titles)]
    assert not [name for name in names if name.startswith("validation/")]
    assert "refshard/_resources/profiles/spread.toml" in names
    refshard = folder / "venv" / "bin" / "refshard"
    done = subprocess.run([refshard, "validate"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2
    assert "published results are part of a checkout, got a refshard without one; run `refshard" in done.stderr
    recorded = ROOT / "profiles" / "recorded" / "epyc-2-cores" / "validation"
    assert "median error of the step time" in run(refshard, "validate", recorded, cwd=folder)


def test_files_of_other_tools_are_written_from_the_wheel(
    quickstart: tuple[Path, str, dict[str, dict[str, Any]]],
) -> None:
    folder = quickstart[0].parent
    plan = ("plan", "--model", "llama3-8b", "--cluster", "dgx-h100", "--emit", "torchtitan", "--out", "emitted")
    run(folder / "venv" / "bin" / "refshard", *plan, cwd=folder)
    assert "config.training.max_context_length = 8192\n" in (folder / "emitted" / "refshard_torchtitan.py").read_text()
