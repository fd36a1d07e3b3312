"""The page that leads to several runs: a card each."""

import msgspec

from refshard.analysis.evidence import gather
from refshard.report.run.page import card, index_page
from tests.analysis.test_evidence import later
from tests.report.pages import Page
from tests.report.runs import CASES, HOSTILE, run


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
