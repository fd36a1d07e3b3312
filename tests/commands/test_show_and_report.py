"""``refshard show`` and ``refshard report`` on a run that was written by hand."""

import csv
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from refshard import resources
from refshard.cli import app
from refshard.commands.report import report
from refshard.commands.show import show
from refshard.errors import SpecError, StoreError
from refshard.harness.store import RunWriter
from refshard.records import EndRecord, Run
from refshard.specs.case import Fidelity
from tests.analysis.test_evidence import later, quicker
from tests.report.runs import CASES, over_network, run

RECORDED = sorted(path.parent for path in (resources.root() / "profiles" / "recorded").glob("*/*/records.jsonl"))


(NOISE,) = (resources.root() / resources.BASELINES).glob("*/gate.noise.json")


@pytest.fixture
def chdir() -> Iterator[Callable[[Path], None]]:
    """Changes this process's folder, for one test."""
    before = Path.cwd()
    yield os.chdir
    os.chdir(before)


def write(made: Run, folder: Path) -> Path:
    with RunWriter(folder) as writer:
        writer.append(made.header)
        for record in made.launches:
            writer.append(record)
        if made.end is not None:
            writer.close(made.header.run_id, interrupted=made.end.interrupted)
    return folder


def unfinished(launches: int, *, interrupted: bool = False, planned: int = 12) -> Run:
    """What a run of twelve launches, or of who knows how many, has written when it stops short of its end."""
    made = run()
    end = EndRecord(run_id="made", ended_at="", cases=launches, states={}, interrupted=True) if interrupted else None
    header = msgspec.structs.replace(made.header, planned=planned)
    return Run(header=header, launches=made.launches[:launches], end=end)


def modelled(fidelity: Fidelity, steps: int | None = None) -> Run:
    """The cases that end ok, on a cluster; each with its first ``steps`` alone."""
    made = run(CASES, rounds=1, failed=False, fidelity=fidelity)
    cases = tuple(
        msgspec.structs.replace(record, step_times_s=tuple(times[:steps] for times in record.step_times_s))
        for record in made.launches
    )
    return msgspec.structs.replace(made, launches=cases)


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def as_text(value: Any) -> str:
    """A value of JSON as CSV has it."""
    if isinstance(value, list):
        return " | ".join(map(str, value))
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(run(), tmp_path / "run")


def test_show_prints_the_verdict_and_then_the_table(folder: Path) -> None:
    text = show(folder, as_json=False)
    assert text.startswith("* refshard-yafsdp is fastest at 40.0 ms per step.")
    assert text.index("not ranked") < text.index("llama-mini, global batch") < text.rindex("refshard-yafsdp")


def test_show_as_json_is_an_array_with_an_object_per_case(folder: Path) -> None:
    found = json.loads(show(folder, as_json=True))
    assert [row["strategy"] for row in found][:2] == ["single", "ddp"]
    assert found[1]["step_time_s"] == pytest.approx(0.05, rel=1e-4)


def test_against_a_strategy_are_ratios_with_their_intervals(folder: Path) -> None:
    """The step times and memories that the run was made of: ddp 50 ms and 440 MiB, yafsdp 40 ms and 240 MiB."""
    text = show(folder, as_json=False, against="refshard-yafsdp")
    lines = [line.split() for line in text.splitlines()]
    (ddp,) = (line for line in lines if line and line[0] == "ddp")
    assert ddp == ["ddp", "2", "1.25", "(1.25", "to", "1.25)", "1.83"]
    assert [line[0] for line in lines if line and line[0] in ("single", "refshard-yafsdp")] == []


def test_against_a_strategy_json_has_ratios_beside_each_case(folder: Path) -> None:
    found = {row["strategy"]: row for row in json.loads(show(folder, as_json=True, against="refshard-yafsdp"))}
    ddp = found["ddp"]
    assert ddp["against"] == "refshard-yafsdp"
    assert ddp["step_time_ratio_low"] <= ddp["step_time_ratio"] <= ddp["step_time_ratio_high"]
    assert (ddp["step_time_ratio"], ddp["peak_memory_ratio"]) == pytest.approx((1.25, 440 / 240), rel=1e-4)
    for name in ("single", "refshard-yafsdp", "fsdp2-tuned"):
        assert found[name]["step_time_ratio"] is found[name]["peak_memory_ratio"] is None, name


