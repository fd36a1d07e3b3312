"""``refshard report``: what it writes where, for one run and for several."""

import zipfile
from pathlib import Path

import pytest

from refshard import resources
from refshard.commands.report import report
from refshard.errors import SpecError, StoreError
from tests.report.runs import CASES, later, over_network, quicker, run, write

pytestmark = pytest.mark.slow

RECORDED = resources.root() / "profiles" / "recorded" / "xeon-2-cores" / "engine_network"
(NOISE,) = (resources.root() / resources.BASELINES).glob("*/gate.noise.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(run(), tmp_path / "run")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write(later(run(CASES[:2], rounds=1, failed=False), "other"), tmp_path / "other")


def test_one_run_is_one_file_in_its_folder_or_elsewhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report([folder], tmp_path / "page.html") == tmp_path / "page.html"
    assert not (folder / "dashboard.html").exists()
    assert report([folder], None) == folder / "dashboard.html"
    assert 'id="plotly"' in (folder / "dashboard.html").read_text()
    report([folder], Path("-"))
    assert capsys.readouterr().out.startswith("<!doctype html>")
    joined = write(over_network(run(), "2 hosts joined at 2 Gbit/s"), tmp_path / "joined")
    assert "quiet-oak (2 hosts joined at 2 Gbit/s)" in report([joined], None).read_text()


def test_several_runs_are_a_folder_with_an_index_and_a_page_each(folder: Path, other: Path) -> None:
    written = report([folder, other], None)
    assert written == other / "report"
    assert sorted(path.name for path in written.iterdir()) == ["index.html", "made.html", "other.html"]
    index = (written / "index.html").read_text()
    assert 'href="made.html"' in index
    assert 'href="other.html"' in index
    assert '<a href="index.html">All runs</a>' in (written / "made.html").read_text()


def test_places_that_cannot_be_written_or_hold_no_run_are_mistakes_in_one_line(
    folder: Path, other: Path, tmp_path: Path
) -> None:
    for out in (Path("-"), tmp_path / "page.html"):
        with pytest.raises(SpecError, match="is one file, and 2 runs make a folder; name a folder"):
            report([folder, other], out)
    with pytest.raises(SpecError, match=r"out: .*missing/page.html cannot be written \(No such file"):
        report([folder], tmp_path / "missing" / "page.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="there is no run in this folder"):
        report([tmp_path / "empty"], None)


def test_hostile_run_ids_name_no_file_elsewhere(folder: Path, tmp_path: Path) -> None:
    hostile = write(later(run(CASES[:2], failed=False), "../../evil"), tmp_path / "hostile")
    written = report([folder, hostile], tmp_path / "pages")
    assert sorted(path.name for path in written.iterdir()) == ["..-..-evil.html", "index.html", "made.html"]


def test_a_folder_has_the_traces_and_a_page_for_each_and_a_zip_holds_it(tmp_path: Path) -> None:
    written = report([RECORDED], tmp_path / "pages")
    names = ["index.html", "trace-0.html", "trace-1.html", "traces"]
    assert sorted(path.name for path in written.iterdir()) == names
    text = (written / "index.html").read_text()
    assert 'href="trace-0.html">analysis</a>' in text
    for trace in (written / "traces").iterdir():
        assert f'data-name="{trace.name.partition("-")[2]}"' in text, "it is in the page"
    packed = zipfile.ZipFile(report([RECORDED], tmp_path / "to send.zip")).namelist()
    assert "to send/index.html" in packed
    assert len([name for name in packed if name.startswith("to send/traces/") and name.endswith(".gz")]) == 2


def test_the_page_of_one_run_carries_its_traces(tmp_path: Path) -> None:
    text = report([RECORDED], tmp_path / "page.html").read_text()
    assert text.count('<script type="application/octet-stream"') == 2
    assert text.count(">Open in Perfetto</button>") == 2


def test_a_baseline_says_what_changed(folder: Path, tmp_path: Path) -> None:
    slower = write(later(quicker(run(failed=False), 1.5), "slower"), tmp_path / "slower")
    text = report([slower], tmp_path / "page.html", against=folder).read_text()
    assert "Slower than in made: " in text
    assert 'class="lead bad"' in text


def test_a_run_that_is_named_twice_counts_once(folder: Path, tmp_path: Path) -> None:
    """As ``runs/*/`` does, where ``latest`` leads to another of them."""
    (tmp_path / "latest").symlink_to(folder)
    text = report([folder, tmp_path / "latest"], tmp_path / "page.html").read_text()
    assert text == report([folder], tmp_path / "page.html").read_text()


@pytest.mark.processes
def test_the_noise_of_the_machine_is_told_where_it_was_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "not measured" in report([folder], tmp_path / "page.html").read_text()
    kept = tmp_path / resources.BASELINES / run().header.environment.id
    kept.mkdir(parents=True)
    (kept / "gate.noise.json").write_bytes(NOISE.read_bytes())
    assert "8 of 1,000 gates failed" in report([folder], tmp_path / "page.html").read_text()
    (kept / "gate.noise.json").write_text("{")
    assert "not measured" in report([folder], tmp_path / "page.html").read_text()
