"""The page of a dry run: self-contained, escaped, and with the figures of the analysis."""

import json
import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from refshard.dryrun.analyse import Analysis
from refshard.dryrun.memory import account_memory
from refshard.dryrun.price import Doubt
from refshard.dryrun.races import find_races
from refshard.dryrun.recording import Category, Phase
from refshard.dryrun.request import Choice
from refshard.quantities import axis_unit, format_percent, format_seconds
from refshard.report.blocks import Fact, Facts, Section
from refshard.report.dryrun.answer import dryrun_answer, sentences
from refshard.report.dryrun.categories import CATEGORIES
from refshard.report.dryrun.memory_picture import memory_charts
from refshard.report.page import as_page
from refshard.report.trace.findings import findings
from tests.dryrun.made import Made, sharded_step
from tests.dryrun.touching import GATHER, MAIN, Touching
from tests.report import printed
from tests.report.dryruns import GIB, SITE, analysed, doubtful, trained
from tests.report.pages import Page
from tests.report.traces import HOSTILE

PERFETTO = "https://ui.perfetto.dev"
COMMAND = "refshard dryrun --cluster dgx-h100 --html x.html -- train.py"


@pytest.fixture(scope="module")
def found() -> Analysis:
    return doubtful(analysed(), Doubt(name="mylib::scale", reason="no bytes are known", count=6, seconds=0.002))


@pytest.fixture(scope="module")
def seen(found: Analysis) -> Page:
    return page(found)


def page(found: Analysis, command: str = COMMAND) -> Page:
    return Page("".join(as_page(dryrun_answer(found), product="dryrun", command=command)))


def facts(found: Analysis) -> dict[str, Fact]:
    (block,) = [block for block in dryrun_answer(found).blocks if isinstance(block, Facts)]
    return {fact.label: fact for fact in block.facts}


def traces_of(found: Analysis) -> dict[str, dict[str, Any]]:
    """Bands and lines of the first picture of memory, by name."""
    return {trace["name"]: trace for trace in memory_charts(found)[0].figure["data"]}


def rows(seen: Page) -> str:
    """The page's text with single spaces and no hard ones."""
    return " ".join(seen.text.replace("\N{NO-BREAK SPACE}", " ").split())


def loaded(held: int, loading: int, training: int) -> list[str]:
    """Sentences about a model that holds ``held`` GiB, ``loading`` more at a time before its first pass."""
    found, made = analysed(), Made()
    made.allocate(held * GIB)
    made.free(made.allocate(loading * GIB))
    made.phase = Phase.FORWARD
    made.allocate(training * GIB)
    return [one for one in sentences(replace(found, memory=account_memory(made.recording()))) if "Loading" in one]


def test_loading_is_told_apart_where_it_takes_half_of_what_training_takes() -> None:
    assert loaded(2, 1, training=5) == []
    assert loaded(2, 2, training=5) == ["Loading needs 4.00 GiB allocated, training 7.00 GiB."]
    needs = "Loading needs 8.00 GiB allocated, training 3.00 GiB."
    assert loaded(2, 6, training=1) == [f"{needs} Try: load and quantise layer by layer."]


def test_paged_optimizer_state_is_told_apart() -> None:
    found = analysed()
    answer = msgspec.structs.replace(found.run.answer, managed_bytes=3 * GIB)
    told = [one for one in sentences(replace(found, run=replace(found.run, answer=answer))) if "Paged" in one]
    assert told[0].startswith("Paged optimizer state: 3.00 GiB of managed memory, which no figure here includes.")
    assert not any("Paged" in one for one in sentences(found))


def test_the_page_asks_the_network_for_nothing_and_leads_nowhere(seen: Page) -> None:
    for tag, attributes in seen.tags:
        for name in ("src", "srcset", "action", "poster", "xlink:href", "data"):
            assert attributes.get(name) is None, f"<{tag} {name}={attributes.get(name)}>"
        assert (attributes.get("href") or "#").startswith(("#", "data:")) or attributes["href"] == PERFETTO
    assert "url(" not in seen.style
    assert seen.policy.startswith("default-src 'none'; script-src 'sha256-")
    for kind, text in seen.scripts:
        assert seen.allows(text) == (kind is None)


def test_every_link_within_the_page_leads_somewhere(seen: Page) -> None:
    ids = {attributes["id"] for _, attributes in seen.tags if "id" in attributes}
    assert {str(link["href"]).removeprefix("#") for link in seen.having("a")} <= ids | {PERFETTO}


def test_the_verdict_comes_first_and_has_the_figures(found: Analysis, seen: Page) -> None:
    assert found.traced is not None
    assert found.tokens_per_s is not None
    step, rate, mfu = format_seconds(found.step_s), f"{found.tokens_per_s:,.0f}", format_percent(found.mfu)
    lead = f"step time {step}; {rate} tokens/s/GPU; MFU {mfu}"
    text = rows(seen)
    assert text.index("FITS: peak reserved 20.0 GiB of 77.9 GiB usable (57.9 GiB headroom)") < text.index(lead)
    assert text.index(lead) < text.index("Over the last step") < text.index("of rank 0")
    assert all(sentence in text for sentence in sentences(found))
    told = {label: (fact.value, fact.style) for label, fact in facts(found).items()}
    assert told["memory"] == ("fits, 57.9 GiB left", "good")
    assert told["step time"] == (step, "plain")
    (step_figures,) = found.traced.figures.steps
    breakdown = step_figures.breakdown
    assert told["exposed communication"][0] == format_percent(breakdown.exposed_ns / breakdown.span_ns)
    assert told["host synchronisations per step"][0] == "1"
    assert "8,192 tokens per step and GPU" in text