@pytest.mark.parametrize("against", [None, "refshard-yafsdp"])
def test_csv_is_the_json_with_a_row_per_case(folder: Path, against: str | None) -> None:
    """Errors with line breaks and commas in them, and numbers to the last digit."""
    rows = json.loads(show(folder, as_json=True, against=against))
    text = show(folder, as_json=False, as_csv=True, against=against)
    assert text.endswith("\r\n")
    assert read_csv(text) == [{name: as_text(value) for name, value in row.items()} for row in rows]
    found = {row["strategy"]: row for row in read_csv(text)}
    assert float(found["ddp"]["step_time_s"]) == rows[1]["step_time_s"]
    assert found["fsdp2-tuned"]["error"].endswith("\nsecond line")
    assert found["ddp"]["bit_identical_to_ddp"] == "true"
    assert found["single"]["overlap_ratio"] == found["single"]["error"] == ""


def test_csv_of_a_run_without_cases_is_its_header(folder: Path, tmp_path: Path) -> None:
    none = write(unfinished(0), tmp_path / "none")
    (header,) = show(none, as_json=False, as_csv=True).splitlines()
    assert header.split(",") == list(json.loads(show(folder, as_json=True))[0])
    assert json.loads(show(none, as_json=True)) == []


def test_json_and_csv_at_once_are_refused_in_one_line(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"--csv: --json is asked for too, .*; leave out either"):
        show(folder, as_json=True, as_csv=True)


def test_the_command_prints_csv_as_it_is(folder: Path) -> None:
    done = CliRunner().invoke(app, ["show", str(folder), "--csv"])
    assert done.stdout_bytes.decode() == show(folder, as_json=False, as_csv=True)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (unfinished(0), "* Not finished: 0 of 12 launches are done; the run was cut off, or is still under way."),
        (unfinished(3), "* Not finished: 3 of 12 launches are done; the run was cut off, or is still under way.\n"),
        (unfinished(3, interrupted=True), "* Not finished: 3 of 12 launches are done; the run was interrupted.\n"),
        (unfinished(3, planned=0), "* Not finished: 3 launches are done; the run was cut off, or is still under way."),
        (msgspec.structs.replace(run(), launches=()), "* Nothing was launched."),
    ],
)
def test_a_run_that_stopped_short_says_so_first(tmp_path: Path, made: Run, words: str) -> None:
    text = show(write(made, tmp_path / "run"), as_json=False)
    assert text.startswith(words)
    assert text == text.strip()


def test_what_is_simulated_has_neither_samples_nor_doubts_about_them(tmp_path: Path) -> None:
    folder = write(modelled("simulated", 1), tmp_path / "run")
    text = show(folder, as_json=False)
    assert text.startswith("* refshard-yafsdp is fastest at ")
    assert "% longer (simulated, so there is no interval)." in text
    assert "Caution" not in text
    assert {tuple(row["warnings"]) for row in json.loads(show(folder, as_json=True))} == {()}


def test_what_the_model_cannot_tell_apart_is_no_order(tmp_path: Path) -> None:
    """The cases' step times are 1.25 and more apart, but for one that is put at 1.02 times the fastest's."""
    made = modelled("simulated", 1)
    fastest = made.launches[-1]
    close = [tuple(1.02 * time for time in times) for times in fastest.step_times_s]
    other = msgspec.structs.replace(made.launches[-2], step_times_s=tuple(close))
    folder = write(msgspec.structs.replace(made, launches=(*made.launches[:-2], other, fastest)), tmp_path / "run")
    first, second = show(folder, as_json=False).splitlines()[:2]
    assert first.startswith("* refshard-yafsdp and refshard-fsdp cannot be told apart as the fastest: ")
    assert second.startswith("* refshard-fsdp takes 1.020 times as long as the first, and under 1.03 times the model ")


def test_one_launch_of_each_ranks_nobody(tmp_path: Path) -> None:
    text = show(write(modelled("measured", 1), tmp_path / "run"), as_json=False)
    assert text.startswith("* Not ranked by time (n = 1: no interval): ddp 49.5 ms, ")
    assert "inf" not in text


@pytest.mark.parametrize("folder", RECORDED, ids=lambda path: path.name)
def test_every_recorded_run_is_shown_in_every_form(folder: Path) -> None:
    shown = show(folder, as_json=False)
    assert shown.startswith("* ")
    rows = json.loads(show(folder, as_json=True))
    assert len(read_csv(show(folder, as_json=False, as_csv=True))) == len(rows) > 0
    compared = {row["strategy"] for row in rows if row["state"] == "ok" and row["strategy"] != "single"}
    peer = "ddp" if "ddp" in compared else "fsdp2"  # ddp runs out of memory where the model is large, or is left out
    assert len(json.loads(show(folder, as_json=True, against=peer))) == len(rows)
    assert f"step time / {peer}'s" in show(folder, as_json=False, against=peer)


def test_against_a_strategy_of_a_run_without_cases_says_why(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"--against: this run has no case yet, so none of strategy 'ddp'; leave it out"
    ):
        show(write(unfinished(0), tmp_path / "run"), as_json=False, against="ddp")


