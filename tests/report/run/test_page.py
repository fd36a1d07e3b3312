"""The page: self-contained, escaped, complete, and replaced whole or not at all."""

import base64
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plotly.offline import get_plotlyjs_version

from refshard import resources
from refshard.analysis.evidence import gather
from refshard.folders import replace_file
from refshard.records import GpuUse, Run
from refshard.report.draw.render import PLOTLY
from refshard.report.run.page import SCRIPTS, card, index_page, page, views_of, write_dashboard
from refshard.report.run.tables import power_table
from refshard.report.run.trust import in_short
from refshard.report.run.trust import trust as trust_facts
from tests.analysis.test_evidence import later
from tests.report.pages import Page
from tests.report.printed import rows
from tests.report.runs import CASES, HOSTILE, run, with_record

CHARTS = {"v0-tradeoff", "v0-breakdown", "v0-over-step", "t0-losses"}


def drawn(made: Run) -> Page:
    return Page("".join(page(gather(made))))


@pytest.fixture(scope="module")
def whole() -> str:
    return "".join(page(gather(run())))


@pytest.fixture(scope="module")
def seen(whole: str) -> Page:
    return Page(whole)


def test_the_page_asks_the_network_for_nothing(seen: Page) -> None:
    for tag, attributes in seen.tags:
        for name in ("src", "href", "srcset", "action", "poster"):
            target = attributes.get(name)
            assert target is None or target.startswith(("#", "data:")), f"<{tag} {name}={target}>"
    assert "url(" not in seen.style
    assert "@import" not in seen.style


def test_plotly_is_there_once_and_packed(seen: Page) -> None:
    """Its basic bundle, of the version that the figures are made for; the page may run what it inflates to."""
    kinds = [kind for kind, _ in seen.scripts]
    assert kinds == [
        *["application/json"] * len(CHARTS),
        "application/gzip",
        "application/json",
        *[None] * len(SCRIPTS),
    ]
    packed = base64.b64decode(seen.scripts[-2 - len(SCRIPTS)][1])
    assert packed == (resources.dashboards() / PLOTLY).read_bytes()
    bundle = gzip.decompress(packed).decode()
    assert f"plotly.js (basic - minified) v{get_plotlyjs_version()}" in bundle[:200]
    assert seen.allows(bundle)


def test_the_policy_allows_the_pages_own_scripts_and_no_network(seen: Page) -> None:
    assert seen.policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "'unsafe-inline'" not in seen.policy.partition("script-src")[2].partition(";")[0]
    for kind, text in seen.scripts:
        assert seen.allows(text) == (kind is None)
    assert seen.policy.count("sha256-") == len(SCRIPTS) + 1


def test_logs_and_errors_are_text_and_never_markup(whole: str, seen: Page) -> None:
    assert HOSTILE not in whole
    assert HOSTILE in seen.text
    assert "<img src=x onerror=alert(2)>" in seen.text
    assert not seen.having("img")
    assert len(seen.scripts) == len(CHARTS) + 2 + len(SCRIPTS)


def test_hostile_strategies_and_titles_stay_text() -> None:
    made = run([replace(case, strategy=HOSTILE) for case in CASES[1:2]], rounds=1, failed=False)
    suite = msgspec.structs.replace(made.header.suite, about='"><b onclick=alert(3)>')
    made = msgspec.structs.replace(made, header=msgspec.structs.replace(made.header, suite=suite, run_id=HOSTILE))
    found = drawn(made)
    assert [kind for kind, _ in found.scripts].count(None) == len(SCRIPTS)
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    assert found.text.count(HOSTILE) > 5


def data_of(seen: Page) -> dict[str, Any]:
    """What the page's own script reads."""
    return json.loads(seen.scripts[-1 - len(SCRIPTS)][1])  # type: ignore[no-any-return]


def figures_of(seen: Page) -> dict[str, Any]:
    """Plotly's data by chart: each lies in its chart's box."""
    boxes = [box["id"] for box in seen.having("div") if box.get("class") == "chart"]
    found = [json.loads(text) for kind, text in seen.scripts[: -1 - len(SCRIPTS)] if kind == "application/json"]
    assert len(boxes) == len(found)
    return {str(id_): figure for id_, figure in zip(boxes, found)}


def test_data_of_the_charts_survives_its_escaping(seen: Page) -> None:
    figures = figures_of(seen)
    assert set(figures) == CHARTS
    (points,) = [trace for trace in figures["v0-tradeoff"]["data"] if (trace.get("meta") or {}).get("labels")]
    assert dict(zip(points["text"], points["x"]))["ddp"] == 440


def test_the_theme_is_there_once(seen: Page) -> None:
    data = data_of(seen)
    assert data["theme"]["layout"]["paper_bgcolor"] == "rgba(0,0,0,0)"
    assert not any("template" in figure["layout"] for figure in figures_of(seen).values())


