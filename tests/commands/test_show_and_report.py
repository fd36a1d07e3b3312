"""``refshard show`` and ``refshard report`` on a run that was written by hand."""

import json
from pathlib import Path

import pytest

from refshard.commands.report import report
from refshard.commands.show import show
from refshard.errors import SpecError, StoreError
from refshard.harness.store import RunWriter
from refshard.records import Run
from tests.report.runs import over_network, run


def write(made: Run, folder: Path) -> Path:
    assert made.end is not None
    with RunWriter(folder) as writer:
        writer.append(made.header)
        for record in made.cases:
            writer.append(record)
        writer.close(made.header.run_id, interrupted=made.end.interrupted)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(run(), tmp_path / "run")


def test_show_prints_the_verdict_and_then_the_table(folder: Path) -> None:
    text = show(folder, as_json=False)
    assert text.startswith("* refshard-yafsdp is fastest at 40.0 ms per step.")
    assert text.index("Caution") < text.index("llama-mini, global batch") < text.rindex("refshard-yafsdp")


def test_show_as_json_is_an_array_with_an_object_per_case(folder: Path) -> None:
    found = json.loads(show(folder, as_json=True))
    assert [row["strategy"] for row in found][:2] == ["single", "ddp"]
    assert found[1]["step_time_s"] == pytest.approx(0.05, rel=1e-4)


def test_against_a_strategy_are_ratios_with_their_intervals(folder: Path) -> None:
    """The step times and memories that the run was made of: ddp 50 ms and 440 MiB, yafsdp 40 ms and 240 MiB."""
    text = show(folder, as_json=False, against="refshard-yafsdp")
    lines = [line.split() for line in text.splitlines()]
    (ddp,) = (line for line in lines if line and line[0] == "ddp")
    assert ddp == ["ddp", "2", "1.25", "(1.24", "to", "1.26)", "1.83"]
    assert [line[0] for line in lines if line and line[0] in ("single", "refshard-yafsdp")] == []


def test_against_a_strategy_json_has_ratios_beside_each_case(folder: Path) -> None:
    found = {row["strategy"]: row for row in json.loads(show(folder, as_json=True, against="refshard-yafsdp"))}
    ddp = found["ddp"]
    assert ddp["against"] == "refshard-yafsdp"
    assert ddp["step_time_ratio_low"] < ddp["step_time_ratio"] < ddp["step_time_ratio_high"]
    assert (ddp["step_time_ratio"], ddp["peak_memory_ratio"]) == pytest.approx((1.25, 440 / 240), rel=1e-4)
    for name in ("single", "refshard-yafsdp", "fsdp2-tuned"):
        assert found[name]["step_time_ratio"] is found[name]["peak_memory_ratio"] is None, name


def test_against_a_strategy_that_the_run_lacks_names_the_nearest(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"no case of strategy 'refshard-yafsd'; did you mean 'refshard-yafsdp'\?"):
        show(folder, as_json=False, against="refshard-yafsd")


def test_a_network_is_named_in_text_in_json_and_on_the_page(folder: Path, tmp_path: Path) -> None:
    words = "2 hosts joined at 2 Gbit/s (network namespaces)"
    joined = write(over_network(run(), words), tmp_path / "joined")
    assert f"* The ranks ran on {words}.\n" in show(joined, as_json=False)
    assert {row["network"] for row in json.loads(show(joined, as_json=True))} == {words}
    page = report(joined, None).read_text()
    assert f"on quiet-oak: {words}, refshard" in page
    assert "hosts joined" not in show(folder, as_json=False)
    assert {row["network"] for row in json.loads(show(folder, as_json=True))} == {None}


def test_report_writes_beside_the_records(folder: Path) -> None:
    assert report(folder, None) == folder / "dashboard.html"
    assert (folder / "dashboard.html").stat().st_size > 1_000_000


def test_report_writes_where_it_is_told(folder: Path, tmp_path: Path) -> None:
    assert report(folder, tmp_path / "page.html") == tmp_path / "page.html"
    assert not (folder / "dashboard.html").exists()


def test_a_place_that_does_not_exist_is_a_mistake_in_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"out: .*missing/page.html cannot be written \(No such file"):
        report(folder, tmp_path / "missing" / "page.html")


def test_a_folder_without_a_run_is_a_mistake_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        show(tmp_path, as_json=False)
    with pytest.raises(StoreError, match="holds no run"):
        report(tmp_path, None)