def test_against_a_strategy_that_is_alone_there_is_nothing_to_compare(folder: Path) -> None:
    text = show(folder, as_json=False, against="single")
    assert text == "* Nothing to compare: no other case ended ok beside one of single that did, with as many ranks."


def test_against_a_strategy_that_the_run_lacks_names_the_nearest(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"no case of strategy 'refshard-yafsd'; did you mean 'refshard-yafsdp'\?"):
        show(folder, as_json=False, against="refshard-yafsd")


def test_a_network_is_named_in_text_in_json_and_on_the_page(folder: Path, tmp_path: Path) -> None:
    words = "2 hosts joined at 2 Gbit/s (network namespaces)"
    joined = write(over_network(run(), words), tmp_path / "joined")
    assert f"* The ranks ran on {words}.\n" in show(joined, as_json=False)
    assert {row["network"] for row in json.loads(show(joined, as_json=True))} == {words}
    page = report([joined], None).read_text()
    assert f"on quiet-oak: {words}, refshard" in page
    assert "hosts joined" not in show(folder, as_json=False)
    assert {row["network"] for row in json.loads(show(folder, as_json=True))} == {None}


def test_report_writes_beside_the_records(folder: Path) -> None:
    assert report([folder], None) == folder / "dashboard.html"
    assert 'id="plotly"' in (folder / "dashboard.html").read_text()


def test_report_writes_where_it_is_told(folder: Path, tmp_path: Path) -> None:
    assert report([folder], tmp_path / "page.html") == tmp_path / "page.html"
    assert not (folder / "dashboard.html").exists()


def test_a_place_that_does_not_exist_is_a_mistake_in_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"out: .*missing/page.html cannot be written \(No such file"):
        report([folder], tmp_path / "missing" / "page.html")


def test_a_folder_without_a_run_is_a_mistake_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        show(tmp_path, as_json=False)
    with pytest.raises(StoreError, match="holds no run"):
        report([tmp_path], None)


def test_several_runs_make_one_page_and_a_baseline_its_changes(folder: Path, tmp_path: Path) -> None:
    other = write(later(run(CASES[:2], rounds=1, failed=False), "other"), tmp_path / "other")
    text = report([folder, other], tmp_path / "page.html").read_text()
    assert "Run made," in text
    assert "Run other," in text
    assert 'id="history"' in text
    slower = write(later(quicker(run(failed=False), 1.5), "slower"), tmp_path / "slower")
    text = report([slower], tmp_path / "page.html", against=folder).read_text()
    assert "Against made, slower: " in text
    assert "finding worse" in text


def test_a_run_that_is_named_twice_counts_once(folder: Path, tmp_path: Path) -> None:
    """As ``runs/*/`` does, where ``latest`` leads to another of them."""
    (tmp_path / "latest").symlink_to(folder)
    text = report([folder, tmp_path / "latest"], tmp_path / "page.html").read_text()
    assert text == report([folder], tmp_path / "page.html").read_text()


@pytest.mark.processes
def test_the_noise_of_the_machine_is_told_where_it_was_measured(
    folder: Path, tmp_path: Path, chdir: Callable[[Path], None]
) -> None:
    chdir(tmp_path)
    assert "not measured" in report([folder], tmp_path / "page.html").read_text()
    kept = tmp_path / resources.BASELINES / run().header.environment.id
    kept.mkdir(parents=True)
    (kept / "gate.noise.json").write_bytes(NOISE.read_bytes())
    assert "8 of 1,000 gates failed" in report([folder], tmp_path / "page.html").read_text()
    (kept / "gate.noise.json").write_text("{")
    assert "not measured" in report([folder], tmp_path / "page.html").read_text()


def test_a_folder_of_pages_has_a_timeline_for_each_trace(tmp_path: Path) -> None:
    (recorded,) = [path for path in RECORDED if path.name == "engine_network"]
    index = report([recorded], tmp_path / "pages", multi=True)
    assert index == tmp_path / "pages" / "index.html"
    assert sorted(path.name for path in index.parent.iterdir()) == ["index.html", "trace-0.html", "trace-1.html"]
    text = index.read_text()
    assert 'href="trace-0.html">timeline</a>' in text
    assert f'href="{os.path.relpath(recorded / "traces", index.parent)}/' in text


def test_show_as_markdown(folder: Path) -> None:
    text = show(folder, as_json=False, as_markdown=True)
    assert text.startswith("## quickstart\n\n- refshard-yafsdp is fastest")
    for others in ({"as_json": True}, {"as_json": False, "as_csv": True}, {"as_json": False, "against": "ddp"}):
        with pytest.raises(SpecError, match="markdown"):
            show(folder, as_markdown=True, **others)
