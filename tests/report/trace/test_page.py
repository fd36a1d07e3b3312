"""The page of traces: self-contained, escaped, complete, of bounded size, and replaced whole or not at all."""

import base64
import gzip
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from refshard.analysis.analyse import Analysis
from refshard.events.timeline import Timeline, Window
from refshard.report.draw import embed
from refshard.report.trace.lanes import one_scale
from tests.events.spans import spans_of
from tests.report import traces
from tests.report.pages import Page
from tests.report.traces import HOSTILE

PERFETTO = "https://ui.perfetto.dev"
DATA = ("application/json", "application/octet-stream", "application/gzip")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[Analysis]:
    folder = tmp_path_factory.mktemp("traces")
    return [
        traces.trace(folder, traces.gpu(layers=6)),
        traces.trace(folder, traces.gpu(layers=6, rank=1, slow_comm=1.4)),
        traces.trace(folder, traces.cpu(), file="gloo/rank0.json", job=1, content=b'{"traceEvents": []}'),
    ]


@pytest.fixture(scope="module")
def whole(shown: list[Analysis]) -> str:
    return traces.page(shown)


@pytest.fixture(scope="module")
def seen(whole: str) -> Page:
    return Page(whole)


def hostile(folder: Path) -> Analysis:
    """Every text of a trace says something bad."""
    timeline = traces.renamed(traces.gpu(layers=4), HOSTILE)
    figures = traces.figures(timeline, file=HOSTILE)
    bad = msgspec.structs.replace(
        figures,
        device=HOSTILE,
        giveway=msgspec.structs.replace(figures.giveway, index=None, reason=HOSTILE, baseline=HOSTILE),
        memory=tuple(msgspec.structs.replace(point, device=HOSTILE) for point in figures.memory),
        warnings=tuple(msgspec.structs.replace(told, message=HOSTILE) for told in figures.warnings),
    )
    path = folder / "<img src=x onerror=alert(3)>.json"
    path.write_text("{}")
    return traces.analysis(bad, timeline, path)


@pytest.mark.slow
def test_the_page_asks_the_network_for_nothing_and_leads_to_perfetto_alone(seen: Page) -> None:
    for tag, attributes in seen.tags:
        for name in ("src", "srcset", "action", "poster", "xlink:href", "data"):
            assert attributes.get(name) is None, f"<{tag} {name}={attributes.get(name)}>"
        target = attributes.get("href")
        assert target is None or target.startswith(("#", "data:")) or (tag, target) == ("a", PERFETTO)
    ids = [attributes["id"] for _, attributes in seen.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link["href"] for link in seen.having("a")} - {PERFETTO} <= {f"#{name}" for name in ids}


def test_hostile_names_stay_text(tmp_path: Path, seen: Page) -> None:
    text = traces.page([hostile(tmp_path)])
    found = Page(text)
    assert "<script>alert" not in text
    assert "<img" not in text
    assert not found.having("img")
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    # As many scripts as a page has for one trace whose file it holds.
    assert [kind for kind, _ in found.scripts].count(None) == [kind for kind, _ in seen.scripts].count(None)
    assert sum(kind in DATA for kind, _ in found.scripts) == 9
    assert found.text.count("<script>alert(1)</script>") > 10
    figures = [
        json.loads(content) for kind, content in found.scripts if kind == DATA[0] and content.startswith('{"data"')
    ]
    names = [trace.get("name", "") for figure in figures for trace in figure["data"]]
    assert any(name.startswith("&lt;/script&gt;&lt;script&gt;alert(1)") for name in names)
    told = [text for figure in figures for text in (figure["layout"].get("meta") or {}).get("texts", ())]
    assert any("&lt;script&gt;alert(1)" in text.replace("<br>", "") for text in told)


def test_each_trace_has_its_timeline_layer_and_charts(seen: Page) -> None:
    sections = [section["id"] for section in seen.having("section")]
    jobs = ["job-0", "waits-0", "job-1", "waits-1"]
    assert sections == ["verdict", *jobs, "tables", "trace-0", "trace-1", "trace-2", "words", "made"]
    figures = {box["id"] for box in seen.having("div") if box.get("class") == "chart"}
    charts = ("timeline-0", "layer", "steps", "memory")
    slowest = {f"trace-{n}-timeline-1" for n in range(2)}  # the CPU's steps are equal
    each = {f"trace-{n}-{chart}" for n in range(3) for chart in charts}
    assert figures == {"ranks", "sides"} | slowest | each
    for box in seen.having("div"):
        if box.get("class") == "chart":
            assert seen.text.count(str(box["aria-label"])) >= 1
    assert seen.text.index("The largest loss is ") < seen.text.index(traces.FEW) < seen.text.index("Timeline of")
    assert seen.text.index("of median length") < seen.text.index("Timeline of step 2, the slowest")