def test_every_chart_has_its_place_and_its_sentence(seen: Page) -> None:
    boxes = [box for box in seen.having("div") if box.get("class") == "chart"]
    assert {box["id"] for box in boxes} == CHARTS
    for box in boxes:
        sentence = box["aria-label"]
        assert sentence
        assert seen.text.count(sentence) == 1


def test_rows_of_cases_carry_their_numbers(seen: Page) -> None:
    """The script's filter goes by them: each case has its row in each of the tables, and its strategy."""
    data = data_of(seen)
    assert data["cases"] == ["single", "ddp", "fsdp2", "fsdp2-tuned", *NAMES[3:]]
    rows = [row.get("data-case") for row in seen.having("tr")]
    assert {row for row in rows if row is not None} == {str(number) for number in range(6)}
    assert data["pairs"][0][:2] == [1, 2]
    assert data["pairs"][0][2] == pytest.approx(1.2, rel=0.01)


NAMES = [case.strategy for case in CASES]


def test_the_page_is_in_the_order_of_a_readers_questions(seen: Page) -> None:
    assert [section["id"] for section in seen.having("section")] == [
        "verdict", "why", "memory", "losses", "record",
    ]  # fmt: skip


def test_tables_are_told_by_their_captions_and_scopes(seen: Page) -> None:
    assert len(seen.having("caption")) == len(seen.having("table")) > 5
    assert all(cell.get("scope") in ("col", "row") for cell in seen.having("th"))


def test_a_keyboard_reaches_the_verdict_first(seen: Page) -> None:
    links = seen.having("a")
    assert (links[0]["class"], links[0]["href"]) == ("skip", "#verdict")
    ids = {attributes.get("id") for _, attributes in seen.tags}
    empty = {"#scaling", "#power"}  # the script hides links to what this comparison does not have
    assert {link["href"] for link in links} <= {f"#{name}" for name in ids} | empty


