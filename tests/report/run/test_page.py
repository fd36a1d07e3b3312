"""The page: self-contained, escaped, complete, and replaced whole or not at all."""

import base64
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plotly.offline import get_plotlyjs_version

from refshard import resources
from refshard.analysis.evidence import gather
from refshard.folders import replace_file
from refshard.records import Run
from refshard.report.blocks import Table
from refshard.report.page import PLOTLY, SCRIPTS, as_page
from refshard.report.run.page import index_answer, page, views_of, write_dashboard
from tests.report.pages import Page
from tests.report.printed import rows
from tests.report.runs import CASES, HOSTILE, joined, later, run, with_record, with_spec, with_suite

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
        *[None] * (len(SCRIPTS) + 1),
    ]
    packed = base64.b64decode(seen.scripts[-3 - len(SCRIPTS)][1])
    assert packed == (resources.dashboards() / PLOTLY).read_bytes()
    bundle = gzip.decompress(packed).decode()
    assert f"plotly.js (basic - minified) v{get_plotlyjs_version()}" in bundle[:200]
    assert seen.allows(bundle)


def test_the_policy_allows_the_pages_own_scripts_and_no_network(seen: Page) -> None:
    assert seen.policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "'unsafe-inline'" not in seen.policy.partition("script-src")[2].partition(";")[0]
    for kind, text in seen.scripts:
        assert seen.allows(text) == (kind is None)
    assert seen.policy.count("sha256-") == len(SCRIPTS) + 2


def data_of(seen: Page) -> dict[str, Any]:
    """What the page's own script reads."""
    return json.loads(seen.scripts[-2 - len(SCRIPTS)][1])  # type: ignore[no-any-return]


def figures_of(seen: Page) -> dict[str, Any]:
    """Plotly's data by chart: each lies in its chart's box."""
    boxes = [box["id"] for box in seen.having("div") if box.get("class") == "chart"]
    found = [json.loads(text) for kind, text in seen.scripts[: -2 - len(SCRIPTS)] if kind == "application/json"]
    assert len(boxes) == len(found)
    return {str(id_): figure for id_, figure in zip(boxes, found)}


def test_data_of_the_charts_survives_its_escaping(seen: Page) -> None:
    figures = figures_of(seen)
    assert set(figures) == CHARTS
    (points,) = [trace for trace in figures["v0-tradeoff"]["data"] if (trace.get("meta") or {}).get("labels")]
    assert dict(zip(points["text"], points["x"]))["ddp"] == 440


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


def test_a_keyboard_reaches_the_verdict_first(seen: Page) -> None:
    links = seen.having("a")
    assert (links[0]["class"], links[0]["href"]) == ("skip", "#verdict")
    ids = {attributes.get("id") for _, attributes in seen.tags}
    empty = {"#scaling", "#power"}  # the script hides links to what this comparison does not have
    assert {link["href"] for link in links} <= {f"#{name}" for name in ids} | empty


@pytest.mark.parametrize("made", [run(CASES[:1], failed=False), run(rounds=1), run(rounds=3, failed=False)])
def test_any_run_can_be_drawn(made: Run) -> None:
    assert drawn(made).having("table")


def test_a_run_cut_off_before_its_first_case_can_be_drawn() -> None:
    found = drawn(msgspec.structs.replace(run(), launches=(), end=None))
    assert "No case finished yet." in found.text
    assert "the run was cut off: it has no closing record" in found.text


def test_headings_ids_and_folds_are_sound(seen: Page) -> None:
    assert len(seen.having("caption")) == len(seen.having("table")) > 5
    assert all(cell.get("scope") in ("col", "row") for cell in seen.having("th"))
    ids = [attributes["id"] for _, attributes in seen.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    folds = [tag for tag in seen.having("details") if tag.get("class") == "fold" or tag.get("id") == "trust"]
    assert len(folds) > 6
    assert not any("open" in tag for tag in folds)


def many(settings: int) -> Run:
    """A run whose cases are in several settings, by their sequence lengths."""
    made = run(CASES[1:3], rounds=1, failed=False)
    return joined(made, *(with_spec(made, seq_len=256 + place) for place in range(1, settings)))


def test_the_first_of_many_comparisons_is_shown_and_the_others_are_in_templates() -> None:
    whole = "".join(page(gather(many(12))))
    seen = Page(whole)
    assert [tag["id"] for tag in seen.having("template")] == [f"v{place}" for place in range(1, 12)]
    assert len([tag for tag in seen.having("option") if str(tag["value"]).startswith("v")]) == 12
    shown = Page(re.sub(r"<template.*?</template>", "", whole, flags=re.DOTALL))
    assert {box["id"] for box in shown.having("div") if box.get("class") == "chart"} == {*CHARTS, "x0-crossover"}


def test_names_of_comparisons_leave_out_what_all_share() -> None:
    assert [view.name for view in views_of(gather(many(2)), {})] == [
        "2 ranks, global batch of 8 sequences of 256 tokens", "2 ranks, global batch of 8 sequences of 257 tokens",
    ]  # fmt: skip
    assert [view.name for view in views_of(gather(many(1)), {})] == ["2 ranks"]


def test_logs_names_and_titles_are_text_and_never_markup(whole: str, seen: Page) -> None:
    assert HOSTILE not in whole
    assert {HOSTILE in seen.text, "<img src=x onerror=alert(2)>" in seen.text, not seen.having("img")} == {True}
    for name in (HOSTILE, f"</template>{HOSTILE}"):
        made = with_suite(many(2), about='"><b onclick=alert(3)>')
        made = msgspec.structs.replace(made, header=msgspec.structs.replace(made.header, run_id=name))
        for place, record in enumerate(made.launches):
            if record.case.job.strategy == "ddp":
                case = record.case.changed(strategy=name)
                made = with_record(made, place, case=case, log_tail=("half a pair: \ud800",))
        for found in (drawn(made), Page("".join(as_page(index_answer({"a": gather(made)}), product="", command=name)))):
            scripts = len(SCRIPTS) + (found.text.count("All figures") > 0)
            assert [kind for kind, _ in found.scripts].count(None) == scripts
            assert not any(key.startswith("on") for _, attributes in found.tags for key in attributes)
            assert HOSTILE in found.text


def test_a_run_without_cases_has_a_row_on_the_index() -> None:
    table = index_answer({"a.html": gather(msgspec.structs.replace(run(), launches=()))}).blocks[0]
    assert isinstance(table, Table)
    assert rows(table)[0]["verdict"] == "Nothing was launched. No case finished yet."


def test_the_index_has_a_link_to_each_run_and_the_trend() -> None:
    every = {"0.html": gather(run(CASES, failed=False)), "1.html": gather(later(run(CASES, failed=False), "now"))}
    seen = Page("".join(as_page(index_answer(every), product="report", command="")))
    assert every.keys() <= {link["href"] for link in seen.having("a")}
    assert "Trend of each case over runs" in seen.text


def test_the_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "dashboard.html"
    write_dashboard(gather(run(CASES[:1])), target)
    old = target.read_text()
    seen_meanwhile = []

    def pieces(error: bool) -> Iterator[str]:
        yield "new"
        seen_meanwhile.append(target.read_text())
        if error:
            raise RuntimeError("the template broke")

    with pytest.raises(RuntimeError, match="the template broke"):
        replace_file(target, pieces(error=True))
    assert target.read_text() == old
    replace_file(target, pieces(error=False))
    assert (target.read_text(), seen_meanwhile) == ("new", [old, old])
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        replace_file(tmp_path / "taken", ["page"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dashboard.html", "taken"]