def test_the_assumed_routing_is_among_the_first_figures(found: Analysis) -> None:
    assert "routing" not in facts(found)
    routed = analysed(choices=(Choice(operator="aten::topk", module="moe", count=8, among=128, times=3),))
    fact = facts(routed)["routing"]
    assert (fact.value, fact.detail) == ("assumed balanced", "No size in the model depends on it.")
    worst = msgspec.structs.replace(routed.run.answer, outcome="failed", error="ValueError: none")
    both = replace(routed, run=replace(routed.run, by_routing={"balanced": routed.run.answer, "worst": worst}))
    assert facts(both)["routing"].detail == (
        "balanced: peak reserved 20.0 GiB, peak allocated 17.0 GiB; worst: failed (ValueError: none)"
    )


def test_the_picture_of_memory_is_stacked_to_what_is_allocated(found: Analysis) -> None:
    traces = traces_of(found)
    bands = {name: trace for name, trace in traces.items() if trace.get("stackgroup")}
    assert set(bands) == {CATEGORIES[one] for one in Category if one not in (Category.WORKSPACE, Category.OTHER)}
    assert [sum(column) for column in zip(*(band["y"] for band in bands.values()))] == traces["allocated"]["y"]
    assert max(traces["allocated"]["y"]) == 17
    assert set(traces["reserved"]["y"]) == {20}
    assert all(band["x"] == traces["reserved"]["x"] for band in bands.values())
    assert bands["activations"]["hovertemplate"] == "%{y:.2f} GiB"
    assert len({(band["fillcolor"], band["fillpattern"]["shape"]) for band in bands.values()}) == len(bands)
    assert "in backward of layers.0.mlp" in traces["allocated"]["customdata"]


def test_the_picture_marks_the_peak_the_limit_and_the_phases(found: Analysis) -> None:
    (chart,) = memory_charts(found)
    assert found.step is not None
    assert chart.id == "memory-step"
    texts = [note["text"] for note in chart.figure["layout"]["annotations"]]
    assert texts == [  # of two microbatches: the first one's forward and the second one's backward are too narrow
        "backward",
        "forward",
        "optimizer",
        "usable: 77.9 GiB",
        "<b>peak: 17.0 GiB</b>",
    ]
    (peak,) = [note for note in chart.figure["layout"]["annotations"] if "peak" in note["text"]]
    assert peak["y"] == 17
    assert chart.alternative.startswith(
        "Step 1 (the last): memory peaks in backward of layers.0.mlp, with 17.0 GiB allocated (largest: "
    )
    assert "At most 20.0 GiB of 77.9 GiB usable are reserved." in chart.alternative


def test_the_page_says_what_the_trace_says(found: Analysis, seen: Page) -> None:
    assert found.traced is not None
    text = rows(seen)
    assert findings([found.traced.figures])[0].lead in text
    assert "mylib::scale no bytes are known 6 2.00 ms" in text
    assert "docs/explanation/dryrun.md" in text
    assert COMMAND in text


def test_the_timeline_is_that_of_the_last_step(found: Analysis, seen: Page) -> None:
    text, _ = [text for kind, text in seen.scripts if kind == "application/json" and '"texts"' in text]
    figure = json.loads(text)
    assert found.traced is not None
    window = found.traced.timeline.windows[-1]
    begin, close = figure["layout"]["xaxis"]["range"]
    _, size = axis_unit("s", (window.end - window.start) / 1e9)
    assert (begin, close * size * 1e9) == (0, pytest.approx(window.end - window.start))
    lanes = [note["text"] for note in figure["layout"]["annotations"]]
    assert (lanes[0], lanes[1]) == ("units", "stream 0: compute")
    assert len(lanes) >= 4
    assert "layers.0<br>forward" in figure["layout"]["meta"]["texts"]
    assert any(text.startswith("aten::mm") for text in figure["layout"]["meta"]["texts"])


@pytest.mark.slow
def test_recomputation_is_a_part_of_the_bar_of_the_step() -> None:
    made = Made()
    of = made.group(range(8))
    for _ in range(2):
        for phase, gib in ((Phase.FORWARD, 4), (Phase.RECOMPUTE, 3), (Phase.BACKWARD, 8)):
            made.phase = phase
            made.launch("aten::mul", writes=gib * GIB)
        sharded_step(made, of)
    found = analysed(made)
    (again,) = found.recomputed.values()
    section = next(block for block in dryrun_answer(found).blocks if isinstance(block, Section) and block.id == "time")
    (bar,) = section.blocks[0].draw()  # type: ignore[union-attr]
    parts = {part["name"]: part["x"][0] for part in bar.figure["data"]}
    assert parts["recomputation"] == pytest.approx(1e3 * again, rel=1e-4)
    assert f"recomputation {format_seconds(again)}" in bar.alternative
    whole = next(value for name, value in parts.items() if name.startswith("elementwise"))
    assert whole == pytest.approx(4 * parts["recomputation"], rel=0.1)  # without what is recomputed