def test_jobs_share_one_scale_if_their_steps_are_alike(tmp_path: Path) -> None:
    made = [(traces.gpu(layers=6), "a.json"), (traces.gpu(layers=6, slow_comm=1.4), "b.json")]
    found = [traces.trace(tmp_path, one, file=name, job=n) for n, (one, name) in enumerate(made)]
    page = Page(traces.page(found))
    figures = [json.loads(content) for kind, content in page.scripts if kind == DATA[0] and content[:8] == '{"data":']
    steps = [one for one in figures if one["layout"].get("xaxis", {}).get("title", {}).get("text", "").endswith("step")]
    bars, *rest = (one for one in steps if "rows" in one["layout"]["meta"])
    timelines = [one["layout"]["xaxis"]["range"] for one in steps if "texts" in one["layout"]["meta"]]
    assert [row["text"] for row in bars["layout"]["meta"]["rows"]] == ["a", "b"]
    assert len(rest) == len(found)  # the steps of each trace; no bar of a job alone
    assert timelines[0] == timelines[2]
    assert "a has the shortest step, " in page.text.replace("\N{NO-BREAK SPACE}", " ")
    apart = [found[0], traces.trace(tmp_path, traces.gpu(layers=24), file="c.json", job=1)]
    assert one_scale(found) > 0 == one_scale(apart)


def test_a_trace_without_steps_is_called_a_trace(tmp_path: Path) -> None:
    timeline = traces.gpu(layers=2, steps=1)
    spans = timeline.spans
    whole = Window(step=None, start=int(spans.starts.min()), end=int(spans.ends.max()))
    text = Page(traces.page([traces.trace(tmp_path, replace(timeline, windows=(whole,)))])).text
    for word in ("Timeline of the whole trace", "Where the time goes", "of the trace ("):
        assert word in text
    for word in ("step None", "1 step", "nan", "None"):
        assert word not in text


@pytest.mark.slow
def test_a_page_of_cpus_calls_no_idle_time_launch_bound(tmp_path: Path) -> None:
    made = [traces.cpu(rank=rank) for rank in (0, 1)]
    known = [replace(one, spans=replace(one.spans, launches=one.spans.starts, queued=one.spans.starts)) for one in made]
    written = traces.page([traces.trace(tmp_path, one, file=f"rank{one.rank}.json") for one in known])
    assert "idle, launch-bound" not in written
    assert "idle, between operators" in written
    gpu = traces.page([traces.trace(tmp_path, traces.gpu(layers=2), file="gpu.json")])
    assert "idle, launch-bound" in gpu
    assert "idle, between operators" not in gpu


def contents(text: str) -> list[bytes]:
    return [base64.b64decode(content) for kind, content in Page(text).scripts if kind == DATA[1]]


def test_small_traces_travel_in_the_page_as_gzip(whole: str, shown: list[Analysis]) -> None:
    one, other, plain = contents(whole)
    assert traces.page(shown) == whole
    assert one == shown[0].path.read_bytes()
    assert other == shown[1].path.read_bytes()
    assert gzip.decompress(plain) == shown[2].path.read_bytes()


@pytest.mark.slow
def test_large_and_lost_traces_are_asked_for(tmp_path: Path) -> None:
    timeline = traces.gpu(layers=2)
    noise = np.random.default_rng(0).bytes(embed.MOST_EMBEDDED + 1)
    large = traces.trace(tmp_path, timeline, file="large.json.gz", content=b"\x1f\x8b" + noise)
    lost = traces.analysis(traces.figures(timeline), timeline, tmp_path / "gone.json.gz")
    text = traces.page([large, lost])
    assert contents(text) == []
    assert len([box for box in Page(text).having("input") if box["type"] == "file"]) == 2
    assert "gone.json.gz" in text


@pytest.mark.slow
def test_all_traces_together_keep_to_their_limit(tmp_path: Path) -> None:
    content = b"\x1f\x8b" + bytes(embed.MOST_EMBEDDED - 2)
    many = [
        traces.trace(tmp_path, traces.cpu(rank=rank, layers=2, steps=1), content=content)
        for rank in range(embed.MOST_EMBEDDED_TOGETHER // embed.MOST_EMBEDDED + 2)
    ]
    assert len(contents(traces.page(many))) == len(many) - 2


def test_a_trace_in_which_nothing_ran_can_be_shown(tmp_path: Path) -> None:
    full = traces.trace(tmp_path, traces.gpu(layers=2))
    nothing = msgspec.structs.replace(full.figures.whole, **dict.fromkeys(full.figures.whole.__struct_fields__, 0))
    figures = msgspec.structs.replace(
        full.figures, whole=nothing, steps=(), units=(), collectives=(), waits_for=(), memory=(), warnings=()
    )
    empty = traces.analysis(figures, Timeline(rank=0, windows=(), spans=spans_of([])))
    text = Page(traces.page([empty])).text
    assert "Overheads, over the whole trace" in text
    assert "Collectives, the most exposed" not in text
