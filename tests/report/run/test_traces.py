"""What traces say of a run's cases: the recorded run of two strategies over a real network, which has two traces."""

import gzip
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from refshard import resources
from refshard.analysis.evidence import Evidence, gather
from refshard.measure.store import read_run
from refshard.records import Run
from refshard.report.blocks import Section
from refshard.report.draw.embed import MOST_EMBEDDED
from refshard.report.run.page import Extras, page
from refshard.report.run.traces import MOST_TRACED, Traced, read_traces, why
from tests.report.pages import Page
from tests.report.printed import opened

FOLDER = resources.root() / "profiles" / "recorded" / "xeon-2-cores" / "engine_network"


@pytest.fixture(scope="module")
def recorded() -> Run:
    return read_run(FOLDER)


@pytest.fixture(scope="module")
def evidence(recorded: Run) -> Evidence:
    return gather(recorded)


@pytest.fixture(scope="module")
def traced(recorded: Run, evidence: Evidence) -> list[Traced]:
    return list(read_traces(evidence, [(recorded, FOLDER)], FOLDER.parent / "page.html").values())


def test_the_cases_whose_traces_are_there_lead_to_them(traced: list[Traced]) -> None:
    assert sorted(one.case.strategy for one in traced) == ["fsdp2-tuned", "refshard-yafsdp"]
    for one in traced:
        assert one.link.startswith("engine_network/traces/")
        assert (FOLDER.parent / one.link).samefile(one.path)


def test_a_row_for_each_trace(evidence: Evidence, traced: list[Traced]) -> None:
    (setting,) = [setting for setting in evidence.ranked if traced[0].case in setting.cases]
    numbers, _layers = why(setting, {one.case: one for one in traced}, "s", with_layers=True)
    assert isinstance(numbers, Section)
    found = opened(numbers)
    assert [row["late reductions (give-way)"] for row in found.rows] == ["-", "-"], "a CPU trace has none"
    assert all("GiB/s" in row["bus bandwidth"] and "% of the link" in row["bus bandwidth"] for row in found.rows)
    assert len(why(setting, {one.case: one for one in traced}, "s", with_layers=False)) == 1


def test_a_trace_that_is_damaged_keeps_its_link_alone(recorded: Run, evidence: Evidence, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "run")
    first, second = sorted((tmp_path / "run" / "traces").iterdir())
    first.write_bytes(gzip.compress(b'{"traceEvents": [{'))
    second.unlink()
    (one,) = read_traces(evidence, [(recorded, tmp_path / "run")], tmp_path / "page.html").values()
    assert one.analysis is None
    text = "".join(page(evidence, Extras(traces={one.case: one})))
    assert f'data-name="{first.name}"' in text


def test_two_runs_of_one_name_keep_their_own_traces(recorded: Run, tmp_path: Path) -> None:
    """By the run's object, not by its id: copies of a folder have one id."""
    shutil.copytree(FOLDER, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "traces")
    again = read_run(tmp_path / "copy")
    evidence = gather(again)
    places = [(recorded, FOLDER), (again, tmp_path / "copy")]
    assert read_traces(evidence, places, tmp_path / "page.html") == {}


def test_the_page_has_the_layers_and_the_links(evidence: Evidence, traced: list[Traced]) -> None:
    seen = Page("".join(page(evidence, Extras(traces={one.case: one for one in traced}))))
    links = {link["href"] for link in seen.having("a")}
    assert not {one.link for one in traced} & links, "a page that is mailed has its traces in it"
    entries = {f"#{item.get('id')}" for item in seen.having("li")}
    assert {f"#trace-of-{one.case.number}" for one in traced} <= links & entries
    drawn = {one.case.number for one in traced if one.view}
    boxes = [str(box["id"]) for box in seen.having("div") if box.get("class") == "chart"]
    assert {int(name.rpartition("-")[2]) for name in boxes if "-layer-" in name} == drawn
    assert drawn
    assert len(traced) <= MOST_TRACED


def test_a_trace_too_large_for_the_page_is_a_link_that_says_where_it_works(
    evidence: Evidence, traced: list[Traced], tmp_path: Path
) -> None:
    (tmp_path / "large.json.gz").write_bytes(b"\x1f\x8b" + bytes(MOST_EMBEDDED))
    large = {one.case: replace(one, path=tmp_path / "large.json.gz") for one in traced}
    seen = Page("".join(page(evidence, Extras(traces=large))))
    assert {one.link for one in traced} <= {link["href"] for link in seen.having("a")}
    assert seen.text.count("in the folder of this page: trace file") == len(traced)