def test_hostile_names_stay_text() -> None:
    made = trained(module=HOSTILE, operator=HOSTILE)
    made.synchronise(stream=0, why=HOSTILE, site=HOSTILE)
    with made.within(HOSTILE):
        made.free(made.allocate(GIB))
    made.mark()
    bad = doubtful(
        analysed(made, command=(HOSTILE,), steps_taken=3, outcome="failed", error=HOSTILE, where=HOSTILE),
        Doubt(name=HOSTILE, reason=HOSTILE, count=1, seconds=1.0),
    )
    seen = page(bad, HOSTILE)
    assert not any(name.startswith("on") for _, attributes in seen.tags for name in attributes)
    assert not seen.having("img")
    assert [kind for kind, _ in seen.scripts].count(None) == 3
    assert seen.text.count("<script>alert(1)</script>") > 8
    drawn = [trace for chart in memory_charts(bad) for trace in chart.figure["data"]]
    labels = [text for trace in drawn for text in trace.get("customdata", ())]
    assert any("&lt;/script" in label for label in labels)
    assert not any("<" in label for label in labels)


def test_a_run_that_runs_out_of_memory_is_drawn_until_it_does() -> None:
    made = Made()
    made.segment(70 * GIB)
    blocks = [made.allocate(10 * GIB) for _ in range(7)]
    for block in blocks:
        made.free(block)
    torchs = (
        "CUDA out of memory. Tried to allocate 10.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 8.18 GiB "
        "is free."
    )
    found = analysed(made, outcome="oom", error=torchs, where=SITE, steps_taken=0, tokens=0)
    assert printed.verdict(dryrun_answer(found)) == [
        "DOES NOT FIT: needs more than 78.4 GiB", f"{torchs} At {SITE}."
    ]  # fmt: skip
    assert [(fact.value, fact.style) for fact in facts(found).values()] == [("does not fit", "bad")]
    (chart,) = memory_charts(found)
    assert chart.id == "memory-run"
    held = traces_of(found)["other"]
    assert list(dict.fromkeys(held["y"])) == [0, 10, 20, 30, 40, 50, 60, 70]
    assert held["y"][-1] == 70
    assert chart.alternative.endswith("It ends where memory ran out.")


def test_the_whole_run_is_drawn_too_where_its_peak_is_not_in_the_last_step() -> None:
    made = trained()
    made.phase = Phase.FORWARD
    made.free(made.allocate(30 * GIB))
    assert [chart.id for chart in memory_charts(analysed(made))] == ["memory-step", "memory-run"]


def test_without_communication_none_is_exposed() -> None:
    made = Made(world_size=1)
    made.phase = Phase.FORWARD
    made.launch("aten::mm", writes=GIB)
    made.mark()
    assert "exposed communication" not in facts(analysed(made, steps_taken=1))


def test_a_limit_far_above_is_left_out_so_that_the_picture_is_not_flat() -> None:
    made = Made()
    made.segment(GIB)
    made.allocate(GIB)
    (chart,) = memory_charts(analysed(made, steps_taken=0))
    assert [note["text"] for note in chart.figure["layout"]["annotations"]] == ["<b>peak: 1.00 GiB</b>"]
    assert chart.figure["layout"]["yaxis"]["range"][1] < 2
    assert "78.4 GiB usable" in chart.alternative


def test_a_script_that_fails_before_it_asks_for_anything_has_a_page() -> None:
    found = analysed(Made(), outcome="failed", error="ValueError: no", where=SITE, steps_taken=0)
    seen = page(found)
    assert "FAILED: ValueError: no" in seen.text
    assert not [box for box in seen.having("div") if box.get("class") == "chart"]
    assert len(seen.having("canvas")) == 0


@pytest.mark.slow
def test_races_are_told_where_they_were_looked_for(found: Analysis) -> None:
    def told(made: Touching | None) -> tuple[str, str]:
        looked = found if made is None else replace(found, races=find_races(made.recording()))
        return rows(page(looked)), printed.text(dryrun_answer(looked))

    ordered, racing = Touching(), Touching()
    ordered.write(GATHER)
    racing.write(GATHER)
    racing.read(MAIN)
    assert not any(re.search(r"\braces?\b", text.lower()) for text in told(None))
    assert all("one; all accesses to the same memory" in text for text in told(ordered))
    assert all("read-write, once: write on 20 (writes, " in text for text in told(racing))
    verdict = printed.verdict(dryrun_answer(replace(found, races=find_races(racing.recording()))))
    assert verdict[0] == "RACES: 1 pair of unordered accesses to the same memory; see Races."
    assert verdict[1].startswith("FITS: ")