def test_ids_are_unique(seen: Page) -> None:
    ids = [attributes["id"] for _, attributes in seen.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_words_that_the_project_avoids_are_not_on_the_page(seen: Page) -> None:
    assert not re.search(r"\b(GB|iterations?|TPS)\b", seen.text)


def test_the_same_run_gives_the_same_page(whole: str) -> None:
    assert "".join(page(gather(run()))) == whole


@pytest.mark.parametrize("made", [run(CASES[:1], failed=False), run(rounds=1), run(rounds=3, failed=False)])
def test_any_run_can_be_drawn(made: Run) -> None:
    assert drawn(made).having("table")


def test_a_run_cut_off_before_its_first_case_can_be_drawn() -> None:
    found = drawn(msgspec.structs.replace(run(), launches=(), end=None))
    assert "No case finished yet." in found.text
    assert "the run was cut off: it has no closing record" in found.text


def test_a_dashboard_is_one_file(tmp_path: Path) -> None:
    write_dashboard(gather(run()), tmp_path / "dashboard.html")
    (file,) = tmp_path.iterdir()
    assert file.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_log_that_is_not_unicode_does_not_stop_the_page(tmp_path: Path) -> None:
    made = with_record(run(), -1, log_tail=("half a pair: \ud800",))
    write_dashboard(gather(made), tmp_path / "dashboard.html")
    assert "half a pair: " in (tmp_path / "dashboard.html").read_text(encoding="utf-8")


def failing() -> Iterator[str]:
    yield "half a page"
    raise RuntimeError("the template broke")


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "dashboard.html"
    target.write_text("old")
    with pytest.raises(RuntimeError, match="the template broke"):
        replace_file(target, failing())
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_target_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        replace_file(tmp_path / "taken", ["page"])
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_old_file_stays_readable_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "dashboard.html"
    target.write_text("old")
    seen_meanwhile = []

    def pieces() -> Iterator[str]:
        yield "new"
        seen_meanwhile.append(target.read_text())

    replace_file(target, pieces())
    assert seen_meanwhile == ["old"]
    assert target.read_text() == "new"


def test_a_page_of_emulated_cases_says_so_and_shows_no_loss() -> None:
    text = "".join(page(gather(run(rounds=1, failed=False, fidelity="emulated"))))
    seen = Page(text).text
    assert "Not measured, but emulated on dgx-h100" in seen
    assert "emulated on dgx-h100" in seen
    assert not [tag for tag in Page(text).having("section") if tag.get("id") == "losses"]


def many(settings: int) -> Run:
    """A run whose cases stand in as many settings, by their sequence lengths."""
    made = run(CASES[1:3], rounds=1, failed=False)
    records = [
        msgspec.structs.replace(record, case=record.case.changed(seq_len=256 + place))
        for place in range(settings)
        for record in made.launches
    ]
    return msgspec.structs.replace(made, launches=tuple(records))


def test_of_many_comparisons_the_first_is_shown_and_the_others_wait_in_templates() -> None:
    whole = "".join(page(gather(many(12))))
    seen = Page(whole)
    assert [tag["id"] for tag in seen.having("template")] == [f"v{place}" for place in range(1, 12)]
    options = [tag for tag in seen.having("option") if str(tag["value"]).startswith("v")]
    assert len(options) == 12
    assert "2 ranks, global batch of 8 sequences of 267 tokens" in seen.text, "the name that it is chosen by"
    shown = Page(re.sub(r"<template.*?</template>", "", whole, flags=re.DOTALL))
    assert {box["id"] for box in shown.having("div") if box.get("class") == "chart"} == {*CHARTS, "x0-crossover"}


def test_names_of_comparisons_leave_out_what_all_share() -> None:
    assert [view.name for view in views_of(gather(many(2)), {})] == [
        "2 ranks, global batch of 8 sequences of 256 tokens", "2 ranks, global batch of 8 sequences of 257 tokens",
    ]  # fmt: skip
    assert [view.name for view in views_of(gather(many(1)), {})] == ["2 ranks"]


def test_trust_is_one_line_that_unfolds(seen: Page) -> None:
    (trust,) = [tag for tag in seen.having("details") if tag.get("id") == "trust"]
    assert "open" not in trust
    facts = in_short(trust_facts(gather(run())))
    assert [fact.label for fact in facts] == ["Fidelity", "Proof of run", "Loss parity", "Noise"]


def test_proof_states_and_reproduction_are_folded(seen: Page) -> None:
    folds = [tag for tag in seen.having("details") if tag.get("class") == "fold"]
    assert len(folds) > 6
    assert not any("open" in tag for tag in folds)


def test_hostile_names_cannot_end_a_template() -> None:
    hostile = "</template><script>alert(1)</script>"
    made = many(3)
    records = [
        msgspec.structs.replace(record, case=record.case.changed(strategy=hostile))
        if record.case.job.strategy == "ddp"
        else record
        for record in made.launches
    ]
    found = drawn(msgspec.structs.replace(made, launches=tuple(records)))
    assert [kind for kind, _ in found.scripts].count(None) == len(SCRIPTS)
    assert not any("alert(1)" in text for kind, text in found.scripts if kind is None)


def test_power_and_clocks_are_shown_where_they_were_recorded() -> None:
    use = GpuUse(gpu=0, samples=10, power_w=650.4, max_power_w=700.0, sm_clock_mhz=1700.0, min_sm_clock_mhz=1200,
                 throttled={"power cap": 5})  # fmt: skip
    made = with_record(run(failed=False), 1, gpu_use=(use, replace_use(use)))
    assert "Power and clocks" not in drawn(run()).text
    assert rows(power_table(gather(made).cases)) == [
        {
            "case": "ddp, 2 ranks", "power, mean": "600 W", "power, highest": "700 W", "SM clock, mean": "1,700 MHz",
            "SM clock, lowest": "1,100 MHz", "throttled": "power cap 25.0 %",
        }
    ]  # fmt: skip
    assert "power cap 25.0 %" in drawn(made).text


def replace_use(use: GpuUse) -> GpuUse:
    """The second GPU's."""
    return msgspec.structs.replace(use, gpu=1, power_w=549.6, min_sm_clock_mhz=1100, throttled={})


def test_a_card_has_the_verdict_what_failed_and_the_way_to_the_page() -> None:
    found = card(gather(run()), "made.html")
    assert found.verdict == "refshard-yafsdp is fastest (40.0 ms per step) and needs the least memory (240 MiB)."
    assert found.failed == "1 of 6 cases did not end ok."
    assert found.origin == "2026-03-01 10:00, quiet-oak, measured"
    assert [fact.label for fact in found.facts] == ["Proof of run", "Loss parity", "Noise"]


def test_a_run_without_cases_has_a_card() -> None:
    found = card(gather(msgspec.structs.replace(run(), launches=())), "made.html")
    assert found.verdict == "No case finished yet."
    assert found.failed == "Nothing was launched."


def test_the_index_has_a_card_each_and_the_trend() -> None:
    every = [gather(run(CASES, failed=False)), gather(later(run(CASES, failed=False), "now"))]
    text = "".join(index_page([card(one, f"{place}.html") for place, one in enumerate(every)], every))
    seen = Page(text)
    assert len([item for item in seen.having("li") if item.get("class") == "card"]) == 2
    assert {"0.html", "1.html"} <= {link["href"] for link in seen.having("a")}
    assert "Trend of each case over runs" in seen.text


def test_hostile_names_stay_text() -> None:
    made = run(failed=False)
    suite = msgspec.structs.replace(made.header.suite, about=HOSTILE)
    evidence = gather(msgspec.structs.replace(made, header=msgspec.structs.replace(made.header, suite=suite)))
    text = "".join(index_page([card(evidence, "a.html")], [evidence]))
    assert HOSTILE not in text
    assert HOSTILE in Page(text).text
